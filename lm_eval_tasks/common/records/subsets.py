"""Random subsets and orders of a benchmark's cases, the same for its tasks and its edits.

The order is that of the SHA-256 of ``<seed>:<row>``, with the record's row in the file from 0. It depends neither on a
random generator nor on the number of records, and a smaller subset is the start of a larger one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from edit_hooks.utils.errors import EditingError
from lm_eval_tasks.common.settings import SUBSET, SUBSET_SEED, Settings


def shuffle_key(seed: int, row: int) -> bytes:
    """The place of a row in the order of a seed."""
    return hashlib.sha256(f"{seed}:{row}".encode()).digest()


def choose_subset(rows: Sequence[int], settings: Settings, what: str) -> tuple[list[int], dict[str, Any]]:
    """Positions of the chosen records, in order, and their description for the results.

    Args:
        rows: rows of the usable records in the file.
        settings: a task's metadata. Read here: ``subset``, ``subset_seed``.
        what: the records, for the error.

    Raises:
        EditingError: for more records than there are.
    """
    size, seed = SUBSET.read(settings), SUBSET_SEED.read(settings)
    if size is None and seed is None:
        return list(range(len(rows))), {}
    if size is not None and size > len(rows):
        raise EditingError(f"subset={size}, but {what} has {len(rows)} records. Give at most that, or subset=all.")
    order_seed = seed or 0
    order = sorted(range(len(rows)), key=lambda position: shuffle_key(order_seed, rows[position]))
    return order[:size], {"subset": "all" if size is None else size, "subset_seed": order_seed, "subset_of": len(rows)}
