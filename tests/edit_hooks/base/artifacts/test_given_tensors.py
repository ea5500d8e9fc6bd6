"""Starting points and noise that are given in the place of a draw: used as they are, recorded by checksum, checked."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_architectures import ARCHITECTURES

from edit_hooks import Delta, EditingError, load_editor
from edit_hooks.base.registry import editor_class
from edit_hooks.contract.subject import EDIT_REQUESTS, contract_settings
from edit_hooks.contract.tiny_models import EDIT_LAYER, build_model, build_tokenizer
from edit_hooks.editors.defer import predictor_shapes
from edit_hooks.editors.lora import LoRAConfig, adapter_shapes
from edit_hooks.locate.tracing.causal_trace import TraceSettings, trace_facts
from edit_hooks.modeling.tokens import encode, tokens_in_span
from edit_hooks.utils.errors import UnusableRequestError

STILL = {"num_steps": 1, "lr": 1e-12}  # what is trained stays where it started, but for the last bits
ARCH = ARCHITECTURES["gpt2"]
REWRITE, MLP_IN = ARCH.rewrite_name(EDIT_LAYER), ARCH.module_names("mlp_in", EDIT_LAYER)[0]


@pytest.fixture(scope="module")
def loaded():
    return build_model("gpt2"), build_tokenizer("byte_bpe")


def drawn(shapes: dict[str, Any]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {name: torch.rand(tuple(shape), generator=generator) for name, shape in shapes.items()}


def given_for(editor: str, model: Any) -> tuple[str, dict[str, torch.Tensor], dict[str, Any]]:
    """The setting, tensors that fit it, and further settings."""
    if editor in ("lora", "adalora"):
        settings = {"kind": editor, "modules": ["mlp_in"], "rank": 2, "initial_rank": 3, "dropout": 0.0}
        shapes = adapter_shapes(model, [MLP_IN], LoRAConfig(**settings))
        return "initial_adapters", drawn(shapes), settings
    if editor == "defer":
        return "initial_predictor", drawn(predictor_shapes(model.get_submodule(REWRITE))), {}
    width = model.get_submodule(REWRITE).weight.shape[1]
    return "initial_values", drawn({"values": (2, width)}), {}


def edit(editor: str, loaded: Any, history: list[Delta], **settings: Any) -> Delta:
    name = "lora" if editor == "adalora" else editor
    made = load_editor(name, {**contract_settings(editor_class(name)), **STILL, **settings})
    return made.edit(*loaded, [EDIT_REQUESTS[len(history)]], history=history)[0]


def start_of(editor: str, delta: Delta) -> dict[str, torch.Tensor]:
    """What the edit started from, in the names of the setting."""
    if editor in ("lora", "adalora"):
        return {name.removeprefix("adapter/").replace("/", ".", 1): t for name, t in delta.stream_state.items()}
    assert delta.hook_edit is not None
    return dict(delta.hook_edit.tensors)


@pytest.mark.parametrize("from_file", [False, True])
@pytest.mark.parametrize("editor", ["lora", "adalora", "defer", "grace"])
def test_an_edit_starts_from_the_given_tensors(editor, from_file, loaded, tmp_path):
    setting, tensors, settings = given_for(editor, loaded[0])
    path = tmp_path / "start.safetensors"
    save_file({**tensors, "elsewhere": torch.zeros(1)}, path)
    settings[setting] = str(path) if from_file else tensors
    first = edit(editor, loaded, [], **settings)
    start = start_of(editor, first)
    for name, tensor in tensors.items():
        wanted = tensor[:1] if editor == "grace" else tensor
        torch.testing.assert_close(start[name], wanted, atol=1e-6, rtol=0)
    assert first.meta["config"][setting].keys() == tensors.keys()
    assert all(set(recorded) == {"shape", "dtype", "sha256"} for recorded in first.meta["config"][setting].values())
    other = edit(editor, loaded, [], **settings, seed=7)
    assert all(torch.equal(tensor, start[name]) for name, tensor in start_of(editor, other).items())


def test_values_of_a_stream_are_taken_in_order(loaded):
    setting, tensors, _ = given_for("grace", loaded[0])
    history: list[Delta] = []
    for number in range(2):
        history.append(edit("grace", loaded, history, **{setting: tensors}))
        assert history[-1].hook_edit is not None
        value_D = history[-1].hook_edit.tensors["values"][-1]
        torch.testing.assert_close(value_D, tensors["values"][number], atol=1e-6, rtol=0)
    with pytest.raises(EditingError, match="'initial_values' has 2 values, and this is edit 3 of its stream"):
        edit("grace", loaded, history, **{setting: tensors})
    with pytest.raises(EditingError, match="'initial_values' and 'value_init' are both given"):
        load_editor("grace", {setting: tensors, "value_init": "warm"})


@pytest.mark.parametrize("editor", ["lora", "adalora", "defer", "grace"])
def test_tensors_that_do_not_fit_are_refused_before_the_weights_are_loaded(editor, loaded, tmp_path):
    outline = copy.deepcopy(loaded[0]).to("meta")
    setting, tensors, settings = given_for(editor, loaded[0])
    (tmp_path / "text.safetensors").write_text("no tensors", encoding="utf-8")
    name, chosen = "lora" if editor == "adalora" else editor, {**settings}
    first = next(iter(tensors))
    whole = tensors[first]
    for given, message in (
        ({}, f"'{setting}' has no tensor for {first}; it has none"),
        ({**tensors, first: whole[None]}, "a floating-point"),
        ({**tensors, first: whole.long()}, "torch.int64"),
        ({**tensors, first: whole / 0}, f"'{setting}' of {first} holds NaN or infinity"),
        (str(tmp_path / "text.safetensors"), "cannot be read"),
        (str(tmp_path / "missing.safetensors"), "missing.safetensors"),
    ):
        made = load_editor(name, {**contract_settings(editor_class(name)), **chosen, setting: given})
        with pytest.raises(EditingError, match=message):
            made.check_settings(outline)


# ------------------------------------------------------------------ noise


def evk_settings(**changes: Any) -> dict[str, Any]:
    return {**contract_settings(editor_class("rome")), "evk_align": True, "evk_instances": 2, **changes}


def test_given_noise_of_evk_align_is_the_prompts_own(loaded):
    model, tokenizer = build_model("gpt2", dtype=torch.float64), loaded[1]
    width = model.get_input_embeddings().weight.shape[1]
    noise = drawn({r.text: (2, len(encode(tokenizer, r.text).ids), width) for r in EDIT_REQUESTS[:2]})
    editor = load_editor("rome", evk_settings(evk_noise=noise))
    together = editor.edit(model, tokenizer, EDIT_REQUESTS[:2])
    for request, delta in zip(EDIT_REQUESTS, together, strict=False):
        (alone,) = load_editor("rome", evk_settings(evk_noise={request.text: noise[request.text]}, seed=3)).edit(
            model, tokenizer, [request]
        )
        terms = [one.diagnostics["losses"][-1]["evk"] for one in (delta, alone)]
        assert terms[0] == pytest.approx(terms[1], rel=1e-8)
        assert alone.diagnostics["losses"][-1]["evk"] > 0
    with pytest.raises(UnusableRequestError, match=re.escape(f"no tensor for {EDIT_REQUESTS[2].text}")):
        editor.edit(model, tokenizer, EDIT_REQUESTS[:3])
    few = load_editor("rome", evk_settings(evk_noise={name: tensor[:1] for name, tensor in noise.items()}))
    with pytest.raises(UnusableRequestError, match=r"a floating-point \[2, \d+, \d+\] is needed"):
        few.edit(model, tokenizer, EDIT_REQUESTS[:1])
    small = load_editor("rome", evk_settings(evk_noise={name: 1e-6 * tensor for name, tensor in noise.items()}))
    with pytest.raises(UnusableRequestError, match="give larger noise in evk_noise"):
        small.edit(model, tokenizer, EDIT_REQUESTS[:1])
    with pytest.raises(EditingError, match="'evk_noise' and 'evk_sigma' are both given"):
        load_editor("rome", evk_settings(evk_noise=noise, evk_sigma=0.3))


def test_given_noise_of_a_trace_takes_the_place_of_draws(loaded, tmp_path):
    model, tokenizer = loaded
    width = model.get_input_embeddings().weight.shape[1]
    settings = TraceSettings(samples=2, answer="predicted")
    requests = EDIT_REQUESTS[:2]
    subjects = {
        r.text: (2, len(tokens_in_span(encode(tokenizer, r.text), r.subject_span or (0, 0))), width) for r in requests
    }
    noise = drawn(subjects)
    save_file(noise, tmp_path / "noise.safetensors")
    traces = [
        trace_facts(model, tokenizer, requests, settings, noise=given, quiet=True)
        for given in (noise, str(tmp_path / "noise.safetensors"), {name: 2 * t for name, t in noise.items()}, None)
    ]
    assert traces[0] == traces[1] and traces[0].noise_std is None and traces[0].settings["seed"] is None
    assert len({trace.corrupted for trace in traces[1:]}) == 3 and traces[3].settings["seed"] == 0
    with pytest.raises(EditingError, match="'noise' has no tensor for"):
        trace_facts(model, tokenizer, EDIT_REQUESTS[:3], settings, noise=noise, quiet=True)
    with pytest.raises(EditingError, match=r"a floating-point \[3, "):
        trace_facts(model, tokenizer, requests, TraceSettings(samples=3, answer="predicted"), noise=noise, quiet=True)
