"""Batches under a budget of padded tokens; no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


def token_batches(
    indices: Iterable[int], lengths: Sequence[int], max_tokens: int, max_rows: int | None = None
) -> Iterator[list[int]]:
    """Split indices into batches whose padded size stays within a budget.

    Batches are runs of ``indices`` in the order given. Sort them by length first: rows of similar length need little
    padding. A single row that exceeds ``max_tokens`` gets a batch of its own.

    Args:
        indices: rows to batch, as positions in ``lengths``.
        lengths: tokens of every row.
        max_tokens: bound on rows times the widest row, padding included.
        max_rows: bound on the rows of a batch; none by default.
    """
    batch: list[int] = []
    width = 0
    for index in indices:
        widest = max(width, lengths[index])
        if batch and ((len(batch) + 1) * widest > max_tokens or len(batch) == max_rows):
            yield batch
            batch, widest = [], lengths[index]
        batch.append(index)
        width = widest
    if batch:
        yield batch
