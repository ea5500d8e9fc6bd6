"""Tensors of a file that ``torch.save`` wrote, read without a pickle machine.

Such a file is a zip archive: ``data.pkl`` names the tensors, and each storage is a member of its own. The instructions
of ``data.pkl`` are listed by :mod:`pickletools`, which executes none, and read here by a machine that knows plain
tensors in lists, tuples and dictionaries. Nothing is imported and nothing is called by a name in the file. Everything
else is an error. Storages are mapped into memory, so a file may be larger than it.
"""

from __future__ import annotations

import pickletools
import struct
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch

from edit_hooks.utils.errors import EditingError, first_line

MAX_PROGRAM = 1 << 20  # bytes of data.pkl: a few for each tensor
MAX_DEPTH = 100  # of containers inside of containers
DTYPES: Mapping[str, torch.dtype] = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
}
_AS_NUMPY = {torch.float32: "<f4", torch.float64: "<f8", torch.float16: "<f2", torch.bfloat16: "<i2"}
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
ADVICE = "Write it again as safetensors where it was made: safetensors.torch.save_file({'layer4': C, ...}, path)."


class _Name(NamedTuple):
    """A name that the program would import; it is compared, never looked up."""

    module: str
    name: str


class _Storage(NamedTuple):
    """A storage: its member in the archive, its type and its number of elements."""

    key: str
    dtype: torch.dtype
    length: int


_REBUILD = _Name("torch._utils", "_rebuild_tensor_v2")
_PARAMETER = _Name("torch._utils", "_rebuild_parameter")
_ORDERED = _Name("collections", "OrderedDict")
_MARK = object()


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the file, not read yet."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def end(self) -> int:
        """Elements of the storage up to its last one."""
        if 0 in self.shape:
            return self.offset
        return self.offset + 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))


class TorchFile:
    """A file of ``torch.save``.

    Attributes:
        content: what was saved: a :class:`StoredTensor`, or lists, tuples and dictionaries of them.

    Raises:
        EditingError: for another format, and for a program that does more than to name plain tensors.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with zipfile.ZipFile(path) as archive:
                self._members = {info.filename: info for info in archive.infolist()}
                self._root = self._find_root()
                order = self._root + "byteorder"
                if order in self._members and archive.read(order) != b"little":
                    raise self._error("its numbers are big-endian")
                program = self._members[self._root + "data.pkl"]
                if program.file_size > MAX_PROGRAM:
                    raise self._error(f"its description of tensors has {program.file_size} bytes")
                text = archive.read(program)
        except (zipfile.BadZipFile, OSError, RuntimeError, NotImplementedError) as error:
            raise self._error(f"it is no readable archive of torch.save ({first_line(error)})") from None
        try:
            self.content = _Machine(self._error).run(text)
        except RecursionError:
            raise self._error("its description of tensors is nested too deeply") from None

    def read(self, stored: StoredTensor) -> torch.Tensor:
        """The numbers of a tensor, mapped into memory.

        Raises:
            EditingError: for a storage that is missing, compressed, or shorter than the tensor.
        """
        storage = stored.storage
        member = self._members.get(f"{self._root}data/{storage.key}")
        if member is None:
            raise self._error(f"it has no storage {storage.key!r}")
        num_bytes = storage.length * storage.dtype.itemsize
        if member.compress_type != zipfile.ZIP_STORED or member.file_size != num_bytes:
            raise self._error(f"storage {storage.key!r} has {member.file_size} bytes in place of {num_bytes}")
        if stored.end > storage.length:
            raise self._error(f"a tensor of shape {list(stored.shape)} is larger than its storage")
        flat: numpy.ndarray[Any, Any] = numpy.memmap(
            self.path, _AS_NUMPY[storage.dtype], mode="c", offset=self._begin(member), shape=(storage.length,)
        )
        return torch.as_strided(torch.from_numpy(flat).view(storage.dtype), stored.shape, stored.stride, stored.offset)

    def _find_root(self) -> str:
        """The folder of the archive with the description."""
        found = [name.removesuffix("data.pkl") for name in self._members if name.endswith("/data.pkl")]
        if len(found) != 1:
            raise self._error("it is no archive of torch.save")
        return found[0]

    def _begin(self, member: zipfile.ZipInfo) -> int:
        """Where the bytes of a member begin: behind a header with a name and a field of variable lengths."""
        with self.path.open("rb") as file:
            file.seek(member.header_offset)
            header = file.read(_LOCAL_HEADER.size)
            if len(header) < _LOCAL_HEADER.size or header[:4] != b"PK\x03\x04":
                raise self._error(f"storage {member.filename!r} is damaged")
            *_, name_length, extra_length = _LOCAL_HEADER.unpack(header)
            begin = member.header_offset + _LOCAL_HEADER.size + name_length + extra_length
            if begin + member.file_size > file.seek(0, 2):
                raise self._error(f"storage {member.filename!r} is cut short")
        return int(begin)

    def _error(self, problem: str) -> EditingError:
        return EditingError(f"{self.path} cannot be read without running code: {problem}. {ADVICE}")


class _Machine:
    """Reads the program of ``data.pkl`` with a stack; the instructions of plain tensors only."""

    def __init__(self, error: Callable[[str], EditingError]) -> None:
        self.error = error
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, program: bytes) -> Any:
        try:
            for opcode, argument, _ in pickletools.genops(program):
                if opcode.name == "STOP":
                    return _plain(self.stack.pop(), self.error)
                self._step(opcode.name, argument)
        except (ValueError, IndexError, KeyError, TypeError, struct.error) as error:
            if isinstance(error, EditingError):
                raise
            raise self.error(f"its description of tensors is damaged ({first_line(error)})") from None
        raise self.error("its description of tensors has no end")

    def _step(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in ("PROTO", "FRAME"):
            return
        if name in ("BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"):
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name]())
        elif name == "MARK":
            stack.append(_MARK)
        elif name in ("BINPUT", "LONG_BINPUT"):
            self.memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self.memo[argument])
        elif name in ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"):
            stack.append(tuple(self._to_mark() if name == "TUPLE" else self._pop(int(name[-1]))))
        elif name in ("APPEND", "APPENDS"):
            items = self._to_mark() if name == "APPENDS" else self._pop(1)
            self._top(list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = self._to_mark() if name == "SETITEMS" else self._pop(2)
            self._top(dict).update(zip(items[::2], items[1::2], strict=True))
        elif name == "GLOBAL":
            stack.append(_Name(*str(argument).split(" ", 1)))
        elif name == "STACK_GLOBAL":
            stack.append(_Name(*self._pop(2)))
        elif name == "BINPERSID":
            stack.append(self._storage(stack.pop()))
        elif name == "REDUCE":
            function, arguments = self._pop(2)
            stack.append(self._made(function, arguments))
        else:
            raise self.error(f"it uses {name}, which plain tensors do not need")

    def _pop(self, count: int) -> list[Any]:
        if count > len(self.stack):
            raise IndexError("nothing is left to read")
        items = self.stack[-count:]
        del self.stack[-count:]
        return items

    def _to_mark(self) -> list[Any]:
        place = max(position for position, item in enumerate(self.stack) if item is _MARK)
        items = self.stack[place + 1 :]
        del self.stack[place:]
        return items

    def _top(self, kind: type) -> Any:
        if type(self.stack[-1]) is not kind:
            raise self.error(f"it fills a {type(self.stack[-1]).__name__}, where a {kind.__name__} is needed")
        return self.stack[-1]

    def _storage(self, entry: Any) -> _Storage:
        kind, name, key, _, length = entry
        if kind != "storage" or not isinstance(name, _Name) or name.module != "torch" or name.name not in DTYPES:
            raise self.error(f"it has a storage of type {name!r}; {', '.join(DTYPES)} are read")
        return _Storage(str(key), DTYPES[name.name], _whole(length))

    def _made(self, function: Any, arguments: Any) -> Any:
        """The result of one of three known functions, made here; the function in the file is never called."""
        if function == _ORDERED and arguments == ():
            return {}
        if function == _PARAMETER and isinstance(arguments[0], StoredTensor):
            return arguments[0]
        if function != _REBUILD:
            shown = ".".join(function) if isinstance(function, _Name) else repr(function)
            raise self.error(f"it calls {shown}")
        storage, offset, shape, stride, *_ = arguments
        if not isinstance(storage, _Storage) or len(shape) != len(stride):
            raise self.error("a tensor in it has no storage")
        return StoredTensor(storage, _whole(offset), tuple(map(_whole, shape)), tuple(map(_whole, stride)))


_CONSTANTS: Mapping[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
}


def _whole(value: Any) -> int:
    """A size that is not negative, and no larger than a file can be."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 48:
        raise ValueError(f"{value!r} is no size")
    return value


def _plain(value: Any, error: Callable[[str], EditingError], depth: int = 0) -> Any:
    """A value that consists of tensors, texts and numbers in containers alone."""
    if depth > MAX_DEPTH:
        raise error("its containers are nested too deeply")
    if isinstance(value, (StoredTensor, str, int, float, type(None))):
        return value
    if type(value) in (list, tuple):
        return type(value)(_plain(item, error, depth + 1) for item in value)
    if type(value) is dict:
        return {_plain(key, error, depth + 1): _plain(item, error, depth + 1) for key, item in value.items()}
    raise error(f"it holds a {type(value).__name__.lstrip('_').lower()} that is part of no tensor")


def tensors_of(content: Any) -> dict[str | int, StoredTensor]:
    """The tensors of a saved tensor (key 0), list (positions) or dictionary (its keys).

    Raises:
        EditingError: for anything else.
    """
    if isinstance(content, StoredTensor):
        return {0: content}
    entries: Sequence[tuple[Any, Any]] = ()
    if isinstance(content, (list, tuple)):
        entries = list(enumerate(content))
    elif isinstance(content, dict):
        entries = list(content.items())
    if not entries or not all(isinstance(value, StoredTensor) for _, value in entries):
        raise EditingError("the file holds something else than a tensor, a list of tensors, or names with tensors.")
    return dict(entries)
