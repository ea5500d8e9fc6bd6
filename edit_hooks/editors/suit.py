"""SUIT: AlphaEdit with keys without the directions that entities share, and residuals between two directions.

"Knowledge Editing with Subspace-Aware Key-Value Mappings" (2509.24502), by its formulas: the released code could not be
read. AlphaEdit's solve with two inputs changed:

1. Keys. U_m are the leading right singular vectors of the keys of many entities (not centered), the fewest with the
   share ``entity_energy`` of their squared singular values. k' = k - U_m U_m^T k takes the place of k.
2. Residuals. Two unit vectors w_1, w_2 minimize -log p(target) + ``orthogonality`` (w_1 . w_2)^2 with the offset

       delta' = (h . w_2 - h . w_1) w_1 + (h . w_1 - h . w_2) w_2 = -(w_1 - w_2) (w_1 - w_2)^T h

   and z = h + delta'. There is no KL term, no weight decay and no ball: for orthogonal vectors this is a reflection,
   which exchanges the parts of h along them and keeps its norm.

What the text available to us leaves open is decided here: the entities are names of this package, each alone, read at
its last token; h is the state of each row, so that the vectors are shared by all context templates; the vectors start
orthogonal with an offset of zero at the bare prompt, in the plane of h and the gradient there; Adam's steps are
lr / sqrt(d), which turns a unit vector by about lr, and each is followed by a normalization; z is spread over the
layers, and keys of earlier steps (k') are carried, as in AlphaEdit. Where blocks normalize their MLP output (Gemma,
OLMo 2), h is the output before that norm.

Shapes: E requests, R rows, d residual width, f key width, m directions of a layer.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from edit_hooks.base.checks import position_limit
from edit_hooks.base.config import Settings, config_field
from edit_hooks.base.job import EditJob
from edit_hooks.deltas.delta import Delta
from edit_hooks.editors.alphaedit import AlphaEdit, AlphaEditConfig
from edit_hooks.locate.layerwise_update import LayerwiseUpdate
from edit_hooks.locate.moments.leading import leading_vectors, without_directions
from edit_hooks.locate.value_editor import forward_maker, value_settings
from edit_hooks.locate.values.key_reader import read_rows
from edit_hooks.locate.values.rows import TokenRow
from edit_hooks.locate.values.value_batch import Site, ValueForward, ValueProblem
from edit_hooks.locate.values.value_optimization import optimize_values
from edit_hooks.locate.values.value_steps import (
    AdamState,
    OptimizedValue,
    Term,
    ValueSettings,
    adam_scales,
    initial_values,
    label_mean,
)
from edit_hooks.modeling.device.run_ahead import LateRead, launch_early, upload
from edit_hooks.modeling.forward.vocab_loss import OriginalLogits, vocab_losses
from edit_hooks.modeling.grad_mode import gradients
from edit_hooks.modeling.tokens import encode
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.settings.numbers import NON_NEGATIVE, SHARE_BELOW_ONE
from edit_hooks.utils.storage.files import path_digest, read_text

OWN_ENTITIES = Path(__file__).parent / "data" / "entities.txt"
LITTLE = 0.1  # share of a key's squared norm
LITTLE_WARNING = (
    "less than a tenth of the squared norm of a key is left without the directions that entities share, so little is "
    "written (written_share). Set a smaller entity_energy."
)


@dataclass(kw_only=True)
class SUITConfig(AlphaEditConfig):
    """AlphaEdit's settings and those of both subspaces.

    ``weight_decay``, ``clamp_factor`` and ``kl_factor`` have no effect with ``residual: directions``.
    """

    entity_energy: float = config_field(
        "tau: share of the energy of the entities' keys whose directions leave every key; 0: keys as they are",
        within=SHARE_BELOW_ONE,
        default=0.4,
    )
    entities: list[str] | str = config_field(
        "names whose keys span these directions: own (266 of this package), a text file with one per line, or a list",
        default="own",
    )
    entities_digest: str | None = config_field("set by the editor: checksum of the file of names", default=None)
    residual: Literal["directions", "offset"] = config_field(
        "directions: z = h + delta' of two unit vectors; offset: AlphaEdit's", default="directions"
    )
    orthogonality: float = config_field(
        "lambda, the factor of (w_1 . w_2)^2 in the loss", within=NON_NEGATIVE, default=0.3
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stream == "exact" or self.deflation is not None:
            given = "stream: exact" if self.stream == "exact" else "deflation"
            raise EditingError(
                f"{given} counts on an update that acts on the keys it was solved for, and suit solves for a part of "
                "them. Drop it, or set it for alphaedit."
            )
        if not isinstance(self.entities, str) and not any(name.strip() for name in self.entities):
            raise EditingError("editor setting 'entities' has no name; give some, or 'own'.")


class SUIT(AlphaEdit):
    """AlphaEdit with purified keys and residuals between two directions."""

    name = "suit"
    config_class = SUITConfig
    config_folders = ("suit", "alphaedit")
    writes_states = False

    def __init__(self, overrides: Settings | None = None) -> None:
        super().__init__(overrides)
        self._directions: weakref.WeakKeyDictionary[nn.Module, Mapping[int, torch.Tensor]]
        self._directions = weakref.WeakKeyDictionary()

    def default_config(self, model: nn.Module) -> AlphaEditConfig:
        config = super().default_config(model)
        assert isinstance(config, SUITConfig)
        is_file = isinstance(config.entities, str) and config.entities != "own"
        config.record_digest("entities_digest", "entities", path_digest(str(config.entities)) if is_file else None)
        return config

    def check_inputs(self, config: AlphaEditConfig) -> None:
        super().check_inputs(config)
        assert isinstance(config, SUITConfig)
        entity_names(config.entities)

    def prepare(self, config: AlphaEditConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        super().prepare(config, model, tokenizer)
        assert isinstance(config, SUITConfig)
        with gradients(False):
            self._directions[model] = entity_directions(config, model, tokenizer)

    def warnings(self, job: EditJob[AlphaEditConfig], requests: Sequence[Any], delta: Delta) -> list[str]:
        shares = [record["key_share"] for record in delta.diagnostics["layers"]]
        return [*super().warnings(job, requests, delta), *([LITTLE_WARNING] if min(shares) < LITTLE else [])]

    def optimize(
        self, job: EditJob[AlphaEditConfig], problems: Sequence[ValueProblem], site: Site
    ) -> Sequence[OptimizedValue]:
        config = job.config
        assert isinstance(config, SUITConfig)
        if config.residual == "offset":
            return super().optimize(job, problems, site)
        layer = self.target_layer(config)
        return optimize_values(
            job.model,
            problems,
            value_settings(config, layer, site),
            config.engine,
            progress=job.progress,
            terms=self.terms(job, forward_maker(job.model, config, layer, site)),
            solve=functools.partial(solve_directions, orthogonality=config.orthogonality),
        )

    def layerwise_update(
        self,
        job: EditJob[AlphaEditConfig],
        rows: list[list[TokenRow]],
        values: Sequence[OptimizedValue],
        through_norm: bool,
    ) -> LayerwiseUpdate:
        return _PurifiedUpdate(self._directions[job.model], self, job, rows, values, through_norm)


class _PurifiedUpdate(LayerwiseUpdate):
    """Updates solved for keys without the directions of entities.

    Args:
        directions: by layer, [f, m].
    """

    def __init__(self, directions: Mapping[int, torch.Tensor], *arguments: Any) -> None:
        super().__init__(*arguments)
        self.directions = directions

    def solved_keys(self, layer: int, keys_EF: torch.Tensor) -> torch.Tensor:
        return without_directions(keys_EF, self.directions[layer])

    def key_facts(self, layer: int, keys_UF: torch.Tensor) -> dict[str, Any]:
        left_U = self.solved_keys(layer, keys_UF).square().sum(1) / keys_UF.square().sum(1).clamp(min=1e-30)
        return {"num_directions": self.directions[layer].shape[1], "key_share": float(left_U.mean())}


# -- keys --------------------------------------------------------------------------------------------------------------


def entity_names(source: Sequence[str] | str) -> list[str]:
    """The names behind ``entities``: own, of a text file or given; blank lines are left out.

    Raises:
        EditingError: the file is missing, unreadable, or has no name.
    """
    if not isinstance(source, str):
        lines: Sequence[str] = source
    else:
        lines = read_text(OWN_ENTITIES if source == "own" else source, "file of entities").splitlines()
    names = [line.strip() for line in lines if line.strip()]
    if not names:
        raise EditingError(f"'entities' names {source}, and it has no name; give a text file with one per line.")
    return names


def entity_directions(
    config: SUITConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> dict[int, torch.Tensor]:
    """The directions U_m that the keys of entities share, by layer, [f, m], float64 on the CPU.

    Every name is read alone, at its last token. A name of one token at the start of a sequence is left out: all texts
    share the key there.
    """
    layers = config.edited_layers
    names = entity_names(config.entities)
    rows = [TokenRow(tuple(ids), len(ids) - 1) for name in names if len(ids := encode(tokenizer, name).ids) > 1]
    if not rows:
        raise EditingError(
            "no name in 'entities' has a token behind the first one of the sequence, whose key all texts share; give "
            "longer names."
        )
    limit, longest = position_limit(model.config), max(len(row.ids) for row in rows)
    if limit is not None and longest > limit:
        raise EditingError(
            f"a name in 'entities' takes {longest} tokens, and the model has {limit} positions; give names, one per "
            "line of a file."
        )
    keys = read_rows(model, rows, layers, layers[-1]).keys_RF
    return {layer: leading_vectors(keys[layer], config.entity_energy)[1].cpu() for layer in layers}


# -- residuals ---------------------------------------------------------------------------------------------------------


def exchange(hidden_RD: torch.Tensor, pairs_R2D: torch.Tensor) -> torch.Tensor:
    """delta' [R, d] of states [R, d] and pairs of unit vectors [R, 2, d]."""
    difference_RD = pairs_R2D[:, 0] - pairs_R2D[:, 1]
    return -difference_RD * (difference_RD * hidden_RD).sum(1, keepdim=True)


def first_pairs(hidden_ED: torch.Tensor, gradient_ED: torch.Tensor) -> torch.Tensor:
    """Orthogonal pairs [E, 2, d] with an offset of zero: w = (h + e, h - e) / sqrt(2), both of norm 1.

    e is the direction of descent orthogonal to h. A small turn of the pair moves h along e.
    """
    state_ED = nn.functional.normalize(hidden_ED, dim=1)
    descent_ED = -gradient_ED + (gradient_ED * state_ED).sum(1, keepdim=True) * state_ED
    descent_ED = nn.functional.normalize(descent_ED, dim=1)
    return torch.stack([state_ED + descent_ED, state_ED - descent_ED], 1) / 2**0.5


def solve_directions(
    forward: ValueForward,
    settings: ValueSettings,
    max_logits: int,
    terms: Sequence[Term],
    progress: Callable[[int], None],
    *,
    orthogonality: float,
) -> list[OptimizedValue]:
    """Optimize the pairs of all edits of a batch; their values have the offsets of the bare prompts.

    One evaluation more than ``num_steps``: the one of the gradient that the pairs start from.
    """
    batch = _Batch(forward, max_logits)
    results = batch.results
    pairs_E2D = first_pairs(batch.bare_ED, batch.gradient_at_zero())
    state = AdamState.start(pairs_E2D)
    running_E = torch.ones(len(results), dtype=torch.bool)  # on the CPU
    for step in range(settings.num_steps):
        is_last = step == settings.num_steps - 1
        state.delta_ED = pairs_E2D.detach().requires_grad_(True)
        with torch.enable_grad():
            nll_E = batch.nll(exchange(batch.hidden_RD, state.delta_ED[batch.edit_R]), not is_last)
            cosine_E = (state.delta_ED[:, 0] * state.delta_ED[:, 1]).sum(1)
            parts = {"nll": nll_E, "orthogonality": orthogonality * cosine_E**2}
            total_E = nll_E + parts["orthogonality"]
            below_E = total_E.detach() < settings.early_stop_loss
            for term in terms:
                parts[term.name] = term.loss(exchange(batch.bare_ED, state.delta_ED), step)
                total_E = total_E + parts[term.name]
        read = LateRead(torch.stack([total_E, *parts.values(), cosine_E, below_E.to(total_E)], 1))
        differentiate: Callable[[], tuple[torch.Tensor, ...]] = functools.partial(
            torch.autograd.grad, total_E.sum(), state.delta_ED
        )
        if not is_last:
            differentiate = launch_early(total_E.device, differentiate)
        rows_EP = read.wait()
        is_below_E = rows_EP[:, -1].bool()
        done_E = running_E & (is_below_E | is_last)
        for index in running_E.nonzero()[:, 0].tolist():
            *losses, results[index].notes["cosine"], _ = rows_EP[index].tolist()
            results[index].losses.append(dict(zip(("loss", *parts), losses, strict=True)))
            results[index].num_updates = step
        for index in done_E.nonzero()[:, 0].tolist():
            value = results[index]
            value.delta_D = exchange(value.v0_D[None], pairs_E2D[index][None])[0]
            value.stop_reason = "loss" if is_below_E[index] else "steps"
        progress(int(done_E.sum()))
        running_E = running_E & ~done_E
        if not running_E.any():
            break
        (gradient_E2D,) = differentiate()
        scales = adam_scales(step + 1, settings.lr / pairs_E2D.shape[-1] ** 0.5)
        stepped_E2D = nn.functional.normalize(state.stepped(gradient_E2D, *scales, float("inf")).detach(), dim=2)
        moves_E11 = upload(running_E, pairs_E2D.device)[:, None, None]
        pairs_E2D = torch.where(moves_E11, stepped_E2D, pairs_E2D)
    return results


class _Batch:
    """The rows of a batch, under an offset each.

    Attributes:
        hidden_RD, bare_ED: unedited states of all rows, and of the bare prompts. edit_R: edit of each row.
    """

    def __init__(self, forward: ValueForward, max_logits: int) -> None:
        self.forward, self.batch, self.max_logits = forward, forward.batch, max_logits
        self.hidden_RD, self.edit_R = forward.activations.site_RD, forward.batch.edit_R
        self.results = initial_values(forward.activations, forward.batch)
        self.bare_ED = torch.stack([value.v0_D for value in self.results])
        self._original: OriginalLogits | None = None
        self.mean = label_mean(self.batch)
        # A forward pass adds an offset per edit of its batch; here every row is one.
        forward.batch = replace(forward.batch, edit_R=torch.arange(len(self.edit_R), device=self.edit_R.device))

    def nll(self, offset_RD: torch.Tensor, needs_gradient: bool) -> torch.Tensor:
        """Mean loss [E] of the targets."""
        states_ND, tokens_L = self.forward.hidden_at_labels(offset_RD), self.batch.label_token_L
        losses = vocab_losses(
            self.forward.lm_head, states_ND, tokens_L, self._original, self.max_logits, needs_gradient
        )
        self._original = losses.original  # for a KL term that is not used
        return self.mean(losses.nll_L, offset_RD[: len(self.results), 0])

    def gradient_at_zero(self) -> torch.Tensor:
        """Gradient [E, d] of the loss with respect to an offset that all rows of an edit share."""
        with torch.enable_grad():
            zero_ED = torch.zeros_like(self.bare_ED).requires_grad_(True)
            (gradient_ED,) = torch.autograd.grad(self.nll(zero_ED[self.edit_R], True).sum(), zero_ED)
        return gradient_ED
