"""A progress bar of edits that counts those that a kill does not lose."""

from __future__ import annotations

from time import monotonic
from types import TracebackType

from tqdm import tqdm

from edit_hooks.utils.durations import spell_duration


class StoredBar:
    """Counts finished edits, and shows those of the running batch beside them.

    A batch is stored once all of its edits are computed: 16 edits, or 64 on a GPU. The time left is that of computing,
    since tqdm knows no rate before the first batch is stored.

    """

    def __init__(self, total: int, label: str, *, quiet: bool) -> None:
        self._running = 0
        self._total, self._finished, self._computed, self._start = total, 0, 0, monotonic()
        self._bar = tqdm(total=total, desc=label, unit="edit", disable=quiet)

    def __enter__(self) -> StoredBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def computed(self, count: int) -> None:
        """Edits of the running batch are computed, and lost by a kill. Editors also report steps that ended none."""
        if not count:
            return
        self._running += count
        self._computed += count
        left = max(self._total - self._finished - self._running, 0)
        seconds = (monotonic() - self._start) / self._computed * left
        self._bar.set_postfix_str(f"{self._running} more computed in this batch; {spell_duration(seconds)} left")

    def finished(self, count: int = 1) -> None:
        """Edits are stored, or known to fail."""
        self._finished += count
        self._bar.update(count)

    def end_batch(self) -> None:
        """All edits of the running batch are finished, or it is computed again in parts."""
        if self._running:
            self._running = 0
            self._bar.set_postfix_str("")
