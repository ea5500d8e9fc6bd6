"""Checks of what an editor gets, requests and weights, and of what it returns."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from edit_hooks.base.footprint import StreamGrowth
from edit_hooks.deltas.apply import AppliedDeltas
from edit_hooks.deltas.delta import Delta
from edit_hooks.edit_report import REPORT_NAMES
from edit_hooks.modeling.adapter_layers import require_additive, require_trainable
from edit_hooks.modeling.architectures import text_config
from edit_hooks.modeling.linear_maps import is_quantized
from edit_hooks.modeling.tokens import encode, first_token_past, tokens_in_span
from edit_hooks.request import EditRequest, require_subjects, require_text
from edit_hooks.utils.errors import EditingError, UnusableRequestError
from edit_hooks.utils.text.slots import SLOT, escape_braces


def position_limit(config: object) -> int | None:
    """Number of positions of a model, from its config; ``None`` if it names none."""
    limit = getattr(text_config(config), "max_position_embeddings", None)
    return limit if isinstance(limit, int) else None


def require_tokens(
    tokenizer: PreTrainedTokenizerBase, request: EditRequest, prefix: str, subject_for: str | None, in_prompts: bool
) -> int:
    """Refuse a request without tokens of its target, or of what else an editor needs.

    Args:
        prefix: the longest text that the editor puts before prompts.
        subject_for: name of the editor, if it needs a subject.
        in_prompts: the edit is text in a prompt, so no token before the target has to predict it.

    Returns:
        The number of tokens that predict one of the text, the prefix included.

    Raises:
        UnusableRequestError: with the reason.
    """
    require_text(request.text + request.target_new)
    if subject_for is not None:
        require_subjects([request], subject_for)
    case = request.label
    placed = request.in_template(escape_braces(prefix) + SLOT)
    encoding = encode(tokenizer, placed.text + placed.continuation)
    alone = encode(tokenizer, request.text + request.continuation) if prefix else encoding
    if not in_prompts and first_token_past(alone, len(request.text)) == 0:
        raise UnusableRequestError(
            f"{case}: prompt {request.text!r} has no token before the target, so nothing could predict it."
        )
    if first_token_past(encoding, len(placed.text)) == len(encoding.ids):
        raise UnusableRequestError(
            f"{case}: target_new {request.target_new!r} has no token of its own after {request.text!r}."
        )
    if (
        subject_for is not None
        and placed.subject_span is not None
        and not tokens_in_span(encoding, placed.subject_span)
    ):
        raise UnusableRequestError(
            f"{case}: no token of the prompt covers the subject {request.subject!r}; is it made of characters "
            "the tokenizer drops?"
        )
    return len(encoding.ids) - 1


def require_positions(request: EditRequest, prefix: str, lengths: Mapping[str, int], limit: int | None) -> None:
    """Refuse a request with a text that is longer than the model's context.

    Args:
        prefix: the longest text that the editor puts before prompts.
        lengths: texts, as a plural for the message -> tokens of the longest.
        limit: number of positions of the model, if it has one.
    """
    for texts, length in lengths.items():
        if limit is not None and length > limit:
            context = ", the longest context included," if prefix or request.context else ""
            raise UnusableRequestError(
                f"{request.label}: {texts} take {length} tokens{context} and the model has {limit} "
                "positions; shorten them, or drop the record."
            )


def require_editable(
    modules: Mapping[str, nn.Module], editor: str, through_adapters: bool, edits_quantized: bool
) -> None:
    """Refuse modules whose weights an editor cannot edit.

    Args:
        modules: name -> module.
        through_adapters: the model has adapters, through which updates of weights act.
        edits_quantized: the editor trains nothing in the place of weights.
    """
    if through_adapters:
        for name, module in modules.items():
            (require_additive if edits_quantized else require_trainable)(module, name)
    if edits_quantized:
        return
    for name, module in modules.items():
        if is_quantized(module):
            raise EditingError(
                f"editor {editor!r} changes the weights themselves, and the weight of {name} is quantized; its "
                "codes cannot be trained. Use an editor whose update acts beside the weight (r_rome, memit, lora, "
                "...), keep this module unquantized (llm_int8_skip_modules), or load the model in bfloat16."
            )


def require_deltas(
    computed: object, editor: str, num_groups: int, writes: Collection[str], growth: StreamGrowth | None
) -> list[Delta]:
    """Refuse anything but one delta per group of requests: an editor of another package may return anything.

    Args:
        writes: what the editor declares to change. growth: what it states that a stream carries.
    """
    if not (isinstance(computed, (list, tuple)) and all(isinstance(delta, Delta) for delta in computed)):
        raise EditingError(
            f"editor {editor!r}: compute returned {_kinds_in(computed)}; a list with one Delta per group of "
            "requests (job.groups) is needed."
        )
    if len(computed) != num_groups:
        raise EditingError(
            f"editor {editor!r}: compute returned {len(computed)} deltas for {num_groups} groups of requests"
            "; one delta per group of job.groups is needed."
        )
    for delta in computed:
        if undeclared := [part for part in delta.writes if part not in writes]:
            raise EditingError(
                f"editor {editor!r}: a delta changes {' and '.join(undeclared)}, and 'writes' of the class is "
                f"{tuple(writes)}; declare all that its edits change, by which runs and tables treat them."
            )
        if delta.stream_state and growth is not None and not growth.is_read:
            raise EditingError(
                f"editor {editor!r}: a delta has a stream_state, and 'stream_growth' of the class, which may be that "
                "of its base, states that no later edit reads it: a stream would lose it. State what a stream carries "
                "(edit_hooks.StreamGrowth), or None."
            )
        if taken := sorted(REPORT_NAMES.intersection(delta.diagnostics)):
            raise EditingError(
                f"editor {editor!r}: results have a meaning of their own for {taken[0]!r}, so it cannot be an entry of "
                f"a delta's diagnostics; name it otherwise, as in {editor}_{taken[0]}."
            )
        for key, value in delta.diagnostics.items():
            _require_json(key, value, editor)
    return list(computed)


def require_fitting(deltas: Sequence[Delta], editor: str, model: nn.Module) -> None:
    """Refuse updates that the model could not hold; a scope would, too, without the editor's name and much later."""
    for delta in deltas:
        factors = {name: tensor for name, factor in delta.factors.items() for tensor in (factor.left, factor.right)}
        for name, update in [*delta.dense.items(), *factors.items()]:
            kind = update.dtype if isinstance(update, torch.Tensor) else type(update).__name__
            if kind not in (torch.float32, torch.float64):
                raise EditingError(
                    f"editor {editor!r}: the update of {name} is {kind}; a torch tensor of float32 is needed, as "
                    "update.float() is."
                )
        try:
            AppliedDeltas(model).check(delta)
        except EditingError as error:
            raise EditingError(f"editor {editor!r}: compute returned a delta that does not fit: {error}") from None


def _require_json(key: object, value: object, editor: str) -> None:
    """Refuse diagnostics that no file can hold, before the edit is used."""
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise EditingError(
            f"editor {editor!r}: the entry {key!r} of a delta's diagnostics is not JSON ({error}); use numbers, text, "
            "lists and mappings of these, as in float(loss), and intermediates for tensors."
        ) from None


def _kinds_in(value: object) -> str:
    """The type of a value, and of its members if it is a list."""
    members = sorted({type(member).__name__ for member in value}) if isinstance(value, (list, tuple)) else []
    return type(value).__name__ + (f" of {', '.join(members)}" if members else "")
