"""Where things are in a tokenized prompt: subject token, target tokens, and the seam between prompt and target.

Everything is found through character offsets of one encoding of the full text, so it holds whatever the tokenizer
does with BOS, leading spaces and merges. Prompt and target are joined by exactly one space, here and nowhere else.
"""

from __future__ import annotations

from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from edit_hooks.request import SLOT
from edit_hooks.utils.errors import EditingError


class Encoding(NamedTuple):
    """Token ids of a text, special tokens in front included, with the character span of each (0, 0 for specials)."""

    ids: list[int]
    offsets: list[tuple[int, int]]


def join_target(prompt: str, target: str) -> str:
    """Prompt and target joined by exactly one space."""
    return f"{prompt.rstrip()} {target.lstrip()}"


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> Encoding:
    """Encode ``text`` once, with the special tokens the tokenizer puts in front; trailing specials are dropped.

    Raises:
        EditingError: for tokenizers that give no character offsets.
    """
    if not tokenizer.is_fast:
        raise EditingError(
            f"{type(tokenizer).__name__} gives no character offsets, so subjects cannot be located; "
            "use the fast tokenizer of this model (use_fast_tokenizer=True)."
        )
    encoded = tokenizer(text, return_offsets_mapping=True, return_attention_mask=False, verbose=False)
    ids, offsets = list(encoded["input_ids"]), [tuple(span) for span in encoded["offset_mapping"]]
    specials = set(tokenizer.all_special_ids)
    while ids and offsets[-1][0] == offsets[-1][1] and ids[-1] in specials:
        ids.pop(), offsets.pop()
    return Encoding(ids, offsets)


def split_continuation(
    tokenizer: PreTrainedTokenizerBase, context: str, continuation: str
) -> tuple[list[int], list[int]]:
    """Token ids of ``context`` and of ``continuation`` from one encoding of their concatenation.

    A token that reaches into the continuation belongs to it, so a merge over the seam is scored, never lost.
    """
    encoding = encode(tokenizer, context + continuation)
    start = _first_reaching_past(encoding, len(context))
    return encoding.ids[:start], encoding.ids[start:]


def split_template(template: str) -> tuple[str, str]:
    """Text before and after the slot of a context template.

    Raises:
        EditingError: when there is not exactly one ``{}``.
    """
    parts = template.split(SLOT)
    if len(parts) != 2:
        raise EditingError(f"context template {template!r} has {len(parts) - 1} slots; exactly one {{}} is needed.")
    return parts[0], parts[1]


def _first_reaching_past(encoding: Encoding, length: int) -> int:
    """Index of the first token that reaches past character ``length``; the number of tokens if none does."""
    return next((i for i, (_, end) in enumerate(encoding.offsets) if end > length), len(encoding.ids))
