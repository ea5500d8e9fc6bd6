"""ROME and MEMIT on Gemma 3 270M against the copies in the AlphaEdit release.

The family has BOS and post-norms; the edits stop early and reach the norm bound.
"""

from __future__ import annotations

import pytest
import torch
from golden_data import golden_case, golden_json
from parity import FLOAT32_BOUNDS, check_losses, golden_requests, relative_error, rome_config, token_nll
from parity_layers import memit_config

from edit_hooks import edited, load_editor
from edit_hooks.locate.values.rows import kl_row, rewriting_row

pytestmark = [pytest.mark.model, pytest.mark.slow]  # 270M parameters in float32: half a minute
CASES = [golden_case("rome", "gemma3-270m", f"nocov-edit{number}") for number in range(3)]
# tests/golden/README.md allows ten times the bounds of the tiny models here.
FACTOR = 10


@pytest.fixture(scope="module")
def gemma():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from edit_hooks.assets.demo_model import demo_model_path

    pytest.importorskip("gguf", reason="the demo extra is not installed")
    path = demo_model_path()
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(path)


@pytest.fixture(scope="module")
def deltas(gemma):
    """All three in one call: three edits that stop at different steps, so the batch shrinks on the way."""
    model, tokenizer = gemma
    return load_editor("rome", config=rome_config(CASES[0][0], None)).edit(model, tokenizer, golden_requests())


@pytest.mark.parametrize("number", [0, 1, 2])
def test_rome_on_gemma_gives_the_numbers_of_the_release(number, deltas):
    (case, tensors), delta = CASES[number], deltas[number]
    for name, (bound, _) in FLOAT32_BOUNDS.items():
        error = relative_error(delta.intermediates[name], tensors[name])
        assert error < FACTOR * bound, f"{name} off by {error:.1e}"
    update = torch.outer(tensors["v"], tensors["u"])
    assert relative_error(delta.weights()[case["edited_weight"]], update) < FACTOR * 1e-4
    check_losses(delta.diagnostics["losses"], case["losses"], FACTOR * 1e-4, f"gemma edit {number}")
    assert delta.diagnostics["clamped"] == case["clamp_bound_active_at_end"]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_rows_have_the_positions_of_the_release(number, gemma):
    _, tokenizer = gemma
    request = golden_requests()[number]
    rows = [rewriting_row(tokenizer, request, text) for text in golden_json("common")["context_templates_flat"]]
    assert [*(row.position for row in rows), kl_row(tokenizer, request).position] == CASES[number][0]["lookup_indices"]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_answers_change_as_in_the_release(number, gemma, deltas):
    model, _ = gemma
    after = CASES[number][0]["target_nll_after"]
    with edited(model, deltas[number]):
        nll = token_nll(model, after["prompt_ids"], after["target_ids"])
    assert nll.tolist() == pytest.approx(after["nll_per_token"], abs=5e-3)


def test_the_first_layer_of_memit_gives_the_numbers_of_the_release(gemma):
    """Behind post-norms the release overshoots from layer to layer; the target and the first layer can be compared."""
    case, tensors = golden_case("memit", "gemma3-270m", "eye-edit0")
    editor = load_editor("memit", config=memit_config(case, "gemma3-270m", "eye"))
    model, tokenizer = gemma
    (delta,) = editor.edit(model, tokenizer, golden_requests()[:1])
    for name, reference in tensors.items():
        error = relative_error(delta.intermediates[name], reference)
        assert error < 1e-3, f"{name} off by {error:.1e}"  # ten times the bounds, as tests/golden/README.md allows
    ratios = [facts["update_norm_ratio"] for facts in delta.diagnostics["layers"]]
    assert ratios[-1] > 10 * ratios[0]  # what residual_mode=normalized is for
