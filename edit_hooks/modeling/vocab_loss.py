"""The vocabulary projection, some words at a time, and the losses that need it.

With 262k words the logits of a step would be its largest tensor, and a matrix product that streams the whole head past
few rows runs at half the machine's rate. So the head is walked in slices of words that stay in the cache; sums over the
vocabulary are kept relative to the largest logit so far and rescaled when it grows (the online softmax of Milakov and
Gimelshein, 2018), for the losses and for their gradients alike. Nothing is approximated.

Shapes: N states (L label positions, then E KL positions), d residual width, V vocabulary, W words of a slice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from edit_hooks.modeling.lm_head import ALL, ROWS_AT_ONCE, LMHead, logits_at_once
from edit_hooks.modeling.tensors import at_least_float32


@dataclass
class Original:
    """The distributions at the KL positions before the edit: logits [E, V] and the logarithm of their sum [E]."""

    logits_EV: torch.Tensor
    log_sum_E: torch.Tensor

    def select(self, keep_E: torch.Tensor) -> Original:
        keep_E = keep_E.to(self.log_sum_E.device)
        return Original(self.logits_EV[keep_E], self.log_sum_E[keep_E])


@dataclass
class Likelihoods:
    """What one evaluation says.

    Attributes:
        nll_L: negative log-likelihood of the wanted tokens. kl_E: KL(edited || original) at the KL positions.
        best_L: the most likely words (of equal ones the first).
        original: the distributions of this evaluation if none were given (then the KL terms are 0).
    """

    nll_L: torch.Tensor
    kl_E: torch.Tensor
    best_L: torch.Tensor
    original: Original


def likelihoods(
    readout: LMHead,
    states_ND: torch.Tensor,
    token_L: torch.Tensor,
    original: Original | None,
    max_logits: int,
    wants_gradient: bool = True,
) -> Likelihoods:
    """Losses at L label states, then at E KL states; gradients reach the states.

    Args:
        token_L: the wanted tokens. original: what the KL terms compare with; ``None`` at the first evaluation.
        max_logits: logits held at once, about.
    """
    wants_gradient = wants_gradient and torch.is_grad_enabled() and states_ND.requires_grad
    sums = _Sums(readout, states_ND.detach(), token_L, original, wants_gradient)
    for words in readout.slices(len(states_ND), max_logits):
        sums.add(words)
    loss_N = sums.losses()
    if wants_gradient:
        loss_N = _WithGradient.apply(states_ND, loss_N, sums.gradients())
    num_labels = len(token_L)
    best_L = sums.best.word_N[:num_labels]
    return Likelihoods(loss_N[:num_labels], loss_N[num_labels:], best_L, original or sums.as_original())


@torch.no_grad()
def log_likelihoods(
    readout: LMHead, states_ND: torch.Tensor, token_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of tokens, and the most likely words, [N] each."""
    at_once = logits_at_once(states_ND.device)
    rows = [slice(a, a + ROWS_AT_ONCE) for a in range(0, len(states_ND), ROWS_AT_ONCE)]
    parts = [likelihoods(readout, states_ND[part], token_N[part], None, at_once, wants_gradient=False) for part in rows]
    return -torch.cat([part.nll_L for part in parts]), torch.cat([part.best_L for part in parts])


@torch.no_grad()
def greedy_tokens(readout: LMHead, states_ND: torch.Tensor) -> torch.Tensor:
    """The most likely word after every state, [N]; of equal ones the first."""
    best = _Best()
    for words in readout.slices(len(states_ND), logits_at_once(states_ND.device)):
        best.add(readout.logits(states_ND, words), words)
    return best.word_N


class _Best:
    """The largest logit so far and its word, [N] each; of equal ones the first."""

    largest_N: torch.Tensor
    word_N: torch.Tensor

    def add(self, logits_NW: torch.Tensor, words: slice) -> None:
        found_N, index_N = logits_NW.max(1)
        word_N = index_N + (words.start or 0)
        if hasattr(self, "largest_N"):
            word_N = torch.where(found_N > self.largest_N, word_N, self.word_N)
            found_N = torch.maximum(self.largest_N, found_N)
        self.largest_N, self.word_N = found_N, word_N


@torch.no_grad()
def top_tokens(readout: LMHead, states_ND: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logits of every state and their words, [N, min(count, V)] each."""
    logits_NV = at_least_float32(readout.logits(states_ND, ALL))
    largest_NK, words_NK = logits_NV.topk(min(count, logits_NV.shape[1]), dim=1)
    return largest_NK, words_NK


class _WithGradient(torch.autograd.Function):
    """Losses [N], each of which depends on its own state only, and their gradients [N, d], which are known already."""

    # torch declares both methods with any arguments at all, which no real one can match.
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, states_ND: torch.Tensor, loss_N: torch.Tensor, gradient_ND: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(gradient_ND.to(states_ND))
        return loss_N.clone()

    @staticmethod
    def backward(ctx: Any, grad_N: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (gradient_ND,) = ctx.saved_tensors
        return (gradient_ND * grad_N.to(gradient_ND.device)[:, None]).to(gradient_ND.dtype), None, None


class _Sums:
    """Sums over the words seen so far, of p_w = exp(logit_w - largest logit) and of what it weighs.

    NLL = log(sum of exp(logits)) - the wanted logit. With u_w, how much a logit has changed, and p normalized:
    KL = E_p[u] - the change of log(sum of exp(logits)). Changes are small where logits are not, so nothing cancels.

    Half precision rounds what is pulled back, so nothing is pulled back that another term would cancel: not the wanted
    word, whose weight is -(1 - p), and not the common part of the changes (about `shift_E`).

    Attributes:
        best: the largest logit and its word. largest_N, sum_N: largest logit, sum of p.
        wanted_L: logits of the wanted tokens. rest_L: sum of p without them. change_E: sum of p (u - shift).
        toward_MD: p without the wanted tokens, pulled back to the N states, then p (u - shift) to those of KL terms.
    """

    def __init__(
        self,
        readout: LMHead,
        states_ND: torch.Tensor,
        token_L: torch.Tensor,
        original: Original | None,
        wants_gradient: bool,
    ) -> None:
        self.readout, self.states_ND, self.token_L = readout, states_ND, token_L
        self.original, self.wants_gradient = original, wants_gradient
        self.num_labels = len(token_L)
        self.seen: list[torch.Tensor] = []  # logits at the KL positions, when they become the original ones
        self.best = _Best()
        self.largest_N = torch.empty(0)

    def _start(self, logits_NW: torch.Tensor) -> None:
        """Nothing seen; on the device of the logits, which may be another one than the states'."""
        num_states = len(self.states_ND)
        self.largest_N = logits_NW.new_full((num_states,), -torch.inf)
        self.sum_N = torch.zeros_like(self.largest_N)
        self.token_L = self.token_L.to(logits_NW.device)
        self.wanted_L = torch.zeros_like(self.largest_N[: self.num_labels])
        self.rest_L = torch.zeros_like(self.wanted_L)
        self.shift_E: torch.Tensor | None = None
        self.change_E = torch.zeros_like(self.largest_N[self.num_labels :])
        self.state_M = torch.arange(num_states, device=logits_NW.device)
        if self.original is not None:
            self.state_M = torch.cat([self.state_M, self.state_M[self.num_labels :]])
        self.toward_MD = logits_NW.new_zeros(len(self.state_M), self.states_ND.shape[1])

    def add(self, words: slice) -> None:
        computed_NW, vjp = self.readout.logits_with_vjp(self.states_ND, words)
        logits_NW = at_least_float32(computed_NW)
        if not len(self.largest_N):
            self._start(logits_NW)
        self.best.add(logits_NW, words)
        largest_N = self.best.largest_N
        shrunk_N = (self.largest_N - largest_N).exp()
        shrunk_L, shrunk_E = shrunk_N[: self.num_labels], shrunk_N[self.num_labels :]
        self.largest_N = largest_N
        p_NW = (logits_NW - largest_N[:, None]).exp_()
        self.sum_N = self.sum_N * shrunk_N + p_NW.sum(1)

        index_L = self.token_L - (words.start or 0)
        (here_l,) = ((index_L >= 0) & (index_L < logits_NW.shape[1])).nonzero(as_tuple=True)
        self.wanted_L[here_l] = logits_NW[here_l, index_L[here_l]]
        p_NW[here_l, index_L[here_l]] = 0
        self.rest_L = self.rest_L * shrunk_L + p_NW[: self.num_labels].sum(1)
        if self.original is None:
            weights_MW = p_NW
            self.seen.append(logits_NW[self.num_labels :].clone())
        else:
            p_EW = p_NW[self.num_labels :]
            before_EW = self.original.logits_EV[:, words].to(logits_NW.device)
            change_EW = logits_NW[self.num_labels :] - before_EW
            if self.shift_E is None:
                self.shift_E = (change_EW * p_EW).sum(1) / p_EW.sum(1)
            change_EW.sub_(self.shift_E[:, None]).mul_(p_EW)
            self.change_E = self.change_E * shrunk_E + change_EW.sum(1)
            weights_MW = torch.cat([p_NW, change_EW])
        if self.wants_gradient:
            self.toward_MD.mul_(shrunk_N[self.state_M][:, None]).add_(vjp(weights_MW, self.state_M))

    @property
    def log_sum_N(self) -> torch.Tensor:
        return self.largest_N + self.sum_N.log()

    def losses(self) -> torch.Tensor:
        """NLL at the label positions, then KL."""
        nll_L = (self.largest_N[: self.num_labels] - self.wanted_L) + self.sum_N[: self.num_labels].log()
        kl_E = torch.zeros_like(self.change_E)
        if self.original is not None and self.shift_E is not None:
            grown_E = self.log_sum_N[self.num_labels :] - self.original.log_sum_E.to(kl_E.device)
            kl_E = self.change_E / self.sum_N[self.num_labels :] + (self.shift_E - grown_E)
        return torch.cat([nll_L, kl_E])

    def gradients(self) -> torch.Tensor:
        """Of the losses with respect to their states, [N, d].

        d NLL = sum over the other words of p d logit_w, minus (1 - p) d logit of the wanted one, p normalized;
        d KL is the covariance under p of the change and d logit_w.
        """
        num_states = len(self.states_ND)
        mean_ND = self.toward_MD[:num_states] / self.sum_N[:, None]
        words_U, own_L = self.token_L.unique(return_inverse=True)
        missing_L1 = (self.rest_L / self.sum_N[: self.num_labels])[:, None]
        wanted_LU = functional.one_hot(own_L, len(words_U)) * missing_L1
        _, vjp = self.readout.logits_with_vjp(self.states_ND[: self.num_labels], words_U)
        label_LD = mean_ND[: self.num_labels] - vjp(wanted_LU, self.state_M[: self.num_labels])
        kl_ED = torch.zeros_like(mean_ND[self.num_labels :])
        if self.original is not None:
            sum_E1 = self.sum_N[self.num_labels :, None]
            change_E1 = self.change_E[:, None] / sum_E1
            kl_ED = self.toward_MD[num_states:] / sum_E1 - change_E1 * mean_ND[self.num_labels :]
        return torch.cat([label_LD, kl_ED])

    def as_original(self) -> Original:
        return Original(torch.cat(self.seen, 1), self.log_sum_N[self.num_labels :])
