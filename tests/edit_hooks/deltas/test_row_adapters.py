"""Per-row adapters, against edits written into the weights."""

from __future__ import annotations

import dataclasses
from collections import Counter
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_deltas import dense_delta, masked_delta, random_delta
from state import assert_same_state
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from edit_hooks import EditingError, PerRowAdapters, edited
from edit_hooks.contract.state import snapshot
from edit_hooks.contract.tiny_models import ALL_MODEL_TYPES, build_model
from edit_hooks.deltas.delta import Delta, Factor
from edit_hooks.modeling.device import run_ahead

KERNELS = {"mm", "bmm", "index", "cat", "masked_fill", "add"}
WITHOUT_KERNEL = {"view", "_unsafe_view", "t", "transpose"}
IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12], [5, 6, 7, 8], [5, 6, 7, 8]])


def patched_logits(model, delta, ids):
    with torch.no_grad(), edited(model, *([] if delta is None else [delta])):
        return model(ids[None]).logits[0]


@pytest.mark.parametrize("model_type", ALL_MODEL_TYPES)
def test_each_row_has_its_own_edit(model_type, tiny_model):
    """Other ranks and modules per row, and no edit."""
    model = tiny_model(model_type)
    deltas = [random_delta(model, seed=1), random_delta(model, layers=(0, 1), ranks=(1, 4)), None]
    deltas.append(random_delta(model, seed=2))
    before = snapshot(model)
    with torch.no_grad(), PerRowAdapters(model, deltas):
        together = model(IDS).logits
    assert_same_state(before, snapshot(model))
    for ids, delta, logits in zip(IDS, deltas, together, strict=True):
        torch.testing.assert_close(logits, patched_logits(model, delta, ids), atol=2e-4, rtol=2e-4)
    assert not torch.allclose(together[0], together[2], atol=1e-2)


@pytest.mark.parametrize("padded", [set(), {"cpu"}], ids=["cpu", "as_on_a_gpu"])
@given(
    edit_of_row=st.lists(st.integers(-1, 3), min_size=1, max_size=7),
    kept=st.lists(st.integers(0, 6), min_size=1, max_size=6),
)
@settings(max_examples=20, deadline=None)
def test_shared_edits_in_any_order_are_those_of_the_rows(padded, edit_of_row, kept):
    """Rows share edits, have their own or none, and are selected, repeated and reordered."""
    with mock.patch.object(run_ahead, "KINDS", padded):
        check_shared_edits(edit_of_row, kept)


def check_shared_edits(edit_of_row, kept):
    kept = [row % len(edit_of_row) for row in kept]
    model = build_model("llama")
    ranks = [(2,), (1,), (4,), (2,)]
    edits = [random_delta(model, ranks=rank, seed=seed) for seed, rank in enumerate(ranks)]
    edits[3] = random_delta(model, layers=(0, 1), ranks=(3, 2), seed=3)
    deltas = [None if edit < 0 else edits[edit] for edit in edit_of_row]
    ids = torch.arange(5, 5 + 4 * len(deltas)).view(-1, 4)
    with torch.no_grad():
        expected = [patched_logits(model, delta, row) for delta, row in zip(deltas, ids, strict=True)]
        adapters = PerRowAdapters(model, deltas)
        with adapters:
            together = model(ids).logits
        with adapters.select(torch.tensor(kept)) as selected:
            some = model(ids[kept]).logits
        with adapters.select(torch.tensor(kept)).select(torch.tensor([len(kept) - 1])):
            last = model(ids[kept[-1:]]).logits
        unedited = model(ids).logits
    torch.testing.assert_close(together, torch.stack(expected), atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(some, together[kept], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(last, together[kept[-1:]], atol=1e-4, rtol=1e-4)
    for row, edit in enumerate(edit_of_row):
        assert edit >= 0 or torch.equal(together[row], unedited[row])
    num_distinct = len({edit_of_row[row] for row in kept} - {-1})
    assert all(len(adapter.left_UDK) <= num_distinct for adapter in selected._adapters)


def test_rows_of_one_edit_share_its_factors(tiny_model):
    """Also where each row has an object of its own over the same tensors; a selection of all edits copies none."""
    model, edit, other = (model := tiny_model("llama")), random_delta(model), random_delta(model, seed=1)
    adapters = PerRowAdapters(model, [other, *(dataclasses.replace(edit) for _ in range(5))])
    (stacked,) = adapters._adapters
    assert len(stacked.left_UDK) == 2
    (selected,) = adapters.select(torch.tensor([5, 4, 0]))._adapters
    assert selected.left_UDK is stacked.left_UDK and selected.factor_of_row == [0, 0, 1]


@pytest.mark.parametrize("rank", [1, 64])
@pytest.mark.parametrize(
    ("edit_of_row", "num_products"),
    [
        ([row // 4 for row in range(256)], 1),  # questions of 64 edits in order
        ([row * 7 % 64 for row in range(256)], 1),  # in slots
        ([-1] * 100 + [row % 52 for row in range(156)], 1),
        ([0] * 200 + list(range(1, 57)), 2),  # one edit has most rows, the others one each
    ],
)
def test_operations_of_a_step_do_not_grow_with_the_edits(monkeypatch, rank, edit_of_row, num_products):
    """On a GPU, of a step of 256 rows: a few kernels per module, and none for whose result the processor waits."""
    monkeypatch.setattr(run_ahead, "KINDS", {"cpu"})
    generator = torch.Generator().manual_seed(0)
    modules = nn.ModuleDict({name: nn.Linear(32, 16, bias=False) for name in ("one", "other")}).requires_grad_(False)
    edits = [
        Delta(
            factors={
                name: Factor(*(torch.randn(size, rank, generator=generator) for size in (16, 32))) for name in modules
            }
        )
        for _ in range(64)
    ]
    adapters = PerRowAdapters(modules, [None if edit < 0 else edits[edit] for edit in edit_of_row])
    x_RTF = torch.randn(256, 1, 32, generator=generator)
    expected = [one(x_RTF) for one in modules.values()]
    with adapters, Operations() as operations:
        found = [one(x_RTF) for one in modules.values()]
    for name, plain_RTD, output_RTD in zip(modules, expected, found, strict=True):
        for row, edit in enumerate(edit_of_row):
            update = 0 if edit < 0 else x_RTF[row] @ edits[edit].factors[name].update().T
            torch.testing.assert_close(output_RTD[row], plain_RTD[row] + update, atol=1e-3, rtol=1e-4)
    counts = operations.counts
    assert counts["bmm"] == 2 * 2 * num_products
    assert counts["index"] + counts["cat"] + counts["masked_fill"] + counts["add"] <= 2 * (3 + 2 * num_products), counts
    assert set(counts) <= KERNELS | WITHOUT_KERNEL


class Operations(TorchDispatchMode):
    """Counts the operations of a scope by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_selected_rows_keep_their_edits(tiny_model):
    model = tiny_model("llama")
    deltas = [random_delta(model, seed=seed) for seed in range(3)]
    adapters = PerRowAdapters(model, deltas)
    rows = torch.tensor([2, 0, 2])
    with torch.no_grad(), adapters.select(rows):
        selected = model(IDS[:1].expand(3, -1)).logits
    with torch.no_grad(), adapters:
        together = model(IDS[:1].expand(3, -1)).logits
    torch.testing.assert_close(selected, together[rows], atol=1e-5, rtol=1e-5)


def test_selecting_inside_the_scope_leaves_its_hooks_alone(tiny_model):
    model = tiny_model("llama")
    before = snapshot(model)
    with PerRowAdapters(model, [random_delta(model)]) as adapters:
        with adapters.select(torch.tensor([0])):
            pass
        assert model.get_submodule("model.layers.1.mlp.down_proj")._forward_hooks
    assert_same_state(before, snapshot(model))


def test_dense_and_masked_edits_are_refused(tiny_model):
    model = tiny_model("llama")
    for delta in (dense_delta(model), masked_delta(model)):
        with pytest.raises(EditingError, match="only low-rank edits"):
            PerRowAdapters(model, [None, delta])
