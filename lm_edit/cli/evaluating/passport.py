"""``lm-edit passport``: does a saved edit hold, what did it break, does it last, what does it give away?"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.settings.numbers import SEED
from lm_edit.cli.command import (
    DATA_OPTIONS,
    Verb,
    add_data_arguments,
    add_model_arguments,
    model_options,
    say,
    table,
    whole,
    write_output,
)

if TYPE_CHECKING:
    from lm_edit.passport.record import Passport


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("edit", help="a saved edit, the folder of a stream, or the folder of a LoRA adapter")
    add_model_arguments(parser)
    parser.add_argument(
        "--facts", help="file or benchmark with rewordings, neighbors and other questions about the edit's facts"
    )
    add_data_arguments(parser)
    parser.add_argument(
        "--only", default="", metavar="PART[,PART]", help="chapters (holds, broke, lasts, gives-away) or single parts"
    )
    parser.add_argument("--merge-with", help="another adapter or saved edit, added to the edited model")
    parser.add_argument("--text", help="file of unrelated texts for further training, one per line")
    parser.add_argument("--steps", type=whole(), default=50, help="steps of further training (default: %(default)s)")
    parser.add_argument(
        "--limit", type=whole(), default=100, help="ask about at most this many facts (default: %(default)s)"
    )
    parser.add_argument(
        "--ability-rows", type=whole(), default=4, help="rows of each ability task (default: %(default)s)"
    )
    parser.add_argument("--seed", type=whole(SEED), default=0, help="seed of training and decompositions")
    parser.add_argument(
        "-o", "--out", help="new folder for passport.json, passport.md, passport.html and the result files"
    )


def _run(args: argparse.Namespace) -> int:
    from edit_hooks.utils.storage.outputs import check_output_folder
    from lm_edit.passport.making import CHAPTERS, PassportOptions, chosen_parts, make_passport, result_folder
    from lm_edit.passport.pages import FILES, terminal_rows

    if args.facts is None and (given := [name for name in DATA_OPTIONS if getattr(args, name) is not None]):
        raise EditingError(
            f"--{given[0].replace('_', '-')} is for the records of --facts; name a benchmark or drop it."
        )
    options = PassportOptions(
        facts=args.facts,
        parts=chosen_parts([name for name in args.only.split(",") if name] or list(CHAPTERS)),
        merge_with=args.merge_with,
        text=args.text,
        steps=args.steps,
        limit=args.limit,
        ability_rows=args.ability_rows,
        seed=args.seed,
    )
    out = None if args.out is None else check_output_folder(args.out)
    with result_folder(out) as folder:
        passport = make_passport(args.edit, options, model_options(args, *DATA_OPTIONS), folder)
    _print(passport, terminal_rows(passport))
    if out is not None:
        for name, render in FILES.items():
            write_output(out / name, render(passport))
        say(f"written to {out}: {', '.join(FILES)}")
    return 0


def _print(passport: Passport, rows: list[list[str]]) -> None:
    edit = passport.edit
    say(f"passport of {edit['name']} ({edit['editor'] or 'editor unknown'}), {passport.facts['asked']} facts asked")
    table(rows[0], rows[1:])
    for part in passport.parts:
        if part.unscored:
            say(f"unscored: {part.name}: {part.unscored}")
    say(f"{passport.seconds:.0f} seconds")


VERBS: dict[str, Verb] = {
    "passport": Verb("measure what a saved edit holds, broke, survives and gives away", _add_arguments, _run),
}
