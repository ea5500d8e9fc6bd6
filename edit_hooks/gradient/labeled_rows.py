"""Prompts with target tokens as labels, and the logits that predict those labels.

Training data of the gradient editors. Rows are padded on the right, which is exact under causal attention. Label
positions come from one encoding of the whole text, so neither a padding side nor a BOS token can shift them. The blocks
below the first trained one do not change: their output can be cached (:func:`cache_lower_blocks`).

Shapes: R rows, T tokens, D hidden size, L labels of all rows, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from edit_hooks.modeling.architectures import architecture_of, head_of, input_device
from edit_hooks.modeling.device.run_ahead import runs_ahead, upload
from edit_hooks.modeling.forward.kv_cache import right_padded
from edit_hooks.modeling.forward.prefix_attention import fused_attention
from edit_hooks.modeling.hooks import (
    CachedOutput,
    hooks,
    on_input,
    outputs_replaced,
    record_output,
    select_positions,
    stop_after,
)
from edit_hooks.modeling.tensors import at_least_float32
from edit_hooks.modeling.tokens import require_eos, split_continuation
from edit_hooks.utils.errors import UnusableRequestError

Objective = Literal["target_tokens", "last_token"]
AppendEos = bool | Literal["released"]
ROW_STEP = 8  # of numbers of columns in buckets
APPEND_EOS_HELP = (
    "append the end-of-text token to the target; released: behind a space, and trained only if it is not the padding "
    "token too"
)


class LabeledRow(NamedTuple):
    """One row before padding.

    Attributes:
        ids: token ids of the input.
        labels: (position, token) pairs; the logits at the position should predict the token.
    """

    ids: list[int]
    labels: list[tuple[int, int]]


@dataclass
class LabeledRows:
    """A batch of rows and their labels; label l is token ``token_L[l]`` at row ``row_L[l]``, column ``column_L[l]``.

    Attributes:
        ids_RT, mask_RT: token ids, padded on the right, and their attention mask; of prefix trees [R, 1, T, T].
        position_RT: the positions of prefix trees.
        row_L, column_L, token_L: the labels. places_2L: rows and columns on the CPU, where they are known.
        first_block: the first block that still has to run.
        lower_output: cached output [R, T, D] of the block below ``first_block``; ``None`` without a cache.
    """

    ids_RT: torch.Tensor
    mask_RT: torch.Tensor
    row_L: torch.Tensor
    column_L: torch.Tensor
    token_L: torch.Tensor
    places_2L: torch.Tensor
    first_block: int = 0
    lower_output: CachedOutput | None = None
    position_RT: torch.Tensor | None = None
    _counts_L: torch.Tensor | None = field(default=None, init=False, repr=False)

    @classmethod
    def of(
        cls,
        ids_RT: torch.Tensor,
        mask_RT: torch.Tensor,
        labels: Sequence[tuple[int, int, int]],
        position_RT: torch.Tensor | None = None,
    ) -> LabeledRows:
        """A batch on the device of its ids; labels are rows, columns and tokens."""
        labels_3L = torch.tensor(labels).T
        row_L, column_L, token_L = upload(labels_3L, ids_RT.device)
        return cls(ids_RT, mask_RT, row_L, column_L, token_L, labels_3L[:2], position_RT=position_RT)

    def inputs(self) -> dict[str, torch.Tensor]:
        """Arguments of the model or its decoder."""
        inputs = {"input_ids": self.ids_RT, "attention_mask": self.mask_RT}
        return inputs if self.position_RT is None else {**inputs, "position_ids": self.position_RT}

    def counts_L(self) -> torch.Tensor:
        """For every label, the number of labels of its row."""
        if self._counts_L is None:
            self._counts_L = upload(torch.bincount(self.places_2L[0])[self.places_2L[0]], self.row_L.device)
        return self._counts_L

    def select(self, keep_R: torch.Tensor) -> LabeledRows:
        """The batch with some of its rows (boolean mask on the CPU) and their labels."""
        device, lower = self.ids_RT.device, self.lower_output
        rows_K, label_M = keep_R.nonzero()[:, 0], keep_R[self.places_2L[0]].nonzero()[:, 0]
        places_2M = self.places_2L[:, label_M]
        places_2M[0] = (keep_R.cumsum(0) - 1)[places_2M[0]]
        (row_M, column_M), own_K = upload(places_2M, device), upload(rows_K, device)
        return replace(
            self,
            ids_RT=self.ids_RT[own_K],
            mask_RT=self.mask_RT[own_K],
            position_RT=None if self.position_RT is None else self.position_RT[own_K],
            row_L=row_M,
            column_L=column_M,
            token_L=self.token_L[upload(label_M, device)],
            places_2L=places_2M,
            lower_output=lower and lower._replace(hidden=lower.hidden[upload(rows_K, lower.hidden.device)]),
        )


def target_row(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    continuation: str,
    objective: Objective = "target_tokens",
    append_eos: AppendEos = False,
    *,
    feed_last: bool = False,
) -> LabeledRow:
    """The row of a prompt and its continuation.

    Args:
        continuation: the target with the white space before it, as in ``EditRequest.continuation``.
        objective: ``target_tokens``: the tokens before a target token predict it; ``last_token``: the prompt alone is
            fed, and its last position predicts every target token.
        append_eos: the end-of-text token is one more target token; ``released``: behind a space, which is a target
            token, too, and without a label of its own if it is the padding token.
        feed_last: the last token is fed as well; it predicts nothing, but its activation can be read.

    Raises:
        EditingError: the prompt is empty, the target adds no token, or the tokenizer has no end-of-text token.
    """
    context, labels = split_continuation(tokenizer, prompt, continuation + " " * (append_eos == "released"))
    if not context:
        raise UnusableRequestError(f"prompt {prompt!r} has no token before the target; nothing could predict it.")
    if not labels:
        raise UnusableRequestError(f"target {continuation!r} has no token of its own after {prompt!r}.")
    if append_eos:
        labels = [*labels, require_eos(tokenizer)]
    last = len(context) - 1
    if objective == "last_token":
        return LabeledRow(context, [(last, token) for token in labels])
    ids = [*context, *(labels if feed_last else labels[:-1])]
    if append_eos == "released" and tokenizer.pad_token_id in (None, tokenizer.eos_token_id):
        labels = labels[:-1]
    return LabeledRow(ids, [(last + i, token) for i, token in enumerate(labels)])


def batch_rows(model: Any, rows: Sequence[LabeledRow], *, in_buckets: bool = False) -> LabeledRows:
    """Rows of any lengths as one batch, on the device where the model takes its token ids.

    Args:
        in_buckets: on a GPU the width is a multiple of :data:`ROW_STEP`, so that recorded steps of other rows fit.
    """
    device = input_device(model)
    ids_RT, mask_RT = right_padded([row.ids for row in rows], device)
    if in_buckets and runs_ahead(device):
        missing = -ids_RT.shape[1] % ROW_STEP
        ids_RT, mask_RT = (nn.functional.pad(part_RT, (0, missing)) for part_RT in (ids_RT, mask_RT))
    labels = [(index, column, token) for index, row in enumerate(rows) for column, token in row.labels]
    return LabeledRows.of(ids_RT, mask_RT, labels)


def unmasked_batch(model: Any, rows: Sequence[LabeledRow]) -> LabeledRows:
    """Padded rows whose padding attends to the text before it.

    A position that attends to nothing, as in a sliding window full of padding, would make gradients NaN.
    """
    batch = batch_rows(model, rows)
    return replace(batch, mask_RT=torch.ones_like(batch.mask_RT))


@torch.no_grad()
def cache_lower_blocks(model: Any, rows: LabeledRows, first_block: int) -> None:
    """Run the blocks below ``first_block`` once and cache their output in ``rows``; a no-op for the first block."""
    if first_block == 0:
        return
    block = model.get_submodule(architecture_of(model).block_name(first_block - 1))
    outputs: dict[int, CachedOutput] = {}
    with hooks(record_output(outputs, first_block, block)), stop_after(block):
        model(input_ids=rows.ids_RT, attention_mask=rows.mask_RT, use_cache=False)
    rows.first_block, rows.lower_output = first_block, outputs[first_block]


def attention_of(model: Any, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Scope of passes over whole rows: the model's own attention, or on a GPU the fused one, which does not wait."""
    return fused_attention(model) if runs_ahead(device) else contextlib.nullcontext()


def label_logits(model: Any, rows: LabeledRows) -> torch.Tensor:
    """Logits [L, V] that predict the labels, at least float32; the LM head runs at these positions only."""
    with contextlib.ExitStack() as scope:
        if rows.lower_output is not None:
            # Every skipped block returns the cached output of the last of them; its input is ignored.
            arch = architecture_of(model)
            skipped = [model.get_submodule(arch.block_name(index)) for index in range(rows.first_block)]
            scope.enter_context(outputs_replaced(skipped, rows.lower_output.as_output()))
        scope.enter_context(hooks(on_input(head_of(model), select_positions(rows.row_L, rows.column_L))))
        scope.enter_context(attention_of(model, rows.ids_RT.device))
        return at_least_float32(model(input_ids=rows.ids_RT, attention_mask=rows.mask_RT, use_cache=False).logits[0])


def label_nll(model: Any, rows: LabeledRows) -> torch.Tensor:
    """Negative log-likelihood [L] of every label in nats, on the device of the rows (not that of the LM head)."""
    logits_LV = label_logits(model, rows)
    nll_L = nn.functional.cross_entropy(logits_LV, rows.token_L.to(logits_LV.device), reduction="none")
    return nll_L.to(rows.token_L.device)


def mean_per_row(nll_L: torch.Tensor, rows: LabeledRows) -> torch.Tensor:
    """Mean [R] over each row's labels."""
    return nll_L.new_zeros(len(rows.ids_RT)).index_add(0, rows.row_L, nll_L / rows.counts_L())


def mean_over_rows(nll_L: torch.Tensor, rows: LabeledRows) -> torch.Tensor:
    """Mean over rows of the mean over a row's labels."""
    return (nll_L / (rows.counts_L() * len(rows.ids_RT))).sum()
