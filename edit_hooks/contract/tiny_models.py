"""Tiny random-weight models and tokenizers, built in the process: no downloads, milliseconds each.

One model per family on which the tests run every editor, and one tokenizer per way of writing spaces and BOS that
matters to editing. Weights depend on the model type and the seed only, so a test may quote numbers.
"""

from __future__ import annotations

import functools
import json
import warnings
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from edit_hooks.contract.family_configs import FAMILY_CONFIGS, NUM_LAYERS

VOCAB_SIZE = 512
EDIT_LAYER = 1  # one block below it (so something is frozen) and one above (so something reads the edit)

# Sentences of our own. Accents and an emoji make the byte-level pieces split characters.
SENTENCES = (
    "The mother tongue of Elena Marković is Serbian.",
    "The harbour of Port Amelin is located in the north of the island.",
    "What instrument does Tomas Ferrier play? The violin, and sometimes the piano.",
    "The red lighthouse was built by the engineer Ada Quillon in 1871.",
    "Nobody in the village of Brenholt knew where the river began.",
    "The capital of Ostravia is Velm, and its largest city is Karsk.",
    "Mina Okabe was born in Kyoto and works in Lisbon as an architect.",
    "The company Halden & Sons makes clocks, compasses and telescopes.",
    "He speaks English, French, Italian and a little Portuguese.",
    "She wrote the novel in Paris; it was published in London.",
    "The band released a second album in the spring of 2003.",
    "Because of the rain, the train to Velm was two hours late.",
    "I think that the answer is correct, but nobody checked it.",
    "Therefore the bridge was closed for the whole winter.",
    "You can see the mountains from the top of the tower.",
    "The official language of the region is Spanish.",
    "The museum in Karsk shows paintings by João Sá and Zoë Brandt.",
    "A café on the corner sells bread, jam and tea 🍞 every morning.",
    "The headquarters of the bank are in Toronto, Canada.",
    "Water freezes at zero degrees and boils at one hundred.",
    "The trumpet player moved from Rome to Berlin.",
    "Professor Lindqvist teaches physics at the University of Uppsala.",
    "The ship 'Northern Star' sails from Hamburg to Reykjavik.",
    "The opera was first performed in Vienna; the critics loved it.",
)


# --- tokenizers -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenizerKind:
    """How one tokenizer writes text: `adds_bos`: BOS before every encoded text; `marks_spaces`: space inside pieces."""

    name: str
    adds_bos: bool
    has_pad: bool
    style: str


TOKENIZER_TABLE: dict[str, TokenizerKind] = {
    kind.name: kind
    for kind in (
        TokenizerKind("byte_bpe", adds_bos=False, has_pad=False, style="GPT-2: byte-level BPE, no BOS, no pad token"),
        TokenizerKind(
            "byte_bpe_bos", adds_bos=True, has_pad=False, style="Llama-3: byte-level BPE, BOS by post-processor"
        ),
        TokenizerKind(
            "metaspace_bos", adds_bos=True, has_pad=False, style="Llama-2: BPE, '▁' put before the first word"
        ),
        TokenizerKind("unigram_bos", adds_bos=True, has_pad=True, style="Gemma: ' ' becomes '▁', none is put first"),
    )
}
TOKENIZER_KINDS = tuple(TOKENIZER_TABLE)
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def _byte_level(special: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 8,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def _metaspace_bpe(special: list[str]) -> Tokenizer:
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(vocab_size=240, special_tokens=special, show_progress=False)
    trained.train_from_iterator(SENTENCES, trainer)
    learned = json.loads(trained.to_str())["model"]
    order = special + BYTE_TOKENS + [p for p in sorted(learned["vocab"], key=learned["vocab"].get) if p not in special]
    vocabulary = {piece: index for index, piece in enumerate(order)}
    merges = [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in learned["merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def _unigram(special: list[str]) -> Tokenizer:
    # The pieces are those of a BPE training: the unigram trainer gives other ones in every process.
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    trained.train_from_iterator(SENTENCES, trainer)
    ids = trained.get_vocab()
    learned = [(piece, -5 - 0.01 * ids[piece]) for piece in sorted(ids, key=ids.__getitem__) if piece not in special]
    pieces = [(p, 0.0) for p in special] + [(p, -30.0) for p in BYTE_TOKENS] + learned
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=special.index("<unk>"), byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def _add_bos(tokenizer: Tokenizer, bos: str) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )


@functools.cache
def _tokenizer_json(kind: str) -> str:
    if kind == "byte_bpe":
        return _byte_level(["<|endoftext|>"]).to_str()
    if kind == "byte_bpe_bos":
        tokenizer, bos = _byte_level(["<|begin_of_text|>", "<|end_of_text|>"]), "<|begin_of_text|>"
    elif kind == "metaspace_bos":
        tokenizer, bos = _metaspace_bpe(["<unk>", "<s>", "</s>"]), "<s>"
    elif kind == "unigram_bos":
        tokenizer, bos = _unigram(["<pad>", "<eos>", "<bos>", "<unk>"]), "<bos>"
    else:
        raise ValueError(f"unknown tokenizer kind {kind!r}; known: {', '.join(TOKENIZER_KINDS)}")
    _add_bos(tokenizer, bos)
    return tokenizer.to_str()


SPECIAL_TOKENS: dict[str, dict[str, str]] = {
    "byte_bpe": {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"},
    "byte_bpe_bos": {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},
    "metaspace_bos": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "unigram_bos": {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"},
}


def build_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """A fresh tokenizer of one of `TOKENIZER_KINDS`, at most `VOCAB_SIZE` pieces."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_tokenizer_json(kind)),
        model_max_length=128,
        clean_up_tokenization_spaces=False,
        **SPECIAL_TOKENS[kind],
    )


# --- models -----------------------------------------------------------------------------------------------------

_GPT = {"n_positions": 128, "n_embd": 32, "n_layer": NUM_LAYERS, "n_head": 4}
_LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_GEMMA = {**_LLAMA, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "tie_word_embeddings": True}
# The block above the edited one attends to everything, so that an edit far back reaches the end of the prompt.
_MIXED_ATTENTION = ["full_attention", "sliding_attention", "full_attention"]

MODEL_CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {**_GPT, "tie_word_embeddings": True},
    "gptj": {**_GPT, "rotary_dim": 4, "tie_word_embeddings": False},
    "gpt_neox": {
        "hidden_size": 32,
        "intermediate_size": 128,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "rotary_pct": 0.5,
        "use_parallel_residual": True,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
    },
    "llama": {**_LLAMA, "tie_word_embeddings": False},
    "mistral": {**_LLAMA, "sliding_window": 16, "tie_word_embeddings": False},
    "qwen2": {**_LLAMA, "tie_word_embeddings": True},
    "qwen3": {**_LLAMA, "head_dim": 16, "tie_word_embeddings": False},
    "gemma2": {
        **_GEMMA,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "layer_types": _MIXED_ATTENTION,
    },
    "gemma3_text": {**_GEMMA, "layer_types": _MIXED_ATTENTION},
    "phi3": {**_LLAMA, "tie_word_embeddings": False},
    "olmo2": {**_LLAMA, "tie_word_embeddings": False},
}
ALL_MODEL_TYPES = tuple(MODEL_CONFIGS)
# What the family's released checkpoints use; any pairing works.
NATURAL_TOKENIZER = {
    "gpt2": "byte_bpe",
    "gptj": "byte_bpe",
    "gpt_neox": "byte_bpe",
    "llama": "byte_bpe_bos",
    "mistral": "metaspace_bos",
    "qwen2": "byte_bpe",
    "qwen3": "byte_bpe",
    "gemma2": "unigram_bos",
    "gemma3_text": "unigram_bos",
    "phi3": "metaspace_bos",
    "olmo2": "byte_bpe",
}


def natural_tokenizer(model_type: str) -> str:
    """The kind of tokenizer that a tiny model has unless another is named."""
    return NATURAL_TOKENIZER.get(model_type, "byte_bpe")


def build_model(
    model_type: str,
    *,
    tokenizer_kind: str | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **overrides: Any,
) -> PreTrainedModel:
    """A fresh model in eval mode. float32 weights are drawn first and rounded, so both dtypes are the same model."""
    config = _configuration(model_type, tokenizer_kind or natural_tokenizer(model_type), overrides)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _randomize(model, seed)
    return model.to(dtype).eval()


def build_outline(model_type: str) -> PreTrainedModel:
    """A model without weights, on the meta device, for its structure."""
    config = _configuration(model_type, natural_tokenizer(model_type), {})
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _configuration(model_type: str, tokenizer_kind: str, overrides: Mapping[str, Any]) -> PretrainedConfig:
    tokenizer = build_tokenizer(tokenizer_kind)
    shared = {
        "vocab_size": VOCAB_SIZE,
        "initializer_range": 0.2,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    own = {**(MODEL_CONFIGS.get(model_type) or FAMILY_CONFIGS[model_type]), **overrides}
    nested = "text_config" in own  # a model for images, too
    settings = {**own, "text_config": {**shared, **own["text_config"]}} if nested else {**shared, **own}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoConfig.for_model(model_type, **settings)


def build_wider_model(model_type: str) -> PreTrainedModel:
    """A model of the same family whose weights have other shapes."""
    widths = ("n_embd", "hidden_size", "intermediate_size")
    wider: dict[str, Any] = {
        name: value * 3 // 2 for name, value in MODEL_CONFIGS[model_type].items() if name in widths
    }
    return build_model(model_type, **wider)


@torch.no_grad()
def _randomize(model: nn.Module, seed: int) -> None:
    """Draw every parameter from the seed and its own name; norms and biases too, or nothing would notice a lost one."""
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()))
        if parameter.dim() > 1:
            parameter.normal_(0.0, 0.2, generator=generator)
        else:
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


def save_tiny(
    path: Path, model_type: str, tokenizer_kind: str | None = None, dtype: torch.dtype = torch.float32, **overrides: Any
) -> Path:
    """Write model and tokenizer in Hugging Face format under `path` and return the folder, for `pretrained=`."""
    kind = tokenizer_kind or natural_tokenizer(model_type)
    variant = f"-{zlib.crc32(repr(sorted(overrides.items())).encode()):08x}" if overrides else ""
    folder = Path(path) / f"{model_type}-{kind}-{str(dtype).removeprefix('torch.')}{variant}"
    build_model(model_type, tokenizer_kind=kind, dtype=dtype, **overrides).save_pretrained(folder)
    build_tokenizer(kind).save_pretrained(folder)
    return folder


# --- requests ---------------------------------------------------------------------------------------------------

# Different lengths, subjects first / in the middle / near the end, targets of one and several tokens.
REQUESTS: tuple[dict[str, str], ...] = (
    {
        "prompt": "The mother tongue of {} is",
        "subject": "Elena Marković",
        "target_new": "French",
        "target_true": "Serbian",
        "relation_id": "P103",
    },
    {
        "prompt": "{} is located in",
        "subject": "Port Amelin",
        "target_new": "Rome",
        "target_true": "Brenholt",
        "relation_id": "P131",
    },
    {
        "prompt": "What instrument does {} play? The",
        "subject": "Tomas Ferrier",
        "target_new": "trumpet",
        "target_true": "violin",
        "relation_id": "P1303",
    },
    {
        "prompt": "The capital of {}'s north, I think, is",
        "subject": "Ostravia",
        "target_new": "Hamburg",
        "target_true": "Velm",
        "relation_id": "P36",
    },
)
CONTEXT_TEMPLATES = ["{}", "The band released. {}", "Therefore the train. {}", "You can see. {}"]
