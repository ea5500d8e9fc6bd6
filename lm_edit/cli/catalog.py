"""``lm-edit editors`` and ``lm-edit validate``: what there is, and whether data can be used."""

from __future__ import annotations

import argparse

from lm_edit.cli.command import Verb, table, yes


def _editors_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="editor", help="show the settings of these editors")


def _editors(given: argparse.Namespace) -> int:
    from edit_hooks.base.describe import describe_editor, describe_editors

    if not given.names:
        rows = [
            (row.name, yes(row.needs_subject), yes(row.supports_joint), ", ".join(row.writes), row.summary)
            for row in describe_editors()
        ]
        table(("editor", "needs subject", "joint edits", "changes", "what it does"), rows)
        print("\nSettings of one editor: lm-edit editors <name>; they are given as editor_args=name:value;name:value.")
        return 0
    for name in given.names:
        row = describe_editor(name)
        print(f"{row.name}: {row.summary}")
        table(("setting", "type", "default", "meaning"), [(s.name, s.kind, s.default, s.help) for s in row.settings])
    return 0


def _validate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="benchmark|file", help="a benchmark's name, or a JSON(L) file of edit requests")
    parser.add_argument("--data", help="where the benchmark's records are: mini (default), hub, a file or a folder")


def _validate(given: argparse.Namespace) -> int:
    from lm_edit.validate import validate

    found = validate(given.what, {"data": given.data} if given.data else {})
    print("source: " + ", ".join(f"{key}={value}" for key, value in found.source.items()))
    for where, reason in found.problems.items():
        print(f"bad: {where}: {' '.join(reason.removeprefix(f'{where}: ').split())}")
    for first, second in found.repeated:
        print(f"note: {second} is the same edit as {first}; batch and sequential runs refuse it")
    print(f"{found.num_good} good, {len(found.problems)} bad, {len(found.repeated)} repeated")
    return 1 if found.problems else 0


VERBS: dict[str, Verb] = {
    "editors": Verb("list the editors, what they can do and their settings", _editors_arguments, _editors),
    "validate": Verb("check the records of a benchmark or a file of edit requests", _validate_arguments, _validate),
}
