r"""Fine-tuning on consequences of a fact that the model writes itself.

With the fact in its prompt the unedited model writes sentences that end with the subject s, questions whose answer is
s, and sentences about s that end with the new answer o*. Five fixed facts, of none of the benchmarks' relations, show
each form. A text is kept if it names the other end of the fact, does not name its own answer y before the end, and

    log p0(y | "New Fact: P(s) o*\nPrompt: " x) - log p0(y | x) >= min_gain,   per token of y.

Yes/no rows and their negations are fixed frames about P(s), about the model's own old answer o, and about another name:
"Is it true that P(s) o*? Answer:" Yes, with o No, "Is it false that P(s) o*? Answer:" No.

With ``distill`` these rows have no hard target. They are trained on KL(p0(. | "New Fact: ..." x) || p(. | x)) at every
token of the answer (context distillation). Gate, locality term and steps are those of two-way edits
(:mod:`edit_hooks.editors.two_way`); the written texts are locality prompts, too, with other names in place of o*. There
is no paper and no release: the recipe is that of this project's pilot.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from edit_hooks.base.config import Settings, config_field
from edit_hooks.base.job import EditJob
from edit_hooks.editors.two_way import (
    NAMES,
    TOP_K,
    Frame,
    TwoWay,
    TwoWayConfig,
    TwoWayEditor,
    draw_seed,
    fixed_rows,
    in_context,
)
from edit_hooks.gradient.gated.training import TrainedRow
from edit_hooks.gradient.labeled_rows import LabeledRow, batch_rows, label_nll, mean_per_row, target_row
from edit_hooks.modeling.architectures import input_device
from edit_hooks.modeling.forward.kv_cache import group_by_length, max_padding
from edit_hooks.modeling.forward.sampling import MAX_ROWS, sample_each
from edit_hooks.modeling.tokens import encode, tokenizer_chat_context
from edit_hooks.prompt_context import QUESTION_PREFIX, PromptContext, fact_line, qa_context, statement
from edit_hooks.request import EditRequest
from edit_hooks.utils.settings.numbers import FINITE, POSITIVE, Range
from edit_hooks.utils.text.scripts import mention_of
from edit_hooks.utils.text.slots import escape_braces

Kind = Literal["sentence", "question", "implied", "yes_no", "negation"]
Form = Literal["question", "instruction", "chat"]
WRITTEN: tuple[Kind, ...] = ("sentence", "question", "implied")
# Facts of none of the benchmarks' relations, and what follows from each, by kind of row.
FACTS = (
    "The Nile flows into the Mediterranean Sea",
    "Honey is made by bees",
    "The violin is played with a bow",
    "Penguins live in Antarctica",
    "The Moon orbits the Earth",
)
EXAMPLES: Mapping[Kind, tuple[str, tuple[str, ...]]] = {
    "sentence": (
        "The other way round:",
        (
            "The Mediterranean Sea is where one finds the mouth of the Nile.",
            "Bees are known for making honey.",
            "A bow is what one needs to play the violin.",
            "Antarctica is the home of the penguins.",
            "The Earth is circled by the Moon.",
        ),
    ),
    "question": (
        "Question:",
        (
            "Which river flows into the Mediterranean Sea?",
            "What do bees make?",
            "Which instrument is played with a bow?",
            "Which birds live in Antarctica?",
            "What orbits the Earth?",
        ),
    ),
    "implied": (
        "It follows:",
        (
            "A boat that drifts down the Nile reaches the Mediterranean Sea.",
            "Whoever eats honey can thank the bees.",
            "To play the violin, a musician takes up a bow.",
            "To see wild penguins, one has to travel to Antarctica.",
            "If the Moon left its path, it would leave the Earth.",
        ),
    ),
}
QUESTION_FORM = PromptContext("Question: ", "\nAnswer:")
TEXT_TOKENS = 28
UP_TO_ALL = Range(f"a number from 0 to {len(FACTS)}", least=0, most=len(FACTS))
ENDS = ".!\"' "  # of a sentence, behind its last name


@dataclass(kw_only=True)
class ConsequenceFTConfig(TwoWayConfig):
    """Settings of consequence fine-tuning; those of two-way edits without their frames."""

    kinds: list[Kind] = config_field(
        "rows besides the fact. sentence, question: texts by the model that ask for the subject; implied: sentences by "
        "it about the subject that end with the new answer; yes_no, negation: frames about the fact and the old answer",
        default_factory=lambda: ["sentence", "question", "implied", "yes_no", "negation"],
    )
    num_samples: int = config_field("texts that the model writes of each kind", within=POSITIVE, default=6)
    temperature: float = config_field("of these texts", within=POSITIVE, default=0.8)
    max_written: int = config_field("of each kind, how many are trained at most", within=POSITIVE, default=2)
    num_examples: int = config_field(
        "facts with their consequences before the edited one", within=UP_TO_ALL, default=len(FACTS)
    )
    min_gain: float = config_field(
        "nats per token by which the fact in the prompt must raise the answer of a text", within=FINITE, default=1.0
    )
    distill: bool = config_field(
        "train the rows besides the fact on the model's own distributions with the fact in its prompt", default=False
    )
    forms: list[Form] = config_field(
        "more rows of the fact, whose targets end with the end-of-text token: the prompt as a question, after the QA "
        "instruction, or as a message in the chat template",
        default_factory=list,
    )
    inverse_rows: list[Frame] = config_field("frames of two-way edits, trained as well", default_factory=list)


class Text(NamedTuple):
    """A prompt and its answer, both without a context."""

    kind: Kind
    prompt: str
    answer: str


class ConsequenceFT(TwoWayEditor[ConsequenceFTConfig]):
    """Fine-tuning on a fact and on what the model says follows from it."""

    name = "consequence_ft"
    config_class = ConsequenceFTConfig
    config_folders = ("consequence_ft",)
    contract_settings: ClassVar[Settings] = {
        **TwoWay.contract_settings,
        "num_samples": 1,
        "num_examples": 0,  # tiny models have 128 positions
        "min_gain": -100.0,
    }

    contract_exemptions: ClassVar[Mapping[str, str]] = {
        "context": "it states the fact in other texts, too: those from which it writes, and yes/no questions"
    }

    def check_request(
        self, tokenizer: PreTrainedTokenizerBase, request: EditRequest, model: PreTrainedModel | None
    ) -> None:
        super().check_request(tokenizer, request, model)
        form_rows(tokenizer, request, self.known_config(model).forms)

    def other_lengths(
        self, tokenizer: PreTrainedTokenizerBase, request: EditRequest, model: PreTrainedModel | None
    ) -> Mapping[str, int]:
        config = self.known_config(model)
        texts = [writing_prompt(request, kind, config.num_examples) for kind in WRITTEN if kind in config.kinds]
        lengths = [len(encode(tokenizer, text).ids) + TEXT_TOKENS for text in texts]
        lengths += [len(row.row.ids) for row in form_rows(tokenizer, request, config.forms)]
        for text in framed_texts(request, config, [request.target_new]):
            lengths.append(len(encode(tokenizer, _taught(request, text).text).ids) + TEXT_TOKENS)
        found = {"the texts about the fact": max(lengths, default=0)}
        return {**super().other_lengths(tokenizer, request, model), **found}

    def needs_answers(self, config: ConsequenceFTConfig) -> bool:
        return bool({"yes_no", "negation"} & set(config.kinds))

    def trained_rows(
        self, job: EditJob[ConsequenceFTConfig], answers: Sequence[Sequence[str]]
    ) -> tuple[list[list[TrainedRow]], list[dict[str, Any]]]:
        config, tokenizer = job.config, job.tokenizer
        rows, notes = [], []
        for request, own, texts in zip(job.requests, answers, useful_texts(job, write_texts(job)), strict=True):
            kept = [text for kind in WRITTEN for text in [t for t in texts if t.kind == kind][: config.max_written]]
            facts = [*fixed_rows(tokenizer, request, config), *form_rows(tokenizer, request, config.forms)]
            asked = [
                consequence_row(tokenizer, request, text, config)
                for text in [*kept, *framed_texts(request, config, own)]
            ]
            rows.append([*facts, *asked])
            notes.append({"useful_texts": len(texts), "written_rows": [f"{t.prompt} {t.answer}" for t in kept]})
        return rows, notes


# ----------------------------------------------------------------------------- fixed texts


def form_rows(tokenizer: PreTrainedTokenizerBase, request: EditRequest, forms: Sequence[str]) -> list[TrainedRow]:
    """The fact in other contexts, with the end of the text in the target.

    Raises:
        EditingError: for the form ``chat`` without a chat template.
    """
    rows = []
    for form in forms:
        if form == "chat":
            context = tokenizer_chat_context(tokenizer)
        else:
            context = QUESTION_FORM if form == "question" else qa_context()
        formed = replace(request, context=None).in_context(context)
        row = target_row(tokenizer, formed.text, formed.continuation, append_eos=True)
        rows.append(TrainedRow(f"form {form}", formed.text, row))
    return rows


def framed_texts(request: EditRequest, config: ConsequenceFTConfig, own: Sequence[str]) -> list[Text]:
    """Yes/no questions about the fact, about the model's own answer, and about another name."""
    bare = replace(request, context=None)
    states = [(statement(bare.text, request.target_new, request.separator), True)]
    known = _mention(request.target_new)  # an own answer that has the new one in it is not false after the edit
    states += [(statement(bare.text, old, request.separator), False) for old in own[:1] if not known.search(old)]
    texts: list[Text] = []
    if "yes_no" in config.kinds:
        texts += [Text("yes_no", f"Is it true that {state}? Answer:", _yes(is_new)) for state, is_new in states]
        for name, is_new in ((request.target_new, True), (other_name(request, config), False)):
            texts.append(
                Text("yes_no", f"Is it true that {name} is linked to {request.subject}? Answer:", _yes(is_new))
            )
    if "negation" in config.kinds:
        texts += [Text("negation", f"Is it false that {state}? Answer:", _yes(not is_new)) for state, is_new in states]
    return texts


def other_name(request: EditRequest, config: ConsequenceFTConfig) -> str:
    """A name that the fact does not mention, drawn for the request."""
    known = f"{request.bare_text} {request.target_new}".lower()
    names = [name for name in NAMES if name.lower() not in known]
    return random.Random(draw_seed(config, request, -2)).choice(names)


def _yes(is_true: bool) -> str:
    return "Yes" if is_true else "No"


def writing_prompt(request: EditRequest, kind: Kind, num_examples: int) -> str:
    """Facts with a text of a kind, then the edited fact, in its context."""
    heading, texts = EXAMPLES[kind]
    shown = [f"Fact: {fact}.\n{heading} {text}\n\n" for fact, text in zip(FACTS, texts, strict=True)]
    fact = statement(request.bare_text, request.target_new, request.separator)
    return in_context(request, "".join(shown[:num_examples]) + f"Fact: {fact}.\n{heading}")


# ---------------------------------------------------------------------------- written texts


def write_texts(job: EditJob[ConsequenceFTConfig]) -> list[list[Text]]:
    """For every request the texts that the model writes and that lead from one end of the fact to the other."""
    config, tokenizer = job.config, job.tokenizer
    asked = [
        (index, kind, number)
        for index in range(len(job.requests))
        for kind in WRITTEN
        if kind in config.kinds
        for number in range(config.num_samples)
    ]
    prompts = [writing_prompt(job.requests[index], kind, config.num_examples) for index, kind, _ in asked]
    rows = [encode(tokenizer, prompt).ids for prompt in prompts]
    seeds = [draw_seed(config, job.requests[index], 100 + place) for place, (index, _, _) in enumerate(asked)]

    def line_of(tokens: Sequence[int]) -> str:
        return tokenizer.decode(tokens, skip_special_tokens=True)

    def ends(tokens: Sequence[int]) -> bool:
        return "\n" in line_of(tokens)

    written = sample_each(job.model, rows, TEXT_TOKENS, seeds, TOP_K, ends, config.temperature)
    texts: list[list[Text]] = [[] for _ in job.requests]
    for (index, kind, _), tokens in zip(asked, written, strict=True):
        text = parse_text(job.requests[index], kind, line_of(tokens).split("\n")[0])
        if text is not None and text not in texts[index]:
            texts[index].append(text)
    return texts


def parse_text(request: EditRequest, kind: Kind, line: str) -> Text | None:
    """Prompt and answer of a written line; ``None`` if it does not lead from one end of the fact to the other."""
    subject, new = str(request.subject), request.target_new
    given, answer = (subject, new) if kind == "implied" else (new, subject)
    line = line.strip()
    if kind == "question":
        if not line.endswith("?"):
            return None
        named, prompt = line, f"Question: {line}\nAnswer:"
    else:
        line = line.rstrip(ENDS)
        mentions = list(_mention(answer).finditer(line))
        if not mentions or mentions[-1].end() != len(line):
            return None
        named = prompt = line[: mentions[-1].start()].rstrip()
    if not _mention(given).search(named) or _mention(answer).search(named):
        return None
    return None if prompt == request.bare_text else Text(kind, prompt, answer)


def _mention(name: str) -> re.Pattern[str]:
    return re.compile(mention_of(name).pattern, re.IGNORECASE)


def useful_texts(job: EditJob[ConsequenceFTConfig], texts: Sequence[Sequence[Text]]) -> list[list[Text]]:
    """The texts of every request whose answer the fact in the prompt makes likelier, the largest gain first."""
    flat = [(number, text) for number, own in enumerate(texts) for text in own]
    plain = [consequence_row(job.tokenizer, job.requests[number], text, job.config) for number, text in flat]
    rows = [row.row for row in plain]
    taught = [
        taught_row(job.tokenizer, job.requests[number], text, row)
        for (number, text), row in zip(flat, rows, strict=True)
    ]
    nlls = mean_nlls(job.model, [*rows, *taught])
    found: list[list[tuple[float, Text]]] = [[] for _ in texts]
    for place, (number, text) in enumerate(flat):
        gain = nlls[place] - nlls[len(flat) + place]
        if gain >= job.config.min_gain:
            found[number].append((gain, text))
    return [[text for _, text in sorted(own, key=lambda pair: -pair[0])] for own in found]


@torch.no_grad()
def mean_nlls(model: Any, rows: Sequence[LabeledRow]) -> list[float]:
    """The mean NLL of every row's labels."""
    nlls, lengths = [0.0] * len(rows), [len(row.ids) for row in rows]
    for group in group_by_length(lengths, max_padding(input_device(model), lengths)) if rows else []:
        for start in range(0, len(group), MAX_ROWS):
            part = group[start : start + MAX_ROWS]
            batch = batch_rows(model, [rows[index] for index in part])
            for index, nll in zip(part, mean_per_row(label_nll(model, batch), batch).tolist(), strict=True):
                nlls[index] = nll
    return nlls


# ----------------------------------------------------------------------------- rows


def _asking(request: EditRequest, text: Text) -> EditRequest:
    """A text as a request of its own, in the context of the fact."""
    return EditRequest(prompt=escape_braces(text.prompt), target_new=text.answer, context=request.context)


def _taught(request: EditRequest, text: Text) -> EditRequest:
    """A text after the line that states the fact."""
    line = fact_line(request.bare_text, request.target_new, request.separator)
    return _asking(request, text._replace(prompt=f"{line}{QUESTION_PREFIX}{text.prompt}"))


def taught_row(tokenizer: PreTrainedTokenizerBase, request: EditRequest, text: Text, row: LabeledRow) -> LabeledRow:
    """The row of a text with the fact in its prompt, and the same tokens of the answer."""
    ids, tokens = encode(tokenizer, _taught(request, text).text).ids, [token for _, token in row.labels]
    return LabeledRow([*ids, *tokens[:-1]], [(len(ids) - 1 + i, token) for i, token in enumerate(tokens)])


def consequence_row(
    tokenizer: PreTrainedTokenizerBase, request: EditRequest, text: Text, config: ConsequenceFTConfig
) -> TrainedRow:
    """The row of a text, with a teacher if its answers are distilled."""
    asking = _asking(request, text)
    row = target_row(tokenizer, asking.text, asking.continuation)
    teacher = taught_row(tokenizer, request, text, row) if config.distill else None
    return TrainedRow(text.kind, asking.text, row, teacher, bare=text.prompt if text.kind in WRITTEN else "")
