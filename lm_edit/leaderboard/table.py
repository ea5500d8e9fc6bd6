"""From results and cases to the leaderboard: rows, sections, and the number, interval and tests of every cell."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd
from tqdm import tqdm

from edit_hooks.utils.errors import EditingError
from lm_edit.leaderboard import significance
from lm_edit.leaderboard.board import OUTSIDE, Board, Cell, Row, RowCost, RowKey, Section
from lm_edit.leaderboard.columns import CaseSet, Column, ColumnKey, describe_case_sets, find_columns
from lm_edit.leaderboard.pairs import compare_among, compare_rows, is_testable, pairs_of
from lm_edit.leaderboard.significance import Ranking
from lm_edit.results.comparing import EDITED_MODEL, name_of, run_labels
from lm_edit.results.filters import is_missing, text_of
from lm_edit.results.statistics.case_scores import CaseScores, combine_seeds, read_case_scores
from lm_edit.results.statistics.intervals import RESAMPLES
from lm_edit.results.statistics.of_rows import (
    ALL_EQUAL,
    NO_SAMPLES,
    NOT_SCORED,
    Estimate,
    Summary,
    estimate,
    over_seeds,
    summary_of,
)
from lm_eval_tasks.common.scoring.columns import is_number
from lm_eval_tasks.report.model_parts import differing_parts

MAX_GAPS = 4  # columns named in the note on coverage
DIGITS = 12  # of values that are ranked
# Two editors whose coverage of a column differs by more are named below their table.
COVERAGE_GAP = 0.1
UNKNOWN_WEIGHTS = "weights not recorded"
UNKNOWN_PARTS = "tokenizer and configuration not recorded"
OF_GROUP = "a group has no cases of its own"
UPDATE = "update_norm_ratio"
UNSCORED = "unscored"  # without a reason that is known here


class CaseData(NamedTuple):
    """What the leaderboard needs of the scores of single cases, a small part of their table.

    Attributes:
        scores: (run, column) -> scores. sets: (run, task) -> which cases were asked.
    """

    scores: dict[tuple[str, ColumnKey], CaseScores]
    sets: dict[tuple[str, str], CaseSet]


def read_case_data(cases: pd.DataFrame) -> CaseData:
    """Read the table of :func:`lm_edit.load_cases`."""
    if cases.empty:
        return CaseData({}, {})
    groups = cases.groupby(["run", "task", "metric", "stage", "filter"], sort=False)
    scores = {(str(run), ColumnKey(*map(str, names))): read_case_scores(rows) for (run, *names), rows in groups}
    # The columns of a task have the same documents under the same edits, whose names are long.
    shared: dict[object, Any] = {}
    for key, one in scores.items():
        documents, edits = (shared.setdefault(part, part) for part in (one.documents, one.edits))
        scores[key] = one._replace(documents=documents, edits=edits)
    return CaseData(scores, describe_case_sets(cases))


def build_board(
    results: pd.DataFrame,
    cases: pd.DataFrame | CaseData,
    *,
    resamples: int = RESAMPLES,
    first: Mapping[str, Sequence[tuple[str, str]]] | None = None,
    durations: Mapping[str, tuple[float, int]] | None = None,
    progress: bool = False,
) -> Board:
    """Compute the leaderboard.

    Args:
        results: as :func:`lm_edit.load_results` returns them, filtered if wanted.
        cases: as :func:`lm_edit.load_cases` returns them, or what was read of them; may have more runs.
        resamples: of every bootstrap and permutation test.
        first: columns that are shown first, see :func:`find_columns`.
        durations: result file -> seconds of its evaluation, and its number of cases.
        progress: show a bar on a terminal.

    Raises:
        EditingError: for no results, runs of a column that were not computed in the same way, and missing libraries.
    """
    significance.check_libraries()
    if results.empty:
        raise EditingError("there are no results to compare.")
    read = cases if isinstance(cases, CaseData) else read_case_data(cases)
    columns = find_columns(results, read.sets, first)
    refuse_two_files(results)
    rows = _read_rows(results, read.scores, durations or {})
    shares = {column.key for column in columns if column.is_share}
    groups = {column.key for column in columns if column.is_group}
    for row in rows:
        for key, cell in row.cells.items():
            summary = Summary(cell.value, key in shares, cell.stderr, cell.num_scored, not row.key["group_size"])
            found = estimate(
                summary,
                row.scores.get(key),
                resamples=resamples,
                without_scores=OF_GROUP if key in groups else NO_SAMPLES,
            )
            cell.interval, cell.note = found.interval, _note(found)
    return Board(tuple(columns), tuple(_sections(rows, columns, resamples, progress)), resamples)


def refuse_two_files(results: pd.DataFrame) -> None:
    """Refuse a task of one run in several files, as with other judges: their cases could not be distinguished."""
    for (_, task), rows in results.groupby(["run", "task"], sort=False):
        files = sorted(set(rows["file"]))
        if len(files) > 1:
            raise EditingError(
                f"run {rows.iloc[0]['run_name']} has results of {task} in {len(files)} files, as with two judges: "
                f"{', '.join(files)}. Give only one of them."
            )


def _note(found: Estimate) -> str:
    """What a number lacks, and why; "" if it has an interval and tests."""
    if found.note in ("", NOT_SCORED):
        return found.note
    lacks = (["no interval"] if found.interval is None else []) + ([] if found.note == ALL_EQUAL else ["no test"])
    return f"{' and '.join(lacks)}: {found.note}"


_CasesByColumn = Mapping[tuple[str, ColumnKey], CaseScores]
_Durations = Mapping[str, tuple[float, int]]


def _read_rows(results: pd.DataFrame, cases: _CasesByColumn, durations: _Durations) -> list[Row]:
    texts = results[list(EDITED_MODEL)].map(text_of)
    rows = []
    for names, group in results.groupby([texts[name] for name in EDITED_MODEL], sort=False):
        # Two runs of equal settings that both have a column, as with other edits in a stream, are rows of their own.
        repeated = group.duplicated(["task", "metric", "stage", "filter", "seed"]).any()
        parts = [part for _, part in group.groupby("run", sort=True)] if repeated else [group]
        rows += [_read_row(RowKey(tuple(map(str, names))), part, cases, durations) for part in parts]
    return sorted(rows, key=lambda row: (row.key, row.run_ids))


def _read_row(key: RowKey, group: pd.DataFrame, cases: _CasesByColumn, durations: _Durations) -> Row:
    found: dict[ColumnKey, dict[str, tuple[Cell, CaseScores | None]]] = {}
    summaries: dict[ColumnKey, dict[str, Summary]] = {}
    runs: dict[str, dict[str, str]] = {}
    records = group.sort_values(["seed", "run"]).to_dict("records")
    for record in records:
        column = ColumnKey(*(str(record[name]) for name in ColumnKey._fields))
        run, seed = str(record["run"]), text_of(record["seed"])
        known = cases.get((run, column))
        cell = _read_cell({str(name): value for name, value in record.items()}, known)
        found.setdefault(column, {})[seed] = cell, known
        summaries.setdefault(column, {})[seed] = summary_of(record)
        runs.setdefault(seed, {})[run] = str(record["run_name"])
    cells, scores = {}, {}
    for column, by_seed in found.items():
        values = {seed: cell.value for seed, (cell, _) in by_seed.items()}
        cells[column], known = _over_seeds(by_seed, list(summaries[column].values()))
        if len(runs) > 1:
            cells[column].by_seed = values
        if known is not None:
            scores[column] = known
    first = {str(name): value for name, value in records[0].items()}
    return Row(
        key,
        first,
        name_of(first),
        {seed: tuple(names) for seed, names in runs.items()},
        tuple(name for names in runs.values() for name in names.values()),
        text_of(first["settings_origin"]),
        _cost(records, durations),
        # All metrics of a task have the summary of its edits.
        sum({(record["run"], record["task"]): _questions_trained(record.get("edit")) for record in records}.values()),
        cells,
        scores,
    )


def _questions_trained(edit: object) -> int:
    """The count in the summary of the edits of a result."""
    number = edit.get("questions_trained") if isinstance(edit, Mapping) else None
    return int(number) if is_number(number) else 0


def _cost(records: Sequence[Mapping[Hashable, Any]], durations: _Durations) -> RowCost:
    """The cost of the edits of a row; tasks of one benchmark share them, and so do runs of one stream."""
    longest: dict[str, tuple[float, Mapping[str, Any]]] = {}  # seed -> seconds of all edits, summary of the edits
    peaks = []
    for record in records:
        edit = record.get("edit")
        edit = edit if isinstance(edit, Mapping) else {}
        number, each, peak = (edit.get(name) for name in ("edits", "seconds_per_edit", "peak_memory_gib"))
        if is_number(number) and is_number(each) and number:
            seed = text_of(record["seed"])
            longest[seed] = max(longest.get(seed, (0.0, edit)), (number * each, edit), key=lambda found: found[0])
        if is_number(peak):
            peaks.append(float(peak))
    each, norm = ([edit.get(name) for _, edit in longest.values()] for name in ("seconds_per_edit", UPDATE))
    total = _mean([seconds for seconds, _ in longest.values()])
    known = [durations[file] for file in dict.fromkeys(str(record["file"]) for record in records) if file in durations]
    num_cases = sum(number for _, number in known)
    per_case = math.fsum(seconds for seconds, _ in known) / num_cases if num_cases else None
    return RowCost(total, max(peaks, default=None), _mean(each), _mean(norm), per_case)


def _mean(values: Sequence[object]) -> float | None:
    """Over the numbers among the values."""
    numbers = [float(str(value)) for value in values if is_number(value)]
    return math.fsum(numbers) / len(numbers) if numbers else None


def _over_seeds(
    by_seed: Mapping[str, tuple[Cell, CaseScores | None]], summaries: Sequence[Summary]
) -> tuple[Cell, CaseScores | None]:
    """The mean over seeds; of runs that share their cases, with the scores of all."""
    if len(by_seed) == 1:
        return next(iter(by_seed.values()))
    cells = [cell for cell, _ in by_seed.values()]
    known = [scores for _, scores in by_seed.values() if scores is not None]
    fewest = min(cells, key=lambda cell: cell.num_scored)
    value, or_0 = (math.fsum(parts) / len(cells) for parts in zip(*((c.value, c.or_0) for c in cells), strict=True))
    stderr = over_seeds(summaries).stderr
    mean = Cell(value, fewest.num_scored, fewest.num_cases, fewest.left_out, stderr, or_0=or_0)
    return mean, combine_seeds(known) if len(known) == len(cells) else None


def _read_cell(record: Mapping[str, object], cases: CaseScores | None) -> Cell:
    num_scored, excluded, failed = (_count(record[name]) for name in ("n", "excluded", "failed"))
    left_out = {OUTSIDE: excluded}
    if cases is None:
        left_out[UNSCORED] = failed
        num_cases = num_scored + excluded + failed
    else:
        num_cases = cases.num_due
        if is_missing(record["n"]):
            num_scored = cases.num_scored
        if num_scored == cases.num_scored:
            left_out |= {reason or UNSCORED: number for reason, number in cases.reasons.items()}
        else:  # a score that is made of several means, each over its own cases
            left_out[UNSCORED] = failed
    value, stderr, or_0 = (
        math.nan if is_missing(part) else float(str(part))
        for part in (record["value"], record["stderr"], record.get("or_0"))
    )
    reasons = {reason: count for reason, count in left_out.items() if count}
    return Cell(value, num_scored, num_cases, reasons, stderr, or_0=or_0)


def _count(value: object) -> int:
    return 0 if is_missing(value) else int(float(str(value)))


def _sections(rows: Sequence[Row], columns: Sequence[Column], resamples: int, progress: bool) -> Iterable[Section]:
    models = list(dict.fromkeys(row.key.model for row in rows))
    for model in models:
        own = [row for row in rows if row.key.model == model]
        title = _model_title(model, models)
        references = [row for row in own if row.is_reference]
        groups: dict[tuple[str, str], list[Row]] = {}
        for row in own:
            if not row.is_reference:
                groups.setdefault((_apart(row), row.key.regime), []).append(row)
        if not groups:
            yield _section(title, references, [], columns, resamples, progress)
        for (kind, regime), editors in sorted(groups.items(), key=lambda item: (item[0][0], _order(item[0][1]))):
            yield _section(f"{title}: {kind}{regime}", references, editors, columns, resamples, progress)


def _apart(row: Row) -> str:
    """What keeps a row from the others of its regime, as the beginning of a title; "" for nothing."""
    if row.key.acts_in_prompt:
        return "editors that act through the prompt, "
    return "editors trained on questions of the evaluation, " if row.questions_trained else ""


def _model_title(model: Sequence[str], models: Sequence[Sequence[str]]) -> str:
    """The model's name; where several have it, with the weights or the other parts in which they differ."""
    name, weights, parts = model
    same = [other for other in models if other[0] == name]
    details = [weights or UNKNOWN_WEIGHTS] if len({own for _, own, _ in same}) > 1 else []
    like = [own for _, digest, own in same if digest == weights]
    if len(like) > 1:  # of equal weights
        details.append(differing_parts(like)[parts] or UNKNOWN_PARTS)
    return f"{name} ({', '.join(details)})" if details else name


def _order(regime: str) -> tuple[bool, bool, str]:
    return regime.startswith("stream"), not regime.startswith("single"), regime


def _section(
    title: str,
    references: Sequence[Row],
    editors: Sequence[Row],
    columns: Sequence[Column],
    resamples: int,
    progress: bool,
) -> Section:
    # The cells of the unedited model are shared by the sections of a model; nothing in them depends on the section.
    _distinguish(editors)
    _distinguish(references)
    for column in tqdm(columns, desc="Testing", unit="column", disable=None if progress else True):
        if column.higher_is_better is not None:
            _rank(editors, column)
            _compare(references, editors, column, resamples)
    ranking, note = _ranking(editors, columns)
    positions = {name: number for number, name in enumerate(ranking.names)} if ranking else {}
    ordered = sorted(editors, key=lambda row: (positions.get(row.label, len(positions)), row.label))
    shown = [column for column in columns if column.is_default and column.higher_is_better is not None]
    bar = tqdm(shown, desc="Comparing every two", unit="column", disable=None if progress else True)
    pairs = {column.key: found for column in bar if (found := pairs_of(ordered, column, resamples))}
    return Section(title, (*references, *ordered), ranking, note, _coverage_note(editors, columns), pairs)


def _distinguish(rows: Sequence[Row]) -> None:
    """Give rows that stand side by side their labels."""
    if rows:
        labels = run_labels(pd.DataFrame([{**row.first, "run": row.run_ids[0], "seed": None} for row in rows]))
        for row in rows:
            row.label = labels[row.run_ids[0]]


def _rank(editors: Sequence[Row], column: Column) -> None:
    cells = [row.cells[column.key] for row in editors if column.key in row.cells]
    scored = [cell for cell in cells if not math.isnan(cell.value)]
    values = [_signed(cell, column) for cell in scored]
    for cell, value in zip(scored, values, strict=True):
        cell.rank = 1 + sum(other > value for other in values)
        cell.is_best = cell.rank == 1 and min(values) < value


def _signed(cell: Cell, column: Column) -> float:
    """The value, higher is better, without the last digits, in which sums of other orders differ."""
    return round(cell.value, DIGITS) * (1 if column.higher_is_better else -1)


def _compare(references: Sequence[Row], editors: Sequence[Row], column: Column, resamples: int) -> None:
    """Test every editor against the unedited model and against the best editor, each a family of its own."""
    tested = [row for row in editors if is_testable(row, column.key)]
    unedited = [row for row in references if is_testable(row, column.key)]
    best = [row for row in tested if row.cells[column.key].rank == 1]
    # An unedited model that answers under other options is another one.
    by_options = {row.key["answer_options"]: row for row in reversed(unedited)}
    if unedited:
        own = [by_options.get(row.key["answer_options"]) for row in tested]
        pairs = zip(tested, own, strict=True)
        results = significance.corrected([compare_rows(row, one, column.key, resamples) for row, one in pairs])
        for row, result in zip(tested, results, strict=True):
            row.cells[column.key].versus_unedited = result
    if best:
        rivals = [row for row in tested if row.cells[column.key].rank != 1]
        # The cases that choose the best editor are those of the tests, so all pairs of editors are the family.
        num_pairs = math.comb(len(tested), 2)
        found = [compare_among(row, best[0], column.key, resamples, num_pairs) for row in rivals]
        results = significance.corrected(found, num_pairs)
        for row, result in zip(rivals, results, strict=True):
            row.cells[column.key].versus_best = result


def _ranking(editors: Sequence[Row], columns: Sequence[Column]) -> tuple[Ranking | None, str]:
    def has(row: Row, column: Column) -> bool:
        return column.key in row.cells and not math.isnan(row.cells[column.key].value)

    directed = [column for column in columns if column.is_default and column.higher_is_better is not None]
    usual = [column for column in directed if 2 * sum(has(row, column) for row in editors) > len(editors)]
    complete = [row for row in editors if all(has(row, column) for column in usual)]
    benchmarks = [column.benchmark for column in usual]
    if len(complete) < significance.MIN_EDITORS or len(set(benchmarks)) < significance.MIN_BENCHMARKS:
        needed = f"{significance.MIN_EDITORS} editors with columns of {significance.MIN_BENCHMARKS} benchmarks"
        return None, (
            f"No mean ranks: they need {needed} in common among those shown first; here they are {len(complete)} and "
            f"{len(set(benchmarks))}."
        )
    signed = [[_signed(row.cells[column.key], column) for column in usual] for row in complete]
    ranking = significance.rank_editors([row.label for row in complete], signed, benchmarks)
    left_out = sorted(row.label for row in editors if row not in complete)
    over = ", ".join(column.key.name for column in usual)
    note = f"Over {over}." if ranking else f"No mean ranks: all of these editors are equal in {over}."
    if not left_out:
        return ranking, note
    lack = "lacks" if len(left_out) == 1 else "lack"
    return ranking, f"{note} Without {', '.join(left_out)}, which {lack} some of these."


def _coverage_note(editors: Sequence[Row], columns: Sequence[Column]) -> str:
    """The columns in which two editors have scores of very different shares of the cases; "" if there are none."""
    gaps = []
    for column in columns:
        cells = [(row.cells[column.key].coverage, row.label) for row in editors if column.key in row.cells]
        known = sorted(pair for pair in cells if not math.isnan(pair[0]))
        if column.higher_is_better is not None and known and known[-1][0] - known[0][0] > COVERAGE_GAP:
            (least, worse), (most, better) = known[0], known[-1]
            gaps.append(f"{column.key.name} ({worse} {least:.0%}, {better} {most:.0%})")
    if not gaps:
        return ""
    more = f" and {len(gaps) - MAX_GAPS} more columns" if len(gaps) > MAX_GAPS else ""
    return (
        f"Coverage differs: {'; '.join(gaps[:MAX_GAPS])}{more}. Values and ranks are over scored cases only, which may "
        "be the easier ones; the tests compare the cases that both editors scored."
    )
