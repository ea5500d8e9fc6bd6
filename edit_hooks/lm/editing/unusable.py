"""Edit requests and questions that a model or an editor cannot use, while the run goes on.

Such a case is unscored, with the reason, and counted in one warning before the weights are loaded where tokenizer and
config suffice to find it. Faults of the whole run (settings, missing statistics) stay errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from edit_hooks.deltas.delta import Delta
from edit_hooks.request import EditRequest, RequestGroup
from edit_hooks.utils.errors import EditingError, UnusableRequestError
from edit_hooks.utils.logs import get_logger

log = get_logger("lm_eval.edited_hf")

KeyT = TypeVar("KeyT")


class JointEdit(NamedTuple):
    """The edit of the usable requests of a group.

    Attributes:
        delta: the edit, which changes nothing if no request of the group is usable.
        unusable: request key -> reason for the others.
    """

    delta: Delta
    unusable: dict[str, str]


def edit_usable(write: Callable[[Sequence[EditRequest]], Delta], group: RequestGroup, *, edits_made: bool) -> JointEdit:
    """Write a group jointly; requests that fail alone are left out.

    Args:
        write: makes one delta of requests.
        edits_made: the run has made edits, so that its settings are usable and an error belongs to the requests.

    Raises:
        EditingError: if the error is not one of some requests of the group.
    """
    if not group:
        return JointEdit(Delta(), {})
    try:
        return JointEdit(write(group), {})
    except EditingError as error:
        if named := named_reasons(error, group):
            others = tuple(request for request in group if request.key not in named)
            rest = edit_usable(write, others, edits_made=edits_made)
            return JointEdit(rest.delta, named | rest.unusable)
        alone = reasons_alone(write, group, error)
        if not alone or (len(alone) == len(group) and not (edits_made or isinstance(error, UnusableRequestError))):
            raise
    usable = [request for request in group if request.key not in alone]
    return JointEdit(write(usable) if usable else Delta(), alone)


def named_reasons(error: EditingError, group: Sequence[EditRequest]) -> dict[str, str]:
    """Request key -> reason for the requests that an error names, if the group has others."""
    reasons = error.reasons if isinstance(error, UnusableRequestError) else {}
    named = {request.key: reasons[request.key] for request in group if request.key in reasons}
    return named if len(named) < len(group) else {}


def reasons_alone(
    write: Callable[[Sequence[EditRequest]], Delta], group: RequestGroup, error: EditingError
) -> dict[str, str]:
    """Request key -> reason for the requests of a group that cannot be written alone."""
    if len(group) == 1:
        return {group[0].key: str(error)}
    reasons = {}
    for request in group:
        try:
            write([request])
        except EditingError as reason:
            reasons[request.key] = str(reason)
    return reasons


def warn_of_unusable(what: str, reasons: Mapping[KeyT, str], total: int) -> None:
    """Log how many of a run's edits or questions are unusable, with the first reason."""
    if reasons:
        first = next(iter(reasons.values()))
        log.warning("%d of %d %s cannot be used and stay unscored; the first: %s", len(reasons), total, what, first)
