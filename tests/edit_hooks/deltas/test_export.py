"""Edits as LoRA adapters, checkpoints and saved files give the answers they give in place."""

import copy
import json
import math

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from safetensors.torch import load_file
from state import assert_same_state, snapshot
from tiny import ALL_MODEL_TYPES, EDIT_LAYER, NATURAL_TOKENIZER, build_model, build_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from edit_hooks import Delta, EditingError, EditRequest, Factor, edited
from edit_hooks.deltas.export import export_merged, export_peft, read_peft
from edit_hooks.deltas.saved import load_edit, read_deltas, save_edits
from edit_hooks.lm.model import EditedHFLM
from edit_hooks.modeling.architectures import architecture_of, is_transposed, map_shape
from edit_hooks.modeling.fingerprint import model_fingerprint

PROMPTS = [("The capital of Ostravia is", " Velm"), ("He speaks", " English"), ("The trumpet player moved", " from")]
# float32: the adapter adds (x A) B where the edit in place multiplies with W + BA; only the order of sums differs.
TOLERANCE = {"rel_tol": 1e-4, "abs_tol": 1e-4}


def random_delta(model, layers=(EDIT_LAYER,), ranks=(2,), seed=0, scale=0.3):
    generator = torch.Generator().manual_seed(seed)
    architecture = architecture_of(model)
    delta = Delta(meta={"editor": "test"})
    for layer, rank in zip(layers, ranks, strict=True):
        name = architecture.rewrite_name(layer)
        module = model.get_submodule(name)
        width_out, width_in = map_shape(module)
        left, right = (torch.randn(width, rank, generator=generator) * scale for width in (width_out, width_in))
        delta.factors[name] = Factor(left, right, is_transposed(module))
    return delta


def build(model_type, **options):
    """A tiny model whose vocabulary is the tokenizer's: the harness resizes embeddings when it loads an adapter."""
    tokenizer = build_tokenizer(NATURAL_TOKENIZER[model_type])
    return build_model(model_type, vocab_size=len(tokenizer), **options), tokenizer


def save(model, tokenizer, folder):
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def harness_answers(lm):
    scored = lm.loglikelihood([instance(prompt, target) for prompt, target in PROMPTS], disable_tqdm=True)
    settings = {"until": ["\n\n"], "max_gen_toks": 6, "do_sample": False}
    written = lm.generate_until(
        [instance(prompt, dict(settings), "generate_until") for prompt, _ in PROMPTS], disable_tqdm=True
    )
    return scored, written


def instance(context, argument, kind="loglikelihood", doc=None):
    return Instance(request_type=kind, doc=doc or {}, arguments=(context, argument), idx=0, metadata=("test", 0, 1))


def assert_same_answers(first, second):
    for (left, left_greedy), (right, right_greedy) in zip(first[0], second[0], strict=True):
        assert math.isclose(left, right, **TOLERANCE) and left_greedy == right_greedy
    assert first[1] == second[1]


@pytest.mark.parametrize("model_type", ALL_MODEL_TYPES)
def test_a_stock_model_with_the_adapter_answers_as_the_edited_model(model_type, tmp_path):
    model, tokenizer = build(model_type)
    path = save(model, tokenizer, tmp_path / "base")
    delta = random_delta(model, layers=(0, EDIT_LAYER), ranks=(1, 3))
    folder = export_peft(delta, tmp_path / "adapter", base_model=path)
    plain = harness_answers(HFLM(pretrained=path, device="cpu"))
    with_adapter = harness_answers(HFLM(pretrained=path, peft=str(folder), device="cpu"))
    with edited(model, delta):
        in_place = harness_answers(HFLM(pretrained=model, tokenizer=tokenizer))
    assert_same_answers(with_adapter, in_place)
    assert any(abs(one[0] - two[0]) > 1e-2 for one, two in zip(plain[0], in_place[0], strict=True))


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "gemma2"])
def test_the_product_of_the_adapter_is_the_update(model_type, tmp_path):
    model, _ = build(model_type)
    delta = random_delta(model, layers=(0, EDIT_LAYER), ranks=(1, 3))
    folder = export_peft(delta, tmp_path / "adapter")
    tensors = load_file(folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["lora_alpha"] == config["r"] == 3 and config["fan_in_fan_out"] == (model_type == "gpt2")
    for name, factor in delta.factors.items():
        left = tensors[f"base_model.model.{name}.lora_B.weight"]
        right = tensors[f"base_model.model.{name}.lora_A.weight"]
        torch.testing.assert_close(left @ right, factor.left @ factor.right.T, rtol=0, atol=1e-6)
    assert not [path for path in tmp_path.rglob("*") if path.name.endswith(".tmp")]


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_a_stream_with_more_edits_than_the_weight_has_dimensions(model_type, tmp_path):
    model, _ = build(model_type)
    total = Delta.summed([random_delta(model, seed=seed, scale=0.05) for seed in range(30)])
    assert total.rank == 60 > model.config.hidden_size
    back = read_peft(export_peft(total, tmp_path / "adapter"), model)
    assert back.rank == model.config.hidden_size
    for name, update in total.weights().items():
        torch.testing.assert_close(back.weights()[name], update, rtol=0, atol=1e-5)


def test_adapters_of_other_tools_are_read(tmp_path):
    """Against peft itself: an adapter with its own scaling, ranks and alphas per module."""
    peft = pytest.importorskip("peft")
    model, _ = build("llama")
    names = [architecture_of(model).rewrite_name(layer) for layer in (0, 2)]
    config = peft.LoraConfig(
        r=2, lora_alpha=5, target_modules=names, rank_pattern={names[1]: 4}, alpha_pattern={names[1]: 3}
    )
    wrapped = peft.get_peft_model(copy.deepcopy(model), config)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    wrapped.save_pretrained(tmp_path / "adapter")
    merged = wrapped.merge_and_unload()
    with edited(model, read_peft(tmp_path / "adapter", model)):
        for name, weight in model.state_dict().items():
            torch.testing.assert_close(weight, merged.state_dict()[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"use_dora": True}, "use_dora"), ({"bias": "all"}, "bias"), ({"peft_type": "IA3"}, "IA3"), ({"r": None}, "r")],
)
def test_adapters_that_are_more_than_low_rank_updates_are_refused(changes, message, tmp_path):
    model, _ = build("llama")
    folder = export_peft(random_delta(model), tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    config = {name: value for name, value in {**config, **changes}.items() if value is not None}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(EditingError, match=message):
        read_peft(folder, model)


def test_what_no_adapter_can_hold_is_refused_and_leaves_nothing(tmp_path):
    model, _ = build("llama")
    name = architecture_of(model).rewrite_name(EDIT_LAYER)
    dense = Delta(dense={f"{name}.weight": torch.ones_like(model.get_submodule(name).weight)})
    with pytest.raises(EditingError, match="merged"):
        export_peft(dense, tmp_path / "adapter")
    with pytest.raises(EditingError, match="no weight"):
        export_peft(Delta(), tmp_path / "adapter")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    with pytest.raises(EditingError, match="not empty"):
        export_peft(random_delta(model), tmp_path / "full")
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", ["gpt2", "llama", "gemma3_text"])
def test_a_merged_checkpoint_is_the_edited_model(model_type, dtype, tmp_path):
    model, tokenizer = build(model_type, dtype=dtype)
    name = architecture_of(model).rewrite_name(0)
    delta = random_delta(model)
    delta.dense[f"{name}.weight"] = torch.randn(model.get_submodule(name).weight.shape) * 0.1
    before = snapshot(model, tokenizer)
    folder = export_merged(model, tokenizer, delta, tmp_path / "merged")
    assert_same_state(before, snapshot(model, tokenizer))
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.dtype == dtype
    with edited(model, delta):
        assert model_fingerprint(loaded) == model_fingerprint(model)
    if model.config.tie_word_embeddings:
        assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert AutoTokenizer.from_pretrained(folder)("The harbour")["input_ids"] == tokenizer("The harbour")["input_ids"]


# -- saved edits -----------------------------------------------------------------------------------------------------

REQUEST = EditRequest(prompt="{} is the capital of", subject="Ostravia", target_new="Velm")


def edited_lm(path, **options):
    return EditedHFLM(pretrained=path, store="off", device="cpu", **options)


def asked(lm, subject="Ostravia"):
    request = EditRequest(prompt="{} is the capital of", subject=subject, target_new="Velm")
    doc = {"edit_requests": [request.to_dict()], "ask_unedited": True}
    return lm.loglikelihood([instance("The capital of Ostravia is", " Velm", doc=doc)])[0]


@pytest.fixture
def saved(tmp_path):
    """A tiny model's folder, one edit of it as delta file and as adapter, and the model."""
    model, tokenizer = build("llama")
    path = save(model, tokenizer, tmp_path / "base")
    stamp = {"model": model_fingerprint(AutoModelForCausalLM.from_pretrained(path)), "editor": "test"}
    delta = random_delta(model)
    (file,) = save_edits(tmp_path / "edits", [((REQUEST,), delta)], stamp)
    return path, file, export_peft(delta, tmp_path / "adapter"), model, delta


@pytest.mark.parametrize("form", ["file", "folder", "adapter"])
def test_every_question_is_asked_with_the_loaded_edit(saved, form):
    path, file, adapter, model, delta = saved
    source = {"file": file, "folder": file.parent, "adapter": adapter}[form]
    lm = edited_lm(path, load_edit=str(source))
    before = snapshot(lm.model, lm.tokenizer)
    answer = asked(lm)
    (ordinary,) = lm.loglikelihood([instance("The capital of Ostravia is", " Velm")])
    assert_same_state(before, snapshot(lm.model, lm.tokenizer))
    with edited(model, delta):
        (expected, _), *_ = harness_answers(HFLM(pretrained=model, tokenizer=lm.tokenizer))[0]
    assert math.isclose(answer.final.logprob, expected, **TOLERANCE) and math.isclose(
        ordinary[0], expected, **TOLERANCE
    )
    (plain, _), *_ = harness_answers(HFLM(pretrained=model, tokenizer=lm.tokenizer))[0]
    assert math.isclose(answer.final.unedited.logprob, plain, **TOLERANCE) and abs(plain - expected) > 1e-2
    assert answer.edit.editor == "test" and answer.position.edited
    other = asked(lm, "Nowhere")
    assert other.final.logprob == answer.final.logprob and other.edit is None and not other.position.edited
    stamp = lm.get_model_info()["edited_hf"]
    assert stamp["mode"] == "loaded" and stamp["editor"] == "test"
    assert stamp["loaded_edit"]["checksum"] and stamp["load_edit"] == str(source)


def test_a_loaded_edit_is_refused_on_another_model(saved, tmp_path):
    other, tokenizer = build("llama", seed=1)
    path = save(other, tokenizer, tmp_path / "other")
    for source in saved[1:3]:
        with pytest.raises(EditingError, match="another model"):
            asked(edited_lm(path, load_edit=str(source)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "loaded"}, "needs load_edit="),
        ({"mode": "single", "load_edit": "x"}, "no meaning in mode=single"),
        ({"load_edit": "x", "editor_args": {"lr": 0.1}}, "editor_args has no meaning"),
    ],
)
def test_options_that_contradict_a_loaded_edit(saved, options, message):
    with pytest.raises(EditingError, match=message):
        edited_lm(saved[0], **options)


def test_files_that_are_no_edits_are_named(saved, tmp_path):
    path, file, _, model, _ = saved
    with pytest.raises(EditingError, match="cannot read"):
        load_edit(tmp_path / "missing.safetensors", model, "")
    with pytest.raises(EditingError, match="pretrained="):
        load_edit(path, model, "")
    with pytest.raises(EditingError, match="damaged"):
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        (tmp_path / "bad.safetensors").write_bytes(content)
        load_edit(tmp_path / "bad.safetensors", model, "")


def test_steps_of_a_stream_belong_together(saved, tmp_path):
    """Steps are taken from the first one, in order, and add up to the stream."""
    model = saved[3]
    steps = [random_delta(model, seed=seed) for seed in range(3)]
    states = ["unedited", "a", "b", "c"]
    for number, step in enumerate(steps):
        step.meta |= {"description": {"state_before": states[number]}, "state_after": states[number + 1]}
    requests = [(EditRequest(prompt=f"Number {number} is", target_new="Velm"),) for number in range(3)]
    files = save_edits(tmp_path / "stream", list(zip(requests, steps, strict=True)), {"model": "m"})
    total = Delta.summed(read_deltas(files, "m"))
    for name, update in total.weights().items():
        torch.testing.assert_close(update, sum(step.weights()[name] for step in steps))
    back = read_peft(export_peft(total, tmp_path / "whole"), model)
    assert [part["state_after"] for part in back.meta["parts"]] == ["a", "b", "c"]
    for wrong in ([files[1]], [files[1], files[0]], [files[0], files[2]]):
        with pytest.raises(EditingError, match="step of a stream"):
            read_deltas(wrong, "m")
    with pytest.raises(EditingError, match="3 saved edits"):
        load_edit(tmp_path / "stream", model, "m")
