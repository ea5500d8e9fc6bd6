"""EVK-Align: preserve the answers to perturbed versions of the edit prompt.

Method of "Beyond Local Edits: Embedding-Virtualized Knowledge for Broader Evaluation and Preservation of Model
Editing". A plug-in for every editor that optimizes a value at a fact token: ``evk_align: true`` adds to its loss
(eq. 11 to 14)

    lambda * mean_i KL( p(. | x_i) || p_delta(. | x_i) )          original || edited, unlike the method's own KL term

over a few instances x_i per edit. An instance is the edit prompt's input embeddings with Gaussian noise N(0, sigma^2)
on the tokens of the subject, on those of the relation (all others but the start token), or on all tokens; which of the
three is drawn at random. The distributions are those of the next token after the prompt, both renormalized over the k
tokens that the original model finds most likely; k is small in the early evaluations of the loss and larger later. The
offset is added to an instance at the same site and token as to the edit prompt.

Choices that the paper leaves open: the noise is drawn once per edit from ``seed`` and the prompt, or given
(``evk_noise``), and stays fixed; the second k applies after half of ``num_steps``; the method's own KL term and weight
decay remain; the early stop tests the loss without this term, so that lambda = 0 is the plain method.

sigma is absolute in the paper (``evk_sigma``). Embeddings of model families differ widely in size, so its default is
relative to the standard deviation of their entries (``evk_relative_sigma``). Where sigma is so small that an instance
is answered like the edit prompt itself, the term asks to keep the answer that the edit replaces. Such an edit is
refused: see :data:`SMALLEST_DIVERGENCE`.

Shapes: E edits, R instances of a batch, T tokens, K compared tokens, d embedding width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from transformers import PreTrainedTokenizerBase

from edit_hooks.base.artifacts.given_tensors import tensor_of
from edit_hooks.base.config import config_field
from edit_hooks.locate.values.rows import FactToken, TokenRow, fact_position, key_row
from edit_hooks.locate.values.value_batch import MakeForward, ValueBatch, ValueForward
from edit_hooks.modeling.architectures import input_device
from edit_hooks.modeling.forward.embedding_noise import (
    drift_positions,
    embedding_std,
    gaussian_noise,
    generator_of,
    noise_at,
)
from edit_hooks.modeling.forward.vocab_loss import top_tokens
from edit_hooks.modeling.tensors import at_least_float32
from edit_hooks.modeling.tokens import encode
from edit_hooks.request import EditRequest
from edit_hooks.state_reading import Drift
from edit_hooks.utils.errors import EditingError, UnusableRequestError, refuse
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.settings.numbers import NON_NEGATIVE, POSITIVE, SHARE

log = get_logger(__name__)


# In units of the embeddings' standard deviation. On the demo model the median divergence of instances from their prompt
# is 0.2 nats (noise on the subject) to 1.3 (on all tokens), and no instance of 32 prompts is below the bound that
# follows; with 0.1, three fifths are.
DEFAULT_RELATIVE_SIGMA = 0.5


# Nats between the unedited model's answers to an instance and to the edit prompt, over the tokens that are compared.
# By Pinsker's inequality the answers then differ in at most sqrt(KL / 2) of their probability, 7 %.
SMALLEST_DIVERGENCE = 0.01


@dataclass(kw_only=True)
class EVKAlignConfig:
    """Settings of EVK-Align, mixed into every locate-then-edit configuration.

    Defaults are the paper's for GPT-2 XL, except sigma.
    """

    evk_align: bool = config_field("keep the answers to perturbed versions of the prompt (EVK-Align)", default=False)
    evk_weight: float = config_field("lambda, the weight of that term", within=NON_NEGATIVE, default=0.3)
    evk_sigma: float | None = config_field(
        "standard deviation of the noise on input embeddings, absolute; null: see evk_relative_sigma",
        within=NON_NEGATIVE,
        instead_of="evk_relative_sigma",
        default=None,
    )
    evk_relative_sigma: float | None = config_field(
        "the same in units of the standard deviation of the embeddings' entries; null, without evk_sigma: 0.5",
        within=NON_NEGATIVE,
        instead_of="evk_sigma",
        default=None,
    )
    evk_instances: int = config_field("perturbed prompts per edit", within=POSITIVE, default=1)
    evk_top_k: list[int] = config_field(
        "tokens compared in the first and in the second stage", within=POSITIVE, default_factory=lambda: [10, 50]
    )
    evk_stage: float = config_field("share of num_steps after which the second stage begins", within=SHARE, default=0.5)
    evk_drifts: list[Drift] = config_field(
        "which tokens may be perturbed", default_factory=lambda: ["subject", "relation", "all"]
    )
    evk_noise: dict[str, torch.Tensor] | str | None = config_field(
        "the noise itself, instead of a draw from the seed: by edit prompt, subject filled in, [evk_instances, tokens, "
        "embedding width]; a mapping or a safetensors file",
        instead_of=("evk_sigma", "evk_relative_sigma", "evk_drifts"),
        default=None,
    )

    def check_evk_settings(self) -> None:
        """Raise EditingError for values that make no sense."""
        if self.evk_sigma is not None and self.evk_relative_sigma is not None:
            raise EditingError(
                f"'evk_sigma' is {self.evk_sigma:g} and 'evk_relative_sigma' is {self.evk_relative_sigma:g}; both set "
                "the size of the noise. Give one: evk_sigma is absolute, as in the paper, evk_relative_sigma in units "
                "of the standard deviation of the model's input embeddings."
            )
        if not self.evk_drifts:
            raise EditingError("'evk_drifts' is empty; name at least one of its kinds.")
        if len(self.evk_top_k) != 2:
            raise EditingError(f"'evk_top_k' is {self.evk_top_k}; two numbers are needed, one per stage.")


class EVKSettings(Protocol):
    """Settings of :class:`EVKAlignConfig` and of the editor it is mixed into."""

    evk_weight: float
    evk_sigma: float | None
    evk_relative_sigma: float | None
    evk_instances: int
    evk_top_k: list[int]
    evk_stage: float
    evk_drifts: list[Drift]
    evk_noise: dict[str, torch.Tensor] | str | None
    seed: int
    num_steps: int
    fact_token: FactToken


class PerturbedPrompt(NamedTuple):
    """A perturbed prompt: its row, its drift (``None``: with given noise), and the noise [T, d], float64."""

    row: TokenRow
    drift: Drift | None
    noise_TD: torch.Tensor


def draw_instances(
    tokenizer: PreTrainedTokenizerBase, request: EditRequest, width: int, sigma: float, config: EVKSettings
) -> list[PerturbedPrompt]:
    """Draw the perturbed prompts of one request, or take their noise as given.

    They depend on the request, the seed and the settings only.

    Args:
        width: size of the input embeddings. sigma: standard deviation of the noise on them, absolute.

    Raises:
        UnusableRequestError: when the prompt has no token for any of the drifts, or none of the given noise is its.
    """
    assert request.subject_span is not None
    encoding = encode(tokenizer, request.text)
    num_tokens = len(encoding.ids)
    position = fact_position(encoding, request.subject_span, num_tokens, config.fact_token)
    # The label marks the position that is read; its token id is not used.
    row = TokenRow(tuple(encoding.ids), position, ((num_tokens - 1, 0),), num_tokens)
    if isinstance(config.evk_noise, dict):
        return [PerturbedPrompt(row, None, noise_TD) for noise_TD in _given_noise(request, num_tokens, width, config)]
    positions = drift_positions(encoding, request.subject_span)
    possible = [drift for drift in config.evk_drifts if positions[drift]]
    if not possible:
        raise UnusableRequestError(
            f"{request.label}: prompt {request.text!r} has no token for evk_drifts={config.evk_drifts}."
        )
    generator = generator_of(f"{config.seed} {request.text} {request.subject_span}")
    instances = []
    for _ in range(config.evk_instances):
        drift = possible[int(torch.randint(len(possible), (1,), generator=generator))]
        noise_PD = gaussian_noise((len(positions[drift]), width), sigma, generator, torch.float64)
        instances.append(PerturbedPrompt(row, drift, noise_at(positions[drift], num_tokens, noise_PD)))
    return instances


def _given_noise(request: EditRequest, num_tokens: int, width: int, config: EVKSettings) -> torch.Tensor:
    """The given noise of a request [instances, T, d], float64."""
    assert isinstance(config.evk_noise, dict)
    try:
        shape = (config.evk_instances, num_tokens, width)
        return tensor_of(config.evk_noise, request.text, shape, "evk_noise").double()
    except EditingError as error:
        raise UnusableRequestError(f"{request.label}: {error}") from error


class EVKTerm:
    """The EVK-Align term of one batch.

    A :class:`edit_hooks.locate.values.value_steps.Term`.
    """

    name = "evk"

    def __init__(
        self, model: Any, make_forward: MakeForward, instances: Sequence[Sequence[PerturbedPrompt]], config: EVKSettings
    ) -> None:
        """Compute the original distributions.

        Args:
            instances: per edit its perturbed prompts.
        """
        self.config = config
        problems = [([instance.row for instance in group], key_row(group[0].row)) for group in instances]
        batch = ValueBatch.of(problems, input_device(model))
        noise_RTD = torch.zeros(*batch.ids_RT.shape, instances[0][0].noise_TD.shape[1], dtype=torch.float64)
        for index, instance in enumerate(instance for group in instances for instance in group):
            noise_RTD[index, : len(instance.noise_TD)] = instance.noise_TD
        batch.noise_RTD = noise_RTD.to(batch.ids_RT.device, model.get_input_embeddings().weight.dtype)
        with torch.no_grad():
            self.forward = make_forward(batch)
            site_RD = self.forward.activations.site_RD
            hidden_RD = self._hidden(site_RD.new_zeros(len(instances), site_RD.shape[1]))
            self.original_RK, self.token_RK = top_tokens(self.forward.lm_head, hidden_RD, max(config.evk_top_k))

    def _hidden(self, delta_ED: torch.Tensor) -> torch.Tensor:
        """Inputs of the head at the last token of every instance still running, [R, d]."""
        return self.forward.hidden_at_labels(delta_ED)[: len(self.forward.batch.label_row_L)]

    def loss(self, delta_ED: torch.Tensor, step: int) -> torch.Tensor:
        """lambda times the mean divergence over an edit's instances, [E]."""
        config = self.config
        is_second_stage = step >= config.evk_stage * config.num_steps
        k = min(config.evk_top_k[is_second_stage], self.token_RK.shape[1])
        logits_RK = self.forward.lm_head.logits(self._hidden(delta_ED), self.token_RK[:, :k])
        log_q_RK = at_least_float32(logits_RK).log_softmax(1)
        return config.evk_weight * self._mean_divergence(log_q_RK).to(delta_ED)

    def divergence_from(self, prompts: ValueForward) -> torch.Tensor:
        """Mean divergence [E] of an edit's instances from its prompt, before the edit.

        Args:
            prompts: a forward pass over the edit prompts, one row per edit.
        """
        site_RD, num_edits = prompts.activations.site_RD, len(prompts.batch.kl_row_E)
        with torch.no_grad():
            hidden_ED = prompts.hidden_at_labels(site_RD.new_zeros(num_edits, site_RD.shape[1]))[:num_edits]
            edit_R = self._edit_of_instance().to(hidden_ED.device)
            logits_RK = prompts.lm_head.logits(hidden_ED[edit_R], self.token_RK)
        return self._mean_divergence(at_least_float32(logits_RK).log_softmax(1))

    def _edit_of_instance(self) -> torch.Tensor:
        return self.forward.batch.edit_R[self.forward.batch.label_row_L]

    def _mean_divergence(self, log_q_RK: torch.Tensor) -> torch.Tensor:
        """Mean over an edit's instances of KL(original || q) over the K likeliest tokens of the original, [E]."""
        log_p_RK = self.original_RK[:, : log_q_RK.shape[1]].to(log_q_RK.device).log_softmax(1)
        kl_R = (log_p_RK.exp() * (log_p_RK - log_q_RK)).sum(1)
        edit_R = self._edit_of_instance().to(kl_R.device)
        sums_E = kl_R.new_zeros(len(self.forward.batch.kl_row_E)).index_add(0, edit_R, kl_R)
        return sums_E / self.config.evk_instances

    def select(self, keep_E: torch.Tensor) -> None:
        """Drop finished edits."""
        batch = self.forward.batch
        keep_R = keep_E[batch.edit_R[batch.label_row_L]].to(self.token_RK.device)
        self.token_RK, self.original_RK = self.token_RK[keep_R], self.original_RK[keep_R]
        self.forward.select(keep_E)


def evk_term(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    requests: Sequence[EditRequest],
    templates: Sequence[str],
    config: EVKSettings,
    make_forward: MakeForward,
) -> EVKTerm:
    """The EVK-Align term of requests that are solved together.

    Args:
        templates: per request the context template of its prompt, the bare one or its stand-in.

    Raises:
        UnusableRequestError: prompts have no token to perturb, or their instances are answered like them; it names all
            such requests.
    """
    width = model.get_input_embeddings().weight.shape[1]
    sigma = noise_of(model, config)
    instances, reasons = [], {}
    for request, template in zip(requests, templates, strict=True):
        try:
            instances.append(draw_instances(tokenizer, request.in_template(template), width, sigma, config))
        except UnusableRequestError as error:
            reasons[request.key] = str(error)
    refuse(reasons)
    term = EVKTerm(model, make_forward, instances, config)
    if config.evk_weight > 0:
        rows = [group[0].row for group in instances]
        prompts = make_forward(ValueBatch.of([([row], key_row(row)) for row in rows], input_device(model)))
        size = _size(sigma, embedding_std(model), config)
        _check_divergence(requests, term.divergence_from(prompts).tolist(), size)
    return term


def _size(sigma: float, std: float, config: EVKSettings) -> str:
    """A sentence about the size of the noise, and what to try where it is too small."""
    if config.evk_noise is not None:
        return "give larger noise in evk_noise."
    return (
        f"sigma is {sigma:.3g}, {sigma / std:.3g} times the standard deviation of the embeddings; try "
        f"evk_relative_sigma={max(DEFAULT_RELATIVE_SIGMA, 2 * sigma / std):.2g}."
    )


def _check_divergence(requests: Sequence[EditRequest], divergences: Sequence[float], size: str) -> None:
    """Refuse requests whose instances are answered like their prompts."""
    too_close = {
        request.key: (
            f"{request.label}: EVK-Align's perturbed prompt is answered like the edit prompt {request.text!r} "
            f"(divergence {divergence:.4f} nats, at least {SMALLEST_DIVERGENCE:g} are needed), so it would preserve "
            f"the answer that the edit replaces; {size}"
        )
        for request, divergence in zip(requests, divergences, strict=True)
        if divergence < SMALLEST_DIVERGENCE
    }
    refuse(too_close)


def noise_of(model: Any, config: EVKSettings) -> float:
    """The absolute sigma of the settings."""
    if config.evk_sigma is not None:
        return config.evk_sigma
    ratio = DEFAULT_RELATIVE_SIGMA if config.evk_relative_sigma is None else config.evk_relative_sigma
    return ratio * embedding_std(model)


def log_noise(model: Any, config: EVKSettings) -> None:
    """Log sigma and its ratio to the standard deviation of the embeddings, if the noise is drawn."""
    if config.evk_noise is not None:
        return
    sigma = noise_of(model, config)
    ratio = sigma / embedding_std(model)
    log.info("EVK-Align: sigma is %.3g, %.2f times the standard deviation of the input embeddings.", sigma, ratio)
