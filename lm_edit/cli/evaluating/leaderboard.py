"""``lm-edit leaderboard``: runs side by side, as a page and as tables."""

from __future__ import annotations

import argparse

from edit_hooks.utils.settings.numbers import POSITIVE
from lm_edit.cli.command import Verb, add_only_argument, say, whole, write_output

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
    parser.add_argument("--title", default="Knowledge editing leaderboard", help="heading of the page")


def _run(args: argparse.Namespace) -> int:
    from edit_hooks.utils.storage.outputs import check_output_file, check_writable_folder
    from lm_edit.leaderboard.site import FILES, is_own, make_site
    from lm_edit.results.files.runs import find_result_files

    folder = check_writable_folder(args.out)
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
        progress=True,
    )
    for name, text in site.files.items():
        write_output(folder / name, text)
    for note in site.notes:
        say(note)
    say(f"{site.num_rows} rows, {site.num_columns} columns; open {folder / 'index.html'} in a browser")
    return 0


VERBS: dict[str, Verb] = {
    "leaderboard": Verb(
        "compare runs on one page with intervals, tests and answers", _add_arguments, _run, is_core=True
    ),
}
