"""Batches of items under their edits: every item runs once, edits that act per row share batches."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from inference_cases import edits, model_and_tokenizer
from state import assert_same_state
from transformers import LlamaConfig

from edit_hooks.contract.state import snapshot
from edit_hooks.deltas.delta import Delta
from edit_hooks.inference import scoring
from edit_hooks.inference.batching import MOST_ROWS_GPU, Batch, limits_for, run_in_batches
from edit_hooks.inference.items import Limits, ScoreItem
from edit_hooks.utils.errors import EditingError


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


def test_a_batch_that_does_not_fit_is_halved_and_later_ones_of_its_size_likewise(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, _ = model_and_tokenizer()
    lengths = [4] * 8 + [3] * 8
    tried, done = [], []

    def run(batch: Batch) -> None:
        tried.append(len(batch.indices))
        if len(batch.indices) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        done.extend(batch.indices)

    with caplog.at_level(logging.WARNING, "lm_eval.edited_hf"):
        run_in_batches(model, [None] * 16, lengths, Limits(max_tokens=10**6, max_rows=8), run)
    assert done == list(range(16))
    assert tried == [8, 4, 2, 2, 2, 2, 2, 2, 2, 2]
    assert [record.message.split("; ")[-1] for record in caplog.records] == [
        "max_batch_tokens=16 avoids the attempt",
        "max_batch_tokens=8 avoids the attempt",
    ]


def test_a_single_row_that_does_not_fit_is_an_error_with_a_remedy() -> None:
    model, _ = model_and_tokenizer()

    def run(_batch: Batch) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")

    with pytest.raises(EditingError, match=r"prompt of 5 tokens .* 2 GiB\. Use a smaller dtype"):
        run_in_batches(model, [None, None], [5, 5], Limits(), run)


def test_halved_batches_keep_their_edits_and_shared_beginnings(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = model_and_tokenizer()
    by_name = edits(model)
    beginning = tuple(5 + index % 7 for index in range(100))
    jobs = [
        (ScoreItem((*beginning, *beginning[:50], 3 + row), (4, 5 + row)), by_name[name])
        for row, name in enumerate(["none", "first", "first", "second", "none", "none"])
    ]
    expected = scoring.score(model, jobs, Limits(), lambda _count: None)
    whole = scoring._score_batch
    known = []

    def of_one_row(model: Any, items: list[ScoreItem], batch: Batch) -> Any:
        if len(items) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        known.append(batch.num_known)
        return whole(model, items, batch)

    monkeypatch.setattr(scoring, "_score_batch", of_one_row)
    found = scoring.score(model, jobs, Limits(), lambda _count: None)
    assert sum(number >= 128 for number in known) == 5  # all but the only row of the second edit
    assert [one.token_logprobs for one in found] == [pytest.approx(one.token_logprobs, abs=1e-5) for one in expected]


@pytest.mark.parametrize(
    ("free_gib", "asked", "expected"),
    [
        (60, None, 2**15),
        (1, None, 1424),  # half of it, at 131,072 bytes of keys and values and 245,760 of activations per token
        (0, None, 1),
        (1, 4096, 4096),
    ],
)
def test_limits_follow_the_free_memory_of_a_gpu(
    free_gib: int, asked: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = {torch.device("cuda", 0): 61 * 2**30, torch.device("cuda", 1): free_gib * 2**30}
    monkeypatch.setattr("edit_hooks.inference.batching.free_cuda_bytes", free.__getitem__)
    shape = {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336}
    config = LlamaConfig(**shape, num_attention_heads=32, num_key_value_heads=8)
    model = SimpleNamespace(
        parameters=lambda: [SimpleNamespace(device=device) for device in free],
        config=config,
        get_input_embeddings=lambda: SimpleNamespace(weight=torch.empty(0, dtype=torch.bfloat16)),
    )
    assert limits_for(model, asked) == Limits(expected, MOST_ROWS_GPU)


def test_limits_of_a_cpu() -> None:
    model, _ = model_and_tokenizer()
    assert limits_for(model) == Limits()
    assert limits_for(model, 12) == Limits(max_tokens=12)
