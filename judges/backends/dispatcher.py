"""Dispatch of many requests to one server: concurrency, retries with back-off, rate limits and budget."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from tqdm import tqdm

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.logs import get_logger
from judges.backends.base import JUDGE, BackendResult, Fault, OnReply, Outcome, Reply, Role
from judges.prompt import Chat

log = get_logger("lm_eval.judges")

BUDGET_SPENT = "not sent: the budget is spent"
TOO_MANY_FAILURES = "not sent: too many consecutive failures"

FIRST_PAUSE_SECONDS = 1.0  # before the first retry; doubles with each further one


@dataclass(frozen=True, kw_only=True)
class DispatchPolicy:
    """Limits of a dispatch; fields as in :class:`~judges.settings.JudgeSettings`.

    Args:
        grace: seconds after an interrupt in which replies that are on their way are still accepted.

    Tests replace ``sleep``, ``clock`` and ``jitter`` (the random factor of each pause).
    """

    concurrency: int = 8
    max_attempts: int = 6
    max_wait: float = 60.0
    give_up_after: int = 10
    max_calls: int | None = None
    max_tokens: int | None = None
    grace: float = 3.0
    sleep: Callable[[float], None] | None = None  # by default a pause that an interrupt ends
    clock: Callable[[], float] = time.monotonic
    jitter: Callable[[], float] = field(default=lambda: random.SystemRandom().uniform(0.5, 1.0))


class RequestDispatcher:
    """One dispatch of chats to one server.

    Args:
        send: sends one request; raises Fault if there is no reply.
        policy: limits.
        role: use of the model, for messages.
        abort: ends the requests that are being sent, with a Fault.
    """

    def __init__(
        self,
        send: Callable[[Chat], Reply],
        policy: DispatchPolicy,
        role: Role = JUDGE,
        abort: Callable[[], None] = lambda: None,
    ) -> None:
        self.send, self.policy, self.role, self.abort = send, policy, role, abort
        self._interrupted = threading.Event()
        self._unusable = f"not sent: the {role.name} is unusable"
        self.num_calls = self.num_tokens = 0
        self._consecutive_failures = 0
        self._paused_until = policy.clock()  # rate limit: no request before this time
        self._stop_reason: str | None = None  # once set, no further request is sent
        self._fatal: Fault | None = None
        self._lock = threading.Lock()

    def run(self, chats: Sequence[Chat], on_reply: OnReply) -> BackendResult:
        """Send every chat, at most ``concurrency`` at a time.

        Raises:
            EditingError: after a fatal fault; earlier replies have been passed to ``on_reply``.
        """
        outcomes: list[Outcome | None] = [None] * len(chats)
        queue = iter(range(len(chats)))
        running: dict[Future[Outcome], int] = {}
        with (
            tqdm(total=len(chats), desc=self.role.activity, unit=self.role.unit, disable=not chats) as bar,
            ThreadPoolExecutor(self.policy.concurrency) as pool,
        ):
            try:
                while True:
                    while len(running) < self.policy.concurrency and (index := next(queue, None)) is not None:
                        running[pool.submit(self._complete, index, chats[index], on_reply)] = index
                    if not running:
                        break
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        outcomes[running.pop(future)] = future.result()
                        bar.update()
            except BaseException:
                # Interrupted, or on_reply failed. A second interrupt ends the wait.
                self._stop_reason = self._unusable
                self._interrupted.set()
                try:
                    wait(running, timeout=self.policy.grace)
                finally:
                    self.abort()
                raise
        if self._fatal:
            raise EditingError(f"the {self.role.name} cannot be used: {self._fatal.reason}.")
        return BackendResult([outcome for outcome in outcomes if outcome is not None], self.num_calls)

    def _complete(self, index: int, chat: Chat, on_reply: OnReply) -> Outcome:
        """Send one chat, with retries."""
        fault: Fault | None = None
        for attempt in range(self.policy.max_attempts):
            if not self._reserve_call():
                return fault or Fault(self._stop_reason or self._unusable)
            try:
                reply = self.send(chat)
            except Fault as error:
                fault = error
                if not self._pause_before_retry(fault, attempt):
                    break
            else:
                on_reply(index, reply)
                self._record_success(reply)
                return reply
        assert fault is not None  # max_attempts is at least 1
        self._record_failure(fault)
        return fault

    def _reserve_call(self) -> bool:
        """Wait until the rate limit allows a request, then count it; False if no further request may be sent."""
        while True:
            with self._lock:
                pause = self._paused_until - self.policy.clock()
                if self._stop_reason is None and self._is_budget_spent():
                    self._stop_reason = BUDGET_SPENT
                if self._stop_reason is not None:
                    return False
                if pause <= 0:
                    self.num_calls += 1
                    return True
            self._sleep(pause)

    def _is_budget_spent(self) -> bool:
        calls, tokens = self.policy.max_calls, self.policy.max_tokens
        return (calls is not None and self.num_calls >= calls) or (tokens is not None and self.num_tokens >= tokens)

    def _pause_before_retry(self, fault: Fault, attempt: int) -> bool:
        """Wait for the next attempt; False if there is none."""
        if not fault.retryable or attempt + 1 >= self.policy.max_attempts:
            return False
        log.info("attempt %d of %d: %s", attempt + 1, self.policy.max_attempts, fault.reason)
        backoff = min(self.policy.max_wait, FIRST_PAUSE_SECONDS * 2**attempt * self.policy.jitter())
        wait = fault.wait
        if wait is not None:
            if wait > self.policy.max_wait:
                return False
            with self._lock:  # a rate limit applies to all requests, not only to the one that hit it
                self._paused_until = max(self._paused_until, self.policy.clock() + wait)
        if wait is None or wait < backoff:  # `Retry-After: 0` and dates in the past request no pause at all
            self._sleep(backoff)
        return True

    def _sleep(self, seconds: float) -> None:
        (self.policy.sleep or self._interrupted.wait)(seconds)

    def _record_success(self, reply: Reply) -> None:
        with self._lock:
            self.num_tokens += reply.prompt_tokens + reply.reply_tokens
            self._consecutive_failures = 0

    def _record_failure(self, fault: Fault) -> None:
        with self._lock:
            if fault.fatal:
                self._fatal, self._stop_reason = self._fatal or fault, self._unusable
            # A request refused for its own content predicts nothing about the next one.
            elif fault.retryable or fault.is_of_model:
                self._consecutive_failures += 1
                if self._consecutive_failures >= self.policy.give_up_after:
                    self._stop_reason = self._stop_reason or TOO_MANY_FAILURES
