"""The loop of a sweep: submits runs to an executor, and reports their outcomes."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from edit_hooks.utils.errors import first_line
from lm_edit.sweeps.execution.runs import POLL_SECONDS, RunOutcome, is_locked, set_aside_damaged, state_of

BUSY_SECONDS = 1.0  # between polls of a run that another sweep executes
ELSEWHERE = "in another process"  # state of the event that names such a run, once


class Pending(Protocol):
    """A submitted run; a :class:`concurrent.futures.Future` or a job of submitit."""

    def done(self) -> bool: ...

    def result(self) -> Any: ...


class Executor(Protocol):
    """Where runs are executed.

    Attributes:
        slots: runs that it takes at a time; ``None``: any number, since it has a queue of its own.
    """

    slots: int | None

    def submit(self, folder: Path) -> Pending: ...

    def stop(self) -> None:
        """End all runs, and wait for their end."""
        ...

    def close(self) -> None:
        """Release workers and connections."""
        ...


class Event(NamedTuple):
    """A run that started or ended, or that another process was found to execute."""

    folder: Path
    state: str
    seconds: float = 0.0
    reason: str = ""


def run_all(
    folders: Mapping[Path, Sequence[str]],
    executor: Executor,
    *,
    retry: bool,
    report: Callable[[Event], None],
    tick: Callable[[], None] = lambda: None,
) -> dict[Path, RunOutcome]:
    """Execute all runs that are not finished.

    Args:
        folders: folder of a run -> its tasks.
        retry: also execute those that failed before, and those whose results are damaged, which are set aside.
        report: called when a run starts and ends.
        tick: called several times a second.

    Returns:
        The outcome of every run; failed ones do not stop the others. A run whose submission is refused, as by a limit
        on jobs, is submitted again after another one has ended; it is failed if none is left.

    Raises:
        KeyboardInterrupt: on Ctrl-C and SIGTERM, after the runs were ended.
    """
    outcomes: dict[Path, RunOutcome] = {}
    queue: deque[Path] = deque()
    for folder, tasks in folders.items():
        state, reason = state_of(folder, tasks)
        if state == "done":
            outcomes[folder] = RunOutcome(state)
            report(Event(folder, "there already"))
        elif state in ("failed", "damaged") and not retry:
            outcomes[folder] = RunOutcome(state, 0.0, reason)
            report(Event(folder, "failed before" if state == "failed" else state, 0.0, reason))
        else:
            if state == "damaged":
                set_aside_damaged(folder, tasks)
            queue.append(folder)
    pending: dict[Path, Pending] = {}
    busy: dict[Path, float] = {}  # run that another process executes -> time of the next poll
    named: set[Path] = set()  # of those the ones that were reported
    refused = False  # whether the executor takes no further run until one has ended
    with _signals() as check_interrupt:
        try:
            while queue or pending or busy:
                check_interrupt()
                for folder in [folder for folder, when in busy.items() if when <= time.monotonic()]:
                    del busy[folder]
                    queue.append(folder)
                while queue and not refused and (executor.slots is None or len(pending) < executor.slots):
                    folder = queue.popleft()
                    if is_locked(folder):
                        busy[folder] = time.monotonic() + BUSY_SECONDS
                        if folder not in named:
                            named.add(folder)
                            report(Event(folder, ELSEWHERE))
                        continue
                    try:
                        handle = executor.submit(folder)
                    except Exception as error:  # of the cluster's library: a limit on jobs, no reply of the controller
                        if refused := bool(pending):
                            queue.appendleft(folder)
                        else:
                            outcomes[folder] = RunOutcome(
                                "failed", 0.0, f"it cannot be submitted ({first_line(error)})"
                            )
                            report(Event(folder, *outcomes[folder]))
                        break  # an interrupt is looked for before the next attempt
                    pending[folder] = handle
                    report(Event(folder, "started"))
                for folder in [folder for folder, handle in pending.items() if handle.done()]:
                    outcome, refused = _outcome(pending.pop(folder)), False
                    if outcome.state == "busy":
                        busy[folder] = time.monotonic() + BUSY_SECONDS
                        continue
                    outcomes[folder] = outcome
                    report(Event(folder, outcome.state, outcome.seconds, outcome.reason))
                tick()
                time.sleep(POLL_SECONDS)
        except BaseException:
            executor.stop()
            raise
        finally:
            executor.close()
    return outcomes


def _outcome(handle: Pending) -> RunOutcome:
    """The outcome of a finished execution; a worker that died is a failed run."""
    try:
        return RunOutcome(*handle.result())
    except Exception as error:
        return RunOutcome("failed", 0.0, f"the worker ended without a result ({first_line(error)})")


@contextlib.contextmanager
def _signals() -> Iterator[Callable[[], None]]:
    """Yield a function that raises KeyboardInterrupt after Ctrl-C or SIGTERM; a second signal raises it at once.

    An exception that a signal raises between any two instructions is lost inside a finalizer or a weak reference's
    callback, and the sweep would go on.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    received: list[int] = []

    def receive(number: int, _: object) -> None:
        received.append(number)
        if len(received) > 1:
            raise KeyboardInterrupt

    def check() -> None:
        if received:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield check
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
