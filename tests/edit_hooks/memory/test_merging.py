"""Merging of changes: TIES and the linear mean."""

from __future__ import annotations

import pytest
import torch

from edit_hooks import EditingError
from edit_hooks.memory.merging import linear, merge_changes, ties


def test_ties_of_a_change_with_itself_trims_it():
    change = torch.randn(20, 30, generator=torch.Generator().manual_seed(0))
    result = ties([change, change], [0.5, 0.5], 0.53)
    is_large = change.abs() >= change.abs().flatten().sort(descending=True).values[int(0.53 * 600) - 1]
    torch.testing.assert_close(result, change * is_large)


def test_ties_on_worked_examples():
    """The sign with more weight wins an entry, and only those that agree with it are averaged."""
    first, second = torch.tensor([[4.0, -1.0, 3.0, 0.1]]), torch.tensor([[2.0, 5.0, -2.0, 0.2]])
    assert ties([first, second], [0.5, 0.5], 1.0).tolist() == [[3.0, 5.0, 3.0, pytest.approx(0.15)]]
    assert ties([first, second], [0.5, 0.5], 0.75).tolist() == [[3.0, 5.0, 3.0, 0.0]]
    assert ties([first, second], [0.2, 0.8], 1.0).tolist()[0][2] == -2.0
    assert linear([first, second], [0.25, 0.75], 0.5).tolist()[0][:2] == [2.5, 3.5]


def test_methods_are_found_by_name():
    first, second = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    assert merge_changes("linear", [first, second], [0.5, 0.5], 1.0).tolist() == [2.0, 3.0]
    with pytest.raises(EditingError, match=r"unknown merge 'tie'.*Did you mean 'ties'"):
        merge_changes("tie", [first], [1.0], 1.0)
