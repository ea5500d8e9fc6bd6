"""Where prompts end, with padding on either side."""

from __future__ import annotations

import pytest
import torch

from edit_hooks import EditingError
from edit_hooks.deltas.forward_context import ForwardContext

MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]])


def test_prompts_are_found_with_padding_on_either_side():
    context = ForwardContext.for_prefill(MASK, torch.tensor([2, 3]))
    assert context.prefill and context.prompt_end_R.tolist() == [3, 2]
    assert context.prompt_RT.tolist() == [[False, False, True, True, False], [True, True, True, False, False]]


def test_one_length_serves_all_rows_and_none_means_all_tokens():
    assert ForwardContext.for_prefill(MASK, torch.tensor([2])).prompt_end_R.tolist() == [3, 1]
    assert ForwardContext.for_prefill(MASK, None).prompt_end_R.tolist() == [4, 3]


def test_lengths_that_do_not_fit_are_refused():
    with pytest.raises(EditingError, match="3 prompt lengths"):
        ForwardContext.for_prefill(MASK, torch.tensor([1, 2, 3]))
    for lengths in ([4, 4], [0, 1]):
        with pytest.raises(EditingError, match="longer than the rows"):
            ForwardContext.for_prefill(MASK, torch.tensor(lengths))


def test_a_decoding_step_holds_one_token_per_row():
    context = ForwardContext.for_step(3, torch.device("cpu"))
    assert not context.prefill and context.attended_RT.tolist() == [[True]] * 3
