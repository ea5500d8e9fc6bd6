"""``lm-edit editors``, ``tasks`` and ``validate``: the lists of editors and of tasks, and checks of data."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.settings.numbers import POSITIVE
from lm_edit.cli.command import DATA_HELP, Verb, real, say, table, whole, yes_no

if TYPE_CHECKING:
    from edit_hooks.base.describe import EditorSetting


BITS = ("4", "8")


def _add_editors_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names", nargs="*", metavar="editor", help="show the settings of these editors; with --pretrained, plan these"
    )
    parser.add_argument(
        "--pretrained",
        help="print memory and time of one edit of this model: hub id, folder or demo; nothing is loaded",
    )
    parser.add_argument("--revision", help="revision on the hub")
    parser.add_argument("--dtype", help="precision of the weights; default: that of the checkpoint")
    parser.add_argument("--bits", choices=BITS, help="plan the model quantized to that many bits by bitsandbytes")
    parser.add_argument("--devices", type=whole(), default=1, help="spread the model over that many (default 1)")
    parser.add_argument("--device-memory", type=real(POSITIVE), help="GiB of one device, for one that is not here")
    parser.add_argument(
        "--teraflops", type=real(POSITIVE), help="rate of its matrix products; without it, time is of this machine"
    )


def _run_editors(args: argparse.Namespace) -> int:
    if args.pretrained is not None:
        from lm_edit.cli.planning import print_plan

        return print_plan(args)
    from edit_hooks.base.describe import EditorDescription, describe_editor, describe_editors, describe_settings
    from edit_hooks.base.registry import editor_class
    from edit_hooks.training.find import trainer_class

    if not args.names:

        def capability(row: EditorDescription, holds: bool) -> str:
            return "as its base" if row.has_base else yes_no(holds)

        rows = [
            (
                row.name,
                row.tier,
                capability(row, row.needs_subject),
                capability(row, row.supports_joint),
                ", ".join(row.writes),
                row.stream_growth.grows if row.stream_growth else "not stated",
                row.summary,
            )
            for row in describe_editors()
        ]
        table(("editor", "tier", "needs subject", "joint edits", "changes", "stream grows", "summary"), rows)
        say("\nSettings of one editor: lm-edit editors <name>. Pass them as editor_args=name:value;name:value.")
        return 0
    for name in args.names:
        row = describe_editor(name)
        say(f"{row.name}: {row.summary}")
        if row.stream_growth is not None:
            say(f"A stream carries {row.stream_growth.carries}. Grows: {row.stream_growth.grows}.")
        _print_settings(row.settings)
        if editor_class(name).trainer is not None:
            trained = describe_settings(trainer_class(editor_class(name)).config_class)
            say(f"\nSettings of its training (lm-edit train {name} --settings name:value;...), beside those above:")
            _print_settings([setting for setting in trained if setting not in row.settings])
    return 0


def _print_settings(settings: Sequence[EditorSetting]) -> None:
    table(("setting", "type", "default", "meaning"), [(s.name, s.kind, s.default, s.help) for s in settings])


def _add_tasks_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="word", help="only tasks whose line has all of these words")


def _run_tasks(args: argparse.Namespace) -> int:
    from lm_eval_tasks.report.catalog import list_tasks

    rows = [row for row in list_tasks() if all(word.lower() in " ".join(row).lower() for word in args.words)]
    if not rows:
        raise EditingError(f"no task or group has all of the words {' '.join(args.words)!r}; lm-edit tasks lists all.")
    table(("name", "kind", "folder", "description"), rows)
    say("\nRun them: lm_eval --model edited_hf --tasks <names>. Their pages are in docs/benchmarks.")
    return 0


def _add_validate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="benchmark|file", help="a benchmark, or a JSON(L) file of facts")
    parser.add_argument("--data", help=f"{DATA_HELP}; default: mini")


def _run_validate(args: argparse.Namespace) -> int:
    from lm_edit.validate import validate

    validation = validate(args.target, {"data": args.data} if args.data else {})
    say("source: " + ", ".join(f"{key}={value}" for key, value in validation.source.items()))
    for location, reason in validation.problems.items():
        say(f"bad: {location}: {' '.join(reason.removeprefix(f'{location}: ').split())}")
    for first, second in validation.repeated:
        say(f"note: {second} is the same edit as {first}; batch and sequential runs make it once")
    for note in validation.notes:
        say(f"note: {note}")
    num_bad = len(validation.problems)
    say(f"{validation.num_good} good, {num_bad} bad, {len(validation.repeated)} repeated")
    return 1 if validation.problems else 0


VERBS: dict[str, Verb] = {
    "editors": Verb("list the editors, their capabilities and their settings", _add_editors_arguments, _run_editors),
    "tasks": Verb("list the tasks and groups with a line on each", _add_tasks_arguments, _run_tasks),
    "validate": Verb("check the records of a benchmark or of a file", _add_validate_arguments, _run_validate),
}
