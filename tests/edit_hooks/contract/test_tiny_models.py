"""The tiny models and tokenizers have the properties that the other tests rely on."""

from __future__ import annotations

import pytest
import torch
from state import assert_same_state
from transformers import AutoModelForCausalLM, AutoTokenizer

from edit_hooks.contract.state import snapshot
from edit_hooks.contract.tiny_models import (
    ALL_MODEL_TYPES,
    NATURAL_TOKENIZER,
    REQUESTS,
    SENTENCES,
    TOKENIZER_KINDS,
    TOKENIZER_TABLE,
    VOCAB_SIZE,
    build_model,
)

# transformers builds the mask, torch the kernel: which families survive left padding is a matter of both versions.
# Rows: (prompt, prompt) of different lengths; position ids are passed, as generate() does.
PROMPTS = (SENTENCES[0], "She wrote", SENTENCES[6])


def _padded(tokenizer, side):
    """Ids, mask and position ids of PROMPTS padded on one side; the pad id is 0 because it must not matter."""
    rows = [tokenizer(text)["input_ids"] for text in PROMPTS]
    width = max(map(len, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        where = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
        ids[i, where], mask[i, where] = torch.tensor(row), 1
    return rows, ids, mask, (mask.cumsum(-1) - 1).clamp(min=0)


def _worst_against_single(model, rows, logits, mask):
    worst = 0.0
    for i, row in enumerate(rows):
        alone = model(torch.tensor([row])).logits[0]
        worst = max(worst, (logits[i][mask[i].bool()] - alone).abs().max().item())
    return worst


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("attention", ["default", "eager"])  # the default is SDPA except for GPT-J and Gemma 2
@pytest.mark.parametrize("model_type", ALL_MODEL_TYPES)
@torch.no_grad()
def test_padding_does_not_change_a_row(model_type, attention, side, tiny_tokenizer, record_property):
    """Every real position finite, and equal to the row run alone (trap: NaN rows under left padding with SDPA)."""
    model = build_model(model_type, **({"attn_implementation": "eager"} if attention == "eager" else {}))
    rows, ids, mask, positions = _padded(tiny_tokenizer(NATURAL_TOKENIZER[model_type]), side)
    logits = model(ids, attention_mask=mask, position_ids=positions).logits
    finite = [bool(torch.isfinite(logits[i][mask[i].bool()]).all()) for i in range(len(rows))]
    worst = _worst_against_single(model, rows, logits, mask)
    record_property("finite_rows", sum(finite))
    record_property("pad_positions_finite", bool(torch.isfinite(logits).all()))
    print(f"{model_type} ({model.config._attn_implementation}, {side}): finite {finite}, worst difference {worst:.1e}")
    assert all(finite)
    assert worst < 2e-5


@pytest.mark.parametrize("model_type", ALL_MODEL_TYPES)
def test_models_are_reproducible_and_discriminate(model_type, tiny_tokenizer):
    """Same seed, same bytes; another seed, other logits; bfloat16 is the same model rounded."""
    first, second, other = build_model(model_type), build_model(model_type), build_model(model_type, seed=1)
    half = build_model(model_type, dtype=torch.bfloat16)
    ids = tiny_tokenizer(NATURAL_TOKENIZER[model_type])(SENTENCES[0], return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = first(ids).logits
        assert torch.equal(logits, second(ids).logits)
        assert (logits - other(ids).logits).abs().max() > 0.1
    assert logits.shape[-1] == VOCAB_SIZE
    assert logits[0, -1].std() > 0.5
    for (name, full), (_, rounded) in zip(first.named_parameters(), half.named_parameters(), strict=True):
        assert torch.equal(full.to(torch.bfloat16), rounded), name


def test_families_differ_in_what_editors_depend_on():
    """Orientation, ties, head bias, grouped queries, post-norms: the traps a row of the architecture table can hide."""
    models = {model_type: build_model(model_type) for model_type in ALL_MODEL_TYPES}
    assert models["gpt2"].transformer.h[0].mlp.c_proj.weight.shape == (128, 32)  # Conv1D: [in, out]
    assert models["llama"].model.layers[0].mlp.down_proj.weight.shape == (32, 64)
    assert models["gptj"].lm_head.bias is not None and models["gptj"].lm_head.bias.abs().max() > 0
    tied = {name for name, m in models.items() if m.get_output_embeddings().weight is m.get_input_embeddings().weight}
    assert tied == {"gpt2", "qwen2", "gemma2", "gemma3_text"}
    assert hasattr(models["phi3"].model.layers[0].mlp, "gate_up_proj")
    assert hasattr(models["olmo2"].model.layers[0], "post_feedforward_layernorm")
    assert models["gemma2"].config.final_logit_softcapping == 30.0


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
def test_tokenizers_round_trip_and_add_bos_once(kind, tiny_tokenizer):
    tokenizer = tiny_tokenizer(kind)
    assert len(tokenizer) <= VOCAB_SIZE
    assert (tokenizer.pad_token is not None) == TOKENIZER_TABLE[kind].has_pad
    for text in (*SENTENCES, "braces {0} {}", "Ω unseen ☃ signs"):
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=True).lstrip(" ") == text
        assert ids.count(tokenizer.bos_token_id) == int(TOKENIZER_TABLE[kind].adds_bos)


@pytest.mark.parametrize("model_type", ALL_MODEL_TYPES)
def test_saved_models_load_back(model_type, tiny_path, tiny_tokenizer):
    """What `pretrained=` sees is the model that was built, with the tokenizer that was built."""
    kind = NATURAL_TOKENIZER[model_type]
    path = tiny_path(model_type, kind)
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path).eval()
    expected = tiny_tokenizer(kind)(SENTENCES[0])["input_ids"]
    assert tokenizer(SENTENCES[0])["input_ids"] == expected
    with torch.no_grad():
        ids = torch.tensor([expected])
        assert torch.equal(model(ids).logits, build_model(model_type)(ids).logits)


def test_requests_have_different_lengths_and_targets(tiny_tokenizer):
    """The contract tests edit these together; equal lengths would hide padding mistakes."""
    tokenizer = tiny_tokenizer("byte_bpe")
    prompts = [len(tokenizer(r["prompt"].replace("{}", r["subject"]))["input_ids"]) for r in REQUESTS]
    targets = [len(tokenizer(" " + r["target_new"])["input_ids"]) for r in REQUESTS]
    assert len(set(prompts)) == len(prompts)
    assert min(targets) != max(targets)


def _hook(model, tokenizer):
    model.model.layers[0].register_forward_hook(lambda *_: None)


def _override(model, tokenizer):
    model.model.forward = model.model.forward


def _one_bit(model, tokenizer):
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] *= 1 + 2**-23


def _padding(model, tokenizer):
    tokenizer.padding_side = "left"


def _frozen(model, tokenizer):
    model.model.norm.weight.requires_grad_(False)


def _cache(model, tokenizer):
    model.config.use_cache = not model.config.use_cache


def _train(model, tokenizer):
    model.model.layers[1].train()


def _swap(model, tokenizer):
    model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight.detach().clone())


def _draw(model, tokenizer):
    torch.rand(1)


@pytest.mark.parametrize("change", [_hook, _override, _one_bit, _padding, _frozen, _cache, _train, _swap, _draw])
def test_the_snapshot_detects(change):
    """A photograph that misses a change would make every contract test worthless."""
    from edit_hooks.contract.tiny_models import build_tokenizer

    model, tokenizer = build_model("llama"), build_tokenizer("byte_bpe_bos")
    before = snapshot(model, tokenizer)
    assert_same_state(before, snapshot(model, tokenizer))
    change(model, tokenizer)
    with pytest.raises(AssertionError, match="differ"):
        assert_same_state(before, snapshot(model, tokenizer))
