"""Settings that the tasks read from their metadata, and the check for misspelled ones.

lm-eval merges ``--model_args`` and ``--metadata`` into the metadata of every task of a run, ours and others. A key may
therefore belong to a task here, to the model class, or to a task of another package in the same run:

- A declared setting is checked when the task is built, before any weight is loaded.
- A parameter of a loaded model class and a key that lm-eval itself writes are not settings of tasks.
- A key that is almost a declared setting is an error.
- Any other key is named in a warning, since another package's task may read it.
- The keys of a finished run, whose task is built again, are not looked at: its model class need not be in memory.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from edit_hooks.prompt_context import AUTO, QUESTION_SLOT, read_separator
from edit_hooks.request import require_text
from edit_hooks.utils.errors import EditingError, near_misses
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.settings.numbers import SEED, require_whole
from edit_hooks.utils.settings.options import choice, parse_checkpoints, switch
from edit_hooks.utils.text.readable import readable
from lm_eval_tasks.common.saved_cases import has_saved_cases

logger = get_logger("lm_eval.editing_tasks")

# A task's metadata, into which lm-eval merges --model_args and --metadata.
Settings: TypeAlias = Mapping[str, Any]
ValueT = TypeVar("ValueT")

FULL = "full"  # the value of a benchmark's set setting that stands for data=hub
SET_SUFFIX = "_set"  # of the names of these settings, as in qaedit_set

CUTOFF = 0.75  # similarity above which an unknown key counts as misspelled


@dataclass(frozen=True)
@readable
class Setting(Generic[ValueT]):
    """One setting of the tasks.

    Attributes:
        name: the key in the metadata.
        accepted: accepted values, in words.
        help: one line.
        read: metadata -> value, by default that of the setting; raises EditingError for other values.
    """

    name: str
    accepted: str
    help: str
    read: Callable[[Settings], ValueT]


def switch_setting(name: str, help: str, *, default: bool) -> Setting[bool]:
    """A setting that is on or off."""
    return Setting(name, "true, false", help, lambda settings: switch(settings, name, default))


def choice_setting(name: str, help: str, accepted: Sequence[str]) -> Setting[str]:
    """A setting with a closed set of values, the default first."""
    return Setting(name, ", ".join(accepted), help, lambda settings: choice(settings, name, accepted, accepted[0]))


def text_setting(name: str, help: str, accepted: str, *, default: str | None = None) -> Setting[str | None]:
    """A setting that is a text."""

    def read(settings: Settings) -> str | None:
        value = settings.get(name)
        if value is None:
            return default
        if not isinstance(value, str) or not value.strip():
            raise EditingError(f"{name}={value!r} is not a text. Accepted: {accepted}.")
        return value

    return Setting(name, accepted, help, read)


def context_setting(name: str, help: str, contexts: Iterable[str]) -> Setting[str]:
    """A context of questions: one of some names, the default first, or a text with a place for the question."""
    names = tuple(contexts)
    accepted = f"{', '.join(names)}, or a text with {QUESTION_SLOT}"

    def read(settings: Settings) -> str:
        context = settings.get(name, names[0])
        if isinstance(context, str) and (context in names or context.count(QUESTION_SLOT) == 1):
            require_text(context)
            return context
        raise EditingError(f"{name}={context!r} is unknown. Accepted: {accepted} once.")

    return Setting(name, accepted, help, read)


def whole_setting(name: str, default: int, help: str) -> Setting[int]:
    """A setting whose value is a whole number of at least 1."""

    def read(settings: Settings) -> int:
        value = settings.get(name)
        return default if value is None else require_whole(name, value)

    return Setting(name, "a whole number >= 1", help, read)


def set_setting(name: str, sets: Iterable[str]) -> Setting[str | None]:
    """A setting that chooses one of a benchmark's published sets, as ``data=hub:<set>`` does; absent by default."""
    accepted = (FULL, *sets)

    def read(settings: Settings) -> str | None:
        return None if settings.get(name) is None else choice(settings, name, accepted, FULL)

    return Setting(name, ", ".join(accepted), "another form of data=hub and data=hub:<set>", read)


def _checkpoints(settings: Settings) -> tuple[int, ...]:
    return parse_checkpoints(settings.get("checkpoints"))


def _subset(settings: Settings) -> int | None:
    value = settings.get("subset")
    return None if value in (None, "all") else require_whole("subset (all, or a number of records)", value)


def _subset_seed(settings: Settings) -> int | None:
    value = settings.get("subset_seed")
    return None if value is None else require_whole("subset_seed", value, SEED)


def _anything(settings: Settings) -> None:
    """For settings that their own package checks."""


DATA = Setting(
    "data",
    "mini, hub, a set of them as in hub:inter_1k, a file or folder",
    "the embedded sample, the published data, or your copy of it",
    _anything,  # lm_eval_tasks.common.records.dataset.choose_data
)
DATA_REVISION = text_setting("data_revision", "revision of the hub dataset", "a branch, tag or commit")
SUBSET = Setting("subset", "all, or a number of records", "a random subset of the records", _subset)
SUBSET_SEED = Setting("subset_seed", SEED.text, "seed of the subset and of its order", _subset_seed)
SEPARATOR = Setting(
    "separator",
    "auto, space, empty, newline, or the white space itself",
    "between prompt and answer of records without one of their own; auto: by the script of the texts",
    lambda settings: read_separator(settings.get("separator", AUTO)),
)
BAD_RECORDS = choice_setting("bad_records", "treatment of records that violate the schema", ("error", "skip"))
JUDGE = Setting("judge", "a preset, model or file: docs/guides/judges.md", "judge of the *_judge columns", _anything)
SCORE_UNEDITED_CASES = switch_setting(
    "score_unedited_cases", "also score cases that are not among the run's edits", default=False
)
MICRO = switch_setting(
    "micro", "also report every mean over cases as a mean over the questions of all cases", default=False
)
IMMEDIATE = switch_setting("immediate", "stream: also score every case right after its own edit", default=True)
RETENTION = switch_setting("retention", "stream: also score all earlier cases after every step", default=False)
CHECKPOINTS = Setting(
    "checkpoints",
    "numbers of cases, as in 10;100",
    "stream: numbers of edited cases at which cases are scored",
    _checkpoints,
)
MODE = Setting("mode", "a mode of edited_hf", "sequential: report the stages of a stream", _anything)

PRETRAINED = Setting("pretrained", "an option of the model class", "without it, the default of data is mini", _anything)
GROUP_SIZE = Setting("group_size", "an option of the model class", "cases whose edits are made together", _anything)
LOAD_EDIT = Setting("load_edit", "an option of the model class", "a saved edit, under which all is asked", _anything)

COMMON_SETTINGS: tuple[Setting[Any], ...] = (
    DATA,
    PRETRAINED,
    DATA_REVISION,
    BAD_RECORDS,
    SUBSET,
    SUBSET_SEED,
    SEPARATOR,
    JUDGE,
    SCORE_UNEDITED_CASES,
    MICRO,
    MODE,
    IMMEDIATE,
    RETENTION,
    CHECKPOINTS,
    GROUP_SIZE,
    LOAD_EDIT,
)

# Keys that lm-eval, the tasks' YAML files and the tasks themselves write.
WRITTEN = ("_metadata", "config", "config_source", "version", "data_source")


def check_settings(
    settings: Settings, declared: Iterable[Setting[Any]], elsewhere: Callable[[], Iterable[Setting[Any]]]
) -> None:
    """Check a task's settings, and look for misspelled ones.

    Args:
        settings: the metadata, as it comes from lm-eval.
        declared: the settings that this task reads.
        elsewhere: those of all other benchmarks; called if some key is not declared.

    Raises:
        EditingError: for a value that a declared setting does not accept, and for a key that is almost a setting.
    """
    known = {setting.name: setting for setting in declared}
    for setting in known.values():
        setting.read(settings)
    if has_saved_cases(settings):
        return
    foreign = set(settings) - set(known) - set(WRITTEN)
    if foreign:
        known |= {setting.name: setting for setting in elsewhere()}
        foreign -= {*known, *model_parameters()}
    similar = set(known) - {MODE.name}  # other model classes have an argument `model`
    for key in sorted(foreign):
        if hint := near_misses(key.lower().replace("-", "_"), similar, cutoff=CUTOFF):
            raise EditingError(f"unknown setting {key!r}.{hint} Settings of the tasks: {', '.join(sorted(known))}.")
    for key in sorted(foreign):
        _warn_of(key)


@functools.cache
def _warn_of(key: str) -> None:
    """Log once per process; every task of the run sees the key."""
    logger.warning("setting %r belongs to no editing task and to no loaded model class; these tasks ignore it.", key)


def model_parameters() -> set[str]:
    """Names of the parameters of all model classes of lm-eval in memory.

    A class that passes arguments on names further ones in its attribute ``option_names``.
    """
    names: set[str] = set()
    from lm_eval.api.model import LM  # imports much that readers of results do without

    for model_class in _subclasses(LM):
        names |= set(getattr(model_class, "option_names", ()))
        for base in model_class.__mro__:
            if "__init__" in vars(base):
                names |= set(inspect.signature(vars(base)["__init__"]).parameters)
    return names


def _subclasses(base: type[Any]) -> Iterator[type[Any]]:
    for subclass in base.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
