"""PMET against a plain loop over full forwards and dense solves, written out in float64."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from editor_settings import MEMIT_CONFIG, PMET_CONFIG
from tiny_architectures import ARCHITECTURES

from edit_hooks import EditRequest, edited, load_editor
from edit_hooks.contract.tiny_models import NATURAL_TOKENIZER, REQUESTS, SENTENCES, build_model, build_tokenizer
from edit_hooks.locate.values.key_reader import key_weights
from edit_hooks.locate.values.post_norm import nearest_outputs
from edit_hooks.locate.values.rows import kl_row, rewriting_row
from edit_hooks.modeling.architectures import is_transposed

EDITS = [EditRequest(**record) for record in REQUESTS]
CONTEXTS = ["{}", "You can see. {}", "The band released. {}"]
SETTINGS = {
    **MEMIT_CONFIG,
    "context_templates": CONTEXTS,
    "second_moments": list(SENTENCES),
    "num_steps": 6,
    "lr": 0.2,
    "weight_decay": 0.5,
    "clamp_factor": 0.4,
    "kl_factor": 0.5,
    "nll_factor": 1.5,
    "keep_intermediates": True,
}
# No float32 anywhere on the way, so both sides agree to rounding.
MODEL_TYPES = ["gpt2", "llama", "gemma3_text"]


def wide(model_type: str):
    return build_model(model_type, dtype=torch.float64), build_tokenizer(NATURAL_TOKENIZER[model_type])


def log_probabilities(model, arch, row, attention_D, mlp_D):
    """log p [t, v] of one row with both offsets at its fact token, and the two unedited outputs there."""
    kept = {}

    def add(name, offset_D):
        def hook(_module, _args, output):
            kept[name] = output[0, row.position].detach()
            shift = torch.zeros_like(output)
            shift[0, row.position] = 1
            return output + shift * offset_D

        return hook

    handles = [
        model.get_submodule(arch.attention_out.format(1)).register_forward_hook(add("attention", attention_D)),
        model.get_submodule(arch.rewrite_name(1)).register_forward_hook(add("mlp", mlp_D)),
    ]
    try:
        return model(torch.tensor([row.ids])).logits[0].log_softmax(-1), kept
    finally:
        for handle in handles:
            handle.remove()


def optimized(model, arch, tokenizer, request) -> tuple[torch.Tensor, torch.Tensor, list[float]]:
    """z of the MLP, both offsets together through torch's own Adam, as the release's loop is described."""
    s = SETTINGS
    rows = [rewriting_row(tokenizer, request, text) for text in CONTEXTS]
    kl = kl_row(tokenizer, request)
    zero = torch.zeros(32, dtype=torch.float64)
    _, unedited = log_probabilities(model, arch, rows[0], zero, zero)
    before = log_probabilities(model, arch, kl, zero, zero)[0][kl.position].detach()
    offsets = [zero.clone().requires_grad_(True), zero.clone().requires_grad_(True)]
    norms = [unedited["attention"].norm(), unedited["mlp"].norm()]
    adam = torch.optim.Adam(offsets, lr=s["lr"])
    factor, losses = s["nll_factor"], []
    for step in range(s["num_steps"]):
        nll, satisfied = 0.0, True
        for row in rows:
            log_p, _ = log_probabilities(model, arch, row, *offsets)
            nll = nll - sum(log_p[p, token] for p, token in row.labels) / len(row.labels) / len(rows)
            satisfied &= all(int(log_p[p].argmax()) == token for p, token in row.labels)
        now = log_probabilities(model, arch, kl, *offsets)[0][kl.position]
        divergence = s["kl_factor"] * (now.exp() * (now - before)).sum()
        decay = sum(
            (offset.square().sum() + 1e-300).sqrt() / norm**2 for offset, norm in zip(offsets, norms, strict=True)
        )
        loss = factor * nll + divergence + s["weight_decay"] * decay
        losses.append(float(loss.detach()))
        if loss < 0.05 or (satisfied and divergence <= 0.01) or step == s["num_steps"] - 1:
            break
        factor = s["nll_factor"] * (0.1 if satisfied else 1.0)
        adam.zero_grad()
        loss.backward()
        adam.step()
        with torch.no_grad():
            for offset, norm in zip(offsets, norms, strict=True):
                if offset.norm() > s["clamp_factor"] * norm:
                    offset *= s["clamp_factor"] * norm / offset.norm()
    return offsets[1].detach(), unedited["mlp"] + offsets[1].detach(), losses


@torch.no_grad()
def read(model, arch, tokenizer, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean keys [u, f] of a layer and the bare prompts' outputs of layer 1 [u, d]."""
    keys, outputs = [], []
    weights = key_weights(len(CONTEXTS))
    for request in EDITS:
        parts = []
        for text in CONTEXTS:
            row = rewriting_row(tokenizer, request, text)
            kept = {}
            handles = [
                model.get_submodule(arch.rewrite_name(n)).register_forward_hook(
                    lambda _m, args, out, n=n: kept.update({n: (args[0][0], out[0])})  # noqa: B023
                )
                for n in (0, 1)
            ]
            model(torch.tensor([row.ids]))
            for handle in handles:
                handle.remove()
            parts.append(kept[layer][0][row.position])
            if text == "{}":
                outputs.append(kept[1][1][row.position])
        keys.append(sum(w * part for w, part in zip(weights, parts, strict=True)))
    return torch.stack(keys), torch.stack(outputs)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_joint_edit_matches_the_equations(model_type):
    """Targets, keys, residuals over square roots, and (lambda C + K K^T)^-1 with an f x f system, layer by layer."""
    model, tokenizer = wide(model_type)
    arch = ARCHITECTURES[model_type]
    editor = load_editor("pmet", {**SETTINGS, "residual_mode": "faithful"})
    (delta,) = editor.edit(model, tokenizer, EDITS, joint=True)
    found = [optimized(model, arch, tokenizer, request) for request in EDITS]
    torch.testing.assert_close(
        delta.intermediates["z_delta"], torch.stack([offset for offset, _, _ in found]), rtol=1e-7, atol=1e-9
    )
    target_UD = torch.stack([z for _, z, _ in found])
    editor.resolve_config(model, tokenizer)
    moments = editor.constraints(model)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    for index, layer in enumerate((0, 1)):
        keys_UF, outputs_UD = read(model, arch, tokenizer, layer)
        residual_UD = (target_UD - outputs_UD) / (2 - index) ** 0.5
        system_FF = SETTINGS["moment_weight"] * moments[layer].matrix_FF.double() + keys_UF.T @ keys_UF
        update_DF = residual_UD.T @ torch.linalg.solve(system_FF, keys_UF.T).T
        name = arch.rewrite_name(layer)
        update = update_DF.T if is_transposed(model.get_submodule(name)) else update_DF
        ours = delta.weights()[f"{name}.weight"]
        assert float((ours - update).norm() / update.norm()) < 1e-6
        with torch.no_grad():
            model.get_submodule(name).weight += update
    assert any(not torch.equal(p, weights[name]) for name, p in model.named_parameters())


def test_the_loss_curve_and_the_ball():
    """Single edits one by one against one call, every loss of every evaluation, and the reference engine."""
    model, tokenizer = wide("llama")
    deltas = load_editor("pmet", SETTINGS).edit(model, tokenizer, EDITS)
    slow = load_editor("pmet", {**SETTINGS, "engine": "reference"}).edit(model, tokenizer, EDITS)
    clamped = []
    for request, delta, other in zip(EDITS, deltas, slow, strict=True):
        offset, z, losses = optimized(model, ARCHITECTURES["llama"], tokenizer, request)
        assert [record["loss"] for record in delta.diagnostics["losses"]] == pytest.approx(losses, abs=1e-8)
        clamped.append(bool(offset.norm() >= 0.4 * (z - offset).norm() * (1 - 1e-6)))
        assert delta.diagnostics["clamped"] == clamped[-1]
        for name, update in delta.weights().items():
            torch.testing.assert_close(update, other.weights()[name], rtol=1e-6, atol=1e-10)
    assert any(clamped)


def test_a_satisfied_target_counts_less_and_then_stops():
    """Both rules of the release: a tenth of the NLL in the next evaluation, and an end when the KL part is small."""
    model, tokenizer = wide("llama")
    request = EditRequest(prompt="The red lighthouse of {} is", subject="Ostravia", target_new="a")
    settings = {**PMET_CONFIG, "context_templates": ["{}"], "num_steps": 60, "early_stop_loss": 1e-9, "lr": 0.3}
    settings |= {"clamp_factor": 40.0, "weight_decay": 0.0}
    (delta,) = load_editor("pmet", {**settings, "kl_factor": 1.0}).edit(model, tokenizer, [request])
    nll = [record["nll"] for record in delta.diagnostics["losses"]]
    drops = [later / earlier for earlier, later in pairwise(nll)]
    assert min(drops) < 0.2, "the target was never satisfied"
    assert delta.diagnostics["losses"][-1]["kl"] > 0.01 and delta.diagnostics["stop_reason"] == "steps"
    (delta,) = load_editor("pmet", {**settings, "kl_factor": 1e-9}).edit(model, tokenizer, [request])
    assert delta.diagnostics["stop_reason"] == "loss"
    assert delta.diagnostics["final_loss"] > 0.1 and len(delta.diagnostics["losses"]) < 60


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text", "olmo2"])
def test_norm_after_the_mlp_is_taken_into_account(model_type):
    """One layer, an almost free write: the edited block adds n(z), although the MLP output itself is another one."""
    model, tokenizer = wide(model_type)
    arch = ARCHITECTURES[model_type]
    settings = {**PMET_CONFIG, "layers": [1], "context_templates": ["{}"], "moment_weight": 1e-10, "lr": 0.3}
    (delta,) = load_editor("pmet", {**settings, "keep_intermediates": True}).edit(model, tokenizer, EDITS[:1])
    row = rewriting_row(tokenizer, EDITS[0], "{}", "last")
    norm = model.get_submodule(arch.post_norm_name(1))

    def output() -> torch.Tensor:
        kept = []
        handle = model.get_submodule(arch.rewrite_name(1)).register_forward_hook(lambda _m, _a, out: kept.append(out))
        with torch.no_grad():
            model(torch.tensor([row.ids]))
        handle.remove()
        return kept[0][0, row.position]

    before = output()
    with torch.no_grad(), edited(model, delta):
        after = output()
        wanted = norm(before + delta.intermediates["z_delta"][0])
        torch.testing.assert_close(norm(after), wanted, rtol=1e-5, atol=1e-5)
        share = (wanted - norm(before))[None]
    torch.testing.assert_close(after, nearest_outputs(norm, before[None], share)[0], rtol=1e-5, atol=1e-6)
    assert delta.diagnostics["residual_mode"] == "normalized" and delta.diagnostics["distance_left"] < 1e-4


def test_evk_align_joins_both_offsets():
    """The plug-in at PMET's pair of sites: without weight nothing, with weight the same in both engines."""
    model, tokenizer = wide("llama")
    align = {"evk_align": True, "evk_sigma": 0.3, "evk_instances": 2}

    def edit(**settings):
        editor = load_editor("pmet", {**PMET_CONFIG, "layers": [0], "num_steps": 6, **settings})
        return editor.edit(model, tokenizer, EDITS[:2])

    plain, weightless = edit(), edit(**align, evk_weight=0.0)
    fast, slow = edit(**align, evk_weight=9.0), edit(**align, evk_weight=9.0, engine="reference")
    for deltas in zip(plain, weightless, fast, slow, strict=True):
        for name, update in deltas[0].weights().items():
            without, ours, theirs = (delta.weights()[name] for delta in deltas[1:])
            assert torch.equal(without, update)
            assert float((ours - theirs).norm() / theirs.norm()) < 1e-7
            assert float((ours - update).norm() / update.norm()) > 1e-4
