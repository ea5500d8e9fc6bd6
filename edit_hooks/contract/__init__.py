"""The contract of editors: checks that every editor passes on tiny models of every family."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edit_hooks.utils.public_names import lazy_names

if TYPE_CHECKING:
    from edit_hooks.contract.runner import run_contract
    from edit_hooks.contract.tiny_models import ALL_MODEL_TYPES

_HOMES = {
    "ALL_MODEL_TYPES": "tiny_models",
    "run_contract": "runner",
}

__all__ = [
    "ALL_MODEL_TYPES",
    "run_contract",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
