"""``lm-edit``: the console command; its verbs are in :mod:`lm_edit.cli.command`."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from edit_hooks.utils.errors import EditingError
from lm_edit.cli import cache, catalog, contract, edits, judging, locating, training
from lm_edit.cli.command import Verb

VERBS: dict[str, Verb] = {
    **catalog.VERBS,
    **contract.VERBS,
    **edits.VERBS,
    **locating.VERBS,
    **training.VERBS,
    **cache.VERBS,
    **judging.VERBS,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, 1 for findings, 2 for what cannot be done as asked."""
    parser = build_parser()
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    try:
        return given.run(given)
    except EditingError as error:
        print(f"lm-edit {given.verb}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def build_parser() -> argparse.ArgumentParser:
    """The parser with all verbs."""
    parser = argparse.ArgumentParser(
        prog="lm-edit",
        description="Knowledge edits outside of evaluations: make, check, export and tidy up. "
        "Evaluations are run with lm_eval --model edited_hf.",
    )
    verbs = parser.add_subparsers(dest="verb", metavar="<verb>", required=True)
    for name, verb in VERBS.items():
        own = verbs.add_parser(name, help=verb.help, description=verb.help)
        verb.add_arguments(own)
        own.set_defaults(run=verb.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
