"""TODO: say what is here."""

from __future__ import annotations

import re
import unicodedata

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedTokenizerBase

from edit_hooks.modeling.architectures import head_of, input_device
from edit_hooks.modeling.hooks import frozen, hooks, on_input, select_positions
from edit_hooks.modeling.kv_cache import right_aligned, right_padded, select_rows
from edit_hooks.modeling.tokens import encode

SEED_WORDS = ("The", "Therefore", "Because", "I", "You")


TOP_K = 5


def sample_texts(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, per_word: int, length: int, seed: int
) -> list[str]:
    """Short texts the model writes after the seed words, ``per_word`` for each, ``length`` tokens long."""
    generator = torch.Generator().manual_seed(seed)
    with frozen(model), torch.no_grad():
        return _sample(model, tokenizer, [(word, length) for word in SEED_WORDS for _ in range(per_word)], generator)


def _sample(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    wanted: list[tuple[str, int]],
    generator: torch.Generator,
) -> list[str]:
    """One continuation per (seed word, total length in tokens), all drawn together; no token that ends a text."""
    rows = [list(encode(tokenizer, word).ids) for word, _ in wanted]
    specials = sorted(set(tokenizer.all_special_ids))
    running = [index for index, (_, length) in enumerate(wanted) if len(rows[index]) < length]
    if running:
        decoding = _Decoding(model, [rows[index] for index in running])
    while running:
        for index, token in zip(running, _drawn(decoding.logits_RV, specials, generator), strict=True):
            rows[index].append(token)
        kept = [row for row, index in enumerate(running) if len(rows[index]) < wanted[index][1]]
        running = [running[row] for row in kept]
        if running:
            decoding.step(kept, [rows[index][-1] for index in running])
    return [_clean(tokenizer.decode(row, skip_special_tokens=True)) for row in rows]


class _Decoding:
    """Logits of the next token of every row [R, V], with keys and values kept; one new token per row and step."""

    def __init__(self, model: nn.Module, rows: list[list[int]]) -> None:
        self.model, self.device = model, input_device(model)
        ids_RT, mask_RT = right_padded(rows, self.device)
        self.length_R = mask_RT.sum(1)
        cache = DynamicCache()
        with hooks(on_input(head_of(model), select_positions(torch.arange(len(rows)), self.length_R - 1))):
            output = model(input_ids=ids_RT, attention_mask=mask_RT, past_key_values=cache, use_cache=True)
        self.logits_RV: torch.Tensor = output.logits[0]
        self.cache, self.mask_RT = right_aligned(cache, self.length_R, ids_RT.shape[1])

    def step(self, kept: list[int], tokens: list[int]) -> None:
        """Go on with some of the rows, each longer by its token."""
        if len(kept) < len(self.length_R):
            index = torch.tensor(kept, device=self.device)
            self.cache = select_rows(self.cache, index)
            self.mask_RT, self.length_R = self.mask_RT[index], self.length_R[index]
        self.mask_RT = torch.cat([self.mask_RT, torch.ones_like(self.mask_RT[:, :1])], 1)
        self.logits_RV = self.model(
            input_ids=torch.tensor(tokens, device=self.device)[:, None],
            attention_mask=self.mask_RT,
            position_ids=self.length_R[:, None],
            past_key_values=self.cache,
            use_cache=True,
        ).logits[:, -1]
        self.length_R = self.length_R + 1


def _drawn(logits_RV: torch.Tensor, specials: list[int], generator: torch.Generator) -> list[int]:
    """One token per row, drawn from the renormalized top five."""
    logits_RV = logits_RV.float()
    logits_RV[:, specials] = -torch.inf
    top = logits_RV.topk(TOP_K, dim=1)
    choice = torch.multinomial(top.values.softmax(1).cpu(), 1, generator=generator)
    return top.indices.cpu().gather(1, choice)[:, 0].tolist()


def _clean(text: str) -> str:
    """Compatibility-normalized, on one line, without braces (they would read as slots)."""
    text = unicodedata.normalize("NFKD", text).replace("{", "").replace("}", "")
    return re.sub(r"\s+", " ", text).strip()
