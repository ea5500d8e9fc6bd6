"""Progress of a sweep: lines while its runs execute, and a table of their states."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from edit_hooks.utils.durations import spell_duration
from edit_hooks.utils.printable import printable
from lm_edit.sweeps.execution.runs import LOG, RESULTS, log_tail, state_of
from lm_edit.sweeps.execution.schedule import ELSEWHERE, Event
from lm_edit.sweeps.execution.scored import missing_scores

UNSCORED = "done, no case scored"
# As tqdm writes it; of edits the time left is our own, after further texts.
PROGRESS_BAR = re.compile(
    r"(?P<what>[^:|]+): +\d+%\|[^|]*\| (?P<done>\S+)/(?P<total>\S+) "
    r"\[[\d:]+<(?P<left>[\d:]+|\?)(, *(?P<rate>[\d.]+\S*/\S*[^\s,\]]))?(.*; (?P<ours>.*) left)?"
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
        self.elsewhere: set[Path] = set()
        self.counts: Counter[str] = Counter()
        self.unscored: dict[Path, str] = {}
        self._last = time.monotonic()

    def report(self, event: Event) -> None:
        """Print an event."""
        if event.state == ELSEWHERE:
            self.elsewhere.add(event.folder)
            stage = stage_of(event.folder)
            self.say(f"another process executes {self.names[event.folder]}" + (f" ({stage})" if stage else ""))
            return
        self.elsewhere.discard(event.folder)
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
        waiting = len(self.names) - sum(self.counts.values()) - len(self.started) - len(self.elsewhere)
        running = [f"{self.names[folder]} ({self._stage(folder, since)})" for folder, since in self.started.items()]
        others = [
            f"{self.names[folder]} ({stage_of(folder) or 'no progress yet'})" for folder in sorted(self.elsewhere)
        ]
        parts = [*ended, f"{waiting} waiting"] + ([f"running: {'; '.join(running)}"] if running else [])
        parts += [f"in another process: {'; '.join(others)}"] if others else []
        return ", ".join(parts)

    @staticmethod
    def _stage(folder: Path, since: float) -> str:
        return ", ".join(filter(None, [spell_duration(time.monotonic() - since), stage_of(folder)]))


class Stage(NamedTuple):
    """What a run does, by the last progress bar of its log.

    Attributes:
        what: as ``Scoring under edits``. done, total: as the bar counts. rate: as ``9.7prompt/s``. left: as ``20 s``.
            A part that the bar lacks is "".
    """

    what: str
    done: str
    total: str
    rate: str
    left: str

    @property
    def share(self) -> str:
        """``38%``; "" where the bar counts in other units."""
        if not (self.done.isdigit() and self.total.isdigit() and int(self.total)):
            return ""
        return f"{int(self.done) / int(self.total):.0%}"


def read_stage(folder: Path) -> Stage | None:
    """What a run does; ``None`` if its log has no bar."""
    for line in reversed(log_tail(folder)):
        if bar := PROGRESS_BAR.search(line):
            left = bar["ours"] or bar["left"]
            parts = (bar["what"].strip(), bar["done"], bar["total"], bar["rate"] or "", "" if left == "?" else left)
            return Stage(*map(printable, parts))
    return None


def stage_of(folder: Path) -> str:
    """What a run does, as ``Scoring under edits: 96 of 256, 20 s left``."""
    stage = read_stage(folder)
    if stage is None:
        return ""
    return f"{stage.what}: {stage.done} of {stage.total}" + (f", {stage.left} left" if stage.left else "")


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
