"""Results and samples of ``edited_hf``: saved as a whole, or an error.

lm-eval logs a warning for what it could not save, and ends with exit code 0; a full disk leaves parts of files. It logs
the same for files that are whole and could not be pushed to the hub: these stay.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_LOGGER = "lm_eval.loggers.evaluation_tracker"


def save_or_fail(tracker: Any) -> None:
    """Let a tracker raise an ``EditingError`` for what it cannot save, and remove what it began to write."""
    if getattr(tracker, "output_path", None) is None or hasattr(tracker.save_results_aggregated, "_lm_eval_editing"):
        return
    tracker.save_results_aggregated = _checked(tracker, tracker.save_results_aggregated, "the results")
    tracker.save_results_samples = _checked(tracker, tracker.save_results_samples, "the samples")


def _checked(tracker: Any, save: Callable[..., Any], what: str) -> Callable[..., Any]:
    @functools.wraps(save)
    def saving(*args: Any, **kwargs: Any) -> Any:
        folder = _folder(tracker)
        before = {path: path.stat().st_size for path in _files(folder)}
        with _messages() as messages, _hub_watched(tracker) as hub:
            saved = save(*args, **kwargs)
        # The warning says that something failed, and the next line why.
        failed = [number for number, text in enumerate(messages) if text.startswith("Could not save")]
        if failed:
            reason = messages[failed[0] + 1] if len(messages) > failed[0] + 1 else "no reason is known"
            if hub is not None and hub.is_asked:
                _warn_of_hub(what, folder, reason)
                return saved
            _remove_new(folder, before, str(getattr(tracker, "date_id", "")))
            raise _error(what, folder, reason)
        return saved

    vars(saving)["_lm_eval_editing"] = True
    return saving


class _Hub:
    """The client of the hub; lm-eval asks it for something once the file on the disk is whole."""

    def __init__(self, api: Any) -> None:
        self.api, self.is_asked = api, False

    def __getattr__(self, name: str) -> Any:
        self.is_asked = True
        return getattr(self.api, name)


@contextmanager
def _hub_watched(tracker: Any) -> Iterator[_Hub | None]:
    """Scope in which a tracker's client of the hub is watched; ``None`` for a tracker without one."""
    api = getattr(tracker, "api", None)
    if api is None:
        yield None
        return
    tracker.api = hub = _Hub(api)
    try:
        yield hub
    finally:
        tracker.api = api


def _warn_of_hub(what: str, folder: Path, reason: str) -> None:
    from edit_hooks.utils.logs import get_logger

    get_logger("lm_eval.lm_eval_editing").warning(
        "%s are saved in %s, but could not be pushed to the hub: %s.", what, folder, reason.rstrip(".")
    )


def _error(what: str, folder: Path, reason: str) -> Exception:
    from edit_hooks.utils.errors import EditingError

    return EditingError(
        f"{what} cannot be saved in {folder}: {reason}. Their files are removed again. Make room, or name another "
        "--output_path; the same command takes edits and answers from the store."
    )


def _folder(tracker: Any) -> Path:
    """The folder that the tracker writes to."""
    path = Path(tracker.output_path)
    if path.suffix == ".json":
        return path.parent
    return path / str(tracker.general_config_tracker.model_name_sanitized)


def _files(folder: Path) -> Iterable[Path]:
    return [path for path in folder.glob("*.json*") if path.is_file()] if folder.is_dir() else []


def _remove_new(folder: Path, before: dict[Path, int], date: str) -> None:
    """Remove files that are new, and what was appended to others; those of other dates are of other runs.

    Without a date the tracker has written nothing: it sets the date before its first file.
    """
    for path in _files(folder):
        if not date or date not in path.name:
            continue
        if path not in before:
            path.unlink(missing_ok=True)
        elif path.stat().st_size > before[path]:
            with path.open("r+b") as file:
                file.truncate(before[path])


@contextmanager
def _messages() -> Iterator[list[str]]:
    """The messages that lm-eval's tracker logs, those of lower levels included, which it logs the reason with."""
    messages: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger, handler = logging.getLogger(_LOGGER), Collect(logging.INFO)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(min(level or logging.INFO, logging.INFO))
    try:
        yield messages
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
