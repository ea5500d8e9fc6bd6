"""Losses over the vocabulary by online softmax, without a tensor of all logits.

The head is read in slices of the vocabulary. Sums over tokens are kept relative to the largest logit so far and
rescaled when it grows (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018). The same pass
accumulates the gradients with respect to the states. Derivation and numerics: docs/explain/design/streaming-softmax.md.

Shapes: N states (L label positions, then E KL positions), d residual width, V vocabulary, W tokens of a slice; M = N
states, then the E KL states again: rows whose weighted sums of logit gradients are accumulated.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from edit_hooks.modeling.forward.lm_head import WHOLE_VOCAB, LMHead, VocabVJP, default_max_logits
from edit_hooks.modeling.tensors import at_least_float32

MAX_STATES = 512  # scored in one pass over the vocabulary
NO_TOKEN = -1  # after a state whose largest logit is not finite


@dataclass
class OriginalLogits:
    """Logits [E, V] at the KL positions before the edit, and their logsumexp [E]."""

    logits_EV: torch.Tensor
    logsumexp_E: torch.Tensor

    def select(self, keep_E: torch.Tensor) -> OriginalLogits:
        keep_E = keep_E.to(self.logsumexp_E.device)
        return OriginalLogits(self.logits_EV[keep_E], self.logsumexp_E[keep_E])


@dataclass
class VocabLosses:
    """Losses of one evaluation, in nats.

    Attributes:
        nll_L: negative log-likelihood of the target tokens. kl_E: KL(edited || original) at the KL positions.
        argmax_L: the most likely tokens (of equal ones the first).
        original: the logits passed in; else those of this evaluation, whose KL terms are 0.
    """

    nll_L: torch.Tensor
    kl_E: torch.Tensor
    argmax_L: torch.Tensor
    original: OriginalLogits


def vocab_losses(
    head: LMHead,
    states_ND: torch.Tensor,
    token_L: torch.Tensor,
    original: OriginalLogits | None,
    max_logits: int,
    needs_gradient: bool = True,
) -> VocabLosses:
    """NLL at L label states and KL at the E states after them.

    Gradients reach the states.

    Args:
        token_L: target tokens.
        original: logits that the KL terms compare with; ``None`` at the first evaluation.
        max_logits: logits held at once, approximately.
        needs_gradient: ``False`` skips the gradients.
    """
    if not (needs_gradient and torch.is_grad_enabled()):
        states_ND = states_ND.detach()
    loss_N, stats = StreamingCrossEntropy.apply(states_ND, head, token_L, original, max_logits)
    num_labels = len(token_L)
    return VocabLosses(
        nll_L=loss_N[:num_labels],
        kl_E=loss_N[num_labels:],
        argmax_L=stats.top.token_N[:num_labels],
        original=original or stats.as_original(),
    )


@torch.no_grad()
def log_likelihoods(head: LMHead, states_ND: torch.Tensor, token_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of tokens, and the most likely tokens, [N] each."""
    max_logits = default_max_logits(states_ND.device)
    chunks = [slice(start, start + MAX_STATES) for start in range(0, len(states_ND), MAX_STATES)]
    losses = [vocab_losses(head, states_ND[chunk], token_N[chunk], None, max_logits) for chunk in chunks]
    return -torch.cat([loss.nll_L for loss in losses]), torch.cat([loss.argmax_L for loss in losses])


@torch.no_grad()
def greedy_tokens(head: LMHead, states_ND: torch.Tensor) -> torch.Tensor:
    """The most likely token after every state, [N]; of equal ones the first.

    :data:`NO_TOKEN` where the largest logit is not finite: NaN or infinity anywhere, or no token with a probability.
    """
    slices = head.slices(len(states_ND), default_max_logits(states_ND.device))
    tops = (TopToken.of(head.logits(states_ND, tokens), tokens) for tokens in slices)
    top = functools.reduce(TopToken.merge, tops)
    return top.token_N.masked_fill(~top.max_logit_N.isfinite(), NO_TOKEN)


@torch.no_grad()
def top_tokens(head: LMHead, states_ND: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logits of every state and their tokens, [N, min(count, V)] each."""
    logits_NV = at_least_float32(head.logits(states_ND, WHOLE_VOCAB))
    largest_NK, token_NK = logits_NV.topk(min(count, logits_NV.shape[1]), dim=1)
    return largest_NK, token_NK


class TopToken(NamedTuple):
    """The largest logit and its token, [N] each; of equal ones the first."""

    max_logit_N: torch.Tensor
    token_N: torch.Tensor

    @classmethod
    def of(cls, logits_NW: torch.Tensor, tokens: slice) -> TopToken:
        """Of one slice of the vocabulary."""
        max_logit_N, index_N = logits_NW.max(1)
        return cls(max_logit_N, index_N + (tokens.start or 0))

    def merge(self, later: TopToken) -> TopToken:
        """Of this part of the vocabulary and of a later one."""
        token_N = torch.where(later.max_logit_N > self.max_logit_N, later.token_N, self.token_N)
        return TopToken(torch.maximum(self.max_logit_N, later.max_logit_N), token_N)


class StreamingCrossEntropy(torch.autograd.Function):
    """Losses [N] and gradients [N, d] in one pass over the vocabulary.

    Gradients are computed where the states need them.

    Every loss depends on its own state only, so the backward pass scales the rows of the stored gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states_ND: torch.Tensor,
        head: LMHead,
        token_L: torch.Tensor,
        original: OriginalLogits | None,
        max_logits: int,
    ) -> tuple[torch.Tensor, StreamingStats]:
        stats: StreamingStats | None = None
        sums: GradientSums | None = None
        for tokens in head.slices(len(states_ND), max_logits):
            slice_logits_NW, vjp = head.logits_with_vjp(states_ND, tokens)
            logits_NW = at_least_float32(slice_logits_NW)
            if stats is None:  # the first slice decides device and precision of the sums
                stats = StreamingStats(token_L, original, logits_NW)
                sums = GradientSums(stats, states_ND.shape[1]) if ctx.needs_input_grad[0] else None
            rescale_N, weights_MW = stats.update(logits_NW, tokens)
            if sums is not None:
                sums.update(rescale_N, weights_MW, vjp)
            del slice_logits_NW, logits_NW, weights_MW, vjp  # before the next slice is computed
        assert stats is not None
        if sums is not None:
            ctx.save_for_backward(sums.gradient(head, states_ND).to(states_ND))
        return stats.losses(), stats

    @staticmethod
    def backward(ctx: Any, grad_N: torch.Tensor, _stats: None) -> tuple[torch.Tensor | None, ...]:
        (gradient_ND,) = ctx.saved_tensors
        return (gradient_ND * grad_N.to(gradient_ND.device)[:, None]).to(gradient_ND.dtype), None, None, None, None


class StreamingStats:
    """Sums over the slices seen so far, relative to the largest logit.

    They are sums of p_w = exp(logit_w - largest logit) and of its products.

    NLL = logsumexp - target logit. With u_w the change of a logit from its original value and p normalized,
    KL = E_p[u] - the change of the logsumexp; changes are small where logits are not, so nothing cancels.

    Attributes:
        top: largest logit and its token. sum_exp_N: sum of p.
        target_logit_L: logits of the targets. other_exp_L: sum of p without the target.
        shift_E: a constant near the common part of the changes, the mean of u over the first slice.
        change_sum_E: sum of p (u - shift).
    """

    def __init__(self, token_L: torch.Tensor, original: OriginalLogits | None, like_NW: torch.Tensor) -> None:
        """Empty sums for N states, on the device and in the precision of ``like_NW``."""
        self.num_labels = len(token_L)
        self.token_L = token_L.to(like_NW.device)
        self.original = original
        self.sum_exp_N = like_NW.new_zeros(len(like_NW))
        no_token_N = torch.zeros_like(self.sum_exp_N, dtype=torch.long)
        self.top = TopToken(torch.full_like(self.sum_exp_N, -torch.inf), no_token_N)
        self.target_logit_L = torch.zeros_like(self.sum_exp_N[: self.num_labels])
        self.other_exp_L = torch.zeros_like(self.target_logit_L)
        self.change_sum_E = torch.zeros_like(self.sum_exp_N[self.num_labels :])
        self.shift_E: torch.Tensor | None = None
        self.seen_logits_EW: list[torch.Tensor] = []  # without an original, these become it

    def update(self, logits_NW: torch.Tensor, tokens: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a slice of the vocabulary.

        Returns:
            Factors [N] that rescale earlier sums to the new largest logit, and the weights [M, W] with which the
            gradients of this slice's logits enter :class:`GradientSums`: p without the target, then p (u - shift).
        """
        earlier_N = self.top.max_logit_N
        self.top = self.top.merge(TopToken.of(logits_NW, tokens))
        rescale_N = (earlier_N - self.top.max_logit_N).exp()
        p_NW = (logits_NW - self.top.max_logit_N[:, None]).exp_()
        self.sum_exp_N = self.sum_exp_N * rescale_N + p_NW.sum(1)
        self._move_targets_out(logits_NW, p_NW, tokens)
        self.other_exp_L = self.other_exp_L * rescale_N[: self.num_labels] + p_NW[: self.num_labels].sum(1)
        if self.original is None:
            self.seen_logits_EW.append(logits_NW[self.num_labels :].clone())
            return rescale_N, p_NW
        p_EW = p_NW[self.num_labels :]
        change_EW = logits_NW[self.num_labels :] - self.original.logits_EV[:, tokens].to(logits_NW.device)
        if self.shift_E is None:
            self.shift_E = (change_EW * p_EW).sum(1) / p_EW.sum(1)
        change_EW.sub_(self.shift_E[:, None]).mul_(p_EW)
        self.change_sum_E = self.change_sum_E * rescale_N[self.num_labels :] + change_EW.sum(1)
        return rescale_N, torch.cat([p_NW, change_EW])

    def _move_targets_out(self, logits_NW: torch.Tensor, p_NW: torch.Tensor, tokens: slice) -> None:
        """Store the logits of targets in this slice and zero their p, in place.

        Without a boolean index, whose size a GPU would have to report to the host.
        """
        column_L = self.token_L - (tokens.start or 0)
        inside_L = column_L.clamp(0, logits_NW.shape[1] - 1)
        is_here_L1, inside_L1 = (column_L == inside_L)[:, None], inside_L[:, None]
        logit_L = logits_NW[: self.num_labels].gather(1, inside_L1)[:, 0]
        self.target_logit_L = torch.where(is_here_L1[:, 0], logit_L, self.target_logit_L)
        p_LW = p_NW[: self.num_labels]
        p_LW.scatter_(1, inside_L1, p_LW.gather(1, inside_L1).masked_fill(is_here_L1, 0))

    @property
    def logsumexp_N(self) -> torch.Tensor:
        return self.top.max_logit_N + self.sum_exp_N.log()

    def losses(self) -> torch.Tensor:
        """NLL at the label positions, then KL."""
        labels, kl = slice(0, self.num_labels), slice(self.num_labels, None)
        nll_L = (self.top.max_logit_N[labels] - self.target_logit_L) + self.sum_exp_N[labels].log()
        kl_E = torch.zeros_like(self.change_sum_E)
        if self.original is not None:
            assert self.shift_E is not None
            grown_E = self.logsumexp_N[kl] - self.original.logsumexp_E.to(kl_E.device)
            kl_E = self.change_sum_E / self.sum_exp_N[kl] + (self.shift_E - grown_E)
        return torch.cat([nll_L, kl_E])

    def as_original(self) -> OriginalLogits:
        """The KL positions' logits seen in this pass."""
        return OriginalLogits(torch.cat(self.seen_logits_EW, 1), self.logsumexp_N[self.num_labels :])


class GradientSums:
    """Weighted sums over the vocabulary of the logits' gradients, [M, d]."""

    def __init__(self, stats: StreamingStats, width: int) -> None:
        self.stats = stats
        state_N = torch.arange(len(stats.sum_exp_N), device=stats.sum_exp_N.device)
        self.state_M = state_N if stats.original is None else torch.cat([state_N, state_N[stats.num_labels :]])
        self.sum_MD = stats.sum_exp_N.new_zeros(len(self.state_M), width)

    def update(self, rescale_N: torch.Tensor, weights_MW: torch.Tensor, vjp: VocabVJP) -> None:
        """Add a slice; see :meth:`StreamingStats.update`."""
        self.sum_MD.mul_(rescale_N[self.state_M][:, None]).add_(vjp(weights_MW, self.state_M))

    def gradient(self, head: LMHead, states_ND: torch.Tensor) -> torch.Tensor:
        """Gradients [N, d] of the losses, after the last slice.

        With p normalized: d NLL = sum over the other tokens of p d logit_w, minus (1 - p) d logit of the target; d KL
        is the covariance under p of u and d logit_w.
        """
        stats, num_labels, num_states = self.stats, self.stats.num_labels, len(states_ND)
        mean_ND = self.sum_MD[:num_states] / stats.sum_exp_N[:, None]
        missing_L1 = (stats.other_exp_L / stats.sum_exp_N[:num_labels])[:, None]
        _, vjp = head.logits_with_vjp(states_ND[:num_labels], stats.token_L[:, None])
        label_LD = mean_ND[:num_labels] - vjp(missing_L1, self.state_M[:num_labels])
        kl_ED = torch.zeros_like(mean_ND[num_labels:])
        if stats.original is not None:
            sum_E1 = stats.sum_exp_N[num_labels:, None]
            mean_change_E1 = stats.change_sum_E[:, None] / sum_E1
            kl_ED = self.sum_MD[num_states:] / sum_E1 - mean_change_E1 * mean_ND[num_labels:]
        return torch.cat([label_LD, kl_ED])
