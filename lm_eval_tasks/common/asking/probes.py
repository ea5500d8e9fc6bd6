"""Probes, documents made of them, and the answers to them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from edit_hooks.answers import ContextReport, EditedAnswer, FailedAnswer, Stage
from edit_hooks.decoding import AskedModel, Decoding, TokenPrompts
from edit_hooks.prompt_context import SPACE, content_after, resolved_separator
from edit_hooks.state_reading import StateReading
from edit_hooks.utils.storage.json_io import without_half_surrogates
from lm_eval_tasks.common.asking.answers import Answer, answer_at, filtered_answer
from lm_eval_tasks.common.records.cases import Case

PLACEHOLDER = "placeholder"
# Key of a document whose prompts are chats already, with the setting that makes them so.
OWN_CHAT = "own_chat"
NO_QUESTION, NO_GOLD = "the record has no judged probes", "the question has no gold answer"
NO_COMPETITOR = FailedAnswer("the record has no old answer to compare with", is_failure=False)
SAME_COMPETITOR = FailedAnswer("the two answers to compare are the same", is_failure=False)


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One question for the edited model.

    Attributes:
        kind: what the probe measures (efficacy, paraphrase, neighborhood, reverse_qa, ...).
        prompt: text shown to the model, including an instruction or wrapper, without outer white space.
        targets: continuations to score, the wanted one first.
        separator: white space between prompt and targets; ``None``: that of the case (:func:`case_doc`).
        generate: also let the model write freely.
        gold: the answer that a generation is compared with.
        question: the bare question, for judges; the prompt by default.
        ask: the model that is asked; ``both`` for metrics that compare them. ``unedited`` marks a helper: a judge sees
            the unedited model's answer, and judged metrics marked ``filtered`` exclude the case if it is correct.
        ask_generation: the same for the generation, where it differs from that for the targets.
        decoding: how the answer is generated, where that differs from the task's ``generation_kwargs``.
        num_draws: number of generations, each with its own draw, counted from that of ``decoding.sampling``.
        states: in place of the targets' scores, compare hidden states of the edited and the unedited model. One target
            is needed, which other model classes score.
        token_prompts: score every target token after a prompt of its own; ``None``: along the target.
    """

    kind: str
    prompt: str
    targets: Sequence[str] = ()
    separator: str | None = None
    generate: bool = False
    gold: str = ""
    question: str = ""
    ask: AskedModel = "edited"
    ask_generation: AskedModel | None = None
    decoding: Decoding | None = None
    num_draws: int = 1
    token_prompts: TokenPrompts | None = None
    states: StateReading | None = None

    def __post_init__(self) -> None:
        if self.num_draws != 1 and (self.decoding is None or self.decoding.sampling is None):
            raise AssertionError(f"{self.num_draws} draws of a probe without sampling: all would be the same")

    def to_json(self) -> dict[str, Any]:
        """The probe as plain JSON values; its question is the prompt unless it has another."""
        decoding = self.decoding and self.decoding.to_json()
        own = {"targets": list(self.targets), "question": self.question or self.prompt, "decoding": decoding}
        record = {**asdict(self), **own}
        if self.separator in (None, SPACE):  # as in documents from before there were others
            del record["separator"]
        if self.token_prompts is None:
            del record["token_prompts"]
        if self.states is None:
            del record["states"]
        else:
            record["states"] = self.states.to_json()
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Probe:
        """Inverse of :meth:`to_json`."""
        decoding, states = record.get("decoding"), record.get("states")
        typed = {
            "decoding": None if decoding is None else Decoding.from_json(decoding),
            "states": None if states is None else StateReading.from_json(states),
            "separator": record.get("separator", SPACE),
        }
        return cls(**{**record, **typed})

    def joined_by(self, separator: str | None) -> Probe:
        """The probe with its separator settled, and its answers without the white space that is formatting.

        Args:
            separator: that of the probe's record, if it has one; by default the scripts of prompt and wanted answer
                decide, so that all targets of a probe are joined alike.
        """
        given = separator if self.separator is None else self.separator
        before = self.prompt + (given or "")
        targets = [content_after(before, target) for target in self.targets]
        gold = content_after(before, self.gold)
        wanted = targets[0] if targets else gold
        return replace(self, targets=targets, gold=gold, separator=resolved_separator(self.prompt, wanted, given))

    def asked_model(self, *, generation: bool) -> AskedModel:
        """The model that is asked for the generation, or for the scores of the targets."""
        return (self.ask_generation or self.ask) if generation else self.ask

    @property
    def only_unedited(self) -> bool:
        """Whether only the unedited model's answer counts."""
        return self.ask == "unedited"


def case_doc(case: Case, probes: Sequence[Probe], *, generate: bool) -> dict[str, Any]:
    """The JSON-able document of a case: its edits, its probes and its extras.

    lm-eval cannot represent a document without requests. A case without probes therefore gets a placeholder, the edit
    prompt, which no metric reads, so that the case stays visible as unscored.

    Args:
        case: the edits under which all probes are answered.
        probes: the questions; may be empty.
        generate: whether a placeholder is also generated, as the task's own probes are.
    """
    request = case.request
    if not probes:
        probes = [Probe(kind=PLACEHOLDER, prompt=request.text, targets=[request.target_new], generate=generate)]
    return {
        "case_id": request.case_id,
        "edit_requests": [edit.to_dict() for edit in case.requests],
        "probes": [probe.joined_by(request.separator).to_json() for probe in probes],
        **case.extras,
    }


def question_doc(
    case_id: str,
    probes: Sequence[Probe],
    extras: Mapping[str, Any] | None = None,
    *,
    separator: str | None = None,
) -> dict[str, Any]:
    """The JSON-able document of questions about no edit, which the edited model of a run is asked as a whole.

    They are scored in streams, in batches without groups and under a saved edit.

    Args:
        separator: that of the questions' record, if it has one.
    """
    return {
        "case_id": case_id,
        "edit_requests": [],
        "probes": [probe.joined_by(separator).to_json() for probe in probes],
        **(extras or {}),
    }


def mark_unusable(doc: dict[str, Any]) -> dict[str, Any]:
    """A document in which half surrogate pairs are replaced, and the reason why its case is unscored.

    No tokenizer can encode such a text, and lm-eval can neither hash nor save it.
    """
    clean = without_half_surrogates(doc)
    if clean == doc:
        return doc
    return {**clean, "unusable": "a text of the record holds half of a surrogate pair, which no tokenizer can encode"}


def why_not_judged(doc: Mapping[str, Any], kind: str, gold: str) -> str | None:
    """The reason why no judge is asked about the answers to a probe of a document; ``None`` if one is."""
    if kind == PLACEHOLDER:
        return NO_QUESTION
    return doc.get("unusable") if gold.strip() else NO_GOLD


class ProbeRequest(NamedTuple):
    """One lm-eval request of a case.

    Attributes:
        number: index of the probe in its document.
        probe: the probe.
        target: the continuation to score; ``None`` for a generation.
        draw: number of the generation.
    """

    number: int
    probe: Probe
    target: str | None
    draw: int = 0

    @property
    def decoding(self) -> Decoding | None:
        """The probe's decoding settings for this generation."""
        decoding = self.probe.decoding
        if self.target is not None or decoding is None or decoding.sampling is None:
            return decoding
        draw = decoding.sampling.draw + self.draw
        return replace(decoding, sampling=replace(decoding.sampling, draw=draw))

    @property
    def asked_model(self) -> AskedModel:
        """The model that is asked."""
        return self.probe.asked_model(generation=self.target is None)

    def asked_fields(self, decoding: Decoding | None, until: Sequence[str]) -> dict[str, Any]:
        """The fields that tell a model class and the filters how the request is asked.

        They are part of lm-eval's ``doc_hash``: other keys would make samples look like other documents.

        Args:
            decoding: the settings in effect.
            until: the stop strings.
        """
        probe, is_generation = self.probe, self.target is None
        asked: dict[str, Any] = {
            "kind": probe.kind,
            "question": probe.question,
            "gold": probe.gold,
            "model": self.asked_model,
            "decoding": decoding.to_json() if is_generation and decoding is not None else None,
            "until": list(until),
        }
        if probe.token_prompts and not is_generation:
            asked["token_prompts"] = probe.token_prompts
        if probe.states and not is_generation:
            asked["states"] = probe.states.to_json()
        return asked


class Document(dict[str, Any]):
    """The document of a case, of plain JSON values, with its typed questions beside them.

    lm-eval hashes, saves and hands around the plain values. The questions are parsed once, however many filter
    pipelines, stages and metrics read them; a document does not change after that.
    """

    @classmethod
    def of(cls, doc: Mapping[str, Any]) -> Document:
        """The document itself, or one with the values of a mapping."""
        return doc if isinstance(doc, cls) else cls(doc)

    def __reduce__(self) -> tuple[Any, ...]:  # between processes only the plain values travel
        return type(self), (dict(self),)

    @functools.cached_property
    def probes(self) -> tuple[Probe, ...]:
        """The questions."""
        return tuple(map(Probe.from_json, self["probes"]))

    @functools.cached_property
    def requests(self) -> tuple[ProbeRequest, ...]:
        """The requests in their fixed order; those of a probe are its targets, then its generations."""
        requests = []
        for number, probe in enumerate(self.probes):
            requests += [ProbeRequest(number, probe, target) for target in probe.targets]
            if probe.generate:
                requests += [ProbeRequest(number, probe, None, draw) for draw in range(probe.num_draws)]
        return tuple(requests)


def case_requests(doc: Mapping[str, Any]) -> Sequence[ProbeRequest]:
    """The requests of a document in their fixed order."""
    return Document.of(doc).requests


@dataclass(frozen=True)
class ProbeAnswers:
    """The answers to one probe: one per target, and the generations if any."""

    probe: Probe
    targets: Sequence[Answer] = ()
    generations: Sequence[Answer] = ()

    @property
    def generation(self) -> Answer | None:
        """The only generation, or the first of several draws."""
        return self.generations[0] if self.generations else None

    @property
    def wanted(self) -> Answer:
        """The answer for the wanted target."""
        return self.targets[0]

    @property
    def other(self) -> Answer:
        """The answer for the competing target; a `FailedAnswer` if the question has none, or the wanted one again."""
        if len(self.targets) < 2:
            return NO_COMPETITOR
        is_same = self.probe.targets[0].strip() == self.probe.targets[1].strip()
        return SAME_COMPETITOR if is_same else self.targets[1]


class CaseAnswers:
    """The answers of a case after one filter pipeline: those of one stage by probe, and all of them.

    Args:
        doc: the document made by :func:`case_doc`.
        results: what the pipeline returned, in the order of :func:`case_requests`: :class:`EditedAnswer` with the
            answers of all stages, or bare answers.
        stage: the stage of :attr:`probes`; ``None`` is the final one.
    """

    def __init__(self, doc: Mapping[str, Any], results: Sequence[Any], stage: Stage | None = None) -> None:
        self.doc = Document.of(doc)
        self.results: Sequence[EditedAnswer[Answer]] = [filtered_answer(result) for result in results]
        if (rest := len(self.results) - len(self.doc.requests)) != 0:
            raise AssertionError(f"{rest:+} answers more than requests in case {doc['case_id']}")
        self.stage = stage

    def at(self, stage: Stage | None) -> CaseAnswers:
        """The answers with those of another stage by probe."""
        return CaseAnswers(self.doc, self.results, stage)

    @functools.cached_property
    def probes(self) -> list[ProbeAnswers]:
        """The answers of the stage by probe; helpers have the same at all stages."""
        answers: list[tuple[list[Answer], list[Answer]]] = [([], []) for _ in self.doc.probes]
        for request, result in zip(self.doc.requests, self.results, strict=True):
            stage = None if request.asked_model == "unedited" else self.stage
            answers[request.number][request.target is None].append(answer_at(result, stage))
        return [ProbeAnswers(probe, *own) for probe, own in zip(self.doc.probes, answers, strict=True)]

    @property
    def judged(self) -> bool:
        """Whether a judge decides in the filter pipeline."""
        return any(result.judged for result in self.results)

    @property
    def lead(self) -> EditedAnswer[Answer]:
        """The first answer that knows the case's edit; a question that the model cannot be asked has none."""
        return next((result for result in self.results if result.edit or result.position), self.results[0])

    @property
    def contexts(self) -> list[ContextReport]:
        """What the edit put before the questions, where it is text."""
        return [result.context for result in self.results if result.context is not None]

    def of_kind(self, kind: str) -> list[ProbeAnswers]:
        """The answered probes of one kind, in document order."""
        return [answered for answered in self.probes if answered.probe.kind == kind]
