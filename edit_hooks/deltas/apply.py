"""Write deltas into a model's weights and restore the originals bit for bit.

Quantized weights are not written, nor is a head that is tied to the embedding: their updates are added to the outputs
of their modules by hooks (:mod:`edit_hooks.modeling.weights`).
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from edit_hooks.deltas.delta import Delta
from edit_hooks.deltas.hook_edit import HookEdit, attached
from edit_hooks.deltas.placement import beside_weights
from edit_hooks.modeling.adapter_layers import require_additive
from edit_hooks.modeling.architectures import edited_module, is_transposed, linear_of, map_shape, unwrapped
from edit_hooks.modeling.fingerprint.tensor_hash import tensor_digest
from edit_hooks.modeling.linear_maps import is_linear_map, is_quantized
from edit_hooks.modeling.tensors import at_least_float32, bit_sum
from edit_hooks.modeling.weights import AddedMap, check_weights, read_weight, refuse_compiled
from edit_hooks.utils.errors import EditingError, near_misses
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.scopes import undone
from edit_hooks.utils.storage.hashing import key_of

log = get_logger("lm_eval.edited_hf")

UNEDITED_STATE = "unedited"

LEFT_TOO_EARLY = (
    "a scope of edits was left while a later one on the same model was open. Both have ended and all weights are those "
    "from before; answers since then are not under the edits of the later scope. Nest the scopes, and close generators "
    "that contain one."
)


class _LastWrite(NamedTuple):
    """A parameter as a scope has last written it: checksum of its bits, and dtype."""

    bits: int
    dtype: torch.dtype

    @classmethod
    def of(cls, weight: torch.Tensor) -> _LastWrite:
        return cls(bit_sum(weight), weight.dtype)


class AppliedDeltas:
    """A context manager that writes deltas into a model's weights and restores the originals on exit, bit for bit.

    Writes weights only; updates of quantized ones and of a tied head are added by hooks inside the scope. Hook and
    context edits are collected in :attr:`runtime_part`, which the caller applies.

    A delta's parameter names and shapes are checked before its first write. Each sum W + update is formed in at least
    float32 and rounded to the weight's dtype. In a stream on weights of 16 bits, the parts of a step that are below
    half a unit in the last place would be lost at every step; so the sum of the updates is kept beside the original
    W_0, and each step writes round(W_0 + sum), the weight that one edit of the same sum has. From the second delta on
    this takes 4 bytes per parameter of the written weights on their devices (235 MB for an MLP output of Llama 3 8B).

    Raises:
        EditingError: on exit, after all weights are restored: scopes on one model were left in another order than last
            in, first out, or other code changed an edited weight inside the scope. Logged instead while an exception
            ends the block.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = unwrapped(model)
        self._parameters = dict(self.model.named_parameters(remove_duplicate=False))
        self._originals: dict[str, torch.Tensor] = {}
        # by name of a 16-bit weight: its only update so far and the name there, or the sum of several
        self._first: dict[str, tuple[Delta, str]] = {}
        self._sums: dict[str, torch.Tensor] = {}
        self._changed: dict[str, None] = {}  # an ordered set: weights that other code changed between two updates
        self._added: dict[str, AddedMap] = {}  # by name of the parameter
        self._written: dict[str, _LastWrite] = {}
        self._is_open = False
        self._complaint: str | None = None
        self.runtime_part: Delta | None = None
        self._runtime_state: str | None = None  # of the hooks and contexts, a chain over what added them

    def __enter__(self) -> AppliedDeltas:
        if self._is_open:
            raise EditingError("this scope of edits is open already; make another one for a nested block.")
        self._complaint = None
        self._is_open = True
        _open_scopes.setdefault(self.model, []).append(weakref.ref(self))
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_exc: object) -> None:
        with undone(self._close):
            complaint = self._complaints()
        if complaint and exc_type is None:
            raise EditingError(complaint)
        if complaint:
            log.error("%s", complaint)

    def __del__(self) -> None:
        """Restore the weights if the exit was not run: an interrupt can come just before it."""
        if self.__dict__.get("_originals"):
            with undone(self._close):
                pass

    @property
    def hook_edit(self) -> HookEdit | None:
        """The hook edits so far, as one; ``None`` without any."""
        return None if self.runtime_part is None else self.runtime_part.hook_edit

    def check(self, delta: Delta) -> HookEdit | None:
        """Return the hook edits so far and the delta's as one.

        Raises:
            EditingError: the delta does not fit the model, or the hook edits added before it.
        """
        _check_shapes(self.model, delta)
        if delta.hook_edit is not None:
            refuse_compiled(self.model)
            delta.hook_edit.check(self.model)
        hook_edit = HookEdit.combine([self.hook_edit, delta.hook_edit])
        for name in delta.parameter_names:
            full_name = parameter_name(name, self.model)
            module_name = full_name.rpartition(".")[0]
            check_weights(linear_of(self.model.get_submodule(module_name)), module_name)
            module = self._beside(name)
            if module is not None:
                require_additive(module, name.removesuffix(".weight"))
            shape = self._parameters[full_name].shape if module is None else _stored_shape(module)
            if name in delta.dense and delta.dense[name].shape != torch.Size(shape):
                raise EditingError(
                    f"the edit of {name} has shape {list(delta.dense[name].shape)}, the weight {list(shape)}."
                )
        return hook_edit

    @torch.no_grad()
    def add(self, delta: Delta) -> None:
        """Write one more delta.

        Raises:
            EditingError: the delta does not fit, or this is not the innermost open scope on the model.
        """
        if self._complaint or not self._is_open:
            raise EditingError(self._complaint or "this scope of edits is not open; add edits inside its 'with' block.")
        if self._inner_scopes():
            raise EditingError(
                "a later scope of edits on the same model is open, whose end would undo this edit; add it there, or "
                "leave that scope first."
            )
        hook_edit = self.check(delta)
        not_written = {name: module for name in delta.parameter_names if (module := self._beside(name)) is not None}
        for name, module in not_written.items():
            self._add_to_output(name, module, delta)
        for given_name, update in beside_weights(self.model, delta).weights(except_for=not_written).items():
            name = parameter_name(given_name, self.model)
            weight = self._parameters[name]
            if name not in self._originals:
                self._originals[name] = weight.detach().clone()
            if _is_narrow(self._originals[name]):
                self._write_narrow(name, given_name, weight, update, delta)
                continue
            self._written.pop(name, None)
            weight.copy_((at_least_float32(weight) + update).to(weight.dtype))
            self._written[name] = _LastWrite.of(weight)
        if (new := delta.runtime_part) is not None:
            before = self.runtime_part or Delta()
            # the sum is not hashed: a stream would hash all its edits again after each
            chain = [link for link in (self._runtime_state, new.checksum()) if link]
            self.runtime_part = Delta(hook_edit=hook_edit, contexts=before.contexts + new.contexts)
            self._runtime_state = chain[0] if len(chain) == 1 else key_of(chain)

    def _write_narrow(
        self, name: str, given_name: str, weight: torch.Tensor, update: torch.Tensor, delta: Delta
    ) -> None:
        """Write W_0 + the sum of all updates of a weight of 16 bits; the sum is formed from the second update on.

        Args:
            given_name: that of the weight in the delta.
        """
        if name in self._written and _LastWrite.of(weight) != self._written[name]:
            self._changed[name] = None
        earlier = self._sums.get(name)
        if earlier is None and name in self._first:
            first, first_name = self._first[name]
            earlier = beside_weights(self.model, first).weight(first_name)
        total = update if earlier is None else earlier.to(update.device) + update
        self._written.pop(name, None)
        original = self._originals[name].to(weight.device)
        weight.copy_((at_least_float32(original) + total).to(weight.dtype))
        if earlier is None:
            self._first[name] = delta, given_name
        else:
            self._sums[name] = total
            self._first.pop(name, None)
        self._written[name] = _LastWrite.of(weight)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the original weights, and forget the hooks and contexts; idempotent."""
        self.runtime_part = self._runtime_state = None
        for record in (self._written, self._first, self._sums, self._changed):
            record.clear()
        while self._added:  # dropped after its removal, as the originals below
            name, added = next(iter(self._added.items()))
            added.remove()
            del self._added[name]
        current = dict(self.model.named_parameters(remove_duplicate=False)) if self._originals else {}
        while self._originals:  # an original is dropped after its use, so an interrupted call can be repeated
            name, original = next(iter(self._originals.items()))
            for weight in {id(weight): weight for weight in (self._parameters[name], current.get(name))}.values():
                if weight is not None and weight.shape == original.shape:
                    weight.copy_(original)
            del self._originals[name]

    def _close(self) -> None:
        """End the scope, and those inside it, from the last to this one; idempotent."""
        for scope in reversed(self._inner_scopes()):
            scope._complaint = LEFT_TOO_EARLY
            scope._close()
        self.restore()
        scopes = _open_scopes.get(self.model, [])
        scopes[:] = [scope for scope in scopes if scope() not in (self, None)]
        self._is_open = False

    def _inner_scopes(self) -> list[AppliedDeltas]:
        """The scopes that were opened on the model after this one, and are still open."""
        scopes = [scope() for scope in _open_scopes.get(self.model, [])]
        inner = scopes[scopes.index(self) + 1 :] if self in scopes else []
        return [scope for scope in inner if scope is not None]

    def _complaints(self) -> str | None:
        """Why the weights are not as this scope has left them, as far as it can be seen."""
        if self._complaint or self._inner_scopes():
            return LEFT_TOO_EARLY
        in_use = {id(parameter) for parameter in self.model.parameters()}
        changed = [
            name
            for name, written in self._written.items()
            if name in self._changed
            or id(self._parameters[name]) not in in_use
            or _LastWrite.of(self._parameters[name]) != written
        ]
        if not changed:
            return None
        return (
            f"other code changed {', '.join(changed)} inside a scope of edits. The values from before the edits are "
            "back in place, so that change is lost (after a change of dtype they are rounded to it). Change the model "
            "outside the scope, or write the change as a delta."
        )

    def state(self) -> str:
        """Fingerprint of the weights, hooks and contexts so far; ``unedited`` before the first write.

        Hooks and contexts count by the deltas that added them, in order: the same in a resumed stream, not for a delta
        that is the sum of others.
        """
        if not self._originals and not self._added and self.runtime_part is None:
            return UNEDITED_STATE
        parts: dict[str, object] = {name: tensor_digest(self._parameters[name]) for name in sorted(self._originals)}
        for name, added in sorted(self._added.items()):
            parts[name] = [[list(tensor.shape), tensor_digest(tensor)] for tensor in added.tensors]
        if self._runtime_state is not None:
            parts["runtime_part"] = self._runtime_state
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
            weight = read_parameter(self.model, name)
            total += float((weight - update if self._is_quantized(name) else at_least_float32(weight)).norm()) ** 2
        return (change / total) ** 0.5 if total else 0.0

    @property
    def adds_to_outputs(self) -> bool:
        """Whether any update acts beside its weight, so that the model's parameters are not the edited ones."""
        return bool(self._added)

    @functools.cached_property
    def _num_names(self) -> Counter[int]:
        """The number of names of every parameter; tied ones have several."""
        return Counter(map(id, self._parameters.values()))

    def _is_quantized(self, name: str) -> bool:
        module, _, leaf = name.rpartition(".")
        return leaf == "weight" and is_quantized(self.model.get_submodule(module))

    def _beside(self, given_name: str) -> nn.Module | None:
        """The module to whose output the update of a parameter is added; ``None`` if it is written.

        Quantized weights cannot be written, and a head that is tied to the embedding would change that, too. An update
        of a tied embedding is one of both.

        Args:
            given_name: that of the parameter in the delta.
        """
        name = parameter_name(given_name, self.model)
        module_name, _, leaf = given_name.rpartition(".")
        module = self.model.get_submodule(module_name)
        if leaf != "weight" or not is_linear_map(module) or is_transposed(module):
            return None
        if self._is_quantized(name):
            return linear_of(module)
        return module if self._num_names[id(self._parameters[name])] > 1 else None

    def _add_to_output(self, name: str, hooked: nn.Module, delta: Delta) -> None:
        """Add a delta's update of one weight to the outputs of a module."""
        full_name = parameter_name(name, self.model)
        if full_name not in self._added:
            self._added[full_name] = AddedMap(hooked)
            self._added[full_name].attach()
        added, module = self._added[full_name], name.removesuffix(".weight")
        factor = delta.factors.get(module)
        if factor is not None and module not in delta.masks and name not in delta.dense:
            added.add_low_rank(factor.left, factor.right)
        else:
            added.add_dense(delta.weight(name))


def _is_narrow(weight: torch.Tensor) -> bool:
    """Whether a weight has fewer bits than the sums that are written to it."""
    return weight.element_size() < torch.float32.itemsize


# The open scopes on a model, in the order in which they were opened.
_open_scopes: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[AppliedDeltas]]] = weakref.WeakKeyDictionary()


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
        EditingError: for edits of another model, and for contexts, which change prompts rather than the model; on
            exit as :class:`AppliedDeltas`.
    """
    for delta in deltas:
        require_no_context(delta)
    applied = AppliedDeltas(model)
    with undone(applied._close), applied:
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
    name = parameter_name(name, model)
    module = model.get_submodule(name.rpartition(".")[0])
    is_code = is_quantized(module) and name.endswith(".weight")
    return read_weight(module) if is_code else model.get_parameter(name).detach()


def parameter_name(name: str, model: nn.Module) -> str:
    """Name of a parameter in a model that peft may have wrapped.

    Raises:
        EditingError: the model has no such parameter.
    """
    module_name, _, leaf = name.rpartition(".")
    try:
        module = model.get_submodule(module_name)
    except AttributeError:
        module = None
    if module is not None:
        in_use = linear_of(module)
        if in_use._parameters.get(leaf) is not None or (leaf == "weight" and is_quantized(in_use)):
            inside = next(path for path, part in module.named_modules(remove_duplicate=False) if part is in_use)
            return ".".join(filter(None, (module_name, inside, leaf)))
    known = [known for known, _ in model.named_parameters()]
    raise EditingError(
        f"the model has no parameter {name!r}; was this edit made for another model?{near_misses(name, known)}"
    )


def _stored_shape(linear: nn.Module) -> torch.Size:
    """The shape of a linear map's weight, also where codes are packed into another one."""
    return torch.Size(map_shape(linear)[:: -1 if is_transposed(linear) else 1])


def _check_shapes(model: nn.Module, delta: Delta) -> None:
    for name, factor in delta.factors.items():
        module = edited_module(model, name)
        check_weights(linear_of(module), name)
        require_additive(module, name)
        if (factor.left.shape[0], factor.right.shape[0]) != map_shape(module):
            raise EditingError(
                f"the edit of {name} maps {factor.right.shape[0]} -> {factor.left.shape[0]}, "
                f"the model's module {map_shape(module)[1]} -> {map_shape(module)[0]}."
            )
        if factor.transposed != is_transposed(module):
            raise EditingError(f"the edit of {name} was made for a weight stored in the other orientation.")
