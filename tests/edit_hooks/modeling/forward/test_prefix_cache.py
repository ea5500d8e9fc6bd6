"""Prefix cache: shared beginnings are computed once, and keys and values are those of every row alone.

Float64, narrowed nowhere (`keep_wide`), so that a bound of 1e-8 separates another formula from rounding.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache
from value_problems import LIMIT, each_model, keep_wide, loaded, relative

from edit_hooks.modeling.forward import prefix_cache
from edit_hooks.modeling.forward.kv_cache import CACHE
from edit_hooks.modeling.forward.prefix_cache import compute_prefix_cache, shared_head_lengths, shared_heads

rows_strategy = st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=7)


@pytest.fixture(autouse=True)
def _keep_wide() -> Iterator[None]:
    with keep_wide():
        yield


def tokens_computed(rows, lengths) -> int:
    heads = {tuple(row[:length]) for row, length in zip(rows, lengths, strict=True)}
    rest = sum(len(row) - length for row, length in zip(rows, lengths, strict=True))
    return rest + sum(len(head) for head in heads)


@given(rows_strategy, st.integers(1, 4))
def test_heads_are_beginnings_and_no_choice_computes_fewer_tokens(rows, min_length):
    heads = shared_heads(rows, min_length)
    lengths = [0] * len(rows)
    for head in heads:
        assert len({tuple(rows[index][: head.length]) for index in head.rows}) == 1 < len(head.rows)
        for index in head.rows:
            assert lengths[index] == 0 and min_length <= head.length <= len(rows[index])
            lengths[index] = head.length
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_cache, "MIN_TOKENS_SAVED", 1)
        assert min_length > 1 or shared_head_lengths(rows) == lengths

    @functools.cache
    def fewest(members: tuple[int, ...]) -> int:
        """Over all partitions into groups that share a beginning: the first row's group, then the others."""
        if not members:
            return 0
        first, others = members[0], members[1:]
        costs = []
        for size in range(len(others) + 1):
            for companions in itertools.combinations(others, size):
                group = [rows[index] for index in (first, *companions)]
                agreeing = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*group, strict=False))
                shared = len(list(agreeing)) if size else 0
                shared = shared if shared >= min_length else 0
                cost = shared + sum(len(row) - shared for row in group)
                costs.append(cost + fewest(tuple(index for index in others if index not in companions)))
        return min(costs)

    assert tokens_computed(rows, lengths) == fewest(tuple(range(len(rows))))


def test_rows_that_continue_each_other():
    """As many branchings, one inside the other, as a long text has tokens."""
    rows = [list(range(length)) for length in range(3000)]
    (head,) = shared_heads(rows)
    assert sorted(head.rows) == list(range(1499, 3000)) and head.length == 1499


def test_small_savings_are_not_worth_another_pass():
    rows = [[1, *range(10, 10 + n)] for n in (3, 4, 5)]
    assert shared_head_lengths(rows) == [0, 0, 0]
    long = [[*range(40), 50 + n] for n in range(3)]
    assert shared_head_lengths(long) == [40, 40, 40]


@each_model
def test_shared_beginnings_give_the_same_keys_and_values(model_type, monkeypatch):
    """Against every row alone through the whole model; one row is empty, and one is the beginning of others."""
    monkeypatch.setattr(prefix_cache, "MIN_TOKENS_SAVED", 1)
    model, tokenizer = loaded(model_type)
    texts = [
        "The train was late. Elena",
        "The train was late. The museum in",
        "It rained. Elena",
        "The train was late.",
    ]
    rows = [tokenizer(text)["input_ids"] for text in texts] + [[]]
    assert any(shared_head_lengths(rows))
    shared = compute_prefix_cache(model, rows)
    unshared = compute_prefix_cache(model, rows, share=False)
    assert shared is not None and unshared is not None
    assert shared.length_R.tolist() == [len(row) for row in rows] == shared.mask_RP.sum(1).tolist()
    for index, row in enumerate(rows[:-1]):
        cache = DynamicCache()  # the model's own cache would drop what leaves a sliding window
        with torch.no_grad():
            model(input_ids=torch.tensor([row]), use_cache=True, **{CACHE: cache})
        for layer, ours, others in zip(cache.layers, shared.layers, unshared.layers, strict=True):
            for alone, with_sharing, without in zip((layer.keys, layer.values), ours, others, strict=True):
                assert relative(with_sharing[index, :, -len(row) :], alone[0]) < LIMIT
                assert relative(without[index, :, -len(row) :], alone[0]) < LIMIT


def test_a_selection_is_as_wide_as_its_longest_row():
    model, _ = loaded("llama")
    cache = compute_prefix_cache(model, [[5, 6, 7, 8], [9, 10], [11]])
    assert cache is not None
    selected = cache.select(torch.tensor([2, 1]))
    assert (selected.width, selected.mask_RP.tolist()) == (2, [[0, 1], [1, 1]])
    for (keys, values), (all_keys, all_values) in zip(selected.layers, cache.layers, strict=True):
        assert torch.equal(keys, all_keys[[2, 1], :, -2:]) and torch.equal(values, all_values[[2, 1], :, -2:])


def test_empty_rows_have_no_cache():
    assert compute_prefix_cache(loaded("llama")[0], [[], []]) is None
