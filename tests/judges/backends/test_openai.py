"""One request to an OpenAI-compatible server: body, key, faulty responses, and rate-limit headers."""

from __future__ import annotations

import shutil
import ssl
from pathlib import Path
from typing import Any

import certifi
import openai
import pytest
from judge_server import FakeTime, ServerFault, completion_body, grade_by_equality, judge_at, labels_of, serve

from edit_hooks import EditingError
from judges.backends.base import JUDGE
from judges.backends.http_requests import bounded_client
from judges.backends.openai import requested_wait
from judges.base import CORRECT, INCORRECT, Item

ITEMS = [Item(f"What is {n} plus {n}?", str(2 * n), str(2 * n + n % 2)) for n in range(6)]
LABELS = [CORRECT, INCORRECT] * 3


def test_the_request_follows_the_published_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LM_EDIT_JUDGE_API_KEY", "local")
    with serve() as server:
        judge_at(server, tmp_path, preset="published_setting", model="gpt-4o-mini").judge(ITEMS[:1])
        (body,) = server.bodies
        assert server.authorizations == {"Bearer local"}
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("gpt-4o-mini", 0.0, 16)
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    assert body["messages"][0]["content"] == ""


def test_a_local_server_does_not_receive_the_key_of_openai(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-hosted")
    monkeypatch.delenv("LM_EDIT_JUDGE_API_KEY", raising=False)
    with serve() as server:
        judge_at(server, tmp_path).judge(ITEMS[:2])
        assert server.authorizations == {"Bearer no-key"}


def test_certificates_are_read_once_for_all_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And again after a change of the variables that name them."""
    made: list[Any] = []
    create = ssl.create_default_context
    monkeypatch.setattr(ssl, "create_default_context", lambda **options: made.append(options) or create(**options))
    shutil.copy(certifi.where(), tmp_path / "own.pem")
    for variable in (None, "SSL_CERT_FILE"):
        if variable is not None:
            monkeypatch.setenv(variable, str(tmp_path / "own.pem"))
        bounded_client(openai, "http://localhost", JUDGE)
        made.clear()
        bounded_client(openai, "http://localhost", JUDGE)
        assert made == []
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path))
    bounded_client(openai, "http://localhost", JUDGE)
    assert len(made) == 1


@pytest.mark.parametrize("white_space", ["\n", "  ", "\r\n"])
def test_white_space_around_the_key_is_dropped(
    white_space: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LM_EDIT_JUDGE_API_KEY", f"local{white_space}")
    with serve() as server:
        judge = judge_at(server, tmp_path)
        judge.backend.check()
        assert judge.judge(ITEMS[:1]).report.num_scored == 1 and server.authorizations == {"Bearer local"}
        monkeypatch.setenv("LM_EDIT_JUDGE_API_KEY", white_space)
        assert judge_at(server, tmp_path).judge(ITEMS[1:2]).report.num_scored == 1
        assert server.authorizations == {"Bearer local", "Bearer no-key"}


@pytest.mark.parametrize("proxy", ["socks://user:secret@127.0.0.1:9", "socks4://127.0.0.1:9"])
def test_a_proxy_that_cannot_be_used_is_one_error(proxy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, proxy)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with serve() as server, pytest.raises(EditingError, match=r"no connection can be set up.*ALL_PROXY") as caught:
        judge_at(server, tmp_path).backend.check()
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("key", ["sk-se\ncret", "\u201csk-secret\u201d", "sk secret", "sk-s\u00e9cret"])
def test_a_key_that_no_header_carries_is_one_error(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LM_EDIT_JUDGE_API_KEY", key)
    with serve() as server:
        for use in (lambda judge: judge.backend.check(), lambda judge: judge.judge(ITEMS)):
            with pytest.raises(EditingError, match="LM_EDIT_JUDGE_API_KEY holds white space or characters") as caught:
                use(judge_at(server, tmp_path))
            assert key not in str(caught.value) and "cret" not in str(caught.value)
        assert not server.bodies


@pytest.mark.parametrize(
    "fault",
    [
        ServerFault(429, {"Retry-After": "7"}),
        ServerFault(429),
        ServerFault(500),
        ServerFault(503, {"Retry-After": "2"}),
        ServerFault(kind="close"),
        ServerFault(kind="cut"),
        ServerFault(body=completion_body("")),
        ServerFault(body=completion_body(None)),
        ServerFault(body=b'{"choices": []}'),
        ServerFault(body=b'{"object": "list"}'),
        ServerFault(body=b"null"),
        ServerFault(body=b'{"choices": [{"mess'),
        ServerFault(body=b"<html>busy</html>", content_type="text/html"),
    ],
    ids=lambda fault: f"{fault.status}-{fault.kind}-{len(fault.headers)}-{fault.body[:24]!r}",
)
def test_a_temporary_fault_is_retried(fault: ServerFault, tmp_path: Path) -> None:
    clock = FakeTime()
    with serve(lambda item, attempt: grade_by_equality(item, attempt) if attempt else fault) as server:
        judge = judge_at(server, tmp_path, clock=clock)
        judged = judge.judge(ITEMS)
        assert labels_of(judged.verdicts) == LABELS
        assert set(server.requests.values()) == {2} and set(server.replies.values()) == {1}
        assert judged.report.num_calls == 12
        assert labels_of(judge.judge(ITEMS).verdicts) == LABELS and set(server.replies.values()) == {1}
    assert clock.pauses and max(clock.pauses) <= 60


def test_half_a_surrogate_pair_costs_one_answer(tmp_path: Path) -> None:
    """A prompt with ``quoting: raw`` sends it as it is; the shipped prompt escapes it."""
    raw = tmp_path / "raw_v1.txt"
    raw.write_text("---\nquoting: raw\n---\n{question} {gold} {answer} A or B?\n", encoding="utf-8")
    items = [Item("q?", "Paris", "Pa\ud800ris"), Item("q?", "Paris", "Paris")]
    with serve(lambda item, attempt: "A", parse=str) as server:
        judged = judge_at(server, tmp_path, prompt=str(raw)).judge(items)
        assert [verdict.label for verdict in judged.verdicts] == [None, CORRECT] and len(server.bodies) == 1
        assert "half of a surrogate pair" in str(judged.verdicts[0].unscored_reason)
        assert labels_of(judge_at(server, tmp_path).judge(items).verdicts) == [CORRECT, CORRECT]


def test_a_time_out_is_retried(tmp_path: Path) -> None:
    def hang_once(item: Item, attempt: int) -> str | ServerFault:
        return ServerFault(kind="hang") if item == ITEMS[1] and not attempt else grade_by_equality(item, attempt)

    with serve(hang_once) as server:
        judged = judge_at(server, tmp_path, timeout=0.4).judge(ITEMS[:4])
    assert labels_of(judged.verdicts) == LABELS[:4] and judged.report.num_calls == 5


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "3"}, 3.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after-ms": "1500", "retry-after": "2"}, 1.5),
        ({"retry-after": "Sat, 21 Nov 2026 12:00:30 GMT"}, 30.0),
        ({"retry-after": "Sat, 21 Nov 2026 11:00:00 GMT"}, 0.0),
        ({"retry-after": "soon"}, None),
        ({"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "1m2s"}, 62.0),
        ({"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "20ms"}, 0.02),
        ({"x-ratelimit-remaining-tokens": "5", "x-ratelimit-reset-tokens": "6m0s"}, None),
        ({"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "later"}, None),
        ({}, None),
    ],
)
def test_the_requested_wait_is_parsed(headers: dict[str, str], seconds: float | None) -> None:
    assert requested_wait(headers, 1795262400.0) == (None if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize("text", ["", None])
def test_a_reply_that_is_all_thought_is_paid_once_and_names_the_setting(text: str | None, tmp_path: Path) -> None:
    """A reasoning model with too few tokens: six attempts each were paid, and called empty."""
    with serve(lambda item, attempt: ServerFault(body=completion_body(text, "length"))) as server:
        judged = judge_at(server, tmp_path, concurrency=1, give_up_after=2).judge(ITEMS)
        assert list(server.requests.values()) == [1, 1]  # the settings are at fault, so the others are not sent
    assert "the judge's reply has no text within max_reply_tokens=16; raise it" in judged.report.reasons


@pytest.mark.parametrize(
    ("asked", "answered", "is_named"),
    [
        ("gpt-4o-mini", "gpt-4o-mini-2024-07-18", False),
        ("openai/gpt-4o-mini", "gpt-4o-mini", False),
        ("qwen2.5", "Qwen2.5:latest", False),
        ("gpt-4o-mini", "llama-3.2-1b-instruct", True),
    ],
)
def test_a_server_that_answers_with_another_model_is_named(
    asked: str, answered: str, is_named: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Local servers ignore the name in a request, and their verdicts would count as those of the model asked for."""
    body = completion_body("A", model=answered)
    with serve(lambda item, attempt: ServerFault(body=body)) as server:
        assert judge_at(server, tmp_path, model=asked).judge(ITEMS[:3]).report.num_scored == 3
    warnings = [record.message for record in caplog.records if "replies as model" in record.message]
    assert len(warnings) == is_named and all(answered in text and asked in text for text in warnings)
