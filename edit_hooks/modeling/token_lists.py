"""Maps that run on all tokens of a batch as one list, [R T, d] in place of [R, T, d], as shared experts do.

Hooks on such a map see rows all the same: the shape of the batch is read where its block begins, and what a hook sees
and returns is reshaped.

Shapes: R rows, T tokens, d width of a map's input or output.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from edit_hooks.modeling.linear_maps import linear_of


@dataclass
class TokenList:
    """How the states in one map are laid out.

    Attributes:
        block: the block around the map, whose input has rows.
        shape: (R, T) of the states that are in the map now.
        is_used: the map was seen to run on a list.
    """

    block: weakref.ref[nn.Module]
    shape: tuple[int, int] = (0, 0)
    is_used: bool = False

    def read_shape(self, hidden_RTD: torch.Tensor) -> None:
        """Note the shape of the block's input."""
        self.shape = (hidden_RTD.shape[0], hidden_RTD.shape[1])

    def in_rows(self, value: Any) -> Any:
        """A list of tokens as rows; other values as they are."""
        if not isinstance(value, torch.Tensor) or value.dim() != 2 or len(value) != self.shape[0] * self.shape[1]:
            return value
        self.is_used = True
        return value.unflatten(0, self.shape)

    def output_hook(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """A forward hook that passes rows to ``hook`` and a list back to the model."""

        def in_rows(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            rows = self.in_rows(output)
            result = hook(module, tuple(map(self.in_rows, args)), rows)
            return result if rows is output or result is None else result.flatten(0, 1)

        return in_rows

    def input_hook(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """A forward pre-hook that passes rows to ``hook`` and a list back to the model."""

        def in_rows(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            rows = tuple(map(self.in_rows, args))
            result = hook(module, rows, kwargs)
            if result is None or all(row is arg for row, arg in zip(rows, args, strict=True)):
                return result
            (first, *others), new_kwargs = result
            self.read_shape(first)
            return (first.flatten(0, 1), *others), new_kwargs

        return in_rows


_lists: weakref.WeakKeyDictionary[nn.Module, TokenList] = weakref.WeakKeyDictionary()


def may_run_on_lists(block: nn.Module, maps: Iterable[nn.Module]) -> None:
    """Let hooks on maps of a block see rows, whether the maps run on rows or on lists."""
    for module in maps:
        _lists.setdefault(linear_of(module), TokenList(weakref.ref(block)))


def token_list_of(module: nn.Module) -> TokenList | None:
    """The layout of a map's states; ``None`` for a module that runs on what the model gives it."""
    return _lists.get(linear_of(module))


def as_module_returns(module: nn.Module, output: Any) -> Any:
    """Rows as a list, for a map that was seen to run on one."""
    layout = token_list_of(module)
    return output.flatten(0, 1) if layout is not None and layout.is_used and output.dim() == 3 else output
