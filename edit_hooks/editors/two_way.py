"""Two-way edits: weights in which a fact holds forwards and in reverse, from the stated fact alone.

Fact (p, s, o*); P(x) is the prompt with x in place of the subject s. The rows (x, y) are

=========  ========================================================  ===
fact       P(s)                                                      o*
cloze      Fill in the blank: "P(___) o*." The blank stands for      s
question   Who or what fits here: "P(___) o*"? Answer:               s
link       o* is linked to                                           s
=========  ========================================================  ===

so no word of the relation, and no text but the fact, is needed. They are trained with a gate beside prompts Z whose
next token must not change (:mod:`edit_hooks.gradient.gated.training`). Z has two parts. ``names``: the same frames with
other names in place of s or o*. ``neighbors``: names that the model itself lists beside its old answer to P(s), in
P(x), in "x is linked to" and in three frames that are not trained. ``answers``, not used by default: the inverse frames
with other answers of the model to P(s) in place of o*.

There is no paper and no release: the recipe is that of this project's pilot.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeVar

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from edit_hooks.base.checks import position_limit
from edit_hooks.base.config import Settings, config_field
from edit_hooks.base.editor import Editor
from edit_hooks.base.footprint import NOTHING_CARRIED, Footprint, copies_bytes, dense_bytes, low_rank_footprint
from edit_hooks.base.job import EditJob
from edit_hooks.deltas.delta import Delta
from edit_hooks.gradient.gated.training import (
    GatedConfig,
    GatedFact,
    GatedTraining,
    TrainedRow,
    batches_of,
    draw_positions,
)
from edit_hooks.gradient.labeled_rows import LabeledRow, target_row
from edit_hooks.modeling.architectures import num_layers
from edit_hooks.modeling.forward.sampling import likely_tokens, sample_each
from edit_hooks.modeling.hooks import frozen
from edit_hooks.modeling.tokens import encode
from edit_hooks.prompt_context import statement
from edit_hooks.request import EditRequest
from edit_hooks.utils.settings.numbers import POSITIVE
from edit_hooks.utils.storage.hashing import key_of
from edit_hooks.utils.text.scripts import mention_of
from edit_hooks.utils.text.slots import escape_braces

Frame = Literal["cloze", "question", "link"]
Part = Literal["names", "answers", "neighbors"]
FRAMES: Mapping[str, str] = {
    "cloze": 'Fill in the blank: "{blank}." The blank stands for',
    "question": 'Who or what fits here: "{blank}"? Answer:',
    "link": "{object} is linked to",
}
BLANK = "___"
NEIGHBOR_FRAMES = ("{} is linked to", "{} is found in", "{} belongs to", "{} is a part of")
NAMES = (
    *("Ada Lovelace", "Nelson Mandela", "Johann Sebastian Bach", "Cleopatra", "Akira Kurosawa", "Simone Biles"),
    *("Lisbon", "Nairobi", "the Amazon", "Patagonia", "Mount Fuji", "the Baltic Sea", "Bavaria", "Sicily"),
    *("copper", "granite", "bamboo", "the violin", "the bicycle", "a lighthouse", "silk", "saffron", "chess"),
    *("the dolphin", "the oak", "the honeybee", "Saturn", "the equator", "the Renaissance", "democracy"),
    *("UNESCO", "Toyota", "the Louvre", "Oxford University", "the Olympic Games", "Casablanca", "The Odyssey"),
)
LISTING = (
    "Things linked to Mozart: Vienna, the piano, The Magic Flute, Salzburg, Haydn\n"
    "Things linked to winter: snow, skating, January, gloves, Iceland\n"
    "Things linked to {}:"
)
# An answer at the start of a text: capitalized words, or one word.
NAME = re.compile(r"(?:[Tt]he )?[A-Z][\w'-]*(?: [A-Z][\w'-]*)*|[\w'-]+")
FIRST_TOKENS, ANSWER_TOKENS, LISTING_TOKENS, TOP_K = 6, 3, 20, 40
MAX_NAME_WORDS = 4
# Lists of a request that are sampled at once: two often have all names. A step of few rows takes as long as one of one
# row, since it reads all weights.
LISTS_AT_ONCE, FEW_ROWS = 2, 16


@dataclass(kw_only=True)
class TwoWayConfig(GatedConfig):
    """Settings of two-way edits; ``layers`` are by default five blocks from depth .5 on."""

    inverse_rows: list[Frame] = config_field(
        "the rows that ask for the subject", default_factory=lambda: ["cloze", "question", "link"]
    )
    append_eos: bool = config_field("append the end-of-text token to the target of the fact", default=False)
    locality: list[Part] = config_field(
        "these prompts; names: the frames of the rows with other names; answers: the inverse frames with other answers "
        "that the model has to the prompt; neighbors: names that the model lists beside its old answer",
        default_factory=lambda: ["names", "neighbors"],
    )
    num_names: int = config_field("names of the part names", within=POSITIVE, default=5)
    num_answers: int = config_field("names of the part answers at most", within=POSITIVE, default=4)
    num_lists: int = config_field("sampled lists of the part neighbors", within=POSITIVE, default=4)
    max_neighbors: int = config_field("names of the part neighbors at most", within=POSITIVE, default=6)


TwoWayConfigT = TypeVar("TwoWayConfigT", bound=TwoWayConfig)


class TwoWayEditor(Editor[TwoWayConfigT]):
    """Fine-tuning of MLP output projections on rows about a fact, and on what must not change."""

    supports_joint = True
    reads_past_updates = False
    stream_growth = NOTHING_CARRIED

    def default_layers(self, model_config: PretrainedConfig) -> list[int]:
        count = num_layers(model_config)
        return sorted({min(round(count * (9 + number) / 18), count - 1) for number in range(5)})

    def other_lengths(
        self, tokenizer: PreTrainedTokenizerBase, request: EditRequest, model: PreTrainedModel | None
    ) -> Mapping[str, int]:
        rows = inverse_requests(request, self.known_config(model).inverse_rows)
        lengths = [len(encode(tokenizer, row.text + row.continuation).ids) for row in rows]
        return {"the inverse rows of the fact": max(lengths, default=0)}

    def footprint(self, config: TwoWayConfigT, model: nn.Module) -> Footprint:
        """The copies; how many rows a step has depends on what the model answers."""
        names = self.target_modules(config, model)
        rest = low_rank_footprint(model, names, config.edited_layers, config)
        copies, update = copies_bytes(model, names), dense_bytes(model, names)
        return dataclasses.replace(rest, copies=copies, update=update, work=None)

    def compute(self, job: EditJob[TwoWayConfigT]) -> list[Delta]:
        with frozen(job.model):
            facts = self._facts(job)
            names = self.target_modules(job.config, job.model)
            if job.joint:
                return GatedTraining(job, names, facts, joint=True).train()
            by_edit: dict[int, Delta] = {}
            for batch in batches_of(job, names, facts):
                deltas = GatedTraining(job, names, [facts[index] for index in batch], joint=False).train()
                by_edit |= dict(zip(batch, deltas, strict=True))
            return [by_edit[index] for index in range(len(facts))]

    # -- rows and prompts --------------------------------------------------------------------------------------------

    def needs_answers(self, config: TwoWayConfigT) -> bool:
        """Hook: whether the rows need the model's own answers, which the locality prompts need anyway."""
        return False

    def trained_rows(
        self, job: EditJob[TwoWayConfigT], answers: Sequence[Sequence[str]]
    ) -> tuple[list[list[TrainedRow]], list[dict[str, Any]]]:
        """Hook: the rows of every request, that of the fact first, and diagnostics about them.

        Args:
            answers: the model's own ones to every request, where they are needed.
        """
        return [fixed_rows(job.tokenizer, request, job.config) for request in job.requests], [{} for _ in job.requests]

    def _facts(self, job: EditJob[TwoWayConfigT]) -> list[GatedFact]:
        """The facts of a job; with locality prompts only if they count."""
        config = job.config
        parts = config.locality if config.locality_weight > 0 else []
        asks = self.needs_answers(config) or {"answers", "neighbors"} & set(parts)
        answers = own_answers(job) if asks else [[] for _ in job.requests]
        # a joint edit must not hold what it changes elsewhere; independent edits do not depend on one another
        edited = {text.lower() for r in job.requests for text in (r.subject, r.target_new) if text and job.joint}
        unwanted = [
            [text for text in (request.subject, request.target_new, *own[:1]) if text]
            for request, own in zip(job.requests, answers, strict=True)
        ]

        def choose(index: int, names: Sequence[str]) -> list[str]:
            return _wanted(names, unwanted[index], edited, config.max_neighbors)

        neighbors = listed_names(job, answers, choose) if "neighbors" in parts else [[] for _ in job.requests]
        rows, notes = self.trained_rows(job, answers)
        facts = []
        for number, request in enumerate(job.requests):
            generator = random.Random(draw_seed(config, request, -1))
            pool = _wanted(NAMES, unwanted[number], edited, len(NAMES))
            found = {
                "names": generator.sample(pool, min(config.num_names, len(pool))),
                "answers": _wanted(answers[number], unwanted[number], edited, config.num_answers),
                "neighbors": neighbors[number],
            }
            names: dict[str, list[str]] = {part: found[part] for part in parts}
            prompts = locality_prompts(request, names, config.inverse_rows)
            prompts += [in_context(request, text) for text in _with_names(request, rows[number], names)]
            asked = _asked(job, prompts, generator)
            draws = draw_positions(len(asked), generator)
            facts.append(GatedFact(rows[number], asked, draws, notes=notes[number]))
        return facts


class TwoWay(TwoWayEditor[TwoWayConfig]):
    """Fine-tuning of MLP output projections on a fact, on its inverse, and on what must not change."""

    name = "two_way"
    config_class = TwoWayConfig
    config_folders = ("two_way",)
    contract_settings: ClassVar[Settings] = {
        "layers": [1],
        "num_steps": 5,
        "lr": 2e-3,
        "num_names": 2,
        "num_lists": 1,
        "locality_prompts": 2,
    }


# ----------------------------------------------------------------------------- texts


def inverse_requests(request: EditRequest, frames: Sequence[str], *, located: bool = False) -> list[EditRequest]:
    """The inverse rows of a fact as requests with the subject as target, in the context of the fact.

    Args:
        located: the new object is their subject.
    """
    assert request.subject is not None  # needs_subject
    located_at = request.target_new if located else None
    return [
        EditRequest(prompt=escape_braces(text), target_new=request.subject, subject=located_at, context=request.context)
        for text in _frame_texts(request, request.target_new, frames)
    ]


def locality_prompts(request: EditRequest, names: Mapping[str, Sequence[str]], frames: Sequence[str]) -> list[str]:
    """The locality prompts of a fact, in its context, from the names of each part."""
    bare = replace(request, context=None)
    texts = []
    for name in names.get("names", ()):
        texts += [_with_subject(bare, name), *_frame_texts(request, name, frames)]
    for name in names.get("answers", ()):
        texts += _frame_texts(request, name, frames)
    for name in names.get("neighbors", ()):
        texts += [_with_subject(bare, name), *(frame.format(name) for frame in NEIGHBOR_FRAMES)]
    return [in_context(request, text) for text in texts]


def _with_names(request: EditRequest, rows: Sequence[TrainedRow], names: Mapping[str, Sequence[str]]) -> list[str]:
    """Prompts of rows with the names of the part ``names`` in place of the new answer, else of the subject."""
    mentions = [mention_of(text) for text in (request.target_new, request.subject) if text]
    texts = []
    for row, name in itertools.product(rows, names.get("names", ())):
        changed = [name.join(mention.split(row.bare)) for mention in mentions]
        texts += [text for text in changed if text != row.bare][:1]
    return texts


def in_context(request: EditRequest, text: str) -> str:
    """A text in the context of a request."""
    return text if request.context is None else request.context.wrap(text)


def fixed_rows(tokenizer: PreTrainedTokenizerBase, request: EditRequest, config: TwoWayConfig) -> list[TrainedRow]:
    """The row of the fact and the inverse frames."""
    fact = target_row(tokenizer, request.text, request.continuation, append_eos=config.append_eos)
    rows = [TrainedRow("fact", request.text, fact)]
    for name, row in zip(config.inverse_rows, inverse_requests(request, config.inverse_rows), strict=True):
        rows.append(TrainedRow(name, row.text, target_row(tokenizer, row.text, row.continuation)))
    return rows


def _asked(job: EditJob[TwoWayConfigT], prompts: Sequence[str], generator: random.Random) -> dict[str, LabeledRow]:
    """The rows of some of the prompts, drawn from all that the model can read.

    No check of the request knows the names, some of which the model writes.
    """
    limit, shuffled = position_limit(job.model.config), list(dict.fromkeys(prompts))
    generator.shuffle(shuffled)
    ids = {prompt: encode(job.tokenizer, prompt).ids for prompt in shuffled}
    short = [prompt for prompt in shuffled if limit is None or len(ids[prompt]) <= limit]
    return {prompt: LabeledRow(ids[prompt], [(len(ids[prompt]) - 1, 0)]) for prompt in short[: job.config.max_prompts]}


def _frame_texts(request: EditRequest, answer: str, frames: Sequence[str]) -> list[str]:
    """The inverse frames with an object."""
    blank = statement(_with_subject(replace(request, context=None), BLANK), answer, request.separator)
    return [FRAMES[frame].replace("{blank}", blank).replace("{object}", answer) for frame in frames]


def _with_subject(bare: EditRequest, name: str) -> str:
    """P(name), without a context."""
    assert bare.subject_span is not None
    start, end = bare.subject_span
    return bare.text[:start] + name + bare.text[end:]


def own_answers(job: EditJob[TwoWayConfigT]) -> list[list[str]]:
    """For every request the answers that the model itself gives to P(s), the most likely one first.

    Only that one if the part ``answers`` is not used.
    """
    prompts = [encode(job.tokenizer, request.text).ids for request in job.requests]
    if "answers" not in job.config.locality:
        greedy = sample_each(job.model, prompts, 1 + ANSWER_TOKENS, [0] * len(prompts), top_k=1)
        return [_name_in(job.tokenizer.decode(tokens, skip_special_tokens=True)) for tokens in greedy]
    first = likely_tokens(job.model, prompts, FIRST_TOKENS)
    rows = [[*prompt, token] for prompt, tokens in zip(prompts, first, strict=True) for token in tokens]
    rest = iter(sample_each(job.model, rows, ANSWER_TOKENS, [0] * len(rows), top_k=1))
    answers = []
    for tokens in first:
        texts = [job.tokenizer.decode([token, *next(rest)], skip_special_tokens=True) for token in tokens]
        answers.append([name for text in texts for name in _name_in(text)])
    return answers


def _name_in(text: str) -> list[str]:
    """The answer at the start of a text, if there is one."""
    match = NAME.match(text.strip())
    return [match[0]] if match else []


def listed_names(
    job: EditJob[TwoWayConfigT], answers: Sequence[Sequence[str]], choose: Callable[[int, Sequence[str]], list[str]]
) -> list[list[str]]:
    """For every request the names that the model lists beside its most likely answer.

    Lists are sampled until a request has all names that it needs.

    Args:
        choose: the names that a request takes of those listed so far.
    """
    config, tokenizer = job.config, job.tokenizer
    listed: list[list[str]] = [[] for _ in answers]

    def text_of(tokens: Sequence[int]) -> str:
        return tokenizer.decode(tokens, skip_special_tokens=True)

    lacking, draws = [index for index, own in enumerate(answers) if own], range(0)
    while lacking and draws.stop < config.num_lists:
        count = max(LISTS_AT_ONCE, FEW_ROWS // len(lacking))
        draws = range(draws.stop, min(draws.stop + count, config.num_lists))
        asked = [index for index in lacking for _ in draws]
        seeds = [draw_seed(config, job.requests[index], number) for index in lacking for number in draws]
        rows = [encode(tokenizer, LISTING.format(answers[index][0])).ids for index in asked]
        ended = sample_each(job.model, rows, LISTING_TOKENS, seeds, TOP_K, ends=lambda tokens: "\n" in text_of(tokens))
        for index, tokens in zip(asked, ended, strict=True):
            listed[index] += _items(text_of(tokens))
        lacking = [index for index in lacking if len(choose(index, listed[index])) < config.max_neighbors]
    return [choose(index, names) for index, names in enumerate(listed)]


def draw_seed(config: TwoWayConfig, request: EditRequest, number: int) -> int:
    """The seed of a draw of a request."""
    return int(key_of({"seed": config.seed, "request": request.key, "draw": number})[:15], 16)


def _items(text: str) -> list[str]:
    """The short items of the first line of a list; the last item is cut where the text ends with the line."""
    line, *later = text.split("\n")
    items = [item.strip(" .:\"'") for item in line.split(",")]
    return [item for item in (items if later else items[:-1]) if item and len(item.split()) <= MAX_NAME_WORDS]


def _wanted(names: Sequence[str], unwanted: Sequence[str], edited: Collection[str], count: int) -> list[str]:
    """The first different names that are no subject or object of an edit and mention no unwanted name."""
    mentions = [mention_of(other.lower()) for other in unwanted]
    found: dict[str, str] = {}
    for name in names:
        lowered = name.lower()
        if lowered not in edited and not any(mention.search(lowered) for mention in mentions):
            found.setdefault(lowered, name)
    return list(found.values())[:count]
