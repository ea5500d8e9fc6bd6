"""TODO: say what is here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedTokenizerBase

from edit_hooks.modeling.tokens import Encoding, _first_reaching_past, encode, join_target, split_template
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError

FactToken = Literal["subject_last", "subject_first", "subject_first_after_last", "last"]


FACT_TOKENS: tuple[str, ...] = ("subject_last", "subject_first", "subject_first_after_last", "last")


KL_TEMPLATE = "{} is a"


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
