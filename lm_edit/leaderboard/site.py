"""From result files to the files of a leaderboard."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.files import blocks_of
from lm_edit.leaderboard.cases import collect_cases
from lm_edit.leaderboard.columns import describe_case_sets, find_columns
from lm_edit.leaderboard.published import columns_named, published_rows
from lm_edit.leaderboard.render_html import render_html
from lm_edit.leaderboard.render_text import CSV_HEADER, GENERATOR, render_csv, render_latex, render_markdown
from lm_edit.leaderboard.table import build_board, refuse_two_files
from lm_edit.results.documents import load_documents
from lm_edit.results.filters import filter_rows
from lm_edit.results.runs import Paths, read_result_file
from lm_edit.results.statistics.intervals import RESAMPLES
from lm_edit.results.tables import load_cases, load_results

FILES = ("index.html", "leaderboard.md", "leaderboard.csv", "leaderboard.tex")
MARKED_BYTES = 2000  # of the beginning of a file, which has the marker


class Site(NamedTuple):
    """What :func:`make_site` returns.

    Attributes:
        files: name -> text. The same inputs give the same texts.
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
) -> Site:
    """Read results and compute the page, the Markdown, the CSV and the LaTeX file.

    Args:
        paths: result files, or folders of them.
        only: conditions ``field=value``, see :func:`lm_edit.results.filters.filter_rows`.
        columns: those shown first, see :func:`lm_edit.leaderboard.published.columns_named`; none: the default ones.
        published: see :func:`lm_edit.leaderboard.published.published_rows`.
        resamples: of bootstrap and permutation tests.
        title: heading of the page.

    Raises:
        EditingError: for unreadable files, and for columns whose runs were not computed in the same way.
    """
    first = columns_named(columns) if columns else None
    results = filter_rows(load_results(paths), only)
    sampled = _files_with_samples(results)
    with_samples = results[results["file"].isin(sampled)]
    tasks = set(zip(with_samples["run"], with_samples["task"], strict=True))
    every_case = load_cases(sampled, require_samples=False)
    kept = [place in tasks for place in zip(every_case["run"], every_case["task"], strict=True)]
    cases = every_case[np.array(kept, dtype=bool)]  # an empty list would select columns
    board = build_board(results, cases, resamples=resamples or RESAMPLES, first=first)
    printed = published_rows(board.columns, published)
    shown = published_rows(board.default_columns, published)
    documents = collect_cases(
        doc for doc in load_documents(sampled, require_samples=False) if (doc.run, doc.task) in tasks
    )
    page, note = render_html(board, printed, documents, title)
    files = {
        "index.html": page,
        "leaderboard.md": f"<!-- {GENERATOR} -->\n\n{render_markdown(board, board.default_columns, shown)}",
        "leaderboard.csv": render_csv(board, printed),
        "leaderboard.tex": f"% {GENERATOR}\n{render_latex(board, board.default_columns, shown)}",
    }
    num_rows = len({row.run_ids for section in board.sections for row in section.rows})
    return Site(files, [*_notes(results, sampled, every_case), *([note] if note else [])], num_rows, len(board.columns))


def refused_together(paths: Paths) -> str:
    """Why the leaderboard would refuse these results, "" if it would not; nothing is computed."""
    try:
        results = load_results(paths)
        find_columns(results, describe_case_sets(load_cases(paths, require_samples=False)))
        refuse_two_files(results)
    except EditingError as error:
        return str(error)
    return ""


def _files_with_samples(results: pd.DataFrame) -> list[str]:
    """The result files that have samples of some task beside them."""
    tasks = results.groupby("file")["task"].unique()
    return [
        str(name)
        for name in sorted(tasks.index)
        if any(read_result_file(Path(name)).sample_file(task) is not None for task in tasks[name])
    ]


def _notes(results: pd.DataFrame, sampled: Sequence[str], cases: pd.DataFrame) -> list[str]:
    """What has no samples: files, and tasks of the other files."""
    without = dict.fromkeys(set(results["file"]) - set(sampled), "no samples")
    shown = set(zip(results["file"], results["task"], strict=True))
    tasks: dict[str, list[str]] = {}
    for place in cases.attrs["without_samples"]:
        if (place["file"], place["task"]) in shown:
            tasks.setdefault(place["file"], []).append(place["task"])
    without |= {name: f"no samples of {', '.join(sorted(of_file))}" for name, of_file in tasks.items()}
    return [
        f"{name}: {reason}, so no tests, no single cases, and intervals from standard errors only"
        for name, reason in sorted(without.items())
    ]
