"""Progress of a sweep: lines while its runs execute, and a table of their states."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from edit_hooks.utils.durations import spell_duration
from edit_hooks.utils.printable import printable
from lm_edit.sweeps.execution.runs import LOG, RESULTS, log_tail, state_of
from lm_edit.sweeps.execution.schedule import Event
from lm_edit.sweeps.execution.scored import missing_scores
from lm_edit.sweeps.planning.grid import Run

UNSCORED = "done, no case scored"
# As tqdm writes it; of edits the time left is our own, after further texts.
PROGRESS_BAR = re.compile(
    r"(?P<what>[^:|]+): +\d+%\|[^|]*\| (?P<done>\S+)/(?P<total>\S+) "
    r"\[[\d:]+<(?P<left>[\d:]+|\?)(.*; (?P<ours>.*) left)?"
)
SUMMARY_SECONDS = 60.0  # between summaries while nothing else is printed


class Progress:
    """Prints a line for every event, and a summary where nothing has happened for a while.

    Args:
        names: folder -> name of its run.
        say: prints a line.

    Attributes:
        unscored: folder of a finished run in which no case is scored -> the reason.
    """

    def __init__(self, names: Mapping[Path, str], say: Callable[[str], None]) -> None:
        self.names, self.say = names, say
        self.started: dict[Path, float] = {}
        self.counts: Counter[str] = Counter()
        self.unscored: dict[Path, str] = {}
        self._last = time.monotonic()

    def report(self, event: Event) -> None:
        """Print an event."""
        if event.state == "started":
            self.started[event.folder] = time.monotonic()
        else:
            self.started.pop(event.folder, None)
            self.counts[event.state] += 1
        taken = f" in {spell_duration(event.seconds)}" if event.seconds else ""
        state = event.state
        log = event.folder / LOG  # a run that could not be submitted has none
        details = f"\n{event.reason}" + (f"\n  log: {log}" if log.is_file() else "") if event.reason else ""
        if state == "damaged":  # the log is that of an execution that ended well
            details = f"\n  {event.reason}"
        elif state in ("done", "there already"):
            described, reason = _scored_state(event.folder)
            if described == UNSCORED:
                self.unscored[event.folder] = reason
            if state == "done":
                state, details = described, f"\n  {reason}" if reason else ""
        self.say(f"[{sum(self.counts.values())}/{len(self.names)}] {state}{taken}: {self.names[event.folder]}{details}")
        self._last = time.monotonic()

    def tick(self) -> None:
        """Print a summary if nothing was printed for a while."""
        if time.monotonic() - self._last < SUMMARY_SECONDS:
            return
        self._last = time.monotonic()
        self.say(self.summary())

    def summary(self) -> str:
        """Numbers of runs by state, and those that run."""
        ended = [f"{number} {state}" for state, number in self.counts.items()]
        waiting = len(self.names) - sum(self.counts.values()) - len(self.started)
        running = [f"{self.names[folder]} ({self._stage(folder, since)})" for folder, since in self.started.items()]
        parts = [*ended, f"{waiting} waiting"] + ([f"running: {'; '.join(running)}"] if running else [])
        return ", ".join(parts)

    @staticmethod
    def _stage(folder: Path, since: float) -> str:
        return ", ".join(filter(None, [spell_duration(time.monotonic() - since), stage_of(folder)]))


def stage_of(folder: Path) -> str:
    """What a run does by the last progress bar of its log, as ``Scoring under edits: 96 of 256, 20 s left``."""
    for line in reversed(log_tail(folder)):
        if bar := PROGRESS_BAR.search(line):
            left = bar["ours"] or bar["left"]
            rest = "" if left == "?" else f", {left} left"
            return printable(f"{bar['what'].strip()}: {bar['done']} of {bar['total']}{rest}")
    return ""


def state_rows(runs: Sequence[Run], folders: Sequence[Path]) -> list[tuple[str, str, str]]:
    """State, name and folder of every run.

    With the reason of failed and damaged ones and of those without a score, and with the stage of those that run.
    """
    rows: list[tuple[str, str, str]] = []
    for run, folder in zip(runs, folders, strict=True):
        state, reason = described_state(folder, run.tasks)
        reason = reason or (stage_of(folder) if state == "running" else "")
        rows.append((state, run.name, f"{folder.name}: {reason}" if reason else folder.name))
    return rows


def described_state(folder: Path, tasks: Sequence[str]) -> tuple[str, str]:
    """State of a run with these tasks, and the reason of a failure, of damage or of missing scores.

    A finished run in which no case has a score is named as such. Reads the files of the run: call it once.
    """
    state, reason = state_of(folder, tasks)
    return _scored_state(folder) if state == "done" else (state, reason)


def _scored_state(folder: Path) -> tuple[str, str]:
    """State of a run whose results are complete, and the reason if cases have no score."""
    nothing, reason = missing_scores(folder / RESULTS)
    return (UNSCORED if nothing else "done"), reason


def count_states(rows: Sequence[tuple[str, str, str]]) -> str:
    """The number of runs by state, such as ``3 done, 1 failed``."""
    return ", ".join(f"{number} {state}" for state, number in Counter(row[0] for row in rows).items())
