"""``lm-edit edit`` and ``lm-edit export``: edits as files."""

from __future__ import annotations

import argparse

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.numbers import SEED
from lm_edit.cli.command import (
    DATA_OPTIONS,
    EDITOR_HELP,
    SETTINGS_SYNTAX,
    Verb,
    add_data_arguments,
    add_model_arguments,
    check_subset,
    model_options,
    say,
    whole,
)


def _add_edit_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--editor", required=True, help=EDITOR_HELP)
    parser.add_argument("--editor-args", help=f"settings of the editor: {SETTINGS_SYNTAX}")
    parser.add_argument("--edit-context", help="text in which edits are made: bare (default), qa or chat")
    parser.add_argument("--seed", type=whole(SEED), help="seed of the editor")
    parser.add_argument("--edits", required=True, help="a benchmark, or a JSON(L) file of edit requests")
    add_data_arguments(parser)
    parser.add_argument("--num-edits", type=whole(), help="use the first edits only; default: all")
    grouping = parser.add_mutually_exclusive_group()
    grouping.add_argument("--joint", action="store_true", help="one edit that writes all requests at once")
    grouping.add_argument("--sequential", action="store_true", help="a stream: each step edits the result of the last")
    parser.add_argument("--edit-batch-size", type=whole(), help="requests per step of a stream (default 1)")
    parser.add_argument("--store", help="folder of the store of finished edits, or off")
    parser.add_argument("--out", required=True, help="new folder for the edits")


def _run_edit(args: argparse.Namespace) -> int:
    if args.edit_batch_size is not None and not args.sequential:
        raise EditingError("--edit-batch-size sets the size of a stream's steps; add --sequential or drop it.")
    check_subset(args)
    from lm_edit.edits import make_edits

    result = make_edits(
        args.out,
        args.edits,
        grouping="joint" if args.joint else "sequential" if args.sequential else "independent",
        num_edits=args.num_edits,
        edit_batch_size=args.edit_batch_size,
        model_options=model_options(args, "editor", "editor_args", "edit_context", "seed", "store", *DATA_OPTIONS),
    )
    for case, reason in result.failed.items():
        say(f"failed: {case}: {reason}")
    say(f"{len(result.files)} edits written to {args.out}, {len(result.failed)} failed")
    return 1 if result.failed else 0


def _add_export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("deltas", nargs="+", help="saved edits, added up in this order")
    add_model_arguments(parser)
    parser.add_argument("--format", required=True, choices=("peft", "merged"), help="LoRA adapter or full checkpoint")
    parser.add_argument("--out", required=True, help="new folder")


def _run_export(args: argparse.Namespace) -> int:
    from lm_edit.edits import export_edits

    folder = export_edits(args.deltas, args.out, args.format, model_options(args))
    base = args.pretrained or "<folder of the demo model, see lm-edit demo>"
    usage = f"pretrained={base},peft={folder}" if args.format == "peft" else f"pretrained={folder}"
    say(f"written to {folder}; evaluate it with lm_eval --model hf --model_args {usage}")
    return 0


VERBS: dict[str, Verb] = {
    "edit": Verb("make edits and save them", _add_edit_arguments, _run_edit),
    "export": Verb("write saved edits as a LoRA adapter or a checkpoint", _add_export_arguments, _run_export),
}
