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

from edit_hooks import EditingError, load_editor
from edit_hooks.editors.rect import RECTConfig, largest_changes


@given(
    percent=st.integers(1, 100),
    rows=st.integers(1, 12),
    columns=st.integers(1, 12),
    guard=st.sampled_from([0.0, 1e-8]),
    at_threshold=st.sampled_from(["keep", "zero"]),
    seed=st.integers(0, 5),
)
def test_keeps_the_configured_share(percent, rows, columns, guard, at_threshold, seed):
    weight, update = random_keys(rows, columns, seed), random_keys(rows, columns, seed + 10)
    weight[0, 0] = 0.0
    mask = largest_changes(update, weight, RECTConfig(keep=percent / 100, guard=guard, at_threshold=at_threshold))
    zeroed = (100 - percent) * mask.numel() // 100
    assert int(mask.sum()) == mask.numel() - (zeroed if at_threshold == "zero" else max(zeroed - 1, 0))
    score = (update / (weight + guard)).abs()
    if not bool(mask.all()):
        assert float(score[mask].min()) >= float(score[~mask].max())
    assert bool(mask[0, 0])  # an update of a zero weight is an infinite relative change


@given(levels=st.lists(st.integers(0, 3), min_size=1, max_size=40), percent=st.integers(1, 100))
def test_ties_do_not_change_the_number_of_zeroed_entries(levels, percent):
    """Equal scores at the threshold: exactly floor((1 - keep) n) entries go, the earlier ones first; or all stay."""
    update, weight = torch.tensor([levels], dtype=torch.float32), torch.ones(1, len(levels))
    exact, kept = (
        largest_changes(update, weight, RECTConfig(keep=percent / 100, guard=0.0, at_threshold=rule))
        for rule in ("zero", "keep")
    )
    zeroed = (100 - percent) * len(levels) // 100
    expected = torch.ones_like(exact)
    expected[0, torch.tensor(levels).argsort(stable=True)[:zeroed]] = False
    assert torch.equal(exact, expected)
    threshold = sorted(levels)[max(zeroed, 1) - 1]
    assert torch.equal(kept, update >= threshold)


def test_zero_updates_of_zero_weights_rank_last_as_in_numpy():
    """0 / 0 is NaN; the release partitions with numpy, which ranks NaN last: such entries count among the kept."""
    update, weight = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0]]), torch.tensor([[0.0, 1.0, 1.0, 1.0, 1.0]])
    mask = largest_changes(update, weight, RECTConfig(keep=0.4, guard=0.0, at_threshold="zero"))
    assert mask.tolist() == [[True, False, False, False, True]]


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


def test_an_exact_base_needs_the_rest_of_every_update():
    """Its state counts on the whole update; before, such a stream was accepted and not exact."""
    settings = {"base": "memit", "layers": [1], "base_settings": {"stream": "exact"}}
    with pytest.raises(EditingError, match=r"rect writes a part of it\. Set aligned: true"):
        load_editor("rect", settings)
    load_editor("rect", {**settings, "aligned": True})
