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
from edit_hooks.utils.settings.numbers import POSITIVE, Range
from lm_edit.cli.command import Verb, add_only_argument, say, whole, write_output

if TYPE_CHECKING:
    from lm_edit.leaderboard.render_html import EditorKind
    from lm_edit.leaderboard.site import Site

HOST, PORT = "127.0.0.1", 8765
PORTS = Range("a port from 0 to 65535", least=0, most=2**16 - 1)
MAX_WORKERS = 8  # processes that read samples
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
    parser.add_argument(
        "--resamples", type=whole(POSITIVE), help="draws of bootstrap and permutation tests (default 4999)"
    )
    parser.add_argument(
        "--max-mb",
        type=whole(POSITIVE),
        default=25,
        help="size of the page; beyond it cases are in files beside it (default 25)",
    )
    parser.add_argument(
        "--watch",
        type=whole(POSITIVE),
        metavar="SECONDS",
        help="look for new results every so often and make the page again, until Ctrl-C; the page reloads itself",
    )
    parser.add_argument(
        "--serve",
        type=whole(PORTS),
        nargs="?",
        const=PORT,
        metavar="PORT",
        help=f"serve the page to browsers on this machine, until Ctrl-C (default port {PORT}; 0: any that is free)",
    )
    parser.add_argument("--title", default="Knowledge editing leaderboard", help="heading of the page")


def _run(args: argparse.Namespace) -> int:
    from edit_hooks.utils.storage.outputs import check_writable_folder

    folder = check_writable_folder(args.out)
    address = _address(folder, args.serve)
    if args.watch is None:
        _write(args, folder, address)
        while address:
            time.sleep(3600)
        return 0
    known: object = None
    while True:
        if (found := _files_of(args.results)) != known:
            known = found
            try:
                _write(args, folder, address)
            except EditingError as error:  # no results yet, or those of a run that is being written
                say(f"the page is not made now: {error}")
            sys.stdout.flush()
        time.sleep(args.watch)


def _address(folder: Path, port: int | None) -> str:
    """Address of the folder's web server, which is started; "" without a port."""
    from lm_edit.leaderboard.serving import serve

    return "" if port is None else f"http://{HOST}:{serve(folder, port).server_port}/"


def _write(args: argparse.Namespace, folder: Path, address: str) -> None:
    """Make the page and the tables of the results that are there."""
    from edit_hooks.utils.storage.outputs import check_output_file
    from lm_edit.leaderboard.site import FILES, is_own, make_site
    from lm_edit.results.files.runs import find_result_files
    from lm_edit.sweeps.execution.local import num_cores

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
        workers=min(num_cores(), MAX_WORKERS),
        progress=True,
    )
    write_site(folder, site)
    say(f"{site.num_rows} rows, {site.num_columns} columns; open {address or folder / 'index.html'} in a browser")


def write_site(folder: Path, site: Site) -> None:
    """Write the files of a leaderboard, remove the parts of an earlier page, and print the remarks."""
    from edit_hooks.utils.storage.outputs import check_writable_folder
    from lm_edit.leaderboard.site import old_parts

    for place in sorted({(folder / name).parent for name in site.files}):
        check_writable_folder(place)
    for name, text in site.files.items():
        write_output(folder / name, text)
    for path in old_parts(folder, site.files):
        path.unlink(missing_ok=True)
    for note in site.notes:
        say(note)


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
