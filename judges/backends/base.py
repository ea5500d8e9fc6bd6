"""The interface to the backend that runs a judge model or a writer: chats in, replies or faults out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from judges.prompt import Chat


class Role(NamedTuple):
    """The use of a backend's model, for messages and progress bars.

    Args:
        name: noun, as in ``the judge cannot be used``.
        activity, unit: of the progress bar.
        beside: what else is in memory, after "does not fit on cuda".
        otherwise: the last remedy for a model that does not fit into memory.
    """

    name: str
    activity: str
    unit: str
    beside: str
    otherwise: str


JUDGE = Role(
    "judge",
    "Judging",
    "answer",
    " beside the edited model",
    "or judge the saved samples afterwards: lm-edit judge SAMPLES",
)
WRITER = Role("writer", "Writing", "request", "", "or a model behind a server: openai:MODEL@URL")


UNFINISHED_THOUGHT = "thought"  # finish reason of a writer's reply that ends inside of its thought


class Reply(NamedTuple):
    """A model's reply.

    Args:
        text: the full text.
        finish: finish reason as in OpenAI's API ("stop", "length", "content_filter"), or :data:`UNFINISHED_THOUGHT`.
        prompt_tokens, reply_tokens: token counts as reported by the backend.
    """

    text: str
    finish: str | None = None
    prompt_tokens: int = 0
    reply_tokens: int = 0


class Fault(Exception):
    """A request without a reply.

    Args:
        reason: short and the same for the same cause, because reasons are counted; never contains a key.
        retryable: whether another attempt may succeed.
        fatal: whether every further request will fail as well (wrong key, unknown model, no credit).
        wait: seconds that the server requests to wait.
        is_of_model: whether the cause is the model or its settings, so that another attempt fails as well and other
            requests probably do.
    """

    def __init__(
        self,
        reason: str,
        *,
        retryable: bool = False,
        fatal: bool = False,
        wait: float | None = None,
        is_of_model: bool = False,
    ) -> None:
        super().__init__(reason)
        self.reason, self.retryable, self.fatal, self.wait = reason, retryable, fatal, wait
        self.is_of_model = is_of_model


Outcome: TypeAlias = Reply | Fault

# Called with the index of the chat and its reply as soon as the reply is there, from any thread.
OnReply: TypeAlias = Callable[[int, Reply], None]


class BackendResult(NamedTuple):
    """Outcomes in the order of the chats, and the number of requests sent for them."""

    outcomes: list[Outcome]
    num_calls: int


class Backend(Protocol):
    """Runs the model."""

    def check(self) -> None:
        """Fail fast: raise EditingError for a missing key, package, model or server."""

    def complete(self, chats: Sequence[Chat], on_reply: OnReply) -> BackendResult:
        """Return a reply or a fault for each chat."""
