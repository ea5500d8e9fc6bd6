"""Asking a server many things: concurrency, attempts with back-off, rate limits, budget, and when to stop."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from tqdm import tqdm

from edit_hooks.utils.errors import EditingError
from judges.backends.base import Asked, Fault, Keep, Outcome, Reply
from judges.prompt import Chat

log = logging.getLogger("lm_eval.judges")


BUDGET = "not asked: the budget is spent"


GAVE_UP = "not asked: the judge failed too many times in a row"


STOPPED = "not asked: the judge refused to work at all"


FIRST_PAUSE = 1.0  # seconds before the second attempt; doubled for each further one


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How to ask; the meaning of the fields is that of :class:`~judges.settings.JudgeSettings`.

    ``sleep``, ``clock`` and ``jitter`` (a factor for each pause) are replaced by tests.
    """

    concurrency: int = 8
    max_attempts: int = 6
    max_wait: float = 60.0
    give_up_after: int = 10
    max_calls: int | None = None
    max_tokens: int | None = None
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    jitter: Callable[[], float] = field(default=lambda: random.uniform(0.5, 1.0))


class Asking:
    """One round of questions to one server."""

    def __init__(self, send: Callable[[Chat], Reply], policy: Policy) -> None:
        self.send, self.policy = send, policy
        self.num_calls = self.num_tokens = 0
        self._failed_in_a_row = 0
        self._not_before = policy.clock()  # the server asked everybody to wait until then
        self._stop: str | None = None  # why nothing more is asked
        self._fatal: Fault | None = None
        self._lock = threading.Lock()

    def all(self, chats: Sequence[Chat], keep: Keep) -> Asked:
        """Ask for every chat, at most ``concurrency`` at a time.

        Raises:
            EditingError: when the server says that nothing will work; replies that came before were kept.
        """
        outcomes: list[Outcome | None] = [None] * len(chats)
        queue = iter(range(len(chats)))
        running: dict[Future[Outcome], int] = {}
        with (
            tqdm(total=len(chats), desc="Asking the judge", unit="answer", disable=not chats) as bar,
            ThreadPoolExecutor(self.policy.concurrency) as pool,
        ):
            try:
                while True:
                    while len(running) < self.policy.concurrency and (index := next(queue, None)) is not None:
                        running[pool.submit(self._one, index, chats[index], keep)] = index
                    if not running:
                        break
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        outcomes[running.pop(future)] = future.result()
                        bar.update()
            except BaseException:  # interrupted, or the store failed: nothing new is sent; what is in flight is kept
                self._stop = STOPPED
                raise
        if self._fatal:
            raise EditingError(f"the judge cannot be used: {self._fatal.reason}.")
        return Asked([outcome for outcome in outcomes if outcome is not None], self.num_calls)

    def _one(self, index: int, chat: Chat, keep: Keep) -> Outcome:
        fault = Fault(self._stop or STOPPED, sent=False)
        for attempt in range(self.policy.max_attempts):
            if not self._may_send():
                return Fault(self._stop or STOPPED, sent=False) if attempt == 0 else fault
            try:
                reply = self.send(chat)
            except Fault as caught:
                fault = caught
                if not self._again(fault, attempt):
                    break
            else:
                keep(index, reply)
                self._count(reply)
                return reply
        self._failed(fault)
        return fault

    def _may_send(self) -> bool:
        """Wait for the server's pause to end, then count the request; False when nothing more is to be asked."""
        while True:
            with self._lock:
                pause = self._not_before - self.policy.clock()
                if self._stop is None and self._spent():
                    self._stop = BUDGET
                if self._stop is not None:
                    return False
                if pause <= 0:
                    self.num_calls += 1
                    return True
            self.policy.sleep(pause)

    def _spent(self) -> bool:
        calls, tokens = self.policy.max_calls, self.policy.max_tokens
        return (calls is not None and self.num_calls >= calls) or (tokens is not None and self.num_tokens >= tokens)

    def _again(self, fault: Fault, attempt: int) -> bool:
        """Whether to try again; pauses first."""
        if not fault.again or attempt + 1 >= self.policy.max_attempts:
            return False
        log.info("attempt %d of %d: %s", attempt + 1, self.policy.max_attempts, fault.reason)
        if fault.wait is not None:
            if fault.wait > self.policy.max_wait:
                return False
            with self._lock:  # a rate limit concerns every request, not only the one that met it
                self._not_before = max(self._not_before, self.policy.clock() + fault.wait)
            return True
        self.policy.sleep(min(self.policy.max_wait, FIRST_PAUSE * 2**attempt * self.policy.jitter()))
        return True

    def _count(self, reply: Reply) -> None:
        with self._lock:
            self.num_tokens += reply.prompt_tokens + reply.reply_tokens
            self._failed_in_a_row = 0

    def _failed(self, fault: Fault) -> None:
        with self._lock:
            if fault.fatal:
                self._fatal, self._stop = self._fatal or fault, STOPPED
            elif fault.again:  # a request that is refused for itself says nothing about the next one
                self._failed_in_a_row += 1
                if self._failed_in_a_row >= self.policy.give_up_after:
                    self._stop = self._stop or GAVE_UP
