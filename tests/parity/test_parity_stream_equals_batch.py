"""Exact streams against one-time batches of released code (MEMIT with carried keys, AlphaEdit)."""

from __future__ import annotations

import pytest
import torch
from golden_data import golden_case, golden_covariance
from golden_models import as_stored
from parity import relative_error

from edit_hooks import Delta, EditRequest, load_editor
from edit_hooks.deltas.apply import AppliedDeltas

ONE_BY_ONE, OTHER_ORDER, IN_TWOS = [[0], [1], [2], [3]], [[3], [1], [0], [2]], [[0, 1], [2, 3]]


def settings_for(case, model_name, editor):
    given = case["hparams"]
    (layer,) = given["layers"]
    own = {
        "memit": lambda: {"moment_weight": given["mom2_update_weight"]},
        "alphaedit": lambda: {"nullspace_threshold": given["nullspace_threshold"], "l2": given["L2"]},
    }
    return {
        "layers": [layer],
        "num_steps": given["v_num_grad_steps"],
        "lr": given["v_lr"],
        "weight_decay": given["v_weight_decay"],
        "clamp_factor": given["clamp_norm_factor"],
        "kl_factor": given["kl_factor"],
        "fact_token": given["fact_token"],
        "context_templates": ["{}"],
        "second_moments": {layer: golden_covariance(model_name, layer)},
        "carry_keys": True,
        **own[editor](),
    }


@pytest.mark.parametrize(
    ("model_name", "editor", "steps"),
    [
        ("tiny-gpt2", "memit", ONE_BY_ONE),
        ("tiny-gpt2", "alphaedit", OTHER_ORDER),
        ("tiny-llama", "memit", IN_TWOS),
        ("tiny-llama", "alphaedit", OTHER_ORDER),
    ],
)
def test_a_stream_equals_the_batch_of_the_release(model_name, editor, steps, golden_model):
    """The bound is the one of the stored numbers; the exact streams are within 2e-13 of them."""
    model, tokenizer = golden_model(model_name, torch.float64)
    case, tensors = golden_case("stream-equals-batch", model_name, editor)
    requests = [EditRequest(**record) for record in case["requests"]]
    batch_DF = tensors["batch.delta_left.layer1"] @ tensors["batch.delta_right.layer1"].T
    settings = settings_for(case, model_name, editor)

    def total(steps, **overrides):
        instance = load_editor(editor, {**settings, **overrides})
        history = []
        with AppliedDeltas(model) as applied:
            for step in steps:
                chosen = [requests[number] for number in step]
                history += instance.edit(model, tokenizer, chosen, joint=True, history=history, measure=False)
                applied.add(history[-1])
        (update,) = Delta.summed(history).weights().values()
        return as_stored(model_name, update)

    error = relative_error(total(steps, stream="exact"), batch_DF)
    assert error < 1e-10, f"{model_name} {editor}: off by {error:.1e}"
    if steps == ONE_BY_ONE:  # the released stream optimizes targets on the edited model; its distance is known, too
        assert relative_error(total(steps), batch_DF) == pytest.approx(case["stream_as_released"], rel=1e-6)
