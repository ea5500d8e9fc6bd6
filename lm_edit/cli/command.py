"""Building blocks of the verbs of ``lm-edit``.

Every module of this package has a table ``VERBS``, which :mod:`lm_edit.cli.main` merges. A verb parses arguments and
prints; functions outside this package do the work. They are imported when the verb runs, so that ``lm-edit --help``
imports neither torch nor transformers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from edit_hooks.utils.errors import EditingError, near_misses
from edit_hooks.utils.printable import printable
from edit_hooks.utils.settings.numbers import POSITIVE, SEED, Range

if TYPE_CHECKING:
    from edit_hooks.lm.model import EditedHFLM
    from edit_hooks.store.store import Store

WEIGHTS = ("pretrained", "revision", "dtype")
# Of add_data_arguments, and of the model class.
OF_BENCHMARKS = ("data", "subset", "subset_seed", "data_revision")  # not of files of facts
DATA_OPTIONS = (*OF_BENCHMARKS, "bad_records", "separator")
DATA_HELP = "origin of the benchmark's records: mini, mini:SET, hub, hub:SET, a file or a folder"
EDITOR_HELP = "name of the editor, see lm-edit editors"
MAX_NAMED = 5  # places that are printed for one reason
NumberT = TypeVar("NumberT", int, float)
SAME_PURPOSE = {"--limit": "--num-edits"}  # options of other verbs and of lm_eval: what does the same elsewhere
SETTINGS_SYNTAX = "name:value;name:value, or a YAML file"


class Parser(argparse.ArgumentParser):
    """A parser that takes no shortened options and hints at what was meant.

    ``--mode joint`` would be ``--model-args joint``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            verb = self._chosen(parsed)
            options = [text for action in verb._actions for text in action.option_strings]
            name = next((word.partition("=")[0] for word in unknown if word.startswith("-")), "")
            meant = SAME_PURPOSE.get(name, name)
            hint = near_misses(meant if meant in options else name, options, 0.7) if name else ""
            verb.error(f"unrecognized arguments: {' '.join(unknown)}.{hint}")
        return parsed

    def _chosen(self, parsed: argparse.Namespace) -> argparse.ArgumentParser:
        """The parser of the verb, and of its action, in parsed arguments: its usage has the options in question."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                parser = action.choices.get(str(getattr(parsed, action.dest, None)))
                return parser._chosen(parsed) if isinstance(parser, Parser) else self
        return self

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += "." + near_misses(str(value), map(str, action.choices or ()))
            raise


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
    """One sub-command.

    Attributes:
        is_core: the help lists it first.
    """

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    is_core: bool = False


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that select the model."""
    parser.add_argument("--pretrained", help="hub id or folder of the model; default: the demo model")
    parser.add_argument("--revision", help="revision on the hub")
    parser.add_argument("--dtype", help="precision of the weights; default: that of the checkpoint")
    parser.add_argument("--device", help="cuda, cuda:1, cpu, ...; default: a GPU if there is one")
    parser.add_argument(
        "--model-args", help="further options of the model as in lm_eval: peft=<adapter>,parallelize=True, ..."
    )


def loading_options(args: argparse.Namespace) -> dict[str, object]:
    """What was given of the options that decide which weights are loaded, for printed commands of ``lm_eval``."""
    named = {name: getattr(args, name) for name in WEIGHTS if getattr(args, name) is not None}
    return {**named, **_model_args(args)}


def loading_words(args: argparse.Namespace) -> list[str]:
    """The same for printed commands of ``lm-edit``."""
    names = (*WEIGHTS, "model_args")
    given = [(f"--{name.replace('_', '-')}", getattr(args, name)) for name in names if getattr(args, name) is not None]
    return [word for pair in given for word in pair]


def _model_args(args: argparse.Namespace) -> dict[str, object]:
    """``--model-args`` as a mapping.

    Raises:
        EditingError: for options that the verb has itself, or that have no meaning here.
    """
    if args.model_args is None:
        return {}
    from lm_eval.utils import simple_parse_args_string

    from edit_hooks.lm.model import OWN_OPTIONS

    options: dict[str, object] = simple_parse_args_string(args.model_args)
    for name in options:
        if name in (*WEIGHTS, "device"):
            raise EditingError(f"--model-args {name}=...: give --{name} instead.")
        if name in OWN_OPTIONS and name != "family":
            raise EditingError(f"--model-args {name}=...: this verb loads a model; its edits are options of the verb.")
    return options


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the records that ``--edits`` names; :data:`DATA_OPTIONS`."""
    parser.add_argument("--data", help=DATA_HELP)
    parser.add_argument(
        "--subset", type=subset_size, help="that many records of the benchmark, in random order; all (default): all"
    )
    parser.add_argument("--subset-seed", type=whole(SEED), help="seed of the subset and of its order (default 0)")
    parser.add_argument("--data-revision", help="commit, tag or branch of data on the hub")
    parser.add_argument(
        "--bad-records", choices=("error", "skip"), help="records that cannot be used: error (default) or skip"
    )
    parser.add_argument(
        "--separator",
        help="between prompt and target of records without one of their own: auto (by script), space, empty, newline",
    )


def subset_size(text: str) -> int | None:
    """Parse the size of a subset, for ``type=``; ``None`` for all."""
    return None if text == "all" else whole()(text)


def add_only_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--only``, for verbs that read results; :func:`lm_edit.results.filters.filter_rows` reads the texts."""
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="FIELD=VALUE[,VALUE]",
        help="keep results with one of these values, e.g. editor=memit,rome; a value that has commas itself is given "
        "alone; may be repeated, for one field with alternatives",
    )


def add_overwrite_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--overwrite``, for verbs that write files."""
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output file")


def check_output_files(args: argparse.Namespace, *names: str, inputs: Iterable[str | Path | None]) -> None:
    """Check the named output options before the work; they become paths with ``~`` expanded.

    Args:
        inputs: what the verb reads; see :func:`edit_hooks.utils.storage.outputs.check_output_file`.

    Raises:
        EditingError: for paths that cannot be written or would overwrite something.
    """
    from edit_hooks.utils.storage.outputs import check_output_file

    sources = [source for source in inputs if source is not None]
    outputs: list[Path] = []
    for name in names:
        if getattr(args, name) is None:
            continue
        path = check_output_file(getattr(args, name), inputs=sources, overwrite=args.overwrite)
        if path.resolve() in outputs:
            raise EditingError(f"--{name} {path} is also the path of another output; name another file.")
        outputs.append(path.resolve())
        setattr(args, name, path)


def write_output(path: Path, text: str) -> None:
    """Write an output file atomically, with its folder."""
    from edit_hooks.utils.storage.files import write_atomically

    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text)


def model_options(args: argparse.Namespace, *names: str) -> dict[str, object]:
    """Options of the model class.

    Args:
        names: arguments to pass to the model class besides those of :func:`add_model_arguments`.
    """
    named = {name: getattr(args, name) for name in (*WEIGHTS, "device", *names) if getattr(args, name) is not None}
    return {**named, **_model_args(args)}


def data_settings(args: argparse.Namespace) -> dict[str, object]:
    """Settings of a benchmark's records: the options of :func:`add_data_arguments`; the model decides on the default.

    Raises:
        EditingError: as :func:`check_data_options`.
    """
    check_data_options(args)
    place = {"data": args.data} if args.data else {"pretrained": args.pretrained}
    chosen = {name: getattr(args, name) for name in DATA_OPTIONS[1:]}
    return {**place, **{name: value for name, value in chosen.items() if value is not None}}


def check_data_options(args: argparse.Namespace) -> None:
    """Refuse data of another benchmark, and options for a benchmark where ``--edits`` is a file.

    Raises:
        EditingError: as described.
    """
    from edit_hooks.utils.storage.files import names_file
    from lm_eval_tasks.common.records.benchmark import check_data

    if not names_file(args.edits):
        check_data(args.edits, args.data)
    elif given := [name for name in OF_BENCHMARKS if getattr(args, name) is not None]:
        options = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        raise EditingError(f"{options}: for the records of a benchmark, but --edits {args.edits} is a file. Drop it.")


def load_model(args: argparse.Namespace) -> EditedHFLM:
    """Load the unedited model."""
    from edit_hooks.lm.model import EditedHFLM

    return EditedHFLM(**model_options(args), mode="none")


def model_name(lm: EditedHFLM) -> str:
    """Hub id or folder of the model; for the demo model its name."""
    from edit_hooks.assets.demo_name import DEMO_NAME

    return DEMO_NAME if lm.is_demo else str(lm.pretrained)


def open_store(folder: str | None) -> Store | None:
    """The store in a folder, by default the user's; ``None`` for ``off``."""
    from edit_hooks.store.store import Store

    return None if folder == "off" else Store(folder)


def yes_no(value: bool) -> str:
    """Spell a flag for a table."""
    return "yes" if value else "no"


def say(text: object) -> None:
    """Print a text that may quote data of users; control characters are escaped, long values shortened."""
    print(printable(str(text)))


def clear_terminal() -> None:
    """Clear the terminal, if the output is one."""
    if sys.stdout.isatty():
        print("\x1b[H\x1b[2J", end="")


def say_reasons(what: str, entries: Iterable[tuple[str, str]]) -> None:
    """Print every reason of (place, reason) with its count and the first places."""
    places: dict[str, list[str]] = {}
    for where, reason in entries:
        places.setdefault(reason, []).append(where)
    for reason in sorted(places):
        named = places[reason]
        more = f" and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""
        say(f"{what}, {reason} ({len(named)}): {'; '.join(named[:MAX_NAMED])}{more}")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print aligned columns; the last one is not padded."""
    lines = [tuple(map(printable, row)) for row in (header, *rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header) - 1)]
    for line in lines:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[-1]]))
