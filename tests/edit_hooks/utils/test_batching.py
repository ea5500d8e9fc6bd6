"""Token batches: complete, in order, within the budget, and no smaller than they need to be."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from edit_hooks.utils.batching import token_batches

lengths_strategy = st.lists(st.integers(1, 12), max_size=25)
max_rows_strategy = st.none() | st.integers(1, 5)


def padded_size(batch: list[int], lengths: list[int]) -> int:
    return len(batch) * max(lengths[index] for index in batch)


@given(lengths=lengths_strategy, max_tokens=st.integers(0, 60), max_rows=max_rows_strategy, data=st.data())
def test_batches_hold_every_index_once_in_order_within_the_budget(lengths, max_tokens, max_rows, data):
    order = data.draw(st.permutations(range(len(lengths))))
    batches = list(token_batches(order, lengths, max_tokens, max_rows))
    assert list(itertools.chain(*batches)) == order
    for batch in batches:
        assert batch
        assert len(batch) == 1 or padded_size(batch, lengths) <= max_tokens
        assert max_rows is None or len(batch) <= max_rows


@given(lengths=lengths_strategy, max_tokens=st.integers(0, 60), max_rows=max_rows_strategy)
def test_no_batch_has_room_for_the_next_row(lengths, max_tokens, max_rows):
    batches = list(token_batches(range(len(lengths)), lengths, max_tokens, max_rows))
    for batch, following in itertools.pairwise(batches):
        fits = padded_size([*batch, following[0]], lengths) <= max_tokens
        assert not fits or len(batch) == max_rows


def test_rows_of_one_length_fill_the_budget():
    assert list(token_batches(range(5), [3] * 5, 6)) == [[0, 1], [2, 3], [4]]
    assert list(token_batches(range(5), [3] * 5, 99, max_rows=2)) == [[0, 1], [2, 3], [4]]
    assert list(token_batches([], [], 6)) == []
