"""What a model judge needs of the thing that runs the model: chats in, replies or faults out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from judges.prompt import Chat


class Reply(NamedTuple):
    """A judge's reply.

    Args:
        text: all of it.
        finish: why it ended, in the words of OpenAI's interface ("stop", "length", "content_filter").
        prompt_tokens, reply_tokens: as the server counted.
    """

    text: str
    finish: str | None = None
    prompt_tokens: int = 0
    reply_tokens: int = 0


class Fault(Exception):
    """No reply came.

    Args:
        reason: in few words, the same for the same cause, since reasons are counted; never holds a key.
        again: another attempt may help.
        fatal: no other request will fare better (wrong key, unknown model, no credit).
        wait: seconds the server asks to wait.
        sent: the request may have reached the server.
    """

    def __init__(
        self, reason: str, *, again: bool = False, fatal: bool = False, wait: float | None = None, sent: bool = True
    ) -> None:
        super().__init__(reason)
        self.reason, self.again, self.fatal, self.wait, self.sent = reason, again, fatal, wait, sent


Outcome: TypeAlias = Reply | Fault


Keep: TypeAlias = Callable[[int, Reply], None]


class Asked(NamedTuple):
    """Outcomes in the order of the chats, and how many requests were sent for them."""

    outcomes: list[Outcome]
    num_calls: int


class Backend(Protocol):
    """Runs the judge model."""

    def check(self) -> None:
        """Raise EditingError for what is certain to go wrong (no key, no server), before expensive work."""

    def ask(self, chats: Sequence[Chat], keep: Keep) -> Asked:
        """Ask for all chats; ``keep(index, reply)`` is called the moment a reply is there, from any thread."""
