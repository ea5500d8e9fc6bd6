"""Quantized weights: every editor either edits beside them, as on a dequantized copy, or refuses before any work."""

from __future__ import annotations

import contextlib
import json
import shutil

import pytest
import torch
from lm_runs import answers, assert_same_answers, build, run
from mend_runs import trainer
from quantized_models import (
    FAST,
    ON_PROMPTS,
    OTHERS,
    SCHEMES,
    dequantized,
    editor_of,
    forbidden_forward,
    quantized,
    require_bitsandbytes,
    tokenizer_of,
)
from safetensors.torch import load_file, save_file

from edit_hooks import edited, load_editor
from edit_hooks.base.registry import EDITORS
from edit_hooks.contract.state import snapshot, tensor_digest
from edit_hooks.contract.subject import EDIT_REQUESTS
from edit_hooks.contract.tiny_models import save_tiny
from edit_hooks.deltas.apply import AppliedDeltas
from edit_hooks.deltas.delta import Delta
from edit_hooks.deltas.saving.export import export_merged, export_peft, read_peft
from edit_hooks.inference.items import Limits, ScoreItem
from edit_hooks.inference.scoring import score
from edit_hooks.modeling.fingerprint.guard import changes
from edit_hooks.modeling.forward.lm_head import ModelHead
from edit_hooks.modeling.linear_maps import is_quantized
from edit_hooks.modeling.weights import has_quantized_weights, keep_layout, read_weight
from edit_hooks.utils.errors import EditingError

IDS = torch.arange(20, 44).view(2, 12)


@pytest.fixture(scope="module", autouse=True)
def _bitsandbytes():
    require_bitsandbytes()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """(quantized model, dequantized copy) by family and scheme, each made once."""
    root, made = tmp_path_factory.mktemp("quantized"), {}

    def get(model_type, scheme):
        if (model_type, scheme) not in made:
            model = quantized(root, model_type, scheme)
            made[model_type, scheme] = model, dequantized(root, model_type, model)
        return made[model_type, scheme]

    return get


def state_of(model):
    return {name: tensor_digest(tensor) for name, tensor in model.state_dict().items()}


@torch.no_grad()
def logits(model):
    return model(IDS).logits


def relative(ours, theirs):
    return float((ours - theirs).norm() / theirs.norm())


def as_stored(update, like):
    """An update of a quantized map (never transposed) in the orientation of a float copy's weight."""
    return update if update.shape == like.shape else update.T


@contextlib.contextmanager
def written(copy, delta):
    """The dense update in the weights of the float copy."""
    before = {name: copy.get_parameter(name).detach().clone() for name in delta.parameter_names}
    with torch.no_grad():
        for name, update in delta.weights().items():
            weight = copy.get_parameter(name)
            weight += as_stored(update, weight)
        yield
        for name, original in before.items():
            copy.get_parameter(name).copy_(original)


# -- every editor ------------------------------------------------------------------------------------------------------


def cases():
    for name in EDITORS:
        yield pytest.param(name, "llama", "nf4")
        is_quick = name in ("r_rome", "rect", "lora", "wise", "ft_m")
        yield pytest.param(name, "llama", "int8", marks=() if is_quick else pytest.mark.slow)
    for name in ("r_rome", "lora", "ft_l"):
        yield pytest.param(name, "gpt2", "fp4")  # Conv1D before it is quantized
    for name in ("r_rome", "rect", "kn", "wise", "ft_m"):
        yield pytest.param(name, "llama", "codes")
    yield pytest.param("r_rome", "llama", "online")
    for scheme in sorted(OTHERS.keys() - {"codes", "online"}):
        yield pytest.param("memit", "llama", scheme)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("name", "model_type", "scheme"), list(cases()))
def test_every_editor_edits_beside_quantized_weights_or_refuses(name, model_type, scheme, models):
    model, copy = models(model_type, scheme)
    tokenizer, request = tokenizer_of(model_type), [EDIT_REQUESTS[0]]
    before, stored = snapshot(model, tokenizer), state_of(model)
    if not editor_of(name).edits_quantized:
        with forbidden_forward(model), pytest.raises(EditingError, match="quantized"):
            editor_of(name).edit(model, tokenizer, request)
        return
    (delta,) = editor_of(name).edit(model, tokenizer, request)
    assert state_of(model) == stored and not changes(before, snapshot(model, tokenizer))
    if name in ON_PROMPTS:
        assert delta.writes == ["context"]
        return
    if scheme != "int8":  # the copy computes the same, and so the same edit is made of it
        (theirs,) = editor_of(name).edit(copy, tokenizer, request)
        assert_same_edit(delta, theirs)
    with edited(model, delta, prompt_lengths=IDS.shape[1]):
        ours = logits(model)
    assert state_of(model) == stored and not changes(before, snapshot(model, tokenizer))
    if delta.parameter_names:
        unedited = logits(model)
        with written(copy, delta):
            # 8 bit: activations are quantized too. The error without any edit is the measure, doubled for the share of
            # the edited activations.
            tolerance = 2 * relative(unedited, logits_without(copy, delta)) if scheme == "int8" else 1e-5
            assert relative(ours, logits(copy)) < tolerance
        assert relative(ours, unedited) > 1e-3
    rows = [(ScoreItem((20, 21, 22, 23), (24, 25)), edit) for edit in (delta, None)]
    per_row = score(model, rows, Limits(), lambda count: None)
    patched = []
    with AppliedDeltas(model) as applied:
        applied.add(delta)
        patched += score(model, [(rows[0][0], applied.runtime_part)], Limits(), lambda count: None)
    patched += score(model, rows[1:], Limits(), lambda count: None)
    for left, right in zip(per_row, patched, strict=True):  # 8 bit: outliers are found per batch of rows
        assert left.logprob == pytest.approx(right.logprob, rel=0.05 if scheme == "int8" else 1e-4)


def logits_without(copy, delta):
    """Logits of the copy without the update that :func:`written` has added."""
    negated = Delta(dense={name: -update for name, update in delta.weights().items()})
    with written(copy, negated):
        return logits(copy)


def assert_same_edit(ours, theirs):
    theirs_of = theirs.weights()
    assert ours.weights().keys() == theirs_of.keys()
    for name, update in ours.weights().items():
        assert relative(update, as_stored(theirs_of[name], update)) < 1e-3
    assert (ours.hook_edit is None) == (theirs.hook_edit is None)
    if ours.hook_edit is not None:
        assert ours.hook_edit.settings == theirs.hook_edit.settings or "shape" not in ours.hook_edit.settings
        for name, tensor in ours.hook_edit.tensors.items():
            if tensor.is_floating_point():
                assert relative(tensor, theirs.hook_edit.tensors[name]) < 1e-3


def test_editors_that_train_the_weight_itself_do_not_claim_the_capability():
    for name in ("ft_m", "ft_l"):
        assert not load_editor(name).edits_quantized and not load_editor("rect", {"base": name}).edits_quantized
    assert sum(editor_of(name).edits_quantized for name in EDITORS) > 15


def test_weights_are_trained_where_their_module_is_not_quantized(tmp_path):
    model = quantized(tmp_path, "llama", "nf4", llm_int8_skip_modules=["model.layers.1.mlp.down_proj"])
    tokenizer = tokenizer_of("llama")
    assert not is_quantized(model.get_submodule("model.layers.1.mlp.down_proj"))
    (delta,) = editor_of("ft_m").edit(model, tokenizer, [EDIT_REQUESTS[0]])
    stored = state_of(model)
    (theirs,) = editor_of("ft_m").edit(dequantized(tmp_path, "llama", model), tokenizer, [EDIT_REQUESTS[0]])
    assert_same_edit(delta, theirs)
    with edited(model, delta):
        assert state_of(model) != stored
    assert state_of(model) == stored


def test_a_quantized_head_has_the_whole_vocabulary(tmp_path):
    """Its packed weight has another number of rows."""
    model = quantized(tmp_path, "llama", "nf4", llm_int8_skip_modules=["none"])
    assert is_quantized(model.lm_head) and ModelHead(model).vocab_size == model.config.vocab_size
    (delta,) = editor_of("memit").edit(model, tokenizer_of("llama"), [EDIT_REQUESTS[0]])
    (theirs,) = editor_of("memit").edit(dequantized(tmp_path, "llama", model), tokenizer_of("llama"), EDIT_REQUESTS[:1])
    assert_same_edit(delta, theirs)


# -- deltas ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["alphaedit", "prune", "simie", "lora"])
def test_streams_accumulate_beside_the_weight(name, models):
    """Each step sees the edits before it, as on the float copy; many steps become one dense map."""
    model, copy = models("llama", "nf4")
    tokenizer, stored = tokenizer_of("llama"), state_of(model)
    results = []
    for target in (model, copy):
        editor, steps = editor_of(name), []
        with AppliedDeltas(target) as applied:
            for request in EDIT_REQUESTS[:3]:
                joint = editor.supports_joint
                steps += editor.edit(target, tokenizer, [request], joint=joint, history=steps)
                applied.add(steps[-1])
            results.append((steps, logits(target), applied.norm_ratio(), applied.state()))
    (ours, our_logits, our_ratio, state), (theirs, their_logits, their_ratio, _) = results
    assert state_of(model) == stored and state != "unedited"
    for left, right in zip(ours, theirs, strict=True):
        assert_same_edit(left, right)
    assert relative(our_logits, their_logits) < 1e-3
    assert our_ratio == pytest.approx(their_ratio, rel=1e-3)


def test_states_of_a_stream_are_distinct_and_repeat(models):
    model, _ = models("llama", "nf4")
    deltas = [editor_of("r_rome").edit(model, tokenizer_of("llama"), [request])[0] for request in EDIT_REQUESTS[:2]]
    many = [*deltas] * 30  # more ranks than the map has rows
    runs = []
    for _ in range(2):
        with AppliedDeltas(model) as applied:
            states = [applied.state()]
            for delta in many:
                applied.add(delta)
                states.append(applied.state())
            weight = read_weight(model.get_submodule("model.layers.1.mlp.down_proj"))
            runs.append((states, logits(model)))
    assert runs[0][0] == runs[1][0] and len(set(runs[0][0])) == len(many) + 1
    assert torch.equal(runs[0][1], runs[1][1])
    total = sum(delta.weights()["model.layers.1.mlp.down_proj.weight"] for delta in many)
    assert torch.allclose(weight, read_weight(model.get_submodule("model.layers.1.mlp.down_proj")) + total, atol=1e-4)


def test_hooks_on_a_module_see_its_edited_output(models):
    """As they do with a written weight, also if they were registered before the edit was applied."""
    model, _ = models("llama", "nf4")
    (delta,) = editor_of("r_rome").edit(model, tokenizer_of("llama"), [EDIT_REQUESTS[0]])
    module, seen = model.get_submodule("model.layers.1.mlp.down_proj"), []
    handle = module.register_forward_hook(lambda _module, args, output: seen.append((args[0], output)))
    try:
        with edited(model, delta):
            logits(model)
            weight = read_weight(module)
    finally:
        handle.remove()
    ((x, output),) = seen
    assert relative(output, x @ weight.T) < 1e-5


def test_saved_and_exported_edits_of_quantized_weights(models, tmp_path):
    peft = pytest.importorskip("peft")
    model, _ = models("llama", "nf4")
    (delta,) = editor_of("r_rome").edit(model, tokenizer_of("llama"), [EDIT_REQUESTS[0]])
    with edited(model, delta):
        expected = logits(model)
    delta.save(tmp_path / "edit.safetensors")
    export_peft(delta, tmp_path / "adapter")
    for loaded in (Delta.load(tmp_path / "edit.safetensors"), read_peft(tmp_path / "adapter", model)):
        with edited(model, loaded):
            assert relative(logits(model), expected) < 1e-6
    with pytest.raises(EditingError, match="quantized weights"):
        export_merged(model, tokenizer_of("llama"), delta, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    wrapped = peft.PeftModel.from_pretrained(model, tmp_path / "adapter")
    try:
        assert relative(logits(wrapped), expected) < 1e-5
        with edited(wrapped, delta):  # beside the base layer, under the adapter: the update twice
            twice = logits(wrapped)
        with edited(wrapped.unload(), delta, delta):
            assert relative(twice, logits(model)) < 1e-5
    finally:
        wrapped.unload()


# -- the harness -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("plain"), "llama"))


def test_runs_of_the_harness_agree_for_every_way_to_answer(folder, tmp_path):
    lm = build(folder, load_in_4bit=True, bnb_4bit_quant_type="nf4")
    expected = answers(run(lm, ["bake_es"], limit=2))
    stored = state_of(lm.model)
    for options in ({"answer": "patch"}, {"engine": "reference"}):
        other = build(folder, load_in_4bit=True, bnb_4bit_quant_type="nf4", **options)
        assert_same_answers(expected, answers(run(other, ["bake_es"], limit=2)))
        assert state_of(other.model) == stored
    lm.model.save_pretrained(tmp_path / "stored")
    lm.tokenizer.save_pretrained(tmp_path / "stored")
    stored_checkpoint = build(str(tmp_path / "stored"))
    assert_same_answers(expected, answers(run(stored_checkpoint, ["bake_es"], limit=2)))
    with pytest.raises(EditingError, match="quantized already"):
        build(str(tmp_path / "stored"), load_in_4bit=True)
    with pytest.raises(EditingError, match="quantized"):
        build(str(tmp_path / "stored"), editor="ft_l", editor_args={})


@pytest.mark.parametrize(
    "scheme", ["nf4", pytest.param("fp4", marks=pytest.mark.slow), pytest.param("int8", marks=pytest.mark.slow)]
)
def test_streams_in_the_harness(folder, tmp_path, scheme):
    options = {**SCHEMES[scheme], "editor": "memit", "mode": "sequential"}
    source = tmp_path / "edits.jsonl"
    source.write_text("".join(json.dumps(request.to_dict()) + "\n" for request in EDIT_REQUESTS[:2]))
    settings = {**FAST, "layers": [0, 1], "second_moments": None}
    lm = build(folder, tmp_path, edits=str(source), editor_args=settings, **options)
    first = answers(run(lm, ["bake_es"], limit=2))
    stored = state_of(lm.model)
    again = build(folder, tmp_path, edits=str(source), editor_args=settings, **options)  # from the store
    assert_same_answers(first, answers(run(again, ["bake_es"], limit=2)))
    assert state_of(again.model) == stored
    assert lm.stream_state() == again.stream_state() not in (None, "unedited")


def test_a_checkpoint_in_8_bit_floats_is_loaded_with_plain_weights(folder, tmp_path):
    """As those of DeepSeek and Qwen: codes and a scale per block, which transformers can multiply out."""
    stored, wanted = shutil.copytree(folder, tmp_path / "fp8"), {}
    tensors = load_file(stored / "model.safetensors")
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        blocks_RrCc = tensors[name].unflatten(1, (-1, 16)).unflatten(0, (-1, 16))
        scale_RC = blocks_RrCc.abs().amax((1, 3)) / 448
        codes_RrCc = (blocks_RrCc / scale_RC[:, None, :, None]).to(torch.float8_e4m3fn)
        wanted[name] = (codes_RrCc.float() * scale_RC[:, None, :, None]).flatten(2).flatten(0, 1)
        tensors |= {name: codes_RrCc.flatten(2).flatten(0, 1), f"{name}_scale_inv": scale_RC}
    save_file(tensors, stored / "model.safetensors", {"format": "pt"})
    config = json.loads((stored / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "weight_block_size": [16, 16],
        "activation_scheme": "dynamic",
    }
    (stored / "config.json").write_text(json.dumps(config))
    options = {"editor": "ft_m", "editor_args": {"layers": [1], "num_steps": 2}}
    with pytest.raises(EditingError, match=r"ft_m.*dequantize=True"):
        build(str(stored), **options)
    lm = build(str(stored), dequantize=True, **options)
    assert len(answers(run(lm, ["bake_es"], limit=1))) and not has_quantized_weights(lm.model)
    for name, weight in wanted.items():
        assert relative(lm.model.get_parameter(name).float(), weight) < 0.01
    with pytest.raises(EditingError, match="load_in_4bit: the weights are quantized or plain"):
        build(str(stored), dequantize=True, load_in_4bit=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"load_in_4bit": True, "editor": "ft_m"}, "ft_m.*quantized"),
        ({"load_in_8bit": True, "editor": "rect", "editor_args": {"base": "ft_m"}}, "rect.*quantized"),
        ({"load_in_8bit": True, "load_in_4bit": True}, "only one"),
        ({"bnb_4bit_quant_type": "nf4"}, "no meaning"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf5"}, "nf5.*nf4, fp4"),
        ({"dequantize": True}, "not quantized; drop it"),
    ],
)
def test_runs_that_cannot_work_fail_in_the_constructor(folder, options, message):
    with pytest.raises(EditingError, match=message):
        build(folder, **{"editor_args": {}, **options})


def test_skipped_modules_are_named_by_the_user(folder):
    lm = build(
        folder,
        load_in_4bit=True,
        llm_int8_skip_modules="lm_head;model.layers.1.mlp.down_proj",
        editor="ft_m",
        editor_args={"layers": [1], "num_steps": 2},
    )
    assert len(answers(run(lm, ["bake_es"], limit=1)))
    refused = build(folder, load_in_4bit=True, llm_int8_skip_modules="lm_head", editor="ft_m", editor_args={})
    with pytest.raises(EditingError, match="down_proj is quantized"):
        run(refused, ["bake_es"], limit=1)


def test_repacking_for_the_cpu_is_switched_off(folder, tmp_path):
    """It rounds the scales in place, and the repacked weights have no gradient."""
    lm = build(folder, load_in_4bit=True)
    linear = lm.model.get_submodule("model.layers.1.mlp.down_proj")
    assert linear.support_avx512bf16_for_cpu is False
    linear.weight.quant_state.packing_format_for_cpu = True
    for action in (keep_layout, lambda model: load_editor("r_rome").edit(model, lm.tokenizer, [EDIT_REQUESTS[0]])):
        with pytest.raises(EditingError, match="repacked"):
            action(lm.model)


# -- training ----------------------------------------------------------------------------------------------------------


def test_mend_is_trained_on_a_quantized_model(models, tmp_path):
    model, _ = models("llama", "nf4")
    stored = state_of(model)
    progress = trainer(model, tokenizer_of("llama"), tmp_path / "mend", num_steps=4, validate_every=4).run()
    assert progress.step == 4 and progress.skipped == 0 and state_of(model) == stored
    editor = load_editor("mend", {"artifact": str(tmp_path / "mend")})
    (delta,) = editor.edit(model, tokenizer_of("llama"), [EDIT_REQUESTS[0]])
    assert delta.parameter_names
