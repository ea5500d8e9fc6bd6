"""Results of runs as tables: one row per metric, or one per case.

Both read result and sample files of lm-eval only and score nothing again. Columns: :mod:`lm_edit.results.schema`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import pandas as pd

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.logs import get_logger
from lm_edit.results.files.runs import Paths, ResultFile, Samples, read_result_files
from lm_edit.results.files.shape import as_saved
from lm_edit.results.files.task_facts import TaskFacts
from lm_edit.results.schema import CASE_COLUMNS, REAL, RESULT_COLUMNS, SCHEMA_VERSION
from lm_eval_tasks.common.scoring.columns import MetricColumn, is_number, read_columns, same_up_to_last_digits
from lm_eval_tasks.report.run_facts import is_editing_task

log = get_logger(__name__)

# Columns that distinguish two results of one task in one run; where they agree, the newest file counts.
SAME_RESULT = ("run", "task", "task_version", "data_hash", "protocol")
SAME_JUDGE = ("filter", "judge", "population")
IDENTITY = (*SAME_RESULT, *SAME_JUDGE)
COUNTS = ("n", "excluded", "failed", "zeroed")  # of cases


class ResultSet:
    """Result files, each read once, and what counts of them; readers take one in place of paths.

    Attributes:
        files: oldest first.
        superseded: results of which newer files have others, as :func:`load_results` lists them.
        places: (file, task or group) for each file that is the newest with some result of the task, oldest first.
    """

    def __init__(self, files: Sequence[ResultFile]) -> None:
        self.files = sorted(files, key=lambda file: (file.date, file.path.name))
        rows = [row for file in self.files for row in result_rows(file)]
        self._newest: dict[tuple[Any, ...], str] = {_identity(row): row["file"] for row in rows}  # the last one counts
        kept, self.superseded = _newest(rows)
        outdated = outdated_groups(self.files, self.superseded)
        self._kept = [row for row in kept if (row["file"], row["task"]) not in outdated]
        wanted = {(row["file"], row["task"]) for row in self._kept}
        self.places = [(file, task) for file in self.files for task in file.tasks if (str(file.path), task) in wanted]

    @classmethod
    def of(cls, paths: Source) -> ResultSet:
        """The results of files and folders; a set is returned as it is."""
        return paths if isinstance(paths, cls) else cls(read_result_files(cast("Paths", paths)))

    def rows(self) -> list[dict[str, Any]]:
        """The rows of the newest file for each result, without groups that are outdated."""
        return [dict(row) for row in self._kept]

    def with_samples(self, places: Collection[tuple[str, ...]] | None = None) -> list[tuple[ResultFile, str]]:
        """The tasks that have samples; groups have none.

        Args:
            places: (file, task) of those that are wanted; ``None``: all.
        """
        return [
            (file, task)
            for file, task in self.places
            if (places is None or (str(file.path), task) in places)
            and file.num_cases(task) is not None
            and file.sample_file(task) is not None
        ]

    def counts(self, file: ResultFile, about: TaskFacts, metric: str, pipeline: str) -> bool:
        """Whether no newer file has the results of a metric; true for metrics without results, as of single cases."""
        row = {**about.columns, **about.of_metric(MetricColumn(metric, "", pipeline, None)), "run": file.facts.run}
        return self._newest.get(_identity(row), str(file.path)) == str(file.path)


Source: TypeAlias = Paths | ResultSet


def outdated_groups(files: Iterable[ResultFile], superseded: Sequence[Mapping[str, Any]]) -> set[tuple[str, str]]:
    """(file, group) of the groups whose mean is over results of which newer files have other numbers.

    A warning is logged for each.

    Args:
        superseded: as :func:`_newest` finds them.
    """
    replaced = {(old["file"], old["task"]) for old in superseded}
    changed = {(old["file"], old["task"]) for old in superseded if old["changed"]}
    outdated = set()
    for file in files:
        path = str(file.path)
        for group in file.groups:
            old = sorted(member for member in file.members(group) if (path, member) in changed)
            if old and (path, group) not in replaced:
                outdated.add((path, group))
                log.warning(
                    "%s: %s is left out: it is the mean over its members, and newer files of the same run have other "
                    "results of %s. Run the group again.", path, group, ", ".join(old)
                )  # fmt: skip
    return outdated


def _identity(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in IDENTITY)


def load_results(paths: Source) -> pd.DataFrame:
    """One row per run, task, metric, stage and filter.

    Where several files have the same result, the newest one counts; a group some of whose members have newer results
    is left out with a warning, because its mean is over the old ones. The attribute ``superseded`` of the table
    (``frame.attrs``) lists the others, with ``changed`` where their numbers are not those of the newest, of which a
    warning is logged; ``schema_version`` is the version of the columns, and ``groups`` maps groups to their members.

    Args:
        paths: result files of lm-eval, or folders that contain some; or results that were read.

    Raises:
        EditingError: for missing, unreadable and other files.
    """
    results = ResultSet.of(paths)
    superseded = results.superseded
    for file in dict.fromkeys(old["file"] for old in superseded):
        if tasks := sorted(str(old["task"]) for old in superseded if old["file"] == file and old["changed"]):
            log.warning("%s: newer files of the same run have other numbers of %s", file, ", ".join(tasks))
    kept = results.rows()
    _name_models_alike(kept)
    frame = make_frame(kept, RESULT_COLUMNS)
    groups: dict[str, list[str]] = {}
    for result_file in results.files:
        for group, members in result_file.groups.items():
            groups[group] = list(dict.fromkeys([*groups.get(group, ()), *members]))
    frame.attrs |= {"schema_version": SCHEMA_VERSION, "superseded": superseded, "groups": groups}
    return frame


def _name_models_alike(rows: Iterable[dict[str, Any]]) -> None:
    """Give a model one name, that of the oldest file, where it was read from the hub once and from a folder once."""
    names: dict[tuple[str, str], str] = {}
    for row in rows:
        if row["model_hash"] and row["model_parts"]:
            row["model"] = names.setdefault((row["model_hash"], row["model_parts"]), row["model"])


def load_cases(paths: Source, *, require_samples: bool = True) -> pd.DataFrame:
    """One row per run, task, document, metric, stage and filter, of the results that :func:`load_results` keeps.

    Where several judges scored a run, there is a row for the verdict of each.

    Args:
        require_samples: refuse runs without sample files. Otherwise they are left out, and the attribute
            ``without_samples`` of the table lists file and task.

    Raises:
        EditingError: as :func:`load_results`, and for samples that are missing or of another run.
    """
    current = ResultSet.of(paths)
    places = [(file, task) for file, task in current.places if file.num_cases(task) is not None]
    missing = [] if require_samples else [place for place in places if place[0].sample_file(place[1]) is None]
    rows = [row for place in places if place not in missing for row in current_cases(current, *place)]
    frame = make_frame(rows, CASE_COLUMNS)
    without = [{"file": str(file.path), "task": task} for file, task in missing]
    frame.attrs |= {"schema_version": SCHEMA_VERSION, "without_samples": without}
    return frame


def current_results(paths: Source) -> list[tuple[ResultFile, str]]:
    """Every task and group of every run, each with the newest file that has it."""
    return ResultSet.of(paths).places


def current_cases(
    current: ResultSet, file: ResultFile, task: str, samples: Samples | None = None
) -> Iterator[dict[str, Any]]:
    """The rows of :func:`case_rows` whose results no newer file has."""
    about = TaskFacts(file, task)
    known: dict[tuple[str, str], bool] = {}
    for row in case_rows(file, task, samples):
        column = (row["metric"], row["filter"])
        if column not in known:
            known[column] = current.counts(file, about, *column)
        if known[column]:
            yield row


def current_tasks(paths: Source) -> list[tuple[ResultFile, str]]:
    """The tasks among :func:`current_results`; groups have no samples."""
    return [(file, task) for file, task in current_results(paths) if file.num_cases(task) is not None]


def _newest(rows: Iterable[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rows of the newest file for each result, and the tasks of older files that are left out."""
    newest: dict[tuple[Any, ...], str] = {}
    rows = list(rows)
    keys = [_identity(row) for row in rows]
    for key, row in zip(keys, rows, strict=True):  # files are sorted, oldest first
        newest[key] = row["file"]
    kept = [row for key, row in zip(keys, rows, strict=True) if newest[key] == row["file"]]
    numbers = {_column(row): row for row in kept}
    left_out: dict[tuple[str, ...], dict[str, Any]] = {}
    for key, row in zip(keys, rows, strict=True):
        if newest[key] != row["file"]:
            names = {name: row[name] for name in ("file", "task", "run")}
            old = left_out.setdefault(tuple(names.values()), {**names, "by": newest[key], "changed": False})
            old["changed"] |= not _same_number(row, numbers.get(_column(row)))
    return kept, list(left_out.values())


def _same_number(row: Mapping[str, Any], other: Mapping[str, Any] | None) -> bool:
    """Whether two results are equal up to the last digits."""
    if other is None or row["n"] != other["n"]:
        return False
    value, kept = row["value"], other["value"]
    return value == kept or (value is not None and kept is not None and same_up_to_last_digits(value, kept))


def _column(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in (*IDENTITY, "metric", "stage"))


def result_rows(file: ResultFile) -> Iterator[dict[str, Any]]:
    """The rows of one file in :func:`load_results`; missing numbers are ``None``.

    Raises:
        EditingError: for parts of another type than lm-eval gives them.
    """
    with as_saved(f"{file.path}: not a result file as lm_eval --output_path saves it"):
        yield from _result_rows(file)


def _result_rows(file: ResultFile) -> Iterator[dict[str, Any]]:
    facts = file.facts
    of_run = {name: value for name, value in vars(facts).items() if name in RESULT_COLUMNS and name != "data"}
    of_run |= facts.recorded
    of_run |= {"run_name": facts.name, "file": str(file.path), "date": file.date, "guesses": list(facts.guesses)}
    for task, saved in file.tasks.items():
        about = TaskFacts(file, task)
        columns = {key: value for key, value in saved.items() if "," in key}  # others: alias, sample_len
        for column in read_columns(columns, about.metrics):
            if not is_number(column.value) and column.value not in (None, "N/A"):
                continue  # a JSON text: a matrix or a breakdown
            row = {
                **of_run,
                **about.columns,
                **about.summary(column.filter),
                **about.of_metric(column),
                **_numbers(column, about.num_cases),
            }
            if problem := _wrong_number(row):
                raise EditingError(f"{file.path}: {task}, {column.name}: {problem}.")
            yield row


def _wrong_number(row: Mapping[str, Any]) -> str:
    """What no row can hold: text in a column of numbers, and counts that count nothing; "" if there is nothing."""
    for name, (kind, _) in RESULT_COLUMNS.items():
        if kind == REAL and not (row[name] is None or is_number(row[name])):
            return f"{name} is {row[name]!r}, which is no number"
    for name in COUNTS:
        if row[name] is not None and not (math.isfinite(row[name]) and row[name] >= 0 and row[name] % 1 == 0):
            return f"{name} is {row[name]}, which is no number of cases"
    return ""


def _numbers(column: MetricColumn, num_cases: float | None) -> dict[str, float | None]:
    """Value, counts and derived numbers of a column.

    Tasks of lm-eval and EditGLUE count no cases: all of them are scored, or none where there is no value.
    """
    value, n, asked = column.value if is_number(column.value) else None, column.number("n"), num_cases
    if n is None:
        n = 0 if value is None else num_cases
    else:
        asked = n + (column.number("failed") or 0)
    return {
        "value": value,
        "n": n,
        **{name: column.number(name) for name in ("stderr", "excluded", "failed", "zeroed", "or_0")},
        "coverage": n / asked if n is not None and asked else None,
    }


def case_rows(file: ResultFile, task: str, samples: Samples | None = None) -> Iterator[dict[str, Any]]:
    """The rows of one task in :func:`load_cases`; missing numbers are ``None``.

    Args:
        samples: of the task, if they were read.

    Raises:
        EditingError: for samples that are missing, of another run, or not as lm-eval saves them.
    """
    about = TaskFacts(file, task)
    for where, sample in file.samples(task) if samples is None else samples:
        with as_saved(f"{where}: not a sample as lm-eval saves it"):
            yield from _rows_of_sample(file, about, sample)


def _rows_of_sample(file: ResultFile, about: TaskFacts, sample: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    doc: Mapping[str, Any] = sample["doc"] if isinstance(sample.get("doc"), Mapping) else {}
    of_case = {
        "run": file.facts.run,
        "file": str(file.path),
        "task": about.task,
        "doc_id": sample["doc_id"],
        "case_id": str(doc.get("case_id", sample["doc_id"])),
        "category": str(doc.get("category") or ""),
        "edit_key": str((sample.get("edit") or {}).get("key") or ""),
        "prompt_hash": "" if is_editing_task(about.config) else str(sample.get("prompt_hash") or ""),
        "filter": sample.get("filter", ""),
    }
    names = sample["metrics"]
    if absent := [name for name in names if name not in sample]:
        raise KeyError(f"{absent[0]} is among its metrics and has no value")
    reasons = sample.get("unscored_reason") or {}
    pipeline = of_case["filter"]
    for column in read_columns({name: sample[name] for name in names}, about.metrics):
        single = is_number(column.value) or isinstance(column.value, bool)
        counts = {name: column.number(name) for name in ("n", "excluded", "failed", "zeroed")}
        reason = reasons.get(column.name, "")
        yield {
            **of_case,
            "metric": column.metric,
            "stage": column.stage,
            **about.scored_by(column.metric, pipeline),
            "value": float(column.value) if single else None,
            "due": not column.stage or bool(reason) or counts["n"] is None or any(counts.values()),
            **counts,
            "reason": reason,
            "components": None if single else column.value,
        }


def make_frame(rows: list[dict[str, Any]], columns: Mapping[str, tuple[str, str]]) -> pd.DataFrame:
    """A table with the columns of the schema; missing numbers are NaN."""
    frame = pd.DataFrame.from_records(rows, columns=list(columns))
    for name, (kind, _) in columns.items():
        if kind == REAL:
            frame[name] = pd.to_numeric(frame[name]).astype("float64")
    return frame
