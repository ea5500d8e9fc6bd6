"""Token positions of subject and target, and the seam between prompt and target.

Positions come from the character offsets of one encoding of the full text, so they do not depend on how a tokenizer
treats BOS, leading spaces and merges. Prompt and target are joined by exactly one space, here and nowhere else.
"""

from __future__ import annotations

from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from edit_hooks.request import SLOT
from edit_hooks.utils.errors import EditingError


class Encoding(NamedTuple):
    """Token ids of a text and their character spans.

    Leading special tokens are included; their span is (0, 0).
    """

    ids: list[int]
    offsets: list[tuple[int, int]]


def join_target(prompt: str, target: str) -> str:
    """Join prompt and target by exactly one space."""
    return f"{prompt.rstrip()} {target.lstrip()}"


def require_offsets(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise EditingError for a tokenizer without character offsets."""
    if not tokenizer.is_fast:
        raise EditingError(
            f"{type(tokenizer).__name__} gives no character offsets, so subjects cannot be located; "
            "use the fast tokenizer of this model (use_fast_tokenizer=True)."
        )


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> Encoding:
    """Encode a text with its leading special tokens, without trailing ones.

    Raises:
        EditingError: for tokenizers without character offsets.
    """
    require_offsets(tokenizer)
    encoded = tokenizer(text, return_offsets_mapping=True, return_attention_mask=False, verbose=False)
    ids, offsets = list(encoded["input_ids"]), [tuple(span) for span in encoded["offset_mapping"]]
    specials = set(tokenizer.all_special_ids)
    while ids and offsets[-1][0] == offsets[-1][1] and ids[-1] in specials:
        ids.pop(), offsets.pop()
    return Encoding(ids, offsets)


def split_continuation(
    tokenizer: PreTrainedTokenizerBase, context: str, continuation: str
) -> tuple[list[int], list[int]]:
    """Encode ``context`` and ``continuation`` together and split their token ids.

    A token that reaches into the continuation belongs to it, so a merge across the seam is scored.
    """
    encoding = encode(tokenizer, context + continuation)
    start = first_token_past(encoding, len(context))
    return encoding.ids[:start], encoding.ids[start:]


def split_template(template: str) -> tuple[str, str]:
    """Split a context template into the text before and after its slot.

    Raises:
        EditingError: unless there is exactly one ``{}``.
    """
    parts = template.split(SLOT)
    if len(parts) != 2:
        raise EditingError(f"context template {template!r} has {len(parts) - 1} slots; exactly one {{}} is needed.")
    return parts[0], parts[1]


def tokens_in_span(encoding: Encoding, span: tuple[int, int]) -> list[int]:
    """Positions of the tokens that overlap the characters [start, end)."""
    return [i for i, (start, end) in enumerate(encoding.offsets) if start < span[1] and end > span[0]]


def first_token_past(encoding: Encoding, length: int) -> int:
    """Position of the first token that ends past character ``length``.

    The number of tokens if none does.
    """
    return next((i for i, (_, end) in enumerate(encoding.offsets) if end > length), len(encoding.ids))
