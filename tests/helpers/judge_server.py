"""A scripted OpenAI-compatible server on loopback, and what tests of judges share."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from judges.backends.dispatcher import Policy
from judges.backends.openai import Endpoint
from judges.base import Item
from judges.model.judge import ModelJudge
from judges.prompt import load_prompt
from judges.settings import read_settings

KEY = "sk-test-0123456789-never-to-be-seen"


class Fail(NamedTuple):
    """A fault: an HTTP status with headers and body, or ``how`` one of hang, cut, close."""

    status: int = 200
    headers: dict[str, str] = {}  # noqa: RUF012
    body: bytes = b'{"error": {"message": "scripted", "code": null}}'
    content_type: str = "application/json"
    how: str = "answer"


# (the item the prompt shows, how often it was asked before) -> the reply's text, or a fault
Script = Callable[[Item, int], "str | Fail"]


def shown_item(prompt: str) -> Item:
    """The item in a filled prompt: what a careful reader takes for question, gold answer and answer."""
    lines = prompt.rsplit("\nItem\n", 1)[1].splitlines()
    return Item(*(json.loads(line.split(": ", 1)[1]) for line in lines[:3]))


def fair(item: Item, asked_before: int) -> str:
    """The verdict by equality without case."""
    return "A" if item.answer.strip().lower() == item.gold.strip().lower() else "B"


class JudgeServer:
    """Answers chat completions from a script and counts everything.

    Args:
        script: what to say.
        delay: seconds each request takes, so that requests overlap.
    """

    def __init__(self, script: Script = fair, delay: float = 0.0) -> None:
        self.script, self.delay = script, delay
        self.asked: Counter[Item] = Counter()
        self.paid: Counter[Item] = Counter()  # replies sent in full
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str] = set()
        self.running = self.most_running = 0
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                outer.keys.add(self.headers.get("Authorization", ""))
                self.send(200, b'{"object": "list", "data": []}')

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.keys.add(self.headers.get("Authorization", ""))
                outer.answer(self, body)

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

    def answer(self, handler: Any, body: dict[str, Any]) -> None:
        item = shown_item(body["messages"][-1]["content"])
        with self.lock:
            self.bodies.append(body)
            before = self.asked[item]
            self.asked[item] += 1
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        try:
            time.sleep(self.delay)
            said = self.script(item, before)
        finally:
            with self.lock:
                self.running -= 1
        if isinstance(said, Fail):
            self.fail(handler, said)
            return
        with self.lock:
            self.paid[item] += 1
        handler.send(200, completion(said))

    def fail(self, handler: Any, fail: Fail) -> None:
        handler.close_connection = True
        if fail.how == "hang":
            time.sleep(1.5)
        elif fail.how == "close":
            handler.connection.shutdown(socket.SHUT_RDWR)
        elif fail.how == "cut":
            handler.send(200, completion("A")[:20], missing=200)
            handler.connection.shutdown(socket.SHUT_RDWR)
        else:
            headers = {**fail.headers, "Connection": "close"}
            handler.send(fail.status, fail.body, headers, content_type=fail.content_type)

    def stop(self) -> None:
        """No new connections from now on."""
        self.server.shutdown()
        self.server.server_close()


def completion(text: str | None, **choice: Any) -> bytes:
    """The body of a chat completion."""
    message = {"role": "assistant", "content": text}
    return json.dumps(
        {
            "id": "scripted",
            "object": "chat.completion",
            "created": 0,
            "model": "scripted",
            "choices": [{"index": 0, "finish_reason": "stop", "message": message} | choice],
            "usage": {"prompt_tokens": 100, "completion_tokens": 1, "total_tokens": 101},
        }
    ).encode()


@contextmanager
def serving(script: Script = fair, delay: float = 0.0) -> Iterator[JudgeServer]:
    """A server for the length of a block."""
    server = JudgeServer(script, delay)
    try:
        yield server
    finally:
        server.stop()


class FakeTime:
    """A clock that only moves when somebody sleeps."""

    def __init__(self) -> None:
        self.now, self.slept = 1000.0, list[float]()
        self.lock = threading.Lock()

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        with self.lock:
            self.slept.append(seconds)
            self.now += seconds


def judge_at(server: JudgeServer, folder: Any, *, fake: FakeTime | None = None, **given: Any) -> ModelJudge:
    """A judge at a scripted server, whose pauses take no time."""
    settings = read_settings(
        {"backend": "openai", "model": "scripted", "base_url": server.url, "store": str(folder)} | given
    )
    judge = ModelJudge(settings, load_prompt(settings.prompt), endpoint := Endpoint(settings))
    fake = fake or FakeTime()
    fields = {name: getattr(endpoint.policy, name) for name in Policy.__dataclass_fields__}
    endpoint.policy = Policy(**fields | {"sleep": fake.sleep, "clock": fake.clock, "jitter": lambda: 1.0})
    return judge


def some_items(number: int) -> list[Item]:
    """Different questions; every third answer is wrong, and one item comes twice."""
    items = [Item(f"What is {n} plus {n}?", str(2 * n), str(2 * n + (n % 3 == 2))) for n in range(number - 1)]
    return [*items, items[0]]


def labels_of(verdicts: list[Any]) -> list[str | None]:
    return [verdict.label for verdict in verdicts]
