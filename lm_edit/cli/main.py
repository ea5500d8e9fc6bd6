"""``lm-edit``: the console command. Its verbs are in the other modules of this package."""

from __future__ import annotations

import argparse
import functools
import logging
import os
import platform
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from edit_hooks.utils.errors import DEBUG_VARIABLE, EXIT_CODE, EditingError, ModelChangedError, traceback_wanted
from edit_hooks.utils.printable import printable
from edit_hooks.utils.requirements import require_versions
from edit_hooks.utils.terminal import accept_all_characters, check_working_folder
from lm_edit.cli import cache, catalog, check_model, contract, embed
from lm_edit.cli.building import (
    bake_files,
    build_bake,
    build_knowgic,
    build_qaedit,
    build_seeds,
    conversion,
    grow_graph,
)
from lm_edit.cli.command import Parser, Verb
from lm_edit.cli.editing import edits, importing, stats, trace, training, tune
from lm_edit.cli.evaluating import compare, figures, judging, leaderboard, passport, results, sweep

VERBS: dict[str, Verb] = {
    **catalog.VERBS,
    **contract.VERBS,
    **check_model.VERBS,
    **edits.VERBS,
    **stats.VERBS,
    **trace.VERBS,
    **embed.VERBS,
    **tune.VERBS,
    **importing.VERBS,
    **training.VERBS,
    **conversion.VERBS,
    **build_bake.VERBS,
    **bake_files.VERBS,
    **build_qaedit.VERBS,
    **build_seeds.VERBS,
    **grow_graph.VERBS,
    **build_knowgic.VERBS,
    **cache.VERBS,
    **judging.VERBS,
    **results.VERBS,
    **figures.VERBS,
    **leaderboard.VERBS,
    **sweep.VERBS,
    **compare.VERBS,
    **passport.VERBS,
}


SHOWN_VERSIONS = ("lm-eval-editing", "lm-eval", "torch", "transformers", "peft")  # distributions, of --version


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit code: 0; 1 for findings and for output cut short by a closed pipe; 2 for user errors; 130 when
        interrupted.
    """
    try:
        try:
            return _run_verb(arguments)
        finally:
            sys.stdout.flush()  # also after --help, which exits: a closed pipe shows here and not at interpreter exit
    except BrokenPipeError:
        # The reader, such as head, is gone. The interpreter flushes stdout once more at exit, so redirect it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run_verb(arguments: Sequence[str] | None) -> int:
    accept_all_characters()
    args = build_parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    try:
        require_versions()
        check_working_folder()
        return args.run(args)
    except (EditingError, ModelChangedError, OSError) as error:
        if traceback_wanted() or isinstance(error, BrokenPipeError):
            raise
        print(f"lm-edit {args.verb}: {_message(error)}", file=sys.stderr)
        return EXIT_CODE
    except KeyboardInterrupt:
        print(f"lm-edit {args.verb}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def _message(error: Exception) -> str:
    if not isinstance(error, OSError):
        return str(error)
    # A file that cannot be written, a full disk: the system's reason says it all.
    place = f"{error.filename}: " if error.filename is not None else ""
    return printable(f"{place}{error.strerror or error}; set {DEBUG_VARIABLE}=1 for the traceback.")


def build_parser() -> argparse.ArgumentParser:
    """The parser with all verbs, which several calls of one process share."""
    return _parser(tuple(VERBS.items()))


@functools.lru_cache(maxsize=1)
def _parser(named: Sequence[tuple[str, Verb]]) -> argparse.ArgumentParser:
    parser = Parser(
        prog="lm-edit",
        description="Make, check and export knowledge edits, and compare their results.\n"
        "Evaluations are run with lm_eval --model edited_hf.",
        epilog=_verb_lists(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action=_ShowVersions, nargs=0, help="show the versions that a report of a fault needs"
    )
    verbs = parser.add_subparsers(dest="verb", metavar="<verb>", required=True, help="one of those below")
    for name, verb in named:
        subparser = verbs.add_parser(name, description=verb.help)  # without `help`: the epilog lists the verbs by tier
        verb.add_arguments(subparser)
        subparser.set_defaults(run=verb.run)
    return parser


class _ShowVersions(argparse.Action):
    """Print a line per package and end; nothing heavy is imported."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        for name in SHOWN_VERSIONS:
            try:
                print(f"{name} {version(name)}")
            except PackageNotFoundError:
                print(f"{name} is not installed")
        print(f"Python {platform.python_version()} on {platform.system()}")
        parser.exit()


def _verb_lists() -> str:
    """The verbs with a line on each: first those that most users need."""
    width = max(map(len, VERBS))
    sections = []
    for title, is_core in (("core verbs", True), ("more", False)):
        rows = [f"  {name:<{width}}  {verb.help}" for name, verb in VERBS.items() if verb.is_core == is_core]
        sections.append("\n".join([f"{title}:", *rows]))
    return "\n\n".join([*sections, "lm-edit <verb> --help explains a verb."])


if __name__ == "__main__":
    sys.exit(main())
