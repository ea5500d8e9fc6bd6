"""FE against the numbers of its release: targets of all layers, keys, updates, a stream with carried keys."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from golden_data import golden_case, golden_names
from golden_models import as_stored
from parity import relative_error
from parity_layers import contract, memit_config

from edit_hooks import EditingError, EditRequest, load_editor
from edit_hooks.contract.subject import EDIT_REQUESTS
from edit_hooks.deltas.apply import AppliedDeltas
from edit_hooks.editors import fe
from edit_hooks.locate.values.rows import rewriting_row


@pytest.mark.parametrize(("model_name", "name"), golden_names("fe"))
def test_edits_give_the_numbers_of_the_release(model_name, name, golden_model):
    """The release makes the targets of a second step on the unedited model, so there they are given."""
    model, tokenizer = golden_model(model_name, torch.float64)
    case, tensors = golden_case("fe", model_name, name)
    editor = load_editor("fe", {**memit_config(case, model_name, "cov"), "carry_keys": True})
    history, start = [], 0
    states = {layer: tensors[f"z.layer{layer}"] for layer in case["layers"]}
    with AppliedDeltas(model) as applied:
        for number, step in enumerate(case["steps"]):
            requests = [EditRequest(**record) for record in step["requests"]]
            of_step = {layer: states_ED[start : start + len(requests)] for layer, states_ED in states.items()}
            made = mock.Mock(wraps=fe.states_behind) if number == 0 else mock.Mock(return_value=of_step)
            with mock.patch.object(fe, "states_behind", made):
                (delta,) = editor.edit(model, tokenizer, requests, joint=True, history=history, measure=False)
            first_ED = made.call_args.args[3]
            assert number or relative_error(first_ED, of_step[case["layers"][0]]) < 1e-8
            assert relative_error(delta.intermediates["z"], of_step[case["layers"][-1]]) < 1e-8
            for layer, update in zip(case["layers"], delta.weights().values(), strict=True):
                where = f"{model_name} {name} step {number} layer {layer}"
                keys = tensors[f"step{number}.keys.layer{layer}"]
                assert relative_error(delta.intermediates[f"keys.layer{layer}"], keys) < 1e-8, where
                update_DF = as_stored(model_name, update)
                for side, ours in zip(("out", "in"), contract(update_DF), strict=True):
                    error = relative_error(ours, tensors[f"step{number}.update.layer{layer}.{side}"])
                    assert error < 1e-8, f"{where}: update off by {error:.1e}"
            start += len(requests)
            history = editor.condensed(model, [*history, delta])
            applied.add(delta)


def test_one_layer_is_memit(golden_model):
    model, tokenizer = golden_model("tiny-gpt2", torch.float64)
    case, _ = golden_case("fe", "tiny-gpt2", "edit0-float64")
    settings = {**memit_config({**case, "layers": [1]}, "tiny-gpt2", "cov"), "num_steps": 4}
    request = EditRequest(**case["steps"][0]["requests"][0])
    ours, plain = (
        load_editor(name, settings).edit(model, tokenizer, [request], measure=False)[0] for name in ("fe", "memit")
    )
    for name, update in plain.weights().items():
        torch.testing.assert_close(ours.weights()[name], update, rtol=1e-9, atol=1e-12)


def test_later_states_are_those_of_a_model_that_writes_the_first(golden_model):
    """The prompts of a batch have different lengths; the bias of the first block's MLP moves by the difference."""
    model, tokenizer = golden_model("tiny-gpt2", torch.float64)
    rows = [rewriting_row(tokenizer, request, "{}") for request in EDIT_REQUESTS[:3]]
    offset_D = torch.linspace(-1, 1, 64, dtype=torch.float64)
    alone = [fe.states_behind(model, [row], 0, _state(model, row, 0) + offset_D, [1, 3]) for row in rows]
    start_ED = torch.cat([_state(model, row, 0) for row in rows]) + offset_D
    together = fe.states_behind(model, rows, 0, start_ED, [1, 3])
    for index, row in enumerate(rows):
        for layer in (1, 3):
            torch.testing.assert_close(together[layer][index], alone[index][layer][0], rtol=0, atol=1e-10)
        unmoved = fe.states_behind(model, [row], 0, _state(model, row, 0), [1])
        torch.testing.assert_close(unmoved[1], _state(model, row, 1), rtol=0, atol=1e-10)
        assert float((together[1][index] - unmoved[1][0]).norm()) > 0.1


@torch.no_grad()
def _state(model, row, layer):
    """Output [1, d] of a block at the fact token, by the model's own states."""
    ids = torch.tensor([row.ids[: row.position + 1]])
    return model(ids, output_hidden_states=True).hidden_states[layer + 1][0, -1:].double()


def test_an_exact_stream_is_refused():
    with pytest.raises(EditingError, match="stream: exact is for one"):
        load_editor("fe", {"stream": "exact", "layers": [1]}).config_class(stream="exact", layers=[1])
