"""``lm-edit results``: comparison, checks, merging, exports, submission of result files, and records chosen by them."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from edit_hooks.utils.durations import spell_duration
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.settings.numbers import POSITIVE
from edit_hooks.utils.storage.json_io import json_text
from lm_edit.cli.command import (
    Verb,
    add_only_argument,
    add_overwrite_argument,
    check_output_files,
    clear_terminal,
    real,
    say,
    table,
    write_output,
)

if TYPE_CHECKING:
    from lm_edit.results.show import Comparison

PATHS_HELP = "result files of lm_eval --output_path, or folders that contain some"
WATCH_HELP = "print the runs of a sweep while they are executed: share, rate, time left, and what waits"
TARGET_NAMES = ("csv", "dataset", "every-eval-ever", "hf", "inspect")  # lm_edit.results.exports.targets


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="<action>", required=True)

    def add(name: str, run: Callable[[argparse.Namespace], int], help: str) -> argparse.ArgumentParser:
        action = actions.add_parser(name, help=help, description=help)
        action.add_argument("paths", nargs="+", help=PATHS_HELP)
        action.set_defaults(run_action=run)
        return action

    show = add("show", _show, "print one table of several runs: a row per metric, a column per run")
    rows = show.add_mutually_exclusive_group()
    rows.add_argument("--metrics", nargs="+", default=[], help="only these metrics, in this order")
    rows.add_argument(
        "--edits", action="store_true", help="the edits in place of the scores: numbers, losses, seconds, GPU memory"
    )
    add_only_argument(show)
    show.add_argument("--transpose", action="store_true", help="a row per run, a column per metric")
    history = add("history", _history, "print the results that several files have of one row, and what changed since")
    history.add_argument(
        "--metrics", nargs="+", default=[], help="only these metrics (default: the first of each task)"
    )
    history.add_argument(
        "--installed", action="store_true", help="the newest result of each row that is stale by what is installed now"
    )
    add_only_argument(history)
    watch = actions.add_parser("watch", help=WATCH_HELP, description=WATCH_HELP)
    watch.add_argument("folder", help="--out of lm-edit sweep, or a folder of several")
    watch.add_argument("--every", type=real(POSITIVE), default=5.0, help="seconds between two tables (default 5)")
    watch.add_argument("--once", action="store_true", help="print one table and end")
    watch.add_argument(
        "--patience",
        type=real(POSITIVE),
        default=600.0,
        help="end after these seconds in which no run was executed "
        "(default 600); longer where runs wait in the queue of a cluster",
    )
    watch.set_defaults(run_action=_watch)
    add("check", _check, "check result files and samples; a results repository also for its layout")
    merge = add("merge", _merge, "write one result file per run, with the newest result of each task")
    merge.add_argument("-o", "--out", required=True, help="new folder")
    export = add("export", _export, "write results in the format of another project")
    export.add_argument("--to", required=True, choices=TARGET_NAMES, help="the format")
    export.add_argument("-o", "--out", required=True, help="new folder")
    add_only_argument(export)
    export.add_argument("--organization", default="unknown", help="every-eval-ever: who ran the evaluations")
    export.add_argument("--developer", help="every-eval-ever: who made the models whose names do not say so")
    export.add_argument("--source-url", help="hf: where the results are published")
    select = add("select-wrong", _select, "write the records that several unedited models all answer wrongly")
    select.add_argument(
        "--data", required=True, help="the records that the runs were asked: a file, hub, hub:SET, mini"
    )
    select.add_argument(
        "--by", choices=("em", "judge"), default="em", help="wrong by exact match (default), or by the runs' judge"
    )
    select.add_argument(
        "--task", default="qaedit_wild_reliability", help="a task of WILD reliability (default: %(default)s)"
    )
    select.add_argument(
        "--skip-unscored",
        action="store_true",
        help="leave out records without a score in some run, such as an unreadable verdict, instead of an error",
    )
    select.add_argument("-o", "--out", required=True, help="file of records to write, for data=/path")
    add_overwrite_argument(select)
    separate = add("separate", _separate, "print which columns tell the facts of some runs from those of others (AUC)")
    separate.add_argument("--from", dest="second", nargs="+", required=True, help="the other runs: files or folders")
    separate.add_argument(
        "--where",
        nargs="+",
        default=[],
        metavar="METRIC",
        help="compare the facts alone that reach a score, as efficacy_argmax (1), or efficacy_prob=0.5",
    )
    add_only_argument(separate)
    separate.add_argument("--only-from", nargs="+", default=[], metavar="CONDITION", help="the same for --from")
    separate.add_argument("-o", "--out", help="also write groups and columns to this JSON file")
    add_overwrite_argument(separate)
    submit = add("submit", _submit, "prepare the files of a pull request to a results repository; sends nothing")
    submit.add_argument("--repository", required=True, help="clone of the repository, or a new folder")
    submit.add_argument("--without-samples", action="store_true", help="leave out the sample files")


def _run(args: argparse.Namespace) -> int:
    result: int = args.run_action(args)
    return result


def _show(args: argparse.Namespace) -> int:
    from lm_edit.results.show import comparison, edits_comparison, transposed

    only = args.only
    found = edits_comparison(args.paths, only) if args.edits else comparison(args.paths, args.metrics, only)
    _print(transposed(found) if args.transpose else found)
    return 0


def _print(found: Comparison) -> None:
    from lm_edit.results.markdown import escape_cell, markdown_table

    for line in [*markdown_table(found.rows), *([""] if found.notes else []), *map(escape_cell, found.notes)]:
        say(line)


def _history(args: argparse.Namespace) -> int:
    if args.installed:
        from lm_edit.installed import stale_rows

        _print(stale_rows(args.paths, args.metrics, args.only))
        return 0
    from lm_edit.results.history import history

    _print(history(args.paths, args.metrics, args.only))
    return 0


def _watch(args: argparse.Namespace) -> int:
    """Print the runs of a sweep again whenever something has changed.

    Returns:
        1 if a run has failed when none is left, and if the patience ends while some are left; else 0.
    """
    from edit_hooks.utils.storage.files import require_folder
    from lm_edit.sweeps.execution.watch import HEADER, SweepFolder

    watched = SweepFolder(require_folder(args.folder, "the folder of a sweep,"))
    shown: object = None
    executed = time.monotonic()
    while True:
        seen = watched.read()
        if seen.is_executed:
            executed = time.monotonic()
        if (seen.rows, seen.summary) != shown:
            shown = seen.rows, seen.summary
            clear_terminal()
            table(HEADER, seen.rows)
            for line in seen.summary:
                say(line)
            sys.stdout.flush()
        if args.once or seen.has_ended:
            return 1 if seen.has_failed else 0
        if time.monotonic() - executed >= args.patience:
            say(f"no process has executed a run for {spell_duration(args.patience)}; lm-edit sweep continues the sweep")
            return 1
        time.sleep(args.every)


def _check(args: argparse.Namespace) -> int:
    from lm_edit.leaderboard.site import refused_together
    from lm_edit.results.checking.check import check_results

    report = check_results(args.paths)
    for problem in report.problems:
        say(" ".join(f"{problem.path}: {problem.text}".split()))
    say(f"{report.num_files} result files, {len(report.problems)} problems")
    if report.num_unverified:
        say(f"{report.num_unverified} tasks have no samples, so that their numbers were not computed again")
    if not report.problems and not report.has_repository and (refusal := refused_together(report.files, report.asked)):
        say(f"nothing is wrong with these files, but lm-edit leaderboard refuses them together: {refusal}")
    return 1 if report.problems else 0


def _merge(args: argparse.Namespace) -> int:
    from lm_edit.results.checking.merge import merge_results

    for path in merge_results(args.paths, args.out):
        say(path)
    return 0


def _export(args: argparse.Namespace) -> int:
    from lm_edit.results.exports.options import ExportOptions
    from lm_edit.results.exports.targets import export_results

    options = ExportOptions(
        only=args.only,
        organization=args.organization,
        developer=args.developer,
        source_url=args.source_url,
    )
    exported = export_results(args.to, args.paths, args.out, options)
    for path in exported.files:
        say(path)
    for reason, count in exported.left_out.items():
        say(f"left out: {count} ({reason})")
    return 0


def _select(args: argparse.Namespace) -> int:
    from lm_edit.results.answers.selection import select_wrong
    from lm_edit.results.files.runs import find_result_files

    check_output_files(args, "out", inputs=[args.data, *find_result_files(args.paths)])
    selection = select_wrong(args.paths, args.data, task=args.task, by=args.by, skip_unscored=args.skip_unscored)
    for one in selection.scores:
        wrong = sum(value == 0 for value in one.values.values())
        say(f"{one.name}: {wrong} of {selection.num_records} wrong")
    for reason, count in selection.left_out.items():
        say(f"left out, without a score in some run, {reason}: {count}")
    say(f"wrong in all {len(selection.scores)} runs: {len(selection.records)}")
    if not selection.records:
        raise EditingError("every record is answered correctly by some run; nothing is written.")
    write_output(args.out, json_text(selection.records, indent=1) + "\n")
    return 0


def _separate(args: argparse.Namespace) -> int:
    from lm_edit.results.files.runs import find_result_files
    from lm_edit.results.markdown import escape_cell, markdown_table
    from lm_edit.results.separating import read_rules, separation

    check_output_files(args, "out", inputs=find_result_files([*args.paths, *args.second]))
    found = separation(
        args.paths, args.second, matched=read_rules(args.where), only=args.only, only_second=args.only_from
    )
    for line in [*markdown_table(found.rows()), "", *map(escape_cell, found.notes())]:
        say(line)
    if args.out is not None:
        write_output(args.out, json_text(found.to_json(), indent=1) + "\n")
    return 0


def _submit(args: argparse.Namespace) -> int:
    from lm_edit.results.checking.repository import submit

    *files, message = submit(args.paths, args.repository, samples=not args.without_samples)
    for path in files:
        say(path)
    say(f"Commit these files on a branch; the text of the pull request is in {message}.")
    return 0


VERBS: dict[str, Verb] = {
    "results": Verb("show, check, merge, export, submit and watch result files", _add_arguments, _run, is_core=True),
}
