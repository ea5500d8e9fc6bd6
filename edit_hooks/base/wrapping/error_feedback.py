"""Post-processed streams that keep what the post-processing left out, and write it with the next step.

A mask or a bound F changes an update. A stream that forgets the difference ends elsewhere than one edit of all its
facts. With the remainder e of the earlier steps, a step with the raw update u writes F(u + e) and leaves

    e' = u + e - F(u + e)

so raw updates and what is written differ by the last remainder alone. Where the base editor's stream is exact, this is
the error compensation of OTE-SE ("aligned" there), which keeps e A with the matrix A of the base editor's system.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from edit_hooks.base.editor import Editor
from edit_hooks.base.wrapping.wrapper import WrapperConfig
from edit_hooks.deltas.apply import edited
from edit_hooks.deltas.delta import Delta, Factor
from edit_hooks.deltas.placement import beside_weights
from edit_hooks.utils.errors import EditingError

REMAINDER = "remainder"


def raw_state(raw: Delta, prefix: str) -> dict[str, torch.Tensor]:
    """The raw update behind a delta as tensors for its ``stream_state``."""
    if not raw.is_low_rank:
        return {f"{prefix}/dense/{name}": update for name, update in raw.weights().items()}
    state = {}
    for name, factor in raw.factors.items():
        part = "left_transposed" if factor.transposed else "left"
        state[f"{prefix}/{part}/{name}"] = factor.left
        state[f"{prefix}/right/{name}"] = factor.right
    return state


def raw_update(delta: Delta, prefix: str) -> Delta:
    """The raw update that :func:`raw_state` stored; empty if there is none."""
    raw = Delta()
    for name, tensor in delta.stream_state.items():
        owner, _, rest = name.partition("/")
        part, _, target = rest.partition("/")
        if owner == prefix and part == "dense":
            raw.dense[target] = tensor
        elif owner == prefix and part in ("left", "left_transposed"):
            raw.factors[target] = Factor(tensor, delta.stream_state[f"{prefix}/right/{target}"], part != "left")
    return raw


def with_raw_updates(history: Sequence[Delta], prefix: str) -> list[Delta]:
    """The steps of a stream as the base editor made them."""
    raws = [raw_update(delta, prefix) for delta in history]
    return [
        replace(delta, factors=raw.factors, dense=raw.dense, masks={}) for delta, raw in zip(history, raws, strict=True)
    ]


@dataclass(frozen=True)
class Remainder:
    """What the steps of a stream left out so far.

    Attributes:
        by_parameter: update in the stored orientation, on the CPU.
    """

    prefix: str
    by_parameter: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def after(self, model: nn.Module, history: Sequence[Delta]) -> Remainder:
        """After more steps; a delta with a stored remainder stands for all before it."""
        left: dict[str, torch.Tensor] = dict(self.by_parameter)
        marker = f"{self.prefix}/{REMAINDER}/"
        for delta in history:
            for name, tensor in delta.stream_state.items():
                if name.startswith(marker):
                    left[name.removeprefix(marker)] = tensor
            raw = beside_weights(model, raw_update(delta, self.prefix))
            written = beside_weights(model, delta)
            for name in raw.parameter_names:
                change = (raw.weight(name) - written.weight(name)).cpu()
                left[name] = left[name] + change if name in left else change
        return replace(self, by_parameter=left)

    def state(self) -> dict[str, torch.Tensor]:
        """The tensors that :meth:`after` reads back."""
        return {f"{self.prefix}/{REMAINDER}/{name}": tensor for name, tensor in self.by_parameter.items()}

    def added(self, model: nn.Module) -> contextlib.AbstractContextManager[object]:
        """Scope in which the weights hold the raw updates of all steps."""
        if not self.by_parameter:
            return contextlib.nullcontext()
        return edited(model, Delta(dense=dict(self.by_parameter)))

    def plus(self, name: str, update: torch.Tensor) -> torch.Tensor:
        """An update with what was left out of this parameter before."""
        left = self.by_parameter.get(name)
        return update if left is None else update + left.to(update)


def with_remainder(model: nn.Module, raw: Delta, remainder: Remainder) -> Delta:
    """A raw delta whose updates include the remainder, dense; the raw update is in its state."""
    raw = beside_weights(model, raw)
    names = dict.fromkeys([*raw.parameter_names, *remainder.by_parameter])
    weights = raw.weights()
    dense = {
        name: remainder.plus(name, weights[name]) if name in weights else remainder.by_parameter[name] for name in names
    }
    state = {**raw.stream_state, **raw_state(raw, remainder.prefix)}
    return replace(raw, factors={}, masks={}, dense=dense, stream_state=state)


def condense_aligned(base: Editor[Any], model: nn.Module, history: Sequence[Delta], prefix: str) -> list[Delta]:
    """The history of an aligned stream as one delta: the base editor's state and the remainder."""
    if not history:
        return []
    (condensed,) = base.condensed(model, with_raw_updates(history, prefix))
    remainder = Remainder(prefix).after(model, history)
    return [replace(condensed, stream_state={**condensed.stream_state, **remainder.state()})]


def require_exact_base(config: WrapperConfig) -> None:
    """Raise EditingError if ``aligned`` is set and the base editor's stream is not exact."""
    if config.base_settings.get("stream") != "exact":
        raise EditingError(
            "aligned=true needs raw updates that do not depend on what was written before: set stream: exact and "
            f"one layer in base_settings, with a base that has it (memit, alphaedit, ...). base={config.base!r}."
        )
