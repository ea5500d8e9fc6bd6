"""Write deltas into a model's weights and restore the originals bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from edit_hooks.deltas.delta import Delta
from edit_hooks.deltas.hook_edit import HookEdit, attached
from edit_hooks.modeling.architectures import is_transposed, map_shape, unwrapped
from edit_hooks.modeling.tensor_hash import tensor_digest
from edit_hooks.modeling.tensors import at_least_float32
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.hashing import key_of

UNEDITED_STATE = "unedited"


class AppliedDeltas:
    """A context manager that writes deltas into a model's weights and restores the originals on exit, bit for bit.

    Writes weights only. Hook and context edits are collected in :attr:`runtime_part`, which the caller applies.

    A delta's parameter names and shapes are checked before its first write. Each sum W + update is formed in at least
    float32 and rounded once to the weight's dtype, so a stream of deltas rounds once per step.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = unwrapped(model)
        self._parameters = dict(self.model.named_parameters())
        self._originals: dict[str, torch.Tensor] = {}
        self.runtime_part: Delta | None = None

    def __enter__(self) -> AppliedDeltas:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.restore()

    @property
    def hook_edit(self) -> HookEdit | None:
        """The hook edits so far, as one; ``None`` without any."""
        return None if self.runtime_part is None else self.runtime_part.hook_edit

    def check(self, delta: Delta) -> None:
        """Raise EditingError if a delta does not fit the model, or the hook edits added before it."""
        _check_shapes(self.model, delta)
        if delta.hook_edit is not None:
            delta.hook_edit.check(self.model)
            HookEdit.combine([self.hook_edit, delta.hook_edit])
        for name in delta.parameter_names:
            weight = self._parameters[parameter_name(name, self._parameters)]
            if name in delta.dense and delta.dense[name].shape != weight.shape:
                raise EditingError(
                    f"the edit of {name} has shape {list(delta.dense[name].shape)}, the weight {list(weight.shape)}."
                )

    @torch.no_grad()
    def add(self, delta: Delta) -> None:
        """Write one more delta."""
        self.check(delta)
        for name, update in delta.weights().items():
            name = parameter_name(name, self._parameters)
            weight = self._parameters[name]
            if name not in self._originals:
                self._originals[name] = weight.detach().clone()
            weight.copy_((at_least_float32(weight) + update.to(weight.device)).to(weight.dtype))
        if delta.runtime_part is not None:
            parts = [self.runtime_part, delta.runtime_part]
            self.runtime_part = Delta.summed([part for part in parts if part is not None])

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the original weights, and forget the hooks and contexts."""
        self.runtime_part = None
        for name, original in self._originals.items():
            self._parameters[name].copy_(original)
        self._originals.clear()

    def state(self) -> str:
        """Fingerprint of the weights, hooks and contexts so far; ``unedited`` before the first write."""
        if not self._originals and self.runtime_part is None:
            return UNEDITED_STATE
        parts: dict[str, object] = {name: tensor_digest(self._parameters[name]) for name in sorted(self._originals)}
        if self.runtime_part is not None:
            parts["runtime_part"] = self.runtime_part.checksum()
        return key_of(parts)

    @torch.no_grad()
    def norm_ratio(self) -> float:
        """||W_now - W_original|| / ||W_original|| over all weights written so far; 0 without any."""
        change = total = 0.0
        for name, original in self._originals.items():
            change += float((at_least_float32(self._parameters[name]) - at_least_float32(original)).norm()) ** 2
            total += float(at_least_float32(original).norm()) ** 2
        return (change / total) ** 0.5 if total else 0.0


@contextlib.contextmanager
def edited(
    model: nn.Module, *deltas: Delta, prompt_lengths: Sequence[int] | torch.Tensor | None = None
) -> Iterator[nn.Module]:
    """Apply deltas inside the scope and restore the model on exit, also after an exception.

    Args:
        deltas: applied in this order.
        prompt_lengths: for hook edits, the number of prompt tokens of each row of the batches inside, or one number for
            all rows. By default all tokens fed at prefill are prompt. See :func:`edit_hooks.deltas.hook_edit.attached`.

    Raises:
        EditingError: for edits of another model, and for contexts, which change prompts rather than the model.
    """
    for delta in deltas:
        require_no_context(delta)
    with AppliedDeltas(model) as applied:
        for delta in deltas:
            applied.check(delta)
        for delta in deltas:
            applied.add(delta)
        with attached(model, applied.hook_edit, prompt_lengths):
            yield model


def require_no_context(delta: Delta) -> None:
    """Raise EditingError for an edit with contexts, where there is no prompt to put them in."""
    if delta.contexts:
        raise EditingError(
            "this edit is a context: it changes prompts, not the model. Ask through edited_hf, or put "
            "ContextEdit.before(question) in front of the prompt and apply delta.without_contexts, if that is not None."
        )


def parameter_name(name: str, parameters: Mapping[str, torch.Tensor]) -> str:
    """Name of a parameter in a model that peft may have wrapped.

    Raises:
        EditingError: the model has no such parameter.
    """
    if name in parameters:
        return name
    module, _, leaf = name.rpartition(".")
    inside_adapter = f"{module}.base_layer.{leaf}"
    if inside_adapter in parameters:
        return inside_adapter
    raise EditingError(f"the model has no parameter {name!r}; was this edit made for another model?")


def _check_shapes(model: nn.Module, delta: Delta) -> None:
    for name, factor in delta.factors.items():
        try:
            module = model.get_submodule(name)
        except AttributeError:
            raise EditingError(f"the model has no module {name!r}; was this edit made for another model?") from None
        if (factor.left.shape[0], factor.right.shape[0]) != map_shape(module):
            raise EditingError(
                f"the edit of {name} maps {factor.right.shape[0]} -> {factor.left.shape[0]}, "
                f"the model's module {map_shape(module)[1]} -> {map_shape(module)[0]}."
            )
        if factor.transposed != is_transposed(module):
            raise EditingError(f"the edit of {name} was made for a weight stored in the other orientation.")
