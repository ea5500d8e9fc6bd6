"""Files of torch.save, read without a pickle machine: plain tensors come back equal, programs are refused unread."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edit_hooks.utils.errors import EditingError
from lm_edit.imports.torch_file import TorchFile, tensors_of

P = torch.arange(48, dtype=torch.float32).reshape(3, 4, 4)


def saved(value: Any, folder: Path) -> Path:
    torch.save(value, folder / "x.pt")
    return folder / "x.pt"


@pytest.mark.parametrize(
    "value",
    [
        P,
        P[1:, :, 1:3],  # with an offset and strides of a larger storage
        P[0].t(),
        torch.nn.Parameter(P),
        {"a": P[0], "b": P[1].half(), "c": P[2].double(), "d": P[0].bfloat16()},
        OrderedDict(layer4=P[0]),
        [P[0], P[1]],
        (P[0], P[0]),
        torch.empty(0, 4),
    ],
    ids=lambda value: type(value).__name__,
)
def test_plain_tensors_come_back_equal(value: Any, tmp_path: Path) -> None:
    file = TorchFile(saved(value, tmp_path))
    entries = value.items() if isinstance(value, dict) else enumerate([value] if torch.is_tensor(value) else value)
    read = {name: file.read(stored) for name, stored in tensors_of(file.content).items()}
    expected = dict(entries)
    assert read.keys() == expected.keys()
    for name, tensor in expected.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor.detach())


class Program:
    """What an attacker saves: a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("wrap", [lambda program: program, lambda program: {"a": P, "b": program}, lambda p: [P, [p]]])
def test_a_program_is_refused_and_never_runs(wrap: Any, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    path = saved(wrap(Program(os.mkdir, str(mark))), tmp_path)
    with pytest.raises(EditingError, match=r"without running code: it calls .*mkdir"):
        TorchFile(path)
    assert not mark.exists()
    with pytest.raises(FileExistsError):  # the program is a real one
        mark.mkdir()
        torch.load(path, weights_only=False)


def with_program(program: bytes, path: Path) -> Path:
    """The archive of a tensor with another description."""
    source = saved(P, path.parent)
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as new:
        for info in old.infolist():
            new.writestr(info, program if info.filename.endswith("data.pkl") else old.read(info))
    return path


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (torch.load, "holds a name"),
        ({1: torch.load}, "holds a name"),
        (torch.nn.Linear(2, 2), "calls|uses"),
        (torch.ones(2, dtype=torch.int64), "LongStorage"),
        (torch.ones(2).to_sparse(), "calls"),
    ],
)
def test_other_content_is_named(value: Any, problem: str, tmp_path: Path) -> None:
    with pytest.raises(EditingError, match=problem):
        TorchFile(saved(value, tmp_path))


def test_other_formats_are_refused(tmp_path: Path) -> None:
    legacy = tmp_path / "legacy.pt"
    torch.save(P, legacy, _use_new_zipfile_serialization=False)
    plain = tmp_path / "plain.pt"
    plain.write_bytes(pickle.dumps({"a": 1}))
    empty = tmp_path / "empty.pt"
    with zipfile.ZipFile(empty, "w"):
        pass
    for path in (legacy, plain, empty):
        with pytest.raises(EditingError, match="safetensors where it was made"):
            TorchFile(path)


def test_a_storage_shorter_than_its_tensor_is_refused(tmp_path: Path) -> None:
    source = saved(P, tmp_path)
    text = zipfile.ZipFile(source).read("x/data.pkl")
    longer = text.replace(b"K\x03K\x04K\x04", b"K\x09K\x04K\x04", 1)
    assert longer != text
    file = TorchFile(with_program(longer, tmp_path / "longer.pt"))
    with pytest.raises(EditingError, match=r"shape \[9, 4, 4\] is larger than its storage"):
        file.read(file.content)


def test_containers_inside_of_containers_end(tmp_path: Path) -> None:
    deep = b"\x80\x02" + b"]" * 5000 + b"a" * 4999 + b"."
    with pytest.raises(EditingError, match="nested too deeply"):
        TorchFile(with_program(deep, tmp_path / "deep.pt"))


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damaged_descriptions_are_tensors_or_errors(tmp_path: Path, data: st.DataObject) -> None:
    """Bytes of the description replaced, cut and repeated: tensors within their storage, or one kind of error."""
    text = zipfile.ZipFile(saved({"a": P, "b": P[0]}, tmp_path)).read("x/data.pkl")
    place = data.draw(st.integers(0, len(text) - 1))
    piece = data.draw(st.one_of(st.binary(max_size=4), st.just(text[place : place + 40] * 2)))
    damaged = text[:place] + piece + text[place + data.draw(st.integers(0, 6)) :]
    try:
        file = TorchFile(with_program(damaged, tmp_path / "damaged.pt"))
        read = [file.read(stored) for stored in tensors_of(file.content).values()]
    except EditingError:
        return
    assert all(torch.is_tensor(tensor.clone()) for tensor in read)


def test_a_file_cut_anywhere_is_an_error(tmp_path: Path) -> None:
    content = saved(P, tmp_path).read_bytes()
    cut = tmp_path / "cut.pt"
    for length in range(0, len(content), 97):
        cut.write_bytes(content[:length])
        with pytest.raises(EditingError):
            TorchFile(cut)
