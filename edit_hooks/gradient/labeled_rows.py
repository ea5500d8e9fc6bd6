"""Supervised rows: prompts with target tokens as labels, and the logits at exactly those positions.

What the gradient editors train on. Rows are right-padded, which is exact under causal attention, and positions come
from one encoding of the whole text, so neither the padding side nor a BOS can shift a label. Blocks below the first
trained one do not change: their output can be kept (:func:`keep_below`) and is then not computed again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from edit_hooks.modeling.architectures import architecture_of, head_of, input_device
from edit_hooks.modeling.hooks import forward_replaced, hidden_of, hooks, on_input, select_positions
from edit_hooks.modeling.kv_cache import right_padded
from edit_hooks.modeling.tensors import at_least_float32
from edit_hooks.modeling.tokens import split_continuation
from edit_hooks.utils.errors import EditingError

Objective = Literal["target_tokens", "last_token"]


class Example(NamedTuple):
    """One row before padding: token ids fed, and (position, token) pairs: the logits there should predict it."""

    ids: list[int]
    labels: list[tuple[int, int]]


@dataclass
class LabeledRows:
    """Padded rows [r, t] and their labels, one entry per label in ``row``, ``column`` and ``token``.

    Attributes:
        below: hidden states [r, t, d] entering block ``first_block``, when they were kept.
    """

    ids_RT: torch.Tensor
    mask_RT: torch.Tensor
    row_L: torch.Tensor
    column_L: torch.Tensor
    token_L: torch.Tensor
    below_RTD: torch.Tensor | None = None
    first_block: int = 0
    tuple_output: bool = False

    def counts_L(self) -> torch.Tensor:
        """For every label the number of labels of its row."""
        return torch.bincount(self.row_L, minlength=len(self.ids_RT))[self.row_L]


def target_example(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    target: str,
    objective: Objective = "target_tokens",
    append_eos: bool = False,
) -> Example:
    """The row of ``prompt + " " + target``.

    Args:
        objective: ``target_tokens``: each target token is predicted from those before it; ``last_token``: only the
            prompt is fed, and its last position should predict every target token.
        append_eos: the end-of-text token is one more target token.

    Raises:
        EditingError: for prompts without a token, targets without a token of their own, and a missing end token.
    """
    context, wanted = split_continuation(tokenizer, prompt, f" {target}")
    if not context:
        raise EditingError(f"prompt {prompt!r} has no token before the target; nothing could predict it.")
    if not wanted:
        raise EditingError(f"target {target!r} has no token of its own after {prompt!r}.")
    if append_eos:
        if tokenizer.eos_token_id is None:
            raise EditingError("append_eos=true, but the tokenizer has no end-of-text token.")
        wanted = [*wanted, tokenizer.eos_token_id]
    last = len(context) - 1
    if objective == "last_token":
        return Example(context, [(last, token) for token in wanted])
    return Example([*context, *wanted[:-1]], [(last + i, token) for i, token in enumerate(wanted)])


def padded(examples: Sequence[Example], device: torch.device) -> LabeledRows:
    """Rows of different length in one batch, padded on the right."""
    ids_RT, mask_RT = right_padded([example.ids for example in examples], device)
    labels = [(row, column, token) for row, example in enumerate(examples) for column, token in example.labels]
    row, column, token = (torch.tensor(part, device=device) for part in zip(*labels, strict=True))
    return LabeledRows(ids_RT, mask_RT, row, column, token)


def padded_for(model: Any, examples: Sequence[Example]) -> LabeledRows:
    """:func:`padded` on the device where the model takes its token ids."""
    return padded(examples, input_device(model))


@torch.no_grad()
def keep_below(model: Any, rows: LabeledRows, first_block: int) -> None:
    """Run the blocks below ``first_block`` once and keep what enters it; nothing to do for the first block."""
    if first_block == 0:
        return
    block = model.get_submodule(architecture_of(model).block_name(first_block - 1))

    def keep(_module: nn.Module, _args: Any, output: Any) -> None:
        rows.below_RTD, rows.tuple_output = hidden_of(output), not isinstance(output, torch.Tensor)

    with hooks(lambda: block.register_forward_hook(keep)):
        decoder = getattr(model, str(model.base_model_prefix))
        decoder(input_ids=rows.ids_RT, attention_mask=rows.mask_RT, use_cache=False)
    rows.first_block = first_block


def label_logits(model: Any, rows: LabeledRows) -> torch.Tensor:
    """Logits [l, v] that predict the labels, at least float32; only these positions go through the vocabulary."""
    with contextlib.ExitStack() as scope:
        if rows.below_RTD is not None:
            kept = (rows.below_RTD, None) if rows.tuple_output else rows.below_RTD
            for number in range(rows.first_block):
                block = model.get_submodule(architecture_of(model).block_name(number))
                scope.enter_context(forward_replaced(block, lambda *_args, **_kwargs: kept))
        scope.enter_context(hooks(on_input(head_of(model), select_positions(rows.row_L, rows.column_L))))
        return at_least_float32(model(input_ids=rows.ids_RT, attention_mask=rows.mask_RT, use_cache=False).logits[0])


def label_nll(model: Any, rows: LabeledRows) -> torch.Tensor:
    """Negative log-probability [l] of every label, in nats, where the rows are (a device map may end elsewhere)."""
    logits_LV = label_logits(model, rows)
    nll_L = nn.functional.cross_entropy(logits_LV, rows.token_L.to(logits_LV.device), reduction="none")
    return nll_L.to(rows.token_L.device)


def mean_over_rows(nll_L: torch.Tensor, rows: LabeledRows) -> torch.Tensor:
    """Mean over rows of the mean over a row's labels."""
    return (nll_L / (rows.counts_L() * len(rows.ids_RT))).sum()
