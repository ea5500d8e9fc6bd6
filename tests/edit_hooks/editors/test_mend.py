"""MEND: gradient factors against autograd, sign, batches, streams."""

from __future__ import annotations

import pytest
import torch
from state import assert_same_state

from edit_hooks import EditingError, EditRequest, edited, load_editor
from edit_hooks.contract.state import snapshot
from edit_hooks.contract.tiny_models import ALL_MODEL_TYPES, EDIT_LAYER, NATURAL_TOKENIZER, NUM_LAYERS, REQUESTS
from edit_hooks.editors.mend import MENDConfig, edited_shapes
from edit_hooks.modeling.hooks import frozen
from edit_hooks.modeling.tokens import split_continuation

EDIT_REQUESTS = [EditRequest(**record) for record in REQUESTS]
LAYERS = list(range(NUM_LAYERS))
RATE = 2.0**-7  # exact in float32


def identity(**changes):
    return load_editor("mend", {"artifact": "identity", "layers": LAYERS, "edit_lr": RATE, **changes})


def nll(model, tokenizer, request):
    prompt, target = split_continuation(tokenizer, request.text, f" {request.target_new}")
    logprob = model(torch.tensor([prompt + target])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return -logprob[torch.arange(len(target)), torch.tensor(target)]


def plain_gradients(model, names, loss):
    """Gradients of the weights themselves, in the stored orientation."""
    weights = [model.get_parameter(f"{name}.weight") for name in names]
    with frozen(model):
        for weight in weights:
            weight.requires_grad_(True)
        return dict(zip(names, torch.autograd.grad(loss(), weights), strict=True))


@pytest.mark.parametrize("model_type", ALL_MODEL_TYPES)
def test_the_untrained_network_makes_one_gradient_step(model_type, tiny_model, tiny_tokenizer):
    """For every family, orientation, fused projection and padded row: W - lr dL/dW with plain autograd, float64.

    Gemma 2 and GPT-J compute parts of their attention in float32.
    """
    loose = model_type in ("gemma2", "gptj")
    dtype = torch.float32 if loose else torch.float64
    model, tokenizer = tiny_model(model_type, dtype=dtype), tiny_tokenizer(NATURAL_TOKENIZER[model_type])
    before = snapshot(model, tokenizer)
    deltas = identity().edit(model, tokenizer, EDIT_REQUESTS)
    assert_same_state(before, snapshot(model, tokenizer))
    names = list(edited_shapes(model, MENDConfig(layers=LAYERS)))
    for request, delta in zip(EDIT_REQUESTS, deltas, strict=True):
        gradients = plain_gradients(model, names, lambda request=request: nll(model, tokenizer, request).mean())
        weights = delta.weights()
        assert len(weights) == len(names)
        for name, gradient in gradients.items():
            expected = -RATE * gradient
            error = float((weights[f"{name}.weight"] - expected).norm() / expected.norm())
            assert error < (1e-4 if loose else 1e-8), f"{name}: {error:.1e}"


@pytest.mark.parametrize("joint_loss", ["mean", "sum"])
@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_a_joint_edit_is_one_gradient_step_of_the_joint_loss(model_type, joint_loss, tiny_model, tiny_tokenizer):
    model, tokenizer = tiny_model(model_type, dtype=torch.float64), tiny_tokenizer(NATURAL_TOKENIZER[model_type])
    config = {"joint_loss": joint_loss, "batch_size": 3}  # chunks of three and one
    (delta,) = identity(**config).edit(model, tokenizer, EDIT_REQUESTS, joint=True)
    names = list(edited_shapes(model, MENDConfig(layers=LAYERS)))

    def loss():
        parts = [nll(model, tokenizer, request) for request in EDIT_REQUESTS]
        return torch.cat(parts).mean() if joint_loss == "mean" else torch.stack([p.mean() for p in parts]).sum()

    for name, gradient in plain_gradients(model, names, loss).items():
        torch.testing.assert_close(delta.weights()[f"{name}.weight"], -RATE * gradient, atol=1e-8, rtol=1e-6)


def test_edits_are_low_rank_where_factors_are_smaller(tiny_model, tiny_tokenizer):
    model, tokenizer = tiny_model("llama"), tiny_tokenizer("byte_bpe_bos")
    short = EditRequest(prompt="The train", target_new="is")
    (delta,) = identity().edit(model, tokenizer, [short])
    assert delta.is_low_rank and delta.rank <= 4
    (joint,) = identity().edit(model, tokenizer, EDIT_REQUESTS, joint=True)
    # Dozens of tokens on matrices of width 32; in the last block only the labeled ones have a gradient.
    assert "model.layers.0.mlp.down_proj.weight" in joint.dense and "model.layers.0.mlp.down_proj" not in joint.factors


def test_released_sign_increases_the_loss(tiny_model, tiny_tokenizer):
    model, tokenizer = tiny_model("llama"), tiny_tokenizer("byte_bpe_bos")
    (ours,) = identity().edit(model, tokenizer, EDIT_REQUESTS[:1])
    (released,) = identity(sign="plus").edit(model, tokenizer, EDIT_REQUESTS[:1])
    for name, update in ours.weights().items():
        assert torch.equal(released.weights()[name], -update)
    assert ours.diagnostics["final_loss"] < ours.diagnostics["initial_nll"] < released.diagnostics["final_loss"]


def test_a_stream_is_undone_bit_for_bit(tiny_model, tiny_tokenizer):
    model, tokenizer = tiny_model("gpt2"), tiny_tokenizer("byte_bpe")
    before, editor = snapshot(model, tokenizer), identity(layers=[EDIT_LAYER])
    (first,) = editor.edit(model, tokenizer, EDIT_REQUESTS[:1])
    with edited(model, first):
        (second,) = editor.edit(model, tokenizer, EDIT_REQUESTS[1:2], history=[first])
        with edited(model, second):
            pass
    (alone,) = editor.edit(model, tokenizer, EDIT_REQUESTS[1:2])
    assert alone.checksum() != second.checksum()
    assert_same_state(before, snapshot(model, tokenizer))


def test_missing_or_foreign_network_is_refused(tiny_model, tiny_tokenizer, tmp_path):
    model, tokenizer = tiny_model("llama"), tiny_tokenizer("byte_bpe_bos")
    with pytest.raises(EditingError, match="lm-edit train mend"):
        load_editor("mend").edit(model, tokenizer, EDIT_REQUESTS[:1])
    with pytest.raises(EditingError, match="no trained hyper-network"):
        load_editor("mend", {"artifact": str(tmp_path)}).edit(model, tokenizer, EDIT_REQUESTS[:1])
