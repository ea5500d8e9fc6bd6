"""Typed editor configurations with help texts and validated values."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, Union

import torch

from edit_hooks.modeling.fingerprint.tensor_hash import tensor_digest
from edit_hooks.utils.errors import EditingError, unknown_keys_error
from edit_hooks.utils.settings.numbers import FINITE, NON_NEGATIVE, SEED, Range, require_numbers, shorten
from edit_hooks.utils.settings.released_settings import explain, is_released
from edit_hooks.utils.storage.files import path_digest, user_path
from edit_hooks.utils.text.readable import readable

FILE_DIGESTS = "file_digests"  # beside the settings in the dictionary of a configuration
Settings = Mapping[str, Any]  # editor settings by name, before they are checked


def config_field(
    help: str,
    *,
    within: Range = FINITE,
    instead_of: str | tuple[str, ...] | None = None,
    file: bool = False,
    **kwargs: Any,
) -> Any:
    """Declare a field of an editor configuration.

    Args:
        help: one line.
        within: accepted values of a number, or of the numbers in a list or mapping.
        instead_of: settings that exclude this one. A user's value drops shipped values of the others; giving both is
            an error.
        file: the setting names a file or folder, or a list of them, whose content is part of the keys of stored edits.
            The fields of built-in editors have digests of their own instead, so that their keys stay.
    """
    metadata = {
        "help": help,
        "within": within,
        "instead_of": (instead_of,) if isinstance(instead_of, str) else instead_of or (),
        "file": file,
    }
    return field(metadata=metadata, **kwargs)


_ConfigT = TypeVar("_ConfigT", bound="EditorConfig")


@dataclass(kw_only=True)
@readable
class EditorConfig:
    """Settings common to all editors.

    Unknown keys, wrong types and numbers out of range are errors. ``layers=None`` selects a default for the model.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        readable(cls)  # before @dataclass, which keeps a repr that the class has

    layers: list[int] | None = config_field(
        "blocks whose rewrite module is edited, ascending", within=NON_NEGATIVE, default=None
    )
    shipped: str | None = config_field(
        "use the shipped settings of another model, as in llama-3-8b, with blocks at the same relative depth; null: "
        "those for the model's shape",
        default=None,
    )
    seed: int = config_field("seed of everything that is drawn at random", within=SEED, default=0)
    engine: Literal["fast", "reference"] = config_field(
        "fast: batched and suffix only; reference: plain loop", default="fast"
    )

    def __post_init__(self) -> None:
        config_class: type = type(self)
        hints = _type_hints(config_class)
        for item in dataclasses.fields(self):
            value = _coerce(getattr(self, item.name), hints[item.name], item.name)
            require_numbers(f"editor setting {item.name!r}", value, item.metadata.get("within", FINITE))
            setattr(self, item.name, value)

    @property
    def edited_layers(self) -> list[int]:
        """``layers`` of a configuration that is resolved for a model."""
        assert self.layers is not None, "the configuration was not resolved for a model"
        return self.layers

    def require_one_layer(self, reason: str) -> None:
        """Raise EditingError, with the reason, if several layers or none are named."""
        if self.layers is not None and len(self.layers) != 1:
            raise EditingError(f"'layers' is {self.layers}, but {reason}; name one layer.")

    def check_given(self, names: Collection[str]) -> None:
        """Refuse mutually exclusive settings.

        Args:
            names: of the given settings. Values that are defaults count as not given, because results record all
                settings and can be given again.
        """
        pairs = [(item, other) for item in dataclasses.fields(self) for other in _replaced(item)]
        defaults = {
            item.name: item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
            for item in dataclasses.fields(self)
        }
        for item, other in pairs:
            if all(name in names and getattr(self, name) not in (None, defaults[name]) for name in (item.name, other)):
                raise EditingError(
                    f"the settings {item.name!r} and {other!r} are both given, and they exclude each other; drop one."
                )

    def record_digest(self, name: str, source: str, found: str | None) -> None:
        """Set the checksum of what another setting names, so that it is part of keys and results.

        Args:
            name: setting of the checksum. It may be given: results record all settings, which can be given again.
            source: setting that names the file or folder.
            found: checksum of what it names now; ``None`` without a file.

        Raises:
            EditingError: if another checksum is given.
        """
        given = getattr(self, name)
        if given not in (None, found):
            has = f"has the checksum {found}" if found else "names no file"
            raise EditingError(
                f"the editor setting {name!r} is {given}, but {source}={shorten(getattr(self, source))} {has}: it was "
                f"changed since these settings were recorded, or is another one. Name the recorded one, or drop "
                f"{name!r} to take it as it is."
            )
        setattr(self, name, found)

    @classmethod
    def from_mapping(cls: type[_ConfigT], mapping: Mapping[str, Any]) -> _ConfigT:
        """Create a configuration from a mapping (YAML, ``editor_args``).

        Raises:
            EditingError: for unknown keys, with near misses, for values of another type, and for a setting that is
                missing and has no default.
        """
        known = {item.name for item in dataclasses.fields(cls)}
        if unknown := set(mapping) - known:
            if is_released(mapping):
                raise EditingError(explain(mapping, known))
            raise unknown_keys_error("editor setting", unknown, known)
        needed = [item.name for item in dataclasses.fields(cls) if _is_required(item)]
        if missing := [name for name in needed if name not in mapping]:
            raise EditingError(
                f"the editor setting {missing[0]!r} has no default and is not given; give it, as in "
                f"editor_args={missing[0]}:<value> (lm-edit: --editor-args)."
            )
        return cls(**mapping)

    @classmethod
    def overridden(cls, shipped: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
        """The shipped settings under the user's, which also replace those that they are alternatives of."""
        given = [item for item in dataclasses.fields(cls) if overrides.get(item.name) is not None]
        dropped = {name for item in given for name in _replaced(item)}
        return {**{name: value for name, value in shipped.items() if name not in dropped}, **overrides}

    def to_dict(self) -> dict[str, Any]:
        """Return all settings as JSON-able values, defaults included, and the digests of files under FILE_DIGESTS.

        Tensors are described by shape, dtype and hash.
        """
        settings = {item.name: _jsonable(getattr(self, item.name)) for item in dataclasses.fields(self)}
        return settings | self.file_digests()

    def file_digests(self) -> dict[str, Any]:
        """Digests of what the settings with ``file=True`` name now: setting -> path -> SHA-256, ``None`` if missing.

        They are under the one key FILE_DIGESTS; empty without such a setting, so that its absence changes no key.
        """
        digests = {}
        for item in dataclasses.fields(self):
            if item.metadata.get("file") and (value := getattr(self, item.name)) is not None:
                paths = value if isinstance(value, (list, tuple)) else [value]
                digests[item.name] = {str(path): path_digest(user_path(path, f"{item.name}=")) for path in paths}
        return {FILE_DIGESTS: digests} if digests else {}


def _replaced(item: dataclasses.Field[Any]) -> tuple[str, ...]:
    """Names of the settings that this one replaces."""
    return tuple(item.metadata.get("instead_of", ()))


@functools.cache
def _type_hints(config_class: type) -> dict[str, Any]:
    return typing.get_type_hints(config_class)


def _coerce(value: Any, hint: Any, name: str) -> Any:
    """Validate a setting against its annotation.

    Numbers as text become numbers: YAML reads 5e-4 as text.
    """
    if hint is Any:
        return value
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        for option in arguments:
            try:
                return _coerce(value, option, name)
            except EditingError:
                continue
    elif origin is Literal:
        if value in arguments:
            return value
    elif hint is type(None):
        if value is None:
            return None
    elif hint is bool:
        if isinstance(value, bool):
            return value
    elif hint is float:
        return _number(value, float, name, hint)
    elif hint is int:
        return _number(value, int, name, hint)
    elif origin is list:
        if isinstance(value, (list, tuple)):
            return [_coerce(entry, arguments[0], name) for entry in value]
    elif origin is dict:
        if isinstance(value, Mapping):
            return {_coerce(k, arguments[0], name): _coerce(v, arguments[1], name) for k, v in value.items()}
    elif isinstance(value, origin or hint):
        return value
    raise EditingError(f"editor setting {name!r} is {shorten(value)}; accepted: {_spell(hint)}.")


def _number(value: Any, kind: type, name: str, hint: Any) -> Any:
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            number = kind(value)
        except (ValueError, OverflowError):  # other text; infinity as a whole number, a huge one as a float
            number = None
        if number is not None and (isinstance(value, str) or number == value or number != number):
            return number
    raise EditingError(f"editor setting {name!r} is {shorten(value)}; accepted: {_spell(hint)}.")


def _spell(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return " or ".join(repr(option) for option in typing.get_args(hint))
    return str(getattr(hint, "__name__", hint)) if not typing.get_args(hint) else str(hint)


def _jsonable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _jsonable(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(entry) for entry in value]
    if isinstance(value, torch.Tensor):  # a matrix in the place of a file
        return {"shape": list(value.shape), "dtype": str(value.dtype), "sha256": tensor_digest(value)}
    return value


def _is_required(item: dataclasses.Field[Any]) -> bool:
    return item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
