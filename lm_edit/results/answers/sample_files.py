"""Sample files of lm-eval (``--log_samples``) and the runs that wrote them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.logs import get_logger
from lm_edit.results.files.runs import ResultFile, find_finished_files, read_result_file
from lm_edit.results.files.sample_rows import REMEDY, ExpectedSamples
from lm_edit.results.files.task_facts import TaskFacts
from lm_edit.results.tables import SAME_RESULT

log = get_logger(__name__)

_NAME = re.compile(r"samples_(?P<task>.+)_(?P<date>\d{4}-\d\d-\d\dT[\d.\-]+)")


class SampleFile(NamedTuple):
    """A file of saved answers.

    Attributes:
        path: the file.
        task: name of the task; for plain rows, that of the file.
        run: hash of the run's identity, as in ``load_results``; "" where no readable result file is beside the samples.
        run_name: readable name of the run, likewise.
        scores_outside: the run also scored cases that are not among its edits; likewise.
        results: path of the result file; likewise.
        expected: what that file records of the samples; ``None`` without one.
    """

    path: str
    task: str
    run: str = ""
    run_name: str = ""
    scores_outside: bool = False
    results: str = ""
    expected: ExpectedSamples | None = None


class _Result(NamedTuple):
    """Identity of a task's result in its run, and the order of its files."""

    identity: tuple[Any, ...]
    age: tuple[str, str]


def current_sample_files(paths: Sequence[str]) -> list[SampleFile]:
    """The sample files of :func:`find_sample_files`, each with its run.

    Of several files with the same task of the same run the newest one counts, as in ``load_results``; a warning names
    the others. The identity includes the population, which decides whether the unedited model was asked.

    Raises:
        EditingError: as :func:`find_sample_files`, and for samples of a task that the result file beside them lacks.
    """
    results: dict[Path, ResultFile | None] = {}
    found = {path.resolve(): _describe(path, results) for path in find_sample_files(paths)}
    newest: dict[tuple[Any, ...], tuple[SampleFile, _Result]] = {}
    for file, result in found.values():
        if result and (result.identity not in newest or newest[result.identity][1].age <= result.age):
            newest[result.identity] = file, result
    kept = []
    for file, result in found.values():
        if result is None or newest[result.identity][0] is file:
            kept.append(file)
        else:
            log.warning("%s: left out; %s has this task of the same run", file.path, newest[result.identity][0].path)
    return kept


def find_sample_files(paths: Sequence[str]) -> Iterator[Path]:
    """Yield the files themselves, and the sample files below folders.

    Left out are those of a sweep's unfinished runs, and those of damaged results that a sweep has set aside.

    Raises:
        EditingError: for paths that do not exist, and folders without samples.
    """
    yield from find_finished_files(paths, "samples_*.jsonl", "file or folder of samples", "--log_samples --output_path")


def _describe(path: Path, results: dict[Path, ResultFile | None]) -> tuple[SampleFile, _Result | None]:
    """A sample file with its run, and its place among the results of that run.

    Args:
        results: result files read so far; extended.
    """
    name = _NAME.fullmatch(path.stem)
    unknown = SampleFile(str(path), name["task"] if name else path.stem.removeprefix("samples_"))
    beside = _result_file(path, name["date"]) if name else None
    if beside is None:
        return unknown, None
    try:
        if beside not in results:
            results[beside] = None  # an unreadable file is read, and warned of, once
            results[beside] = read_result_file(beside)
        result = results[beside]
        about = None if result is None or unknown.task not in result.tasks else TaskFacts(result, unknown.task)
        facts = {**about.columns, "protocol": about.protocol} if about else {}
    except (EditingError, KeyError, TypeError, AttributeError, ValueError) as error:
        log.warning("%s: its run is unknown (%s: %s)", path, type(error).__name__, error)
        return unknown, None
    if result is None:
        return unknown, None
    if result.num_cases(unknown.task) is None:
        raise EditingError(
            f"{path} has the name of a task that {beside.name} does not have: it is of another run, or was renamed. "
            f"{REMEDY}"
        )
    known = unknown._replace(expected=result.expected_samples(unknown.task))
    if about is None:
        return known, None
    population = (about.config.get("settings") or {}).get("population")
    identity = (*({**facts, "run": result.facts.run}[name] for name in SAME_RESULT), population)
    known = known._replace(run=result.facts.run, run_name=result.facts.name, results=str(beside))
    known = known._replace(scores_outside=about.scores_outside)
    return known, _Result(identity, (result.date, beside.name))


def _result_file(samples: Path, date: str) -> Path | None:
    """The result file of the same run, whose name ends with the same date; ``None`` without one.

    ``--output_path NAME.json`` gives it the name ``NAME_<date>.json``.
    """
    usual = samples.with_name(f"results_{date}.json")
    return usual if usual.is_file() else next(iter(sorted(samples.parent.glob(f"*_{date}.json"))), None)
