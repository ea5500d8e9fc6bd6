"""UltraEdit against its release: lone edits, a batch, and two turns in micro-batches."""

from __future__ import annotations

import contextlib

import pytest
import torch
from golden_data import golden_case, golden_names
from golden_models import as_stored
from parity import relative_error

from edit_hooks import Delta, EditRequest, edited, load_editor

# The release solves in float32; repeated in float64 it differs from itself by up to 9e-5.
UPDATE_BOUND = 5e-4
STATISTICS_BOUND = 1e-4


def probe(length: int) -> torch.Tensor:
    """The vector with which the golden numbers contract an update."""
    return torch.cos(torch.arange(length, dtype=torch.float64))


@pytest.mark.parametrize(("model_name", "name"), golden_names("ultraedit"))
def test_ultraedit_gives_the_updates_of_the_release(model_name, name, golden_model):
    model, tokenizer = golden_model(model_name)
    case, tensors = golden_case("ultraedit", model_name, name)
    settings = {"modules": case["modules"], "start": "empty", **case["hparams"]}
    editor = load_editor("ultraedit", config=settings)
    history: list[Delta] = []
    with contextlib.ExitStack() as applied:
        for number, step in enumerate(case["steps"]):
            requests = [EditRequest(**record) for record in step["requests"]]
            joint = len(requests) > 1
            (delta,) = editor.edit(model, tokenizer, requests, joint=joint, history=history)
            for weight, update in delta.weights().items():
                where = f"{model_name} {name} step {number} {weight}"
                module = weight.removesuffix(".weight")
                update = as_stored(model_name, update)
                across, along = update.double() @ probe(update.shape[1]), probe(update.shape[0]) @ update.double()
                assert relative_error(across, tensors[f"step{number}.{module}.out"]) < UPDATE_BOUND, where
                assert relative_error(along, tensors[f"step{number}.{module}.in"]) < UPDATE_BOUND, where
                assert float(update.norm()) == pytest.approx(step["norms"][module], rel=UPDATE_BOUND), where
            assert sorted(delta.weights()) == sorted(case["edited_weights"])
            for shape, seen in step["tokens_seen"].items():
                state = delta.stream_state
                assert int(state[f"ultraedit/count/{shape}"]) == seen
                for ours, theirs in (("mean", "mean"), ("squares", "var")):
                    error = relative_error(
                        state[f"ultraedit/{ours}/{shape}"], tensors[f"step{number}.{theirs}.{shape}"]
                    )
                    assert error < STATISTICS_BOUND, f"{model_name} {name} step {number} {theirs} {shape}: {error:.1e}"
            history.append(delta)
            applied.enter_context(edited(model, delta))


@pytest.mark.parametrize("setting", [{"variance": "pooled"}, {"gradients": "sum"}, {"micro_batch_size": 6}])
def test_every_rule_of_the_release_matters(setting, golden_model):
    model, tokenizer = golden_model("tiny-llama")
    case, _ = golden_case("ultraedit", "tiny-llama", "turns6-b3")
    settings = {"modules": case["modules"], "start": "empty", **case["hparams"]}
    requests = [EditRequest(**record) for record in case["steps"][0]["requests"]]
    released, other = (
        load_editor("ultraedit", config=config).edit(model, tokenizer, requests, joint=True)[0].weights()
        for config in (settings, {**settings, **setting})
    )
    name = case["edited_weights"][0]
    assert relative_error(other[name], released[name]) > 1e-2
