"""Solved values, kept so that an interrupted run and other editors of the family do not solve them again.

A joint edit of thousands of facts takes hours for its targets and minutes for the rest, and MEMIT, RECT, PRUNE or
NeuralDB with equal settings share these targets. A runner names the place with :func:`values_kept_in`; editors need not
know of it.

A value is found again only if it would come out the same bit for bit. The entry of a batch depends on the model, the
code, the settings, and all rows of the batch, since the last bits of a sum depend on its neighbors. It also depends on
what the weights are now, which a stream or a wrapped editor may have edited: on the activations at the fact tokens,
which see every change up to the layer, and on a sample of all weights. A model with hooks, additional loss terms, and a
call of one edit, whose delta a runner stores anyway, keep nothing.
"""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import nn

from edit_hooks.locate.values.suffix_forward import SuffixForward
from edit_hooks.locate.values.value_batch import ValueForward
from edit_hooks.locate.values.value_steps import OptimizedValue, ValueSettings, initial_values
from edit_hooks.modeling.fingerprint.tensor_hash import sampled_digest, tensor_digest


class ValueStore(Protocol):
    """A place of JSON-able contents by what they depend on besides model and code."""

    def load(self, inputs: Mapping[str, Any]) -> Any | None:
        """The content that was saved under these inputs; ``None`` without one."""

    def save(self, inputs: Mapping[str, Any], content: Any, seconds: float) -> None:
        """Save a content that took these seconds to compute."""


PLAIN = ("losses", "num_updates", "stop_reason", "clamped", "notes")  # fields of a value beside its offset

_PLACE: ContextVar[ValueStore | None] = ContextVar("values_kept_in", default=None)


@contextlib.contextmanager
def values_kept_in(place: ValueStore | None) -> Iterator[None]:
    """Keep the values that editors solve inside the block, and find those that were kept before."""
    token = _PLACE.set(place)
    try:
        yield
    finally:
        _PLACE.reset(token)


@dataclass(frozen=True)
class KeptBatch:
    """The entry of one batch.

    Attributes:
        inputs: all that its values depend on besides model and code.
    """

    place: ValueStore
    inputs: Mapping[str, Any]

    def load(self, forward: ValueForward) -> list[OptimizedValue] | None:
        """The values, with the activations of the batch; ``None`` if they were not kept."""
        content = self.place.load(self.inputs)
        if content is None:
            return None
        values = initial_values(forward.activations, forward.batch)
        for value, entry in zip(values, content, strict=True):
            flat = torch.frombuffer(bytearray(base64.b64decode(entry["delta"])), dtype=value.v0_D.dtype)
            value.delta_D = flat.to(value.v0_D.device).view_as(value.v0_D)
            for name in PLAIN:
                setattr(value, name, entry[name])
        return values

    def save(self, values: Sequence[OptimizedValue], seconds: float) -> None:
        """Keep the values and the seconds of their steps, unless a number is not finite."""
        if all(value.delta_D.isfinite().all() for value in values):
            self.place.save(self.inputs, [_entry(value) for value in values], seconds)


@dataclass(frozen=True)
class KeptValues:
    """The entries of one call.

    Attributes:
        of_call: what the values of all batches of the call depend on.
    """

    place: ValueStore
    of_call: Mapping[str, Any]

    @classmethod
    def of(cls, model: nn.Module, settings: ValueSettings, engine: str, max_logits: int) -> KeptValues | None:
        """Those of a call on this model; ``None`` if nothing is kept."""
        place = _PLACE.get()
        if place is None or any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
            return None
        of_call = {
            "settings": asdict(settings),
            "engine": engine,
            "max_logits": max_logits,
            "weights_now": sampled_digest(model),
        }
        return cls(place, of_call)

    def of_batch(self, forward: ValueForward) -> KeptBatch:
        """The entry of a batch, before its first step."""
        read = vars(forward.batch) | vars(forward.activations)
        tensors = {name: tensor_digest(tensor) for name, tensor in read.items() if tensor is not None}
        # Recorded steps run in wider shapes, with other last bits; recording may be off or have failed in a process.
        in_buckets = isinstance(forward, SuffixForward) and forward.in_buckets
        return KeptBatch(self.place, {**self.of_call, "in_buckets": in_buckets, "tensors": tensors})


def _entry(value: OptimizedValue) -> dict[str, Any]:
    content = value.delta_D.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return {"delta": base64.b64encode(content).decode(), **{name: getattr(value, name) for name in PLAIN}}
