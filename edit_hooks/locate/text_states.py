"""Given states, written at tokens of whole texts.

:class:`StateWriter` is the capability of a base of AnyEdit, declared by ``writes_states``. :func:`write_by_keys` is its
form for MEMIT and AlphaEdit, closed-form updates of several layers. For layer l, with n of them left and the updates so
far in place,

    K = keys at the written tokens, K_p = keys at all other tokens, R = (Z - h^L) / n,
    A = (ridge M^-1 + K_p K_p^T + K K^T)^-1 K,   W <- W + R A^T

with the metric M and the ridge of the editor: C^-1 and lambda, or the null-space projector and L2. K_p protects the
other tokens of the same texts. As in the release, it includes padded positions of a batch, whose rows are padded on the
right.

Shapes: R texts, T tokens, W written tokens, P other tokens, d residual width, f key width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from edit_hooks.base.config import Settings
from edit_hooks.base.footprint import Footprint
from edit_hooks.base.job import EditJob
from edit_hooks.deltas.apply import edited
from edit_hooks.deltas.delta import Delta, Factor
from edit_hooks.deltas.norms import largest_norm_ratio
from edit_hooks.locate.layerwise_update import uses_norm
from edit_hooks.locate.moments.solve import KeyMetric
from edit_hooks.locate.streams.carried_keys import CarriedKeys, KeySystem
from edit_hooks.locate.values.post_norm import nearest_outputs
from edit_hooks.modeling.architectures import architecture_of, input_device, is_transposed, weight_of
from edit_hooks.modeling.forward.kv_cache import right_padded
from edit_hooks.modeling.hooks import frozen, hooks, on_input, on_output, stop_after
from edit_hooks.modeling.support import contribution_scale
from edit_hooks.modeling.tensors import at_least_float32

MAX_TOKENS = 2**14  # of one forward pass, padding included


class StatedText(NamedTuple):
    """A text and the states that some of its tokens should have behind the last edited block.

    Attributes:
        ids: its tokens. positions: of the W tokens. states_WD: z.
    """

    ids: tuple[int, ...]
    positions: list[int]
    states_WD: torch.Tensor


class StateWriter(Protocol):
    """Capability of an editor: it writes given states, made by another one.

    Attributes:
        writes_states: ``True`` in a class that has it; subclasses that change the targets or the solve set ``False``.
        states_settings: its settings that are fixed then, because they have no effect or no meaning.
    """

    writes_states: bool
    states_settings: ClassVar[Settings]

    def write_states(self, job: EditJob[Any], texts: Sequence[StatedText]) -> list[Delta]:
        """A delta per group of the job, with diagnostics; ``texts`` belong to the requests."""

    def states_footprint(self, config: Any, model: nn.Module) -> Footprint:
        """Memory and arithmetic of writing the states of one text."""

    def constraint_warnings(self, model: nn.Module) -> list[str]:
        """Warnings about what the updates are constrained by."""


class TextBatch(NamedTuple):
    """Rows padded on the right: token ids and mask [R, T]."""

    ids_RT: torch.Tensor
    mask_RT: torch.Tensor

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], pad: int | None, device: torch.device) -> TextBatch:
        ids_RT, mask_RT = right_padded(rows, device)
        return cls(ids_RT.masked_fill(mask_RT == 0, pad or 0), mask_RT)


class LayerSystem(Protocol):
    """What :func:`write_by_keys` asks its editor: see :class:`~edit_hooks.editors.memit.ResidualSpreadingEditor`."""

    def metric(self, job: EditJob[Any], layer: int) -> KeyMetric: ...

    def ridge(self, metric: KeyMetric, keys_UF: torch.Tensor, config: Any) -> float: ...

    def divisor(self, layers_left: int) -> float: ...


def write_by_keys(editor: LayerSystem, job: EditJob[Any], texts: Sequence[StatedText]) -> list[Delta]:
    """The closed-form updates that give texts their states, a delta per group."""
    indices = range(len(texts))
    groups = [indices] if job.joint else [range(index, index + 1) for index in indices]
    with frozen(job.model):
        return [_write_group(editor, job, [texts[index] for index in group]) for group in groups]


class _Written(NamedTuple):
    """The texts of a group, and the places of their written tokens, text by text."""

    batch: TextBatch
    row_W: torch.Tensor
    column_W: torch.Tensor

    @classmethod
    def of(cls, texts: Sequence[StatedText], pad: int | None, device: torch.device) -> _Written:
        row_W = torch.tensor([row for row, text in enumerate(texts) for _ in text.positions])
        column_W = torch.tensor([position for text in texts for position in text.positions])
        return cls(TextBatch.of([text.ids for text in texts], pad, device), row_W, column_W)

    def parts(self) -> Iterator[_Written]:
        """The texts in passes of at most :data:`MAX_TOKENS` tokens, all as wide as before."""
        ids_RT, mask_RT = self.batch
        num_rows = max(1, MAX_TOKENS // ids_RT.shape[1])
        for start in range(0, len(ids_RT), num_rows):
            rows = slice(start, start + num_rows)
            is_own_W = (self.row_W >= start) & (self.row_W < start + num_rows)
            batch = TextBatch(ids_RT[rows], mask_RT[rows])
            yield _Written(batch, self.row_W[is_own_W] - start, self.column_W[is_own_W])


class _Readings(NamedTuple):
    """Keys and outputs of one map, and the output of the last edited block.

    Attributes:
        keys_RTF: at all tokens. outputs_WD, hidden_WD: at the written ones.
    """

    keys_RTF: torch.Tensor
    outputs_WD: torch.Tensor
    hidden_WD: torch.Tensor


@torch.no_grad()
def _write_group(editor: LayerSystem, job: EditJob[Any], texts: Sequence[StatedText]) -> Delta:
    model, config, layers = job.model, job.config, job.config.edited_layers
    arch, through_norm = architecture_of(model), uses_norm(model, config.residual_mode)
    written = _Written.of(texts, job.tokenizer.pad_token_id, input_device(model))
    _, row_W, column_W = written
    is_other_RT = torch.ones_like(written.batch.mask_RT, dtype=torch.bool)
    is_other_RT[row_W, column_W] = False
    delta, records = Delta(), []
    start_WD: torch.Tensor | None = None
    for index, layer in enumerate(layers):
        readings = _read(model, written, layer, layers[-1], delta)
        hidden_WD = readings.hidden_WD.double()
        target_WD = torch.cat([text.states_WD.to(hidden_WD) for text in texts])
        start_WD = hidden_WD if start_WD is None else start_WD
        change_WD = (target_WD - hidden_WD) / editor.divisor(len(layers) - index) / contribution_scale(model)
        if through_norm:
            outputs_WD = readings.outputs_WD.double()
            norm = model.get_submodule(arch.post_norm_name(layer))
            change_WD = nearest_outputs(norm, outputs_WD, change_WD) - outputs_WD
        keys_WF, others_PF = readings.keys_RTF[row_W, column_W].double(), readings.keys_RTF[is_other_RT]
        metric = editor.metric(job, layer)
        ridge = editor.ridge(metric, keys_WF, config)
        system = KeySystem(metric, CarriedKeys.protecting(others_PF, metric, ridge), keys_WF)
        right_WF = system.right_factors(range(len(keys_WF)), ridge)
        module = model.get_submodule(arch.rewrite_name(layer))
        dtype = torch.promote_types(weight_of(module).dtype, torch.float32)
        factor = Factor(change_WD.T.to(dtype), right_WF.T.to(dtype), is_transposed(module))
        delta.factors[arch.rewrite_name(layer)] = factor
        share = float((keys_WF * right_WF).sum(1).mean())
        records.append({"layer": layer, "written_share": share, "protected_keys": len(others_PF), **metric.describe()})
    hidden_WD = _read(model, written, layers[-1], layers[-1], delta).hidden_WD.double()
    assert start_WD is not None
    left_W = (target_WD - hidden_WD).norm(dim=1) / (target_WD - start_WD).norm(dim=1).clamp(min=1e-30)
    delta.diagnostics = {
        "layers": records,
        "constraint": records[0]["constraint"],
        "update_norm_ratio": largest_norm_ratio(model, delta),
        "distance_left": float(left_W.mean()),
        "residual_mode": "normalized" if through_norm else "faithful",
    }
    return delta


def _read(model: PreTrainedModel, written: _Written, layer: int, last: int, delta: Delta) -> _Readings:
    """Passes under the updates so far, up to the last edited block."""
    with edited(model, delta) if delta.factors else contextlib.nullcontext():
        parts = [_read_part(model, part, layer, last) for part in written.parts()]
    return _Readings(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def _read_part(model: PreTrainedModel, written: _Written, layer: int, last: int) -> _Readings:
    arch, found = architecture_of(model), dict[str, torch.Tensor]()
    rewrite, block = model.get_submodule(arch.rewrite_name(layer)), model.get_submodule(arch.block_name(last))
    (ids_RT, mask_RT), row_W, column_W = written

    def keep(name: str, tensor: torch.Tensor) -> None:
        tensor = tensor if name == "keys" else tensor[row_W, column_W]
        found[name] = at_least_float32(tensor).to(ids_RT.device)

    with (
        hooks(
            on_input(rewrite, lambda keys: keep("keys", keys)),
            on_output(rewrite, lambda outputs: keep("outputs", outputs)),
            on_output(block, lambda hidden: keep("hidden", hidden)),
        ),
        stop_after(block),
    ):
        model(input_ids=ids_RT, attention_mask=mask_RT, use_cache=False)
    return _Readings(found["keys"], found["outputs"], found["hidden"])
