"""Promises every editor keeps on every model family: it moves what it should, and leaves nothing behind.

A new row in `edit_hooks.base.registry` or in `tests/helpers/tiny.py` is picked up by itself. Settings that make an
editor quick on tiny models go into `SETTINGS`; an editor without a row there runs with its defaults on the edit layer.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from state import assert_same_state, snapshot
from tiny import (
    ALL_MODEL_TYPES,
    ALPHAEDIT_CONFIG,
    BIRD_CONFIG,
    EDIT_LAYER,
    EMMET_CONFIG,
    FT_CONFIG,
    LORA_CONFIG,
    MEMIT_CONFIG,
    MEND_CONFIG,
    NATURAL_TOKENIZER,
    PMET_CONFIG,
    PRUNE_CONFIG,
    RECT_CONFIG,
    REQUESTS,
    ROME_CONFIG,
    SIMIE_CONFIG,
    ULTRAEDIT_CONFIG,
    build_model,
    build_tokenizer,
)

from edit_hooks import Delta, EditingError, EditRequest, PerRowAdapters, edited, load_editor
from edit_hooks.base.registry import EDITORS, editor_class
from edit_hooks.modeling.architectures import ARCHITECTURES
from edit_hooks.modeling.tokens import split_continuation

SETTINGS: dict[str, dict[str, Any]] = {
    "rome": ROME_CONFIG,
    "r_rome": ROME_CONFIG,
    "memit": MEMIT_CONFIG,
    "alphaedit": ALPHAEDIT_CONFIG,
    "emmet": EMMET_CONFIG,
    "bird": BIRD_CONFIG,
    "evk_edit": ALPHAEDIT_CONFIG,
    "pmet": PMET_CONFIG,
    "simie": SIMIE_CONFIG,
    "rect": RECT_CONFIG,
    "prune": PRUNE_CONFIG,
    "ft_m": FT_CONFIG,
    "ultraedit": ULTRAEDIT_CONFIG,
    "ft_l": FT_CONFIG,
    "lora": LORA_CONFIG,
    "mend": MEND_CONFIG,
}
# These add embeddings of answers to MLP outputs, which means nothing to a random model's head.
PROMISES_NO_TARGET = {"kn"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
EDIT_REQUESTS = [EditRequest(**record) for record in REQUESTS]

# Editors of weights; what hooks and contexts promise is in test_hooked_editors.py and test_context_editors.py.
WEIGHT_EDITORS = [name for name in sorted(EDITORS) if editor_class(name).writes == ("weights",)]
each_editor = pytest.mark.parametrize("editor", WEIGHT_EDITORS)
each_model = pytest.mark.parametrize("model_type", ALL_MODEL_TYPES)


@functools.cache
def loaded(model_type: str, dtype: str = "float32"):
    return build_model(model_type, dtype=DTYPES[dtype]), build_tokenizer(NATURAL_TOKENIZER[model_type])


def make(editor: str, **overrides: Any):
    return load_editor(editor, config={**SETTINGS.get(editor, {"layers": [EDIT_LAYER]}), **overrides})


def make_bare(editor: str):
    """The editor on one layer, with the bare prompt as its only context and steps enough to get somewhere."""
    known = {field.name for field in dataclasses.fields(editor_class(editor).config_class)}
    bare: dict[str, Any] = {"layers": [EDIT_LAYER], "context_templates": ["{}"], "num_steps": 25}
    if "base_settings" in known:  # an editor that post-processes another one
        bare["base_settings"] = {**SETTINGS[editor]["base_settings"], **bare}
    return make(editor, **{name: value for name, value in bare.items() if name in known})


@functools.cache
def batch_of_deltas(editor: str, model_type: str, dtype: str = "float32") -> tuple[Delta, ...]:
    """All requests edited independently in one call."""
    return tuple(make(editor).edit(*loaded(model_type, dtype), EDIT_REQUESTS))


@torch.no_grad()
def target_logits(model, tokenizer, request: EditRequest) -> tuple[torch.Tensor, list[int]]:
    """Logits that predict the target's tokens, from a plain forward of prompt and target."""
    prompt, target = split_continuation(tokenizer, request.text, " " + request.target_new)
    logits = model(torch.tensor([prompt + target])).logits[0]
    return logits[len(prompt) - 1 : -1].float(), target


def target_nll(model, tokenizer, request: EditRequest) -> float:
    logits, target = target_logits(model, tokenizer, request)
    return float(torch.nn.functional.cross_entropy(logits, torch.tensor(target)))


def distance(ours: Delta, theirs: Delta) -> float:
    """Largest relative difference of two updates, over parameters."""
    first, second = ours.weights(), theirs.weights()
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).norm() / second[name].norm()) for name in first)


def test_every_family_has_a_tiny_model():
    assert set(ALL_MODEL_TYPES) == set(ARCHITECTURES)


@each_editor
@each_model
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_life_of_an_edit(editor, model_type, dtype, tmp_path):
    """Made, applied, gone again, saved and loaded; one test, because making the edit is what takes the time."""
    model, tokenizer = loaded(model_type, dtype)
    before = snapshot(model, tokenizer)
    deltas = batch_of_deltas(editor, model_type, dtype)
    assert_same_state(before, snapshot(model, tokenizer))
    it_works_inside_and_is_gone_outside(model, tokenizer, deltas)
    everything_is_restored_after_an_exception(model, tokenizer, deltas)
    it_survives_the_disk_bit_for_bit(model, tokenizer, deltas[0], tmp_path)
    the_update_is_what_the_weights_gain(model, deltas[0], SETTINGS.get(editor, {}).get("layers", [EDIT_LAYER]))


def it_works_inside_and_is_gone_outside(model, tokenizer, deltas: tuple[Delta, ...]) -> None:
    """Inside the scope the edited prompt's logits move; applying and leaving an edit changes nothing."""
    before = snapshot(model, tokenizer)
    for request, delta in zip(EDIT_REQUESTS, deltas, strict=True):
        unedited, _ = target_logits(model, tokenizer, request)
        with edited(model, delta):
            inside, _ = target_logits(model, tokenizer, request)
        assert torch.isfinite(inside).all()
        assert (inside - unedited).abs().max() > 1e-2, "the edited prompt's logits did not move"
        again, _ = target_logits(model, tokenizer, request)
        assert torch.equal(again, unedited)
    assert_same_state(before, snapshot(model, tokenizer))


def everything_is_restored_after_an_exception(model, tokenizer, deltas: tuple[Delta, ...]) -> None:
    first, second, *_ = deltas
    before = snapshot(model, tokenizer)
    for error in (RuntimeError, KeyboardInterrupt):
        with pytest.raises(error), edited(model, first), edited(model, second):  # nested scopes unwind in order
            model(torch.tensor([tokenizer("The band")["input_ids"]]))
            raise error
        assert_same_state(before, snapshot(model, tokenizer))


def it_survives_the_disk_bit_for_bit(model, tokenizer, delta: Delta, tmp_path: Path) -> None:
    delta.save(tmp_path / "delta.safetensors")
    again = Delta.load(tmp_path / "delta.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["delta.safetensors"]
    assert again.meta == delta.meta and again.diagnostics == delta.diagnostics
    assert again.weights().keys() == delta.weights().keys()
    for name, update in delta.weights().items():
        assert update.dtype == torch.float32  # also for half models: nothing is rounded before W + update is
        assert torch.equal(again.weights()[name], update), name
    with edited(model, delta):
        ours, _ = target_logits(model, tokenizer, EDIT_REQUESTS[0])
    with edited(model, again):
        theirs, _ = target_logits(model, tokenizer, EDIT_REQUESTS[0])
    assert torch.equal(ours, theirs)


def the_update_is_what_the_weights_gain(model, delta: Delta, layers: list[int]) -> None:
    """Stored orientation, right parameter, nothing else touched; half weights round the sum once, not the update."""
    rewrites = {ARCHITECTURES[model.config.model_type].rewrite_name(layer) for layer in layers}
    assert {name.rpartition(".")[0] for name in delta.weights()} == rewrites
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    expected = {name: (before[name].float() + update).to(model.dtype) for name, update in delta.weights().items()}
    with edited(model, delta):
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, expected.get(name, before[name])), name


@each_editor
@each_model
def test_edits_make_their_targets_likelier(editor, model_type):
    """Mean NLL of the targets under their own edits, float32.

    Over the requests, because a random model's keys are alike: a rank-one update meant for one token moves the others
    too, and single answers may get worse. The bare prompt is the only context, so all key modes aim at the same thing.
    """
    if editor in PROMISES_NO_TARGET:
        pytest.skip("its targets get likelier on trained models only")
    model, tokenizer = loaded(model_type)
    deltas = make_bare(editor).edit(model, tokenizer, EDIT_REQUESTS)
    before = [target_nll(model, tokenizer, request) for request in EDIT_REQUESTS]
    inside = []
    for request, delta in zip(EDIT_REQUESTS, deltas, strict=True):
        with edited(model, delta):
            inside.append(target_nll(model, tokenizer, request))
    assert sum(inside) / len(inside) < sum(before) / len(before) - 0.05, f"{before} -> {inside}"


@each_editor
@each_model
def test_an_interrupted_edit_leaves_the_model_as_it_was(editor, model_type):
    """KeyboardInterrupt while the editor itself works, out of its progress callback and out of a forward."""
    model, tokenizer = loaded(model_type)
    before = snapshot(model, tokenizer)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(editor).edit(model, tokenizer, EDIT_REQUESTS, progress=interrupt)
    assert_same_state(before, snapshot(model, tokenizer))
    handle = model.get_output_embeddings().register_forward_hook(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            make(editor).edit(model, tokenizer, EDIT_REQUESTS)
    finally:
        handle.remove()
    assert_same_state(before, snapshot(model, tokenizer))


@each_editor
@each_model
def test_a_request_alone_equals_the_request_in_a_batch(editor, model_type):
    """Lengths and targets differ, so padding, stops and averages would show. float32 rounding through a dozen Adam
    steps of random models stays below 1e-5; a wrong mean or a leaking pad is above 1e-2."""
    model, tokenizer = loaded(model_type)
    for request, in_batch in zip(EDIT_REQUESTS, batch_of_deltas(editor, model_type), strict=True):
        (alone,) = make(editor).edit(model, tokenizer, [request])
        assert distance(alone, in_batch) < 1e-4


@each_editor
@pytest.mark.parametrize("model_type", ["gpt2", "llama", "gemma3_text"])
def test_neither_order_nor_padding_side_matters(editor, model_type):
    model, _ = loaded(model_type)
    tokenizer = build_tokenizer(NATURAL_TOKENIZER[model_type])
    tokenizer.padding_side = "left"
    backwards = make(editor).edit(model, tokenizer, EDIT_REQUESTS[::-1])
    assert tokenizer.padding_side == "left"
    for ours, theirs in zip(backwards[::-1], batch_of_deltas(editor, model_type), strict=True):
        assert distance(ours, theirs) < 1e-4


@pytest.mark.parametrize("editor", [name for name in WEIGHT_EDITORS if editor_class(name).supports_joint])
@pytest.mark.parametrize("model_type", ["gpt2", "llama", "gemma2"])
def test_a_joint_edit_of_one_request_is_the_single_edit(editor, model_type):
    """And of several it is one delta under which the targets are likelier in the mean."""
    model, tokenizer = loaded(model_type)
    (one,) = make(editor).edit(model, tokenizer, EDIT_REQUESTS[:1], joint=True)
    assert distance(one, batch_of_deltas(editor, model_type)[0]) < 1e-4
    (joint,) = make_bare(editor).edit(model, tokenizer, EDIT_REQUESTS, joint=True)
    before = [target_nll(model, tokenizer, request) for request in EDIT_REQUESTS]
    with edited(model, joint):
        inside = [target_nll(model, tokenizer, request) for request in EDIT_REQUESTS]
    assert sum(inside) / len(inside) < sum(before) / len(before) - 0.01, f"{before} -> {inside}"


@each_model
def test_per_row_adapters_answer_as_the_patched_model(model_type):
    """Prompts of several edits and of none in one right-padded batch: every row as if its weight were patched."""
    model, tokenizer = loaded(model_type)
    low_rank = [name for name in WEIGHT_EDITORS if batch_of_deltas(name, model_type)[0].is_low_rank]
    assert "rome" in low_rank
    deltas = [batch_of_deltas(name, model_type)[i] for i, name in zip(range(len(EDIT_REQUESTS)), low_rank * 4)]  # noqa: B905
    deltas.append(None)
    texts = [*(request.text for request in EDIT_REQUESTS), EDIT_REQUESTS[0].text]
    rows = [tokenizer(text)["input_ids"] for text in texts]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    before = snapshot(model, tokenizer)
    with torch.no_grad(), PerRowAdapters(model, deltas):
        together = model(ids, attention_mask=mask).logits
    assert_same_state(before, snapshot(model, tokenizer))
    for row, delta, logits in zip(rows, deltas, together, strict=True):
        with torch.no_grad(), edited(model, *([delta] if delta is not None else [])):
            alone = model(torch.tensor([row])).logits[0]
        # Tokens of the edited prompt move by whole units; rounding stays below a ten-thousandth of that.
        torch.testing.assert_close(logits[: len(row)], alone, atol=2e-4, rtol=2e-4)


@each_model
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_null_edit_changes_no_answer(model_type, dtype):
    model, tokenizer = loaded(model_type, dtype)
    ids = torch.tensor([tokenizer(EDIT_REQUESTS[0].text)["input_ids"]])
    with torch.no_grad():
        plain = model(ids).logits
        with edited(model):
            assert torch.equal(model(ids).logits, plain)
        with edited(model, Delta()):
            assert torch.equal(model(ids).logits, plain)
        with PerRowAdapters(model, [None]):
            assert torch.equal(model(ids).logits, plain)
        zero = {name: torch.zeros_like(p) for name, p in model.named_parameters() if "mlp" in name}
        with edited(model, Delta(dense=zero)):
            assert torch.equal(model(ids).logits, plain)


@each_editor
def test_stacked_deltas_add_up_and_unwind(editor):
    """Several deltas at one weight: one scope, nested scopes and the sum by hand agree to rounding."""
    model, tokenizer = loaded("llama")
    first, second, *_ = batch_of_deltas(editor, "llama")
    before = snapshot(model, tokenizer)
    name = next(iter(first.weights()))
    weight = dict(model.named_parameters())[name]
    expected = weight.detach() + first.weights()[name] + second.weights()[name]
    with edited(model, first, second):
        torch.testing.assert_close(weight.detach(), expected, atol=1e-6, rtol=1e-5)
    with edited(model, first):
        once = weight.detach().clone()
        with edited(model, second):
            torch.testing.assert_close(weight.detach(), expected, atol=1e-6, rtol=1e-5)
        assert torch.equal(weight, once)
    assert_same_state(before, snapshot(model, tokenizer))


@each_editor
def test_dropout_and_flags_of_a_training_model_do_not_matter(editor):
    """GPT-2 drops out after the MLP in training mode; editors must evaluate, and give mode and flags back."""
    model, tokenizer = build_model("gpt2"), build_tokenizer("byte_bpe")
    model.train()
    model.transformer.h[0].eval()
    for parameter in list(model.parameters())[::2]:
        parameter.requires_grad_(False)
    before = snapshot(model, tokenizer)
    deltas = make(editor).edit(model, tokenizer, EDIT_REQUESTS)
    assert_same_state(before, snapshot(model, tokenizer))
    for ours, theirs in zip(deltas, batch_of_deltas(editor, "gpt2"), strict=True):
        assert distance(ours, theirs) == 0.0


@each_editor
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_editing_works_where_gradients_are_off(editor, guard):
    """The evaluation harness calls models inside no_grad; an editor switches gradients on for itself."""
    model, tokenizer = loaded("llama")
    with guard():
        deltas = make(editor).edit(model, tokenizer, EDIT_REQUESTS[:1])
    assert distance(deltas[0], batch_of_deltas(editor, "llama")[0]) < 1e-4


@each_editor
def test_the_same_seed_repeats_bit_for_bit(editor):
    """Also with default context templates, which are sampled: from the seed, never from the global generator."""
    settings = {k: v for k, v in SETTINGS.get(editor, {}).items() if k != "context_templates"}
    model, tokenizer = loaded("qwen3")
    runs = []
    for global_seed in (1, 2):
        with torch.random.fork_rng():
            torch.manual_seed(global_seed)
            state = torch.get_rng_state()
            runs.append(load_editor(editor, config=settings).edit(model, tokenizer, EDIT_REQUESTS[:1])[0])
            assert torch.equal(torch.get_rng_state(), state)
    assert distance(*runs) == 0.0


@each_editor
def test_wrong_use_is_refused_before_anything_happens(editor):
    model, tokenizer = loaded("llama")
    before = snapshot(model, tokenizer)
    with pytest.raises(EditingError, match="layers"):
        make(editor, layers=[7]).edit(model, tokenizer, EDIT_REQUESTS)
    with pytest.raises(EditingError, match=r"layerz.*Did you mean 'layers'"):
        make(editor, layerz=[1])
    if editor_class(editor).needs_subject:
        with pytest.raises(EditingError, match="subject"):
            make(editor).edit(model, tokenizer, [EditRequest(prompt="Water boils at", target_new="zero", case_id="4")])
    if not editor_class(editor).supports_joint:
        with pytest.raises(EditingError, match="joint"):
            make(editor).edit(model, tokenizer, EDIT_REQUESTS, joint=True)
    assert make(editor).edit(model, tokenizer, []) == []
    assert_same_state(before, snapshot(model, tokenizer))


@each_editor
def test_a_delta_of_another_model_is_refused_before_the_first_write(editor):
    delta = batch_of_deltas(editor, "llama")[0]
    wide = build_model("llama", hidden_size=48)
    for model in (loaded("gpt2")[0], wide):
        before = snapshot(model)
        with pytest.raises(EditingError), edited(model, delta):
            pytest.fail("the scope was entered")
        assert_same_state(before, snapshot(model))


@each_editor
def test_diagnostics_say_what_happened(editor):
    """JSON-able, finite, and the numbers are those of the run."""
    for delta in batch_of_deltas(editor, "gpt2"):
        record = json.loads(json.dumps({"diagnostics": delta.diagnostics, "meta": delta.meta}, allow_nan=False))
        diagnostics = record["diagnostics"]
        assert diagnostics["final_loss"] == diagnostics["losses"][-1]["loss"]
        if editor not in PROMISES_NO_TARGET:
            assert diagnostics["final_loss"] < diagnostics["losses"][0]["loss"]
        assert diagnostics["stop_reason"] in {"loss", "steps"}
        assert 0 < diagnostics["steps"] <= len(diagnostics["losses"])
        assert math.isfinite(diagnostics["update_norm_ratio"]) and diagnostics["update_norm_ratio"] > 0
        assert record["meta"]["editor"] == editor


def test_unknown_editors_and_model_types_are_named():
    with pytest.raises(EditingError, match=r"romme.*Did you mean 'rome'"):
        load_editor("romme")

    class Stranger(torch.nn.Module):
        class config:
            model_type = "gpt2x"
            num_hidden_layers = 2

    from edit_hooks.modeling.architectures import architecture_of

    with pytest.raises(EditingError, match=r"gpt2x.*Did you mean 'gpt2'.*llama"):
        architecture_of(Stranger())
