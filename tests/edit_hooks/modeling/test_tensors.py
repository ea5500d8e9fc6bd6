"""Files of tensors."""

from __future__ import annotations

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from edit_hooks.modeling.tensors import read_tensors, write_tensors
from edit_hooks.utils.storage.files import sha256_of

HEADER = {"manifest": '{"a": "é \\" \\n \x1f \x7f"}', "format": "one", "checksum": "c" * 64, "digest": "", "ü": ""}
TENSORS = {"b": torch.arange(6.0).view(2, 3), "a": torch.tensor([1, 2]), "empty": torch.zeros(0)}


def test_equal_content_gives_equal_bytes(tmp_path):
    """The order of the header's entries is random in the library: of twelve files there were five different ones."""
    paths = [tmp_path / f"{number}.safetensors" for number in range(12)]
    for path in paths:
        write_tensors(path, TENSORS, HEADER)
    assert len({sha256_of(path) for path in paths}) == 1
    header, tensors = read_tensors(paths[0], "file")
    assert header == HEADER and tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in TENSORS.items())


def test_a_file_of_the_library_is_read_as_before(tmp_path):
    save_file(TENSORS, tmp_path / "theirs.safetensors", HEADER)
    write_tensors(tmp_path / "ours.safetensors", TENSORS, HEADER)
    assert (tmp_path / "ours.safetensors").stat().st_size == (tmp_path / "theirs.safetensors").stat().st_size
    assert read_tensors(tmp_path / "theirs.safetensors", "file")[0] == HEADER
    with safe_open(tmp_path / "ours.safetensors", framework="pt") as opened:
        assert opened.metadata() == HEADER


def test_files_without_metadata_stay_so(tmp_path):
    write_tensors(tmp_path / "plain.safetensors", TENSORS, {})
    assert read_tensors(tmp_path / "plain.safetensors", "file")[0] == {}
