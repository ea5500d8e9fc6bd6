"""Token sequences of an edit, and the token at which it reads and writes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from transformers import PreTrainedTokenizerBase

from edit_hooks.modeling.tokens import Encoding, encode, first_token_past, require_eos, tokens_in_span
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import UnusableRequestError
from edit_hooks.utils.text.slots import split_template

FactToken = Literal["subject_last", "subject_first", "subject_first_after_last", "last"]


KL_TEMPLATE = "{} is a"


@dataclass(frozen=True)
class TokenRow:
    """One token sequence of an edit.

    Attributes:
        ids: token ids fed to the model; a rewriting row ends before its last label.
        position: index of the fact token, where the value is read and the offset is added.
        labels: (position, token id) pairs: the logits at ``position`` should predict ``token id``.
        prompt_length: number of leading ids that belong to the prompt (context and special tokens included).
        held: (position, offset [d]) pairs: offsets at the site that stay, at positions before the fact token.
    """

    ids: tuple[int, ...]
    position: int
    labels: tuple[tuple[int, int], ...] = ()
    prompt_length: int = 0
    held: tuple[tuple[int, torch.Tensor], ...] = field(default=(), compare=False)


def fact_position(encoding: Encoding, span: tuple[int, int], prompt_length: int, fact_token: FactToken) -> int:
    """Index of the token at which an edit reads and writes.

    Args:
        encoding: encoding of a text that contains the prompt.
        span: character span of the subject in that text.
        prompt_length: number of tokens up to the end of the prompt (before any target).
        fact_token: ``subject_last``, ``subject_first``, ``subject_first_after_last`` (the token right after the
            subject; the last subject token if the prompt ends there) or ``last`` (last prompt token).

    Raises:
        EditingError: when no token covers the subject.
    """
    subject = tokens_in_span(encoding, span)
    if not subject:
        raise UnusableRequestError(
            "no token of the prompt covers the subject; is it made of characters the tokenizer drops?"
        )
    if fact_token == "last":
        return prompt_length - 1
    if fact_token == "subject_first":
        return subject[0]
    if fact_token == "subject_first_after_last":
        return min(subject[-1] + 1, prompt_length - 1)
    return subject[-1]


def rewriting_row(
    tokenizer: PreTrainedTokenizerBase,
    request: EditRequest,
    template: str,
    fact_token: FactToken = "subject_last",
    *,
    append_eos: bool = False,
) -> TokenRow:
    """Encode the prompt in a template, continued by ``target_new``, with the target as labels.

    Labels are shifted by one: each target token is predicted from those before it.

    Args:
        template: context text with one ``{}`` for the filled prompt, e.g. ``"The train leaves. {}"``; inside the
            request's own context.
        append_eos: the end-of-text token is one more target token.

    Raises:
        EditingError: when the target or the subject has no token of its own, and the tokenizer none for the end.
    """
    placed = request.in_template(template)
    encoding = encode(tokenizer, placed.text + placed.continuation)
    prompt_length = first_token_past(encoding, len(placed.text))
    ids = [*encoding.ids, require_eos(tokenizer)] if append_eos else encoding.ids
    target_ids = encoding.ids[prompt_length:]
    if not target_ids:
        raise UnusableRequestError(f"target_new {request.target_new!r} has no token of its own after {placed.text!r}.")
    assert placed.subject_span is not None
    position = fact_position(encoding, placed.subject_span, prompt_length, fact_token)
    labels = tuple((prompt_length - 1 + i, token) for i, token in enumerate(ids[prompt_length:]))
    return TokenRow(tuple(ids[:-1]), position, labels, prompt_length)


def kl_row(
    tokenizer: PreTrainedTokenizerBase, request: EditRequest, fact_token: FactToken = "subject_last"
) -> TokenRow:
    """Encode ``"SUBJECT is a"``, the row of the KL term.

    The term preserves the next-token distribution at the fact token.
    """
    assert request.subject is not None
    before, after = split_template(KL_TEMPLATE)
    encoding = encode(tokenizer, before + request.subject + after)
    span = (len(before), len(before) + len(request.subject))
    position = fact_position(encoding, span, len(encoding.ids), fact_token)
    return TokenRow(tuple(encoding.ids), position, (), len(encoding.ids))


def key_row(row: TokenRow) -> TokenRow:
    """A row cut after its fact token, without labels.

    It has the same key and value at the fact token. A :class:`~edit_hooks.locate.values.value_batch.ValueBatch` needs a
    KL row for every edit; loss terms without a KL term of their own pass this shortest possible one.
    """
    return TokenRow(row.ids[: row.position + 1], row.position)
