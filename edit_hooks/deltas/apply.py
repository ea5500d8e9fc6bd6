"""Write deltas into a model's weights and restore the originals bit for bit.

Quantized weights are not written: their updates are added to the outputs of their modules by hooks
(:mod:`edit_hooks.modeling.weights`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from edit_hooks.deltas.delta import Delta
from edit_hooks.deltas.hook_edit import HookEdit, attached
from edit_hooks.modeling.architectures import is_transposed, linear_of, map_shape, unwrapped
from edit_hooks.modeling.tensor_hash import tensor_digest
from edit_hooks.modeling.tensors import at_least_float32
from edit_hooks.modeling.weights import AddedMap, check_weights, is_quantized, read_weight
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.hashing import key_of

UNEDITED_STATE = "unedited"


class AppliedDeltas:
    """A context manager that writes deltas into a model's weights and restores the originals on exit, bit for bit.

    Writes weights only; updates of quantized ones are added by hooks inside the scope. Hook and context edits are
    collected in :attr:`runtime_part`, which the caller applies.

    A delta's parameter names and shapes are checked before its first write. Each sum W + update is formed in at least
    float32 and rounded once to the weight's dtype, so a stream of deltas rounds once per step.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = unwrapped(model)
        self._parameters = dict(self.model.named_parameters())
        self._originals: dict[str, torch.Tensor] = {}
        self._added: dict[str, AddedMap] = {}  # by name of the quantized parameter
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
            full_name = parameter_name(name, self._parameters)
            module_name = full_name.rpartition(".")[0]
            check_weights(linear_of(self.model.get_submodule(module_name)), module_name)
            shape = map_shape(module) if (module := self._quantized(full_name)) else self._parameters[full_name].shape
            if name in delta.dense and delta.dense[name].shape != torch.Size(shape):
                raise EditingError(
                    f"the edit of {name} has shape {list(delta.dense[name].shape)}, the weight {list(shape)}."
                )

    @torch.no_grad()
    def add(self, delta: Delta) -> None:
        """Write one more delta."""
        self.check(delta)
        quantized = {
            name: module
            for name in delta.parameter_names
            if (module := self._quantized(parameter_name(name, self._parameters))) is not None
        }
        for name, module in quantized.items():
            self._add_to_output(name, module, delta)
        for name, update in delta.weights(except_for=quantized).items():
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
        for added in self._added.values():
            added.remove()
        self._added.clear()

    def state(self) -> str:
        """Fingerprint of the weights, hooks and contexts so far; ``unedited`` before the first write."""
        if not self._originals and not self._added and self.runtime_part is None:
            return UNEDITED_STATE
        parts: dict[str, object] = {name: tensor_digest(self._parameters[name]) for name in sorted(self._originals)}
        for name, added in sorted(self._added.items()):
            parts[name] = [[list(tensor.shape), tensor_digest(tensor)] for tensor in added.tensors]
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
        for name, added in self._added.items():
            update = added.update()
            change += float(update.norm()) ** 2
            total += float((read_parameter(self.model, name) - update).norm()) ** 2
        return (change / total) ** 0.5 if total else 0.0

    @property
    def adds_to_outputs(self) -> bool:
        """Whether any update acts beside a quantized weight, so that the model's parameters are not the edited ones."""
        return bool(self._added)

    def _quantized(self, name: str) -> nn.Module | None:
        """The linear map whose quantized weight a parameter is; ``None`` for other parameters."""
        module, _, leaf = name.rpartition(".")
        linear = linear_of(self.model.get_submodule(module))
        return linear if leaf == "weight" and is_quantized(linear) else None

    def _add_to_output(self, name: str, linear: nn.Module, delta: Delta) -> None:
        """Add a delta's update of one quantized weight to the outputs of its module."""
        full_name = parameter_name(name, self._parameters)
        if full_name not in self._added:
            self._added[full_name] = AddedMap(linear)
        added, module = self._added[full_name], name.removesuffix(".weight")
        factor = delta.factors.get(module)
        if factor is not None and module not in delta.masks and name not in delta.dense:
            added.add_low_rank(factor.left, factor.right)
        else:
            added.add_dense(delta.weight(name))


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


def read_parameter(model: nn.Module, name: str) -> torch.Tensor:
    """The numbers of a parameter, detached; dequantized, with the updates beside it, if it is a quantized weight.

    Raises:
        EditingError: the model has no such parameter.
    """
    parameters = dict(model.named_parameters())
    name = parameter_name(name, parameters)
    module = model.get_submodule(name.rpartition(".")[0])
    return read_weight(module) if is_quantized(module) and name.endswith(".weight") else parameters[name].detach()


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
        check_weights(linear_of(module), name)
        if (factor.left.shape[0], factor.right.shape[0]) != map_shape(module):
            raise EditingError(
                f"the edit of {name} maps {factor.right.shape[0]} -> {factor.left.shape[0]}, "
                f"the model's module {map_shape(module)[1]} -> {map_shape(module)[0]}."
            )
        if factor.transposed != is_transposed(module):
            raise EditingError(f"the edit of {name} was made for a weight stored in the other orientation.")
