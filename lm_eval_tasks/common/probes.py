"""Cases and probes: what a document holds, and a case's answers sorted back to its probes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from edit_hooks.request import EditRequest
from lm_eval_tasks.common.answers import Answer

PLACEHOLDER = "placeholder"


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One question asked of the edited model.

    Args:
        kind: what it probes (efficacy, paraphrase, neighborhood, reverse_qa, ...).
        prompt: the text shown to the model, with instruction or wrapper, without outer white space.
        targets: continuations whose likelihood is asked, the wanted one first; each is joined by one space.
        generate: also let the model write on its own.
        gold: the answer that a generation is compared with.
        question: the bare question, for judges; the prompt if not given.
        only_unedited: a helper of which only the unedited model's answer matters; a judge is shown that one, and cases
            where it is correct are excluded from judged metrics marked ``filtered``.
    """

    kind: str
    prompt: str
    targets: Sequence[str] = ()
    generate: bool = False
    gold: str = ""
    question: str = ""
    only_unedited: bool = False


def case_doc(
    request: EditRequest,
    probes: Sequence[Probe],
    *,
    ask_unedited: bool,
    generate: bool,
    extras: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The document of one case: JSON-able, and the same in every run.

    A case without a probe of the task's kind still needs one request, because lm-eval cannot represent a document
    without requests. It gets a placeholder, the edit prompt itself, that no metric reads: the case stays visible as
    unscored.

    Args:
        request: the edit under which all probes of the case are answered.
        probes: the questions; may be empty.
        ask_unedited: whether the metrics need the unedited model's answers too.
        generate: whether the task's probes are generated (a placeholder then is, too).
        extras: further JSON-able fields to keep with the case.
    """
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
        **(extras or {}),
    }


@dataclass(frozen=True)
class ProbeAnswers:
    """The answers to one probe: one per target, and the generation if one was asked for."""

    probe: Mapping[str, Any]
    targets: Sequence[Answer] = field(default_factory=list)
    generation: Answer | None = None

    @property
    def wanted(self) -> Answer:
        """ScoredContinuation of the target the edit (or, for locality, its absence) should favor."""
        return self.targets[0]

    @property
    def other(self) -> Answer:
        """ScoredContinuation of the competing target."""
        return self.targets[1]


class CaseAnswers:
    """A case's answers in the order of its probes.

    Args:
        doc: the document made by :func:`case_doc`.
        answers: typed answers in the order in which :meth:`asked` lists the requests.
    """

    def __init__(self, doc: Mapping[str, Any], answers: Sequence[Answer]) -> None:
        self.doc = doc
        self.probes: list[ProbeAnswers] = []
        queue = iter(answers)
        for probe in doc["probes"]:
            targets = [next(queue) for _ in probe["targets"]]
            self.probes.append(ProbeAnswers(probe, targets, next(queue) if probe["generate"] else None))
        if (rest := len(list(queue))) > 0:
            raise AssertionError(f"{rest} answers more than requests in case {doc['case_id']}")

    def of(self, kind: str) -> list[ProbeAnswers]:
        """The answered probes of one kind, in order."""
        return [answered for answered in self.probes if answered.probe["kind"] == kind]

    @staticmethod
    def asked(doc: Mapping[str, Any]) -> Iterator[tuple[int, Mapping[str, Any], str | None]]:
        """Every request of a case in order: (probe number, probe, target), target ``None`` for a generation."""
        for number, probe in enumerate(doc["probes"]):
            for target in probe["targets"]:
                yield number, probe, target
            if probe["generate"]:
                yield number, probe, None
