"""Tensors that a user gives in the place of a draw: where a training starts, or noise.

Such a setting is a mapping from name to tensor, or a safetensors file with these names. It is read when the settings
are resolved for a model, so keys and results record each tensor by shape, dtype and hash, wherever the file is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from edit_hooks.modeling.tensors import read_tensors
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.settings.numbers import shorten

Source = Mapping[str, torch.Tensor] | str
Shape = Sequence[int | str]  # lengths; a text names a length that may be any


def read_given_tensors(source: Source, setting: str) -> dict[str, torch.Tensor]:
    """All tensors of a setting.

    Raises:
        EditingError: for an unreadable file.
    """
    return dict(source if isinstance(source, Mapping) else read_tensors(source, f"file of {setting!r}")[1])


def tensor_of(given: Mapping[str, torch.Tensor], name: str, shape: Shape, setting: str) -> torch.Tensor:
    """The tensor of a name.

    Raises:
        EditingError: there is none, or one of another shape, or not of finite floating-point numbers.
    """
    if name not in given:
        has = shorten(", ".join(sorted(given))).strip("'") or "none"
        raise EditingError(f"{setting!r} has no tensor for {name}; it has {has}.")
    tensor = given[name]
    fits = len(shape) == tensor.dim() and all(
        isinstance(wanted, str) or wanted == length for wanted, length in zip(shape, tensor.shape, strict=True)
    )
    if not fits or not tensor.is_floating_point():
        raise wrong_shape(tensor, name, shape, setting)
    if not torch.isfinite(tensor).all():
        raise EditingError(f"{setting!r} of {name} holds NaN or infinity; finite numbers are needed.")
    return tensor


def wrong_shape(tensor: torch.Tensor, name: str, shape: Shape, setting: str) -> EditingError:
    """The error for a tensor that does not have the shape."""
    wanted = ", ".join(map(str, shape))
    return EditingError(
        f"{setting!r} of {name} is {tensor.dtype} {list(tensor.shape)}; a floating-point [{wanted}] is needed."
    )


def read_shapes(source: Source, setting: str, shapes: Mapping[str, Shape]) -> dict[str, torch.Tensor]:
    """The tensors of a setting with these names and shapes; others are left out.

    Raises:
        EditingError: as :func:`read_given_tensors` and :func:`tensor_of`.
    """
    given = read_given_tensors(source, setting)
    return {name: tensor_of(given, name, shape, setting) for name, shape in shapes.items()}
