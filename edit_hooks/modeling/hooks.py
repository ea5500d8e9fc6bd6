"""Reading and replacing activations at named modules, always undone on exit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

Hidden = torch.Tensor


def hidden_of(output: Any) -> Hidden:
    """The hidden states in a module's output: blocks of some families return them alone, others in a tuple."""
    return output if isinstance(output, torch.Tensor) else output[0]


def with_hidden(output: Any, hidden: Hidden) -> Any:
    """``output`` with its hidden states replaced, in the same container."""
    return hidden if isinstance(output, torch.Tensor) else (hidden, *output[1:])


@contextlib.contextmanager
def hooks(*registrations: Callable[[], Any]) -> Iterator[None]:
    """Register hooks on entry and remove every one of them on exit, also after an exception."""
    with contextlib.ExitStack() as stack:
        for register in registrations:
            stack.callback(register().remove)
        yield


def on_input(module: nn.Module, read: Callable[[Hidden], Hidden | None]) -> Callable[[], Any]:
    """Registration of ``read`` on the first positional (or ``hidden_states``) input; a returned tensor replaces it."""

    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        replaced = read(hidden)
        if replaced is None:
            return None
        return ((replaced, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": replaced})

    return lambda: module.register_forward_pre_hook(hook, with_kwargs=True)


def on_output(module: nn.Module, read: Callable[[Hidden], Hidden | None]) -> Callable[[], Any]:
    """Registration of ``read`` on the hidden states a module returns; a returned tensor replaces them."""

    def hook(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        replaced = read(hidden_of(output))
        return None if replaced is None else with_hidden(output, replaced)

    return lambda: module.register_forward_hook(hook)


@contextlib.contextmanager
def forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Run ``forward`` instead of the module's own, leaving attributes and hooks of the module in place."""
    own = module.__dict__.get("forward")
    module.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        if own is None:
            del module.__dict__["forward"]
        else:
            module.forward = own  # type: ignore[method-assign]


@contextlib.contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and no parameter gradients inside; flags and mode exactly as before outside."""
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    try:
        for parameter, _ in flags:
            parameter.requires_grad_(False)
        model.eval()
        yield
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
        for module, mode in modes:
            module.training = mode


def select_positions(index: torch.Tensor, column: torch.Tensor) -> Callable[[Hidden], Hidden]:
    """Select ``hidden[index, column]`` as a batch of one: [rows, tokens, d] -> [1, len(index), d].

    As an input hook of the head it confines the vocabulary projection to the positions that matter; whatever the model
    does after the head (soft-capping, scaling) still happens.
    """
    return lambda hidden: hidden[index.to(hidden.device), column.to(hidden.device)].unsqueeze(0)
