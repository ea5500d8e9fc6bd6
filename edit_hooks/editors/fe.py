"""FE: MEMIT with targets of every layer from one forward pass, instead of shares of the last layer's residual.

Method of the FE release (2605.00358), on MEMIT. With l_1 < ... < l_n the edited layers:

1. z^{l_1}: MEMIT's optimization at the output of the *first* edited block.
2. The bare prompt alone runs with that block's output at the fact token replaced by z^{l_1}; z^l of a later layer is
   its block's output there.
3. For every layer with the updates so far: H^l the block's output, R = Z^l - H^l, not divided by the layers that are
   left, and MEMIT's solve.

So a layer writes what the layers before left over, and the states of all layers fit each other. In a stream the keys of
past edits join the system (``carry_keys``, on by default as in the release, which reads them before a layer's own
update; that does not move them).

The release optimizes the targets of all facts on the unedited model, also those of later steps. Here every step does
it on the model as it is, as MEMIT does. Where blocks normalize their MLP output (Gemma, OLMo 2), z^{l_1} is reached
through that norm, and each layer's share becomes an output before it (``residual_mode``).

Shapes: E requests of a call, d residual width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from edit_hooks.base.config import Settings, config_field
from edit_hooks.base.footprint import StreamGrowth
from edit_hooks.base.job import EditJob
from edit_hooks.editors.memit import MEMITConfig, ResidualSpreadingEditor
from edit_hooks.locate.layerwise_update import LayerwiseUpdate, Readings
from edit_hooks.locate.value_editor import MEMIT_CONTRACT_SETTINGS
from edit_hooks.locate.values.key_reader import MAX_TOKENS
from edit_hooks.locate.values.rows import TokenRow
from edit_hooks.locate.values.value_optimization import OptimizedValue
from edit_hooks.modeling.architectures import architecture_of, input_device
from edit_hooks.modeling.forward.kv_cache import right_padded
from edit_hooks.modeling.hooks import frozen, hooks, on_output, record_at, stop_after
from edit_hooks.utils.batching import token_batches
from edit_hooks.utils.errors import EditingError


@dataclass(kw_only=True)
class FEConfig(MEMITConfig):
    """MEMIT's settings; the targets come from the first edited layer."""

    carry_keys: bool = config_field("in a stream, protect the keys of earlier steps", default=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stream == "exact":
            raise EditingError("fe has targets of several layers, and stream: exact is for one; use memit with it.")


class FE(ResidualSpreadingEditor[FEConfig]):
    """MEMIT whose targets are carried forward from the first edited layer."""

    name = "fe"
    config_class = FEConfig
    config_folders = ("fe", "memit")
    stream_growth = StreamGrowth("as alphaedit", "up to f/2 edits")
    contract_settings: ClassVar[Settings] = MEMIT_CONTRACT_SETTINGS

    def target_layer(self, config: FEConfig) -> int:
        return config.edited_layers[0]

    def layerwise_update(
        self,
        job: EditJob[FEConfig],
        rows: list[list[TokenRow]],
        values: Sequence[OptimizedValue],
        through_norm: bool,
    ) -> LayerwiseUpdate:
        return _ForwardUpdate(self, job, rows, values, through_norm)


class _ForwardUpdate(LayerwiseUpdate):
    """Updates whose residuals are measured at the block of their own layer."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.states: dict[int, torch.Tensor] = {}  # z [E, d] by layer

    def state_layer(self, layer: int) -> int:
        return layer

    def output_change(self, index: int, layer: int, readings: Readings) -> torch.Tensor:
        last = self.layers[-1]
        if not self.states:
            self.start_ED = self.read([], last).hidden_ED.double()
            bare = [rows[0] for rows in self.rows]
            self.states = states_behind(self.model, bare, layer, self.targets(readings.hidden_ED), self.layers[1:])
            self.target_ED = self.states[last]
        share_ED = (self.states[layer] - readings.hidden_ED.double()) / self.scale
        return self.before_norm(layer, share_ED, readings) if self.through_norm else share_ED


@torch.no_grad()
def states_behind(
    model: Any, rows: Sequence[TokenRow], layer: int, states_ED: torch.Tensor, later: Sequence[int]
) -> dict[int, torch.Tensor]:
    """Outputs of later blocks at the fact token, with the output of block ``layer`` there replaced.

    Args:
        states_ED: that output, a row each.

    Returns:
        By layer, ``layer`` included, [E, d], float64.
    """
    states = {layer: states_ED.double()}
    if not later:
        return states
    lengths = [row.position + 1 for row in rows]
    parts: dict[int, list[torch.Tensor]] = {number: [] for number in later}
    order: list[int] = []
    with frozen(model):
        for batch in token_batches(sorted(range(len(rows)), key=lengths.__getitem__), lengths, MAX_TOKENS):
            found = _states_of_batch(model, [rows[index] for index in batch], layer, states_ED[batch], later)
            for number in later:
                parts[number].append(found[number])
            order += batch
    back = torch.tensor(order).argsort()
    for number in later:
        joined_ED = torch.cat(parts[number])
        states[number] = joined_ED[back.to(joined_ED.device)].to(states_ED.device).double()
    return states


def _states_of_batch(
    model: Any, rows: Sequence[TokenRow], layer: int, states_ED: torch.Tensor, later: Sequence[int]
) -> dict[int, torch.Tensor]:
    arch = architecture_of(model)
    ids_RT, mask_RT = right_padded([row.ids[: row.position + 1] for row in rows], input_device(model))
    column_R = torch.tensor([row.position for row in rows])
    records: dict[int, torch.Tensor] = {}

    def replace(hidden_RTD: torch.Tensor) -> torch.Tensor:
        replaced_RTD = hidden_RTD.clone()
        row_R = torch.arange(len(rows), device=hidden_RTD.device)
        replaced_RTD[row_R, column_R.to(hidden_RTD.device)] = states_ED.to(hidden_RTD)
        return replaced_RTD

    blocks = {number: model.get_submodule(arch.block_name(number)) for number in (layer, *later)}
    readers = [on_output(blocks[number], record_at(records, number, column_R)) for number in later]
    with hooks(on_output(blocks[layer], replace), *readers), stop_after(blocks[later[-1]]):
        model(input_ids=ids_RT, attention_mask=mask_RT, use_cache=False)
    return records
