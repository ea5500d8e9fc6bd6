"""Where things are in a tokenised prompt: subject token, target tokens, and the seam between prompt and target.

Everything is found through character offsets of one encoding of the full text, so it holds whatever the tokenizer
does with BOS, leading spaces and merges. Prompt and target are joined by exactly one space, here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from transformers import PreTrainedTokenizerBase

from edit_hooks.errors import EditingError
from edit_hooks.request import SLOT, EditRequest

FactToken = Literal["subject_last", "subject_first", "subject_first_after_last", "last"]
FACT_TOKENS: tuple[str, ...] = ("subject_last", "subject_first", "subject_first_after_last", "last")
KL_TEMPLATE = "{} is a"


class Encoding(NamedTuple):
    """Token ids of a text, special tokens in front included, with the character span of each (0, 0 for specials)."""

    ids: list[int]
    offsets: list[tuple[int, int]]


@dataclass(frozen=True)
class Row:
    """One training or key sequence of an edit.

    Attributes:
        ids: token ids fed to the model; for rewriting rows the target without its last token is at the end.
        position: index of the fact token, where the value is read and the offset is added.
        labels: (position, token id) pairs: the logits at ``position`` should predict ``token id``.
        prompt_length: number of leading ids that belong to the prompt (context and specials included).
    """

    ids: tuple[int, ...]
    position: int
    labels: tuple[tuple[int, int], ...] = ()
    prompt_length: int = 0


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


def fact_position(encoding: Encoding, span: tuple[int, int], prompt_length: int, fact_token: FactToken) -> int:
    """Index of the token at which an edit reads and writes.

    Args:
        encoding: encoding of a text that contains the prompt.
        span: character span of the subject in that text.
        prompt_length: number of tokens up to the end of the prompt (before any target).
        fact_token: ``subject_last``, ``subject_first``, ``subject_first_after_last`` (the token right after the
            subject; the last subject token if the prompt ends there) or ``last`` (last prompt token).
    """
    inside = [i for i, (start, end) in enumerate(encoding.offsets) if start < span[1] and end > span[0]]
    if not inside:
        raise EditingError("no token of the prompt covers the subject; is it made of characters the tokenizer drops?")
    if fact_token == "last":
        return prompt_length - 1
    if fact_token == "subject_first":
        return inside[0]
    if fact_token == "subject_first_after_last":
        return min(inside[-1] + 1, prompt_length - 1)
    return inside[-1]


def rewriting_row(
    tokenizer: PreTrainedTokenizerBase, request: EditRequest, template: str, fact_token: FactToken = "subject_last"
) -> Row:
    """The sequence ``template(prompt) + " " + target_new`` with the target's tokens as labels (shifted by one).

    Args:
        template: context text with one ``{}`` for the filled prompt, e.g. ``"The train leaves. {}"``.
    """
    before, after = split_template(template)
    text = before + request.text + after
    encoding = encode(tokenizer, join_target(text, request.target_new))
    prompt_length = _first_reaching_past(encoding, len(text.rstrip()))
    target_ids = encoding.ids[prompt_length:]
    if not target_ids:
        raise EditingError(f"target_new {request.target_new!r} has no token of its own after {text!r}.")
    assert request.subject_span is not None
    span = (request.subject_span[0] + len(before), request.subject_span[1] + len(before))
    position = fact_position(encoding, span, prompt_length, fact_token)
    labels = tuple((prompt_length - 1 + i, token) for i, token in enumerate(target_ids))
    return Row(tuple(encoding.ids[:-1]), position, labels, prompt_length)


def kl_row(tokenizer: PreTrainedTokenizerBase, request: EditRequest, fact_token: FactToken = "subject_last") -> Row:
    """The sequence ``"SUBJECT is a"`` whose next-token distribution at the fact token is to be kept."""
    assert request.subject is not None
    before, after = split_template(KL_TEMPLATE)
    encoding = encode(tokenizer, before + request.subject + after)
    span = (len(before), len(before) + len(request.subject))
    position = fact_position(encoding, span, len(encoding.ids), fact_token)
    return Row(tuple(encoding.ids), position, (), len(encoding.ids))


def split_template(template: str) -> tuple[str, str]:
    """Text before and after the slot of a context template.

    Raises:
        EditingError: when there is not exactly one ``{}``.
    """
    parts = template.split(SLOT)
    if len(parts) != 2:
        raise EditingError(f"context template {template!r} has {len(parts) - 1} slots; exactly one {{}} is needed.")
    return parts[0], parts[1]


def require_subjects(requests: Sequence[EditRequest], editor: str) -> None:
    """Refuse requests without a subject on behalf of an editor that locates one."""
    for request in requests:
        if request.subject is None:
            raise EditingError(
                f"editor {editor!r} needs the field 'subject', which is missing in case {request.case_id} "
                f"(prompt {request.prompt!r}); add it to the record or use an editor that needs none (ft_m)."
            )


def _first_reaching_past(encoding: Encoding, length: int) -> int:
    """Index of the first token that reaches past character ``length``; the number of tokens if none does."""
    return next((i for i, (_, end) in enumerate(encoding.offsets) if end > length), len(encoding.ids))
