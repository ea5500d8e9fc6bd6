"""Checkpoints that lack weights: transformers fills them with random numbers and only logs it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from edit_hooks.utils.errors import EditingError

# Arguments of from_pretrained with which it returns (model, report) for :func:`require_complete`.
REPORTED = {"output_loading_info": True, "ignore_mismatched_sizes": True}


def require_complete(report: Mapping[str, Any], source: str) -> None:
    """Refuse a model with weights that were not read from its checkpoint.

    Weights of the checkpoint that the model does not have are accepted; transformers logs their names. Many good
    checkpoints have some: heads and towers for other tasks, buffers of earlier releases.

    Args:
        report: the loading information of transformers. Tied weights and non-persistent buffers are not in it.
        source: the checkpoint, for messages.

    Raises:
        EditingError: it names the weights.
    """
    missing = sorted(report["missing_keys"])
    mismatched = sorted(report["mismatched_keys"])
    if missing:
        hint = f" It has other names, such as {_first(report['unexpected_keys'])}." if report["unexpected_keys"] else ""
        raise EditingError(
            f"{source} lacks {len(missing)} of the model's weights: {_first(missing)}. They would be random numbers."
            f"{hint} Download the checkpoint again, or load it with the class it was saved from."
        )
    if mismatched:
        shapes = (f"{name} {list(stored)}, the model's {list(own)}" for name, stored, own in mismatched)
        raise EditingError(
            f"{source} has weights of other shapes than the model: {_first(shapes)}. They would be random numbers. Its "
            "config.json and its weights do not belong together."
        )


def _first(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
