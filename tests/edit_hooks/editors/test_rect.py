"""RECT: the share of entries that remain, and their values."""

from __future__ import annotations

import pytest
import torch
from editor_settings import MEMIT_CONFIG
from hypothesis import given
from hypothesis import strategies as st
from layered_edits import (
    EDIT_REQUESTS,
    each_model,
    largest_difference,
    load_wide,
    random_keys,
)

from edit_hooks import load_editor
from edit_hooks.editors.rect import largest_changes


@given(
    keep=st.floats(0.01, 1.0),
    rows=st.integers(1, 12),
    columns=st.integers(1, 12),
    guard=st.sampled_from([0.0, 1e-8]),
    seed=st.integers(0, 5),
)
def test_keeps_the_configured_share(keep, rows, columns, guard, seed):
    weight, update = random_keys(rows, columns, seed), random_keys(rows, columns, seed + 10)
    weight[0, 0] = 0.0
    mask = largest_changes(update, weight, keep, guard)
    zeroed = int((1 - keep) * mask.numel())
    assert int(mask.sum()) == mask.numel() - max(zeroed - 1, 0)  # the entry at the threshold stays
    score = (update / (weight + guard)).abs()
    if not bool(mask.all()):
        assert float(score[mask].min()) >= float(score[~mask].max())
    assert bool(mask[0, 0])  # an update of a zero weight is an infinite relative change


@each_model
def test_leaves_kept_entries_unchanged(model_type):
    model, tokenizer = load_wide(model_type)
    config = {**MEMIT_CONFIG, "second_moments": None}
    base = load_editor("memit", config=config).edit(model, tokenizer, EDIT_REQUESTS[:1])[0]
    sparse = load_editor("rect", config={"base_settings": config}).edit(model, tokenizer, EDIT_REQUESTS[:1])[0]
    for name, update in base.weights().items():
        kept = sparse.weights()[name] != 0
        assert torch.equal(sparse.weights()[name][kept], update[kept])
        assert float(kept.float().mean()) == pytest.approx(0.4, abs=2e-3)
    everything = load_editor("rect", config={"base_settings": config, "keep": 1.0})
    assert largest_difference(everything.edit(model, tokenizer, EDIT_REQUESTS[:1])[0], base) == 0
