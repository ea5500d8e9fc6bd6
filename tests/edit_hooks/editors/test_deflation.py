"""AlphaEdit with a projector that loses the directions of earlier edits (EvoEdit's formulas)."""

from __future__ import annotations

import pytest
import torch

from edit_hooks import EditingError, edited, load_editor
from edit_hooks.contract.subject import EDIT_REQUESTS, contract_settings
from edit_hooks.contract.tiny_models import build_model, build_tokenizer
from edit_hooks.editors.alphaedit import DEFLATED_WARNING, AlphaEdit
from edit_hooks.editors.memit import REPEATED_FACT_WARNING
from edit_hooks.locate.moments.null_space import MatrixProjector
from edit_hooks.locate.streams.deflated import DeflatedProjector, directions_name

SETTINGS = {**contract_settings(AlphaEdit), "deflation": 0.01, "keep_intermediates": True}


@pytest.fixture(scope="module")
def loaded():
    return build_model("llama", dtype=torch.float64), build_tokenizer("byte_bpe_bos")


def test_later_steps_leave_earlier_keys_alone(loaded):
    model, tokenizer = loaded
    editor = load_editor("alphaedit", SETTINGS)
    first, second, third = EDIT_REQUESTS[:3]
    (one,) = editor.edit(model, tokenizer, [first, second], joint=True, measure=False)
    (plain,) = load_editor("alphaedit", {**SETTINGS, "deflation": None}).edit(
        model, tokenizer, [first, second], joint=True, measure=False
    )
    for name, update in plain.weights().items():
        assert torch.equal(one.weights()[name], update)  # a first step is AlphaEdit's
    with edited(model, one):
        (two,) = editor.edit(model, tokenizer, [third], joint=True, history=[one], measure=False)
        condensed = editor.condensed(model, [one])
        (again,) = editor.edit(model, tokenizer, [third], joint=True, history=condensed, measure=False)
        (free,) = load_editor("alphaedit", {**SETTINGS, "deflation": None, "carry_keys": False}).edit(
            model, tokenizer, [third], joint=True, history=[one], measure=False
        )
    for layer, name in zip((0, 1), two.weights(), strict=True):
        taken_FQ = one.stream_state[directions_name(layer)]
        assert taken_FQ.shape[1] == 2
        update = two.weights()[name].double()
        assert torch.equal(update, again.weights()[name].double())
        assert float((update @ taken_FQ).norm()) < 1e-10 * float(update.norm())
        other = free.weights()[name].double()
        assert float((other @ taken_FQ).norm()) > 1e-3 * float(other.norm())
    assert two.diagnostics["layers"][0]["written_share"] > 0.1 and DEFLATED_WARNING not in two.warnings
    most = editor.most_state_bytes(model)
    assert sum(tensor.nbytes for tensor in condensed[0].stream_state.values()) <= most


def test_a_fact_that_is_edited_again_is_not_written(loaded):
    """With the first edit out of the weights its key is the same; the correction has no direction left."""
    model, tokenizer = loaded
    editor = load_editor("alphaedit", {**SETTINGS, "layers": [1]})
    request = EDIT_REQUESTS[0]
    (one,) = editor.edit(model, tokenizer, [request], joint=True, measure=False)
    with edited(model, one):
        (again,) = editor.edit(model, tokenizer, [request], joint=True, history=[one], measure=False)
    assert again.diagnostics["layers"][0]["written_share"] < 1e-10
    assert DEFLATED_WARNING in again.warnings and REPEATED_FACT_WARNING not in again.warnings


def test_it_is_the_limit_of_a_small_ridge():
    """L2 (P K K^T P + L2 I)^-1 on the range of P tends to the projector without the directions of K."""
    generator = torch.Generator().manual_seed(0)
    basis, _ = torch.linalg.qr(torch.randn(12, 8, generator=generator, dtype=torch.float64))
    projector = MatrixProjector(basis @ basis.T)
    keys = torch.randn(3, 12, generator=generator, dtype=torch.float64)
    start = DeflatedProjector(projector, torch.zeros(12, 0, dtype=torch.float64))
    directions = start.new_directions(keys, 1e-6)
    assert directions.shape == (12, 3)
    deflated = DeflatedProjector(projector, directions)
    dense = basis @ basis.T - directions @ directions.T
    some = torch.randn(5, 12, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(deflated.metric_product(some), some @ dense, rtol=0, atol=1e-12)
    assert float(deflated.metric_product(keys).norm()) < 1e-12 * float(keys.norm())
    inside = projector.metric_product(keys)
    system = inside.T @ inside + 1e-7 * torch.eye(12, dtype=torch.float64)
    limit = 1e-7 * torch.linalg.solve(system, basis @ basis.T)
    torch.testing.assert_close(limit, dense, rtol=0, atol=1e-6)
    assert start.new_directions(keys, 0.9).shape[1] == 0


@pytest.mark.parametrize("other", [{"stream": "exact", "layers": [1]}, {"carry_keys": False}])
def test_settings_that_exclude_it_are_refused(other):
    with pytest.raises(EditingError, match="deflation is how a stream protects"):
        load_editor("alphaedit", {"deflation": 0.01, **other}).default_config(build_model("llama"))
