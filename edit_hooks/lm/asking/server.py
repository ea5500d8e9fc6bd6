"""A server with vLLM's completion API that holds the base model and loads adapters.

Read are OpenAI's fields and four of vLLM's: ``prompt_logprobs``, ``return_token_ids``, ``/load_lora_adapter`` and
``/unload_lora_adapter`` (a server started with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1).
"""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.printable import printable
from edit_hooks.utils.storage.json_io import json_text, parse_json

SECONDS = 600.0  # for one request
MAX_BYTES = 64 << 20  # of a response


class ServedScore(NamedTuple):
    """Log-probability of every token of a continuation, and the likeliest token at its place."""

    logprobs: list[float]
    argmax: list[int]


class Server:
    """Requests to one server.

    Args:
        url: of the API, as ``http://localhost:8000/v1``.

    Raises:
        EditingError: for another kind of address.
    """

    def __init__(self, url: str) -> None:
        if urlsplit(url).scheme not in ("http", "https"):
            raise EditingError(f"server={url!r}; an address like http://localhost:8000/v1 is needed.")
        self.url = url.rstrip("/")

    def model(self) -> str:
        """Name of the base model: the first that the server lists."""
        models = self._list(self._ask("models"), "data", "models")
        name = models[0].get("id") if models and isinstance(models[0], dict) else None
        if not isinstance(name, str):
            raise EditingError(f"the server {self.url} lists no model; is it one with OpenAI's API?")
        return name

    def load(self, name: str, folder: Path) -> None:
        """Load an adapter folder, which the server must see under the same path."""
        self._ask("load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})

    def unload(self, name: str) -> None:
        """Forget an adapter."""
        self._ask("unload_lora_adapter", {"lora_name": name})

    def score(self, model: str, context: Sequence[int], continuation: Sequence[int]) -> ServedScore:
        """Log-probabilities of a continuation's tokens."""
        choice = self._complete(model, [*context, *continuation], {"max_tokens": 1, "prompt_logprobs": 1})
        table = self._list(choice, "prompt_logprobs", "completions")
        if len(table) != (count := len(context) + len(continuation)):
            raise self._bad("completions", f"{len(table)} prompt_logprobs for {count} tokens")
        scores = ServedScore([], [])
        for entries, token in zip(table[len(context) :], continuation, strict=True):
            try:
                scores.logprobs.append(float(entries[str(token)]["logprob"]))
                best = max(entries, key=lambda key: float(entries[key]["logprob"]))
                scores.argmax.append(token if entries[str(token)].get("rank") == 1 else int(best))
            except (KeyError, TypeError, ValueError, AttributeError):
                raise self._bad("completions", "prompt_logprobs without a token of the prompt") from None
        return scores

    def continue_(
        self, model: str, context: Sequence[int], max_tokens: int, stops: Sequence[str], *, ignore_end: bool
    ) -> list[int]:
        """Tokens of the greedy continuation, with the one that ended it."""
        settings = {"max_tokens": max_tokens, "stop": list(stops), "ignore_eos": ignore_end}
        choice = self._complete(model, context, settings | {"return_token_ids": True, "skip_special_tokens": False})
        tokens = self._list(choice, "token_ids", "completions")
        if not all(type(token) is int for token in tokens):
            raise self._bad("completions", "token_ids that are no whole numbers")
        return tokens

    def _complete(self, model: str, prompt: Sequence[int], settings: dict[str, Any]) -> dict[str, Any]:
        body = {"model": model, "prompt": list(prompt), "temperature": 0.0, **settings}
        choices = self._list(self._ask("completions", body), "choices", "completions")
        if len(choices) != 1 or not isinstance(choices[0], dict):
            raise self._bad("completions", f"{len(choices)} choices")
        return choices[0]

    def _list(self, content: Any, name: str, path: str) -> list[Any]:
        value = content.get(name) if isinstance(content, dict) else None
        if not isinstance(value, list):
            raise self._bad(path, f"no list {name!r}")
        return value

    def _bad(self, path: str, what: str) -> EditingError:
        return EditingError(
            f"the server {self.url} answers /{path} with {what}. edited_hf needs vLLM's completion API, with "
            "prompt_logprobs and return_token_ids."
        )

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json_text(body).encode()
        request = urllib.request.Request(f"{self.url}/{path}", data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=SECONDS) as response:
                text = response.read(MAX_BYTES + 1)
        except urllib.error.HTTPError as error:
            reason = printable(error.read(2000).decode(errors="replace"), 500)
            raise EditingError(f"the server {self.url} refuses /{path} ({error.code}): {reason}") from None
        except (OSError, ValueError) as error:
            raise EditingError(f"the server {self.url} cannot be reached: {error}.") from None
        if len(text) > MAX_BYTES:
            raise self._bad(path, f"more than {MAX_BYTES >> 20} MB")
        if path.endswith("lora_adapter"):  # a sentence
            return None
        return parse_json(text.decode(errors="replace"), f"the reply of {self.url}/{path}", halves="replace")
