"""Steps of a memory as one edit: tables against a plain dictionary, and sums that are formed once."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edit_hooks.deltas import hook_edit as hook_edit_module
from edit_hooks.deltas.hook_edit import HookEdit
from edit_hooks.memory.codebook import CodebookHooks
from edit_hooks.memory.residual_table import REMOVED, ResidualTableHooks
from edit_hooks.utils.errors import EditingError

# Steps: the entries that one adds or changes, and those that it removes.
STEPS = st.lists(st.tuples(st.sets(st.integers(0, 5), max_size=3), st.sets(st.integers(0, 5), max_size=2)), min_size=1)


def table(number: int, entries: set[int], removed: set[int]) -> HookEdit:
    """A step of a residual table: every value names its step and entry."""
    own = sorted(entries)
    values = torch.tensor([[100.0 * number + entry] for entry in own]).reshape(len(own), 1)
    names = {"facts": [f"{number}/{entry}" for entry in own], REMOVED: sorted(removed - entries)}
    numbers = {"module": "m", "num_before": number, "num_edits": number + 1}
    tensors = {"keys": values, "residuals": -values, "index": torch.tensor(own, dtype=torch.int64)}
    return HookEdit("residual_table", tensors, {**names, **numbers})


def codebook(number: int, entries: set[int]) -> HookEdit:
    own = sorted(entries)
    values = torch.tensor([[100.0 * number + entry] for entry in own]).reshape(len(own), 1)
    tensors = {"keys": values, "values": -values, "radii": values[:, 0], "index": torch.tensor(own, dtype=torch.int64)}
    labels = [[number, entry] for entry in own]
    numbers = {"module": "m", "labels": labels, "num_before": number, "num_edits": number + 1}
    return HookEdit("codebook", tensors, numbers)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_a_table_is_that_of_a_dictionary(steps: list[tuple[set[int], set[int]]]) -> None:
    expected: dict[int, float] = {}
    gone: set[int] = set()
    edits = [table(number, *step) for number, step in enumerate(steps)]
    for number, (entries, removed) in enumerate(steps):
        gone = (gone | removed) - entries
        expected = {**expected, **{entry: 100.0 * number + entry for entry in entries}}
        expected = {entry: value for entry, value in expected.items() if entry not in gone}
    whole = ResidualTableHooks.combine(edits)
    in_turn = edits[0]
    for edit in edits[1:]:
        in_turn = ResidualTableHooks.combine([in_turn, edit])
    for total in (whole, in_turn) if len(edits) > 1 else (whole,):
        numbers = sorted(expected)
        assert total.tensors["index"].tolist() == numbers and total.settings[REMOVED] == sorted(gone)
        assert total.tensors["keys"].flatten().tolist() == [expected[number] for number in numbers]
        assert torch.equal(total.tensors["residuals"], -total.tensors["keys"])
        assert total.settings["facts"] == [f"{int(expected[number]) // 100}/{number}" for number in numbers]
        assert total.settings["num_before"] == 0 and total.settings["num_edits"] == len(edits)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sets(st.integers(0, 5), min_size=1, max_size=3), min_size=2, max_size=6))
def test_a_codebook_is_that_of_a_dictionary(steps: list[set[int]]) -> None:
    expected = {entry: 100.0 * number + entry for number, entries in enumerate(steps) for entry in entries}
    total = CodebookHooks.combine([codebook(number, entries) for number, entries in enumerate(steps)])
    numbers = sorted(expected)
    assert total.tensors["index"].tolist() == numbers
    assert total.tensors["radii"].tolist() == [expected[number] for number in numbers]
    assert torch.equal(total.tensors["values"], -total.tensors["keys"])
    assert total.settings["labels"] == [[int(expected[number]) // 100, number] for number in numbers]


def test_the_same_sum_is_formed_once_and_not_kept(monkeypatch: Any) -> None:
    first, second, third = (codebook(number, {number}) for number in range(3))
    formed: list[int] = []
    combine = vars(CodebookHooks)["combine"].__func__
    monkeypatch.setattr(CodebookHooks, "combine", classmethod(lambda cls, s: formed.append(len(s)) or combine(cls, s)))
    total = HookEdit.combine([first, None, second])
    assert HookEdit.combine([first, second]) is total and formed == [2]
    assert HookEdit.combine([total, third]) is not total and formed == [2, 2]
    assert HookEdit.combine([first]) is first and HookEdit.combine([None]) is None
    total = HookEdit.combine([first, second])
    known = weakref.ref(total)
    del total
    gc.collect()
    assert known() is None and hook_edit_module._last_sum[1]() is None
    assert HookEdit.combine([first, second]).tensors["index"].tolist() == [0, 1]


def test_sums_that_go_on_from_one_have_rows_of_their_own() -> None:
    """A run that was interrupted makes its step again, and independent edits go on from one memory."""
    with torch.inference_mode():  # the first sum of a stream may be formed where lm-eval calls the model
        before = CodebookHooks.combine([codebook(number, {number}) for number in range(2)])
    first = CodebookHooks.combine([before, codebook(2, {2})])
    second = CodebookHooks.combine([before, codebook(2, {3})])
    assert first.tensors["keys"].flatten().tolist() == [0.0, 101.0, 202.0]
    assert second.tensors["keys"].flatten().tolist() == [0.0, 101.0, 203.0]
    assert before.tensors["keys"].flatten().tolist() == [0.0, 101.0]
    assert first.tensors["keys"].data_ptr() == before.tensors["keys"].data_ptr()


def test_steps_of_other_shapes_are_no_stream() -> None:
    wide = codebook(1, {1})
    wide.tensors["keys"] = torch.ones(1, 2)
    for first in (codebook(0, {0}), CodebookHooks.combine([codebook(0, {0}), codebook(1, {2})])):
        with pytest.raises(EditingError, match=r"different shapes in keys: \(1,\) and \(2,\); a stream has one model"):
            CodebookHooks.combine([first, wide])
