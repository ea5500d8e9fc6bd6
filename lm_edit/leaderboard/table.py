"""The leaderboard as data: sections of runs that compete, and the number, interval and tests of every cell."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pandas as pd

from edit_hooks.utils.errors import EditingError
from lm_edit.leaderboard import significance
from lm_edit.leaderboard.case_scores import CaseScores, read_case_scores
from lm_edit.leaderboard.columns import Column, ColumnKey, describe_case_sets, find_columns, is_missing, text_of
from lm_edit.leaderboard.significance import Comparison, Interval, Ranking

# Runs that agree in these are one row: one edited model, evaluated by one or several commands.
ROW = (
    "model",
    "model_hash",
    "editor",
    "mode",
    "settings",
    "context_editor",
    "num_edits",
    "edit_batch_size",
    "group_size",
    "icl",
    "seed",
)
UNEDITED = "unedited"
NO_SAMPLES = "no interval and no test: the run has no samples (--log_samples)"
NOT_SCORED = "no case was scored"
NOT_FROM_CASES = "no interval and no test: the score does not follow from single cases"
ALL_EQUAL = "no interval: fewer than two scored cases, or all score the same"


class RowKey(NamedTuple):
    """What runs of one row have in common, as texts; empty where a field does not apply."""

    model: str
    model_hash: str
    editor: str
    mode: str
    settings: str
    context_editor: str
    num_edits: str
    edit_batch_size: str
    group_size: str
    icl: str
    seed: str

    @property
    def acts_in_prompt(self) -> bool:
        """Whether the new fact is in the prompt: context editors, and runs with ``icl``."""
        return self.context_editor == "True" or self.icl not in ("", "no", "False")

    @property
    def is_reference(self) -> bool:
        """Whether this is the unedited model without the new fact in the prompt."""
        return self.editor == UNEDITED and not self.acts_in_prompt

    @property
    def regime(self) -> str:
        """How edits are made: one at a time, all at once, or one after another."""
        if self.mode == "sequential":
            edits = f"stream of {self.num_edits} edits" if self.num_edits else "stream of edits"
            return edits + (f", {self.edit_batch_size} per step" if self.edit_batch_size not in ("", "1") else "")
        if self.mode == "batch":
            return f"{self.num_edits} edits at once" if self.num_edits else "all edits at once"
        return "single edits" + (f" in groups of {self.group_size}" if self.group_size not in ("", "1") else "")


class Section(NamedTuple):
    """Rows that compete: one model, one regime, context editors apart.

    Attributes:
        title: model, regime, and whether editors act through the prompt.
        rows: the unedited model first if it was evaluated, then editors by mean rank.
        ranking: mean ranks over the columns shown first; ``None`` if there are too few.
        ranking_note: which columns and editors the ranking is about, or why there is none.
    """

    title: str
    rows: tuple[Row, ...]
    ranking: Ranking | None
    ranking_note: str

    def evaluated(self, columns: Sequence[Column]) -> list[Column]:
        """The columns in which one of its editors has a number; the unedited model alone makes no comparison."""
        editors = [row for row in self.rows if not row.is_reference] or self.rows
        return [column for column in columns if any(column.key in row.cells for row in editors)]


@dataclass
class Cell:
    """One number.

    Attributes:
        value: the score, as the result file has it; NaN if nothing was scored.
        num_scored: cases behind the value.
        num_cases: cases asked.
        left_out: reason -> number of cases without a score.
        interval: 95% interval over cases.
        note: why there is no interval.
        rank: within the section; equal values share the better rank. ``None`` for the unedited model.
        versus_unedited: paired test against the unedited model, adjusted.
        versus_best: paired test against the best editor of the section, adjusted.
    """

    value: float
    num_scored: int
    num_cases: int
    left_out: dict[str, int]
    interval: Interval | None = None
    note: str = ""
    rank: int | None = None
    versus_unedited: Comparison | None = None
    versus_best: Comparison | None = None

    @property
    def marks(self) -> str:
        """A dagger for a difference from the unedited model, a double dagger for one from the best editor."""
        dagger = "†" if self.versus_unedited and self.versus_unedited.p < significance.ALPHA else ""
        return dagger + ("‡" if self.versus_best and self.versus_best.p < significance.ALPHA else "")


@dataclass
class Row:
    """One edited model.

    Attributes:
        key: what its runs have in common.
        label: the editor, with what tells it from other rows of its section.
        runs: ids of its runs.
        run_names: their readable names.
        settings_origin: ``shipped``, ``given`` or ``untuned: ...``.
        cells: by column.
    """

    key: RowKey
    label: str
    runs: tuple[str, ...]
    run_names: tuple[str, ...]
    settings_origin: str
    cells: dict[ColumnKey, Cell]
    scores: dict[ColumnKey, CaseScores] = field(repr=False)

    @property
    def is_reference(self) -> bool:
        """Whether this is the unedited model."""
        return self.key.is_reference


@dataclass(frozen=True)
class Board:
    """The leaderboard, to be rendered."""

    columns: tuple[Column, ...]
    sections: tuple[Section, ...]
    resamples: int

    @property
    def default_columns(self) -> list[Column]:
        """The columns shown first."""
        return [column for column in self.columns if column.is_default]

    @property
    def methods(self) -> list[str]:
        """How intervals, tests and ranks are computed, as sentences."""
        return [
            f"Intervals: 95%, BCa bootstrap over cases ({self.resamples} resamples, fixed seed); given where a score "
            "follows from its cases: means, pooled means (over the chains or questions of all cases), and edit scores, "
            "which are harmonic means of means.",
            "n/N: cases with a score, of the cases asked; the reasons of the others are with each number.",
            f"† differs from the unedited model, ‡ differs from the best editor of the section (bold), p < "
            f"{significance.ALPHA}: exact McNemar test for scores that are 0 or 1, otherwise a permutation test of the "
            "difference, paired by case; Holm correction over the rows of a column. The best editor is chosen by "
            "the same cases, which makes ‡ slightly liberal.",
            "Ranks: within a section; equal values share the better rank. Mean ranks: Friedman's test with columns as "
            "blocks, then Nemenyi's test; columns of one benchmark share cases, which makes it liberal.",
            "Editors that act through the prompt see the new fact when they answer; they are compared with each other.",
        ]


def build_board(results: pd.DataFrame, cases: pd.DataFrame, *, resamples: int = significance.RESAMPLES) -> Board:
    """Compute the leaderboard.

    Args:
        results: as :func:`lm_edit.results.load_results` returns them, filtered if wanted.
        cases: as :func:`lm_edit.results.load_cases` returns them; may have more runs.
        resamples: of every bootstrap and permutation test.

    Raises:
        EditingError: for no results, runs of a column that were not computed in the same way, and missing libraries.
    """
    significance.check_libraries()
    if results.empty:
        raise EditingError("there are no results to compare.")
    columns = find_columns(results, describe_case_sets(cases))
    _refuse_two_files(results)
    rows = _read_rows(results, _cases_by_column(cases))
    for row in rows:
        for key, cell in row.cells.items():
            _add_interval(cell, row.scores.get(key), resamples)
    return Board(tuple(columns), tuple(_sections(rows, columns, resamples)), resamples)


def _refuse_two_files(results: pd.DataFrame) -> None:
    """Refuse a task of one run in several files, as with other judges: their cases could not be told apart."""
    for (_, task), rows in results.groupby(["run", "task"], sort=False):
        files = sorted(set(rows["file"]))
        if len(files) > 1:
            raise EditingError(
                f"run {rows.iloc[0]['run_name']} has results of {task} in {len(files)} files, as with two judges: "
                f"{', '.join(files)}. Give only one of them."
            )


_CasesByColumn = Mapping[tuple[str, ColumnKey], CaseScores]


def _cases_by_column(cases: pd.DataFrame) -> dict[tuple[str, ColumnKey], CaseScores]:
    if cases.empty:
        return {}
    groups = cases.groupby(["run", "task", "metric", "stage", "filter"], sort=False)
    return {(str(run), ColumnKey(*map(str, names))): read_case_scores(rows) for (run, *names), rows in groups}


def _read_rows(results: pd.DataFrame, cases: _CasesByColumn) -> list[Row]:
    texts = results[list(ROW)].map(text_of)
    rows = []
    for names, group in results.groupby([texts[name] for name in ROW], sort=False):
        # Two runs of equal settings that both have a column, as with other edits in a stream, are rows of their own.
        repeated = group.duplicated(["task", "metric", "stage", "filter"]).any()
        parts = [part for _, part in group.groupby("run", sort=True)] if repeated else [group]
        rows += [_read_row(RowKey(*map(str, names)), part, cases, named=repeated) for part in parts]
    return sorted(rows, key=lambda row: (row.key, row.runs))


def _read_row(key: RowKey, group: pd.DataFrame, cases: _CasesByColumn, *, named: bool) -> Row:
    cells, scores = {}, {}
    for record in group.to_dict("records"):
        column = ColumnKey(*(str(record[name]) for name in ColumnKey._fields))
        known = cases.get((str(record["run"]), column))
        if known is not None:
            scores[column] = known
        cells[column] = _read_cell({str(name): value for name, value in record.items()}, known)
    runs = dict(sorted(zip(map(str, group["run"]), map(str, group["run_name"]), strict=True)))
    label = key.editor if not named else next(iter(runs.values()))
    origin = text_of(group["settings_origin"].iloc[0])
    return Row(key, label, tuple(runs), tuple(runs.values()), origin, cells, scores)


def _read_cell(record: Mapping[str, object], cases: CaseScores | None) -> Cell:
    num_scored, excluded, failed = (_count(record[name]) for name in ("n", "excluded", "failed"))
    left_out = {"outside the population": excluded}
    if cases is None:
        left_out["no usable answer"] = failed
        num_cases = num_scored + excluded + failed
    else:
        num_cases = len(cases.documents)
        if is_missing(record["n"]):
            num_scored = cases.num_scored
        if num_scored == cases.num_scored:
            left_out |= {reason or "unscored": number for reason, number in cases.reasons.items()}
        else:  # a score that is made of several means, each over its own cases
            left_out["no usable answer"] = failed
    value = record["value"]
    number = math.nan if is_missing(value) else float(str(value))
    return Cell(number, num_scored, num_cases, {reason: count for reason, count in left_out.items() if count})


def _count(value: object) -> int:
    return 0 if is_missing(value) else int(float(str(value)))


def _add_interval(cell: Cell, scores: CaseScores | None, resamples: int) -> None:
    if math.isnan(cell.value):
        cell.note = NOT_SCORED
    elif scores is None:
        cell.note = NO_SAMPLES
    elif not scores.gives(cell.value):
        cell.note = NOT_FROM_CASES
    else:
        cell.interval = scores.interval(resamples)
        cell.note = "" if cell.interval else ALL_EQUAL


def _sections(rows: Sequence[Row], columns: Sequence[Column], resamples: int) -> Iterable[Section]:
    models = dict.fromkeys((row.key.model, row.key.model_hash) for row in rows)
    same_names = {name for name, _ in models if sum(name == other for other, _ in models) > 1}
    for model, digest in models:
        own = [row for row in rows if (row.key.model, row.key.model_hash) == (model, digest)]
        title = f"{model} ({digest})" if model in same_names else model
        references = [row for row in own if row.is_reference]
        groups: dict[tuple[bool, str], list[Row]] = {}
        for row in own:
            if not row.is_reference:
                groups.setdefault((row.key.acts_in_prompt, row.key.regime), []).append(row)
        if not groups:
            yield _section(title, references, [], columns, resamples)
        for (in_prompt, regime), editors in sorted(groups.items(), key=lambda item: (item[0][0], _order(item[0][1]))):
            kind = "editors that act through the prompt, " if in_prompt else ""
            yield _section(f"{title}: {kind}{regime}", references, editors, columns, resamples)


def _order(regime: str) -> tuple[bool, bool, str]:
    return regime.startswith("stream"), not regime.startswith("single"), regime


def _section(
    title: str, references: Sequence[Row], editors: Sequence[Row], columns: Sequence[Column], resamples: int
) -> Section:
    # The cells of the unedited model are shared by the sections of a model; nothing in them depends on the section.
    _tell_apart(editors)
    for column in columns:
        if column.higher_is_better is not None:
            _rank(editors, column)
            _compare(references, editors, column, resamples)
    ranking, note = _ranking(editors, columns)
    positions = {name: number for number, name in enumerate(ranking.names)} if ranking else {}
    ordered = sorted(editors, key=lambda row: (positions.get(row.label, len(positions)), row.label))
    return Section(title, (*references, *ordered), ranking, note)


def _tell_apart(rows: Sequence[Row]) -> None:
    """Add to equal labels the settings or seed in which the rows differ."""
    by_label: dict[str, list[Row]] = {}
    for row in rows:
        by_label.setdefault(row.label, []).append(row)
    for same in by_label.values():
        differing = [name for name in ("settings", "seed", "icl") if len({getattr(row.key, name) for row in same}) > 1]
        for row in same:
            details = ", ".join(f"{name} {getattr(row.key, name) or 'none'}" for name in differing)
            row.label += f" ({details})" if details else ""
    repeated = [row for row in rows if [other.label for other in rows].count(row.label) > 1]
    for row in repeated:  # they differ in something else, as in data type or edits
        row.label += f" [{row.runs[0][:6]}]"


def _rank(editors: Sequence[Row], column: Column) -> None:
    cells = [row.cells[column.key] for row in editors if column.key in row.cells]
    scored = [cell for cell in cells if not math.isnan(cell.value)]
    for cell in scored:
        better = (other.value > cell.value if column.higher_is_better else other.value < cell.value for other in scored)
        cell.rank = 1 + sum(better)


def _compare(references: Sequence[Row], editors: Sequence[Row], column: Column, resamples: int) -> None:
    """Test every editor against the unedited model and against the best editor, each a family of its own."""
    tested = [row for row in editors if _is_testable(row, column.key)]
    unedited = [row for row in references if _is_testable(row, column.key)]
    best = [row for row in tested if row.cells[column.key].rank == 1]
    if unedited:
        results = significance.corrected([_test(row, unedited[0], column.key, resamples) for row in tested])
        for row, result in zip(tested, results, strict=True):
            row.cells[column.key].versus_unedited = result
    if best:
        rivals = [row for row in tested if row.cells[column.key].rank != 1]
        results = significance.corrected([_test(row, best[0], column.key, resamples) for row in rivals])
        for row, result in zip(rivals, results, strict=True):
            row.cells[column.key].versus_best = result


def _is_testable(row: Row, key: ColumnKey) -> bool:
    return key in row.cells and key in row.scores and row.scores[key].gives(row.cells[key].value)


def _test(row: Row, other: Row, key: ColumnKey, resamples: int) -> Comparison | None:
    return row.scores[key].compared(other.scores[key], resamples)


def _ranking(editors: Sequence[Row], columns: Sequence[Column]) -> tuple[Ranking | None, str]:
    def has(row: Row, column: Column) -> bool:
        return column.key in row.cells and not math.isnan(row.cells[column.key].value)

    directed = [column for column in columns if column.is_default and column.higher_is_better is not None]
    usual = [column for column in directed if 2 * sum(has(row, column) for row in editors) > len(editors)]
    complete = [row for row in editors if all(has(row, column) for column in usual)]
    if len(complete) < significance.MIN_EDITORS or len(usual) < significance.MIN_COLUMNS:
        return None, (
            f"No mean ranks: they need {significance.MIN_EDITORS} editors with {significance.MIN_COLUMNS} columns in "
            f"common among those shown first; here they are {len(complete)} and {len(usual)}."
        )
    signed = [[row.cells[c.key].value * (1 if c.higher_is_better else -1) for c in usual] for row in complete]
    ranking = significance.rank_editors([row.label for row in complete], signed)
    left_out = sorted(row.label for row in editors if row not in complete)
    note = f"Over {', '.join(column.key.name for column in usual)}."
    return ranking, note + (f" Without {', '.join(left_out)}, which lack some of these." if left_out else "")
