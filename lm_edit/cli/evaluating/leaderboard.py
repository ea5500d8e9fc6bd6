"""``lm-edit leaderboard``: runs side by side, as a page and as tables."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.settings.numbers import POSITIVE
from lm_edit.cli.command import Verb, add_only_argument, say, whole, write_output

if TYPE_CHECKING:
    from lm_edit.leaderboard.render_html import EditorKind

PUBLISHED = ("matching", "all", "none")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", nargs="+", help="result files of lm_eval, or folders of them (--output_path)")
    parser.add_argument("-o", "--out", required=True, help="folder for index.html, leaderboard.md, .csv and .tex")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace files of these names that lm-edit leaderboard has not written"
    )
    add_only_argument(parser)
    parser.add_argument(
        "--columns",
        action="append",
        default=[],
        metavar="NAME",
        help="show these columns first: TASK:METRIC, or those of a printed table, as wild_t3; may be repeated",
    )
    parser.add_argument(
        "--published",
        choices=PUBLISHED,
        default="matching",
        help="rows printed in papers: for columns on the published data (default), for all columns, or none",
    )
    parser.add_argument("--resamples", type=whole(POSITIVE), help="of bootstrap and permutation tests (default 4999)")
    parser.add_argument(
        "--max-mb", type=whole(POSITIVE), default=25, help="size of the page; beyond it cases are left out (default 25)"
    )
    parser.add_argument(
        "--watch",
        type=whole(POSITIVE),
        metavar="SECONDS",
        help="look for new results every so often and make the page again, until Ctrl-C; the page reloads itself",
    )
    parser.add_argument("--title", default="Knowledge editing leaderboard", help="heading of the page")


def _run(args: argparse.Namespace) -> int:
    from edit_hooks.utils.storage.outputs import check_writable_folder

    folder = check_writable_folder(args.out)
    if args.watch is None:
        _write(args, folder)
        return 0
    known: object = None
    while True:
        if (found := _files_of(args.results)) != known:
            known = found
            try:
                _write(args, folder)
            except EditingError as error:  # no results yet, or those of a run that is being written
                say(f"the page is not made now: {error}")
            sys.stdout.flush()
        time.sleep(args.watch)


def _write(args: argparse.Namespace, folder: Path) -> None:
    """Make the page and the tables of the results that are there."""
    from edit_hooks.utils.storage.outputs import check_output_file
    from lm_edit.leaderboard.site import FILES, is_own, make_site
    from lm_edit.results.files.runs import find_result_files

    inputs = list(find_result_files(args.results))
    for name in FILES:
        check_output_file(folder / name, inputs=inputs, overwrite=args.overwrite or is_own(folder / name))
    site = make_site(
        args.results,
        only=args.only,
        columns=args.columns,
        published=args.published,
        resamples=args.resamples,
        title=args.title,
        max_megabytes=args.max_mb,
        reload_seconds=args.watch,
        kind_of=editor_kind,
        progress=True,
    )
    for name, text in site.files.items():
        write_output(folder / name, text)
    for note in site.notes:
        say(note)
    say(f"{site.num_rows} rows, {site.num_columns} columns; open {folder / 'index.html'} in a browser")


def editor_kind(name: str) -> EditorKind | None:
    """The kind of an editor; ``None`` if none of this name is installed.

    The name comes from a result file, so it is no path to import, as ``package.module:Class`` would be. Built-in
    editors are not imported, since importing PyTorch can take longer than making the page; those of other packages are.
    """
    from edit_hooks.base.registry import EDITORS, editor_class, editor_names, tier
    from lm_edit.leaderboard.render_html import EditorKind

    if name not in editor_names():
        return None
    try:
        writes = EDITORS[name].writes if name in EDITORS else editor_class(name).writes
    except EditingError:  # an editor of another package, which cannot be imported here
        return None
    return EditorKind(tier(name), writes)


def _files_of(paths: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Size and time of every result and sample file."""
    found = {}
    for given in map(Path, paths):
        for path in given.rglob("*.json*") if given.is_dir() else [given]:
            with contextlib.suppress(OSError):  # moved away in between
                status = path.stat()
                found[str(path)] = status.st_size, status.st_mtime_ns
    return found


VERBS: dict[str, Verb] = {
    "leaderboard": Verb(
        "compare runs on one page with intervals, tests and answers", _add_arguments, _run, is_core=True
    ),
}
