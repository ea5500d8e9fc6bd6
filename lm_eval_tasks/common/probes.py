"""Probes, documents made of them, and the answers to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from edit_hooks.answers import FailedAnswer
from lm_eval_tasks.common.answers import Answer
from lm_eval_tasks.common.cases import Case

PLACEHOLDER = "placeholder"
NO_COMPETITOR = FailedAnswer("the question has no competing answer", is_failure=False)


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One question for the edited model.

    Attributes:
        kind: what the probe measures (efficacy, paraphrase, neighborhood, reverse_qa, ...).
        prompt: text shown to the model, including an instruction or wrapper, without outer white space.
        targets: continuations to score, the wanted one first; each is joined by one space.
        generate: also let the model write freely.
        gold: the answer that a generation is compared with.
        question: the bare question, for judges; the prompt by default.
        only_unedited: a helper of which only the unedited model's answer counts. A judge sees that answer, and judged
            metrics marked ``filtered`` exclude the case if it is correct.
    """

    kind: str
    prompt: str
    targets: Sequence[str] = ()
    generate: bool = False
    gold: str = ""
    question: str = ""
    only_unedited: bool = False


def case_doc(case: Case, probes: Sequence[Probe], *, ask_unedited: bool, generate: bool) -> dict[str, Any]:
    """The JSON-able document of a case: its edit, its probes and its extras.

    lm-eval cannot represent a document without requests. A case without probes therefore gets a placeholder, the edit
    prompt, which no metric reads, so that the case stays visible as unscored.

    Args:
        case: the edit under which all probes are answered.
        probes: the questions; may be empty.
        ask_unedited: whether the metrics also need the answers of the unedited model.
        generate: whether a placeholder is also generated, as the task's own probes are.
    """
    request = case.request
    if not probes:
        probes = [Probe(kind=PLACEHOLDER, prompt=request.text, targets=[request.target_new], generate=generate)]
    return {
        "case_id": request.case_id,
        "edit_requests": [request.to_dict()],
        "ask_unedited": ask_unedited,
        "probes": [
            {**asdict(probe), "targets": list(probe.targets), "question": probe.question or probe.prompt}
            for probe in probes
        ],
        **case.extras,
    }


def mark_unusable(doc: dict[str, Any]) -> dict[str, Any]:
    """A document in which half surrogate pairs are replaced, and the reason why its case is unscored.

    No tokenizer can encode such a text, and lm-eval can neither hash nor save it.
    """
    clean = _without_half_surrogates(doc)
    if clean == doc:
        return doc
    return {**clean, "unusable": "a text of the record holds half of a surrogate pair, which no tokenizer can encode"}


def _without_half_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    if isinstance(value, Mapping):
        return {key: _without_half_surrogates(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_half_surrogates(entry) for entry in value]
    return value


class ProbeRequest(NamedTuple):
    """One lm-eval request of a case.

    Attributes:
        number: index of the probe in its document.
        probe: the probe.
        target: the continuation to score; ``None`` for a generation.
    """

    number: int
    probe: Probe
    target: str | None


def case_requests(doc: Mapping[str, Any]) -> Iterator[ProbeRequest]:
    """The requests of a document in their fixed order.

    Those of a probe are its targets, then its generation.
    """
    for number, record in enumerate(doc["probes"]):
        probe = Probe(**record)
        for target in probe.targets:
            yield ProbeRequest(number, probe, target)
        if probe.generate:
            yield ProbeRequest(number, probe, None)


@dataclass(frozen=True)
class ProbeAnswers:
    """The answers to one probe: one per target, and the generation if any."""

    probe: Probe
    targets: Sequence[Answer] = ()
    generation: Answer | None = None

    @property
    def wanted(self) -> Answer:
        """The answer for the wanted target."""
        return self.targets[0]

    @property
    def other(self) -> Answer:
        """The answer for the competing target; a `FailedAnswer` if the question has none."""
        return self.targets[1] if len(self.targets) > 1 else NO_COMPETITOR


class CaseAnswers:
    """The answers of a case by probe.

    Args:
        doc: the document made by :func:`case_doc`.
        answers: typed answers in the order of :func:`case_requests`.
    """

    def __init__(self, doc: Mapping[str, Any], answers: Sequence[Answer]) -> None:
        self.doc = doc
        self.probes: list[ProbeAnswers] = []
        queue = iter(answers)
        for record in doc["probes"]:
            probe = Probe(**record)
            targets = [next(queue) for _ in probe.targets]
            self.probes.append(ProbeAnswers(probe, targets, next(queue) if probe.generate else None))
        if (rest := len(list(queue))) > 0:
            raise AssertionError(f"{rest} answers more than requests in case {doc['case_id']}")

    def of_kind(self, kind: str) -> list[ProbeAnswers]:
        """The answered probes of one kind, in document order."""
        return [answered for answered in self.probes if answered.probe.kind == kind]
