"""Loss of a batch of training edits under MEND's update."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from edit_hooks.gradient.hypernetwork import HyperNetwork, TokenFactors, Update
from edit_hooks.gradient.labeled_rows import (
    LabeledRow,
    LabeledRows,
    batch_rows,
    cache_lower_blocks,
    label_logits,
    label_nll,
    target_row,
)
from edit_hooks.gradient.token_factors import token_factors
from edit_hooks.modeling.hooks import Registration, hooks
from edit_hooks.prompt_context import BARE
from edit_hooks.training.edit_data import LOCALITY, PARAPHRASE, EditExample, NumberedExample, draw_index
from edit_hooks.training.mend_config import TrainingConfig
from edit_hooks.utils.errors import EditingError


class LossTerms(NamedTuple):
    """A batch's loss, and its terms as numbers: ``edit``, ``locality``, and ``right``, the share of correct tokens."""

    loss: torch.Tensor
    metrics: dict[str, float]


class MENDLoss:
    """The training loss ("Fast Model Editing at Scale", eq. 5) as a function of a batch.

    c_edit * NLL(target | paraphrase, edited model) + c_loc * KL(unedited || edited) on locality texts, both means over
    tokens. The gradients of the edit are treated as constants (first order). The edited model is the model with the
    update added at the outputs of the edited matrices; its weights are never written.

    Args:
        train: the training edits, from which an edit without locality texts borrows another one's prompt.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        network: HyperNetwork,
        config: TrainingConfig,
        train: Sequence[EditExample],
    ) -> None:
        self.model, self.tokenizer, self.network = model, tokenizer, network
        self.config, self.train = config, train

    def __call__(self, batch: Sequence[NumberedExample], observe: bool) -> LossTerms:
        """Loss of a batch of edits made jointly.

        Args:
            observe: add the batch's token factors to the network's statistics, as in training.
        """
        config, eos = self.config, self.config.append_eos
        edits = [target_row(self.tokenizer, e.prompt, BARE.continuation(e.target), append_eos=eos) for e, _ in batch]
        factors = self._token_factors(batch_rows(self.model, edits))
        if observe and config.normalize:
            self.network.observe(factors)
        updates = self.network(factors)
        paraphrases = [
            target_row(
                self.tokenizer, self.edit_prompt(example, number), BARE.continuation(example.target), append_eos=eos
            )
            for example, number in batch
        ]
        locality = [self._locality_row(example, number) for example, number in batch]
        rows = batch_rows(self.model, [*paraphrases, *locality])
        cache_lower_blocks(self.model, rows, min(config.edited_layers))
        is_edit_L = rows.row_L < len(paraphrases)
        with torch.no_grad():
            unedited_LV = label_logits(self.model, _with_labels(rows, ~is_edit_L)).log_softmax(1)
        with hooks(*(_adds_update(self.model.get_submodule(name), update) for name, update in updates.items())):
            edited_LV = label_logits(self.model, rows).log_softmax(1)
        token_L = rows.token_L[is_edit_L].to(edited_LV.device)
        nll = -edited_LV[is_edit_L].gather(1, token_L[:, None]).mean()
        kl_LV = nn.functional.kl_div(edited_LV[~is_edit_L], unedited_LV, reduction="none", log_target=True)
        kl = kl_LV.sum(1).mean()
        correct = float((edited_LV[is_edit_L].argmax(1) == token_L).float().mean())
        metrics = {"edit": float(nll.detach()), "locality": float(kl.detach()), "right": correct}
        return LossTerms(config.c_edit * nll + config.c_loc * kl, metrics)

    @torch.no_grad()
    def unedited(self, batch: Sequence[NumberedExample]) -> dict[str, float]:
        """Terms of the loss for the unedited model, means over the examples: the values that training has to beat."""
        total = 0.0
        for example, number in batch:
            row = target_row(self.tokenizer, self.edit_prompt(example, number), BARE.continuation(example.target))
            total += float(label_nll(self.model, batch_rows(self.model, [row])).mean()) / len(batch)
        return {"loss": self.config.c_edit * total, "edit": total, "locality": 0.0}

    def edit_prompt(self, example: EditExample, number: int) -> str:
        """The prompt of the edit loss: a random paraphrase, or the edit's own prompt if it has none."""
        if self.config.edit_loss == "edit" or not example.paraphrases:
            return example.prompt
        return example.paraphrases[draw_index(len(example.paraphrases), self.config.seed, number, PARAPHRASE)]

    def _token_factors(self, rows: LabeledRows) -> dict[str, TokenFactors]:
        """Token factors of a joint edit: its loss is the mean over all target tokens or the sum of the edits' means."""
        cache_lower_blocks(self.model, rows, min(self.config.edited_layers))
        divisor = rows.counts_L() if self.config.joint_loss == "sum" else len(rows.token_L)
        factors, _ = token_factors(self.model, rows, divisor, list(self.network.shapes))
        token_RT, device = rows.mask_RT.bool(), self.network.step_sizes.device
        return {
            name: TokenFactors(x[token_RT.to(x.device)].to(device), delta[token_RT.to(delta.device)].to(device))
            for name, (x, delta) in factors.items()
        }

    def _locality_row(self, example: EditExample, number: int) -> LabeledRow:
        """A random locality text of the example, or another edit's prompt and target if it has none."""
        if example.locality:
            prompt, answer = example.locality[draw_index(len(example.locality), self.config.seed, number, LOCALITY)]
        else:
            other = self._other_edit(example, draw_index(len(self.train), self.config.seed, number, LOCALITY))
            prompt, answer = other.prompt, other.target
        row = target_row(self.tokenizer, prompt, BARE.continuation(answer))
        if self.config.locality_tokens == "answer":
            return row
        following = [*row.ids[1:], row.labels[-1][1]]
        return LabeledRow(row.ids, list(enumerate(following)))

    def _other_edit(self, example: EditExample, start: int) -> EditExample:
        """The first training edit with another prompt, from index ``start`` on."""
        for offset in range(len(self.train)):
            other = self.train[(start + offset) % len(self.train)]
            if other.prompt != example.prompt:
                return other
        raise EditingError(
            f"the edit {example.prompt!r} has no locality texts, and there is no edit with another prompt to borrow "
            "one from; add locality texts or edits."
        )


def _with_labels(rows: LabeledRows, selected_L: torch.Tensor) -> LabeledRows:
    """The rows with some of their labels."""
    return dataclasses.replace(
        rows, row_L=rows.row_L[selected_L], column_L=rows.column_L[selected_L], token_L=rows.token_L[selected_L]
    )


def _adds_update(module: nn.Module, update: Update) -> Registration:
    """Registration of a hook that adds an update's output to that of a linear map; gradients flow into the update."""
    left, right = update

    def hook(_module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        added = (args[0].to(right) @ right) @ left.T
        return (output.to(added.dtype) + added.to(output.device)).to(output.dtype)

    return Registration(module, hook)
