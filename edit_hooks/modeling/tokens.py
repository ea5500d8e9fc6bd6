"""Token positions of subject and target.

Positions come from the character offsets of one encoding of the full text, so they do not depend on how a tokenizer
treats BOS, leading spaces and merges.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from edit_hooks.prompt_context import Messages, PromptContext, chat_context
from edit_hooks.utils.errors import EditingError, UnusableRequestError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class Encoding(NamedTuple):
    """Token ids of a text and their character spans.

    Leading special tokens are included; their span is (0, 0). The byte tokens of a character have its span.
    """

    ids: list[int]
    offsets: list[tuple[int, int]]


def require_offsets(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise EditingError for a tokenizer without character offsets."""
    if not tokenizer.is_fast:
        raise EditingError(
            f"{type(tokenizer).__name__} gives no character offsets, so subjects cannot be located; "
            "use the fast tokenizer of this model (use_fast_tokenizer=True)."
        )


def encode(tokenizer: PreTrainedTokenizerBase, text: str, add_special_tokens: bool | None = None) -> Encoding:
    """Encode a text with its leading special tokens, without trailing ones.

    A text that begins with the BOS token, as rendered chat templates do, gets no second one.

    Args:
        add_special_tokens: whether to add special tokens to other texts; by default the tokenizer's own rule.

    Raises:
        EditingError: for tokenizers without character offsets.
    """
    require_offsets(tokenizer)
    if tokenizer.bos_token and text.startswith(tokenizer.bos_token):
        add_special_tokens = False
    specials_added = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
    encoded = tokenizer(text, return_offsets_mapping=True, return_attention_mask=False, verbose=False, **specials_added)
    ids, offsets = list(encoded["input_ids"]), [tuple(span) for span in encoded["offset_mapping"]]
    specials = set(tokenizer.all_special_ids)
    while ids and offsets[-1][0] == offsets[-1][1] and ids[-1] in specials:
        ids.pop(), offsets.pop()
    for start, stop in _shared_spans(offsets):
        span = slice(*offsets[start])
        if spans := _spans_of_bytes(tokenizer, ids[start:stop], text[span]):
            offsets[start:stop] = [(span.start + begin, span.start + end) for begin, end in spans]
    return Encoding(ids, offsets)


def _shared_spans(offsets: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the first and last position, exclusive, of consecutive tokens with one span of several characters."""
    start = 0
    for stop in range(1, len(offsets) + 1):
        if stop == len(offsets) or offsets[stop] != offsets[start]:
            if stop - start > 1 and offsets[start][1] - offsets[start][0] > 1:
                yield start, stop
            start = stop


def _spans_of_bytes(tokenizer: PreTrainedTokenizerBase, ids: list[int], text: str) -> list[tuple[int, int]]:
    """The span in a text of each of its byte tokens: that of the character to which the byte belongs.

    Unigram models give every byte token of a run of unknown characters the span of the run. The bytes are those of the
    text as the tokenizer normalizes it.

    Returns:
        Nothing for other tokens, and for bytes of a text that is not normalized character by character.
    """
    matches = [_BYTE_TOKEN.fullmatch(token) for token in tokenizer.convert_ids_to_tokens(ids)]
    encoded = bytes(int(match[1], 16) for match in matches if match)
    normalizer = tokenizer.backend_tokenizer.normalizer
    normalized = [normalizer.normalize_str(char) for char in text] if normalizer else list(text)
    for characters in (list(text), normalized):
        widths = [len(character.encode(errors="replace")) for character in characters]
        if all(matches) and "".join(characters).encode(errors="replace") == encoded:
            return [(index, index + 1) for index, width in enumerate(widths) for _ in range(width)]
    return []


def split_continuation(
    tokenizer: PreTrainedTokenizerBase, context: str, continuation: str, add_special_tokens: bool | None = None
) -> tuple[list[int], list[int]]:
    """Encode ``context`` and ``continuation`` together and split their token ids at the end of the context.

    A token that reaches into the continuation belongs to it, so a merge across the seam is scored; white space at the
    end of the context with a token of its own belongs to the context.

    Args:
        add_special_tokens: as in :func:`encode`.
    """
    encoding = encode(tokenizer, context + continuation, add_special_tokens)
    start = first_token_past(encoding, len(context))
    return encoding.ids[:start], encoding.ids[start:]


def tokens_in_span(encoding: Encoding, span: tuple[int, int]) -> list[int]:
    """Positions of the tokens that overlap the characters [start, end).

    Raises:
        UnusableRequestError: where several tokens share a span that reaches past the characters.
    """
    for start, stop in _shared_spans(encoding.offsets):
        shared = encoding.offsets[start]
        if any(shared[0] < edge < shared[1] for edge in span):
            raise UnusableRequestError(
                f"the tokenizer gives {stop - start} tokens the characters {shared[0]} to {shared[1]} of the prompt "
                f"together, so those of the subject, {span[0]} to {span[1]}, are not known among them. Spell the text "
                "as the tokenizer normalizes it (NFC, NFKC), or let the subject begin and end at a space."
            )
    return [i for i, (start, end) in enumerate(encoding.offsets) if start < span[1] and end > span[0]]


def first_token_past(encoding: Encoding, length: int) -> int:
    """Position of the first token that ends past character ``length``.

    The number of tokens if none does.
    """
    return next((i for i, (_, end) in enumerate(encoding.offsets) if end > length), len(encoding.ids))


def tokenizer_chat_context(tokenizer: PreTrainedTokenizerBase) -> PromptContext:
    """The context of the tokenizer's chat template, with the prompt as the user's message.

    Raises:
        EditingError: the tokenizer has no chat template.
    """
    require_chat_template(tokenizer)

    def render(messages: Messages, add_generation_prompt: bool) -> str:
        return str(
            tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    return chat_context(render)


def require_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse tokenizers without a chat template."""
    if not tokenizer.chat_template:
        raise EditingError(
            "the tokenizer has no chat template, so edits cannot be made in one. Use an instruct model, or "
            "edit_context=bare or edit_context=qa (editor wise: chat=false)."
        )


def require_eos(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id of the end-of-text token.

    Raises:
        EditingError: the tokenizer has none.
    """
    if not isinstance(tokenizer.eos_token_id, int):
        raise EditingError(
            "append_eos makes the end of the text part of the target, but the tokenizer has no end-of-text token "
            "(eos_token). Set it, or leave append_eos out."
        )
    return tokenizer.eos_token_id
