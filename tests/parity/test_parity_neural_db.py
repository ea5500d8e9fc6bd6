"""NeuralDB, which has no release: its values are those of the MEMIT release, its table the formula of the paper."""

from __future__ import annotations

import pytest
import torch
from golden_data import GOLDEN_MODELS, golden_case
from parity import golden_requests, relative_error
from parity_layers import memit_config
from torch import nn

from edit_hooks import edited, load_editor
from edit_hooks.locate.values.rows import rewriting_row
from edit_hooks.modeling.architectures import architecture_of

THRESHOLD = 0.7


def settings_for(case, model_name):
    given = memit_config(case, model_name, "eye")
    of_moments = ("second_moments", "moment_weight", "residual_mode")
    return {**{n: v for n, v in given.items() if n not in of_moments}, "layers": case["layers"][-1:]}


@pytest.mark.parametrize("model_name", GOLDEN_MODELS)
def test_residuals_are_the_offsets_of_the_memit_release(model_name, golden_model):
    """Offsets of a batch of three, from the last layer of the release; its residual there is the whole offset."""
    model, tokenizer = golden_model(model_name)
    case, tensors = golden_case("memit", model_name, "cov-batch012")
    editor = load_editor("neural_db", settings_for(case, model_name))
    (delta,) = editor.edit(model, tokenizer, golden_requests(), joint=True, measure=False)
    error = relative_error(delta.hook_edit.tensors["residuals"], tensors["z_delta"])
    assert error < 1e-4, f"{model_name}: residuals off by {error:.1e}"


@pytest.mark.parametrize("model_name", GOLDEN_MODELS)
def test_a_pass_under_the_table_is_that_of_the_formula(model_name, golden_model):
    """Every token by a plain loop: below the threshold nothing is added, above it the nearest key's residual."""
    model, tokenizer = golden_model(model_name, torch.float64)
    case, _ = golden_case("memit", model_name, "eye-batch012")
    requests = golden_requests()
    settings = {**settings_for(case, model_name), "num_steps": 3, "threshold": THRESHOLD}
    (delta,) = load_editor("neural_db", settings).edit(model, tokenizer, requests, joint=True, measure=False)
    tensors = delta.hook_edit.tensors
    (layer,) = settings["layers"]
    module = model.get_submodule(architecture_of(model).rewrite_name(layer))
    num_hits = num_tokens = 0

    def plain(_module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        nonlocal num_hits, num_tokens
        changed = output.clone()
        for column, key in enumerate(args[0][0]):
            cosines = [float(key @ k / (key.norm() * k.norm())) for k in tensors["keys"]]
            best = max(range(len(cosines)), key=cosines.__getitem__)
            num_tokens += 1
            if cosines[best] > THRESHOLD:
                changed[0, column] += tensors["residuals"][best]
                num_hits += 1
        return changed

    for template, request in zip(("{}", "The train leaves. {}", "{}"), requests, strict=True):
        ids = torch.tensor([rewriting_row(tokenizer, request, template).ids])
        with torch.no_grad(), edited(model, delta):
            ours = model(ids).logits
        handle = module.register_forward_hook(plain)
        with torch.no_grad():
            reference = model(ids).logits
        handle.remove()
        torch.testing.assert_close(ours, reference, rtol=1e-10, atol=1e-10)
    assert 0 < num_hits < num_tokens


@pytest.mark.parametrize("model_name", GOLDEN_MODELS)
def test_the_bare_prompt_reaches_its_value(model_name, golden_model):
    """h^L at the fact token is z = h^L + delta, as MEMIT wants it and its weights reach in part."""
    model, tokenizer = golden_model(model_name, torch.float64)
    case, _ = golden_case("memit", model_name, "eye-edit0")
    request = golden_requests()[0]
    settings = {**settings_for(case, model_name), "num_steps": 3}
    (delta,) = load_editor("neural_db", settings).edit(model, tokenizer, [request], measure=False)
    row = rewriting_row(tokenizer, request, "{}")

    def state() -> torch.Tensor:
        with torch.no_grad():
            hidden = model(torch.tensor([row.ids]), output_hidden_states=True).hidden_states
        return hidden[settings["layers"][0] + 1][0, row.position]

    before = state()
    with edited(model, delta):
        after = state()
    assert relative_error(after - before, delta.intermediates["z_delta"][0]) < 1e-10
