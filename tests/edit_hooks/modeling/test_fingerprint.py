"""Checksums of saved edits: the sums of release 0.1.0, however the entries are cut into chunks."""

from __future__ import annotations

import pytest
import torch

from edit_hooks.modeling import fingerprint
from edit_hooks.modeling.fingerprint import tensor_checksum

PERIOD = 65521
INTEGERS = {
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float64: torch.int64,
    torch.uint8: torch.uint8,
}


@pytest.mark.parametrize("chunk_periods", [1, 2])
@pytest.mark.parametrize("dtype", INTEGERS)
def test_the_sums_are_those_of_their_definition(
    dtype: torch.dtype, chunk_periods: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "_chunk_entries", lambda device: chunk_periods * PERIOD)
    generator = torch.Generator().manual_seed(0)
    for length in (0, 1, PERIOD, 2 * PERIOD + 7):
        tensor = torch.randn(length, generator=generator, dtype=torch.float64).mul(100).to(dtype)
        entries = tensor.view(INTEGERS[dtype]).tolist()
        weighted = sum(entry * (position % PERIOD + 1) for position, entry in enumerate(entries))
        assert tensor_checksum(tensor) == (sum(entries) % 2**64, weighted % 2**64)


def test_devices_without_a_dot_product_of_integers_give_the_same_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(3, 50_000, generator=torch.Generator().manual_seed(1))
    expected = tensor_checksum(tensor)
    monkeypatch.setattr(fingerprint, "_dot", lambda first, second: (first * second).sum())
    monkeypatch.setattr(fingerprint, "_chunk_entries", lambda device: 256 * PERIOD)
    assert tensor_checksum(tensor) == tensor_checksum(tensor.T.contiguous().T) == expected
