"""Backend for OpenAI-compatible servers (hosted, vLLM, Ollama, ``transformers serve``), through the openai client."""

from __future__ import annotations

import asyncio
import email.utils
import functools
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from edit_hooks.utils.errors import EditingError, first_line
from edit_hooks.utils.logs import get_logger, warn_once
from edit_hooks.utils.settings.numbers import shorten
from judges.backends.base import JUDGE, BackendResult, Fault, OnReply, Reply, Role
from judges.backends.dispatcher import DispatchPolicy, RequestDispatcher
from judges.backends.http_requests import RefusedResponse, RequestLoop, bounded_client, refused_fault
from judges.prompt import Chat, estimate_tokens
from judges.settings import OPENAI_URL, JudgeSettings

if TYPE_CHECKING:
    import openai

log = get_logger("lm_eval.judges")

PLACEHOLDER_KEY = "no-key"  # the client requires a key; servers without authentication ignore it
CHECK_TIMEOUT_SECONDS = 10.0
# Larger counts of tokens are not believed
HIDDEN_PROMPT_TOKENS, MAX_REPLY_TOKENS = 20_000, 1_000_000

RETRYABLE_STATUSES = frozenset({408, 409, 425, 429})  # and all of 500 and above
FATAL_STATUSES = {
    401: "the key was not accepted",
    402: "no credit left",
    403: "access denied",
    404: "no such model or address",
}
# Errors about settings, which all requests share: of these codes, or of this type about a parameter that holds no text.
SETTING_CODES = frozenset({"unsupported_parameter", "unsupported_value"})
INVALID_REQUEST = "invalid_request_error"
TEXT_PARAMETERS = frozenset({"messages", "prompt", "input"})
TEXT_CODES = frozenset({"context_length_exceeded", "content_filter"})
REMEDIES = {
    "max_tokens": "max_reply_tokens: null sends none, extra: {max_completion_tokens: 1000} is that of newer models",
    "temperature": "temperature: null sends none",
    "seed": "seed: null sends none",
}


class OpenAIBackend:
    """A model behind an OpenAI-compatible server.

    Args:
        settings: model, server, limits.
        policy: limits of the dispatch; by default from the settings.
        role: use of the model, for messages.
    """

    def __init__(self, settings: JudgeSettings, policy: DispatchPolicy | None = None, role: Role = JUDGE) -> None:
        self.settings, self.role = settings, role
        self.policy = policy or DispatchPolicy(
            concurrency=settings.concurrency,
            max_attempts=settings.max_attempts,
            max_wait=settings.max_wait,
            give_up_after=settings.give_up_after,
            max_calls=settings.max_calls,
            max_tokens=settings.max_tokens,
        )

    def check(self) -> None:
        """Check that client package, key and server are there, by requesting the list of models, which is free.

        Raises:
            EditingError: for the first one that is missing.
        """
        client = self._new_client()  # raises if the package or the key is missing
        import openai

        try:
            with RequestLoop(client.close) as loop:
                loop.run(client.models.with_raw_response.list, min(CHECK_TIMEOUT_SECONDS, self.settings.timeout))
        except (openai.AuthenticationError, openai.PermissionDeniedError):
            raise EditingError(
                f"{self.role.name} {self.settings.model} at {self.settings.url}: the key in "
                f"{self.settings.key_variable} was not accepted."
            ) from None
        except (openai.APIConnectionError, asyncio.TimeoutError, RefusedResponse) as error:
            refused = refused_fault(error)
            if refused is None:
                raise EditingError(
                    f"{self.role.name} {self.settings.model}: no server answers at {self.settings.url} "
                    f"({type(error).__name__}). Start it or correct base_url."
                ) from None
            if refused.fatal:
                raise self._unusable(refused) from None
        except (openai.APIError, ValueError, RecursionError):
            pass  # not all servers offer the list; a missing model shows at the first request

    def complete(self, chats: Sequence[Chat], on_reply: OnReply) -> BackendResult:
        """Send all chats; return a fault in place of each missing reply."""
        if not chats:
            return BackendResult([], 0)
        client = self._new_client()
        with RequestLoop(client.close) as loop:
            send = functools.partial(self._send, client, loop)
            return RequestDispatcher(send, self.policy, self.role, loop.abort).run(chats, on_reply)

    def _unusable(self, fault: Fault) -> EditingError:
        return EditingError(f"the {self.role.name} cannot be used: {fault.reason}.")

    def _new_client(self) -> openai.AsyncOpenAI:
        try:
            import openai
        except ImportError as error:
            raise EditingError(
                'models behind a server need the openai client: pip install "lm-eval-editing[judge]".'
            ) from error
        if self._key is None and self.settings.url == OPENAI_URL:
            raise EditingError(
                f"{self.role.name} {self.settings.model}: put the API key into the environment variable "
                f"{self.settings.key_variable} (keys are read from there only), or give another server as base_url."
            )
        try:
            return openai.AsyncOpenAI(
                api_key=self._key or PLACEHOLDER_KEY,
                base_url=self.settings.url,
                timeout=self.settings.timeout,
                max_retries=0,
                http_client=bounded_client(openai, self.settings.url, self.role),
            )
        except (ImportError, ValueError) as error:  # of the HTTP library, about a proxy that the environment names
            raise EditingError(
                f"{self.role.name} {self.settings.model}: no connection can be set up: {first_line(error)} The proxy "
                "is that of ALL_PROXY, HTTPS_PROXY or HTTP_PROXY. Accepted are http:// and https://, and socks5:// "
                'with pip install "httpx[socks]"; NO_PROXY=localhost,127.0.0.1 excepts a server on this machine.'
            ) from None

    @functools.cached_property
    def _key(self) -> str | None:
        """The API key without surrounding white space; ``None`` if there is none.

        Raises:
            EditingError: for characters that a header cannot carry; the message does not repeat the key.
        """
        key = os.environ.get(self.settings.key_variable, "").strip()
        if not re.fullmatch(r"[!-~]*", key):
            raise EditingError(
                f"the API key in the environment variable {self.settings.key_variable} holds white space or characters "
                "that are not ASCII, which no request can carry; put the key alone into it, without typographic "
                "quotes."
            )
        return key or None

    def _send(self, client: openai.AsyncOpenAI, loop: RequestLoop, chat: Chat) -> Reply:
        """Make one attempt; raise Fault if it fails."""
        import openai

        settings = self.settings
        limits = {"temperature": settings.temperature, "max_tokens": settings.max_reply_tokens, "seed": settings.seed}
        options: dict[str, Any] = {name: value for name, value in limits.items() if value is not None}
        # The client would parse the body by its schema, from which servers deviate, and to any depth.
        create = functools.partial(
            client.chat.completions.with_raw_response.create,
            model=settings.model,
            messages=cast(Any, chat),
            extra_body=dict(settings.extra) or None,
            **options,
        )
        try:
            body = json.loads(loop.run(create, settings.timeout).content)
        except UnicodeEncodeError:  # only a prompt that inserts texts as they are sends such a text
            raise Fault("the request holds half of a surrogate pair, which has no UTF-8") from None
        except (openai.APITimeoutError, asyncio.TimeoutError):
            raise Fault(f"the {self.role.name} took too long", retryable=True) from None
        except (openai.APIConnectionError, RefusedResponse) as error:
            raise refused_fault(error) or Fault(f"no connection to the {self.role.name}", retryable=True) from None
        except openai.APIStatusError as error:
            raise self._fault(error) from None
        except (openai.APIError, ValueError):
            raise Fault(f"the {self.role.name}'s server sent no JSON", retryable=True) from None
        except RecursionError:
            reason = f"the {self.role.name}'s server sent JSON that is nested too deep"
            raise Fault(reason, is_of_model=True) from None
        return self._reply(chat, body)

    def _reply(self, chat: Chat, body: object) -> Reply:
        """Extract the reply. Servers deviate from the schema, so every field may be missing or of another type."""
        choices = _field(body, "choices")
        if not isinstance(choices, list):
            raise Fault(f"the {self.role.name}'s server sent no JSON", retryable=True)
        name, asked = _field(body, "model"), self.settings.model
        if isinstance(name, str) and not _is_same_model(name, asked):
            warn_once(  # not once for each name: a server could give another one in each reply
                log,
                ("model", self.role, asked, self.settings.url),
                "the %s's server %s replies as model %s, not as %r. Results and stored replies name the latter; name "
                "the model that the server runs.",
                self.role.name,
                self.settings.url,
                shorten(self._redact_key(name)),
                asked,
            )
        choice = choices[0] if choices else None
        message, finish = _field(choice, "message"), _field(choice, "finish_reason")
        text, refusal = _text_of(_field(message, "content")), _field(message, "refusal")
        finish = finish if isinstance(finish, str) else None
        if isinstance(refusal, str) and refusal:
            text, finish = refusal, "content_filter"
        if finish != "content_filter" and not text.strip():
            if finish == "length":  # all tokens went into a thought, which another attempt would pay for again
                limit = f"max_reply_tokens={self.settings.max_reply_tokens}"
                raise Fault(f"the {self.role.name}'s reply has no text within {limit}; raise it", is_of_model=True)
            raise Fault(f"the {self.role.name}'s reply is empty", retryable=True)
        usage, prompt_estimate = _field(body, "usage"), estimate_tokens(chat)
        return Reply(
            self._redact_key(text),
            finish,
            # A character has at most four bytes, a token at least one; servers put their own prompt before the chat.
            _token_count(_field(usage, "prompt_tokens"), prompt_estimate, 16 * prompt_estimate + HIDDEN_PROMPT_TOKENS),
            # The number includes the tokens of a thought that is not sent.
            _token_count(_field(usage, "completion_tokens"), estimate_tokens([{"content": text}]), MAX_REPLY_TOKENS),
        )

    def _fault(self, error: openai.APIStatusError) -> Fault:
        status = error.status_code
        if status == 429 and error.code == "insufficient_quota":
            return Fault("no credit left (HTTP 429)", fatal=True)
        if status in FATAL_STATUSES:
            reason = f"{FATAL_STATUSES[status]} (HTTP {status}; {self.settings.model} at {self.settings.url})"
            return Fault(reason, fatal=True)
        retryable = status in RETRYABLE_STATUSES or status >= 500
        if not retryable and _is_of_setting(error):
            return Fault(self._refused_setting(error), fatal=True)
        wait = requested_wait(error.response.headers, time.time()) if retryable else None
        return Fault(f"HTTP {status}", retryable=retryable, wait=wait)

    def _refused_setting(self, error: openai.APIStatusError) -> str:
        """The reason of a refusal. It has no message of the server, which may repeat texts of the request."""
        names = (error.param, error.code or error.type)
        param, code = (None if name is None else shorten(self._redact_key(str(name))) for name in names)
        what = "a setting" if param is None else f"parameter {param}"
        reason = f"{what} is refused (HTTP {error.status_code}, {code}; {self.settings.model} at {self.settings.url})"
        remedy = REMEDIES.get(str(error.param))
        return reason if remedy is None else f"{reason}; {remedy}"

    def _redact_key(self, text: str) -> str:
        """Remove the key from a reply, so that a server that echoes it does not bring it into the store."""
        return text.replace(self._key, "[API key]") if self._key else text


def _field(value: object, name: str) -> object:
    """A field of a JSON object; ``None`` without one, and for any other value."""
    return value.get(name) if isinstance(value, dict) else None


def _text_of(content: object) -> str:
    """The text of a message: a string, or the parts of it that are text, as of servers that mark thoughts as parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [_field(part, "text") for part in parts if _field(part, "type") in ("text", "output_text")]
    return "".join(text for text in texts if isinstance(text, str))


def _token_count(count: object, estimate: int, largest: int) -> int:
    """A count of tokens that a server reports; the estimate in place of one that cannot be right."""
    is_count = isinstance(count, int) and not isinstance(count, bool) and 0 <= count <= largest
    return cast(int, count) if is_count else estimate


def _is_of_setting(error: openai.APIStatusError) -> bool:
    """Whether an error is about a setting. Servers deviate from the schema, so its fields may be of any type."""
    kinds, param = (error.code, error.type), error.param
    if any(code in kinds for code in SETTING_CODES):
        return True
    name = re.split(r"[.\[]", param)[0] if isinstance(param, str) else ""
    return INVALID_REQUEST in kinds and name not in {"", *TEXT_PARAMETERS} and error.code not in TEXT_CODES


def _is_same_model(answered: str, asked: str) -> bool:
    """Whether a server's name of a model can be that of the one asked for: without an owner, or with a date or tag."""
    first, second = (name.rpartition("/")[2].lower() for name in (answered, asked))
    return first.startswith(second) or second.startswith(first)


def requested_wait(headers: Mapping[str, str], now: float) -> float | None:
    """Seconds that a server requests to wait; ``None`` if it requests nothing.

    Reads ``retry-after-ms``, ``retry-after`` (seconds or a date) and, if a remaining count is 0, OpenAI's
    ``x-ratelimit-reset-requests`` and ``-tokens`` ("1s", "6m0s", "20ms").

    Args:
        headers: response headers, looked up in lower case.
        now: seconds since 1970, the reference for dates.
    """
    if milliseconds := _parse_number(headers.get("retry-after-ms")):
        return milliseconds / 1000
    retry_after = headers.get("retry-after")
    if retry_after is not None:
        if (seconds := _parse_number(retry_after)) is not None:
            return seconds
        try:
            return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - now)
        except ValueError:
            pass  # neither a number nor a date: ignored
    resets = [
        _parse_duration(headers.get(f"x-ratelimit-reset-{resource}"))
        for resource in ("requests", "tokens")
        if headers.get(f"x-ratelimit-remaining-{resource}") == "0"
    ]
    return max((seconds for seconds in resets if seconds is not None), default=None)


def _parse_number(text: str | None) -> float | None:
    return float(text) if text is not None and re.fullmatch(r"\s*\d+(\.\d+)?\s*", text) else None


_SECONDS_PER_UNIT = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def _parse_duration(text: str | None) -> float | None:
    if not text or not re.fullmatch(r"(\d+(\.\d+)?(ms|s|m|h|d))+", text):
        return None
    parts = re.findall(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)", text)
    return sum(float(number) * _SECONDS_PER_UNIT[unit] for number, unit in parts)
