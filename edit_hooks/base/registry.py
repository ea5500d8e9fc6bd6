"""Editors by name: the built-in table and those of other packages.

A built-in editor is one row in :data:`CORE` or :data:`MORE` and one file in ``editors/``. Another package registers its
editors as entry points of the group :data:`ENTRY_POINTS`, or users name the class: ``editor=package.module:Class``.

The table is read without PyTorch, which only :func:`editor_class` imports.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from edit_hooks.utils.errors import EditingError, near_misses
from edit_hooks.utils.plugins import import_object, is_own, registered
from edit_hooks.utils.storage.yaml_io import read_yaml

if TYPE_CHECKING:
    from edit_hooks.base.editor import Editor

ENTRY_POINTS = "lm_eval_editing.editors"

HOOKS, CONTEXT = ("hooks",), ("context",)
WRITES = ("weights", *HOOKS, *CONTEXT)  # all parts that edits change
NAME = re.compile(r"\w[\w.-]*", re.ASCII)  # of an editor: part of tables, file names and commands


class EditorRow(NamedTuple):
    """A built-in editor.

    Attributes:
        path: ``module:Class``.
        writes: as of the class; parts that its edits change.
    """

    path: str
    writes: tuple[str, ...] = ("weights",)


# The methods that the papers behind the benchmarks compare, and those that users start with.
CORE: dict[str, EditorRow] = {
    "rome": EditorRow("edit_hooks.editors.rome:ROME"),
    "r_rome": EditorRow("edit_hooks.editors.r_rome:RROME"),
    "memit": EditorRow("edit_hooks.editors.memit:MEMIT"),
    "alphaedit": EditorRow("edit_hooks.editors.alphaedit:AlphaEdit"),
    "evk_edit": EditorRow("edit_hooks.editors.evk_edit:EVKEdit"),
    "bird": EditorRow("edit_hooks.editors.bird:BIRD"),
    "ft_m": EditorRow("edit_hooks.editors.ft_m:FTM"),
    "grace": EditorRow("edit_hooks.editors.grace:GRACE", HOOKS),
    "wise": EditorRow("edit_hooks.editors.wise:WISE", HOOKS),
    "ice": EditorRow("edit_hooks.editors.ike:ICE", CONTEXT),
    "ike": EditorRow("edit_hooks.editors.ike:IKE", CONTEXT),
    "ft_l": EditorRow("edit_hooks.editors.ft_l:FTL"),
    "lora": EditorRow("edit_hooks.editors.lora:LoRA"),
}
MORE: dict[str, EditorRow] = {
    "emmet": EditorRow("edit_hooks.editors.emmet:EMMET"),
    "pmet": EditorRow("edit_hooks.editors.pmet:PMET"),
    "rect": EditorRow("edit_hooks.editors.rect:RECT"),
    "prune": EditorRow("edit_hooks.editors.prune:PRUNE"),
    "revive": EditorRow("edit_hooks.editors.revive:REVIVE"),
    "nas": EditorRow("edit_hooks.editors.nas:NAS"),
    "suit": EditorRow("edit_hooks.editors.suit:SUIT"),
    "loc_ft": EditorRow("edit_hooks.editors.loc_ft:LocFT"),
    "loc_ft_crispedit": EditorRow("edit_hooks.editors.loc_ft:LocFTCrispEdit"),
    "crisp_edit": EditorRow("edit_hooks.editors.crisp_edit:CrispEdit"),
    "ultraedit": EditorRow("edit_hooks.editors.ultraedit:UltraEdit"),
    "simie": EditorRow("edit_hooks.editors.simie:SimIE"),
    "melo": EditorRow("edit_hooks.editors.melo:MELO", HOOKS),
    "defer": EditorRow("edit_hooks.editors.defer:DEFER", HOOKS),
    "memoir": EditorRow("edit_hooks.editors.memoir:MEMOIR", HOOKS),
    "neural_db": EditorRow("edit_hooks.editors.neural_db:NeuralDB", HOOKS),
    "ike_leaky_pool": EditorRow("edit_hooks.editors.ike:IKELeakyPool", CONTEXT),
    "mello": EditorRow("edit_hooks.editors.mello:MeLLo", CONTEXT),
    "scr": EditorRow("edit_hooks.editors.scr:SCR", CONTEXT),
    "two_way": EditorRow("edit_hooks.editors.two_way:TwoWay"),
    "mirror": EditorRow("edit_hooks.editors.mirror:Mirror"),
    "consequence_ft": EditorRow("edit_hooks.editors.consequence_ft:ConsequenceFT"),
    "document_training": EditorRow("edit_hooks.editors.document_training:DocumentTraining"),
    "kn": EditorRow("edit_hooks.editors.kn:KN"),
    "mend": EditorRow("edit_hooks.editors.mend:MEND"),
    "serac": EditorRow("edit_hooks.editors.serac:SERAC", CONTEXT),
    "unke": EditorRow("edit_hooks.editors.unke:UnKE"),
    "fe": EditorRow("edit_hooks.editors.fe:FE"),
    "any_edit": EditorRow("edit_hooks.editors.any_edit:AnyEdit"),
}
EDITORS: dict[str, EditorRow] = CORE | MORE


def editor_names() -> list[str]:
    """Return the built-in names in the table's order, then those of other packages."""
    return [*EDITORS, *sorted(_registered())]


def tier(name: str) -> str:
    """``core`` or ``more`` for a built-in editor, ``installed`` for one of another package."""
    return "core" if name in CORE else "more" if name in MORE else "installed"


def editor_class(name: str) -> type[Editor[Any]]:
    """Import the class of an editor, given by name or as ``package.module:Class``.

    Raises:
        EditingError: for an unknown name (with near misses and all known names), a class that cannot be imported, and
            an object that is not a subclass of `Editor`.
    """
    from edit_hooks.base.editor import Editor

    if ":" in name:
        path = name
    elif name in EDITORS:
        path = EDITORS[name].path
    elif name in _registered():
        path = _registered()[name]
    else:
        known = sorted(editor_names())
        module = name.removesuffix(".py")
        if module.isidentifier() and Path(f"{module}.py").is_file():
            raise EditingError(f"editor {name!r} is a file here; give its class, too, as in {module}:ClassName.")
        raise EditingError(
            f"unknown editor {name!r}.{near_misses(name, known)} Known: {', '.join(known)}; or package.module:Class."
        )
    editor = import_object(path, "editor")
    if not (isinstance(editor, type) and issubclass(editor, Editor)):
        raise EditingError(f"editor {name!r}: {path} is not a subclass of edit_hooks.Editor.")
    missing = [field for field in ("name", "config_class") if not hasattr(editor, field)]
    if missing:
        raise EditingError(f"editor {name!r}: the class {path} does not set {' and '.join(missing)}.")
    if fault := next(_faults(editor), None):
        raise EditingError(f"editor {name!r}: {fault}.")
    return editor


def _faults(editor: type[Editor[Any]]) -> Iterator[str]:
    """Yield what is wrong with the declarations of a class, which Python accepts."""
    from edit_hooks.base.config import EditorConfig
    from edit_hooks.base.footprint import StreamGrowth

    where = f"{editor.__module__}:{editor.__qualname__}"
    if inspect.isabstract(editor):
        yield f"the class {where} does not define {', '.join(sorted(editor.__abstractmethods__))}"
    if not isinstance(editor.name, str) or not NAME.fullmatch(editor.name):
        yield (
            f"the name of {where} is {editor.name!r}; letters, digits, '_' and, behind the first, '-' and '.' are "
            "accepted"
        )
    elif editor.name in EDITORS and not is_own(editor):
        yield f"the name of {where} is {editor.name!r}, which is a built-in editor; results could not tell them apart"
    if not isinstance(editor.writes, tuple) or not editor.writes or not set(editor.writes) <= set(WRITES):
        yield f"'writes' of {where} is {editor.writes!r}; a tuple with some of {', '.join(WRITES)} is needed"
    if not isinstance(editor.stream_growth, StreamGrowth | None):
        yield f"'stream_growth' of {where} is {editor.stream_growth!r}; an edit_hooks.StreamGrowth or None is needed"
    config = editor.config_class
    if not (isinstance(config, type) and issubclass(config, EditorConfig)):
        yield f"'config_class' of {where} is {config!r}; a subclass of edit_hooks.EditorConfig is needed"
    elif lost := _lost_settings(config):
        yield (
            f"{', '.join(lost)} of {config.__qualname__} are not settings; put @dataclass(kw_only=True) before "
            f"class {config.__qualname__}"
        )


def _lost_settings(config: type[Any]) -> list[str]:
    """Annotated names that are not fields, because their class is not a dataclass of its own."""
    fields = {field.name for field in dataclasses.fields(config)}
    declared = [name for cls in config.__mro__ for name in _settings_of(cls)]
    return [name for name in dict.fromkeys(declared) if name not in fields]


def _settings_of(cls: type) -> list[str]:
    annotations = inspect.get_annotations(cls) if not is_own(cls) else {}
    return [name for name, hint in annotations.items() if "ClassVar" not in str(hint) and not name.startswith("_")]


def load_editor(name: str, config: Mapping[str, Any] | str | Path | None = None) -> Editor[Any]:
    """Create an editor by name or ``package.module:Class``.

    Args:
        config: settings that override the shipped ones: a mapping, or the path of a YAML file; unknown keys are errors.
    """
    if isinstance(config, (str, Path)):
        config = read_yaml(config)
    chosen = editor_class(name)
    try:
        inspect.signature(chosen).bind(config)
    except TypeError:
        raise _init_error(name, chosen) from None
    editor = chosen(config)
    if not hasattr(editor, "overrides"):
        raise _init_error(name, chosen)
    return editor


def _init_error(name: str, editor: type[Editor[Any]]) -> EditingError:
    return EditingError(
        f"editor {name!r}: {editor.__qualname__}.__init__ does not take the settings, or does not pass them on. "
        "Settings are fields of its config_class, which compute reads from job.config: drop __init__, or write "
        "def __init__(self, overrides=None) and call super().__init__(overrides) in it."
    )


@functools.cache
def _registered() -> dict[str, str]:
    """Map other packages' editor names to ``module:class``; refuse built-in names."""
    entries = registered(ENTRY_POINTS)
    if taken := sorted(set(entries) & set(EDITORS)):
        raise EditingError(
            f"an installed package registers {entries[taken[0]].value} as editor {taken[0]!r}, which is the name of a "
            "built-in editor. Uninstall the package, or ask its authors for another name."
        )
    return {name: entry.value for name, entry in entries.items()}
