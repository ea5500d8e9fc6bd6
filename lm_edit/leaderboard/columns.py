"""Columns: one metric of one task, computed in one way on one set of cases. Files that disagree are refused."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from edit_hooks.utils.errors import EditingError, near_misses
from edit_hooks.utils.storage.yaml_io import read_yaml
from lm_edit.results.comparing import SAME_SCORE, differences
from lm_edit.results.filters import is_missing, text_of

KEY = ("task", "metric", "stage", "filter")
# Fields that must be equal for all runs of a column, with their names in messages.
IDENTITY = SAME_SCORE | {
    "cases": "set of cases",
    "prompts": "hash of the prompts",
    "edits": "set of edits",
}
# A field that is equal for runs of as many edits: streams of several lengths share a column.
SILENT = ("prompts", "edits")  # runs without them say nothing about them
EDITS = "edits_hash"
NAMES = IDENTITY | {EDITS: "set of edits or their order"}
MAX_TASKS_WITHOUT_ENTRY = 3
DEFAULTS = Path(__file__).with_name("columns.yaml")
Field = str | float | bool | None


class ColumnKey(NamedTuple):
    """Names of a column, as in the result files."""

    task: str
    metric: str
    stage: str
    filter: str

    @property
    def name(self) -> str:
        """Task and metric; the stage after ``@``; the filter after a comma, unless it is lm-eval's ``none``."""
        stage = f"@{self.stage}" if self.stage else ""
        return f"{self.task} {self.metric}{stage}" + (f",{self.filter}" if self.filter not in ("", "none") else "")


class Column(NamedTuple):
    """One column of the leaderboard.

    Attributes:
        key: its names.
        benchmark: folder of the benchmark; for lm-eval's tasks the top group that has a column, else their folder.
        higher_is_better: ``None`` for numbers without a direction, which are neither ranked nor tested.
        is_share: whether the task declares its values as shares, unlike counts, differences and log-probabilities.
        chance: value of guessing, if declared.
        identity: equal for all of its numbers; see :data:`IDENTITY`.
        is_default: shown first.
        is_group: the values are means over the tasks of a group, which has no cases of its own.
    """

    key: ColumnKey
    benchmark: str
    higher_is_better: bool | None
    is_share: bool
    chance: float | None
    identity: Mapping[str, str]
    is_default: bool
    is_group: bool = False


def find_columns(
    results: pd.DataFrame,
    case_sets: Mapping[tuple[str, str], CaseSet],
    first: Mapping[str, Sequence[tuple[str, str]]] | None = None,
) -> list[Column]:
    """The columns of the results, those of a benchmark together.

    Args:
        results: as :func:`lm_edit.load_results` returns them.
        case_sets: (run, task) -> which cases were asked, see :func:`describe_case_sets`.
        first: columns (task, metric) that are shown first, by what named them; ``None``: those of :data:`DEFAULTS`.

    Raises:
        EditingError: if the runs of a column differ in one of :data:`IDENTITY`, and for a name of which the results
            have no column.
    """
    top_groups = _top_groups(results)
    shown = _default_keys(results, top_groups) if first is None else _chosen_keys(results, first)
    columns, refusals = [], []
    for names, rows in results.groupby(list(KEY), sort=False):
        key = ColumnKey(*map(str, names))
        asked = _with_cases(rows, case_sets)
        refusals += [_refusal(asked, found.condition, key) for found in differences(asked, KEY, IDENTITY, SILENT)]
        refusals += _refusals_of_edits(key, rows)
        record = rows.iloc[0]
        better = record["higher_is_better"]
        columns.append(
            Column(
                key,
                top_groups.get(key.task) or text_of(record["benchmark"]) or key.task,
                None if is_missing(better) else bool(better),
                bool(rows["is_share"].all()),
                None if is_missing(record["chance"]) else float(record["chance"]),
                _identity(asked),
                key in shown,
                key.task in results.attrs.get("groups", {}),
            )
        )
    if refusals:
        raise EditingError(_message(refusals))
    order = {name: number for number, name in enumerate(dict.fromkeys(column.benchmark for column in columns))}
    return sorted(columns, key=lambda column: (order[column.benchmark], column.key.task in top_groups))


class CaseSet(NamedTuple):
    """Which documents a run asked.

    Attributes:
        cases: their number and a hash of their ids.
        prompts: hash of their prompts in lm-eval's own tasks, with the few-shot examples that were drawn; else "".
    """

    cases: str
    prompts: str


def describe_case_sets(cases: pd.DataFrame) -> dict[tuple[str, str], CaseSet]:
    """(run, task) -> which documents were asked; not for runs without samples."""
    described = {}
    if cases.empty:
        return {}
    hashes = cases["prompt_hash"].map(text_of) if "prompt_hash" in cases else pd.Series("", index=cases.index)
    for (run, task), rows in cases.assign(prompt_hash=hashes).groupby(["run", "task"], sort=False):
        documents = sorted({(str(doc), str(case)) for doc, case in zip(rows["doc_id"], rows["case_id"], strict=True)})
        prompts = sorted({(int(doc), text) for doc, text in zip(rows["doc_id"], rows["prompt_hash"], strict=True)})
        known = all(text for _, text in prompts)
        described[str(run), str(task)] = CaseSet(
            f"{len(documents)} cases ({_short_hash(documents)})", _short_hash(prompts) if known else ""
        )
    return described


def _short_hash(content: object) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()[:8]


def _with_cases(rows: pd.DataFrame, case_sets: Mapping[tuple[str, str], CaseSet]) -> pd.DataFrame:
    """The rows of a column with what :data:`IDENTITY` compares besides columns.

    Where some runs have no samples, ``--limit`` and ``--samples`` are what is known of all of them. Only batches and
    streams name their edits: the unedited model has none, and single edits are those of the cases. Prompts are compared
    where all runs were asked the same cases.
    """
    found = [case_sets.get((str(run), str(task))) for run, task in zip(rows["run"], rows["task"], strict=True)]
    known = [None if one is None else one.cases for one in found]
    options = [_case_options(*chosen) for chosen in zip(rows["limit"], rows["samples"], strict=True)]
    if None in known and len(set(known)) <= 2:
        sets = options
    else:
        sets = [cases or option for cases, option in zip(known, options, strict=True)]
    are_same = len(set(known) - {None}) == 1
    return rows.assign(
        cases=sets,
        prompts=[one.prompts if one is not None and one.prompts and are_same else None for one in found],
        edits=[text_of(edits) or None for edits in rows["edits"]],
    )


def _identity(rows: pd.DataFrame) -> dict[str, str]:
    """What :data:`IDENTITY` compares, of the first run that names its edits, or of the first."""
    records = rows.to_dict("records")
    record = next((one for one in records if not is_missing(one["edits"])), records[0])
    return {field: text_of(record[field]) for field in IDENTITY if field not in SILENT or not is_missing(record[field])}


def _case_options(limit: object, samples: object) -> str:
    """The options of lm-eval that chose the cases."""
    if not is_missing(limit):
        return f"--limit {text_of(limit)}"
    return f"--samples {samples}" if samples else "all cases"


class _Refusal(NamedTuple):
    field: str
    values: tuple[tuple[str, tuple[str, ...]], ...]
    column: str


def _refusals_of_edits(key: ColumnKey, rows: pd.DataFrame) -> Iterable[_Refusal]:
    """Refusals of batches and streams of as many edits that made others, as of another commit of the data."""
    recorded = rows[rows[EDITS].map(text_of) != ""]
    for _, alike in recorded.groupby(recorded["num_edits"].map(text_of), sort=True):
        if alike["edits"].nunique() == 1 and alike[EDITS].nunique() > 1:  # other names are refused as such
            yield _refusal(alike, EDITS, key)


def _refusal(rows: pd.DataFrame, field: str, key: ColumnKey) -> _Refusal:
    by_value: dict[str, list[str]] = {}
    for name, value in zip(rows["run_name"], rows[field], strict=True):
        if field not in SILENT or not is_missing(value):
            by_value.setdefault(text_of(value), []).append(str(name))
    return _Refusal(field, tuple((value, tuple(names)) for value, names in sorted(by_value.items())), key.name)


def _message(refusals: Iterable[_Refusal]) -> str:
    """One sentence per kind of difference, however many columns it is in."""
    columns: dict[tuple[str, tuple[tuple[str, tuple[str, ...]], ...]], list[str]] = {}
    for refusal in refusals:
        columns.setdefault((refusal.field, refusal.values), []).append(refusal.column)
    lines = []
    for (field, values), names in columns.items():
        shown = _shown(field, [value for value, _ in values])
        sides = "; ".join(f"{value} in {_some(runs)}" for value, (_, runs) in zip(shown, values, strict=True))
        lines.append(f"{_some(names)}: the {NAMES[field]} differs: {sides}. {_advice(field, values)}")
    return "a column cannot mix results that were not computed in the same way.\n" + "\n".join(lines)


def _advice(field: str, values: Sequence[tuple[str, tuple[str, ...]]]) -> str:
    if field == "cases":
        return (
            "Evaluate the same cases in all runs (same --limit, --samples, subset and data), or name one kind of run "
            "alone."
        )
    if field == "prompts":
        return (
            "The few-shot examples are others. Evaluate with the same --fewshot_seed in all runs; those of an earlier "
            "release in several processes, and stock model classes, draw others for each number of processes."
        )
    example = next((value for value, _ in values if value), "")
    if field == EDITS:
        return (
            f"Leave out the runs of all but one, or name what is kept: --only {EDITS}={example}, the same for each "
            f"list of another number of edits, and --only {EDITS}= for runs without one."
        )
    # Most columns have no judge and no edits of a stream; the second condition keeps them.
    others = f" --only {field}=" if field in ("judge", "edits") and all(value for value, _ in values) else ""
    return f"Keep one, e.g. --only {shlex.quote(f'{field}={example}')}{others}, or make a leaderboard of each."


def _shown(field: str, values: Sequence[str]) -> list[str]:
    """Values for a message: of judges only the settings that differ; cut, unless they would then be the same."""
    if field == "judge":
        settings = [value.split("; ") for value in values]
        common = set.intersection(*(set(each) for each in settings if each != [""]))
        differing = ["; ".join(each for each in one if each not in common) for one in settings]
        values = [shown or value for shown, value in zip(differing, values, strict=True)]
    shortened = list(map(_short, values))
    return shortened if len(set(shortened)) == len(values) else list(values)


def _short(value: str) -> str:
    return f"{value[:80]}..." if len(value) > 80 else value or "none"


def _some(names: Sequence[str], limit: int = 3) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _top_groups(results: pd.DataFrame) -> dict[str, str]:
    """Member, at any depth -> the topmost group above it that has a column."""
    groups: Mapping[str, Sequence[str]] = results.attrs.get("groups", {})
    below: dict[str, set[str]] = {}
    for group in sorted(set(results["task"]) & set(groups)):
        below[group], left = set(), list(groups[group])
        while left:
            name = left.pop()
            if name not in below[group]:
                below[group].add(name)
                left += groups.get(name, ())
    tops = [group for group in below if not any(group in members for members in below.values())]
    return {member: group for group in tops for member in below[group]}


def _chosen_keys(results: pd.DataFrame, first: Mapping[str, Sequence[tuple[str, str]]]) -> set[ColumnKey]:
    keys = [ColumnKey(*map(str, names)) for names in results[list(KEY)].drop_duplicates().itertuples(index=False)]
    final = {(key.task, key.metric): key for key in reversed(keys) if not key.stage}
    for name, columns in first.items():
        if not any(column in final for column in columns):
            known = [f"{task}:{metric}" for task, metric in final]
            raise EditingError(f"--columns {name}: the results have no such column.{near_misses(name, known)}")
    return {final[column] for columns in first.values() for column in columns if column in final}


def _default_keys(results: pd.DataFrame, top_groups: Mapping[str, str]) -> set[ColumnKey]:
    """The columns shown first; members of a group are in the group's number, so they are not among them."""
    preferred = read_yaml(DEFAULTS)
    keys = [ColumnKey(*map(str, names)) for names in results[list(KEY)].drop_duplicates().itertuples(index=False)]
    final: dict[str, dict[str, ColumnKey]] = {}
    for key in keys:
        if not key.stage:
            final.setdefault(key.task, {}).setdefault(key.metric, key)
    benchmarks: dict[str, list[str]] = {}
    for task, benchmark in zip(results["task"], results["benchmark"], strict=True):
        tasks = benchmarks.setdefault(text_of(benchmark) or str(task), [])
        if str(task) in final and str(task) not in {*tasks, *top_groups}:
            tasks.append(str(task))
    shown = set()
    for tasks in benchmarks.values():
        listed = [task for task in tasks if task in preferred]
        for task in listed or tasks[:MAX_TASKS_WITHOUT_ENTRY]:
            columns = [[column] if isinstance(column, str) else column for column in preferred.get(task, ())]
            names = [next((name for name in column if name in final[task]), None) for column in columns]
            found = {final[task][name] for name in names if name}
            shown |= found or {next(iter(final[task].values()))}
    return shown
