"""What the tensors and settings of saved edits may hold, and the one check of it.

Saved edits and adapters are files of strangers, whose checksums anybody can write. Every kind of edit declares its
tensors and settings; whatever differs is an :class:`~edit_hooks.utils.errors.EditingError` that names the field, so
that no later code meets a value that it does not expect.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch

from edit_hooks.utils.errors import EditingError, near_misses
from edit_hooks.utils.settings.numbers import FINITE, NON_NEGATIVE, Range, require_number, require_whole, shorten
from edit_hooks.utils.storage.json_io import parse_json

INDEX = "(0|[1-9][0-9]{0,17})"  # a number in the name of a tensor
MAX_NAME = 60  # characters of a field in messages
MAX_DEPTH = 64  # of nested lists and mappings; readers of metadata call themselves for every level

# Checks a value; the first argument names its field, for the EditingError.
Check: TypeAlias = Callable[[str, Any], object]


def text(what: str, value: Any) -> None:
    """A text."""
    if not isinstance(value, str):
        raise _wrong(what, value, "a text")


def flag(what: str, value: Any) -> None:
    """True or false."""
    if not isinstance(value, bool):
        raise _wrong(what, value, "true or false")


def anything(_what: str, _value: Any) -> None:
    """Any JSON value."""


def whole(within: Range = NON_NEGATIVE) -> Check:
    """A whole number."""
    return lambda what, value: require_whole(what, value, within)


def number(within: Range = FINITE) -> Check:
    """A finite number."""
    return lambda what, value: require_number(what, value, within)


def one_of(*accepted: object) -> Check:
    """One of some values."""

    def check(what: str, value: Any) -> None:
        if not any(value is one or (type(value) is type(one) and value == one) for one in accepted):
            hint = (
                near_misses(value, [one for one in accepted if isinstance(one, str)]) if isinstance(value, str) else ""
            )
            raise _wrong(what, value, f"one of {', '.join(map(str, accepted))}", hint)

    return check


def nullable(check: Check) -> Check:
    """``None``, or what a check accepts."""
    return lambda what, value: None if value is None else check(what, value)


def either(*checks: Check) -> Check:
    """What one of some checks accepts; the message is that of the last."""

    def check(what: str, value: Any) -> None:
        for one in checks[:-1]:
            try:
                one(what, value)
            except EditingError:
                continue
            return
        checks[-1](what, value)

    return check


def list_of(check: Check, length: int | None = None) -> Check:
    """A list of what a check accepts."""

    def check_list(what: str, value: Any) -> None:
        if not isinstance(value, list) or (length is not None and len(value) != length):
            raise _wrong(what, value, "a list" if length is None else f"a list of {length}")
        for index, entry in enumerate(value):
            check(f"{what}[{index}]", entry)

    return check_list


def mapping_of(check: Check = anything) -> Check:
    """A mapping of names to what a check accepts."""

    def check_mapping(what: str, value: Any) -> None:
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise _wrong(what, value, "a mapping of names")
        for name, entry in value.items():
            check(_inside(what, name), entry)

    return check_mapping


@dataclass(frozen=True)
class Record:
    """A mapping with these fields and no other; of ``optional`` ones it has some."""

    required: Mapping[str, Check]
    optional: Mapping[str, Check] = field(default_factory=dict)
    is_open: bool = False

    def __call__(self, what: str, value: Any) -> None:
        mapping_of()(what, value)
        known, where = {**self.required, **self.optional}, what or "it"
        if missing := sorted(self.required.keys() - value.keys()):
            raise EditingError(f"{where} lacks {missing[0]!r}.")
        if not self.is_open and (unknown := sorted(value.keys() - known.keys())):
            raise EditingError(f"{where} has the unknown field {shorten(unknown[0])}.{near_misses(unknown[0], known)}")
        for name in sorted(known.keys() & value.keys()):
            known[name](_inside(what, name), value[name])


@dataclass(frozen=True)
class Tensor:
    """One tensor, or one family of tensors.

    Attributes:
        dims: names of its sizes, as in ``"N F"``, or numbers. Within an edit, sizes of one name are equal, except those
            of ``_``.
        kind: ``float``: float16 to float64, finite. ``whole``: integers within ``within``. ``bits``: bytes.
        within: bounds of the entries.
    """

    dims: str
    kind: Literal["float", "whole", "bits"] = "float"
    within: Range = FINITE
    is_optional: bool = False

    def check(self, what: str, tensor: torch.Tensor, sizes: dict[str, int]) -> None:
        """Check a tensor.

        Args:
            sizes: of the dimensions known so far; those of this tensor are added.
        """
        if tensor.dtype not in DTYPES[self.kind]:
            accepted = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES[self.kind])
            raise EditingError(f"tensor {what} is {str(tensor.dtype).removeprefix('torch.')}; {accepted} is needed.")
        names = self.dims.split()
        if tensor.dim() != len(names):
            raise EditingError(f"tensor {what} has shape {list(tensor.shape)}; {len(names)} dimensions are needed.")
        for name, size in zip(names, tensor.shape, strict=True):
            wanted = size if name == "_" else int(name) if name.isdigit() else sizes.setdefault(name, size)
            if size != wanted:
                raise EditingError(
                    f"tensor {what} has shape {list(tensor.shape)}; {wanted} is needed in place of {size}."
                )
        if tensor.numel():
            self._check_entries(what, tensor)

    def _check_entries(self, what: str, tensor: torch.Tensor) -> None:
        if self.kind == "float" and not bool(torch.isfinite(tensor).all()):
            raise EditingError(f"tensor {what} has entries that are not finite (NaN or infinity).")
        if self.kind == "bits" or self.within is FINITE:
            return
        for extreme in (tensor.min().item(), tensor.max().item()):
            if extreme not in self.within:
                raise EditingError(f"tensor {what} has the entry {extreme}; {self.within.text} is needed.")


DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "float": (torch.float32, torch.float16, torch.bfloat16, torch.float64),
    "whole": (torch.int64, torch.int32),
    "bits": (torch.uint8,),
}


@dataclass(frozen=True)
class Schema:
    """The settings and tensors of one kind of hook edit.

    Attributes:
        settings: all settings, with ``module``, the hooked one.
        tensors: by name.
        families: by a regular expression for whole names, for tensors whose number varies.
    """

    settings: Record
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    families: Mapping[str, Tensor] = field(default_factory=dict)

    def check(self, settings: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Check settings and tensors; returns the sizes of the named dimensions.

        Raises:
            EditingError: it names the field.
        """
        self.settings("settings", settings)
        for name, tensor in self.tensors.items():
            if name not in tensors and not tensor.is_optional:
                raise EditingError(f"tensor {name} is missing.")
        sizes: dict[str, int] = {}
        for name in sorted(tensors):
            self._field(name).check(name, tensors[name], sizes)
        return sizes

    def _field(self, name: str) -> Tensor:
        if name in self.tensors:
            return self.tensors[name]
        for pattern, tensor in self.families.items():
            if re.fullmatch(pattern, name):
                return tensor
        raise EditingError(
            f"tensor {shorten(name)} is unknown; {', '.join([*self.tensors, *self.families])} are known."
        )


def check_numeric(what: str, tensor: torch.Tensor) -> None:
    """Refuse entries that are not finite, and types that hold no numbers, as of a tensor without a schema."""
    if tensor.dtype.is_complex or not (tensor.dtype in DTYPES["float"] or not tensor.dtype.is_floating_point):
        raise EditingError(f"tensor {what} is {str(tensor.dtype).removeprefix('torch.')}, which is not read here.")
    if tensor.dtype.is_floating_point and not bool(torch.isfinite(tensor).all()):
        raise EditingError(f"tensor {what} has entries that are not finite (NaN or infinity).")


def same_length(what: str, entries: Sequence[Any], size: int) -> None:
    """Refuse a setting with another number of entries than the tensors."""
    if len(entries) != size:
        raise EditingError(f"{what} has {len(entries)} entries; {size} are needed.")


def require_distinct(what: str, values: Iterable[object]) -> None:
    """Refuse a value that comes twice."""
    seen = set()
    for value in values:
        if value in seen:
            raise EditingError(f"{what} has {value} twice.")
        seen.add(value)


def read_field(header: Mapping[str, str], name: str, *, strict: bool = True) -> Any:
    """Parse one entry of a saved edit's header.

    Args:
        strict: refuse numbers that are not finite and half surrogate pairs, which losses and names of cases may be.

    Raises:
        EditingError: it is missing, no JSON, or nested too deeply.
    """
    if name not in header:
        raise EditingError(f"its header has no {name!r}.")
    value = parse_json(header[name], name, finite=strict, halves="refuse" if strict else "keep")
    require_shallow(name, value)
    return value


def require_shallow(what: str, value: Any) -> None:
    """Refuse lists and mappings that are nested too deeply."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for one in level
            if isinstance(one, (list, dict))
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return
    raise EditingError(f"{what} is nested more than {MAX_DEPTH} levels deep.")


@contextlib.contextmanager
def of_file(where: object) -> Iterator[None]:
    """Put the file before the errors about its content."""
    try:
        yield
    except EditingError as error:
        raise EditingError(f"{where}: {error}") from None


def _inside(what: str, name: str) -> str:
    """The name of a field; that of a file's content itself is empty."""
    name = name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}..."
    return f"{what}.{name}" if what else name


def _wrong(what: str, value: Any, needed: str, hint: str = "") -> EditingError:
    return EditingError(f"{what or 'it'} is {_shown(value)}; {needed} is needed.{hint}")


def _shown(value: Any) -> str:
    """A JSON value in few characters."""
    if isinstance(value, (list, dict)):
        return f"a {'list' if isinstance(value, list) else 'mapping'} of {len(value)}"
    return "null" if value is None else json.dumps(value) if isinstance(value, bool) else shorten(value)
