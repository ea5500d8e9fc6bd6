"""Gradients on or off in a scope."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from edit_hooks.utils.scopes import undone


@contextlib.contextmanager
def gradients(enabled: bool) -> Iterator[None]:
    """Compute with or without gradients, also inside ``inference_mode``, and restore the caller's mode.

    For the entrances of the package: the ``with torch.no_grad()`` of torch is not left if an interrupt comes just
    before its exit.
    """
    before = torch.is_grad_enabled()
    with undone(lambda: torch.set_grad_enabled(before)), torch.inference_mode(False):
        torch.set_grad_enabled(enabled)
        yield
