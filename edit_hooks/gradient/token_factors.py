"""Inputs and output gradients of linear maps at every token.

Shapes: R rows, T tokens, L labels, f and d input and output width of a map.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from edit_hooks.gradient.hypernetwork import TokenFactors
from edit_hooks.gradient.labeled_rows import LabeledRows, label_nll
from edit_hooks.modeling.hooks import Registration, hooks, on_input, on_output
from edit_hooks.modeling.tensors import at_least_float32


def token_factors(
    model: nn.Module,
    rows: LabeledRows,
    divisor: torch.Tensor | int,
    names: Sequence[str],
    compute_nll: Callable[[], torch.Tensor] | None = None,
) -> tuple[dict[str, TokenFactors], torch.Tensor]:
    """Compute the factors of the gradients of ``sum(nll / divisor)``.

    Args:
        compute_nll: runs the model and returns the NLL [L] of the labels; by default
            :func:`~edit_hooks.gradient.labeled_rows.label_nll`.

    Returns:
        Module name -> x [R, T, f] and delta [R, T, d], detached, at least float32; and the NLL [L]. A row's factors
        are those of its own labels, because rows do not see one another.
    """
    inputs: dict[str, torch.Tensor] = {}
    probes: dict[str, torch.Tensor] = {}

    def read_input(name: str) -> Registration:
        def read(hidden: torch.Tensor) -> None:
            inputs[name] = hidden.detach()

        return on_input(model.get_submodule(name), read)

    def add_probe(name: str) -> Registration:
        def add(hidden: torch.Tensor) -> torch.Tensor:
            probes[name] = torch.zeros_like(hidden, requires_grad=True)  # its gradient is that of the output
            return hidden + probes[name]

        return on_output(model.get_submodule(name), add)

    with torch.enable_grad(), hooks(*map(read_input, names), *map(add_probe, names)):
        nll_L = compute_nll() if compute_nll is not None else label_nll(model, rows)
        gradients = torch.autograd.grad((nll_L / divisor).sum(), [probes[name] for name in names])
    factors = {
        name: TokenFactors(at_least_float32(inputs[name]), at_least_float32(gradient))
        for name, gradient in zip(names, gradients, strict=True)
    }
    return factors, nll_L.detach()
