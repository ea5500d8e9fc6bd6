"""Servers that are broken or hostile: none holds a run, fills the memory, ends it with a traceback, or gets answers."""

from __future__ import annotations

import gzip
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from judge_server import KEY, ServerFault, completion_body, judge_at, serve
from raw_server import drip, reply, serve_raw

from edit_hooks.utils.errors import EditingError
from judges.backends import http_requests
from judges.backends.base import Reply
from judges.backends.dispatcher import DispatchPolicy, RequestDispatcher
from judges.backends.openai import OpenAIBackend
from judges.base import CORRECT, Item
from judges.model.factory import make_judge, make_writer
from judges.model.judge import ModelJudge
from judges.prompt import Chat, load_prompt
from judges.settings import read_settings

ITEMS = [Item(f"What is {n} plus {n}?", str(2 * n), str(2 * n)) for n in range(4)]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


def judge_of(url: str, **settings: Any) -> ModelJudge:
    given = {"backend": "openai", "model": "scripted", "base_url": f"{url}/v1", "store": "off", "max_attempts": 1}
    judge_settings = read_settings(given | settings)
    return ModelJudge(judge_settings, load_prompt(judge_settings.prompt), OpenAIBackend(judge_settings))


def reasons_of(respond: Callable[[socket.socket], None], **settings: Any) -> dict[str, int]:
    """Judge one answer; why it is unscored."""
    with serve_raw(respond) as server:
        return judge_of(server.url, **settings).judge(ITEMS[:1]).report.reasons


# ------------------------------------------------------------------ time


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nX: ",  # in the header
        HEAD + b"Content-Length: 1000000\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n1",
        b"HTTP/1.1 503 Busy\r\nContent-Length: 1000000\r\n\r\n",
    ],
)
def test_a_request_has_a_deadline_as_a_whole(head: bytes) -> None:
    """Each byte comes within the timeout of a socket."""
    start = time.monotonic()
    assert reasons_of(drip(head), timeout=0.3) == {"the judge took too long": 1}
    with serve_raw(drip(head)) as server, pytest.raises(EditingError, match="no server answers at"):
        make_writer({"backend": "openai", "model": "w", "base_url": server.url, "timeout": 0.2}).backend.check()
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("pausing", [False, True])
def test_one_interrupt_ends_the_run(pausing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a server is silent, and while all requests wait for a retry."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs without it
    is_reached, interrupted_at = threading.Event(), 0.0

    def respond(connection: socket.socket) -> None:
        is_reached.set()
        if pausing:
            reply(b"{}", "Retry-After: 50", status="503 Busy")(connection)
        else:
            time.sleep(20)

    def interrupt() -> None:
        nonlocal interrupted_at
        assert is_reached.wait(20)
        time.sleep(0.1)
        interrupted_at = time.monotonic()
        os.kill(os.getpid(), signal.SIGINT)

    with serve_raw(respond) as server:
        judge = judge_of(server.url, max_attempts=5)
        assert isinstance(judge.backend, OpenAIBackend)
        judge.backend.policy = replace(judge.backend.policy, grace=0.1)
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            judge.judge(ITEMS)
    signal.signal(signal.SIGINT, before)
    assert time.monotonic() - interrupted_at < 10 and not [
        one for one in threading.enumerate() if one.name == "requests"
    ]


def test_replies_on_their_way_are_accepted_after_an_interrupt() -> None:
    is_sent, replies = threading.Event(), list[int]()

    def send(chat: Chat) -> Reply:
        if chat[0]["content"] == "slow":
            is_sent.set()
            time.sleep(0.2)
        else:
            assert is_sent.wait(20)
        return Reply("A")

    def on_reply(index: int, _: object) -> None:
        replies.append(index)
        if index == 0:
            raise KeyboardInterrupt

    chats = [[{"role": "user", "content": text}] for text in ("fast", "slow")]
    with pytest.raises(KeyboardInterrupt):
        RequestDispatcher(send, DispatchPolicy(concurrency=2)).run(chats, on_reply)
    assert replies == [0, 1]


# ------------------------------------------------------------------ bytes


@pytest.mark.parametrize("status", ["200 OK", "500 Broken"])
@pytest.mark.parametrize("length", ["Content-Length: 99000000000", "Connection: close"])
def test_a_response_has_a_limit_of_bytes(status: str, length: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_requests, "MAX_BYTES", 1 << 20)
    sent = 0

    def respond(connection: socket.socket) -> None:
        nonlocal sent
        connection.sendall(f"HTTP/1.1 {status}\r\n{length}\r\n\r\n".encode())
        while True:
            sent += connection.send(b" " * 65536)

    assert reasons_of(respond) == {"the judge's server sent more than 1 MiB": 1}
    assert sent < 64 << 20  # what was on its way, in buffers of the system


def test_a_compressed_response_is_not_unpacked() -> None:
    bomb = gzip.compress(b" " * 20_000_000)
    for coding in ("gzip", "deflate", "br", "zstd", "gzip, gzip"):
        with serve_raw(reply(bomb, f"Content-Encoding: {coding}")) as server:
            report = judge_of(server.url).judge(ITEMS[:1]).report
        assert report.reasons == {"the judge's server sent a compressed reply, for which it was not asked": 1}
        assert "\r\nAccept-Encoding: identity" in server.headers[0]
    with serve_raw(reply(completion_body("A"), "Content-Encoding: Identity")) as server:
        assert judge_of(server.url).judge(ITEMS[:1]).report.num_scored == 1


@pytest.mark.parametrize("depth", [100, 900, 100_000])
@pytest.mark.parametrize(
    ("before", "after"), [('{"choices": ', "}"), ('{"choices": [{"message": {"content": ', "}}]}"), ("", "")]
)
def test_nested_json_is_unscored(depth: int, before: str, after: str) -> None:
    body = f"{before}{'[' * depth}{']' * depth}{after}".encode()
    for status in ("200 OK", "400 No"):
        (reason,) = reasons_of(reply(body, status=status))
        assert reason in (
            "the judge's server sent JSON that is nested too deep",
            "the judge's server sent no JSON",
            "the judge's reply is empty",
            "HTTP 400",
        )
    assert ("nested too deep" in next(iter(reasons_of(reply(body))))) == (depth == 100_000)


# ------------------------------------------------------------------ other servers


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "307 Temporary Redirect", "308 Permanent Redirect"])
def test_answers_go_to_no_other_server(status: str) -> None:
    with serve_raw(reply(completion_body("A"))) as other:
        for place in (other.url, other.url.replace("127.0.0.1", "localhost")):
            with serve_raw(reply(b"", f"Location: {place}/v1/chat/{KEY}", status=status)) as server:
                with pytest.raises(EditingError) as caught:
                    judge_of(server.url).judge(ITEMS)
                message = (
                    f"the server {server.url}/v1 redirects requests to another one, {place}, to which no answer is"
                )
                assert message in str(caught.value) and KEY not in str(caught.value)
                with pytest.raises(EditingError, match="redirects requests to another one"):
                    make_writer({"backend": "openai", "model": "w", "base_url": server.url}).backend.check()
        assert not other.lines


def test_a_redirection_within_a_server_is_followed() -> None:
    def respond(connection: socket.socket) -> None:
        is_first = len(server.lines) == 1
        moved = reply(b"", "Location: /other/chat", status="307 Moved")
        (moved if is_first else reply(completion_body("A")))(connection)

    with serve_raw(respond) as server:
        assert judge_of(server.url).judge(ITEMS[:1]).verdicts[0].label == CORRECT
        assert server.lines == ["POST /v1/chat/completions HTTP/1.1", "POST /other/chat HTTP/1.1"]


def test_a_server_may_move_to_its_encrypted_port() -> None:
    import openai

    url = type(openai.DefaultAsyncHttpxClient().base_url)
    same = http_requests._is_same_server
    assert same(url("https://h/v1"), url("http://h/v1")) and same(url("http://h:80/a"), url("http://h/v1"))
    for other in ("http://h:81/v1", "https://h:8443/v1", "https://g/v1", "http://h.example/v1"):
        assert not same(url(other), url("http://h/v1"))
    assert not same(url("http://h/v1"), url("https://h/v1"))


# ------------------------------------------------------------------ values that are not believed


@pytest.mark.parametrize("count", [True, -5, 10**30, 1e300, "12", [1], {"a": 1}, None, 5_000_000])
def test_impossible_token_counts_are_estimated(count: object) -> None:
    """Negative ones would lift a budget, and huge ones spend it."""
    usage = {"prompt_tokens": count, "completion_tokens": count}
    body = json.loads(completion_body("A" * 40 + "\nA")) | {"usage": usage}
    with serve_raw(reply(json.dumps(body).encode())) as server:
        judge = judge_of(server.url)
        plan, report = judge.plan(ITEMS[:1]), judge.judge(ITEMS[:1]).report
    assert report.prompt_tokens == plan.prompt_tokens > 100 and report.reply_tokens == 11


@pytest.mark.parametrize("usage", [[], "none", 3, {"prompt_tokens": 130, "completion_tokens": 7}])
def test_usage_of_another_type_is_estimated(usage: object) -> None:
    body = json.loads(completion_body("A")) | {"usage": usage}
    with serve_raw(reply(json.dumps(body).encode())) as server:
        report = judge_of(server.url).judge(ITEMS[:1]).report
    assert (report.reply_tokens == 7) == isinstance(usage, dict) and report.prompt_tokens > 100


@pytest.mark.parametrize("finish", [["length"], {"a": 1}, 3, None])
def test_other_fields_of_any_type_do_no_harm(finish: object) -> None:
    body = json.loads(completion_body("A"))
    body["choices"][0]["finish_reason"] = finish
    with serve_raw(reply(json.dumps(body).encode())) as server:
        assert judge_of(server.url).judge(ITEMS[:1]).report.num_scored == 1


def test_a_reply_in_parts_is_their_text() -> None:
    """Servers that send a thought as a part of its own."""
    parts = [{"type": "thinking", "thinking": [{"type": "text", "text": "B"}]}, {"type": "text", "text": "A"}, 3, {}]
    body = json.loads(completion_body("A"))
    body["choices"][0]["message"]["content"] = parts
    with serve_raw(reply(json.dumps(body).encode())) as server:
        (verdict,) = judge_of(server.url).judge(ITEMS[:1]).verdicts
    assert (verdict.label, verdict.raw_reply) == (CORRECT, "A")


def test_names_of_models_neither_flood_the_log_nor_show_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LM_EDIT_JUDGE_API_KEY", KEY)
    with serve(lambda item, attempt: ServerFault(body=completion_body("A", model=f"{KEY}{item.gold}"))) as server:
        assert judge_at(server, tmp_path).judge(ITEMS).report.num_scored == 4
    (record,) = [record for record in caplog.records if "replies as model" in record.message]
    assert KEY not in record.message and "[API key]" in record.message


# ------------------------------------------------------------------ keys


@pytest.mark.parametrize(
    "source",
    [
        KEY,
        f"openai:{KEY}",
        f"openai:m@http://localhost:8000/{KEY}/v1",
        f"openai:m@http://{KEY}@localhost:8000/v1",
        f"openai:m@http://localhost:8000/v1?key={KEY}",
        f"openai:m@http://localhost:8000/v1#{KEY}",
        f"hf:{KEY}",
        f"{KEY}.yaml",
        {"backend": "openai", "model": KEY},
        {"backend": "openai", "model": "m", "served_as": KEY},
        {"backend": "openai", "model": "m", "system": f"Authorization: Bearer {KEY}"},
        {"backend": "openai", "model": "m", "extra": {"user": [KEY]}},
        {"backend": "openai", "model": "m", "extra": {KEY: 1}},
        {"backend": "openai", "model": "gsk_" + "aB3" * 10},
        json.dumps({"backend": "openai", "model": KEY, "temprature": 3}),
        {"backend": "openai", "model": "m", "base_url": "http://h/v1/the-value-of-the-variable"},
    ],
)
def test_a_key_at_a_wrong_place_is_refused_and_not_repeated(source: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "the-value-of-the-variable")
    for make in (make_judge, make_writer):
        with pytest.raises(EditingError) as caught:
            make(source, store="off")
        assert KEY not in str(caught.value) and "aB3aB3" not in str(caught.value)
        assert "the-value-of" not in str(caught.value)
        assert "key" in str(caught.value).lower()


def test_names_that_begin_like_keys_are_names() -> None:
    for model in ("sk-large", "disk-0123456789abcdefgh", "hf_models/x", "gpt-4o-mini-2024-07-18"):
        assert read_settings(f"openai:{model}").model == model


@pytest.mark.parametrize("url", ["http://localhost:99999/v1", "http://[::1/v1", "http://:8000/v1", "http://h:x/v1"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(EditingError, match="is no address"):
        read_settings({"backend": "openai", "model": "m", "base_url": url})
