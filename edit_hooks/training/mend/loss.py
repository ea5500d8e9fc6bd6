"""Loss of batches of training edits under MEND's updates.

Shapes: R rows, T tokens, L labels, N some of them, K rank, f and d input and output width of a map, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from edit_hooks.gradient.hypernetwork import HyperNetwork, TokenFactors, Update
from edit_hooks.gradient.label_forward import CachedLabelForward
from edit_hooks.gradient.labeled_rows import LabeledRow, batch_rows, label_nll, target_row
from edit_hooks.gradient.token_factors import token_factors
from edit_hooks.modeling.forward.lm_head import WHOLE_VOCAB, ModelHead, default_max_logits
from edit_hooks.modeling.forward.vocab_loss import vocab_losses
from edit_hooks.modeling.hooks import Registration, hooks
from edit_hooks.modeling.tensors import at_least_float32
from edit_hooks.training.edit_data import EditExample, LossTerms, NumberedExample
from edit_hooks.training.mend.config import TrainingConfig
from edit_hooks.training.questions import TrainingQuestions, text_row

KL_STATES = 16  # states whose logits exist at once


class MENDLoss:
    """The training loss ("Fast Model Editing at Scale", eq. 5) as a function of batches.

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
        self.config, self.questions = config, TrainingQuestions(config, train)

    def __call__(self, batches: Sequence[Sequence[NumberedExample]], observe: bool) -> list[LossTerms]:
        """Losses of some batches, each of edits made jointly. The batches share the passes of the model.

        Args:
            observe: add the batches' token factors to the network's statistics, one batch after another, as in
                training.
        """
        updates = self._updates(batches, observe)
        paraphrases = [self._paraphrase_row(*numbered) for batch in batches for numbered in batch]
        locality = [self._locality_row(*numbered) for batch in batches for numbered in batch]
        batch_E = torch.tensor([number for number, batch in enumerate(batches) for _ in batch])
        rows = batch_rows(self.model, [*paraphrases, *locality])
        forward = CachedLabelForward(self.model, rows, list(self.network.shapes))
        is_edit_L = rows.row_L < len(paraphrases)
        with torch.no_grad():
            unedited_LD = forward.label_states()[~is_edit_L]
        batch_R = batch_E.repeat(2)
        with hooks(*(self._adds_updates(name, updates, batch_R) for name in self.network.shapes)):
            edited_LD = forward.label_states()
        token_L = rows.token_L[is_edit_L]
        edits = vocab_losses(forward.head, edited_LD[is_edit_L], token_L, None, default_max_logits(edited_LD.device))
        kl_L = kl_from_unedited(forward.head, unedited_LD, edited_LD[~is_edit_L])
        right_L = edits.argmax_L == token_L.to(edits.argmax_L.device)
        batch_L = batch_R.to(rows.row_L.device)[rows.row_L]
        terms = []
        for number in range(len(batches)):
            is_own_edit, is_own_kl = batch_L[is_edit_L] == number, batch_L[~is_edit_L] == number
            terms.append(self._terms(edits.nll_L[is_own_edit], kl_L[is_own_kl], right_L[is_own_edit]))
        return terms

    def _terms(self, nll_L: torch.Tensor, kl_L: torch.Tensor, right_L: torch.Tensor) -> LossTerms:
        """Loss of one batch from the terms of its labels."""
        nll, kl = nll_L.mean(), kl_L.mean()
        metrics = {"edit": float(nll.detach()), "locality": float(kl.detach()), "right": float(right_L.float().mean())}
        return LossTerms(self.config.c_edit * nll + self.config.c_loc * kl, metrics)

    def _paraphrase_row(self, example: EditExample, number: int) -> LabeledRow:
        prompt = self.questions.edit_prompt(example, number)
        return target_row(self.tokenizer, prompt, example.continuation(prompt), append_eos=self.config.append_eos)

    @torch.no_grad()
    def unedited(self, batch: Sequence[NumberedExample]) -> dict[str, float]:
        """The loss of one batch for the unedited model, and its terms: the values that training has to beat."""
        rows = batch_rows(self.model, [self._paraphrase_row(*numbered) for numbered in batch])
        nll = float(label_nll(self.model, rows).mean())
        return {"loss": self.config.c_edit * nll, "edit": nll, "locality": 0.0}

    def _updates(self, batches: Sequence[Sequence[NumberedExample]], observe: bool) -> list[dict[str, Update]]:
        """The network's updates of every batch, from one backward pass of all edits.

        A batch's loss is the mean over all its target tokens or the sum of its edits' means.
        """
        config, device = self.config, self.network.step_sizes.device
        edits = [
            target_row(self.tokenizer, e.prompt, e.continuation(e.prompt), append_eos=config.append_eos)
            for batch in batches
            for e, _ in batch
        ]
        rows = batch_rows(self.model, edits)
        batch_R = torch.tensor(
            [number for number, batch in enumerate(batches) for _ in batch], device=rows.row_L.device
        )
        batch_L = batch_R[rows.row_L]
        divisor_L = rows.counts_L() if config.joint_loss == "sum" else torch.bincount(batch_L)[batch_L]
        names = list(self.network.shapes)
        forward = CachedLabelForward(self.model, rows, names)
        factors, _ = token_factors(self.model, rows, divisor_L, names, forward.nll)
        updates = []
        for number in range(len(batches)):
            is_own_RT = rows.mask_RT.bool() & (batch_R == number)[:, None]
            own = {
                name: TokenFactors(x[is_own_RT.to(x.device)].to(device), delta[is_own_RT.to(delta.device)].to(device))
                for name, (x, delta) in factors.items()
            }
            if observe and config.normalize:
                self.network.observe(own)
            updates.append(self.network(own))
        return updates

    def _adds_updates(self, name: str, updates: Sequence[dict[str, Update]], batch_R: torch.Tensor) -> Registration:
        """Registration of a hook that adds to a linear map's output the updates of each row's batch.

        Gradients flow into the updates.
        """
        # Ranks, which are numbers of tokens, differ between batches: zero columns do not act.
        left_BKD = pad_sequence([update[name].left.T for update in updates], batch_first=True)
        right_BKF = pad_sequence([update[name].right.T for update in updates], batch_first=True)
        left_RKD, right_RKF = left_BKD[batch_R.to(left_BKD.device)], right_BKF[batch_R.to(right_BKF.device)]

        def hook(_module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            added = (args[0].to(right_RKF) @ right_RKF.mT) @ left_RKD
            return (output.to(added.dtype) + added.to(output.device)).to(output.dtype)

        return Registration(self.model.get_submodule(name), hook)

    def _locality_row(self, example: EditExample, number: int) -> LabeledRow:
        return text_row(self.tokenizer, *self.questions.locality(example, number), self.config.locality_tokens)


def kl_from_unedited(head: ModelHead, unedited_LD: torch.Tensor, edited_LD: torch.Tensor) -> torch.Tensor:
    """KL(unedited || edited) [L] between the distributions after two sets of states, in nats.

    Gradients reach the edited states. They are formed together with the values, for a few states at a time, so that
    logits of all positions never exist at once.
    """
    needs_gradient = torch.is_grad_enabled() and edited_LD.requires_grad
    values, gradients = [], []
    for unedited_ND, edited_ND in zip(unedited_LD.split(KL_STATES), edited_LD.detach().split(KL_STATES), strict=True):
        with torch.no_grad():
            target_NV = at_least_float32(head.logits(unedited_ND, WHOLE_VOCAB)).log_softmax(1)
        with torch.set_grad_enabled(needs_gradient):
            states_ND = edited_ND.requires_grad_(needs_gradient)
            edited_NV = at_least_float32(head.logits(states_ND, WHOLE_VOCAB)).log_softmax(1)
            kl_N = nn.functional.kl_div(edited_NV, target_NV, reduction="none", log_target=True).sum(1)
        if needs_gradient:
            gradients += torch.autograd.grad(kl_N.sum(), states_ND)
        values.append(kl_N.detach())
    kl_L = torch.cat(values)
    if not needs_gradient:
        return kl_L
    # Zero with the stored gradient.
    return kl_L + ((edited_LD - edited_LD.detach()) * torch.cat(gradients)).sum(1).to(kl_L)
