"""Tasks whose documents bring no edits, in runs that have no one edited model to ask."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from lm_eval.api.instance import Instance

from edit_hooks.answers import is_broken
from edit_hooks.lm.options.editing import EditingOptions
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.logs import get_logger

log = get_logger("lm_eval.edited_hf")

MAX_LISTED = 5


class WithOptions(Protocol):
    """What the check reads of the model."""

    options: EditingOptions

    @property
    def rank(self) -> int:
        """Number of the process; the first one logs."""


class OrdinaryTasks:
    """Check of ordinary tasks: groups of edits refuse them, beside single edits a warning names the model they ask."""

    def __init__(self, lm: WithOptions) -> None:
        self._lm = lm
        self._has_warned = False

    def begin_evaluation(self, names: Iterable[str]) -> None:
        """Check the tasks of an evaluation, and warn again."""
        self._has_warned = False
        self.check(names)

    def check(self, names: Iterable[str | None]) -> None:
        """Check the names of ordinary tasks; they are not read where one edited model answers these tasks.

        Raises:
            EditingError: as :func:`refuse_in_groups`.
        """
        options = self._lm.options
        if options.mode != "single" and not options.group_size:
            return
        found = list(dict.fromkeys(name or "a task without a name" for name in names))
        refuse_in_groups(options, found)
        if found and not self._has_warned and self._lm.rank == 0:
            log.warning(
                "mode=single edits the model for each case alone, so tasks without edits are answered by the unedited "
                "model: %s. mode=sequential, mode=batch and load_edit ask them of an edited one.",
                _listed(found),
            )
        self._has_warned |= bool(found)

    def check_whole_texts(self, requests: Sequence[Instance]) -> None:
        """Check requests of `loglikelihood_rolling`, which only ordinary documents may ask for.

        Raises:
            EditingError: for a document with edits, under which its text would not be scored; as :meth:`check`.
        """
        if any(map(has_edit_requests, requests)):
            raise EditingError(
                "a document with edit_requests asks for loglikelihood_rolling, which is not answered under its edits. "
                "Use output_type loglikelihood or generate_until; or drop edit_requests, and the edited model of "
                "mode=sequential, mode=batch or load_edit scores the text."
            )
        self.check(request.task_name for request in requests)

    def warn_of_broken(self, answers: Sequence[object]) -> None:
        """Log how many answers to ordinary tasks are missing because the logits were not finite."""
        if broken := sum(map(is_broken, answers)):
            log.warning(
                "%d of %d answers to tasks without edits are missing: the edited model's logits are not finite (NaN "
                "or infinity). Documents without an answer are unscored.",
                broken,
                len(answers),
            )


def has_edit_requests(request: Instance) -> bool:
    """Whether the document of a request brings edits of its own."""
    return isinstance(request.doc, Mapping) and "edit_requests" in request.doc


def refuse_in_groups(options: EditingOptions, names: Sequence[str]) -> None:
    """Refuse ordinary tasks in a run of groups.

    Raises:
        EditingError: with ``group_size``, under which scores of the unedited model would have the editor's name.
    """
    if options.group_size and names:
        raise EditingError(
            f"group_size={options.group_size} gives every group of cases a model of its own, so there is no edited "
            f"model to ask tasks without edits: {_listed(names)}. Ask them with mode=batch without group_size, "
            "mode=sequential or load_edit, or of the unedited model with mode=none."
        )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more
