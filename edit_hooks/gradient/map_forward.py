"""Forward passes in which one linear map's output is computed by the caller, and the rest of the model is frozen.

The caller's function gets the map's input and original output at all tokens of all rows and returns the output to
use. :class:`PlainMapForward` runs every token through the whole model and forms all logits, as the released loops do.
:class:`CachedMapForward` computes the same losses up to rounding:

- input and original output of the map do not depend on the function, so all that lies below runs once;
- the blocks above run on rows with labels only, up to the last label, as in
  :class:`~edit_hooks.gradient.label_forward.CachedLabelForward`.

Shapes: R rows, T columns, F and D input and output width of the map, L labels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from edit_hooks.gradient.label_forward import CachedLabelForward, PlainLabelForward
from edit_hooks.gradient.labeled_rows import LabeledRows
from edit_hooks.memory.replay import PAD
from edit_hooks.memory.side_memory import activation_shift, output_with_delta, row_distance
from edit_hooks.modeling.architectures import decoder_of, input_device, is_transposed
from edit_hooks.modeling.device.run_ahead import upload
from edit_hooks.modeling.hooks import Registration, hooks, outputs_replaced, stop_after

# Input [R, T, F] and original output [R, T, D] of the map -> output to use, in the dtype of the original one.
Transform = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class MapActivations(NamedTuple):
    """Input and output of a linear map."""

    x_RTF: torch.Tensor
    output_RTD: torch.Tensor

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self)


class MapForward(Protocol):
    """Repeated forward passes over one batch of rows."""

    def nll(self, transform: Transform) -> torch.Tensor:
        """Negative log-likelihood [L] of every label in nats, on the device of the rows; differentiable."""


class PlainMapForward:
    """Every token of every row through all blocks, and logits at every position."""

    def __init__(self, model: Any, rows: LabeledRows, name: str) -> None:
        self.module = model.get_submodule(name)
        self.forward = PlainLabelForward(model, rows, [name])

    def nll(self, transform: Transform) -> torch.Tensor:
        def replace_output(_module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            return transform(args[0], output)

        with hooks(Registration(self.module, replace_output)):
            return self.forward.nll()


class CachedMapForward:
    """Forward passes without their constant parts.

    Args:
        name: the map, an MLP projection.
    """

    def __init__(self, model: Any, rows: LabeledRows, name: str) -> None:
        self.module = model.get_submodule(name)
        activations: list[MapActivations] = []
        masks: list[torch.Tensor] = []

        def record_mask(_module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
            masks.append(kwargs["attention_mask"])

        # The pass that fills the caches runs the map once, and the hooks on the model, which may change the mask.
        with hooks(_record(self.module, activations), Registration(decoder_of(model), record_mask, on_input=True)):
            self.forward = CachedLabelForward(model, rows, [name])
        (self.activations,), (mask_RT,) = activations, masks
        self.forward.rows = replace(rows, mask_RT=mask_RT.to(rows.ids_RT.device))
        has_label_R = torch.bincount(rows.places_2L[0], minlength=len(rows.ids_RT)) > 0
        self.labeled_rows = upload(has_label_R.nonzero()[:, 0], rows.ids_RT.device)
        self.forward.select(has_label_R)
        self.forward.end_at_labels()

    def nll(self, transform: Transform) -> torch.Tensor:
        output_RTD = transform(*self.activations)
        width = self.forward.rows.ids_RT.shape[1]
        labeled_RTD = output_RTD[self.labeled_rows.to(output_RTD.device), :width]
        with outputs_replaced([self.module], labeled_RTD):
            return self.forward.nll()


MAP_ENGINES: dict[str, type[CachedMapForward] | type[PlainMapForward]] = {
    "fast": CachedMapForward,
    "reference": PlainMapForward,
}


@torch.no_grad()
def map_activations(model: Any, name: str, ids_RT: torch.Tensor, mask_RT: torch.Tensor) -> MapActivations:
    """Input and output of a linear map; what lies above does not run."""
    module = model.get_submodule(name)
    activations: list[MapActivations] = []
    with hooks(_record(module, activations)), stop_after(module):
        model(input_ids=ids_RT, attention_mask=mask_RT, use_cache=False)
    return activations[0]


class KeptActivations:
    """Activations of a map on numbered batches, kept for further calls while they fit into a budget.

    Args:
        compute: computes those of a batch. max_bytes: the budget; 0 keeps nothing.
    """

    def __init__(self, compute: Callable[[int], MapActivations], max_bytes: int) -> None:
        self._compute, self._free = compute, max_bytes
        self._kept: dict[int, MapActivations] = {}

    def __call__(self, number: int) -> MapActivations:
        if number in self._kept:
            return self._kept[number]
        activations = self._compute(number)
        # Batches come in turns, so the first ones are kept: the most recent ones would be replaced before they return.
        if activations.size <= self._free:
            self._kept[number] = activations
            self._free -= activations.size
        return activations


def _record(module: nn.Module, activations: list[MapActivations]) -> Registration:
    def record(_module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        activations.append(MapActivations(args[0], output))

    return Registration(module, record)


def past_distances(
    model: PreTrainedModel, name: str, rows: Sequence[torch.Tensor], activation: str | None, budget: int
) -> Callable[[int, torch.Tensor], torch.Tensor]:
    """Distances [R] of the rows of past edits, by their number, under a change of a linear map.

    What lies above the map does not run.

    Args:
        rows: per edit its token ids, padded with :data:`PAD`.
        activation: function after which outputs are compared; ``None``: before any.
        budget: bytes of what lies below the map that are kept, once per past edit; 0: it runs in every call.
    """
    transposed, device = is_transposed(model.get_submodule(name)), input_device(model)

    def compute(number: int) -> MapActivations:
        ids_RT = rows[number].to(device)
        return map_activations(model, name, ids_RT.clamp(min=0).long(), (ids_RT != PAD).long())

    activations = KeptActivations(compute, budget)

    def distance(number: int, change: torch.Tensor) -> torch.Tensor:
        x_RTF, output_RTD = activations(number)
        copy_RTD = output_with_delta(x_RTF, output_RTD, change, transposed)
        shift_RT = activation_shift(output_RTD, copy_RTD, activation)
        return row_distance(shift_RT, (rows[number] != PAD).to(shift_RT.device))

    return distance
