"""The projection of CrispEdit, its stored factors, and what a stream carries."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch
from hook_edits import EDIT_REQUESTS, loaded

from edit_hooks import EditingError, edited, load_editor
from edit_hooks.base.registry import editor_class
from edit_hooks.contract.subject import contract_settings
from edit_hooks.editors import crisp_edit
from edit_hooks.gradient.curvature.kfac import CurvatureProjection, FactorSums, KFACFactors
from edit_hooks.locate.moments import text_statistics

SETTINGS = contract_settings(editor_class("crisp_edit"))
WEIGHT = "model.layers.1.mlp.down_proj.weight"


def factors(width_in=6, width_out=4):
    generator = torch.Generator().manual_seed(0)
    draws = [torch.randn(width, 40, generator=generator, dtype=torch.float64) for width in (width_in, width_out)]
    return KFACFactors(*((draw @ draw.T) / 40 for draw in draws), 40)


def test_the_projection_is_one_and_leaves_the_free_part():
    """In the stored orientation of both kinds of maps, for one update or several."""
    linear = torch.nn.Linear(6, 4).double()
    project = CurvatureProjection(factors(), 0.8, linear)
    updates = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    once = project(updates)
    torch.testing.assert_close(project(once), once)
    torch.testing.assert_close(project(updates[1]), once[1])
    cost = torch.einsum("ndf,dg,ngh,fh->n", once, factors().gradient_DD, once, factors().input_FF)
    assert (cost < torch.einsum("ndf,dg,ngh,fh->n", updates, factors().gradient_DD, updates, factors().input_FF)).all()


def test_all_of_the_energy_lets_nothing_through_and_none_nearly_all():
    linear = torch.nn.Linear(6, 4).double()
    assert CurvatureProjection(factors(), 1.0, linear).free_share == 0
    assert CurvatureProjection(factors(), 1e-9, linear).free_share == 23 / 24  # the largest product is protected


def test_projected_steps_stay_in_the_free_subspace():
    model, tokenizer = loaded("llama")
    for projected, most in (("gradient", 1.0), ("step", 1e-4)):
        (delta,) = load_editor("crisp_edit", {**SETTINGS, "projected": projected}).edit(
            model, tokenizer, EDIT_REQUESTS[:1], measure=False
        )
        outside = delta.diagnostics["projections"][WEIGHT]["outside_share"]
        assert (1e-2 if projected == "gradient" else 0) < outside + 1e-12 < most


def test_factors_are_stored_once_and_damage_is_collected_again(tmp_path, monkeypatch, caplog):
    model, tokenizer = loaded("llama")
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(SETTINGS["factors"]), encoding="utf-8")
    monkeypatch.setenv("LM_EDIT_CACHE", str(tmp_path / "cache"))
    settings = {**SETTINGS, "factors": str(text)}

    def edit():
        (delta,) = load_editor("crisp_edit", settings).edit(model, tokenizer, EDIT_REQUESTS[:1], measure=False)
        return delta.checksum()

    first = edit()
    (stored,) = (tmp_path / "cache/factors").rglob("*.safetensors")
    collect = text_statistics._collect
    monkeypatch.setattr(text_statistics, "_collect", lambda *_: pytest.fail("collected again"))
    assert edit() == first
    stored.write_bytes(stored.read_bytes()[:-1] + b"x")
    monkeypatch.setattr(text_statistics, "_collect", collect)
    assert edit() == first and "cannot use the K-FAC factors" in caplog.text


def test_a_stream_carries_moments_and_the_factors_of_past_edits():
    """Three steps, with the history as steps left it and as a runner condenses it."""
    model, tokenizer = loaded("llama")
    editor = load_editor("crisp_edit", SETTINGS)
    requests = [EDIT_REQUESTS[:2], EDIT_REQUESTS[2:3], EDIT_REQUESTS[3:4]]
    written, history = [], []
    made = mock.Mock(wraps=crisp_edit.CurvatureProjection)
    for chunk in requests:
        with edited(model, *written), mock.patch.object(crisp_edit, "CurvatureProjection", made):
            whole, short = (
                editor.edit(model, tokenizer, chunk, joint=True, history=steps, measure=False)[0]
                for steps in (written, history)
            )
        assert whole.checksum() == short.checksum()
        written.append(whole)
        history = editor.condensed(model, [*history, short])
        assert len(history) == 1 and not history[0].dense
    assert made.call_count == len(requests)  # eigenbases once per step, though each was made twice
    state = history[0].stream_state
    most = editor.most_state_bytes(model)
    assert float(state["step"]) == 8 * 3
    assert sum(tensor.nbytes for tensor in state.values()) == pytest.approx(most, abs=16)
    sums = FactorSums(model, [1], "fast")
    texts = [tokenizer(request.text + request.continuation)["input_ids"] for request in EDIT_REQUESTS[:3]]
    assert int(state["edits/num_tokens/1"]) == sum(len(ids) - 1 for ids in texts)
    with edited(model, written[0]), torch.enable_grad():
        sums.add(texts[:2])
    with edited(model, *written[:2]), torch.enable_grad():
        later = FactorSums(model, [1], "fast")
        later.add(texts[2:])
    expected = KFACFactors.of(sums.matrices()[1], sums.num_tokens).merged(
        KFACFactors.of(later.matrices()[1], later.num_tokens)
    )
    torch.testing.assert_close(state["edits/input/1"], expected.input_FF, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(state["edits/gradient/1"], expected.gradient_DD, rtol=1e-4, atol=1e-6)


def test_fixed_factors_carry_the_moments_alone():
    model, tokenizer = loaded("llama")
    editor = load_editor("crisp_edit", {**SETTINGS, "stream_factors": "fixed"})
    (first,) = editor.edit(model, tokenizer, EDIT_REQUESTS[:1], joint=True, measure=False)
    with edited(model, first):
        (second,) = editor.edit(model, tokenizer, EDIT_REQUESTS[1:2], joint=True, history=[first], measure=False)
        fresh = dataclasses.replace(first, stream_state={name: 0 * one for name, one in first.stream_state.items()})
        (other,) = editor.edit(model, tokenizer, EDIT_REQUESTS[1:2], joint=True, history=[fresh], measure=False)
    assert second.stream_state.keys() == {f"first/{WEIGHT}", f"second/{WEIGHT}", "step"}
    assert second.checksum() != other.checksum()


@pytest.mark.parametrize("engine", ["fast", "reference"])
def test_an_edit_made_alone_keeps_no_moments_and_no_step_follows_it(engine):
    """A stream whose moments are reset between steps would be another method."""
    model, tokenizer = loaded("llama")
    editor = load_editor("crisp_edit", {**SETTINGS, "engine": engine})
    (alone,) = editor.edit(model, tokenizer, EDIT_REQUESTS[:1], measure=False)
    assert not alone.stream_state
    with edited(model, alone), pytest.raises(EditingError, match=r"was made alone\. .* joint=True"):
        editor.edit(model, tokenizer, EDIT_REQUESTS[1:2], joint=True, history=[alone], measure=False)


def test_a_step_without_a_loss_to_lower_leaves_nothing_to_go_on_from():
    model, tokenizer = loaded("llama")
    (idle,) = load_editor("crisp_edit", {**SETTINGS, "early_stop_loss": 1e9}).edit(
        model, tokenizer, EDIT_REQUESTS[:1], joint=True, measure=False
    )
    editor = load_editor("crisp_edit", SETTINGS)
    (second,) = editor.edit(model, tokenizer, EDIT_REQUESTS[1:2], joint=True, history=[idle], measure=False)
    assert float(second.stream_state["step"]) == 8


def test_errors_about_the_text_name_its_settings():
    model, tokenizer = loaded("llama")
    for settings, message in (
        ({"factor_length": 9999}, r"documents behind K-FAC factors .* \(factor_length\)"),
        ({"factors": "moments.safetensors"}, "no source of text"),
    ):
        with pytest.raises(EditingError, match=message):
            load_editor("crisp_edit", {**SETTINGS, **settings}).edit(model, tokenizer, EDIT_REQUESTS[:1])


def test_blocks_are_refused():
    with pytest.raises(EditingError, match="trained=block is not possible"):
        load_editor("crisp_edit", {"trained": "block"})
