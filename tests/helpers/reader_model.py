"""A tiny model that works as a judge: it replies A to an answer that ends in "!", and B to one that ends in "?"."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from edit_hooks.contract.tiny_models import build_model, build_tokenizer, save_tiny

# The bare conversation, so that the last token of the prompt is the last character of the answer.
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
PROMPT = "---\nquoting: raw\n---\n{question} {gold}\n{answer}"


def save_reader(folder: Path) -> Path:
    """Save the judge."""
    tokenizer = build_tokenizer("byte_bpe_bos")
    ids = {mark: tokenizer(mark, add_special_tokens=False).input_ids[-1] for mark in "!?AB"}
    end = int(tokenizer.eos_token_id)
    return save_chain(folder, {ids["!"]: ids["A"], ids["?"]: ids["B"], ids["A"]: end, ids["B"]: end})


def save_chain(folder: Path, next_token: Mapping[int, int]) -> Path:
    """Save a llama without attention and MLP updates: the last token alone determines the next one."""
    folder = save_tiny(folder, "llama", "byte_bpe_bos", max_position_embeddings=2048)
    tokenizer = build_tokenizer("byte_bpe_bos")
    model = build_model("llama", tokenizer_kind="byte_bpe_bos", max_position_embeddings=2048)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1.0)
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        embedding.zero_()
        head.zero_()
        for dimension, (token, successor) in enumerate(next_token.items()):
            embedding[token, dimension] = 1.0
            head[successor, dimension] = 1.0
    model.save_pretrained(folder)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.model_max_length = 2048
    tokenizer.save_pretrained(folder)
    return folder
