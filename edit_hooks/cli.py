"""``lm-edit``: the console command. Each verb is a function of the package it belongs to; only this file prints.

Modules are imported by the verb that needs them, so that ``lm-edit --help`` does not wait for torch.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from edit_hooks.errors import EditingError


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


class Verb(NamedTuple):
    """One sub-command."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


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


# --------------------------------------------------------------------------------------------------------- editors


def _editors_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="editor", help="show the settings of these editors")


def _editors(given: argparse.Namespace) -> int:
    from edit_hooks.describe import describe_editor, describe_editors

    if not given.names:
        rows = [
            (row.name, _yes(row.needs_subject), _yes(row.supports_joint), row.summary) for row in describe_editors()
        ]
        _table(("editor", "needs subject", "joint edits", "what it does"), rows)
        print("\nSettings of one editor: lm-edit editors <name>; they are given as editor_args=name:value;name:value.")
        return 0
    for name in given.names:
        row = describe_editor(name)
        print(f"{row.name}: {row.summary}")
        _table(("setting", "type", "default", "meaning"), [(s.name, s.kind, s.default, s.help) for s in row.settings])
    return 0


# -------------------------------------------------------------------------------------------------------- validate


def _validate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="benchmark|file", help="a benchmark's name, or a JSON(L) file of edit requests")
    parser.add_argument("--data", help="where the benchmark's records are: mini (default), hub, a file or a folder")


def _validate(given: argparse.Namespace) -> int:
    from lm_eval_tasks.common.validate import validate

    found = validate(given.what, {"data": given.data} if given.data else {})
    print("source: " + ", ".join(f"{key}={value}" for key, value in found.source.items()))
    for where, reason in found.problems.items():
        print(f"bad: {where}: {' '.join(reason.removeprefix(f'{where}: ').split())}")
    for first, second in found.repeated:
        print(f"note: {second} is the same edit as {first}; batch and sequential runs refuse it")
    print(f"{found.num_good} good, {len(found.problems)} bad, {len(found.repeated)} repeated")
    return 1 if found.problems else 0


# ------------------------------------------------------------------------------------------------- edit and export


def _model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pretrained", help="hub id or folder of the model; the demo model when absent")
    parser.add_argument("--revision", help="revision on the hub")
    parser.add_argument("--dtype", help="precision of the weights; as saved when absent")
    parser.add_argument("--device", help="cuda, cuda:1, cpu, ...; a GPU if there is one when absent")


def _model_options(given: argparse.Namespace) -> dict[str, Any]:
    """Options of the model class that were given."""
    import torch

    names = ("pretrained", "revision", "dtype", "device", "editor", "editor_args", "seed", "store")
    options = {name: getattr(given, name) for name in names if getattr(given, name, None) is not None}
    return {"device": "cuda" if torch.cuda.is_available() else "cpu", **options}


def _edit_arguments(parser: argparse.ArgumentParser) -> None:
    _model_arguments(parser)
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
    from edit_hooks.make import make_edits

    made = make_edits(
        given.out,
        given.edits,
        how="joint" if given.joint else "sequential" if given.sequential else "independent",
        num_edits=given.num_edits,
        edit_batch_size=given.edit_batch_size,
        data=given.data,
        model_options=_model_options(given),
    )
    for case, reason in made.failed.items():
        print(f"failed: {case}: {reason}")
    print(f"{len(made.files)} edits written to {given.out}, {len(made.failed)} failed")
    return 1 if made.failed else 0


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("deltas", nargs="+", help="saved edits, added up in this order")
    _model_arguments(parser)
    parser.add_argument("--format", required=True, choices=("peft", "merged"), help="LoRA adapter or whole checkpoint")
    parser.add_argument("--out", required=True, help="new folder")


def _export(given: argparse.Namespace) -> int:
    from edit_hooks.make import export_edits

    folder = export_edits(given.deltas, given.out, given.format, _model_options(given))
    base = given.pretrained or "<folder of the demo model, see lm-edit demo>"
    usage = f"pretrained={base},peft={folder}" if given.format == "peft" else f"pretrained={folder}"
    print(f"written to {folder}; evaluate it with lm_eval --model hf --model_args {usage}")
    return 0


# --------------------------------------------------------------------------------------------------- cache and demo


def _cache_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", choices=("show", "prune"), default="show", help="default: show")
    parser.add_argument(
        "--max-size", help="prune: remove the least recently used files until this much is left, as 5GB"
    )
    parser.add_argument("--store", help="folder of the store; the user's when absent")


def _cache(given: argparse.Namespace) -> int:
    if given.action == "prune" and given.max_size is None:
        raise EditingError("say how much may stay: lm-edit cache prune --max-size 5GB (0 removes everything).")
    from edit_hooks.store import Store, kept_beside, parse_size

    store = Store(given.store)
    if given.action == "prune":
        removed = store.prune(parse_size(given.max_size)) + store.remove_leftovers()
        print(f"{removed} files removed")
    print(f"store: {store.root}")
    sizes = store.size()
    total = (sum(count for count, _ in sizes.values()), sum(size for _, size in sizes.values()))
    beside = {} if given.store else kept_beside(store)
    rows = [*sorted(sizes.items()), ("total", total), *((f"beside it: {name}", size) for name, size in beside.items())]
    _table(("kind", "files", "size"), [(kind, str(count), f"{size / 1e6:.1f} MB") for kind, (count, size) in rows])
    return 0


def _demo_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", default="float32", help="float32 (default) or bfloat16")


def _demo(given: argparse.Namespace) -> int:
    from edit_hooks.demo import DEMO_NAME, demo_model_path

    folder = demo_model_path(given.dtype)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{DEMO_NAME}\n{folder} ({size / 1e6:.0f} MB)")
    return 0


# --------------------------------------------------------------------------------------------------------- printing


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Columns aligned by width; the last one runs on."""
    lines = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header) - 1)]
    for line in lines:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[-1]]))


VERBS: dict[str, Verb] = {
    "editors": Verb("list the editors, what they can do and their settings", _editors_arguments, _editors),
    "validate": Verb("check the records of a benchmark or a file of edit requests", _validate_arguments, _validate),
    "edit": Verb("make edits and save them", _edit_arguments, _edit),
    "export": Verb("write saved edits as a LoRA adapter or a checkpoint", _export_arguments, _export),
    "cache": Verb("show or prune the store of finished edits", _cache_arguments, _cache),
    "demo": Verb("say where the demo model is, converting it first if need be", _demo_arguments, _demo),
}

if __name__ == "__main__":
    sys.exit(main())
