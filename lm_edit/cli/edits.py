"""``lm-edit edit`` and ``lm-edit export``: edits as files."""

from __future__ import annotations

import argparse

from edit_hooks.utils.errors import EditingError
from lm_edit.cli.command import Verb, model_arguments, model_options


def _edit_arguments(parser: argparse.ArgumentParser) -> None:
    model_arguments(parser)
    parser.add_argument("--editor", required=True, help="name of the editor, see lm-edit editors")
    parser.add_argument("--editor-args", help="its settings: name:value;name:value, or a YAML file")
    parser.add_argument("--seed", type=int, help="seed of the editor")
    parser.add_argument("--edits", required=True, help="a benchmark's name, or a JSON(L) file of edit requests")
    parser.add_argument("--data", help="where the benchmark's records are: mini, hub, a file or a folder")
    parser.add_argument("--num-edits", type=int, help="how many of them, in order; all when absent")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--joint", action="store_true", help="one edit that writes all requests at once")
    how.add_argument("--sequential", action="store_true", help="a stream: each step on the weights the last one left")
    parser.add_argument("--edit-batch-size", type=int, help="requests per step of a stream (default 1)")
    parser.add_argument("--store", help="folder of the store of finished edits, or off")
    parser.add_argument("--out", required=True, help="new folder for the edits")


def _edit(given: argparse.Namespace) -> int:
    if given.edit_batch_size is not None and not given.sequential:
        raise EditingError("--edit-batch-size is the size of a stream's steps; add --sequential or drop it.")
    from lm_edit.edits import make_edits

    made = make_edits(
        given.out,
        given.edits,
        how="joint" if given.joint else "sequential" if given.sequential else "independent",
        num_edits=given.num_edits,
        edit_batch_size=given.edit_batch_size,
        data=given.data,
        model_options=model_options(given),
    )
    for case, reason in made.failed.items():
        print(f"failed: {case}: {reason}")
    print(f"{len(made.files)} edits written to {given.out}, {len(made.failed)} failed")
    return 1 if made.failed else 0


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("deltas", nargs="+", help="saved edits, added up in this order")
    model_arguments(parser)
    parser.add_argument("--format", required=True, choices=("peft", "merged"), help="LoRA adapter or whole checkpoint")
    parser.add_argument("--out", required=True, help="new folder")


def _export(given: argparse.Namespace) -> int:
    from lm_edit.edits import export_edits

    folder = export_edits(given.deltas, given.out, given.format, model_options(given))
    base = given.pretrained or "<folder of the demo model, see lm-edit demo>"
    usage = f"pretrained={base},peft={folder}" if given.format == "peft" else f"pretrained={folder}"
    print(f"written to {folder}; evaluate it with lm_eval --model hf --model_args {usage}")
    return 0


VERBS: dict[str, Verb] = {
    "edit": Verb("make edits and save them", _edit_arguments, _edit),
    "export": Verb("write saved edits as a LoRA adapter or a checkpoint", _export_arguments, _export),
}
