"""Probes of the promises that editors rely on, on rows of a few tokens.

A probe raises :class:`ProbeError` with one line if a promise does not hold. Offsets and updates are as large as what
they change, so an effect that is lost or doubled is far above rounding.

Shapes: R rows, T tokens, N tokens of all rows, P positions with logits, d residual width, f width of a map's input, L
labels, E edits, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from edit_hooks.deltas.apply import edited
from edit_hooks.deltas.delta import Delta, Factor
from edit_hooks.deltas.row_adapters import PerRowAdapters
from edit_hooks.gradient.label_forward import CachedLabelForward, PlainLabelForward
from edit_hooks.gradient.labeled_rows import LabeledRow, batch_rows
from edit_hooks.locate.values.reference_forward import ReferenceForward
from edit_hooks.locate.values.rows import TokenRow
from edit_hooks.locate.values.suffix_forward import SuffixForward
from edit_hooks.locate.values.value_batch import Site, ValueBatch, ValueForward
from edit_hooks.modeling.architectures import Architecture, head_of, input_device, is_transposed, map_shape
from edit_hooks.modeling.forward.forward_pass import agree, probe_rows
from edit_hooks.modeling.forward.kv_cache import right_padded
from edit_hooks.modeling.forward.lm_head import default_max_logits
from edit_hooks.modeling.forward.vocab_loss import vocab_losses
from edit_hooks.modeling.hooks import hooks, on_input, on_output, select_positions
from edit_hooks.modeling.tensors import at_least_float32
from edit_hooks.utils.errors import first_line

LENGTHS = (9, 6)  # of the rows
POSITIONS = (3, 2)  # the fact tokens in them
EFFECT = 1.0  # size of an offset or update, relative to the states that it changes


class ProbeError(Exception):
    """A promise does not hold; the message is one line."""


def require(holds: bool, reason: str) -> None:
    """Raise :class:`ProbeError` unless a condition holds."""
    if not holds:
        raise ProbeError(reason)


class _Recorded(NamedTuple):
    """Every input [R, T, f] and output [R, T, d] of a map in one pass."""

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]


class _MapRun(NamedTuple):
    """A pass over the rows: logits [P, V], and what was recorded of some maps by name."""

    logits_PV: torch.Tensor
    maps: dict[str, _Recorded]


class PlainPasses:
    """The rows and the plain passes that all probes share."""

    def __init__(self, model: nn.Module, arch: Architecture) -> None:
        self.model, self.arch, self.device = model, arch, input_device(model)
        self.rows = probe_rows(model, LENGTHS)
        self.ids_RT, self.mask_RT = right_padded(self.rows, self.device)
        self.is_token_RT = self.mask_RT.bool()
        last_R = self.mask_RT.sum(1) - 1
        self.row_P = torch.tensor([0, 0, 1, 1], device=self.device)
        self.column_P = torch.stack([last_R - 2, last_R], 1).flatten()
        self.plain_PV = self.logits()

    def logits(self) -> torch.Tensor:
        """Logits [P, V] at two tokens of each row, those of the first row first, under whatever hooks are active."""
        model: Any = self.model
        with hooks(on_input(head_of(model), select_positions(self.row_P, self.column_P))):
            logits_1PV: torch.Tensor = model(input_ids=self.ids_RT, attention_mask=self.mask_RT, use_cache=False).logits
        return logits_1PV.squeeze(0)

    def _at_tokens(self, states_RTD: torch.Tensor) -> torch.Tensor:
        return states_RTD[self.is_token_RT.to(states_RTD.device)]

    def noise(self, *shape: int, seed: int) -> torch.Tensor:
        """Fixed standard normal numbers, float32."""
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(self.device)

    # -- maps ----------------------------------------------------------------------------------------------------------

    def run(self, names: Sequence[str]) -> _MapRun:
        """Run the rows under whatever is active, and record maps."""
        maps = {name: _Recorded([], []) for name in names}
        module = self.model.get_submodule
        reads = [on_input(module(name), _keep(recorded.inputs)) for name, recorded in maps.items()]
        writes = [on_output(module(name), _keep(recorded.outputs)) for name, recorded in maps.items()]
        with hooks(*reads, *writes):
            return _MapRun(self.logits(), maps)

    def check_map(self, name: str, run: _MapRun) -> None:
        """A map runs once per pass on states [R, T, f], and hooks see what goes in and comes out."""
        recorded = run.maps[name]
        require(len(recorded.inputs) == 1, f"{name} runs {len(recorded.inputs)} times in one pass")
        width_out, width_in = map_shape(self.model.get_submodule(name))
        (x_RTF,), (y_RTD,) = recorded
        found = f"{name} maps {list(x_RTF.shape)} to {list(y_RTD.shape)} where rows are {list(self.ids_RT.shape)}"
        require(x_RTF.shape == (*self.ids_RT.shape, width_in), found)
        require(y_RTD.shape == (*self.ids_RT.shape, width_out), found)
        require(agree(self.model.get_submodule(name)(x_RTF), y_RTD), f"{name} computes more than its recorded output")

    def rank_one(self, names: Sequence[str], run: _MapRun) -> Delta:
        """A rank-one edit of maps, each update as large as the map's output in an unedited pass."""
        factors = {}
        for number, name in enumerate(names):
            (x_RTF,), (y_RTD,) = run.maps[name]
            x_RTF, y_RTD = at_least_float32(x_RTF), at_least_float32(y_RTD)
            left_D = self.noise(y_RTD.shape[2], seed=2 * number).to(y_RTD)
            right_F = self.noise(x_RTF.shape[2], seed=2 * number + 1).to(x_RTF)
            size = EFFECT * self._at_tokens(y_RTD).norm() / self._at_tokens(x_RTF @ right_F).norm() / left_D.norm()
            right_F = right_F * size.to(right_F.device)
            factors[name] = Factor(left_D[:, None], right_F[:, None], is_transposed(self.model.get_submodule(name)))
        return Delta(factors=factors)

    def run_beside(self, names: Sequence[str], delta: Delta) -> _MapRun:
        """A pass with an update beside the maps in the first row alone."""
        with PerRowAdapters(self.model, [delta, None]):
            return self.run(names)

    def run_written(self, names: Sequence[str], delta: Delta) -> _MapRun:
        """A pass with an update written into the weights."""
        with edited(self.model, delta):
            return self.run(names)

    def check_update(self, name: str, delta: Delta, run: _MapRun, num_rows: int) -> None:
        """In the first rows, a map's output is its unedited one for the recorded input, plus the update's."""
        (x_RTF,), (y_RTD,) = run.maps[name]
        left, right, _ = delta.factors[name]
        moved_RTD = at_least_float32(y_RTD) - at_least_float32(self.model.get_submodule(name)(x_RTF))
        wanted_RTD = at_least_float32(x_RTF) @ right @ left.T
        tokens_RT = self.is_token_RT[:num_rows].to(moved_RTD.device)
        same = _same_change(moved_RTD[:num_rows][tokens_RT], wanted_RTD[:num_rows][tokens_RT], y_RTD.dtype)
        require(same, f"{name}: an update changes its output by something else")

    def check_other_row(self, run: _MapRun) -> None:
        """The edit of the first row leaves the other one alone."""
        require(agree(run.logits_PV[2:], self.plain_PV[2:]), "the edit of a row changes another row")

    def check_undone(self, run: _MapRun) -> None:
        """A written update changed the logits, and they are back, bit for bit."""
        require(not agree(run.logits_PV, self.plain_PV), "updates as large as the maps' outputs change no logit")
        require(torch.equal(self.logits(), self.plain_PV), "the logits are others after an edit is undone")

    def check_gate(self, layer: int) -> None:
        """The first input map, or the first half of it, is the gate: the key is linear in the other one."""
        names, rewrite = self.arch.module_names("mlp_in", layer), self.arch.rewrite_name(layer)
        width, last = map_shape(self.model.get_submodule(rewrite))[1], self.model.get_submodule(names[-1])
        if len(names) == 1 and map_shape(last)[0] == width:
            return  # no gate
        (key_RTF,) = self.run([rewrite]).maps[rewrite].inputs

        def double(output: torch.Tensor) -> torch.Tensor:
            return torch.cat([output[..., :-width], 2 * output[..., -width:]], -1)

        with hooks(on_output(last, double)):
            (doubled_RTF,) = self.run([rewrite]).maps[rewrite].inputs
        require(agree(doubled_RTF, 2 * key_RTF), f"block {layer}: {names[0]} does not begin with the gate of the MLP")

    # -- residual stream -----------------------------------------------------------------------------------------------

    def contributions(self, layers: Sequence[int]) -> list[float]:
        """Factors between MLP outputs and their contributions to the residual stream, behind the post-norm if any."""
        names = [name for layer in layers for name in (self.arch.mlp_name(layer), self.arch.block_name(layer))]
        unedited = self.run(names)
        return [self._contribution(layer, unedited) for layer in layers]

    def _contribution(self, layer: int, unedited: _MapRun) -> float:
        mlp, block = self.arch.mlp_name(layer), self.arch.block_name(layer)
        (before_RTD,), (hidden_RTD,) = unedited.maps[mlp].outputs, unedited.maps[block].outputs
        offset_RTD = self.noise(*before_RTD.shape, seed=3).to(before_RTD)
        offset_RTD = offset_RTD * (EFFECT * 4 * at_least_float32(hidden_RTD).norm() / offset_RTD.norm()).to(offset_RTD)
        with hooks(on_output(self.model.get_submodule(mlp), lambda output: output + offset_RTD.to(output))):
            edited_run = self.run([mlp, block])
        (after_RTD,), (moved_RTD,) = edited_run.maps[mlp].outputs, edited_run.maps[block].outputs
        moved_ND = self._at_tokens(at_least_float32(moved_RTD) - at_least_float32(hidden_RTD))
        added_RTD = at_least_float32(after_RTD) - at_least_float32(before_RTD)
        has_norm = self.arch.has("post_norm", layer)
        if has_norm:
            norm = self.model.get_submodule(self.arch.post_norm_name(layer))
            added_RTD = at_least_float32(norm(after_RTD)) - at_least_float32(norm(before_RTD))
        added_ND = self._at_tokens(added_RTD).to(moved_ND)
        scale = float((moved_ND * added_ND).sum() / added_ND.square().sum())
        through = " through its norm" if has_norm else ""
        output = "attention's output alone" if self.arch.changes_attention(layer) else "MLP's output"
        reason = f"block {layer} does not add its {output}{through} to the residual stream at a constant scale"
        require(scale > 0 and _same_change(moved_ND, scale * added_ND, hidden_RTD.dtype), reason)
        return scale

    # -- engines -------------------------------------------------------------------------------------------------------

    def batch(self) -> ValueBatch:
        """Two edits; each has a whole row and one that is shorter by two tokens."""

        def row(index: int, length: int) -> TokenRow:
            labels = [(column, self.rows[1 - index][column % 5]) for column in (length - 2, length - 1)]
            return TokenRow(tuple(self.rows[index][:length]), POSITIONS[index], tuple(labels))

        problems = [
            ([row(index, length), row(index, length - 2)], TokenRow(tuple(ids[:4]), 1))
            for index, (ids, length) in enumerate(zip(self.rows, LENGTHS, strict=True))
        ]
        return ValueBatch.of(problems, self.device)

    def check_plain(self, layer: int) -> None:
        """The plain engine's logits under an offset are those of a row that runs alone."""
        batch = self.batch()
        forward = ReferenceForward(self.model, batch, layer, "mlp")
        delta_ED = self._offsets(forward)
        logits_NV = forward.hidden_at_labels(delta_ED)
        model: Any = self.model
        shorter_rows = range(1, len(batch.edit_R) - len(batch.kl_row_E), 2)  # one of each edit
        for edit, row in enumerate(shorter_rows):
            length, position = int(batch.mask_RT[row].sum()), int(batch.positions_R[row])
            module = self.model.get_submodule(self.arch.mlp_name(layer))
            with hooks(on_output(module, _adding_at(position, delta_ED[edit]))):
                alone_TV = model(input_ids=batch.ids_RT[row : row + 1, :length], use_cache=False).logits[0]
            of_row = (batch.label_row_L == row).nonzero()[:, 0]
            expected = at_least_float32(alone_TV[batch.label_column_L[of_row].to(alone_TV.device)]).log_softmax(1)
            require(agree(logits_NV[of_row.to(logits_NV.device)], expected), f"block {layer}: padding changes a row")

    def check_suffix(self, layer: int, site: Site) -> None:
        """The fast engine's losses under an offset, and their gradients, are those of the plain one."""
        results = []
        delta_ED: torch.Tensor | None = None
        for engine in (ReferenceForward, SuffixForward):
            batch = self.batch()
            forward: ValueForward = engine(self.model, batch, layer, site)
            delta_ED = self._offsets(forward) if delta_ED is None else delta_ED
            leaf_ED = delta_ED.detach().requires_grad_(True)
            with torch.enable_grad():
                hidden_ND = forward.hidden_at_labels(leaf_ED)
                limit = default_max_logits(self.device)
                losses = vocab_losses(forward.lm_head, hidden_ND, batch.label_token_L, None, limit)
                (gradient_ED,) = torch.autograd.grad(losses.nll_L.sum(), leaf_ED)
            original = losses.original.logits_EV - losses.original.logsumexp_E[:, None]
            results.append((losses.nll_L.detach(), original.detach(), gradient_ED))
        parts = zip(("losses", "log-probabilities at the KL token", "gradients"), *results, strict=True)
        for what, plain, fast in parts:
            require(_close(fast, plain, self._dtype), f"block {layer}, {site}: other {what} from the suffix alone")

    def check_labels(self, names: Sequence[str], unedited: _MapRun) -> None:
        """The losses of label rows without their constant parts are those of whole passes, under a change of a map."""
        rows = batch_rows(self.model, [LabeledRow(ids, [(2, ids[0]), (len(ids) - 1, ids[1])]) for ids in self.rows])
        for name in names:
            delta = self.rank_one([name], unedited)
            found = []
            for engine in (PlainLabelForward, CachedLabelForward):
                forward = engine(self.model, rows, [name])
                with PerRowAdapters(self.model, [delta, None]):
                    found.append(forward.nll())
            require(_close(found[1], found[0], self._dtype), f"{name}: other losses where constant parts are kept")

    def _offsets(self, forward: ValueForward) -> torch.Tensor:
        """Offsets [E, d] as large as the site's output."""
        site_ED = forward.activations.site_RD[forward.batch.kl_row_E]
        noise_ED = self.noise(*site_ED.shape, seed=4).to(site_ED)
        return noise_ED * (EFFECT * site_ED.norm() / noise_ED.norm())

    @property
    def _dtype(self) -> torch.dtype:
        return self.plain_PV.dtype


def _keep(records: list[torch.Tensor]) -> Callable[[torch.Tensor], None]:
    """A hook that records copies: some models add to the recorded tensors in place."""

    def keep(hidden: torch.Tensor) -> None:
        records.append(hidden.detach().clone())

    return keep


def _adding_at(position: int, offset_D: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    def add(hidden_RTD: torch.Tensor) -> torch.Tensor:
        changed_RTD = hidden_RTD.clone()
        changed_RTD[:, position] += offset_D.to(hidden_RTD)
        return changed_RTD

    return add


def _same_change(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a change is the wanted one up to the rounding of the states that it changes."""
    limit = 4 * torch.finfo(dtype).eps ** 0.5
    return bool((found.to(wanted) - wanted).norm() <= limit * wanted.norm()) and bool(wanted.norm() > 0)


def _close(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> bool:
    limit = 2 * torch.finfo(dtype).eps ** 0.5
    return bool((found.to(wanted) - wanted).norm() <= limit * wanted.norm())


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Turn whatever a model's code raises under a probe into a :class:`ProbeError`."""
    try:
        yield
    except (ProbeError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ProbeError(first_line(error)) from error
