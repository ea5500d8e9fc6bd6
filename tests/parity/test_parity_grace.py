"""GRACE against the numbers of EasyEdit and of its own repository: keys, radii and values of short streams of edits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from golden_data import GOLDEN_MODELS, golden_case
from parity import relative_error, token_nll

from edit_hooks import EditRequest, edited, load_editor
from edit_hooks.deltas.hook_edit import HookEdit
from edit_hooks.modeling.tokens import split_continuation

MODULES = {"tiny-gpt2": "mlp_in", "tiny-llama": "mlp_out"}
EASYEDIT = ["single", "conflict", "conflict2", "expand"]
# A value that starts at a uniform draw, a key that moves half way, and the other replacement rules.
REPOSITORY = ["cold", "moving-average", "replace-all", "replace-prompt"]
WIDENED = {"expand", "moving-average"}  # the second edit has the first one's target


def start_of(settings: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The settings of the value's start: the draw of the release where there was one."""
    if settings["val_init"] == "cold":
        return {"initial_values": {"values": tensors["initial_value"][None]}}
    return {"value_init": settings["val_init"]}


@pytest.mark.parametrize("engine", ["fast", "reference"])
@pytest.mark.parametrize("case_name", [*EASYEDIT, *REPOSITORY])
@pytest.mark.parametrize("model_name", GOLDEN_MODELS)
def test_sequences_give_the_codebook_of_the_release(model_name, case_name, engine, golden_model):
    """A new key, a far key, a split with another target nearby, and a key widened by the same target.

    Keys and radii to 1e-5; 30 Adam steps on the value to 2e-3 (the release itself differs by 4e-4 from its float64
    run).
    """
    model, tokenizer = golden_model(model_name)
    case, tensors = golden_case("grace", model_name, case_name)
    settings = case["hparams"]
    editor = load_editor(
        "grace",
        {
            "layers": [1],
            "module": MODULES[model_name],
            "num_steps": settings["n_iter"],
            "lr": settings["edit_lr"],
            "radius": settings["eps"],
            **start_of(settings, tensors),
            "replacement": settings["replacement"],
            "expand": settings["eps_expand"],
            "engine": engine,
        },
    )
    history = []
    for request, losses, nll, place in zip(
        case["requests"], case["losses"], case["nll_after"], case["key_token_index"], strict=True
    ):
        wanted = EditRequest(**request)
        (delta,) = editor.edit(model, tokenizer, [wanted], history=history)
        history.append(delta)
        assert [record["loss"] for record in delta.diagnostics["losses"]] == pytest.approx(losses, abs=1e-3)
        prompt, target = split_continuation(tokenizer, wanted.text, f" {wanted.target_new}")
        assert len(prompt) - 1 == place
        with edited(model, *history, prompt_lengths=[len(prompt)]):
            ours = float(token_nll(model, prompt, target).mean())
        assert ours == pytest.approx(nll[0], abs=2e-3)
    book = HookEdit.combine([delta.hook_edit for delta in history])
    assert book is not None and book.settings["module"] == settings["inner_params"][0].replace("[", ".").replace(
        "]", ""
    ).removesuffix(".weight")
    assert relative_error(book.tensors["keys"], tensors["keys"]) < 1e-5
    assert relative_error(book.tensors["radii"], tensors["epsilons"]) < 1e-5
    assert relative_error(book.tensors["values"], tensors["values"]) < 2e-3
    labels = [split_continuation(tokenizer, r["prompt"], " " + r["target_new"])[1] for r in case["requests"]]
    assert book.settings["labels"] == (labels if case_name not in WIDENED else labels[-1:])


@pytest.mark.parametrize("model_name", GOLDEN_MODELS)
def test_distances_of_prompts_are_those_of_the_release(model_name, golden_model):
    """A and A2: the same prompt with and without a comma; B: another one."""
    model, tokenizer = golden_model(model_name)
    case, _ = golden_case("grace", model_name, "conflict")
    requests = [EditRequest(**request) for request in case["requests"]]
    deltas = load_editor("grace", {"layers": [1], "module": MODULES[model_name], "num_steps": 1}).edit(
        model, tokenizer, requests
    )
    first, other, comma = (delta.hook_edit.tensors["keys"][0] for delta in deltas)
    expected = case["query_distances"]
    assert float((first - comma).norm()) == pytest.approx(expected["A-A2"], rel=1e-5)
    assert float((first - other).norm()) == pytest.approx(expected["A-B"], rel=1e-5)
    assert torch.equal(deltas[0].hook_edit.tensors["radii"], torch.tensor([1.0]))
