"""Requests to a failing server: no verdict is lost or paid for twice, and the scores equal those of a calm run."""

from __future__ import annotations

import json
import random
import threading
import time
from pathlib import Path

import pytest
from judge_server import (
    FakeTime,
    ServerFault,
    completion_body,
    grade_by_equality,
    judge_at,
    labels_of,
    sample_items,
    serve,
)

from edit_hooks.utils.errors import EditingError
from judges.backends.base import Fault, Reply
from judges.backends.dispatcher import BUDGET_SPENT, TOO_MANY_FAILURES, DispatchPolicy, RequestDispatcher
from judges.base import CORRECT, INCORRECT, CoverageError, Item
from judges.prompt import Chat

ITEMS = sample_items(24)


def expected_labels(items: list[Item]) -> list[str]:
    return [CORRECT if item.answer == item.gold else INCORRECT for item in items]


LABELS = expected_labels(ITEMS)


# ------------------------------------------------------------------ concurrency


def test_verdicts_are_in_order_and_concurrency_is_bounded(tmp_path: Path) -> None:
    with serve(delay=0.02) as server:
        judged = judge_at(server, tmp_path, concurrency=4).judge(ITEMS)
    assert labels_of(judged.verdicts) == LABELS
    assert 1 < server.max_running <= 4  # a busy machine may not start four requests within one reply's delay
    assert set(server.requests.values()) == {1} and len(server.requests) == 23  # one request for the repeated item
    report = judged.report
    assert (report.num_items, report.num_scored, report.num_distinct, report.num_calls) == (24, 24, 23, 23)
    assert (report.prompt_tokens, report.reply_tokens) == (2300, 23)


def test_a_late_reply_is_matched_to_its_item(tmp_path: Path) -> None:
    def slow_first(item: Item, attempt: int) -> str:
        time.sleep(0.1 if item == ITEMS[0] else 0)
        return grade_by_equality(item, attempt)

    with serve(slow_first) as server:
        assert labels_of(judge_at(server, tmp_path).judge(ITEMS).verdicts) == LABELS


# ------------------------------------------------------------------ pauses before retries


def test_retry_after_delays_every_request(tmp_path: Path) -> None:
    clock = FakeTime()
    fault = ServerFault(429, {"Retry-After": "30"})
    with serve(lambda item, attempt: grade_by_equality(item, attempt) if attempt else fault) as server:
        judge_at(server, tmp_path, clock=clock, concurrency=1).judge(ITEMS[:2])
    assert clock.pauses == [30.0, 30.0]


def test_pauses_double_up_to_max_wait(tmp_path: Path) -> None:
    clock = FakeTime()
    with serve(lambda item, attempt: ServerFault(500) if attempt < 5 else "A") as server:
        judged = judge_at(server, tmp_path, clock=clock, max_wait=6.0).judge(ITEMS[:1])
    assert clock.pauses == [1.0, 2.0, 4.0, 6.0, 6.0] and labels_of(judged.verdicts) == [CORRECT]


@pytest.mark.parametrize("wait", ["0", "Sat, 21 Nov 2015 12:00:30 GMT", "2"])
def test_a_short_requested_pause_does_not_replace_the_growing_one(wait: str, tmp_path: Path) -> None:
    """`Retry-After: 0` made all attempts of ten answers within milliseconds."""
    clock = FakeTime()
    fault = ServerFault(429, {"Retry-After": wait})
    with serve(lambda item, attempt: fault if attempt < 4 else "A") as server:
        judged = judge_at(server, tmp_path, clock=clock, concurrency=1).judge(ITEMS[:1])
    assert clock.pauses == [2.0 if wait == "2" else 1.0, 2.0, 4.0, 8.0] and labels_of(judged.verdicts) == [CORRECT]


def test_a_requested_pause_beyond_max_wait_fails_the_answer(tmp_path: Path) -> None:
    clock = FakeTime()
    with serve(lambda item, attempt: ServerFault(429, {"Retry-After": "3600"})) as server:
        judged = judge_at(server, tmp_path, clock=clock).judge(ITEMS[:1])
    assert clock.pauses == [] and judged.report.reasons == {"HTTP 429": 1}


# ------------------------------------------------------------------ many faults


def test_thirty_percent_random_failures_do_not_change_the_scores(tmp_path: Path) -> None:
    generator = random.Random(3)
    faults = [
        ServerFault(429),
        ServerFault(500),
        ServerFault(kind="close"),
        ServerFault(body=completion_body("")),
        ServerFault(body=b"<"),
    ]

    def script(item: Item, attempt: int) -> str | ServerFault:
        return generator.choice(faults) if generator.random() < 0.3 else grade_by_equality(item, attempt)

    items = sample_items(50)
    with serve() as calm, serve(script) as server:
        expected = judge_at(calm, tmp_path / "calm").judge(items)
        judged = judge_at(server, tmp_path / "wild", max_attempts=12).judge(items)
        assert sum(server.requests.values()) > 55
        assert set(server.replies.values()) == {1} and len(server.replies) == 49
    assert labels_of(judged.verdicts) == labels_of(expected.verdicts)
    assert judged.report.num_scored == 50 and not judged.report.reasons


def test_a_run_resumes_after_the_server_died(tmp_path: Path) -> None:
    is_dead = False

    def script(item: Item, attempt: int) -> str | ServerFault:
        nonlocal is_dead
        is_dead = is_dead or len(server.replies) >= 10
        return ServerFault(kind="close") if is_dead else grade_by_equality(item, attempt)

    items = sample_items(60)
    with serve(script) as server:
        judge = judge_at(server, tmp_path, concurrency=2, give_up_after=4, max_attempts=3)
        first = judge.judge(items)
        num_replies = len(server.replies)
        # The first item occurs twice in the list and may be among the scored ones.
        assert 10 <= num_replies <= 12 and first.report.num_scored in (num_replies, num_replies + 1)
        assert set(first.report.reasons) == {"no connection to the judge", TOO_MANY_FAILURES}
        assert sum(server.requests.values()) < 60  # gave up early
        with pytest.raises(CoverageError, match="requests only the missing ones"):
            first.report.require(0.95)
        is_dead = False
        server.script = grade_by_equality
        second = judge_at(server, tmp_path).judge(items)
        assert second.report.num_stored == num_replies and second.report.num_calls == 59 - num_replies
        assert set(server.replies.values()) == {1} and len(server.replies) == 59
    assert labels_of(second.verdicts) == expected_labels(items)


def test_a_missing_server_stops_the_run_after_few_failures(tmp_path: Path) -> None:
    with serve() as server:
        judge = judge_at(server, tmp_path, concurrency=2, give_up_after=3, max_attempts=2)
    judged = judge.judge(sample_items(40))
    assert judged.report.num_scored == 0 and judged.report.num_calls <= 2 * 5
    assert set(judged.report.reasons) == {"no connection to the judge", TOO_MANY_FAILURES}


def test_refused_requests_are_not_retried_and_do_not_stop_the_run(tmp_path: Path) -> None:
    def script(item: Item, attempt: int) -> str | ServerFault:
        return ServerFault(400) if item.gold.endswith("0") else grade_by_equality(item, attempt)

    with serve(script) as server:
        judged = judge_at(server, tmp_path, give_up_after=1).judge(ITEMS)
        assert set(server.requests.values()) == {1}
    num_refused = sum(item.gold.endswith("0") for item in ITEMS)
    assert judged.report.reasons == {"HTTP 400": num_refused} and judged.report.num_scored == 24 - num_refused


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (ServerFault(401), "the key was not accepted"),
        (ServerFault(403), "access denied"),
        (ServerFault(404), "no such model or address"),
        (ServerFault(429, body=b'{"error": {"message": "pay", "code": "insufficient_quota"}}'), "no credit left"),
    ],
)
def test_a_fatal_fault_ends_the_run_at_once(fault: ServerFault, message: str, tmp_path: Path) -> None:
    with serve(lambda item, attempt: fault) as server:
        with pytest.raises(EditingError, match=message):
            judge_at(server, tmp_path, concurrency=2).judge(ITEMS)
        assert sum(server.requests.values()) <= 3


def refusal(**error: object) -> ServerFault:
    """HTTP 400 with a body in OpenAI's schema, whose message repeats the request."""
    return ServerFault(400, body=json.dumps({"error": {"message": f"no {ITEMS[0].answer}", **error}}).encode())


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            refusal(type="invalid_request_error", param="max_tokens", code="unsupported_parameter"),
            "parameter 'max_tokens' is refused (HTTP 400, 'unsupported_parameter'; scripted at URL); max_reply_tokens: "
            "null sends none, extra: {max_completion_tokens: 1000} is that of newer models",
        ),
        (
            refusal(type="invalid_request_error", param="temperature", code="unsupported_value"),
            "parameter 'temperature' is refused (HTTP 400, 'unsupported_value'; scripted at URL); temperature: null "
            "sends none",
        ),
        (
            refusal(type="invalid_request_error", param="messages[0].role", code="unsupported_value"),
            "parameter 'messages[0].role' is refused (HTTP 400, 'unsupported_value'; scripted at URL)",
        ),
        (
            refusal(type="invalid_request_error", param="top_k\x1b[2J" + "x" * 999),
            "parameter 'top_k\\x1b[2J"
            + "x" * 44
            + "... is refused (HTTP 400, 'invalid_request_error'; scripted at URL)",
        ),
        (
            refusal(code="unsupported_value", param=None),
            "a setting is refused (HTTP 400, 'unsupported_value'; scripted at URL)",
        ),
    ],
)
def test_a_refused_setting_ends_the_run_and_is_named(fault: ServerFault, message: str, tmp_path: Path) -> None:
    """Every request was sent, and the report had "HTTP 400 (24)" alone."""
    with serve(lambda item, attempt: fault) as server:
        with pytest.raises(EditingError) as caught:
            judge_at(server, tmp_path, concurrency=2).judge(ITEMS)
        assert str(caught.value) == f"the judge cannot be used: {message.replace('URL', server.url)}."
        assert sum(server.requests.values()) <= 3


@pytest.mark.parametrize(
    "error",
    [
        {"type": "invalid_request_error", "param": "messages", "code": "context_length_exceeded"},
        {"type": "invalid_request_error", "param": "messages[1].content", "code": "string_above_max_length"},
        {"type": "invalid_request_error", "param": "max_tokens", "code": "context_length_exceeded"},
        {"type": "invalid_request_error", "param": None, "code": None},
        {"type": "BadRequestError", "param": "max_tokens", "code": 400},
        {"type": None, "param": "prompt", "code": "content_filter"},
        {"type": ["invalid_request_error"], "param": {"a": 1}, "code": ["unsupported_value"]},
    ],
)
def test_a_request_refused_for_its_text_does_not_stop_the_run(error: dict[str, object], tmp_path: Path) -> None:
    def script(item: Item, attempt: int) -> str | ServerFault:
        return refusal(**error) if item == ITEMS[1] else grade_by_equality(item, attempt)

    with serve(script) as server:
        judged = judge_at(server, tmp_path, give_up_after=1).judge(ITEMS)
    assert judged.report.reasons == {"HTTP 400": 1} and judged.report.num_scored == 23


def test_replies_before_a_fatal_fault_are_stored(tmp_path: Path) -> None:
    def script(item: Item, attempt: int) -> str | ServerFault:
        return grade_by_equality(item, attempt) if len(server.replies) < 5 else ServerFault(401)

    with serve(script) as server:
        judge = judge_at(server, tmp_path, concurrency=1)
        with pytest.raises(EditingError):
            judge.judge(ITEMS)
        assert judge.plan(ITEMS).num_stored == len(server.replies) == 5


def test_an_interrupted_run_abandons_pending_retries() -> None:
    has_failed, attempts = threading.Event(), list[str]()

    def send(chat: Chat) -> Reply:
        name = chat[0]["content"]
        attempts.append(name)
        if name == "failing":
            has_failed.set()
            raise Fault("busy", retryable=True)
        assert has_failed.wait(30)
        return Reply("A")

    def interrupt(index: int, reply: Reply) -> None:
        raise KeyboardInterrupt

    policy = DispatchPolicy(concurrency=2, max_attempts=10, sleep=lambda seconds: time.sleep(0.1))
    chats = [[{"role": "user", "content": name}] for name in ("good", "failing")]
    with pytest.raises(KeyboardInterrupt):
        RequestDispatcher(send, policy).run(chats, interrupt)
    assert 1 <= attempts.count("failing") < 10


# ------------------------------------------------------------------ budget


def test_a_spent_call_budget_stops_the_run(tmp_path: Path) -> None:
    def fail_first(item: Item, attempt: int) -> str | ServerFault:
        return grade_by_equality(item, attempt) if attempt else ServerFault(500)

    with serve(fail_first) as server:
        judged = judge_at(server, tmp_path, max_calls=23, concurrency=1).judge(ITEMS)
        assert sum(server.requests.values()) == 23 == judged.report.num_calls
        assert len(server.replies) == 11
        resumed = judge_at(server, tmp_path).judge(ITEMS)
        assert set(server.replies.values()) == {1}
    assert BUDGET_SPENT in judged.report.reasons and labels_of(resumed.verdicts) == LABELS


def test_the_token_budget_counts_reported_tokens() -> None:
    policy = DispatchPolicy(concurrency=1, max_tokens=50)
    dispatcher = RequestDispatcher(lambda chat: Reply("A", "stop", 20, 1), policy)
    result = dispatcher.run([[]] * 10, lambda index, reply: None)
    assert result.num_calls == 3  # 21, 42, 63
    assert [isinstance(outcome, Fault) for outcome in result.outcomes] == [False] * 3 + [True] * 7
