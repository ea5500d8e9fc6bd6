"""SimIE against the recursion written out with dense matrices in float64."""

from __future__ import annotations

import pytest
import torch
from editor_settings import FT_CONFIG, MEMIT_CONFIG, ROME_CONFIG

from edit_hooks import Delta, EditingError, EditRequest, edited, load_editor
from edit_hooks.contract.tiny_models import NATURAL_TOKENIZER, REQUESTS, build_model, build_tokenizer
from edit_hooks.editors.simie import output_change, solve_keys
from edit_hooks.modeling.architectures import is_transposed
from edit_hooks.modeling.tokens import split_continuation

EDITS = [EditRequest(**record) for record in REQUESTS]
RIDGE = 0.3


def wide(model_type: str):
    return build_model(model_type, dtype=torch.float64), build_tokenizer(NATURAL_TOKENIZER[model_type])


def keys_of(model, tokenizer, name: str, request) -> torch.Tensor:
    """Inputs of a map at all tokens of prompt and target [T, f]."""
    kept = []
    handle = model.get_submodule(name).register_forward_hook(lambda _m, args, _o: kept.append(args[0][0].detach()))
    prompt, target = split_continuation(tokenizer, request.text, " " + request.target_new)
    model(torch.tensor([prompt + target]))
    handle.remove()
    return kept[0]


def recursion(model, tokenizer, base, steps) -> list[dict[str, torch.Tensor]]:
    """A after every step [d, f] by map: ideal edits on the unedited model, dense P and its plain inverse."""
    written: dict[str, torch.Tensor] = {}
    seen: dict[str, torch.Tensor] = {}
    history = []
    for requests in steps:
        (ideal,) = base.edit(model, tokenizer, requests, joint=len(requests) > 1)
        for parameter, update in ideal.weights().items():
            name = parameter.removesuffix(".weight")
            d_DF = update.T if is_transposed(model.get_submodule(name)) else update
            keys_TF = torch.cat([keys_of(model, tokenizer, name, request) for request in requests])
            width = keys_TF.shape[1]
            p_FF = seen.get(name, RIDGE * torch.eye(width, dtype=torch.float64)) + keys_TF.T @ keys_TF
            a_DF = written.get(name, torch.zeros_like(d_DF))
            written[name] = a_DF + (d_DF - a_DF) @ keys_TF.T @ keys_TF @ torch.linalg.inv(p_FF)
            seen[name] = p_FF
        history.append(dict(written))
    return history


@pytest.mark.parametrize(
    ("base", "settings", "size"),
    [("rome", ROME_CONFIG, 1), ("memit", MEMIT_CONFIG, 2), ("ft_m", {**FT_CONFIG, "train_bias": False}, 2)],
)
@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_a_stream_is_the_recursion(model_type, base, settings, size, tmp_path):
    """Low-rank and dense bases, steps of one and of two; deltas go through the disk as in a resumed run."""
    model, tokenizer = wide(model_type)
    steps = [EDITS[start : start + size] for start in range(0, len(EDITS), size)]
    wanted = recursion(model, tokenizer, load_editor(base, settings), steps)
    # The base is resolved once, on the unedited weights, as a stream does.
    config = {"base": base, "base_settings": settings, "ridge": RIDGE, "joint_steps": "together"}
    editor = load_editor("simie", config)
    history: list[Delta] = []
    for number, requests in enumerate(steps):
        with edited(model, *history):
            (delta,) = editor.edit(model, tokenizer, requests, joint=size > 1, history=history)
        delta.save(tmp_path / f"{number}.safetensors")
        history.append(Delta.load(tmp_path / f"{number}.safetensors"))
        assert delta.is_low_rank and set(delta.factors) == set(wanted[number])
        for name, expected_DF in wanted[number].items():
            total = sum(step.weights()[f"{name}.weight"] for step in history)
            ours_DF = total.T if is_transposed(model.get_submodule(name)) else total
            # W_0 is had back up to rounding, and the base's optimization runs on it: Adam makes more of that.
            assert float((ours_DF - expected_DF).norm() / expected_DF.norm()) < 1e-6, (number, name)


def test_independent_edits_are_first_steps_and_a_small_ridge_keeps_the_ideal_edit():
    """With lambda near 0 the update acts on the edit's own tokens as the ideal edit does."""
    model, tokenizer = wide("llama")
    (ideal,) = load_editor("rome", ROME_CONFIG).edit(model, tokenizer, EDITS[:1])
    editor = load_editor("simie", {"base": "rome", "base_settings": ROME_CONFIG, "ridge": 1e-9})
    ours = editor.edit(model, tokenizer, EDITS)
    (name,) = ours[0].factors
    keys_TF = keys_of(model, tokenizer, name, EDITS[0])
    wanted, found = (keys_TF @ delta.weights()[f"{name}.weight"].T for delta in (ideal, ours[0]))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)
    assert ours[0].diagnostics["simie"]["written_share"][name] == pytest.approx(1, abs=1e-5)
    (alone,) = editor.edit(model, tokenizer, EDITS[1:2])
    torch.testing.assert_close(alone.weights()[f"{name}.weight"], ours[1].weights()[f"{name}.weight"])
    (weak,) = load_editor("simie", {"base": "rome", "base_settings": ROME_CONFIG}).edit(model, tokenizer, EDITS[:1])
    assert 0 < weak.diagnostics["simie"]["written_share"][name] < 0.1


@pytest.mark.parametrize("num_past", [0, 3, 40])
def test_both_systems_solve_the_same(num_past):
    """Fewer keys than dimensions, and more."""
    generator = torch.Generator().manual_seed(0)
    past_SF = torch.randn(num_past, 12, dtype=torch.float64, generator=generator)
    keys_TF = torch.randn(4, 12, dtype=torch.float64, generator=generator)
    p_FF = 0.7 * torch.eye(12, dtype=torch.float64) + past_SF.T @ past_SF + keys_TF.T @ keys_TF
    torch.testing.assert_close(solve_keys(keys_TF, past_SF, 0.7), keys_TF @ torch.linalg.inv(p_FF))


@pytest.mark.parametrize("transposed", [False, True])
def test_dense_updates_of_square_maps_act_in_their_storage_orientation(transposed):
    """The shape of a square update does not show its orientation."""
    generator = torch.Generator().manual_seed(0)
    weight_DF = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    keys_TF = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    delta = Delta(dense={"map.weight": weight_DF.T if transposed else weight_DF})
    torch.testing.assert_close(output_change(delta, "map", transposed, keys_TF), keys_TF @ weight_DF.T)


def test_wrong_use_is_refused():
    model, tokenizer = wide("gpt2")
    with pytest.raises(EditingError, match="ridge"):
        load_editor("simie", {"ridge": 0})
    with pytest.raises(EditingError, match="post-processes"):
        load_editor("simie", {"base": "rect"})
    editor = load_editor("simie", {"base": "ft_m", "base_settings": FT_CONFIG})
    with pytest.raises(EditingError, match=r"c_proj\.bias.*train_bias: false"):
        editor.edit(model, tokenizer, EDITS[:1])
    with pytest.raises(EditingError, match="one editor throughout"):
        editor = load_editor("simie", {"base_settings": ROME_CONFIG})
        editor.edit(model, tokenizer, EDITS[:1], history=[Delta()])
