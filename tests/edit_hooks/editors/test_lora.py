"""LoRA: the numbers of a plain training loop with peft, streams that continue one adapter, nothing left behind."""

from __future__ import annotations

import copy

import pytest
import torch
from state import assert_same_state
from tiny_architectures import ARCHITECTURES
from torch.nn.functional import cross_entropy

from edit_hooks import Delta, EditingError, EditRequest, edited, load_editor
from edit_hooks.contract.state import snapshot
from edit_hooks.contract.tiny_models import ALL_MODEL_TYPES, EDIT_LAYER, NATURAL_TOKENIZER, REQUESTS, build_model
from edit_hooks.editors.lora import LoRAConfig, LoRAFactors, initial_adapters
from edit_hooks.gradient.stepping.dropout import Dropout
from edit_hooks.modeling.architectures import ROLES
from edit_hooks.modeling.tokens import split_continuation

peft = pytest.importorskip("peft")
EDIT_REQUESTS = [EditRequest(**record) for record in REQUESTS]
KINDS = ("lora", "adalora")


def settings(kind="lora", **changes):
    return {"kind": kind, "layers": [0, EDIT_LAYER], "num_steps": 4, "lr": 5e-3, "dropout": 0.0, **changes}


def released_loop(model, tokenizer, request, kind, config):
    """The frameworks' loop: get_peft_model, labels -100 on the prompt, Adam; returns losses and final updates."""
    prompt, target = split_continuation(tokenizer, request.text, f" {request.target_new}")
    ids, labels = torch.tensor([prompt + target]), torch.tensor([[-100] * len(prompt) + target])
    arch = ARCHITECTURES[model.config.model_type]
    names = [name for layer in config["layers"] for name in arch.module_names("query_value", layer)]
    shared = {"target_modules": names, "lora_alpha": config["alpha"], "lora_dropout": 0.0, "task_type": "CAUSAL_LM"}
    shared["fan_in_fan_out"] = model.config.model_type == "gpt2"
    if kind == "lora":
        chosen = peft.LoraConfig(r=8, **shared)
    else:
        chosen = peft.AdaLoraConfig(init_r=12, total_step=9, orth_reg_weight=config["orthogonality"], **shared)
    copied = copy.deepcopy(model)
    # The model's own loss is computed in float32.
    copied.loss_function = lambda logits, labels, **_: cross_entropy(logits[0, :-1], labels[0, 1:])
    with torch.random.fork_rng():
        wrapped = peft.get_peft_model(copied, chosen).double()
        set_adapters(wrapped.base_model.model, initial_adapters(model, names, LoRAConfig(**config)))
        # peft leaves the count of AdaLoRA's ranks trainable as well; it is no weight.
        trained = [p for name, p in wrapped.named_parameters() if p.requires_grad and "ranknum" not in name]
        optimizer = torch.optim.Adam(trained, lr=config["lr"])
        for _ in range(config["num_steps"]):
            loss = wrapped(input_ids=ids, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return {
        f"{name}.weight": wrapped.base_model.model.get_submodule(name).get_delta_weight("default").detach()
        for name in names
    }


def set_adapters(model, adapters):
    """Start peft's layers, which come with draws of the global generator, from given adapters."""
    for name, adapter in adapters.items():
        layer = model.get_submodule(name)
        for part, value in adapter._asdict().items():
            if value is not None:
                parameter = peft_parameter(layer, part)
                assert parameter.shape == value.shape
                parameter.data.copy_(value)


def peft_parameter(layer, part):
    """A, B or E of peft's layer."""
    held = getattr(layer, f"lora_{part}")["default"]
    return getattr(held, "weight", held)


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_are_drawn_from_the_distributions_of_peft(kind):
    """Standard deviations and zeros as in peft's layers; another seed draws others, and no module repeats another's."""
    model = build_model("llama")
    names = [name for layer in (0, 1) for name in ARCHITECTURES["llama"].module_names("query_value", layer)]
    shared = {"target_modules": names, "lora_alpha": 32}
    chosen = (
        peft.LoraConfig(r=64, **shared) if kind == "lora" else peft.AdaLoraConfig(init_r=64, total_step=9, **shared)
    )
    ours, other = (
        initial_adapters(model, names, LoRAConfig(**settings(kind, rank=64, initial_rank=64, seed=seed)))
        for seed in (0, 1)
    )
    with torch.random.fork_rng():
        wrapped = peft.get_peft_model(copy.deepcopy(model), chosen).base_model.model
    for name in names:
        layer = wrapped.get_submodule(name)
        for part in ("A", "B", "E"):
            tensor = getattr(ours[name], part)
            if tensor is None:
                continue
            theirs = peft_parameter(layer, part).detach()
            assert theirs.shape == tensor.shape
            assert float(tensor.std()) == pytest.approx(float(theirs.std()), rel=0.1)
            assert float(tensor.abs().max()) == pytest.approx(float(theirs.abs().max()), rel=0.4)
            assert not torch.equal(tensor, getattr(other[name], part)) or not tensor.any()
    assert len({float(adapter.A.sum()) for adapter in ours.values()}) == len(names)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("model_type", "alpha", "orthogonality"),
    [("gpt2", 32.0, 0.5), ("llama", 32.0, 0.5), ("gpt_neox", 32.0, 0.5), ("llama", 7.0, 2.0)],
)
def test_updates_are_those_of_a_plain_loop_with_peft(
    model_type, alpha, orthogonality, kind, tiny_model, tiny_tokenizer
):
    """Also AdaLoRA's penalty, which peft adds to the loss inside its own forward."""
    model, tokenizer = tiny_model(model_type, dtype=torch.float64), tiny_tokenizer(NATURAL_TOKENIZER[model_type])
    config = settings(kind, alpha=alpha, orthogonality=orthogonality)
    before = snapshot(model, tokenizer)
    (delta,) = load_editor("lora", config).edit(model, tokenizer, EDIT_REQUESTS[:1])
    assert_same_state(before, snapshot(model, tokenizer))
    expected = released_loop(model, tokenizer, EDIT_REQUESTS[0], kind, config)
    assert delta.weights().keys() == expected.keys()
    for name, update in delta.weights().items():
        torch.testing.assert_close(update, expected[name], atol=1e-8, rtol=1e-8)
        assert float(update.abs().max()) > 1e-4
    assert delta.rank == (8 if kind == "lora" else 12) and delta.is_low_rank


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_type", ALL_MODEL_TYPES)
def test_every_linear_map_of_every_family_can_be_adapted(model_type, kind, tiny_model, tiny_tokenizer):
    model, tokenizer = tiny_model(model_type), tiny_tokenizer(NATURAL_TOKENIZER[model_type])
    before = snapshot(model, tokenizer)
    config = settings(kind, modules=list(ROLES), layers=[EDIT_LAYER], dropout=0.1)
    (delta,) = load_editor("lora", config).edit(model, tokenizer, EDIT_REQUESTS, joint=True)
    assert_same_state(before, snapshot(model, tokenizer))
    arch = ARCHITECTURES[model_type]
    assert set(delta.factors) == {name for role in ROLES for name in arch.module_names(role, EDIT_LAYER)}
    assert delta.diagnostics["final_loss"] < delta.diagnostics["initial_nll"]
    ids = torch.tensor([tokenizer(EDIT_REQUESTS[0].text)["input_ids"]])
    with torch.no_grad():
        unedited = model(ids).logits
        with edited(model, delta):
            once, twice = model(ids).logits, model(ids).logits
        assert torch.equal(once, twice) and not torch.equal(once, unedited)  # no dropout in answering
        assert torch.equal(model(ids).logits, unedited)


def test_all_blocks_are_adapted_by_default(tiny_model, tiny_tokenizer):
    model = tiny_model("llama")
    (delta,) = load_editor("lora", {"num_steps": 1}).edit(model, tiny_tokenizer("byte_bpe_bos"), EDIT_REQUESTS[:1])
    projections = [f"model.layers.{n}.self_attn.{p}_proj" for n in range(model.config.num_hidden_layers) for p in "qv"]
    assert sorted(delta.factors) == sorted(projections)


@pytest.mark.parametrize("kind", KINDS)
def test_stream_continues_to_train_one_adapter(kind, tiny_model, tiny_tokenizer, tmp_path):
    """The deltas add up to the last adapter; each step starts where the last one ended, from disk as from memory."""
    model, tokenizer = tiny_model("llama", dtype=torch.float64), tiny_tokenizer("byte_bpe_bos")
    editor = load_editor("lora", settings(kind))
    history, losses = [], []
    before = snapshot(model, tokenizer)
    for request in EDIT_REQUESTS[:3]:
        with edited(model, *history):
            (delta,) = editor.edit(model, tokenizer, [request], history=history)
            prompt, target = split_continuation(tokenizer, request.text, f" {request.target_new}")
            with torch.no_grad():
                logprob = model(torch.tensor([prompt + target])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            losses.append(-float(logprob[torch.arange(len(target)), target].mean()))
        assert delta.diagnostics["initial_nll"] == pytest.approx(losses[-1], abs=1e-8)
        delta.save(tmp_path / "step.safetensors")
        history.append(Delta.load(tmp_path / "step.safetensors"))
    assert_same_state(before, snapshot(model, tokenizer))
    config = LoRAConfig(**settings(kind))
    total = Delta.summed(history).weights()
    for name in total:
        kept = history[-1].stream_state
        parts = (kept.get(f"adapter/{part}/{name.removesuffix('.weight')}") for part in LoRAFactors._fields)
        torch.testing.assert_close(
            total[name], LoRAFactors(*parts).factor(config, False).update(), atol=1e-8, rtol=1e-8
        )
    with pytest.raises(EditingError, match="one editor"):
        editor.edit(model, tokenizer, EDIT_REQUESTS[:1], history=[Delta()])


def test_dropout_keeps_its_share_and_the_mean():
    """A row's padding is zero: it has no mask of its own."""
    ones = torch.ones(2, 200, 64)
    for lengths, width in (([None], 200), ([150, 200], 150)):
        dropped = Dropout(0.2, torch.device("cpu"), 0, 0, lengths)(ones)
        kept = dropped[:, :width]
        torch.testing.assert_close(kept[kept != 0].unique(), torch.tensor([1 / 0.8]))
        assert float((kept != 0).float().mean()) == pytest.approx(0.8, abs=0.01)
        assert not dropped[0, width:].any()


def test_dropout_acts_while_training_only(tiny_model, tiny_tokenizer):
    model, tokenizer = tiny_model("llama"), tiny_tokenizer("byte_bpe_bos")
    with_dropout, without, other_seed = (
        load_editor("lora", settings(dropout=dropout, seed=seed)).edit(model, tokenizer, EDIT_REQUESTS[:1])[0]
        for dropout, seed in ((0.5, 0), (0.0, 0), (0.5, 1))
    )
    assert len({with_dropout.checksum(), without.checksum(), other_seed.checksum()}) == 3
    request = EDIT_REQUESTS[0]
    prompt, target = split_continuation(tokenizer, request.text, f" {request.target_new}")
    with torch.no_grad(), edited(model, with_dropout):
        logprob = model(torch.tensor([prompt + target])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    nll = -float(logprob[torch.arange(len(target)), target].mean())
    assert with_dropout.diagnostics["final_loss"] == pytest.approx(nll, abs=1e-4)  # the last one is without dropout


def test_wrong_use_is_refused_before_training(tiny_tokenizer):
    model = build_model("llama")
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["q_proj"]), model)
    with pytest.raises(EditingError, match="carries an adapter already"):
        load_editor("lora", settings()).edit(model, tiny_tokenizer("byte_bpe_bos"), EDIT_REQUESTS[:1])
    for wrong in (
        {"rank": 0},
        {"dropout": 1.0},
        {"modules": []},
        {"modules": ["q_proj"]},
        {"modules": ["rewrite"] * 2},
    ):
        with pytest.raises(EditingError):
            load_editor("lora", wrong)
    with pytest.raises(EditingError, match="'modules' names 'rewrite' more than once"):
        load_editor("lora", {"modules": ["rewrite", "mlp_in", "rewrite"]})
