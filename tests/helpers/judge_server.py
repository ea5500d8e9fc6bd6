"""A scripted OpenAI-compatible server on loopback, and helpers for tests of judges."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

from judges.backends.openai import OpenAIBackend
from judges.base import Item, Verdict
from judges.model.judge import ModelJudge
from judges.prompt import load_prompt
from judges.settings import read_settings

KEY = "sk-test-0123456789-never-to-be-seen"


class ServerFault(NamedTuple):
    """A failing response: an HTTP status with headers and body, or a broken connection (``kind``: hang, cut, close)."""

    status: int = 200
    headers: dict[str, str] = {}  # noqa: RUF012
    body: bytes = b'{"error": {"message": "scripted", "code": null}}'
    content_type: str = "application/json"
    kind: str = "response"


# (item in the prompt, number of earlier requests for it) -> text of the reply, or a fault. The item is what `parse`
# returns; any other hashable value in servers of a writer.
Script = Callable[[Any, int], "str | ServerFault"]


def parse_item(prompt: str) -> Item:
    """Return the item in a filled prompt: question, gold answer and answer as a careful reader finds them."""
    lines = prompt.rsplit("\nItem\n", 1)[1].splitlines()
    return Item(*(json.loads(line.split(": ", 1)[1]) for line in lines[:3]))


def grade_by_equality(item: Item, attempt: int) -> str:
    """Script that compares answer and gold answer, ignoring case."""
    return "A" if item.answer.strip().lower() == item.gold.strip().lower() else "B"


class JudgeServer:
    """Replies to chat completions from a script and counts requests.

    Args:
        script: computes the replies.
        delay: seconds per request, so that requests overlap.
        parse: reads the item in the last message.
    """

    def __init__(
        self, script: Script = grade_by_equality, delay: float = 0.0, parse: Callable[[str], Any] = parse_item
    ) -> None:
        self.script, self.delay, self.parse = script, delay, parse
        self.requests: Counter[Any] = Counter()
        self.replies: Counter[Any] = Counter()  # sent in full, hence paid for
        self.bodies: list[dict[str, Any]] = []
        self.authorizations: set[str] = set()
        self.num_running = self.max_running = 0
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                outer.authorizations.add(self.headers.get("Authorization", ""))
                self.send(200, b'{"object": "list", "data": []}')

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.authorizations.add(self.headers.get("Authorization", ""))
                outer.respond(self, body)

            def send(self, status: int, body: bytes, headers: dict[str, str] | None = None, **options: Any) -> None:
                self.send_response(status)
                self.send_header("Content-Type", options.get("content_type", "application/json"))
                self.send_header("Content-Length", str(len(body) + options.get("missing", 0)))
                for name, value in (headers or {}).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def respond(self, handler: Any, body: dict[str, Any]) -> None:
        item = self.parse(body["messages"][-1]["content"])
        with self.lock:
            self.bodies.append(body)
            attempt = self.requests[item]
            self.requests[item] += 1
            self.num_running += 1
            self.max_running = max(self.max_running, self.num_running)
        try:
            time.sleep(self.delay)
            response = self.script(item, attempt)
        finally:
            with self.lock:
                self.num_running -= 1
        if isinstance(response, ServerFault):
            self.fail(handler, response)
            return
        with self.lock:
            self.replies[item] += 1
        handler.send(200, completion_body(response))

    def fail(self, handler: Any, fault: ServerFault) -> None:
        handler.close_connection = True
        if fault.kind == "hang":
            time.sleep(1.5)
        elif fault.kind == "close":
            handler.connection.shutdown(socket.SHUT_RDWR)
        elif fault.kind == "cut":
            handler.send(200, completion_body("A")[:20], missing=200)
            handler.connection.shutdown(socket.SHUT_RDWR)
        else:
            headers = {**fault.headers, "Connection": "close"}
            handler.send(fault.status, fault.body, headers, content_type=fault.content_type)

    def stop(self) -> None:
        """Accept no further connections."""
        self.server.shutdown()
        self.server.server_close()


def completion_body(text: str | None, finish: str = "stop", model: str = "scripted") -> bytes:
    """The body of a chat completion."""
    message = {"role": "assistant", "content": text}
    return json.dumps(
        {
            "id": "scripted",
            "object": "chat.completion",
            "created": 0,
            "model": model,
            "choices": [{"index": 0, "finish_reason": finish, "message": message}],
            "usage": {"prompt_tokens": 100, "completion_tokens": 1, "total_tokens": 101},
        }
    ).encode()


@contextmanager
def serve(
    script: Script = grade_by_equality, delay: float = 0.0, parse: Callable[[str], Any] = parse_item
) -> Iterator[JudgeServer]:
    """Run a server for the duration of a block."""
    server = JudgeServer(script, delay, parse)
    try:
        yield server
    finally:
        server.stop()


class FakeTime:
    """A clock that advances only by `sleep`."""

    def __init__(self) -> None:
        self.now, self.pauses = 1000.0, list[float]()
        self.lock = threading.Lock()

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        with self.lock:
            self.pauses.append(seconds)
            self.now += seconds


def judge_at(server: JudgeServer, folder: Path | str, *, clock: FakeTime | None = None, **settings: Any) -> ModelJudge:
    """A judge on a scripted server, whose pauses take no time."""
    defaults = {"backend": "openai", "model": "scripted", "base_url": server.url, "store": str(folder)}
    judge_settings = read_settings(defaults | settings)
    backend = OpenAIBackend(judge_settings)
    clock = clock or FakeTime()
    backend.policy = replace(backend.policy, sleep=clock.sleep, clock=clock.clock, jitter=lambda: 1.0)
    return ModelJudge(judge_settings, load_prompt(judge_settings.prompt), backend)


def sample_items(count: int) -> list[Item]:
    """Distinct questions but for the last item, which repeats the first; every third answer is wrong."""
    items = [Item(f"What is {n} plus {n}?", str(2 * n), str(2 * n + (n % 3 == 2))) for n in range(count - 1)]
    return [*items, items[0]]


def labels_of(verdicts: Sequence[Verdict]) -> list[str | None]:
    return [verdict.label for verdict in verdicts]
