"""Blocks of the reference: options of a run, the command `lm-edit`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator

from block import Block, definition

from edit_hooks.run_options import RUN_OPTIONS
from lm_edit.cli.main import VERBS, build_parser


def run_options(_: str) -> Block:
    """Options of ``edited_hf`` beside those of lm-eval's class; options that share a description share an entry."""
    shared: list[list[int]] = []
    for number, option in enumerate(RUN_OPTIONS):
        if option.help:
            shared.append([])
        shared[-1].append(number)
    entries = []
    for numbers in shared:
        options = [RUN_OPTIONS[number] for number in numbers]
        names = ", ".join(f"`{option.name}`" for option in options)
        modes = options[0].modes
        only = f"*Only in mode {' and '.join(modes)}.*" if len(modes) < 4 else ""
        entries.append(definition(names, options[0].help, only))
    return Block("\n\n".join(entries))


def commands(_: str) -> Block:
    """A section per verb of ``lm-edit``, from its parser."""
    return Block("\n\n".join(_verb(name, parser) for name, parser in _subparsers(build_parser())))


def verb_table(_: str) -> Block:
    """Every verb with its first line of help; the frequent ones first."""
    lines = []
    for title, core in (("Most used", True), ("More", False)):
        lines.append(f"**{title}**\n")
        lines += [
            f"- [`{name}`](docs/reference/lm-edit.md#{_anchor(name)}): {verb.help}"
            for name, verb in VERBS.items()
            if verb.is_core is core
        ]
        lines.append("")
    return Block("\n".join(lines))


def _anchor(name: str) -> str:
    return f"lm-edit-{name}".replace(" ", "-")


def _subparsers(parser: argparse.ArgumentParser) -> list[tuple[str, argparse.ArgumentParser]]:
    actions = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return [(name, sub) for action in actions for name, sub in action.choices.items()]


def _verb(name: str, parser: argparse.ArgumentParser, level: int = 2) -> str:
    usage = re.sub(r"\s+", " ", parser.format_usage().removeprefix("usage: ")).strip()
    parts = [f"{'#' * level} lm-edit {name}", _sentence(parser.description or ""), f"```text\n{_wrapped(usage)}\n```"]
    parts += _arguments(parser)
    if parser.epilog:
        parts.append(f"```text\n{parser.epilog.strip()}\n```")
    parts += [_verb(f"{name} {action}", sub, level + 1) for action, sub in _subparsers(parser)]
    return "\n\n".join(parts)


def _sentence(text: str) -> str:
    text = _plain(text.strip())
    return f"{text[0].upper()}{text[1:]}" + ("" if text.endswith((".", ":")) else ".") if text else ""


def _plain(text: str) -> str:
    """Help text as Markdown: what would be an emphasis, a tag or a link is not."""
    return re.sub(r"([*_<>\[\]$|`])", r"\\\1", text.replace("%%", "%"))


def _wrapped(usage: str, width: int = 100) -> str:
    lines, line = [], ""
    for word in re.findall(r"\[[^\]]*\](?: \.\.\.)?|\S+", usage):
        if len(line) + len(word) + 1 > width:
            lines.append(line)
            line = "   "
        line = f"{line} {word}" if line else word
    return "\n".join([*lines, line])


def _arguments(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, (argparse._HelpAction, argparse._SubParsersAction)):
            continue
        metavar = (
            action.metavar
            if isinstance(action.metavar, str)
            else (action.dest.upper() if action.option_strings else action.dest)
        )
        if action.choices:
            metavar = "{" + ",".join(map(str, action.choices)) + "}"
        value = "" if action.nargs == 0 else f" {metavar}"
        term = ", ".join(action.option_strings) + value if action.option_strings else metavar
        default = action.default if action.option_strings and action.nargs != 0 else None
        text = (action.help or "").replace("%(default)s", str(action.default))
        shown = default not in (None, [], argparse.SUPPRESS) and "default" not in text
        text = f"{text} (default: {default})" if shown else text
        needed = "Required." if action.required and action.option_strings else ""
        yield definition(f"`{term}`", _plain(text) or "-", needed)


OPTION_BLOCKS: dict[str, Callable[[str], Block]] = {
    "run-options": run_options,
    "commands": commands,
    "verbs": verb_table,
}
