"""Suffix-only forward passes: cached activations, row groups and prefixes change no number.

Float64, narrowed nowhere (`keep_wide`), so that a bound of 1e-8 separates another formula from rounding.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_architectures import ARCHITECTURES
from value_problems import (
    EDIT_REQUESTS,
    LIMIT,
    SETTINGS,
    assert_same_values,
    each_model,
    keep_wide,
    loaded,
    problem,
    relative,
)

from edit_hooks import EditRequest
from edit_hooks.contract.tiny_models import EDIT_LAYER, REQUESTS
from edit_hooks.locate.values.reference_forward import ReferenceForward
from edit_hooks.locate.values.rows import TokenRow
from edit_hooks.locate.values.suffix_forward import SuffixForward
from edit_hooks.locate.values.value_batch import ValueBatch
from edit_hooks.locate.values.value_optimization import optimize_values
from edit_hooks.modeling.forward import kv_cache, prefix_cache
from edit_hooks.modeling.forward.kv_cache import group_by_length, max_padding


@pytest.fixture(autouse=True)
def _keep_wide() -> Iterator[None]:
    with keep_wide():
        yield


def share_and_group(monkeypatch, *, always: bool) -> None:
    """Share prefixes and split rows into groups always, or never."""
    monkeypatch.setattr(prefix_cache, "MIN_TOKENS_SAVED", 1 if always else 10**9)
    monkeypatch.setattr(kv_cache, "MAX_PADDING_CPU", 0 if always else 10**9)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=20), st.integers(0, 30))
def test_groups_hold_every_row_once_and_little_padding(lengths, max_padding):
    groups = group_by_length(lengths, max_padding)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        longest = max(lengths[index] for index in group)
        assert sum(longest - lengths[index] for index in group) <= max_padding
    ends = [(min(lengths[i] for i in group), max(lengths[i] for i in group)) for group in groups]
    assert all(earlier[1] <= later[0] for earlier, later in itertools.pairwise(ends))


def test_rows_of_edits_share_a_pass_on_a_gpu() -> None:
    """21 rows of 3 to 8 suffix tokens and a KL row, per edit; a row far longer than all others has its own pass."""
    gpu = torch.device("cuda")
    lengths = [3 + number % 6 for number in range(21)] + [1]
    assert len(group_by_length(lengths * 16, max_padding(gpu, lengths * 16))) == 1
    unequal = [*lengths, 500]
    assert group_by_length(unequal, max_padding(gpu, unequal))[-1] == [22]
    assert max_padding(torch.device("cpu"), lengths) == kv_cache.MAX_PADDING_CPU


@each_model
def test_values_do_not_depend_on_sharing_and_grouping(model_type, monkeypatch):
    """Rows of several lengths in one batch, and edits that stop at different steps."""
    model, tokenizer = loaded(model_type)
    problems = [problem(tokenizer, EditRequest(**record)) for record in REQUESTS]
    num_groups = []
    prepare = SuffixForward._prepare

    def count(self):
        groups, activations = prepare(self)
        num_groups.append(len(groups))
        return groups, activations

    monkeypatch.setattr(SuffixForward, "_prepare", count)
    share_and_group(monkeypatch, always=True)
    values = optimize_values(model, problems, SETTINGS)
    share_and_group(monkeypatch, always=False)
    assert_same_values(values, optimize_values(model, problems, SETTINGS), LIMIT)
    assert num_groups[0] > 2 and num_groups[-1] == 1  # the settings were in force
    assert_same_values(values, optimize_values(model, problems, SETTINGS, engine="reference"), LIMIT)


@each_model
def test_rows_that_begin_with_the_fact_token_have_no_prefix(model_type, monkeypatch):
    """A subject at the start of the text under a tokenizer without BOS, alone and beside rows with a prefix."""
    share_and_group(monkeypatch, always=True)
    model, tokenizer = loaded(model_type)
    first = EditRequest(prompt="{} speaks", subject="He", target_new="French and Italian")
    alone = [problem(tokenizer, first, ["{}"])]
    mixed = [*alone, problem(tokenizer, EditRequest(**REQUESTS[0]))]
    for problems in (alone, mixed):
        fast = optimize_values(model, problems, SETTINGS)
        assert_same_values(fast, optimize_values(model, problems, SETTINGS, engine="reference"), LIMIT)


@pytest.mark.parametrize("forward", [ReferenceForward, SuffixForward])
@each_model
def test_cutting_rows_after_the_subject_changes_no_key(model_type, forward):
    """Keys, outputs and v0 read at the subject's last token do not depend on what follows, nor on padding."""
    model, tokenizer = loaded(model_type)
    problems = [problem(tokenizer, request) for request in EDIT_REQUESTS]

    def cut(row: TokenRow) -> TokenRow:
        return TokenRow(row.ids[: row.position + 1], row.position, ((row.position, 0),), row.position + 1)

    whole = ValueBatch.of(problems, torch.device("cpu"))
    short = ValueBatch.of([([cut(row) for row in rows], cut(kl)) for rows, kl in problems], torch.device("cpu"))
    assert short.ids_RT.shape[1] < whole.ids_RT.shape[1]
    full = forward(model, whole, EDIT_LAYER, "mlp").activations
    brief = forward(model, short, EDIT_LAYER, "mlp").activations
    for name in ("keys_RF", "outputs_RD", "site_RD"):
        assert relative(getattr(brief, name), getattr(full, name)) < LIMIT, name


@each_model
def test_recorded_outputs_are_those_of_the_rewrite_module(model_type):
    """Keys and outputs against the rewrite module called by hand: W k + b, in the stored orientation."""
    model, tokenizer = loaded(model_type)
    (value,) = optimize_values(
        model, [problem(tokenizer, EDIT_REQUESTS[1])], dataclasses.replace(SETTINGS, num_steps=1)
    )
    module = model.get_submodule(ARCHITECTURES[model_type].rewrite_name(EDIT_LAYER))
    with torch.no_grad():
        assert relative(module(value.keys_NF), value.outputs_ND) < LIMIT
    assert relative(value.v0_D, value.outputs_ND[0]) < LIMIT  # the MLP module ends with the rewrite module
