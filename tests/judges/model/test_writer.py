"""The writer: stored replies, cost estimates, budgets, faults, and settings."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from judge_server import FakeTime, JudgeServer, ServerFault, completion_body
from writer_server import FACTS, Asked, serve_writer, write_well

from edit_hooks.utils.errors import EditingError
from judges.backends.base import UNFINISHED_THOUGHT, Fault, Reply
from judges.backends.openai import OpenAIBackend
from judges.base import CoverageError
from judges.model.factory import WRITER_REPLY_TOKENS, make_writer
from judges.model.writer import ReplyStore, Writer
from judges.prompt import Chat
from lm_edit.builders.qaedit.wording import PARAPHRASE, SUBJECT

CHATS = [prompt.chat(fact.question) for fact in FACTS for prompt in (SUBJECT, PARAPHRASE)]
CHAT: Chat = [{"role": "user", "content": "hello"}]


def writer_at(server: JudgeServer, folder: Path | str, **settings: Any) -> Writer:
    """A writer on a scripted server, whose pauses take no time."""
    writer = make_writer({"backend": "openai", "model": "w", "base_url": server.url, "store": str(folder), **settings})
    assert isinstance(writer.backend, OpenAIBackend)
    clock = FakeTime()
    writer.backend.policy = replace(writer.backend.policy, sleep=clock.sleep, clock=clock.clock, jitter=lambda: 1.0)
    return writer


def texts(outcomes: list[Any]) -> list[str | None]:
    return [outcome.text if isinstance(outcome, Reply) else None for outcome in outcomes]


# ------------------------------------------------------------------ the store


def test_writer_and_chat_make_the_key(tmp_path: Path) -> None:
    store = ReplyStore(tmp_path, {"model": "m"})
    store.write(CHAT, Reply("hi", "stop", 10, 1))
    assert store.read([CHAT]) == {store.key(CHAT): Reply("hi", "stop", 10, 1)}
    assert store.read([[*CHAT, *CHAT], [{"role": "system", "content": "hello"}]]) == {}
    assert ReplyStore(tmp_path, {"model": "n"}).read([CHAT]) == {}


def test_without_a_folder_replies_stay_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = ReplyStore(None, {})
    store.write(CHAT, Reply("half a pair: \ud800"))
    assert list(store.read([CHAT]).values()) == [Reply("half a pair: \ud800")] and not list(tmp_path.iterdir())


def test_half_a_surrogate_pair_is_stored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    chat = [{"role": "user", "content": "hello \ud800"}]
    ReplyStore(tmp_path, {"model": "\ud800"}).write(chat, Reply("\ud800"))
    stored = ReplyStore(tmp_path, {"model": "\ud800"}).read([chat])
    assert list(stored.values()) == [Reply("\ud800")] and not caplog.records


def test_a_row_that_was_changed_counts_as_missing(tmp_path: Path) -> None:
    store = ReplyStore(tmp_path, {})
    store.write(CHAT, Reply("yes"))
    connection = sqlite3.connect(tmp_path / "writer.sqlite")
    with connection:
        connection.execute("UPDATE replies SET reply = replace(reply, 'yes', 'no')")
    connection.close()
    assert store.read([CHAT]) == {}


# ------------------------------------------------------------------ requests


def test_every_chat_is_sent_once_and_replies_are_in_order(tmp_path: Path) -> None:
    with serve_writer() as server:
        writer = writer_at(server, tmp_path, system="Be brief.")
        plan = writer.plan([*CHATS, CHATS[0]])
        assert not server.requests
        written = writer.write([*CHATS, CHATS[0]])
        assert set(server.requests.values()) == {1} and len(server.requests) == len(CHATS) == 8
        assert all(body["messages"][0] == {"role": "system", "content": "Be brief."} for body in server.bodies)
        again = writer_at(server, tmp_path, system="Be brief.").write(CHATS)
        assert sum(server.requests.values()) == 8
        other = writer_at(server, tmp_path).plan(CHATS)  # without the system message it is another request
    asked = [(prompt.label, fact.question) for fact in FACTS for prompt in (SUBJECT, PARAPHRASE)]
    assert texts(written.outcomes) == [write_well(Asked(*one), 0) for one in [*asked, asked[0]]]
    assert (plan.num_items, plan.num_distinct, plan.num_stored, plan.num_calls, plan.reply_tokens) == (
        9,
        8,
        0,
        8,
        8 * WRITER_REPLY_TOKENS,
    )
    characters = sum(len(chat[0]["content"]) + len("Be brief.") for chat in CHATS)
    assert plan.prompt_tokens == pytest.approx(characters / 4, rel=0.02)
    assert (written.num_calls, written.prompt_tokens, written.reply_tokens) == (8, 800, 8)
    assert (again.num_stored, again.num_calls, other.num_calls) == (8, 0, 8)
    assert "9 requests, 8 distinct, 0 in the store: 8 calls, about " in str(plan)
    assert str(again) == "8 requests, 8 from the store, 0 calls, 0 + 0 tokens"


@pytest.mark.parametrize(
    ("reply", "settings", "read"),
    [
        ("Is it Tarn?</think>\n\nTarn<|im_end|>", {}, ("Tarn", "stop")),
        ("<think>Is it Tarn?", {}, ("", UNFINISHED_THOUGHT)),
        ("Is it Tarn?[end]Tarn", {"think_end_token": "[end]"}, ("Tarn", "stop")),
        ("Is it Tarn?", {"think_end_token": "[end]"}, ("", UNFINISHED_THOUGHT)),
    ],
)
def test_thoughts_are_left_out(reply: str, settings: dict[str, Any], read: tuple[str, str], tmp_path: Path) -> None:
    with serve_writer(lambda asked, attempt: reply) as server:
        for num_calls in (1, 0):
            writer = writer_at(server, tmp_path, **settings)
            written = writer.write(CHATS[:1])
            assert [(one.text, one.finish) for one in written.outcomes if isinstance(one, Reply)] == [read]
            assert written.num_calls == num_calls
        (stored,) = writer.store.read([CHATS[0]]).values()
    assert stored.text == reply  # verbatim
    assert ("think_end_token" in writer.describe()) == bool(settings)


def test_a_dry_run_sends_nothing(tmp_path: Path) -> None:
    with serve_writer() as server:
        written = writer_at(server, tmp_path, dry_run=True).write(CHATS)
        assert not server.requests and not server.authorizations
    assert texts(written.outcomes) == [None] * 8


def test_a_budget_below_the_estimate_is_refused_before_the_first_call(tmp_path: Path) -> None:
    with serve_writer() as server:
        with pytest.raises(EditingError, match=r"8 calls.*more than max_calls=7\. No request was sent"):
            writer_at(server, tmp_path, max_calls=7).write(CHATS)
        with pytest.raises(EditingError, match="max_tokens=100"):
            writer_at(server, tmp_path, max_tokens=100).write(CHATS)
        assert not server.requests
        writer_at(server, tmp_path, max_calls=8).write(CHATS)
        assert writer_at(server, tmp_path, max_calls=0).write(CHATS).num_stored == 8


def test_retries_that_spend_the_budget_stop_the_run(tmp_path: Path) -> None:
    def fail_first(asked: Asked, attempt: int) -> str | ServerFault:
        return write_well(asked, attempt) if attempt else ServerFault(500)

    with serve_writer(fail_first) as server:
        written = writer_at(server, tmp_path, max_calls=8, concurrency=1).write(CHATS)
        assert sum(server.requests.values()) == 8 == written.num_calls
        with pytest.raises(CoverageError, match=r"replied to 4 of 8 requests \(50\.0%\).*the budget is spent"):
            written.require(0.95)
        written.require(0.5)
        assert writer_at(server, tmp_path).plan(CHATS).num_stored == 4


def test_low_coverage_without_a_store_promises_nothing(tmp_path: Path) -> None:
    with serve_writer(lambda asked, attempt: ServerFault(400)) as server:
        for place, kept in ((tmp_path, "so far are in the store"), ("off", "no reply is kept")):
            with pytest.raises(CoverageError, match=kept):
                writer_at(server, place).write(CHATS[:1]).require(0.95)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (ServerFault(400), "HTTP 400"),
        (ServerFault(body=completion_body("")), "the writer's reply is empty"),
        (ServerFault(kind="close"), "no connection to the writer"),
        (ServerFault(body=b"<"), "the writer's server sent no JSON"),
    ],
)
def test_faults_are_not_stored_and_name_the_writer(fault: ServerFault, reason: str, tmp_path: Path) -> None:
    with serve_writer(lambda asked, attempt: fault) as server:
        writer = writer_at(server, tmp_path, max_attempts=1)
        (outcome,) = writer.write(CHATS[:1]).outcomes
    assert isinstance(outcome, Fault) and outcome.reason == reason
    assert writer.plan(CHATS).num_stored == 0


def test_a_fatal_fault_ends_the_run_at_once(tmp_path: Path) -> None:
    with serve_writer(lambda asked, attempt: ServerFault(404)) as server:
        with pytest.raises(EditingError, match="the writer cannot be used: no such model or address"):
            writer_at(server, tmp_path, concurrency=1).write(CHATS)
        assert sum(server.requests.values()) <= 2
    with pytest.raises(EditingError, match="writer w: no server answers at"):
        writer_at(server, tmp_path).write(CHATS)


# ------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("source", "tokens"),
    [
        ("openai:m", WRITER_REPLY_TOKENS),
        ("published_setting", WRITER_REPLY_TOKENS),
        ("hf:some/model", WRITER_REPLY_TOKENS),
        ({"backend": "openai", "model": "m", "max_reply_tokens": 16}, 16),
        (json.dumps({"backend": "openai", "model": "m", "max_reply_tokens": None}), None),
    ],
)
def test_the_length_of_replies_is_that_of_a_writer_unless_the_settings_name_one(
    source: Any, tokens: int | None
) -> None:
    assert make_writer(source, store="off").settings.max_reply_tokens == tokens


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nobody", r"a writer is named as a judge is.*'nobody' is unknown.*Accepted: openai:MODEL"),
        ({"backend": "openai"}, "model missing"),
        ({"backend": "openai", "model": "m", "max_reply_tokens": 0}, "max_reply_tokens"),
        ({"backend": "openai", "model": "m", "promt": "x"}, "Did you mean 'prompt'"),
        ({"backend": "openai", "model": "m", "prompt": "mine.txt"}, "the prompt of a judge has no use for a writer"),
        ("published_wording", "the prompt of a judge has no use for a writer"),
        ({"backend": "openai", "model": "m", "ask_again": "unscored"}, "ask_again is about verdicts"),
        ({"backend": "openai", "model": "m", "api_key": "sk-secret"}, "API keys are read from the environment only"),
    ],
)
def test_invalid_settings_are_refused(source: Any, message: str) -> None:
    with pytest.raises(EditingError, match=message) as caught:
        make_writer(source, store="off")
    assert "sk-secret" not in str(caught.value)


def test_the_description_holds_what_replies_depend_on() -> None:
    writer = make_writer({"backend": "openai", "model": "m", "system": "Be brief.", "concurrency": 3}, store="off")
    assert writer.describe() == {**writer.settings.identity, "system": "Be brief."}
    assert "concurrency" not in writer.describe()
