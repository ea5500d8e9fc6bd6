"""EVK-Align: the loss term against full forward passes in float64, and its effect on the editors that use it."""

from __future__ import annotations

import pytest
import torch
from editor_settings import ALPHAEDIT_CONFIG, MEMIT_CONFIG, PRUNE_CONFIG, ROME_CONFIG
from tiny_architectures import ARCHITECTURES

from edit_hooks import EditingError, EditRequest, load_editor
from edit_hooks.contract.tiny_models import NATURAL_TOKENIZER, REQUESTS, build_model, build_tokenizer
from edit_hooks.editors.evk_edit import EVKEdit
from edit_hooks.locate.value_editor import forward_maker
from edit_hooks.locate.values.evk_align import draw_instances, evk_term

EDITS = [EditRequest(**record) for record in REQUESTS]
BARE_PROMPTS = ["{}"] * len(EDITS)
SIGMA = 0.3
ALIGN = {"evk_align": True, "evk_weight": 0.7, "evk_sigma": SIGMA, "evk_instances": 3, "evk_top_k": [4, 9]}
# Families that never narrow to float32, so both sides agree to rounding.
MODEL_TYPES = ["gpt2", "gemma3_text"]


def wide(model_type: str):
    return build_model(model_type, dtype=torch.float64), build_tokenizer(NATURAL_TOKENIZER[model_type])


def config_of(model, editor: str = "rome", **settings):
    return load_editor(editor, {**ROME_CONFIG, "num_steps": 15, **ALIGN, **settings}).default_config(model)


def distance(ours, theirs) -> float:
    first, second = ours.weights(), theirs.weights()
    return max(float((first[name] - second[name]).norm() / second[name].norm()) for name in second)


def next_logits(model, name: str, instance, offset_D: torch.Tensor) -> torch.Tensor:
    """Logits after one perturbed prompt: perturbed embeddings, the offset by a plain hook, no shortcuts."""
    ids = torch.tensor([instance.row.ids])
    embeddings = model.get_input_embeddings()(ids) + instance.noise_TD

    def add(_module, _args, output):
        hidden = output if isinstance(output, torch.Tensor) else output[0]
        hidden = hidden.clone()
        hidden[0, instance.row.position] += offset_D
        return hidden if isinstance(output, torch.Tensor) else (hidden, *output[1:])

    handle = model.get_submodule(name).register_forward_hook(add)
    try:
        return model(inputs_embeds=embeddings).logits[0, -1]
    finally:
        handle.remove()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("engine", ["fast", "reference"])
@pytest.mark.parametrize("site", ["mlp", "block"])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_the_term_is_equation_11(model_type, layer, site, engine):
    """Value and gradient for all edits at once, in both stages, and after some edits are dropped."""
    model, tokenizer = wide(model_type)
    config = config_of(model, engine=engine, layers=[layer])
    arch = ARCHITECTURES[model_type]
    name = arch.mlp_name(layer) if site == "mlp" else arch.block_name(layer)
    generator = torch.Generator().manual_seed(1)
    delta_ED = torch.randn(len(EDITS), 32, dtype=torch.float64, generator=generator).requires_grad_(True)
    drawn = [draw_instances(tokenizer, request, 32, SIGMA, config) for request in EDITS]

    def by_hand(edits: list[int], k: int) -> torch.Tensor:
        losses = []
        for edit in edits:
            parts = []
            for instance in drawn[edit]:
                before = next_logits(model, name, instance, torch.zeros(32, dtype=torch.float64)).detach()
                after = next_logits(model, name, instance, delta_ED[edit])
                best = before.argsort(descending=True)[:k]
                p, q = before[best].softmax(0), after[best].softmax(0)
                parts.append((p * (p / q).log()).sum())
            losses.append(0.7 * sum(parts) / len(parts))
        return torch.stack(losses)

    term = evk_term(model, tokenizer, EDITS, BARE_PROMPTS, config, forward_maker(model, config, layer, site))
    wanted = {k: by_hand([0, 1, 2, 3], k) for k in (4, 9)}
    for step, k in ((0, 4), (7, 4), (8, 9)):  # the second stage begins at half of 15 evaluations
        torch.testing.assert_close(term.loss(delta_ED, step), wanted[k], rtol=1e-8, atol=1e-10)
    early = config_of(model, engine=engine, layers=[layer], evk_stage=0.2)
    early_term = evk_term(model, tokenizer, EDITS, BARE_PROMPTS, early, forward_maker(model, early, layer, site))
    for step, k in ((2, 4), (3, 9)):  # at a fifth of them
        torch.testing.assert_close(early_term.loss(delta_ED, step), wanted[k], rtol=1e-8, atol=1e-10)
    (ours,) = torch.autograd.grad(term.loss(delta_ED, 8).sum(), delta_ED)
    (theirs,) = torch.autograd.grad(wanted[9].sum(), delta_ED)
    torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-10)
    keep = torch.tensor([True, False, False, True])
    term.select(keep)
    torch.testing.assert_close(term.loss(delta_ED[keep], 9), by_hand([0, 3], 9), rtol=1e-8, atol=1e-10)


def test_noise_is_on_the_drifting_tokens_and_depends_on_the_request_only():
    model, tokenizer = wide("llama")
    request = EDITS[0]
    ids = tokenizer(request.text, return_offsets_mapping=True)
    start, end = request.subject_span
    inside = [a < end and b > start for a, b in ids["offset_mapping"]]
    seen = set()
    for drift in ("subject", "relation", "all"):
        for instance in draw_instances(
            tokenizer, request, 32, SIGMA, config_of(model, evk_drifts=[drift], evk_instances=2)
        ):
            touched = (instance.noise_TD != 0).any(1).tolist()
            expected = {
                "subject": inside,
                "relation": [not word and n > 0 for n, word in enumerate(inside)],  # token 0 is the start token
                "all": [True] * len(inside),
            }
            assert touched == expected[drift] and instance.drift == drift
            assert 0.2 < float(instance.noise_TD[touched].std()) < 0.4
            seen.add(float(instance.noise_TD.sum()))
    assert len(seen) == 6  # every instance has its own noise
    config = config_of(model, evk_instances=12)
    drawn = draw_instances(tokenizer, request, 32, SIGMA, config)
    assert {instance.drift for instance in drawn} == {"subject", "relation", "all"}
    again = draw_instances(tokenizer, EditRequest(**{**REQUESTS[0], "case_id": "7"}), 32, SIGMA, config)
    assert all(torch.equal(a.noise_TD, b.noise_TD) for a, b in zip(drawn, again, strict=True))
    other = draw_instances(tokenizer, request, 32, SIGMA, config_of(model, evk_instances=12, seed=1))
    assert not torch.equal(drawn[0].noise_TD, other[0].noise_TD)
    (plain, *_) = draw_instances(tokenizer, request, 32, 0.0, config_of(model))
    assert not plain.noise_TD.any() and list(plain.row.ids) == ids["input_ids"]


@pytest.mark.parametrize("model_type", ["gpt2", "gemma3_text"])
@pytest.mark.parametrize(("editor", "settings"), [("rome", ROME_CONFIG), ("memit", MEMIT_CONFIG)])
def test_zero_weight_changes_nothing_and_engines_agree_otherwise(editor, settings, model_type):
    model, tokenizer = wide(model_type)
    plain = load_editor(editor, settings).edit(model, tokenizer, EDITS)
    weightless = load_editor(editor, {**settings, **ALIGN, "evk_weight": 0.0}).edit(model, tokenizer, EDITS)
    assert all(distance(a, b) == 0 for a, b in zip(weightless, plain, strict=True))
    fast = load_editor(editor, {**settings, **ALIGN, "evk_weight": 9.0}).edit(model, tokenizer, EDITS)
    slow = load_editor(editor, {**settings, **ALIGN, "evk_weight": 9.0, "engine": "reference"})
    for ours, theirs, without in zip(fast, slow.edit(model, tokenizer, EDITS), plain, strict=True):
        assert distance(ours, theirs) < 1e-7  # a dozen Adam steps of two roundings
        assert distance(ours, without) > 1e-3
        assert ours.diagnostics["losses"][0]["evk"] < 1e-10 < ours.diagnostics["losses"][-1]["evk"]
    (alone,) = load_editor(editor, {**settings, **ALIGN, "evk_weight": 9.0}).edit(model, tokenizer, EDITS[1:2])
    assert distance(alone, fast[1]) < 1e-7


def test_evk_edit_is_alphaedit_with_the_term_and_wrappers_accept_it():
    model, tokenizer = wide("llama")
    (ours,) = load_editor("evk_edit", ALPHAEDIT_CONFIG).edit(model, tokenizer, EDITS, joint=True)
    aligned = {**ALPHAEDIT_CONFIG, "evk_align": True}
    (theirs,) = load_editor("alphaedit", aligned).edit(model, tokenizer, EDITS, joint=True)
    (without,) = load_editor("alphaedit", ALPHAEDIT_CONFIG).edit(model, tokenizer, EDITS, joint=True)
    assert distance(ours, theirs) == 0.0 < distance(ours, without)
    assert EVKEdit.config_folders == ("evk_edit", "alphaedit")
    settings = {**PRUNE_CONFIG, "base_settings": {**MEMIT_CONFIG, **ALIGN}}
    (pruned,) = load_editor("prune", settings).edit(model, tokenizer, EDITS[:1])
    assert "evk" in pruned.diagnostics["losses"][0]


def test_wrong_settings_are_refused():
    model, tokenizer = wide("llama")
    for wrong in ({"evk_sigma": -1}, {"evk_instances": 0}, {"evk_top_k": [10]}, {"evk_drifts": []}):
        with pytest.raises(EditingError, match="evk_"):
            load_editor("rome", wrong)
    with pytest.raises(EditingError, match="evk_drifts"):
        load_editor("rome", {"evk_drifts": ["object"]})
    alone = EditRequest(prompt="{}", subject="Ostravia", target_new="Hamburg", case_id="9")
    editor = load_editor("rome", {**ROME_CONFIG, **ALIGN, "evk_drifts": ["relation"]})
    with pytest.raises(EditingError, match=r"case 9.*no token for evk_drifts"):
        editor.edit(model, tokenizer, [alone])
