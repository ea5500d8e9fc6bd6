"""Forward hooks that read, replace or cut short; always undone on exit.

Shapes: R rows, T tokens, d width of a module's input or output.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from edit_hooks.modeling.device.run_ahead import runs_ahead, without_attention_plans
from edit_hooks.modeling.tensors import at_least_float32
from edit_hooks.modeling.token_lists import as_module_returns, token_list_of
from edit_hooks.utils.scopes import NestedStates, undone
from edit_hooks.utils.text.readable import readable

Hidden = torch.Tensor

Key = TypeVar("Key")


def hidden_of(output: Any) -> Hidden:
    """Hidden states of a module's output, which may be a tuple."""
    return output if isinstance(output, torch.Tensor) else output[0]


def with_hidden(output: Any, hidden: Hidden) -> Any:
    """``output`` with its hidden states replaced, in the same container."""
    return hidden if isinstance(output, torch.Tensor) else (hidden, *output[1:])


class CachedOutput(NamedTuple):
    """Hidden states that a module returned, and the tuple around them.

    ``tuple_length`` is ``None`` where the module returned them bare.
    """

    hidden: Hidden
    tuple_length: int | None

    @classmethod
    def of(cls, output: Any) -> CachedOutput:
        return cls(hidden_of(output), None if isinstance(output, torch.Tensor) else len(output))

    def as_output(self) -> Any:
        """The output as the module would return it.

        Other entries of the tuple are ``None``.
        """
        return self.hidden if self.tuple_length is None else (self.hidden, *[None] * (self.tuple_length - 1))


@readable
class Registration(NamedTuple):
    """A forward hook to be registered by :func:`hooks`.

    Attributes:
        hook: a function object of its own, by which it is found again.
        on_input: called before the module, with keyword arguments; else after it.
        is_first: called before the hooks that are registered already.
    """

    module: nn.Module
    hook: Callable[..., Any]
    on_input: bool = False
    is_first: bool = False

    def register(self) -> None:
        if self.on_input:
            self.module.register_forward_pre_hook(self.hook, prepend=self.is_first, with_kwargs=True)
        else:
            self.module.register_forward_hook(self.hook, prepend=self.is_first)

    def remove(self) -> None:
        """Remove the hook if it is registered.

        It is found by identity: an interrupt can come before a handle is stored.
        """
        module = self.module
        registered = module._forward_pre_hooks if self.on_input else module._forward_hooks
        for number in [number for number, hook in registered.items() if hook is self.hook]:
            # The hook goes last: after an interrupt in between, the next attempt finds it, and so its flags.
            for flags in (module._forward_pre_hooks_with_kwargs, module._forward_hooks_with_kwargs):
                flags.pop(number, None)
            registered.pop(number, None)


@contextlib.contextmanager
def hooks(*registrations: Registration) -> Iterator[None]:
    """Register hooks on entry and remove all of them on exit, also after an error.

    A hook sees rows [R, T, d] also where its module runs on a list of all tokens.
    """
    of_rows = [part for registration in registrations for part in _seeing_rows(registration)]

    def remove_all() -> None:
        for registration in of_rows:
            registration.remove()

    with undone(remove_all):
        for registration in of_rows:
            registration.register()
        yield


def _seeing_rows(registration: Registration) -> list[Registration]:
    """The registration, or for a map that may run on lists one that reshapes, behind one that reads the shape."""
    layout = token_list_of(registration.module)
    block = None if layout is None else layout.block()
    if layout is None or block is None:
        return [registration]
    reshaped = layout.input_hook if registration.on_input else layout.output_hook
    return [on_input(block, layout.read_shape), registration._replace(hook=reshaped(registration.hook))]


def on_input(module: nn.Module, read: Callable[[Hidden], Hidden | None]) -> Registration:
    """Register ``read`` on a module's input; a returned tensor replaces it.

    The input is the first positional argument, or ``hidden_states``.
    """

    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        replaced = read(hidden)
        if replaced is None:
            return None
        return ((replaced, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": replaced})

    return Registration(module, hook, on_input=True)


def on_output(module: nn.Module, read: Callable[[Hidden], Hidden | None]) -> Registration:
    """Register ``read`` on a module's hidden states; a returned tensor replaces them."""

    def hook(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        replaced = read(hidden_of(output))
        return None if replaced is None else with_hidden(output, replaced)

    return Registration(module, hook)


def record_output(records: dict[Key, CachedOutput], key: Key, module: nn.Module) -> Registration:
    """Register a hook that stores the output of ``module`` as ``records[key]``."""

    def hook(_module: nn.Module, _args: Any, output: Any) -> None:
        cached = CachedOutput.of(output)
        records[key] = cached._replace(hidden=cached.hidden.clone()) if is_added_to else cached

    # Some models add to the output in place: the routed experts' to a shared one's, the attention's to the MLP's.
    is_added_to = token_list_of(module) is not None
    return Registration(module, hook)


def record_at(records: dict[Key, torch.Tensor], key: Key, column_R: torch.Tensor) -> Callable[[Hidden], None]:
    """Make a hook that records one position per row.

    Returns:
        A function for :func:`on_input` or :func:`on_output`. It sets ``records[key]`` to ``hidden[r, column_R[r]]``
        of every row r, [R, d], detached and in at least float32.
    """

    def read(hidden_RTD: Hidden) -> None:
        row_R = torch.arange(len(column_R), device=hidden_RTD.device)
        records[key] = at_least_float32(hidden_RTD[row_R, column_R.to(hidden_RTD.device)].detach())

    return read


def select_positions(index: torch.Tensor, column: torch.Tensor) -> Callable[[Hidden], Hidden]:
    """Select positions as a batch of one: [R, T, d] -> [1, len(index), d].

    As an input hook of the head it confines the vocabulary projection to the positions that matter. Operations of the
    model after the head (soft-capping, scaling) still run.
    """
    return lambda hidden: hidden[index.to(hidden.device), column.to(hidden.device)].unsqueeze(0)


class _ForwardStopped(Exception):
    """Ends a forward pass after the last module that is needed."""


@contextlib.contextmanager
def stop_after(module: nn.Module) -> Iterator[None]:
    """End a forward pass after ``module``.

    The exception ends the ``with`` block too: statements behind the call of the model do not run.

    Hooks registered on the module before this one still see its output.
    """

    def stop(_hidden: Hidden) -> None:
        raise _ForwardStopped

    with hooks(on_output(module, stop)), contextlib.suppress(_ForwardStopped):
        yield


# The forward that a wrapper (accelerate) has set on a module, or None.
_forwards: NestedStates[nn.Module, Callable[..., Any] | None] = NestedStates()


@contextlib.contextmanager
def forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Run ``forward`` in place of the module's own.

    Attributes and hooks of the module stay in place.
    """
    attributes = module.__dict__

    def replace() -> None:
        attributes["forward"] = forward

    def restore(own: Callable[..., Any] | None) -> None:
        if own is None:
            attributes.pop("forward", None)
        else:
            attributes["forward"] = own

    with _forwards.changed(module, attributes.get("forward"), replace, restore):
        yield


@contextlib.contextmanager
def outputs_replaced(modules: Sequence[nn.Module], output: Any) -> Iterator[None]:
    """Return ``output`` from each of the modules without running them.

    Nested scopes, not ``ExitStack``: one that an interrupt keeps from its exit waits for the garbage collector.
    """
    first, *others = modules or (None,)
    if first is None:
        yield
        return
    own = as_module_returns(first, output)
    is_added_to = token_list_of(first) is not None  # in place, as in :func:`record_output`

    def replacement(*_args: Any, **_kwargs: Any) -> Any:
        return own.clone() if is_added_to else own

    with forward_replaced(first, replacement), outputs_replaced(others, output):
        yield


class _Flags(NamedTuple):
    """``requires_grad`` of the parameters and ``training`` of the modules."""

    parameters: list[tuple[nn.Parameter, bool]]
    modules: list[tuple[nn.Module, bool]]

    def restore(self) -> None:
        for parameter, flag in self.parameters:
            parameter.requires_grad_(flag)
        for module, mode in self.modules:
            module.training = mode


_flags: NestedStates[nn.Module, _Flags] = NestedStates()


@contextlib.contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without parameter gradients, and attention for many shapes; everything is restored on exit."""
    flags = _Flags(
        [(parameter, parameter.requires_grad) for parameter in model.parameters()],
        [(module, module.training) for module in model.modules()],
    )

    def freeze() -> None:
        for parameter, _ in flags.parameters:
            parameter.requires_grad_(False)
        model.eval()

    on_gpu = any(runs_ahead(parameter.device) for parameter, _ in flags.parameters)
    with (
        _flags.changed(model, flags, freeze, _Flags.restore),
        without_attention_plans() if on_gpu else contextlib.nullcontext(),
    ):
        yield
