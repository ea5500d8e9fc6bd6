"""Building blocks of the verbs of ``lm-edit``.

Every module of this package has a table ``VERBS``, which :mod:`lm_edit.cli.main` merges. A verb parses arguments and
prints; functions outside this package do the work. They are imported when the verb runs, so that ``lm-edit --help``
imports neither torch nor transformers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from edit_hooks.utils.numbers import POSITIVE, Range

if TYPE_CHECKING:
    from edit_hooks.lm.model import EditedHFLM
    from edit_hooks.store.store import Store

DATA_HELP = "origin of the benchmark's records: mini, hub, a file or a folder"
EDITOR_HELP = "name of the editor, see lm-edit editors"
NumberT = TypeVar("NumberT", int, float)
SETTINGS_SYNTAX = "name:value;name:value, or a YAML file"


def whole(within: Range = POSITIVE) -> Callable[[str], int]:
    """Parser of a whole number in a range, for ``type=``."""
    return lambda text: _in_range(text, int, within)


def real(within: Range = POSITIVE) -> Callable[[str], float]:
    """Parser of a number in a range, for ``type=``."""
    return lambda text: _in_range(text, float, within)


def _in_range(text: str, parse: Callable[[str], NumberT], within: Range) -> NumberT:
    try:
        number = parse(text)
    except ValueError:
        number = None
    if number is None or number not in within:
        kind = " (whole)" if parse is int else ""
        raise argparse.ArgumentTypeError(f"{text!r} is not accepted; {within.text}{kind} is needed")
    return number


class Verb(NamedTuple):
    """One sub-command."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that select the model."""
    parser.add_argument("--pretrained", help="hub id or folder of the model; default: the demo model")
    parser.add_argument("--revision", help="revision on the hub")
    parser.add_argument("--dtype", help="precision of the weights; default: that of the checkpoint")
    parser.add_argument("--device", help="cuda, cuda:1, cpu, ...; default: a GPU if there is one")


def model_options(args: argparse.Namespace, *names: str) -> dict[str, object]:
    """Options of the model class.

    Args:
        names: arguments to pass to the model class besides those of :func:`add_model_arguments`.
    """
    names = ("pretrained", "revision", "dtype", "device", *names)
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def data_settings(args: argparse.Namespace) -> dict[str, str | None]:
    """Settings of a benchmark's records: ``--data``, or the default for the model."""
    return {"data": args.data} if args.data else {"pretrained": args.pretrained}


def load_model(args: argparse.Namespace) -> EditedHFLM:
    """Load the unedited model."""
    from edit_hooks.lm.model import EditedHFLM

    return EditedHFLM(**model_options(args), mode="none")


def model_name(lm: EditedHFLM) -> str:
    """Hub id or folder of the model; for the demo model its name."""
    from edit_hooks.assets.demo_model import DEMO_NAME

    return DEMO_NAME if lm.is_demo else str(lm.pretrained)


def open_store(folder: str | None) -> Store | None:
    """The store in a folder, by default the user's; ``None`` for ``off``."""
    from edit_hooks.store.store import Store

    return None if folder == "off" else Store(folder)


def yes_no(value: bool) -> str:
    """Spell a flag for a table."""
    return "yes" if value else "no"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print aligned columns; the last one is not padded."""
    lines = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header) - 1)]
    for line in lines:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[-1]]))
