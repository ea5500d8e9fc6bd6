"""Gated predictors: the threshold, which tokens a value replaces, look-ups by row and by token, rows of a batch."""

from __future__ import annotations

import pytest
import torch
from random_deltas import rewrite_name

from edit_hooks import Delta, EditingError, edited
from edit_hooks.deltas.hook_edit import HookEdit
from edit_hooks.deltas.row_edits import RowEdits
from edit_hooks.memory.gated_predictor import KIND, GatedPredictor
from edit_hooks.modeling.architectures import architecture_of, map_shape
from edit_hooks.modeling.forward.kv_cache import CACHE
from edit_hooks.modeling.hooks import hooks, on_input, on_output

IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]])
ALWAYS, NEVER = 9.0, -9.0  # biases of a gate


def predictor_edit(model, bias: float = ALWAYS, seed: int = 0, name: str | None = None, **settings) -> HookEdit:
    """A gate of a constant and a random predictor."""
    name = name or rewrite_name(model)
    width_out, width_in = map_shape(model.get_submodule(name))
    generator = torch.Generator().manual_seed(seed)
    tensors = GatedPredictor(
        torch.zeros(width_in),
        torch.tensor(bias),
        torch.randn(width_out, width_in, generator=generator),
        torch.randn(width_out, generator=generator),
    )
    settings = {"module": name, "threshold": 0.5, "query": "prefill", "num_before": 0, "num_edits": 1, **settings}
    return HookEdit(KIND, tensors._asdict(), settings)


def run(model, ids: torch.Tensor, name: str | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Input and output of the hooked map, and the logits; the output as the hooks before this call leave it."""
    seen: dict[str, torch.Tensor] = {}
    module = model.get_submodule(name or rewrite_name(model))
    read = (on_input(module, lambda x: seen.update(x=x)), on_output(module, lambda y: seen.update(y=y)))
    with torch.no_grad(), hooks(*read):
        logits = model(ids).logits
    return seen["x"], seen["y"], logits


def value(edit: HookEdit, query_F: torch.Tensor) -> torch.Tensor:
    return edit.tensors["weight"] @ query_F + edit.tensors["bias"]


def gate_between(edit: HookEdit, above_F: torch.Tensor, below_F: torch.Tensor) -> None:
    """Open the gate for one query and close it for another."""
    direction_F = 20 * (above_F - below_F) / (above_F - below_F).square().sum()
    edit.tensors |= {"gate_weight": direction_F, "gate_bias": -direction_F @ (above_F + below_F) / 2}


@pytest.mark.parametrize("query", ["prefill", "every_step"])
def test_a_row_below_the_threshold_is_bit_identical_and_one_above_is_replaced_everywhere(query, tiny_model):
    model = tiny_model("llama")
    x_RTF, plain_RTD, plain = run(model, IDS[:2])
    edit = predictor_edit(model, query=query)
    gate_between(edit, x_RTF[0, -1], x_RTF[1, -1])
    with edited(model, Delta(hook_edit=edit)):
        _, output_RTD, logits = run(model, IDS[:2])
    assert torch.equal(output_RTD[1], plain_RTD[1]) and torch.equal(logits[1], plain[1])
    torch.testing.assert_close(output_RTD[0], value(edit, x_RTF[0, -1]).expand(4, -1))


@pytest.mark.parametrize("threshold", [0.3, 0.7])
def test_the_threshold_is_compared_with_the_sigmoid(threshold, tiny_model):
    model = tiny_model("llama")
    _, _, plain = run(model, IDS)
    for gate in (threshold - 0.01, threshold + 0.01):
        edit = predictor_edit(model, bias=float(torch.logit(torch.tensor(gate))), threshold=threshold)
        with edited(model, Delta(hook_edit=edit)):
            assert torch.equal(run(model, IDS)[2], plain) == (gate < threshold)


def test_the_query_is_the_last_prompt_token_and_later_tokens_have_its_value_or_their_own(tiny_model):
    """Teacher forcing: two tokens of prompt, two of continuation, padded on the left."""
    model = tiny_model("llama")
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    lengths = torch.tensor([1, 2])
    edits = {query: predictor_edit(model, query=query) for query in ("prefill", "every_step")}
    written = {}
    for query, edit in edits.items():
        with RowEdits(model, [Delta(hook_edit=edit)] * 2).prefill(mask, lengths):
            x_RTF, written[query], _ = run(model, IDS[:2])
    for row in (0, 1):
        of_prompt = value(edits["prefill"], x_RTF[row, 1])
        torch.testing.assert_close(written["prefill"][row, 1 - row :], of_prompt.expand(3 + row, -1))
        torch.testing.assert_close(written["every_step"][row, 1 - row : 2], of_prompt.expand(1 + row, -1))
        for column in (2, 3):
            own = value(edits["every_step"], x_RTF[row, column])
            torch.testing.assert_close(written["every_step"][row, column], own)
    assert not torch.allclose(written["prefill"][0, 2], written["every_step"][0, 2], atol=1e-2)


@pytest.mark.parametrize("query", ["prefill", "every_step"])
def test_steps_after_a_prefill_write_what_teacher_forcing_does(query, tiny_model):
    """Rows under two edits and none; some leave the batch after the prefill."""
    model = tiny_model("llama")
    first, second = (predictor_edit(model, seed=seed, query=query) for seed in (0, 1))
    deltas = [Delta(hook_edit=first), None, Delta(hook_edit=second), Delta(hook_edit=first)]
    prompts = torch.cat([IDS, IDS[:1]])
    edits = RowEdits(model, deltas)
    with edits.prefill(torch.ones(4, 4), torch.full((4,), 4)):
        cached = model(prompts, use_cache=True)[CACHE]
    kept = torch.tensor([3, 1, 2])
    cached.batch_select_indices(kept)
    token = torch.full((3, 1), 9)
    with torch.no_grad(), edits.select(kept).step():
        stepped = model(token, **{CACHE: cached}).logits[:, 0]
    for row, logits in zip(kept.tolist(), stepped, strict=True):
        text = torch.cat([prompts[row : row + 1], token[:1]], 1)
        with RowEdits(model, [deltas[row]]).prefill(torch.ones(1, 5), torch.tensor([4])):
            torch.testing.assert_close(logits, run(model, text)[2][0, -1], atol=1e-4, rtol=1e-4)


def test_rows_under_different_edits_answer_as_alone(tiny_model):
    """Edits of two maps of different widths, a closed gate and no edit in one batch."""
    model = tiny_model("gpt2")
    wide = architecture_of(model).linear_name("mlp_in", 1)
    edits = [predictor_edit(model), predictor_edit(model, NEVER), predictor_edit(model, seed=2, name=wide)]
    deltas = [None, *(Delta(hook_edit=edit) for edit in edits), Delta(hook_edit=edits[0])]
    ids = IDS[:1].expand(5, -1)
    with RowEdits(model, deltas).prefill(torch.ones(5, 4), torch.full((5,), 4)):
        together = run(model, ids)[2]
    plain = run(model, ids)[2]
    assert torch.equal(together[0], plain[0]) and torch.equal(together[2], plain[2])
    for delta, logits in zip(deltas, together, strict=True):
        with edited(model, *([] if delta is None else [delta])):
            torch.testing.assert_close(logits, run(model, IDS[:1])[2][0], atol=2e-4, rtol=2e-4)
    assert not torch.allclose(together[1], together[3], atol=1e-2)


def test_a_pass_that_continues_a_foreign_cache_is_unedited(tiny_model):
    """No prompt of the row was looked up."""
    model = tiny_model("llama")
    with torch.no_grad():
        cached = model(IDS, use_cache=True)[CACHE]
        again = model(IDS, use_cache=True)[CACHE]
        token = torch.full((3, 1), 9)
        plain = model(token, **{CACHE: cached}).logits
        with edited(model, Delta(hook_edit=predictor_edit(model))):
            assert torch.equal(model(token, **{CACHE: again}).logits, plain)


def test_the_last_step_of_a_stream_is_its_edit(tiny_model):
    model = tiny_model("llama")
    steps = [predictor_edit(model, seed=seed, num_before=seed, num_edits=seed + 1) for seed in (0, 1, 2)]
    total = HookEdit.combine(steps)
    assert total.tensors is steps[-1].tensors and total.settings == {**steps[-1].settings, "num_before": 0}


def test_a_predictor_of_another_width_is_refused(tiny_model):
    edit = predictor_edit(tiny_model("llama"))
    edit.tensors["weight"] = torch.ones(3, 5)
    with pytest.raises(EditingError, match="maps 5 -> 3"):
        edit.check(tiny_model("llama"))
