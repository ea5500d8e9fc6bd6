"""Judges behind OpenAI-compatible servers (hosted, vLLM, Ollama, ``transformers serve``), through the openai client."""

from __future__ import annotations

import email.utils
import functools
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from edit_hooks.utils.errors import EditingError
from judges.backends.base import Asked, Fault, Keep, Reply
from judges.backends.dispatcher import Asking, Policy
from judges.parse import EMPTY
from judges.prompt import Chat
from judges.settings import OPENAI_URL, JudgeSettings

NO_KEY = "no-key"  # the client insists on one; servers of one's own do not look at it


CHECK_SECONDS = 10.0


AGAIN = frozenset({408, 409, 425, 429})


FATAL = {401: "the key was not accepted", 402: "no credit left", 403: "access denied", 404: "no such model or address"}


class Endpoint:
    """A model behind a server.

    Args:
        settings: which model, where, and how to ask.
        policy: how to ask, for tests; by default from the settings.
    """

    def __init__(self, settings: JudgeSettings, policy: Policy | None = None) -> None:
        self.settings = settings
        self.policy = policy or Policy(
            concurrency=settings.concurrency,
            max_attempts=settings.max_attempts,
            max_wait=settings.max_wait,
            give_up_after=settings.give_up_after,
            max_calls=settings.max_calls,
            max_tokens=settings.max_tokens,
        )

    def check(self) -> None:
        """The client is installed, there is a key, and the server answers; asks for its list of models, which is free.

        Raises:
            EditingError: what is missing and how to supply it.
        """
        client = self._client  # says what is missing
        import openai

        try:
            client.with_options(timeout=min(CHECK_SECONDS, self.settings.timeout)).models.list()
        except (openai.AuthenticationError, openai.PermissionDeniedError):
            raise EditingError(
                f"judge {self.settings.model} at {self.settings.url}: the key in {self.settings.key_variable} was not "
                "accepted."
            ) from None
        except openai.APIConnectionError as error:
            raise EditingError(
                f"judge {self.settings.model}: no server answers at {self.settings.url} ({type(error).__name__}). "
                "Start it or correct base_url."
            ) from None
        except (openai.APIError, ValueError):
            pass  # servers need not offer a list; whether the model is there shows at the first question

    def ask(self, chats: Sequence[Chat], keep: Keep) -> Asked:
        """All replies, faults in place of those that did not come."""
        if not chats:
            return Asked([], 0)
        self._client  # noqa: B018  # a missing package or key is reported before threads start
        return Asking(self._send, self.policy).all(chats, keep)

    @functools.cached_property
    def _client(self) -> Any:
        try:
            import openai
        except ImportError as error:
            raise EditingError(
                'judges behind a server need the openai client: pip install "lm-eval-editing[judge]".'
            ) from error
        if self._key is None and self.settings.url == OPENAI_URL:
            raise EditingError(
                f"judge {self.settings.model}: put the API key into the environment variable "
                f"{self.settings.key_variable} (keys are read from there only), or name another server with base_url."
            )
        return openai.OpenAI(
            api_key=self._key or NO_KEY, base_url=self.settings.url, timeout=self.settings.timeout, max_retries=0
        )

    @functools.cached_property
    def _key(self) -> str | None:
        return os.environ.get(self.settings.key_variable) or None

    def _send(self, chat: Chat) -> Reply:
        """One attempt; raises Fault."""
        import openai

        settings = self.settings
        wanted = {"temperature": settings.temperature, "max_tokens": settings.max_reply_tokens, "seed": settings.seed}
        options = {name: value for name, value in wanted.items() if value is not None}
        try:
            found = self._client.chat.completions.create(
                model=settings.model, messages=chat, extra_body=dict(settings.extra) or None, **options
            )
        except openai.APITimeoutError:
            raise Fault("the judge took too long", again=True) from None
        except openai.APIConnectionError:
            raise Fault("no connection to the judge", again=True) from None
        except openai.APIStatusError as error:
            raise self._fault(error.status_code, error.response.headers, getattr(error, "code", None)) from None
        except (openai.APIError, ValueError):
            raise Fault("the judge's server sent no JSON", again=True) from None
        return self._reply(found)

    def _reply(self, found: Any) -> Reply:
        """The reply in a server's answer, of which nothing is taken for granted."""
        choices = getattr(found, "choices", None)
        if not isinstance(choices, list):
            raise Fault("the judge's server sent no JSON", again=True)
        message = getattr(choices[0], "message", None) if choices else None
        text, refusal = getattr(message, "content", None), getattr(message, "refusal", None)
        finish = getattr(choices[0], "finish_reason", None) if choices else None
        if isinstance(refusal, str) and refusal:
            text, finish = refusal, "content_filter"
        if finish != "content_filter" and (not isinstance(text, str) or not text.strip()):
            raise Fault(EMPTY, again=True)
        usage = getattr(found, "usage", None)
        counts = [getattr(usage, name, None) for name in ("prompt_tokens", "completion_tokens")]
        prompt_tokens, reply_tokens = (count if isinstance(count, int) else 0 for count in counts)
        return Reply(self._without_key(text or ""), finish, prompt_tokens, reply_tokens)

    def _fault(self, status: int, headers: Mapping[str, str], code: Any) -> Fault:
        if status == 429 and code == "insufficient_quota":
            return Fault("no credit left (HTTP 429)", fatal=True)
        if status in FATAL:
            return Fault(f"{FATAL[status]} (HTTP {status}; {self.settings.model} at {self.settings.url})", fatal=True)
        again = status in AGAIN or status >= 500
        return Fault(f"HTTP {status}", again=again, wait=asked_wait(headers, time.time()) if again else None)

    def _without_key(self, text: str) -> str:
        """A server that echoes the key must not bring it into the store."""
        return text.replace(self._key, "[API key]") if self._key else text


def asked_wait(headers: Mapping[str, str], now: float) -> float | None:
    """Seconds a server asks to wait, ``None`` if it does not say.

    Read are ``retry-after-ms``, ``retry-after`` (seconds or a date) and, where a remaining count is 0, OpenAI's
    ``x-ratelimit-reset-requests`` and ``-tokens`` ("1s", "6m0s", "20ms").

    Args:
        headers: of the response, found in lower case.
        now: seconds since 1970, for dates.
    """
    if milliseconds := _number(headers.get("retry-after-ms")):
        return milliseconds / 1000
    asked = headers.get("retry-after")
    if asked is not None:
        if (seconds := _number(asked)) is not None:
            return seconds
        try:
            return max(0.0, email.utils.parsedate_to_datetime(asked).timestamp() - now)
        except ValueError:
            pass  # neither a number nor a date: as if it were not there
    waits = [
        _duration(headers.get(f"x-ratelimit-reset-{what}"))
        for what in ("requests", "tokens")
        if headers.get(f"x-ratelimit-remaining-{what}") == "0"
    ]
    known = [seconds for seconds in waits if seconds is not None]
    return max(known) if known else None


def _number(text: str | None) -> float | None:
    return float(text) if text is not None and re.fullmatch(r"\s*\d+(\.\d+)?\s*", text) else None


_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def _duration(text: str | None) -> float | None:
    if not text or not re.fullmatch(r"(\d+(\.\d+)?(ms|s|m|h|d))+", text):
        return None
    return sum(float(number) * _UNITS[unit] for number, unit in re.findall(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)", text))
