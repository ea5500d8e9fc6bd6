"""One record of a benchmark: an edit and the questions about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from edit_hooks.request import EditRequest, RequestGroup
from edit_hooks.request import with_separator as request_with_separator
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.text.readable import readable

CaseT = TypeVar("CaseT", bound="Case")

EFFICACY, PARAPHRASE, NEIGHBORHOOD = "efficacy", "paraphrase", "neighborhood"
KINDS = (EFFICACY, PARAPHRASE, NEIGHBORHOOD)


class OmittedRecord(EditingError):
    """A valid record that the benchmark's release leaves out, for the reason in the message.

    Such records are counted in the results; they are no bad records.
    """


@readable
class Question(NamedTuple):
    """A prompt, its wanted answer, and the competing answer where there is one."""

    prompt: str
    wanted: str
    other: str | None = None


@dataclass(frozen=True)
@readable
class Case:
    """An edit and its standard questions; subclasses add further ones.

    Attributes:
        request: the edit, or the first of several.
        further_requests: edits that are made together with the first, as the facts behind a multi-hop question.
        paraphrases: rewordings of the edit prompt; the edit's new answer is wanted.
        neighbors: prompts of other facts; their own answer is wanted.
        extras: JSON-able fields of the record that the task documents keep.
    """

    request: EditRequest
    paraphrases: Sequence[Question] = ()
    neighbors: Sequence[Question] = ()
    extras: Mapping[str, Any] = field(default_factory=dict)
    further_requests: Sequence[EditRequest] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        readable(cls)  # before @dataclass, which keeps a repr that the class has

    @property
    def requests(self) -> RequestGroup:
        """All edits of the case."""
        return (self.request, *self.further_requests)

    def questions(self, kind: str) -> Sequence[Question]:
        """The questions of one of :data:`KINDS`; for efficacy that is the edit prompt."""
        request = self.request
        by_kind: dict[str, Sequence[Question]] = {
            EFFICACY: [Question(request.text, request.target_new, request.target_true)],
            PARAPHRASE: self.paraphrases,
            NEIGHBORHOOD: self.neighbors,
        }
        return by_kind[kind]


def count_missing(cases: Sequence[Case]) -> dict[str, int]:
    """Numbers of cases without an old answer, paraphrases or neighbors, for the results."""
    return {
        "without_old_answer": sum(case.request.target_true is None for case in cases),
        "without_paraphrases": sum(not case.paraphrases for case in cases),
        "without_neighbors": sum(not case.neighbors for case in cases),
    }


def with_separator(case: CaseT, separator: str | None) -> CaseT:
    """The case with a separator for its prompts and answers; one that has a separator of its own keeps it."""
    if separator is None:
        return case
    further = [request_with_separator(request, separator) for request in case.further_requests]
    return replace(case, request=request_with_separator(case.request, separator), further_requests=further)
