"""Batches of items under their edits: every item runs once, edits that act per row share batches."""

from __future__ import annotations

import torch
from inference_cases import edits, model_and_tokenizer
from state import assert_same_state

from edit_hooks.contract.state import snapshot
from edit_hooks.deltas.delta import Delta
from edit_hooks.inference.batching import Batch, run_in_batches
from edit_hooks.inference.items import Limits


def test_rows_with_and_without_edits_share_batches() -> None:
    model, tokenizer = model_and_tokenizer()
    before = snapshot(model, tokenizer)
    by_name = edits(model)
    deltas = [by_name[name] for name in ("dense", "first", "none", "second", "dense", "first")]
    batches: list[tuple[list[int], list[Delta | None], torch.Tensor]] = []
    dense = by_name["dense"]
    assert dense is not None
    (name,) = dense.dense

    def run(batch: Batch) -> None:
        batches.append((batch.indices, batch.deltas, model.get_parameter(name).detach().clone()))

    run_in_batches(model, deltas, [3, 4, 9, 5, 8, 2], Limits(max_tokens=20, max_rows=2), run)
    weight = model.get_parameter(name).detach()
    assert [indices for indices, _, _ in batches] == [[2, 3], [1, 5], [4, 0]]  # longest first, the written edit last
    assert [rows for _, rows, _ in batches[:2]] == [[None, by_name["second"]], [by_name["first"]] * 2]
    assert batches[2][1] == [None, None]  # its weights are in place, no part of it is left to act per row
    assert torch.equal(batches[0][2], weight) and not torch.equal(batches[2][2], weight)
    assert_same_state(before, snapshot(model, tokenizer))
