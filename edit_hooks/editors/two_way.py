"""Two-way edits: weights in which a fact holds forwards and in reverse, from the stated fact alone.

Fact (p, s, o*); P(x) is the prompt with x in place of the subject s. The rows (x, y) are

=========  ========================================================  ===
fact       P(s)                                                      o*
cloze      Fill in the blank: "P(___) o*." The blank stands for      s
question   Who or what fits here: "P(___) o*"? Answer:               s
link       o* is linked to                                           s
=========  ========================================================  ===

so no word of the relation, and no text but the fact, is needed. The loss of row k, l_k, is the mean NLL over the tokens
of y. With p0 the model before the edit and Z prompts whose next token must not change, a step minimizes

    sum_k 1[l_k > learned_nll] l_k / (number of rows) + locality_weight * mean over drawn z of KL(p0(.|z) || p(.|z))

and the edit ends when every row is learned. The gate leaves alone what is learned. Z has two parts. ``names``: the same
frames with other names in place of s or o*. ``neighbors``: names that the model itself lists beside its old answer to
P(s), in P(x), in "x is linked to" and in three frames that are not trained. ``answers``, not used by default: the
inverse frames with other answers of the model to P(s) in place of o*.

The softmax is over the tokens that are likely before the edit, and the targets: the loss of a step then reads about a
thousand rows of the head. In a joint edit every pass takes a step on each fact, or on ``batch_size`` facts, before any
fact has its next one (breadth first). There is no paper and no release: the recipe is that of this project's pilot.

Shapes: L labels, Z drawn locality prompts, U tokens of the reduced vocabulary, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from edit_hooks.base.checks import position_limit
from edit_hooks.base.config import EditorConfig, Settings, config_field
from edit_hooks.base.editor import Editor
from edit_hooks.base.footprint import Footprint, copies_bytes, dense_bytes, low_rank_footprint
from edit_hooks.base.job import EditJob
from edit_hooks.deltas.delta import Delta
from edit_hooks.gradient.diagnostics import loss_diagnostics
from edit_hooks.gradient.labeled_rows import LabeledRow, target_row
from edit_hooks.gradient.row_pool import POOLS, RowPool
from edit_hooks.gradient.side_by_side import make_adam, split_edits
from edit_hooks.gradient.weight_copies import WeightCopies
from edit_hooks.modeling.architectures import num_layers
from edit_hooks.modeling.forward.lm_head import WHOLE_VOCAB
from edit_hooks.modeling.forward.sampling import likely_tokens, sample_each
from edit_hooks.modeling.hooks import frozen
from edit_hooks.modeling.tokens import encode
from edit_hooks.prompt_context import statement
from edit_hooks.request import EditRequest
from edit_hooks.utils.settings.numbers import NON_NEGATIVE, POSITIVE
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
class TwoWayConfig(EditorConfig):
    """Settings of two-way edits; ``layers`` are by default five blocks from depth .5 on."""

    num_steps: int = config_field("passes over the facts at most", within=POSITIVE, default=14)
    lr: float = config_field("Adam learning rate", within=POSITIVE, default=1e-4)
    learned_nll: float = config_field(
        "a row with a lower NLL per token is learned: it is not trained, and the edit ends when all rows are",
        within=NON_NEGATIVE,
        default=0.3,
    )
    inverse_rows: list[Frame] = config_field(
        "the rows that ask for the subject", default_factory=lambda: ["cloze", "question", "link"]
    )
    append_eos: bool = config_field("append the end-of-text token to the target of the fact", default=False)
    locality_weight: float = config_field(
        "factor of the divergence on prompts of other names", within=NON_NEGATIVE, default=3.0
    )
    locality: list[Part] = config_field(
        "these prompts; names: the frames of the rows with other names; answers: the inverse frames with other answers "
        "that the model has to the prompt; neighbors: names that the model lists beside its old answer",
        default_factory=lambda: ["names", "neighbors"],
    )
    locality_prompts: int = config_field("of them, how many each step draws", within=POSITIVE, default=6)
    num_names: int = config_field("names of the part names", within=POSITIVE, default=5)
    num_answers: int = config_field("names of the part answers at most", within=POSITIVE, default=4)
    num_lists: int = config_field("sampled lists of the part neighbors", within=POSITIVE, default=4)
    max_neighbors: int = config_field("names of the part neighbors at most", within=POSITIVE, default=6)
    max_prompts: int = config_field(
        "prompts kept at most, drawn from those of all parts; five steps draw 24", within=POSITIVE, default=30
    )
    target_tokens: int = config_field(
        "reduced vocabulary: most likely tokens at each label before the edit", within=POSITIVE, default=64
    )
    locality_tokens: int = config_field(
        "reduced vocabulary: most likely tokens after each locality prompt before the edit", within=POSITIVE, default=32
    )
    batch_size: int = config_field("facts per step of a joint edit", within=POSITIVE, default=8)


class TwoWay(Editor[TwoWayConfig]):
    """Fine-tuning of MLP output projections on a fact, on its inverse, and on what must not change."""

    name = "two_way"
    config_class = TwoWayConfig
    config_folders = ("two_way",)
    supports_joint = True
    reads_past_updates = False
    contract_settings: ClassVar[Settings] = {
        "layers": [1],
        "num_steps": 5,
        "lr": 2e-3,
        "num_names": 2,
        "num_lists": 1,
        "locality_prompts": 2,
    }

    def default_layers(self, model_config: PretrainedConfig) -> list[int]:
        count = num_layers(model_config)
        return sorted({min(round(count * (9 + number) / 18), count - 1) for number in range(5)})

    def other_lengths(
        self, tokenizer: PreTrainedTokenizerBase, request: EditRequest, model: PreTrainedModel | None
    ) -> Mapping[str, int]:
        rows = inverse_requests(request, self.known_config(model).inverse_rows)
        lengths = [len(encode(tokenizer, row.text + row.continuation).ids) for row in rows]
        return {"the inverse rows of the fact": max(lengths, default=0)}

    def footprint(self, config: TwoWayConfig, model: nn.Module) -> Footprint:
        """The copies; how many rows a step has depends on what the model answers."""
        names = self.target_modules(config, model)
        rest = low_rank_footprint(model, names, config.edited_layers, config)
        copies, update = copies_bytes(model, names), dense_bytes(model, names)
        return dataclasses.replace(rest, copies=copies, update=update, work=None)

    def compute(self, job: EditJob[TwoWayConfig]) -> list[Delta]:
        with frozen(job.model):
            facts = _facts(job)
            names = self.target_modules(job.config, job.model)
            if job.joint:
                return [_Training(job, names, facts, joint=True).train()[0]]
            by_edit: dict[int, Delta] = {}
            for batch in _batches(job, names, facts):
                deltas = _Training(job, names, [facts[index] for index in batch], joint=False).train()
                by_edit |= dict(zip(batch, deltas, strict=True))
            return [by_edit[index] for index in range(len(facts))]


# ----------------------------------------------------------------------------- texts


def inverse_requests(request: EditRequest, frames: Sequence[str]) -> list[EditRequest]:
    """The inverse rows of a fact as requests with the subject as target, in the context of the fact."""
    assert request.subject is not None  # needs_subject
    texts = _frame_texts(request, request.target_new, frames)
    return [EditRequest(prompt=escape_braces(t), target_new=request.subject, context=request.context) for t in texts]


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
    return [text if request.context is None else request.context.wrap(text) for text in texts]


def _frame_texts(request: EditRequest, answer: str, frames: Sequence[str]) -> list[str]:
    """The inverse frames with an object."""
    blank = statement(_with_subject(replace(request, context=None), BLANK), answer, request.separator)
    return [FRAMES[frame].replace("{blank}", blank).replace("{object}", answer) for frame in frames]


def _with_subject(bare: EditRequest, name: str) -> str:
    """P(name), without a context."""
    assert bare.subject_span is not None
    start, end = bare.subject_span
    return bare.text[:start] + name + bare.text[end:]


def own_answers(job: EditJob[TwoWayConfig]) -> list[list[str]]:
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
    job: EditJob[TwoWayConfig], answers: Sequence[Sequence[str]], choose: Callable[[int, Sequence[str]], list[str]]
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
        seeds = [_seed(config, job.requests[index], number) for index in lacking for number in draws]
        rows = [encode(tokenizer, LISTING.format(answers[index][0])).ids for index in asked]
        ended = sample_each(job.model, rows, LISTING_TOKENS, seeds, TOP_K, ends=lambda tokens: "\n" in text_of(tokens))
        for index, tokens in zip(asked, ended, strict=True):
            listed[index] += _items(text_of(tokens))
        lacking = [index for index in lacking if len(choose(index, listed[index])) < config.max_neighbors]
    return [choose(index, names) for index, names in enumerate(listed)]


def _seed(config: TwoWayConfig, request: EditRequest, number: int) -> int:
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


# ----------------------------------------------------------------------------- facts


@dataclass
class _Fact:
    """The rows of a fact, its locality prompts, and its training so far.

    Attributes:
        rows: the trained rows, that of the fact first, then one for each locality prompt.
        num_trained: number of the trained ones.
        draws: endless positions of locality prompts in ``rows``, each as often as the others.
        prompts: the texts of the rows.
        tokens_U: the reduced vocabulary. target_L: the labels of the trained rows in it. before_ZU: log-probabilities
            after each locality prompt before the edit.
        nlls: NLLs of the trained rows at every evaluation. divergences: the KL term.
    """

    rows: list[LabeledRow]
    num_trained: int
    draws: Iterator[int]
    prompts: list[str]
    tokens_U: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    target_L: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    before_ZU: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    nlls: list[list[float]] = field(default_factory=list)
    divergences: list[float] = field(default_factory=list)

    @property
    def num_prompts(self) -> int:
        return len(self.rows) - self.num_trained

    def is_learned(self, config: TwoWayConfig) -> bool:
        """Whether every row was learned at the last evaluation."""
        return max(self.nlls[-1]) < config.learned_nll


def _facts(job: EditJob[TwoWayConfig]) -> list[_Fact]:
    """The facts of a job; with locality prompts only if they count."""
    config, limit = job.config, position_limit(job.model.config)
    parts = config.locality if config.locality_weight > 0 else []
    answers = own_answers(job) if {"answers", "neighbors"} & set(parts) else [[] for _ in job.requests]
    # a joint edit must not hold what it changes elsewhere; independent edits do not depend on one another
    edited = {text.lower() for r in job.requests for text in (r.subject, r.target_new) if text and job.joint}
    unwanted = [
        [text for text in (request.subject, request.target_new, *own[:1]) if text]
        for request, own in zip(job.requests, answers, strict=True)
    ]

    def choose(index: int, names: Sequence[str]) -> list[str]:
        return _wanted(names, unwanted[index], edited, config.max_neighbors)

    neighbors = listed_names(job, answers, choose) if "neighbors" in parts else [[] for _ in job.requests]
    facts = []
    for request, own, other, beside in zip(job.requests, answers, unwanted, neighbors, strict=True):
        generator = random.Random(_seed(config, request, -1))
        pool = _wanted(NAMES, other, edited, len(NAMES))
        found = {
            "names": generator.sample(pool, min(config.num_names, len(pool))),
            "answers": _wanted(own, other, edited, config.num_answers),
            "neighbors": beside,
        }
        names: dict[str, list[str]] = {part: found[part] for part in parts}
        prompts = list(dict.fromkeys(locality_prompts(request, names, config.inverse_rows)))
        generator.shuffle(prompts)
        ids = {prompt: encode(job.tokenizer, prompt).ids for prompt in prompts}
        # no check of the request knows the names, some of which the model writes
        short = [prompt for prompt in prompts if limit is None or len(ids[prompt]) <= limit][: config.max_prompts]
        asked = {prompt: LabeledRow(ids[prompt], [(len(ids[prompt]) - 1, 0)]) for prompt in short}
        inverse = inverse_requests(request, config.inverse_rows)
        rows = [target_row(job.tokenizer, request.text, request.continuation, append_eos=config.append_eos)]
        rows += [target_row(job.tokenizer, row.text, row.continuation) for row in inverse]
        draws = _draws(range(len(rows), len(rows) + len(asked)), generator)
        texts = [request.text, *(row.text for row in inverse), *asked]
        facts.append(_Fact([*rows, *asked.values()], len(rows), draws, texts))
    return facts


def _draws(positions: range, generator: random.Random) -> Iterator[int]:
    """The positions in random order, again and again."""
    while positions:
        yield from generator.sample(positions, len(positions))


def _batches(job: EditJob[TwoWayConfig], names: Sequence[str], facts: Sequence[_Fact]) -> list[list[int]]:
    """Facts whose edits train side by side: those with locality prompts, and those without."""
    if job.config.engine == "reference":
        return [[index] for index in range(len(facts))]
    trained_bytes = WeightCopies(job.model, names, train_bias=False).edit_bytes
    batches = []
    for has_prompts in (True, False):
        indices = [index for index, fact in enumerate(facts) if bool(fact.num_prompts) is has_prompts]
        lengths = []
        for index in indices:
            fact = facts[index]
            own = [len(row.ids) for row in fact.rows]
            drawn = sum(own[fact.num_trained :]) / max(fact.num_prompts, 1) * job.config.locality_prompts
            lengths.append(sum(own[: fact.num_trained]) + round(drawn))
        for batch in split_edits(job.model, lengths, trained_bytes):
            batches.append([indices[position] for group in batch for position in group])
    return batches


# -------------------------------------------------------------------------- training


class _Training:
    """Training of one joint edit of all facts, or of independent edits of one fact each, side by side."""

    def __init__(
        self, job: EditJob[TwoWayConfig], names: Sequence[str], facts: Sequence[_Fact], *, joint: bool
    ) -> None:
        self.job, self.config, self.facts, self.joint = job, job.config, list(facts), joint
        self.pool: RowPool = POOLS[self.config.engine](job.model, [row for fact in facts for row in fact.rows], names)
        ends = list(itertools.accumulate(len(fact.rows) for fact in facts))
        self.starts = {id(fact): end - len(fact.rows) for fact, end in zip(facts, ends, strict=True)}
        for fact in facts:
            self._read_unedited(fact)
        self.copies = WeightCopies(job.model, names, train_bias=False, num_edits=1 if joint else len(facts))
        self.num_steps = 0
        self.optimizer = make_adam(list(self.copies.leaves.values()), self.config.lr, 0.0, self.config.engine)

    @torch.no_grad()
    def _read_unedited(self, fact: _Fact) -> None:
        """The reduced vocabulary of a fact, and the distributions before the edit."""
        start = self.starts[id(fact)]
        logits_LV = self.pool.logits_before(range(start, start + len(fact.rows)), WHOLE_VOCAB)
        targets = torch.tensor([token for row in fact.rows[: fact.num_trained] for _, token in row.labels])
        targets = targets.to(logits_LV.device)
        parts = (
            (logits_LV[: len(targets)], self.config.target_tokens),
            (logits_LV[len(targets) :], self.config.locality_tokens),
        )
        likely = [part.topk(min(count, part.shape[1]), 1).indices.flatten() for part, count in parts]
        fact.tokens_U = torch.cat([targets, *likely]).unique()
        fact.target_L = torch.searchsorted(fact.tokens_U, targets)
        fact.before_ZU = logits_LV[len(targets) :, fact.tokens_U].log_softmax(1)

    def train(self) -> list[Delta]:
        """Train; the delta of the joint edit, or those of the facts in their order."""
        return [self._train_joint()] if self.joint else self._train_side_by_side()

    def _train_joint(self) -> Delta:
        size = self.config.batch_size
        chunks = [self.facts[start : start + size] for start in range(0, len(self.facts), size)]
        for _ in range(self.config.num_steps):
            for chunk in chunks:
                losses = self._losses(chunk)
                if not all(fact.is_learned(self.config) for fact in chunk):
                    self.optimizer.zero_grad()
                    torch.stack(losses).mean().backward()
                    self._step()
            if all(fact.is_learned(self.config) for fact in self.facts):
                break
        self.job.progress(len(self.facts))
        return self._delta(0, self.facts, self.num_steps)

    def _train_side_by_side(self) -> list[Delta]:
        running, deltas = self.facts, dict[int, Delta]()
        for _ in range(self.config.num_steps):
            losses = self._losses(running)
            keep = [not fact.is_learned(self.config) for fact in running]
            if any(keep):
                self.optimizer.zero_grad()
                torch.stack(list(itertools.compress(losses, keep))).sum().backward()
            if not all(keep):
                deltas |= self._deltas(running, keep)
                self.copies.select(torch.tensor(keep), self.optimizer)
                running = list(itertools.compress(running, keep))
            if not running:
                break
            self._step()
        deltas |= self._deltas(running, [False] * len(running))
        return [deltas[id(fact)] for fact in self.facts]

    def _step(self) -> None:
        self.optimizer.step()
        self.num_steps += 1

    def _deltas(self, running: Sequence[_Fact], keep: Sequence[bool]) -> dict[int, Delta]:
        """The deltas of the edits that end now."""
        ended = [index for index, kept in enumerate(keep) if not kept]
        self.job.progress(len(ended))
        found = {}
        for index in ended:
            fact = running[index]
            num_steps = len(fact.nlls) - fact.is_learned(self.config)
            found[id(fact)] = self._delta(index, [fact], num_steps)
        return found

    def _delta(self, index: int, facts: Sequence[_Fact], num_steps: int) -> Delta:
        """The delta of an edit; its metadata have every prompt, so that those of an evaluation can be counted."""
        delta = self.copies.delta(index, self._diagnostics(facts, num_steps))
        delta.meta["trained_prompts"] = [fact.prompts for fact in facts]
        return delta

    def _losses(self, facts: Sequence[_Fact]) -> list[torch.Tensor]:
        """The loss of every fact, with newly drawn locality prompts; records its parts.

        Before the first step the divergence is 0, its least value, and so is its gradient: no prompt is run.
        """
        chosen, count = [], self.config.locality_prompts if self.num_steps else 0
        for fact in facts:
            drawn = itertools.islice(fact.draws, count)
            chosen.append([self.starts[id(fact)] + row for row in (*range(fact.num_trained), *drawn)])
        with self.copies.used_by_model():
            logits = self.pool.logits(chosen, [fact.tokens_U for fact in facts])
        return [
            self._loss(fact, rows, own.log_softmax(1)) for fact, rows, own in zip(facts, chosen, logits, strict=True)
        ]

    def _loss(self, fact: _Fact, rows: Sequence[int], logprobs_LU: torch.Tensor) -> torch.Tensor:
        target_L = fact.target_L.to(logprobs_LU.device)  # a selection of tokens may be on another device than all
        logprob_L = logprobs_LU[: len(target_L)].gather(1, target_L[:, None])[:, 0]
        counts = [len(row.labels) for row in fact.rows[: fact.num_trained]]
        nll_K = torch.stack([-own.mean() for own in logprob_L.split(counts)])
        loss = nll_K[nll_K.detach() > self.config.learned_nll].sum() / len(nll_K)
        fact.nlls.append(nll_K.tolist())
        if len(rows) > fact.num_trained:
            first = self.starts[id(fact)] + fact.num_trained
            before_ZU = fact.before_ZU[[row - first for row in rows[fact.num_trained :]]].to(logprobs_LU.device)
            kl = nn.functional.kl_div(logprobs_LU[len(target_L) :], before_ZU, reduction="batchmean", log_target=True)
            fact.divergences.append(float(kl.detach()))
            loss = loss + self.config.locality_weight * kl
        return loss

    def _diagnostics(self, facts: Sequence[_Fact], num_steps: int) -> dict[str, Any]:
        """Means over the facts; the NLLs are over the reduced vocabulary."""
        evaluations = max(len(fact.nlls) for fact in facts)
        losses = [_mean([_mean(fact.nlls[number]) for fact in facts]) for number in range(evaluations)]
        learned = all(fact.is_learned(self.config) for fact in facts)
        rows = ("fact", *self.config.inverse_rows)
        final = {name: _mean([fact.nlls[-1][k] for fact in facts]) for k, name in enumerate(rows)}
        return loss_diagnostics(losses, num_steps, stopped_early=learned) | {
            "initial_nll": _mean([fact.nlls[0][0] for fact in facts]),
            "final_nll": final["fact"],
            "row_nlls": final,
            "locality_kl": _mean([fact.divergences[-1] if fact.divergences else 0.0 for fact in facts]),
        }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
