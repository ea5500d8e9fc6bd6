"""Shared beginnings computed once, and rows run in groups of similar length: the same numbers, fewer tokens.

Float64, and everything kept wide (see test_engine), so that a bound of 1e-8 tells another formula from rounding.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import REQUESTS
from transformers import DynamicCache
from value_problems import LIMIT, SETTINGS, KeepWide, assert_same_values, each_model, loaded, problem, relative

from edit_hooks import EditRequest
from edit_hooks.locate import value_forward as forwards
from edit_hooks.locate.value_forward import _of_similar_length
from edit_hooks.locate.value_optimization import optimize_values
from edit_hooks.modeling import prefix_cache as prefix
from edit_hooks.modeling.prefix_cache import keys_and_values, shared_heads

rows_strategy = st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=7)


@pytest.fixture(autouse=True)
def _keep_wide() -> Iterator[None]:
    with KeepWide():
        yield


@pytest.fixture
def eager(monkeypatch):
    """Share and split even where it would not pay."""
    monkeypatch.setattr(prefix, "FEWEST_SAVED", 1)
    monkeypatch.setattr(forwards, "WORTH_A_PASS", {False: 0, True: 0})


def tokens_computed(rows, lengths) -> int:
    heads = {tuple(row[:length]) for row, length in zip(rows, lengths, strict=True)}
    rest = sum(len(row) - length for row, length in zip(rows, lengths, strict=True))
    return rest + sum(len(head) for head in heads)


@given(rows_strategy)
def test_heads_are_beginnings_and_no_choice_computes_fewer_tokens(rows):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix, "FEWEST_SAVED", 1)
        lengths = shared_heads(rows)
    assert all(0 <= length <= len(row) for length, row in zip(lengths, rows, strict=True))

    @functools.cache
    def fewest(members: tuple[int, ...]) -> int:
        """Over all partitions into groups that share a beginning: the first row's group, then the others."""
        if not members:
            return 0
        first, others = members[0], members[1:]
        found = []
        for size in range(len(others) + 1):
            for chosen in itertools.combinations(others, size):
                group = [rows[index] for index in (first, *chosen)]
                agreeing = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*group, strict=False))
                shared = len(list(agreeing)) if size else 0
                own = shared + sum(len(row) - shared for row in group)
                found.append(own + fewest(tuple(index for index in others if index not in chosen)))
        return min(found)

    assert tokens_computed(rows, lengths) == fewest(tuple(range(len(rows))))


def test_little_to_share_is_not_worth_another_pass():
    rows = [[1, *range(10, 10 + n)] for n in (3, 4, 5)]
    assert shared_heads(rows) == [0, 0, 0]
    long = [[*range(40), 50 + n] for n in range(3)]
    assert shared_heads(long) == [40, 40, 40]


@given(st.lists(st.integers(1, 12), min_size=1, max_size=20), st.integers(0, 30))
def test_groups_hold_every_row_once_and_little_padding(lengths, most):
    groups = _of_similar_length(lengths, most)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        longest = max(lengths[index] for index in group)
        assert sum(longest - lengths[index] for index in group) <= most
    ends = [(min(lengths[i] for i in group), max(lengths[i] for i in group)) for group in groups]
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(ends))


@each_model
def test_shared_beginnings_give_the_same_keys_and_values(model_type, eager):
    """Against every row alone through the whole model; an empty row and a row that is another's beginning are there."""
    model, tokenizer = loaded(model_type)
    texts = [
        "The train was late. Elena",
        "The train was late. The museum in",
        "It rained. Elena",
        "The train was late.",
    ]
    rows = [tokenizer(text)["input_ids"] for text in texts] + [[]]
    assert any(shared_heads(rows))
    found = keys_and_values(model, rows)
    apart = keys_and_values(model, rows, share=False)
    assert found is not None and apart is not None
    assert found.length_R.tolist() == [len(row) for row in rows] == found.mask_RP.sum(1).tolist()
    for index, row in enumerate(rows[:-1]):
        cache = DynamicCache()  # the model's own would forget what leaves a sliding window
        with torch.no_grad():
            model(input_ids=torch.tensor([row]), past_key_values=cache, use_cache=True)
        for entry, ours, whole in zip(cache.layers, found.entries, apart.entries, strict=True):
            for alone, shared, unshared in zip((entry.keys, entry.values), ours, whole, strict=True):
                assert relative(shared[index, :, -len(row) :], alone[0]) < LIMIT
                assert relative(unshared[index, :, -len(row) :], alone[0]) < LIMIT


@each_model
def test_values_do_not_depend_on_sharing_and_grouping(model_type, eager, monkeypatch):
    """Rows of several lengths in one batch, edits that stop at different steps."""
    model, tokenizer = loaded(model_type)
    problems = [problem(tokenizer, EditRequest(**record)) for record in REQUESTS]
    parts = []
    prepare = forwards.SuffixForward._prepare

    def count(self) -> None:
        prepare(self)
        parts.append(len(self.parts))

    monkeypatch.setattr(forwards.SuffixForward, "_prepare", count)
    ours = optimize_values(model, problems, SETTINGS)
    monkeypatch.setattr(prefix, "FEWEST_SAVED", 10**9)
    monkeypatch.setattr(forwards, "WORTH_A_PASS", {False: 10**9, True: 10**9})
    assert_same_values(ours, optimize_values(model, problems, SETTINGS), LIMIT)
    assert parts[0] > 2 and parts[-1] == 1  # the settings were in force
    assert_same_values(ours, optimize_values(model, problems, SETTINGS, engine="reference"), LIMIT)


@each_model
def test_rows_without_anything_before_the_fact_token(model_type, eager):
    """A subject that begins the text of a tokenizer without BOS, beside rows that have a prefix."""
    model, tokenizer = loaded(model_type)
    first = EditRequest(prompt="{} speaks", subject="He", target_new="French and Italian")
    alone = [problem(tokenizer, first, ["{}"])]
    mixed = [*alone, problem(tokenizer, EditRequest(**REQUESTS[0]))]
    for problems in (alone, mixed):
        fast = optimize_values(model, problems, SETTINGS)
        assert_same_values(fast, optimize_values(model, problems, SETTINGS, engine="reference"), LIMIT)
