"""Rows of one batch under low-rank edits, hook edits, both, or none."""

from __future__ import annotations

import pytest
import torch
from random_deltas import codebook, dense_delta, random_delta, rewrite_name
from state import assert_same_state

from edit_hooks import Delta, EditingError, edited
from edit_hooks.contract.state import snapshot
from edit_hooks.deltas.context_edit import ContextEdit
from edit_hooks.deltas.row_edits import RowEdits
from edit_hooks.modeling.hooks import hooks, on_input

IDS = torch.tensor([[5, 6, 7, 8]])
LENGTH = torch.tensor([4])


def both(model, seed: int) -> Delta:
    delta = random_delta(model, seed=seed)
    delta.hook_edit = codebook(model, seed=seed)
    return delta


def test_each_row_answers_as_if_alone(tiny_model):
    model = tiny_model("llama")
    before = snapshot(model)
    shared = Delta(hook_edit=codebook(model))
    deltas = [random_delta(model), shared, None, both(model, 1), shared, both(model, 2)]
    with torch.no_grad(), RowEdits(model, deltas).prefill(torch.ones(6, 4), LENGTH.expand(6)):
        together = model(IDS.expand(6, -1)).logits
    assert_same_state(before, snapshot(model))
    for delta, logits in zip(deltas, together, strict=True):
        with torch.no_grad(), edited(model, *([] if delta is None else [delta])):
            torch.testing.assert_close(logits, model(IDS).logits[0], atol=2e-4, rtol=2e-4)
    assert torch.equal(together[1], together[4]) and not torch.allclose(together[1], together[2], atol=1e-2)


def test_choices_at_prefill_hold_for_selected_rows(tiny_model):
    """Each row's prompt is near another entry, whose value replaces the output at every decoding step."""
    model = tiny_model("llama")
    ids = torch.arange(5, 17).view(3, 4)
    keys: dict[str, torch.Tensor] = {}
    module = model.get_submodule(rewrite_name(model))
    with hooks(on_input(module, lambda hidden: keys.update(keys=hidden[:, -1]))), torch.no_grad():
        model(ids)
    first, second = codebook(model, radius=1e-3, num_entries=3), codebook(model, seed=1)
    first.tensors |= keys
    for hook_edit in (first, second):
        hook_edit.settings["replacement"] = "replace_all"
    deltas = [Delta(hook_edit=first), Delta(hook_edit=first), Delta(hook_edit=first), Delta(hook_edit=second), None]
    prompts = torch.cat([ids, ids[:1], ids[:1]])

    def next_logits(rows: list[int]) -> torch.Tensor:
        """Logits of a decoding step of some rows, after a prefill of all."""
        edits = RowEdits(model, deltas)
        with torch.no_grad():
            with edits.prefill(torch.ones(5, 4), LENGTH.expand(5)):
                model(prompts)
            selected = edits.select(torch.tensor(rows))
            with selected.step():
                return model(torch.full((len(rows), 1), 9)).logits[:, 0]

    whole = next_logits([0, 1, 2, 3, 4])
    assert len({tuple(row.tolist()) for row in whole}) == 5
    for rows in ([4, 2, 0], [1], [3, 1]):
        torch.testing.assert_close(next_logits(rows), whole[rows], atol=1e-5, rtol=1e-5)


def test_selecting_rows_does_not_change_the_original(tiny_model):
    model = tiny_model("llama")
    edits = RowEdits(model, [Delta(hook_edit=codebook(model)), None])
    with edits.prefill(torch.ones(2, 4), LENGTH.expand(2)), torch.no_grad():
        before = model(IDS.expand(2, -1)).logits
    edits.select(torch.tensor([1]))
    with edits.prefill(torch.ones(2, 4), LENGTH.expand(2)), torch.no_grad():
        assert torch.equal(model(IDS.expand(2, -1)).logits, before)


def test_edits_that_cannot_act_per_row_are_refused(tiny_model):
    model = tiny_model("llama")
    for delta, message in (
        (dense_delta(model), "only low-rank edits"),
        (Delta(contexts=(ContextEdit("a", "b"),)), "changes prompts"),
        (Delta(hook_edit=codebook(tiny_model("gpt2"))), "no module"),
    ):
        with pytest.raises(EditingError, match=message):
            RowEdits(model, [delta, None])


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_in_a_pass_removes_all_hooks(error, tiny_model):
    model = tiny_model("llama")
    before = snapshot(model)
    edits = RowEdits(model, [both(model, 0), None])
    for scope in (edits.prefill(torch.ones(2, 4), LENGTH.expand(2)), edits.step()):
        with pytest.raises(error), scope:
            raise error
        assert_same_state(before, snapshot(model))
