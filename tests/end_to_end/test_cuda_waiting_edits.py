"""On a GPU: finished dense edits wait there, leave it once, and answer as those that were read from the store.

Skipped without one. Needs no lm-eval (`pytest --noconftest` runs it where that is not installed).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from edit_runs import flat, quick_settings, readings

from edit_hooks.contract.subject import EDIT_REQUESTS, Subject
from edit_hooks.deltas.placement import copied_to_host, off_device
from edit_hooks.lm.editing.independent import IndependentEdits
from edit_hooks.modeling.fingerprint.identity import model_identity
from edit_hooks.store.store import Store

DEVICE = torch.device("cuda", 0)
# CI has no GPU; tests/edit_hooks/lm/editing/test_waiting_edits.py pretends one.
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_copies_are_those_of_the_tensors() -> None:
    """Large and small, of other layouts, written just before and changed right after."""
    tensors = [
        torch.randn(3000, 2000, device=DEVICE),
        torch.randn(7, 5, device=DEVICE).T,
        torch.arange(9, device=DEVICE),
    ]
    expected = [tensor.tolist() for tensor in tensors]
    copies = copied_to_host(tensors)
    for tensor in tensors:
        tensor.zero_()
    assert [copy.tolist() for copy in copies] == expected
    assert all(copy.device.type == "cpu" and copy.is_pinned() for copy in copies)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("editor", ["ft_m", "memit", "wise"])
def test_edits_wait_on_the_gpu(editor: str, dtype: torch.dtype, tmp_path: Path) -> None:
    subject = Subject(editor, "llama", dtype, DEVICE)
    model, tokenizer = subject.model, subject.tokenizer
    groups = [(request,) for request in EDIT_REQUESTS[:2]]

    def made() -> list[object]:
        instance = subject.make(**quick_settings(subject))
        identity = model_identity(model, tokenizer)
        edits = IndependentEdits(model, tokenizer, instance, Store(tmp_path), identity, quiet=True)
        return list(edits.in_order(groups))

    first, read = made(), made()
    for one, other in zip(first, read, strict=True):
        assert {tensor.device for tensor in one.dense.values()} <= {DEVICE}
        assert {tensor.device.type for tensor in other.dense.values()} <= {"cpu"}
        assert one.checksum() == other.checksum() == off_device(one).checksum()
        assert [flat(found) for found in readings(model, tokenizer, one).values()] == [
            flat(found) for found in readings(model, tokenizer, other).values()
        ]
