"""The verbs of ``lm-edit``, a module per group; each has a table ``VERBS`` that :mod:`lm_edit.cli.main` puts together.

A verb only reads arguments and prints; the work is a function of the package it belongs to, imported when the verb
runs, so that ``lm-edit --help`` does not wait for torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple


class Verb(NamedTuple):
    """One sub-command."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pretrained", help="hub id or folder of the model; the demo model when absent")
    parser.add_argument("--revision", help="revision on the hub")
    parser.add_argument("--dtype", help="precision of the weights; as saved when absent")
    parser.add_argument("--device", help="cuda, cuda:1, cpu, ...; a GPU if there is one when absent")


def model_options(given: argparse.Namespace) -> dict[str, Any]:
    """Options of the model class that were given."""
    import torch

    names = ("pretrained", "revision", "dtype", "device", "editor", "editor_args", "seed", "store")
    options = {name: getattr(given, name) for name in names if getattr(given, name, None) is not None}
    return {"device": "cuda" if torch.cuda.is_available() else "cpu", **options}


def yes(value: bool) -> str:
    return "yes" if value else "no"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Columns aligned by width; the last one runs on."""
    lines = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header) - 1)]
    for line in lines:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[-1]]))
