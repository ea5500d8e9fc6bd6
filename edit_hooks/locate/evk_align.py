"""EVK-Align: keep the answers to perturbed versions of the edit prompt.

Method of "Beyond Local Edits: Embedding-Virtualized Knowledge for Broader Evaluation and Preservation of Model
Editing". A plug-in for every editor that optimizes a value at a fact token: ``evk_align: true`` adds to its loss
(eq. 11 to 14)

    lambda * mean_i KL( p(. | x_i) || p_delta(. | x_i) )          original || edited, unlike the method's own KL term

over a few instances x_i per edit. An instance is the edit prompt's input embeddings with Gaussian noise N(0, sigma^2)
on the tokens of the subject, on those of the relation (all others but the start token), or on all tokens; which of the
three is drawn at random. The distributions are those of the next token after the prompt, both renormalized over the k
tokens that are most likely for the original model; k is small in the early evaluations of the loss and larger later.
The offset is added to an instance at the same site and token as to the edit prompt.

The paper leaves open, and here it is so: the noise is drawn once per edit, from ``seed``, the prompt and nothing else,
and stays; the second k takes over after half of ``num_steps``; the method's own KL term and weight decay stay; the
early stop tests the loss without this term, so that lambda = 0 is the plain method. sigma is absolute, as in the paper:
embeddings of model families differ by an order of magnitude in size, so the ratio of sigma to the standard deviation of
the embeddings is logged.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from edit_hooks.base.config import config_field
from edit_hooks.locate.rows import Row, fact_position
from edit_hooks.locate.value_batch import Batch
from edit_hooks.modeling.architectures import input_device
from edit_hooks.modeling.tensors import at_least_float32
from edit_hooks.modeling.tokens import encode
from edit_hooks.modeling.vocab_loss import top_tokens
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError

log = logging.getLogger(__name__)


Drift = Literal["subject", "relation", "all"]


MakeForward = Callable[[Batch], Any]


@dataclass(kw_only=True)
class EVKAlignSettings:
    """Settings of EVK-Align, mixed into every locate-then-edit configuration; defaults are the paper's for GPT-2 XL."""

    evk_align: bool = config_field("keep the answers to perturbed versions of the prompt (EVK-Align)", default=False)
    evk_weight: float = config_field("lambda, the weight of that term", default=0.3)
    evk_sigma: float = config_field("standard deviation of the noise on input embeddings, absolute", default=0.1)
    evk_instances: int = config_field("perturbed prompts per edit", default=1)
    evk_top_k: list[int] = config_field(
        "tokens compared in the first and in the second stage", default_factory=lambda: [10, 50]
    )
    evk_stage: float = config_field("share of num_steps after which the second stage begins", default=0.5)
    evk_drifts: list[Drift] = config_field(
        "which tokens may be perturbed", default_factory=lambda: ["subject", "relation", "all"]
    )

    def check_evk_settings(self) -> None:
        """Raise EditingError for values that make no sense."""
        if self.evk_weight < 0 or self.evk_sigma < 0:
            raise EditingError(
                f"'evk_weight' is {self.evk_weight} and 'evk_sigma' {self.evk_sigma}; neither can be negative."
            )
        if self.evk_instances < 1 or not self.evk_drifts:
            raise EditingError("'evk_instances' must be at least 1 and 'evk_drifts' name at least one of its kinds.")
        if len(self.evk_top_k) != 2 or min(self.evk_top_k) < 1:
            raise EditingError(f"'evk_top_k' is {self.evk_top_k}; two numbers are needed, one per stage.")


class Instance(NamedTuple):
    """A perturbed prompt: its row, the drift, and the noise [n, d] on its token embeddings, float64."""

    row: Row
    drift: str
    noise_TD: torch.Tensor


def instances(tokenizer: PreTrainedTokenizerBase, request: EditRequest, width: int, config: Any) -> list[Instance]:
    """The perturbed prompts of one request; the same for the same request, seed and settings, whatever else happens.

    Args:
        width: size of the input embeddings.
    """
    assert request.subject_span is not None
    encoding = encode(tokenizer, request.text)
    start, end = request.subject_span
    last = len(encoding.ids) - 1
    position = fact_position(encoding, request.subject_span, last + 1, config.fact_token)
    # The second label of Batch.of, a token to predict, is never read.
    row = Row(tuple(encoding.ids), position, ((last, 0),), last + 1)
    words = [i for i, (a, b) in enumerate(encoding.offsets) if a < b]
    subject = [i for i in words if encoding.offsets[i][0] < end and encoding.offsets[i][1] > start]
    where = {
        "subject": subject,
        "relation": [i for i in words if i not in subject],
        "all": list(range(last + 1)),
    }
    possible = [drift for drift in config.evk_drifts if where[drift]]
    if not possible:
        raise EditingError(
            f"case {request.case_id}: prompt {request.text!r} has no token for evk_drifts={config.evk_drifts}."
        )
    digest = hashlib.sha256(f"{config.seed} {request.text} {request.subject_span}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    drawn = []
    for _ in range(config.evk_instances):
        drift = possible[int(torch.randint(len(possible), (1,), generator=generator))]
        noise_TD = torch.zeros(last + 1, width, dtype=torch.float64)
        fresh_TD = torch.randn(len(where[drift]), width, dtype=torch.float64, generator=generator)
        noise_TD[where[drift]] = config.evk_sigma * fresh_TD
        drawn.append(Instance(row, drift, noise_TD))
    return drawn


class EVKTerm:
    """The term for the edits of one batch (a :class:`edit_hooks.locate.value_optimization.Term`)."""

    name = "evk"

    def __init__(self, model: Any, make_forward: MakeForward, drawn: Sequence[Sequence[Instance]], config: Any) -> None:
        self.model, self.config = model, config
        device = input_device(model)
        # A batch wants a row for the method's own KL term; the shortest possible one stands in for it.
        problems = []
        for own in drawn:
            stub = Row(own[0].row.ids[: own[0].row.position + 1], own[0].row.position)
            problems.append(([instance.row for instance in own], stub))
        batch = Batch.of(problems, device)
        noise_RTD = torch.zeros(*batch.ids_RT.shape, drawn[0][0].noise_TD.shape[1], dtype=torch.float64)
        for index, instance in enumerate(instance for own in drawn for instance in own):
            noise_RTD[index, : len(instance.noise_TD)] = instance.noise_TD
        batch.noise_RTD = noise_RTD.to(device, model.get_input_embeddings().weight.dtype)
        with torch.no_grad():
            self.forward = make_forward(batch)
            site_RD = self.forward.captured.site_RD
            states_LD = self._states(site_RD.new_zeros(len(drawn), site_RD.shape[1]))
            self.original_LK, self.token_LK = top_tokens(self.forward.readout, states_LD, max(config.evk_top_k))

    def _states(self, delta_ED: torch.Tensor) -> torch.Tensor:
        """What the head gets after every instance still running, [L, d]."""
        return self.forward.states(delta_ED)[: len(self.forward.batch.label_row_L)]

    def loss(self, delta_ED: torch.Tensor, step: int) -> torch.Tensor:
        """lambda times the mean divergence over an edit's instances, [E]."""
        late = step >= self.config.evk_stage * self.config.num_steps
        k = min(self.config.evk_top_k[late], self.token_LK.shape[1])
        logits_LK = self.forward.readout.logits(self._states(delta_ED), self.token_LK[:, :k])
        log_q_LK = at_least_float32(logits_LK).log_softmax(1)
        log_p_LK = self.original_LK[:, :k].log_softmax(1)
        kl_L = (log_p_LK.exp() * (log_p_LK - log_q_LK)).sum(1).to(delta_ED.device)
        batch = self.forward.batch
        total_E = delta_ED.new_zeros(len(delta_ED)).index_add(0, batch.edit_R[batch.label_row_L], kl_L.to(delta_ED))
        return self.config.evk_weight / self.config.evk_instances * total_E

    def select(self, keep_E: torch.Tensor) -> None:
        """Drop finished edits."""
        batch = self.forward.batch
        keep_R = keep_E[batch.edit_R]
        keep_L = keep_R[batch.label_row_L].to(self.token_LK.device)
        self.token_LK, self.original_LK = self.token_LK[keep_L], self.original_LK[keep_L]
        self.forward.select(keep_E)


def evk_term(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    requests: Sequence[EditRequest],
    config: Any,
    make_forward: MakeForward,
) -> EVKTerm:
    """The EVK-Align term of requests that are solved together."""
    embedding = model.get_input_embeddings()
    drawn = [instances(tokenizer, request, embedding.weight.shape[1], config) for request in requests]
    return EVKTerm(model, make_forward, drawn, config)


@torch.no_grad()
def log_noise_ratio(model: Any, sigma: float) -> None:
    """Say how large the noise is beside the embeddings it is added to (as the embedding module gives them)."""
    embedding = model.get_input_embeddings()
    count = min(1024, embedding.weight.shape[0])
    sample = at_least_float32(embedding(torch.arange(count, device=embedding.weight.device)))
    log.info(
        "EVK-Align: sigma is %.2f times the standard deviation of the input embeddings.", sigma / float(sample.std())
    )
