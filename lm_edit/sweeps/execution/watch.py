"""The runs of a sweep's folder while they are executed, by their files alone."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from edit_hooks.utils.durations import spell_duration
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.printable import printable
from edit_hooks.utils.storage.json_io import read_json
from lm_edit.results.files.runs import finished_files, read_result_file
from lm_edit.sweeps.execution.runs import RESULTS, SETTINGS
from lm_edit.sweeps.execution.status import described_state, read_stage
from lm_edit.sweeps.planning.grid import Run

HEADER = ("state", "stage", "share", "rate", "left", "run", "remark")


class _Run(NamedTuple):
    """A run by its settings; ``size`` is the same for runs that ask as many cases."""

    folder: Path
    name: str
    tasks: tuple[str, ...]
    size: str


class _Finished(NamedTuple):
    cases: int
    seconds: float | None


class Seen(NamedTuple):
    """The runs at one time.

    Attributes:
        rows: one for each run, see :data:`HEADER`. summary: lines. is_executed: a process executes a run. has_ended: no
            run is left. has_failed: some run has failed, or has damaged results.
    """

    rows: list[tuple[str, ...]]
    summary: list[str]
    is_executed: bool
    has_ended: bool
    has_failed: bool


def _left(counts: Counter[str]) -> int:
    """Number of runs that are not executed to their end."""
    return sum(counts[state] for state in ("running", "interrupted", "waiting"))


def _planned(folder: Path, run: Run) -> _Run:
    return _Run(folder, run.name, tuple(run.tasks), _size(run.content, run.tasks))


def _size(content: Mapping[str, Any], tasks: Sequence[str]) -> str:
    return repr((sorted(tasks), content.get("limit"), (content.get("model_args") or {}).get("data")))


class SweepFolder:
    """The runs below a folder, read again by every :meth:`read`; finished runs are read once.

    Args:
        folder: ``--out`` of a sweep, or a folder of several.
        runs: those of a plan, which may not be in the folder yet; ``None``: all that are below it.

    Raises:
        EditingError: if there is no run below it.
    """

    def __init__(self, folder: Path, runs: Sequence[Run] | None = None) -> None:
        self.folder = folder
        self._planned = None if runs is None else [_planned(folder / run.folder_name, run) for run in runs]
        self._finished: dict[Path, _Finished] = {}
        self._states: dict[Path, tuple[str, str]] = {}
        if not self._runs():
            raise EditingError(f"{folder} has no runs of a sweep ({SETTINGS}); give the --out of lm-edit sweep.")

    def read(self) -> Seen:
        """Read the runs as they are now."""
        runs = self._runs()
        states = {run.folder: self._state(run) for run in runs}
        counts = Counter(state for state, _ in states.values())
        executed = counts["running"]
        rows: list[tuple[str, ...]] = []
        for run in runs:
            state, remark = states[run.folder]
            stage = read_stage(run.folder) if state == "running" else None
            if state in ("waiting", "interrupted"):
                remark = f"waits for a place beside {executed} running" if executed else "no process executes the sweep"
            parts = (stage.what, stage.share, stage.rate, stage.left) if stage else ("", "", "", "")
            rows.append((state, *parts, run.name, " ".join(remark.split())))
        has_failed = bool(counts["failed"] or counts["damaged"])
        return Seen(rows, self._summary(runs, counts), bool(executed), not _left(counts), has_failed)

    def _summary(self, runs: list[_Run], counts: Counter[str]) -> list[str]:
        parts = [", ".join(f"{number} {state}" for state, number in counts.items())]
        by_size: dict[str, int] = {}
        for run in runs:
            if run.folder in self._finished:
                by_size[run.size] = self._finished[run.folder].cases
        known = [by_size.get(run.size) for run in runs]
        scored = sum(one.cases for one in self._finished.values())
        if known and None not in known:
            total = sum(filter(None, known))
            parts.append(f"{scored} of {total} cases are in finished runs ({scored / total:.0%})" if total else "")
        elif scored:
            parts.append(f"{scored} cases are in finished runs")
        seconds = [one.seconds for one in self._finished.values() if one.seconds is not None]
        if seconds and (left := _left(counts)):
            each = math.fsum(seconds) / len(seconds)
            places = max(counts["running"], 1)
            total_left = each * math.ceil(left / places)
            parts.append(f"about {spell_duration(total_left)} left, at {spell_duration(each)} per finished run")
        return [part for part in parts if part]

    def _runs(self) -> list[_Run]:
        if self._planned is not None:
            return self._planned
        found = []
        for path in sorted(self.folder.rglob(SETTINGS)):
            try:
                content: Any = read_json(path, "run of a sweep")
                name, tasks = printable(str(content["name"])), tuple(map(str, content["tasks"]))
                size = _size(content, tasks)
            except (EditingError, KeyError, TypeError, AttributeError):
                name, tasks, size = printable(path.parent.name), (), str(path)
            found.append(_Run(path.parent, name, tasks, size))
        return found

    def _state(self, run: _Run) -> tuple[str, str]:
        if run.folder in self._states:
            return self._states[run.folder]
        state, reason = described_state(run.folder, run.tasks)
        if state.startswith("done"):
            with contextlib.suppress(EditingError):
                files = [read_result_file(path) for path in finished_files(run.folder / RESULTS, "results_*.json")]
                cases = sum(file.num_cases(task) or 0 for file in files for task in file.tasks)
                known = [file.seconds for file in files if file.seconds is not None]
                self._finished[run.folder] = _Finished(cases, math.fsum(known) if known else None)
            self._states[run.folder] = state, reason
        return state, reason
