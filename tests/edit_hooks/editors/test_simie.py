"""SimIE against the recursion written out with dense matrices in float64."""

from __future__ import annotations

import pytest
import torch
from editor_settings import FT_CONFIG, MEMIT_CONFIG, ROME_CONFIG

from edit_hooks import Delta, EditingError, EditRequest, edited, load_editor
from edit_hooks.contract.tiny_models import NATURAL_TOKENIZER, REQUESTS, build_model, build_tokenizer
from edit_hooks.deltas.delta import Factor
from edit_hooks.editors import kn
from edit_hooks.editors.simie import STATE_PREFIX, concatenated, output_change, solve_keys
from edit_hooks.lm.editing.stream import EditStream, Guard
from edit_hooks.lm.options.plan import EditPlan, chunked
from edit_hooks.modeling.architectures import architecture_of, is_transposed
from edit_hooks.modeling.fingerprint.identity import model_identity
from edit_hooks.modeling.tokens import split_continuation
from edit_hooks.store.store import Store
from edit_hooks.utils.errors import UnusableRequestError

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


def recursion(model, tokenizer, base, steps, weights: str = "initial") -> list[dict[str, torch.Tensor]]:
    """A after every step [d, f] by map: dense P and its plain inverse, for all maps that the base can edit."""
    names = [architecture_of(model).rewrite_name(layer) for layer in base.default_config(model).edited_layers]
    transposed = is_transposed(model.get_submodule(names[0]))
    identity = torch.eye(keys_of(model, tokenizer, names[0], steps[0][0]).shape[1], dtype=torch.float64)
    seen = dict.fromkeys(names, RIDGE * identity)
    written = {name: torch.zeros(model.config.hidden_size, len(identity), dtype=torch.float64) for name in names}
    history = []
    for requests in steps:
        dense = {f"{name}.weight": a_DF.T if transposed else a_DF for name, a_DF in written.items()}
        with edited(model, Delta(dense=dense if weights == "running" else {})):
            (ideal,) = base.edit(model, tokenizer, requests, joint=len(requests) > 1)
            keys = {
                name: torch.cat([keys_of(model, tokenizer, name, request) for request in requests]) for name in names
            }
        for name, keys_TF in keys.items():
            update = ideal.weights().get(f"{name}.weight", dense[f"{name}.weight"] * 0)
            target_DF = update.T if transposed else update
            if weights == "initial":
                target_DF = target_DF - written[name]
            seen[name] = seen[name] + keys_TF.T @ keys_TF
            written[name] = written[name] + target_DF @ keys_TF.T @ keys_TF @ torch.linalg.inv(seen[name])
        history.append({name: a_DF for name, a_DF in written.items() if a_DF.any()})
    return history


# Edits of different facts touch different blocks: on Llama all three, then one, two, and all again.
KN_CONFIG = {"layers": [0, 1, 2], "threshold": 0.5, "num_steps": 4}


@pytest.mark.parametrize(
    ("base", "settings", "size", "weights"),
    [
        ("rome", ROME_CONFIG, 1, "initial"),
        ("memit", MEMIT_CONFIG, 2, "initial"),
        ("ft_m", {**FT_CONFIG, "train_bias": False}, 2, "initial"),
        ("kn", KN_CONFIG, 1, "initial"),
        ("kn", KN_CONFIG, 1, "running"),
    ],
)
@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_a_stream_is_the_recursion(model_type, base, settings, size, weights, tmp_path):
    """Low-rank and dense bases, steps of one and of two; deltas go through the disk as in a resumed run."""
    model, tokenizer = wide(model_type)
    steps = [EDITS[start : start + size] for start in range(0, len(EDITS), size)]
    wanted = recursion(model, tokenizer, load_editor(base, settings), steps, weights)
    # The base is resolved once, on the unedited weights, as a stream does.
    config = {"base": base, "base_settings": settings, "layers": settings["layers"], "ridge": RIDGE}
    config |= {"joint_steps": "together", "base_weights": weights}
    editor = load_editor("simie", config)
    history: list[Delta] = []
    for number, requests in enumerate(steps):
        with edited(model, *history):
            (delta,) = editor.edit(model, tokenizer, requests, joint=size > 1, history=history)
        delta.save(tmp_path / f"{number}.safetensors")
        history.append(Delta.load(tmp_path / f"{number}.safetensors"))
        assert delta.is_low_rank
        assert {name for step in history for name in step.factors} == set(wanted[number])
        for name, expected_DF in wanted[number].items():
            total = Delta.summed(history).weights()[f"{name}.weight"]
            ours_DF = total.T if is_transposed(model.get_submodule(name)) else total
            # W_0 is had back up to rounding, and the base's optimization runs on it: Adam makes more of that.
            assert float((ours_DF - expected_DF).norm() / expected_DF.norm()) < 1e-6, (number, name)


def test_a_joint_step_joins_edits_of_different_maps():
    model, _ = wide("llama")
    first, second = "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"
    generator = torch.Generator().manual_seed(0)

    def step(*names: str) -> Delta:
        sides = {name: [torch.randn(n, 2, generator=generator) for n in (32, 64)] for name in names}
        keys = {f"{STATE_PREFIX}{name}": torch.randn(2, 64, generator=generator) for name in names}
        return Delta(factors={name: Factor(*pair) for name, pair in sides.items()}, stream_state=keys)

    steps = [step(first), step(second, first), step(second)]
    total = concatenated(model, steps)
    for name, pair in ((first, steps[:2]), (second, steps[1:])):
        torch.testing.assert_close(total.weights()[f"{name}.weight"], Delta.summed(pair).weights()[f"{name}.weight"])
        key = f"{STATE_PREFIX}{name}"
        assert torch.equal(total.stream_state[key], torch.cat([part.stream_state[key] for part in pair]))


def test_an_edit_that_changes_nothing_still_protects_its_keys(monkeypatch, tmp_path):
    """KN selects no unit where no attribution is positive; later steps of a stream have the keys of its text."""
    model, tokenizer = wide("llama")
    config = {"base": "kn", "base_settings": KN_CONFIG, "layers": KN_CONFIG["layers"], "ridge": RIDGE}
    coarse_neurons = kn.coarse_neurons
    selections = iter([lambda *_: [], coarse_neurons])
    monkeypatch.setattr(kn, "coarse_neurons", lambda *scores: next(selections)(*scores))
    identity = model_identity(model, tokenizer)

    def stream(*requests: EditRequest) -> list[Delta]:
        plan = EditPlan(chunked([(request,) for request in requests], 1, cumulative=True), cumulative=True)
        editor, store = load_editor("simie", config), Store(tmp_path)
        made = EditStream(model, tokenizer, editor, plan, store, identity, Guard(), quiet=True)
        made.make()
        return made.deltas

    first, second = stream(*EDITS[:2])
    assert not first.writes and first.diagnostics["update_norm_ratio"] == 0
    assert len(first.stream_state) == 3 and all(len(keys_TF) > 1 for keys_TF in first.stream_state.values())
    monkeypatch.setattr(kn, "coarse_neurons", coarse_neurons)
    (expected,) = load_editor("simie", config).edit(model, tokenizer, EDITS[1:2], history=[first])
    assert second.checksum() == expected.checksum()
    (alone,) = stream(EDITS[1])  # on the same weights, but the store has it for the other stream only
    assert alone.checksum() != second.checksum()


@pytest.mark.parametrize(
    ("base", "settings"),
    [
        ("lora", {"modules": ["query_value"], "num_steps": 2}),
        ("ultraedit", {"modules": {"gate": [1]}, "calibration": []}),
        ("mend", {"modules": ["mlp_in"], "artifact": "identity"}),
    ],
)
def test_keys_are_those_of_the_maps_that_the_base_edits(base, settings):
    model, tokenizer = wide("llama")
    editor = load_editor("simie", {"base": base, "base_settings": settings, "layers": [1]})
    (delta,) = editor.edit(model, tokenizer, EDITS[:1])
    assert {f"{STATE_PREFIX}{name}" for name in delta.factors} == delta.stream_state.keys()
    assert not any("down_proj" in name for name in delta.factors)


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
    with pytest.raises(EditingError, match="itself has another editor as its base"):
        load_editor("simie", {"base": "rect"})
    editor = load_editor("simie", {"base": "ft_m", "base_settings": FT_CONFIG})
    with pytest.raises(EditingError, match=r"c_proj\.bias.*train_bias: false"):
        editor.edit(model, tokenizer, EDITS[:1])
    with pytest.raises(EditingError, match="one editor throughout"):
        editor = load_editor("simie", {"base_settings": ROME_CONFIG})
        editor.edit(model, tokenizer, EDITS[:1], history=[Delta()])


def test_the_last_token_of_the_target_needs_a_position():
    """Keys are read there; the base editor does not run it."""
    model, tokenizer = wide("gpt2")
    limit = model.config.max_position_embeddings
    base = {"base": "ft_m", "base_settings": {**FT_CONFIG, "train_bias": False, "num_steps": 1}}
    for words, fits in ((limit, True), (limit + 1, False)):
        request = EditRequest(prompt="a" + " a" * (words - 2), target_new="a")
        assert len(tokenizer(request.text + request.continuation)["input_ids"]) == words
        assert not load_editor("ft_m").find_unusable(tokenizer, [request], limit)
        editor = load_editor("simie", base)
        if fits:
            editor.edit(model, tokenizer, [request])
        else:
            with pytest.raises(UnusableRequestError, match=f"whole target_new take {words} tokens"):
                editor.edit(model, tokenizer, [request])
