"""Scopes that undo themselves, wherever an interrupt (Ctrl-C) comes and in whatever order they are left.

An interrupt can come between any two lines, also in a ``finally`` block or between an acquisition and the line that
remembers it. So undoing is arranged before acting, and happens twice: the second time completes a first one that was
interrupted. Scopes are generators: one that is dropped without its exit having run is closed, and thereby undone.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Owner = TypeVar("Owner")
State = TypeVar("State")


@contextlib.contextmanager
def undone(undo: Callable[[], object]) -> Iterator[None]:
    """Call ``undo`` at the end of the block, twice.

    Args:
        undo: idempotent; a no-op for whatever the block has not done.
    """
    try:
        try:
            yield
        finally:
            undo()
    finally:
        undo()


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Pause the garbage collector, for blocks that make many objects without cycles, which it would walk repeatedly."""
    was_enabled = gc.isenabled()
    with undone(lambda: gc.enable() if was_enabled else None):
        gc.disable()
        yield


class _Before(Generic[State]):
    """State of an object from before a scope. Compared by identity."""

    def __init__(self, state: State) -> None:
        self.state = state


class NestedStates(Generic[Owner, State]):
    """States of objects from before the scopes that are open on them.

    Scopes on one object may be left in any order. One that is left before an inner scope passes its state on to that;
    the object has its own state again when the last is left.
    """

    def __init__(self) -> None:
        self._open: weakref.WeakKeyDictionary[Owner, list[_Before[State]]] = weakref.WeakKeyDictionary()

    @contextlib.contextmanager
    def changed(
        self, owner: Owner, state: State, change: Callable[[], object], restore: Callable[[State], object]
    ) -> Iterator[None]:
        """Scope that begins with ``change()`` and ends with ``restore(state)``, both idempotent."""
        before = _Before(state)

        def leave() -> None:
            scopes = self._open.get(owner, [])
            if before not in scopes:
                return
            inner = scopes[scopes.index(before) + 1 :]
            if inner:
                inner[0].state = before.state
            else:
                restore(before.state)
            scopes.remove(before)

        with undone(leave):
            self._open.setdefault(owner, []).append(before)
            change()
            yield
