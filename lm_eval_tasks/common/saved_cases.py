"""Documents and prompts of a finished run, in place of a benchmark's records.

A task that is built with :class:`SavedCases` in its metadata reads no data and writes no prompt: it has the documents
of the run, and asks what the run asked. So its filters and scores apply to the saved answers, wherever the records are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SAVED_CASES = "saved_cases"  # key of the metadata; no setting of users, whose values are no SavedCases


class SavedCases:
    """What a run asked.

    Args:
        docs: the documents as their samples have them.
        prompts: for each document, the prompt of each of its probes.
        separator: white space between all prompts and targets, as a chat template has; ``None``: that of each question.
        left_out: metrics that no record of the run's data could fill.
    """

    def __init__(
        self,
        docs: Sequence[dict[str, Any]],
        prompts: Sequence[Sequence[str]],
        separator: str | None = None,
        left_out: Sequence[str] = (),
    ) -> None:
        self.docs, self.separator, self.left_out = list(docs), separator, left_out
        self._prompts = {id(doc): list(own) for doc, own in zip(self.docs, prompts, strict=True)}

    def prompts_of(self, doc: Mapping[str, Any]) -> list[str]:
        """The prompts of one of :attr:`docs`, which the object itself names: two documents may be equal."""
        return self._prompts[id(doc)]


def has_saved_cases(metadata: Mapping[str, Any]) -> bool:
    """Whether the metadata of a task hold saved cases."""
    return isinstance(metadata.get(SAVED_CASES), SavedCases)


def take_saved_cases(metadata: dict[str, Any]) -> SavedCases | None:
    """Remove the saved cases from the metadata of a task, if there are some."""
    return metadata.pop(SAVED_CASES) if has_saved_cases(metadata) else None
