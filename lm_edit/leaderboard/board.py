"""The leaderboard as data: sections of runs that compete, their rows, and everything about each number."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from edit_hooks.utils.text.readable import readable
from lm_edit.leaderboard import significance
from lm_edit.leaderboard.columns import Column, ColumnKey
from lm_edit.leaderboard.significance import Comparison, Ranking
from lm_edit.results.comparing import EDITED_MODEL, MODEL, has_context
from lm_edit.results.statistics.case_scores import CaseScores
from lm_edit.results.statistics.intervals import Interval

UNEDITED = "unedited"
OUTSIDE = "outside the population"
# Regimes of modes without edits of a run's own; the mode of stock models is empty.
OTHER_REGIMES = {"loaded": "a saved edit", "": "evaluated as is"}


@readable
@dataclass(frozen=True, order=True)
class RowKey:
    """What the runs of one row share: the columns :data:`EDITED_MODEL` as texts, empty where one does not apply.

    Runs that agree in them are one edited model, evaluated by one or several commands.
    """

    texts: tuple[str, ...]

    def __getitem__(self, column: str) -> str:
        return self.texts[EDITED_MODEL.index(column)]

    @property
    def model(self) -> tuple[str, ...]:
        """Name, weights and other parts of the model."""
        return tuple(self[column] for column in MODEL)

    @property
    def acts_in_prompt(self) -> bool:
        """Whether the new fact is in the prompt: context editors, and runs with ``icl``."""
        return self["context_editor"] == "True" or has_context(self["icl"])

    @property
    def is_reference(self) -> bool:
        """Whether this is the unedited model without the new fact in the prompt."""
        return self["editor"] == UNEDITED and not self.acts_in_prompt

    @property
    def regime(self) -> str:
        """How edits are made: one at a time, all at once or in groups, one after another, loaded, or not at all."""
        if self["mode"] == "sequential":
            edits = f"stream of {self['num_edits']} edits" if self["num_edits"] else "stream of edits"
            return edits + (f", {self['edit_batch_size']} per step" if self["edit_batch_size"] not in ("", "1") else "")
        if self["mode"] == "batch":
            together = f"in groups of {self['group_size']}" if self["group_size"] else "at once"
            return f"{self['num_edits'] or 'all'} edits {together}"
        return OTHER_REGIMES.get(self["mode"], "single edits")


class Pair(NamedTuple):
    """Two editors of a section in one column.

    Attributes:
        first, second: their places among the editors of the section.
        wins, ties, losses: cases in which the first one is better, equal, worse; ``None`` where a case has no score of
            its own, as of an edit score.
        test: adjusted over all pairs of the column.
    """

    first: int
    second: int
    wins: int | None
    ties: int | None
    losses: int | None
    test: Comparison


@readable
class Section(NamedTuple):
    """Rows that compete: one model, one regime, context editors apart.

    Attributes:
        title: model, regime, and whether editors act through the prompt.
        rows: the unedited model first if it was evaluated, then editors by mean rank.
        ranking: mean ranks over the columns shown first; ``None`` if there are too few.
        ranking_note: which columns and editors the ranking is about, or why there is none.
        coverage_note: columns in which editors have scores of very different shares of the cases; "" if there are none.
        pairs: column -> every two editors with scores of the same cases, of the columns shown first.
    """

    title: str
    rows: tuple[Row, ...]
    ranking: Ranking | None
    ranking_note: str
    coverage_note: str
    pairs: Mapping[ColumnKey, tuple[Pair, ...]]

    def _summary(self) -> Iterator[tuple[str, object]]:
        yield "title", self.title
        yield "rows", [row.label for row in self.rows]
        yield "ranking", self.ranking_note

    def evaluated(self, columns: Sequence[Column]) -> list[Column]:
        """The columns in which one of its editors has a number; the unedited model alone makes no comparison."""
        editors = [row for row in self.rows if not row.is_reference] or self.rows
        return [column for column in columns if any(column.key in row.cells for row in editors)]


@dataclass
@readable
class Cell:
    """One number.

    Attributes:
        value: the score, as the result file has it; NaN if nothing was scored. Of several seeds, the mean.
        num_scored: cases behind the value; of several seeds, in the one with the fewest.
        num_cases: cases asked, at a stage of a stream of those edited by then; 0 if the file lacks their number, as of
            some groups.
        left_out: reason -> number of cases without a score.
        stderr: standard error in the result file, NaN without one; of several seeds, an upper bound.
        interval: 95% interval over cases.
        note: why there is no interval or no test.
        by_seed: seed -> value, for rows of several seeds, of which the column may have one alone.
        or_0: the value if cases without a usable answer count as 0; NaN where that means nothing.
        rank: within the section, by value; equal values share the better rank. ``None`` for the unedited model.
        is_best: it has rank 1, and an editor of the section has a worse one.
        versus_unedited: paired test against the unedited model, adjusted.
        versus_best: paired test against the best editor of the section, adjusted.
    """

    value: float
    num_scored: int
    num_cases: int
    left_out: dict[str, int]
    stderr: float = math.nan
    interval: Interval | None = None
    note: str = ""
    by_seed: dict[str, float] = field(default_factory=dict)
    or_0: float = math.nan
    rank: int | None = None
    is_best: bool = False
    versus_unedited: Comparison | None = None
    versus_best: Comparison | None = None

    @property
    def coverage(self) -> float:
        """Share of the cases of the population that have a score."""
        asked = self.num_cases - self.left_out.get(OUTSIDE, 0)
        return self.num_scored / asked if asked else math.nan

    @property
    def counts(self) -> str:
        """n/N; "" if unknown."""
        return f"{self.num_scored}/{self.num_cases}" if self.num_cases else ""

    @property
    def marks(self) -> str:
        """A dagger for a difference from the unedited model, a double dagger for one from the best editor."""
        dagger = "†" if self.versus_unedited and self.versus_unedited.p < significance.ALPHA else ""
        return dagger + ("‡" if self.versus_best and self.versus_best.p < significance.ALPHA else "")


class RowCost(NamedTuple):
    """What the edits of a row cost; ``None`` where no result has it.

    Attributes:
        seconds: of all edits together.
        peak_gib: the largest GPU memory.
        seconds_per_edit, update_norm_ratio: means over the edits of the task whose edits took longest.
        seconds_per_case: seconds of the row's evaluations by their number of cases; loading and edits are in them.
    """

    seconds: float | None
    peak_gib: float | None
    seconds_per_edit: float | None = None
    update_norm_ratio: float | None = None
    seconds_per_case: float | None = None


@dataclass
@readable
class Row:
    """One edited model.

    Attributes:
        key: the columns that its runs share.
        first: columns of its first run.
        label: the editor, with the settings that distinguish it from other rows of its section.
        runs: seed -> ids of its runs.
        run_names: readable names of all runs.
        settings_origin: ``shipped``, ``given`` or ``untuned: ...``.
        cost: of its edits; of several seeds, the mean of the seconds.
        questions_trained: questions of its cases on which its edits report a training, over tasks and seeds.
        cells: by column.
    """

    key: RowKey
    first: Mapping[str, object]
    label: str
    runs: dict[str, tuple[str, ...]]
    run_names: tuple[str, ...]
    settings_origin: str
    cost: RowCost
    questions_trained: int
    cells: dict[ColumnKey, Cell]
    scores: dict[ColumnKey, CaseScores] = field(repr=False)

    def _summary(self) -> Iterator[tuple[str, object]]:
        yield "label", self.label
        yield "seeds", list(self.runs)
        yield from ((key.name, cell.value) for key, cell in self.cells.items())

    @property
    def run_ids(self) -> tuple[str, ...]:
        """Ids of the runs of all seeds."""
        return tuple(run for runs in self.runs.values() for run in runs)

    @property
    def final_cells(self) -> dict[tuple[str, str], Cell]:
        """Cells by task and metric, after all edits: not those of checkpoints; of several filters the first."""
        found: dict[tuple[str, str], Cell] = {}
        for key, cell in self.cells.items():
            if not key.stage:
                found.setdefault((key.task, key.metric), cell)
        return found

    @property
    def is_reference(self) -> bool:
        """Whether this is the unedited model."""
        return self.key.is_reference


@dataclass(frozen=True)
@readable
class Board:
    """The leaderboard, to be rendered."""

    columns: tuple[Column, ...]
    sections: tuple[Section, ...]
    resamples: int

    def _summary(self) -> Iterator[tuple[str, object]]:
        yield "columns", len(self.columns)
        yield from ((section.title, [row.label for row in section.rows]) for section in self.sections)

    @property
    def default_columns(self) -> list[Column]:
        """The columns shown first."""
        return [column for column in self.columns if column.is_default]

    @property
    def methods(self) -> list[str]:
        """How intervals, tests and ranks are computed, as sentences."""
        return [
            "Intervals: 95%. Wilson's for shares of cases that each score 0 or 1. BCa bootstrap over cases "
            f"({self.resamples} resamples, fixed seed) for other scores that follow from their cases: means, pooled "
            "means (over the chains or questions of all cases), and edit scores, which are harmonic means of means; "
            "none where all cases score the same. Marked ~, where scores of single cases are missing: the normal "
            "approximation, 1.96 standard errors (of several seeds, their mean, an upper bound).",
            "n/N: cases with a score, of the cases asked (at a checkpoint of a stream, of those edited by then); the "
            "reasons of the others are with each number, and the value if those without a usable answer count as 0, "
            "which ranks nothing.",
            "† differs from the unedited model, ‡ differs from the best editor of the section (bold; not where all "
            f"are equal), p < {significance.ALPHA}: exact McNemar test for scores that are 0 or 1, otherwise a "
            "permutation test of the difference, paired by case, on the cases that both scored; Holm correction in "
            "each column of a section, of † over its rows and of ‡ over all pairs of its editors, because the best one "
            "is chosen by the same cases; none over columns.",
            "Runs that differ in the seed alone are one row, with the mean of their scores; intervals and tests are "
            "over cases, each with its scores under all seeds.",
            "Cases under one edit (groups of k edits) are drawn and swapped together. In a stream, and where all edits "
            "are made at once, all cases share one edited model: intervals and tests are about other cases of this "
            "model, not about other streams or orders.",
            "Ranks: within a section, by value over scored cases, with the coverage n/N beside; equal values share the "
            "better rank. Mean ranks: each benchmark ranks the editors by their mean rank over its columns; Friedman's "
            "test with benchmarks as blocks, then Nemenyi's test.",
            "Minutes and GiB: seconds per edit times edits, without loading and questions; the largest memory on GPUs.",
            "Editors that act through the prompt see the new fact when they answer; they are compared with each other. "
            "So are editors that were trained on a question of the evaluation, word for word.",
        ]
