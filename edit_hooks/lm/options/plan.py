"""`EditPlan`: cases whose edits are written together, and their order.

Modes: ``none`` (no edit), ``single`` (each case's own edits on the unedited model), ``batch`` (all edits at once, or
groups of ``group_size`` cases, each group on the unedited model), ``sequential`` (a stream in steps of
``edit_batch_size`` cases on the same weights) and ``loaded`` (all questions under one saved edit). In ``batch`` and
``sequential`` the edits come from ``edits=``, never from the documents of the tasks.

A case is one edit, or several (a multi-hop question). Sizes and checkpoints count cases, as the k-edit settings of
MQuAKE do. An edit that several cases share is made once: in a stream at its first case, else once per group.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from edit_hooks.prompt_context import PromptContext
from edit_hooks.request import EditRequest, InTurn, RequestGroup
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.hashing import key_of
from edit_hooks.utils.text.readable import readable

MODES = ("none", "single", "batch", "sequential", "loaded")

Cases: TypeAlias = tuple[RequestGroup, ...]


@dataclass(frozen=True)
@readable
class EditPlan:
    """The groups of requests of a run.

    Attributes:
        cases: per group, the requests of each case; empty for ``none`` and ``single``. :func:`chunked` makes it.
        unusable: request key -> reason for requests that keep their place in a group and are not written.
        cumulative: groups are written one after another on the same weights.
        checkpoints: numbers of cases after which all cases edited so far are answered as well.
        origin: where the cases were read, for the results (JSON-able).
    """

    cases: tuple[Cases, ...] = ()
    cumulative: bool = False
    checkpoints: tuple[int, ...] = ()
    unusable: Mapping[str, str] = field(default_factory=dict)
    origin: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        planned = sum(map(len, self.cases))
        beyond = [checkpoint for checkpoint in self.checkpoints if checkpoint > planned]
        if beyond:
            raise EditingError(f"checkpoints={beyond} lie beyond the {planned} edited cases of this run.")

    @functools.cached_property
    def groups(self) -> tuple[RequestGroup, ...]:
        """The distinct requests that are written together; in a stream without those of earlier groups."""
        made: set[str] = set()
        groups = []
        for cases in self.cases:
            distinct = {request.key: request for request in _requests(cases) if request.key not in made}
            groups.append(tuple(distinct.values()))
            if self.cumulative:
                made.update(distinct)  # not |= of a view, which copies the set at every step
        return tuple(groups)

    @property
    def requests(self) -> list[EditRequest]:
        """The requests of all groups, in order."""
        return [request for group in self.groups for request in group]

    @property
    def most_written_together(self) -> int:
        """Largest number of cases of a group that need an edit that no case before it makes."""
        most, made = 0, set[str]()
        for cases in self.cases:
            num_cases = 0
            if not self.cumulative:
                made.clear()
            for case in cases:
                keys = {request.key for request in case}
                num_cases += not keys <= made
                made |= keys
            most = max(most, num_cases)
        return most

    @property
    def digest(self) -> str | None:
        """Digest of the edits of all cases, in their order; ``None`` without groups."""
        keys = [[request.key for request in case] for cases in self.cases for case in cases]
        return key_of(keys) if keys else None

    @functools.cached_property
    def request_keys(self) -> list[str]:
        """Keys of all requests, sorted."""
        return sorted(self._groups_with)

    def group_of(self, requests: Sequence[EditRequest]) -> int | None:
        """Index of the group under which a case with these requests is answered.

        In a stream, that in which the last of them is made. Otherwise the first group that has the case, or else the
        first that has all its requests. Requests that must be written in turn need steps of their own, in that order.

        Returns:
            ``None`` if there is no such group, and for no requests.
        """
        keys = [request.key for request in requests]
        if not keys or not all(key in self._groups_with for key in keys):
            return None
        in_turn = isinstance(requests, InTurn)
        if self.cumulative:
            steps = [self._groups_with[key][0] for key in keys]
            return None if in_turn and steps != sorted(set(steps)) else max(steps)
        if in_turn:  # the requests of a group are written jointly
            return None
        own = self._group_of_case.get(frozenset(keys))
        if own is not None:
            return own
        shared = set.intersection(*(set(self._groups_with[key]) for key in keys))
        return min(shared) if shared else None

    @functools.cached_property
    def _groups_with(self) -> Mapping[str, list[int]]:
        """Request key -> indices of the groups in which it is written."""
        found: dict[str, list[int]] = {}
        for index, group in enumerate(self.groups):
            for request in group:
                found.setdefault(request.key, []).append(index)
        return found

    @functools.cached_property
    def _group_of_case(self) -> Mapping[frozenset[str], int]:
        """Keys of a case's requests -> index of the first group with such a case."""
        found: dict[frozenset[str], int] = {}
        for index, cases in enumerate(self.cases):
            for case in cases:
                found.setdefault(frozenset(request.key for request in case), index)
        return found

    def usable(self, group: RequestGroup) -> RequestGroup:
        """The requests of a group that are written."""
        return tuple(request for request in group if request.key not in self.unusable)

    @property
    def num_edits(self) -> int:
        """Number of edits, without unusable ones."""
        return sum(len(self.usable(group)) for group in self.groups)

    def in_context(self, context: PromptContext) -> EditPlan:
        """The same plan with its edits made in a context."""

        def case_in_context(case: RequestGroup) -> RequestGroup:
            return tuple(request.in_context(context) for request in case)

        return dataclasses.replace(self, cases=tuple(tuple(map(case_in_context, cases)) for cases in self.cases))

    def cases_before(self, step: int) -> int:
        """Number of cases in the groups before ``step``."""
        return self._cases_so_far[step]

    @functools.cached_property
    def _cases_so_far(self) -> tuple[int, ...]:
        """Number of cases in the first 0, 1, ... groups."""
        return tuple(itertools.accumulate(map(len, self.cases), initial=0))

    def checkpoint_steps(self) -> dict[int, int]:
        """Checkpoint (number of planned cases) -> the first step that reaches it."""
        planned = self._cases_so_far[1:]
        return {checkpoint: bisect.bisect_left(planned, checkpoint) for checkpoint in self.checkpoints}


def chunked(cases: Sequence[RequestGroup], size: int, *, cumulative: bool) -> tuple[Cases, ...]:
    """Consecutive groups of ``size`` cases; the last may be smaller.

    In a stream, cases without an edit of their own (earlier cases made them all) belong to the step before, so that
    every step writes something.
    """
    groups = [tuple(cases[start : start + size]) for start in range(0, len(cases), size)]
    if not cumulative:
        return tuple(groups)
    made: set[str] = set()
    steps: list[Cases] = []
    for group in groups:
        keys = {request.key for request in _requests(group)}
        if steps and keys <= made:
            steps[-1] += group
        else:
            steps.append(group)
        made |= keys
    return tuple(steps)


def _requests(cases: Sequence[RequestGroup]) -> Iterator[EditRequest]:
    return itertools.chain.from_iterable(cases)
