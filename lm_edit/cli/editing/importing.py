"""``lm-edit stats import`` and ``lm-edit import-easyedit``: files of other projects."""

from __future__ import annotations

import argparse
from pathlib import Path
from shlex import quote

from edit_hooks.utils.settings.numbers import NON_NEGATIVE
from lm_edit.cli.command import Verb, add_model_arguments, load_model, say, table, whole, write_output


def add_import_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``lm-edit stats import``."""
    parser.add_argument(
        "files",
        nargs="+",
        help=".npz of ROME, MEMIT and UltraEdit, .pt of AlphaEdit, .safetensors, or hf:owner/name@revision/path",
    )
    add_model_arguments(parser)
    parser.add_argument("-o", "--out", type=Path, required=True, help="safetensors file to write")
    parser.add_argument(
        "--layers", type=whole(NON_NEGATIVE), nargs="+", help="layers of the matrices, in order; default: their names"
    )
    parser.add_argument(
        "--kind", choices=("second_moments", "projectors"), help="what the matrices are; default: found by measuring"
    )
    parser.add_argument(
        "--any-spectrum", action="store_true", help="import matrices that do not fit the keys of the model, too"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the file")


def import_matrices(args: argparse.Namespace) -> int:
    """Import matrices and print what was measured of them."""
    from edit_hooks.utils.storage.outputs import check_output_file
    from lm_edit.imports import matrices

    check_output_file(args.out, overwrite=args.overwrite)
    lm = load_model(args)
    kind, checks = matrices.import_matrices(
        args.files,
        lm.model,
        lm.tokenizer,
        args.out,
        layers=args.layers,
        kind=args.kind,
        any_spectrum=args.any_spectrum,
    )
    rows = matrices.describe_checks(checks)
    header = tuple(dict.fromkeys(name for row in rows for name in row))
    table(header, [[_cell(row.get(name)) for name in header] for row in rows])
    use = quote(f"editor=...,editor_args={kind}:{args.out}")
    say(f"use it: lm_eval --model edited_hf --model_args {use} ...")
    return 0


def _cell(value: object) -> str:
    return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def _add_easyedit_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", help="hparams of EasyEdit (YAML), or of the releases of ROME, MEMIT and AlphaEdit (JSON)"
    )
    parser.add_argument("--editor", help="editor that the settings are for; default: that of alg_name in the file")
    parser.add_argument("-o", "--out", type=Path, help="settings file to write; default: print it")
    parser.add_argument("--overwrite", action="store_true", help="replace the file")


def _import_easyedit(args: argparse.Namespace) -> int:
    from edit_hooks.utils.storage.outputs import check_output_file
    from lm_edit.imports.easyedit import read_hparams

    found = read_hparams(args.file, args.editor)
    if args.out is None:
        say(found.text.rstrip("\n"))
    else:
        check_output_file(args.out, overwrite=args.overwrite)
        write_output(args.out, found.text)
        use = quote(f"editor={found.editor},editor_args={args.out}")
        say(f"use it: lm_eval --model edited_hf --model_args {use} ...")
    return 0


VERBS: dict[str, Verb] = {
    "import-easyedit": Verb(
        "translate settings files of EasyEdit, ROME, MEMIT and AlphaEdit", _add_easyedit_arguments, _import_easyedit
    ),
}
