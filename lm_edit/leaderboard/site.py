"""From result files to the files of a leaderboard."""

from __future__ import annotations

import contextlib
import multiprocessing
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from tqdm import tqdm

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.scopes import without_collector
from edit_hooks.utils.storage.files import blocks_of
from lm_edit.leaderboard.cases import Cases, CaseText, text_of_case
from lm_edit.leaderboard.columns import describe_case_sets, find_columns
from lm_edit.leaderboard.published import columns_named, published_rows
from lm_edit.leaderboard.render_html import MAX_MEGABYTES, PARTS, EditorKind, render_html
from lm_edit.leaderboard.render_text import CSV_HEADER, GENERATOR, render_csv, render_latex, render_markdown
from lm_edit.leaderboard.table import CaseData, build_board, read_case_data, refuse_two_files
from lm_edit.results.answers.documents import SampleGroup, cases_and_documents, sample_groups
from lm_edit.results.files.runs import ResultFile
from lm_edit.results.filters import SAMPLE_FILE, filter_rows, places_of, rows_at
from lm_edit.results.statistics.intervals import RESAMPLES
from lm_edit.results.tables import ResultSet, load_results

FILES = ("index.html", "leaderboard.md", "leaderboard.csv", "leaderboard.tex")
LARGE_BYTES = 50 * 10**6  # of samples, which several processes read; starting them takes longer for less
MARKED_BYTES = 2000  # of the beginning of a file, which has the marker


class Site(NamedTuple):
    """What :func:`make_site` returns.

    Attributes:
        files: name -> text, those of :data:`FILES`, and of a large page its parts. The same inputs give the same texts.
        notes: remarks for readers, such as results that newer ones replace.
        num_rows: models and editors. num_columns: of all columns.
    """

    files: dict[str, str]
    notes: list[str]
    num_rows: int
    num_columns: int


def is_own(path: Path) -> bool:
    """Whether a file was written by ``lm-edit leaderboard``: it begins with its marker, or its columns.

    Of the columns, which releases add to, the first ten count.
    """
    if not path.is_file():
        return False
    try:
        beginning = next(blocks_of(path), b"")[:MARKED_BYTES].decode(errors="replace")
    except OSError:
        return False
    return GENERATOR in beginning or (path.suffix == ".csv" and beginning.startswith(",".join(CSV_HEADER[:10])))


def make_site(
    paths: Sequence[str],
    *,
    only: Sequence[str] = (),
    columns: Sequence[str] = (),
    published: str = "matching",
    resamples: int | None = None,
    title: str = "Knowledge editing leaderboard",
    max_megabytes: int = MAX_MEGABYTES,
    reload_seconds: int | None = None,
    kind_of: Callable[[str], EditorKind | None] | None = None,
    workers: int = 1,
    progress: bool = False,
) -> Site:
    """Read results and compute the page, the Markdown, the CSV and the LaTeX file.

    Args:
        paths: result files, or folders of them.
        only: conditions ``field=value``, see :func:`lm_edit.results.filters.filter_rows`.
        columns: those shown first, see :func:`lm_edit.leaderboard.published.columns_named`; none: the default ones.
        published: see :func:`lm_edit.leaderboard.published.published_rows`.
        resamples: of bootstrap and permutation tests.
        title: heading of the page.
        max_megabytes: of the page; beyond it, all cases are in files beside it.
        reload_seconds: after which the page loads itself again.
        kind_of: kind of an editor, by name; those of other packages need torch, which reading results does not.
            ``None``: not known.
        workers: processes that read large samples; a program of its own needs the guard of :mod:`multiprocessing` for
            more than one.
        progress: show a bar on a terminal.

    Raises:
        EditingError: for unreadable files, and for columns whose runs were not computed in the same way.
    """
    first = columns_named(columns) if columns else None
    read = ResultSet.of(paths)
    results = filter_rows(load_results(read), only)
    cases, single = _read_samples(read, places_of(results, SAMPLE_FILE), workers, progress)
    board = build_board(
        results, cases, resamples=resamples or RESAMPLES, first=first, durations=_durations(read), progress=progress
    )
    printed = published_rows(board.columns, published)
    shown = published_rows(board.default_columns, published)
    known = {name: kind_of(name) for name in sorted(set(results["editor"]))} if kind_of else {}
    kinds = {name: kind for name, kind in known.items() if kind}
    page = render_html(board, printed, single, title, max_megabytes * 10**6, reload_seconds, kinds)
    files = {
        **page.parts,  # before the page that names them
        "index.html": page.text,
        "leaderboard.md": f"<!-- {GENERATOR} -->\n\n{render_markdown(board, board.default_columns, shown)}",
        "leaderboard.csv": render_csv(board, printed),
        "leaderboard.tex": f"% {GENERATOR}\n{render_latex(board, board.default_columns, shown)}",
    }
    num_rows = len({row.run_ids for section in board.sections for row in section.rows})
    return Site(files, [*_notes(read, results), *([page.note] if page.note else [])], num_rows, len(board.columns))


class _Worker:
    """What a process that reads samples was started with."""

    results: ResultSet
    groups: list[SampleGroup]


def _start_worker(results: ResultSet, places: Collection[tuple[str, ...]]) -> None:
    _Worker.results, _Worker.groups = results, sample_groups(results, places)


def _read_in_worker(number: int) -> tuple[CaseData, list[CaseText]]:
    return _read_group(_Worker.results, _Worker.groups[number])


def _read_group(results: ResultSet, group: SampleGroup) -> tuple[CaseData, list[CaseText]]:
    with without_collector():
        cases, documents = cases_and_documents(results, group)
        return read_case_data(cases), list(map(text_of_case, documents))


def _read_samples(
    results: ResultSet, places: Collection[tuple[str, ...]], workers: int, progress: bool
) -> tuple[CaseData, Cases]:
    """The scores and the texts of all cases; the samples of one task of a run at a time are in memory."""
    groups = sample_groups(results, places)
    paths = [file.sample_file(task) for group in groups for file, task in group]
    num_bytes = sum(path.stat().st_size for path in paths if path is not None)
    single, data = Cases(), CaseData({}, {})
    with contextlib.ExitStack() as stack:
        found: Iterable[tuple[CaseData, list[CaseText]]] = (_read_group(results, group) for group in groups)
        if (used := min(workers, len(groups))) > 1 and num_bytes >= LARGE_BYTES:
            # Not forked: the libraries of this process may have threads.
            context = multiprocessing.get_context("spawn")
            pool = ProcessPoolExecutor(used, context, _start_worker, (results, places))
            found = stack.enter_context(pool).map(_read_in_worker, range(len(groups)))
        bar = tqdm(found, desc="Reading samples", total=len(groups), unit="task", disable=None if progress else True)
        for (scores, sets), texts in bar:
            data.scores.update(scores)
            data.sets.update(sets)
            single.add_texts(texts)
    return data, single


def old_parts(folder: Path, files: Collection[str]) -> list[Path]:
    """The parts of an earlier page in a folder, which are not among the files of a new one."""
    names = [f"{PARTS}/{path.name}" for path in sorted(folder.glob(f"{PARTS}/*.txt"))]
    return [folder / name for name in names if is_part(name) and name not in files]


def is_part(name: str) -> bool:
    """Whether a name is that of a part of a page."""
    return re.fullmatch(rf"{PARTS}/[0-9a-f]{{20}}\.txt", name) is not None


def _durations(read: ResultSet) -> dict[str, tuple[float, int]]:
    """Result file -> seconds of its evaluation, and the cases of its tasks."""
    return {
        str(file.path): (file.seconds, sum(file.num_cases(task) or 0 for task in file.tasks))
        for file in read.files
        if file.seconds is not None
    }


def refused_together(files: Sequence[ResultFile], asked: pd.DataFrame) -> str:
    """Why the leaderboard would refuse these results, "" if it would not; nothing is computed.

    Args:
        asked: what was asked of the tasks with samples, see :class:`lm_edit.results.checking.check.CheckReport`.
    """
    try:
        read = ResultSet(files)
        results = load_results(read)
        current = {(str(file.path), task) for file, task in read.places}
        find_columns(results, describe_case_sets(rows_at(asked, SAMPLE_FILE, current)))
        refuse_two_files(results)
    except EditingError as error:
        return str(error)
    return ""


def _notes(read: ResultSet, results: pd.DataFrame) -> list[str]:
    """What has no samples: files, and tasks of the other files."""
    shown = places_of(results, SAMPLE_FILE)
    with_samples = {(str(file.path), task) for file, task in read.with_samples(shown)}
    without: dict[str, list[str]] = {}
    for file, task in read.places:
        if (place := (str(file.path), task)) in shown - with_samples and file.num_cases(task) is not None:
            without.setdefault(place[0], []).append(task)
    sampled = {name for name, _ in with_samples}
    reasons = dict.fromkeys({name for name, _ in shown} - sampled, "no samples")
    reasons |= {name: f"no samples of {', '.join(sorted(tasks))}" for name, tasks in without.items() if name in sampled}
    lacks = "so no tests, no single cases, and intervals from standard errors only"
    return [f"{name}: {reason}, {lacks}" for name, reason in sorted(reasons.items())]
