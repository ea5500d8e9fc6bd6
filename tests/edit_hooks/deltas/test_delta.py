"""`Delta` as a value: sums of edits of different kinds."""

from __future__ import annotations

import torch

from edit_hooks import Delta
from edit_hooks.deltas.delta import Factor


def test_a_dense_and_a_low_rank_update_of_one_weight_add_up():
    """Steps of one stream may differ in kind; their sum lost the dense ones (found by the contract's stream check)."""
    generator = torch.Generator().manual_seed(0)
    left, right, dense = (torch.randn(shape, generator=generator) for shape in ((3, 1), (4, 1), (3, 4)))
    total = Delta.summed([Delta(dense={"a.weight": dense}), Delta(factors={"a": Factor(left, right)})])
    assert total.parameter_names == ["a.weight"]
    assert torch.equal(total.weights()["a.weight"], dense + left @ right.T)
