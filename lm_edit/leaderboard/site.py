"""From result files to the files of a leaderboard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lm_edit.leaderboard.cases import collect_cases
from lm_edit.leaderboard.columns import filter_rows
from lm_edit.leaderboard.published import published_rows
from lm_edit.leaderboard.render_html import render_html
from lm_edit.leaderboard.render_text import render_csv, render_latex, render_markdown
from lm_edit.leaderboard.significance import RESAMPLES
from lm_edit.leaderboard.table import build_board
from lm_edit.results import load_cases, load_documents, load_results


class Site(NamedTuple):
    """What :func:`make_site` returns.

    Attributes:
        files: name -> text. The same inputs give the same texts.
        notes: what a reader should know, such as results that newer ones replace.
        num_rows: models and editors. num_columns: of all columns.
    """

    files: dict[str, str]
    notes: list[str]
    num_rows: int
    num_columns: int


def make_site(
    paths: Sequence[str],
    *,
    only: Sequence[str] = (),
    published: str = "matching",
    resamples: int | None = None,
    title: str = "Knowledge editing leaderboard",
) -> Site:
    """Read results and compute the page, the Markdown, the CSV and the LaTeX file.

    Args:
        paths: result files, or folders of them.
        only: conditions ``field=value``, see :func:`lm_edit.leaderboard.columns.filter_rows`.
        published: see :func:`lm_edit.leaderboard.published.published_rows`.
        resamples: of bootstrap and permutation tests.
        title: heading of the page.

    Raises:
        EditingError: for unreadable files, and for columns whose runs were not computed in the same way.
    """
    loaded = load_results(paths)
    results = filter_rows(loaded, only)
    board = build_board(results, load_cases(paths), resamples=resamples or RESAMPLES)
    printed = published_rows(board.columns, published)
    shown = published_rows(board.default_columns, published)
    tasks = {(run, task) for run, task in zip(results["run"], results["task"], strict=True)}
    cases = collect_cases(document for document in load_documents(paths) if (document.run, document.task) in tasks)
    page, note = render_html(board, printed, cases, title)
    files = {
        "index.html": page,
        "leaderboard.md": render_markdown(board, board.default_columns, shown),
        "leaderboard.csv": render_csv(board, printed),
        "leaderboard.tex": render_latex(board, board.default_columns, shown),
    }
    replaced = [
        f"{item['file']}: {item['task']} is replaced by the newer {item['by']}"
        for item in loaded.attrs.get("superseded", ())
    ]
    num_rows = len({id(row) for section in board.sections for row in section.rows})
    return Site(files, [*replaced, *([note] if note else [])], num_rows, len(board.columns))
