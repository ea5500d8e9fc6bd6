"""Faults of a judge's server: no verdict is lost or paid twice, and the table comes out as without faults."""

from __future__ import annotations

import json
import os
import random
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from judge_server import Fail, FakeTime, completion, fair, judge_at, labels_of, serving, some_items
from paths import HELPERS, ROOT

from edit_hooks.utils.errors import EditingError
from judges.backends.base import Fault, Reply
from judges.backends.dispatcher import GAVE_UP, Asking, Policy
from judges.backends.openai import asked_wait
from judges.base import CoverageError, Item
from judges.model.verdict_store import VerdictStore

ITEMS = some_items(24)
RIGHT = ["correct" if item.answer == item.gold else "incorrect" for item in ITEMS]


def first_time(fail: Fail) -> Any:
    """A script whose every item fails once."""
    return lambda item, before: fair(item, before) if before else fail


# ------------------------------------------------------------------ what it should do


def test_right_verdicts_in_order_with_bounded_concurrency(tmp_path: Path) -> None:
    with serving(delay=0.02) as server:
        judged = judge_at(server, tmp_path, concurrency=4).judge(ITEMS)
    assert labels_of(judged.verdicts) == RIGHT
    assert server.most_running == 4
    assert set(server.asked.values()) == {1} and len(server.asked) == 23  # the repeated item is asked once
    report = judged.report
    assert (report.num_items, report.num_scored, report.num_distinct, report.num_calls) == (24, 24, 23, 23)
    assert (report.prompt_tokens, report.reply_tokens) == (2300, 23)


def test_replies_out_of_order_keep_their_places(tmp_path: Path) -> None:
    def slow_first(item: Item, before: int) -> str:
        time.sleep(0.1 if item == ITEMS[0] else 0)
        return fair(item, before)

    with serving(slow_first) as server:
        assert labels_of(judge_at(server, tmp_path).judge(ITEMS).verdicts) == RIGHT


def test_the_published_setting_is_what_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LM_EDIT_JUDGE_API_KEY", "local")
    with serving() as server:
        judge = judge_at(server, tmp_path, preset="published", model="gpt-4o-mini")
        judge.judge(ITEMS[:1])
        (body,) = server.bodies
        assert server.keys == {"Bearer local"}
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("gpt-4o-mini", 0.0, 16)
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    assert body["messages"][0]["content"] == ""


def test_a_server_of_ones_own_is_not_sent_another_ones_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-hosted")
    monkeypatch.delenv("LM_EDIT_JUDGE_API_KEY", raising=False)
    with serving() as server:
        judge_at(server, tmp_path).judge(ITEMS[:2])
        assert server.keys == {"Bearer no-key"}


# ------------------------------------------------------------------ one fault per item


@pytest.mark.parametrize(
    "fail",
    [
        Fail(429, {"Retry-After": "7"}),
        Fail(429),
        Fail(500),
        Fail(503, {"Retry-After": "2"}),
        Fail(how="close"),
        Fail(how="cut"),
        Fail(body=completion("")),
        Fail(body=completion(None)),
        Fail(body=b'{"choices": []}'),
        Fail(body=b'{"object": "list"}'),
        Fail(body=b"null"),
        Fail(body=b'{"choices": [{"mess'),
        Fail(body=b"<html>busy</html>", content_type="text/html"),
    ],
    ids=lambda fail: f"{fail.status}-{fail.how}-{len(fail.headers)}-{fail.body[:24]!r}",
)
def test_a_passing_fault_changes_nothing(fail: Fail, tmp_path: Path) -> None:
    fake = FakeTime()
    with serving(first_time(fail)) as server:
        judge = judge_at(server, tmp_path, fake=fake)
        judged = judge.judge(ITEMS[:6])
        assert labels_of(judged.verdicts) == RIGHT[:6]
        assert set(server.asked.values()) == {2} and set(server.paid.values()) == {1}
        assert judged.report.num_calls == 12
        assert labels_of(judge.judge(ITEMS[:6]).verdicts) == RIGHT[:6] and set(server.paid.values()) == {1}
    assert fake.slept and max(fake.slept) <= 60


def test_a_time_out_is_a_fault(tmp_path: Path) -> None:
    with serving(lambda item, before: fair(item, before) if before or item != ITEMS[1] else Fail(how="hang")) as server:
        judged = judge_at(server, tmp_path, timeout=0.4).judge(ITEMS[:4])
    assert labels_of(judged.verdicts) == RIGHT[:4] and judged.report.num_calls == 5


def test_retry_after_is_respected_by_every_request(tmp_path: Path) -> None:
    fake = FakeTime()
    with serving(lambda item, before: fair(item, before) if before else Fail(429, {"Retry-After": "30"})) as server:
        judge_at(server, tmp_path, fake=fake, concurrency=1).judge(ITEMS[:2])
    assert fake.slept == [30.0, 30.0]


def test_without_retry_after_pauses_double_up_to_the_longest(tmp_path: Path) -> None:
    fake = FakeTime()
    with serving(lambda item, before: Fail(500) if before < 5 else "A") as server:
        judged = judge_at(server, tmp_path, fake=fake, max_wait=6.0).judge(ITEMS[:1])
    assert fake.slept == [1.0, 2.0, 4.0, 6.0, 6.0] and labels_of(judged.verdicts) == ["correct"]


def test_a_pause_longer_than_allowed_is_not_waited_for(tmp_path: Path) -> None:
    fake = FakeTime()
    with serving(lambda item, before: Fail(429, {"Retry-After": "3600"})) as server:
        judged = judge_at(server, tmp_path, fake=fake).judge(ITEMS[:1])
    assert fake.slept == [] and judged.report.reasons == {"HTTP 429": 1}


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
def test_how_long_a_server_asks_to_wait(headers: dict[str, str], seconds: float | None) -> None:
    assert asked_wait(headers, 1795262400.0) == (None if seconds is None else pytest.approx(seconds))


# ------------------------------------------------------------------ many faults


def test_thirty_percent_random_failures_leave_the_table_as_it_is(tmp_path: Path) -> None:
    drawn = random.Random(3)
    kinds = [Fail(429), Fail(500), Fail(how="close"), Fail(body=completion("")), Fail(body=b"<")]

    def script(item: Item, before: int) -> str | Fail:
        return drawn.choice(kinds) if drawn.random() < 0.3 else fair(item, before)

    items = some_items(50)
    with serving() as calm, serving(script) as server:
        expected = judge_at(calm, tmp_path / "calm").judge(items)
        judge = judge_at(server, tmp_path / "wild", max_attempts=12)
        judged = judge.judge(items)
        assert sum(server.asked.values()) > 55
        assert set(server.paid.values()) == {1} and len(server.paid) == 49
    assert labels_of(judged.verdicts) == labels_of(expected.verdicts)
    assert judged.report.num_scored == 50 and not judged.report.reasons


def test_a_server_that_dies_half_way_loses_and_repeats_nothing(tmp_path: Path) -> None:
    dead = False

    def script(item: Item, before: int) -> str | Fail:
        nonlocal dead
        dead = dead or len(server.paid) >= 10
        return Fail(how="close") if dead else fair(item, before)

    items = some_items(60)
    with serving(script) as server:
        judge = judge_at(server, tmp_path, concurrency=2, give_up_after=4, max_attempts=3)
        first = judge.judge(items)
        paid = dict(server.paid)
        assert 10 <= len(paid) <= 12 and first.report.num_scored in (len(paid), len(paid) + 1)
        assert set(first.report.reasons) == {"no connection to the judge", GAVE_UP}
        assert sum(server.asked.values()) < 60  # it stopped asking
        with pytest.raises(CoverageError, match="asks only for what is missing"):
            first.report.require(0.95)
        dead = False
        server.script = fair
        second = judge_at(server, tmp_path).judge(items)
        assert second.report.num_stored == len(paid) and second.report.num_calls == 59 - len(paid)
        assert set(server.paid.values()) == {1} and len(server.paid) == 59
    assert labels_of(second.verdicts) == ["correct" if item.answer == item.gold else "incorrect" for item in items]


def test_a_server_that_is_gone_stops_the_run_soon(tmp_path: Path) -> None:
    with serving() as server:
        judge = judge_at(server, tmp_path, concurrency=2, give_up_after=3, max_attempts=2)
    judged = judge.judge(some_items(40))
    assert judged.report.num_scored == 0 and judged.report.num_calls <= 2 * 5
    assert set(judged.report.reasons) == {"no connection to the judge", GAVE_UP}


def test_refused_requests_are_not_repeated_and_do_not_stop_the_others(tmp_path: Path) -> None:
    with serving(lambda item, before: Fail(400) if item.gold.endswith("0") else fair(item, before)) as server:
        judged = judge_at(server, tmp_path, give_up_after=1).judge(ITEMS)
        assert set(server.asked.values()) == {1}
    refused = sum(item.gold.endswith("0") for item in ITEMS)
    assert judged.report.reasons == {"HTTP 400": refused} and judged.report.num_scored == 24 - refused


@pytest.mark.parametrize(
    ("fail", "message"),
    [
        (Fail(401), "the key was not accepted"),
        (Fail(403), "access denied"),
        (Fail(404), "no such model or address"),
        (Fail(429, body=b'{"error": {"message": "pay", "code": "insufficient_quota"}}'), "no credit left"),
    ],
)
def test_what_no_attempt_can_help_ends_the_run_at_once(fail: Fail, message: str, tmp_path: Path) -> None:
    with serving(lambda item, before: fail) as server:
        with pytest.raises(EditingError, match=message):
            judge_at(server, tmp_path, concurrency=2).judge(ITEMS)
        assert sum(server.asked.values()) <= 3


def test_what_was_paid_is_kept_when_the_run_ends_at_once(tmp_path: Path) -> None:
    with serving(lambda item, before: fair(item, before) if len(server.paid) < 5 else Fail(401)) as server:
        judge = judge_at(server, tmp_path, concurrency=1)
        with pytest.raises(EditingError):
            judge.judge(ITEMS)
        assert judge.plan(ITEMS).num_stored == len(server.paid) == 5


# ------------------------------------------------------------------ budget and plan


def test_a_plan_counts_without_asking(tmp_path: Path) -> None:
    with serving() as server:
        judge = judge_at(server, tmp_path)
        judge.judge(ITEMS[:5])
        before = sum(server.asked.values())
        plan = judge.plan(ITEMS)
        assert sum(server.asked.values()) == before
    assert (plan.num_items, plan.num_distinct, plan.num_stored, plan.num_calls) == (24, 23, 5, 18)
    length = sum(len(message["content"]) for message in judge.prompt.chat(ITEMS[6]))
    assert plan.prompt_tokens == pytest.approx(18 * length / 4, rel=0.02) and plan.reply_tokens == 18 * 16


def test_a_budget_that_is_plainly_too_small_is_refused_before_the_first_call(tmp_path: Path) -> None:
    with serving() as server:
        with pytest.raises(EditingError, match=r"more than max_calls=22\. Nothing was asked"):
            judge_at(server, tmp_path, max_calls=22).judge(ITEMS)
        with pytest.raises(EditingError, match="max_tokens=100"):
            judge_at(server, tmp_path, max_tokens=100).judge(ITEMS)
        assert not server.asked
        assert labels_of(judge_at(server, tmp_path, max_calls=23).judge(ITEMS).verdicts) == RIGHT


def test_a_budget_that_runs_out_stops_asking(tmp_path: Path) -> None:
    with serving(lambda item, before: fair(item, before) if before else Fail(500)) as server:
        judged = judge_at(server, tmp_path, max_calls=23, concurrency=1).judge(ITEMS)
        assert sum(server.asked.values()) == 23 == judged.report.num_calls
        assert len(server.paid) == 11
        resumed = judge_at(server, tmp_path).judge(ITEMS)
        assert set(server.paid.values()) == {1}
    assert "not asked: the budget is spent" in judged.report.reasons and labels_of(resumed.verdicts) == RIGHT


def test_tokens_are_counted_as_the_server_says(tmp_path: Path) -> None:
    policy = Policy(concurrency=1, max_tokens=50)
    asked = Asking(lambda chat: Reply("A", "stop", 20, 1), policy).all([[]] * 10, lambda index, reply: None)
    assert asked.num_calls == 3  # 21, 42, 63
    assert [isinstance(outcome, Fault) for outcome in asked.outcomes] == [False] * 3 + [True] * 7


# ------------------------------------------------------------------ store


def test_the_store_is_keyed_by_judge_prompt_question_gold_and_answer(tmp_path: Path) -> None:
    item = Item("q", "g", "a")
    store = VerdictStore(tmp_path, {"model": "m"}, "p")
    store.write(item, Reply("A"))
    assert store.read([item]) == {item: Reply("A")}
    for other in (Item("q2", "g", "a"), Item("q", "g2", "a"), Item("q", "g", "a2"), Item("qg", "", "a")):
        assert store.read([other]) == {}
    assert VerdictStore(tmp_path, {"model": "n"}, "p").read([item]) == {}
    assert VerdictStore(tmp_path, {"model": "m"}, "p2").read([item]) == {}


def test_a_changed_row_is_not_believed(tmp_path: Path) -> None:
    item = Item("q", "g", "a")
    store = VerdictStore(tmp_path, {}, "p")
    store.write(item, Reply("B"))
    connection = sqlite3.connect(tmp_path / "verdicts.sqlite")
    with connection:
        connection.execute("UPDATE replies SET reply = replace(reply, 'B', 'A')")
    connection.close()
    assert store.read([item]) == {}


def test_a_damaged_file_is_put_aside_and_not_lost(tmp_path: Path) -> None:
    (tmp_path / "verdicts.sqlite").write_bytes(b"not a database" * 100)
    store = VerdictStore(tmp_path, {}, "p")
    store.write(Item("q", "g", "a"), Reply("A"))
    assert len(store.read([Item("q", "g", "a")])) == 1
    (aside,) = tmp_path.glob("verdicts.damaged-*")
    assert aside.read_bytes().startswith(b"not a database")


def test_faults_and_empty_replies_are_never_stored(tmp_path: Path) -> None:
    with serving(lambda item, before: Fail(body=completion(""))) as server:
        judge = judge_at(server, tmp_path, max_attempts=2)
        judged = judge.judge(ITEMS[:2])
        assert judged.report.reasons == {"the judge's reply is empty": 2} and judge.plan(ITEMS).num_stored == 0


def test_unreadable_replies_are_stored_and_not_paid_again(tmp_path: Path) -> None:
    with serving(lambda item, before: "It depends.") as server:
        for _ in range(2):
            judged = judge_at(server, tmp_path).judge(ITEMS[:3])
        assert set(server.paid.values()) == {1}
    assert judged.report.reasons == {"the judge's reply holds no verdict": 3}
    assert judged.verdicts[0].raw_reply == "It depends."


def test_store_off_keeps_nothing_on_disk(tmp_path: Path) -> None:
    with serving() as server:
        judge = judge_at(server, "off")
        judge.judge(ITEMS[:2])
        judge.judge(ITEMS[:2])
        assert sum(server.asked.values()) == 2
    assert judge.store.path is None


def test_another_model_or_prompt_asks_anew(tmp_path: Path) -> None:
    own = tmp_path / "own.txt"
    own.write_text("{question} {gold}\nItem\nQuestion: {question}\nReference: {gold}\nAnswer: {answer}\nA or B?")
    with serving() as server:
        for given in ({}, {"model": "other"}, {"prompt": str(own)}, {"temperature": 1.0}, {"concurrency": 2}):
            judge_at(server, tmp_path, **given).judge(ITEMS[:1])
        assert sum(server.asked.values()) == 4  # how fast one asks does not make another judge


def test_the_server_sees_one_request_per_item_when_interrupted(tmp_path: Path) -> None:
    """Ctrl-C while judging: what is in flight is kept, nothing new is sent."""

    with serving(delay=0.01) as server:
        judge = judge_at(server, tmp_path, concurrency=2)
        write, done = judge.store.write, []

        def interrupting(item: Item, reply: Reply) -> None:
            write(item, reply)
            done.append(item)
            if len(done) == 4:
                raise KeyboardInterrupt

        judge.store.write = interrupting  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            judge.judge(ITEMS)
        assert judge.plan(ITEMS).num_stored == len(server.paid) <= 6


KILLED = """
import sys
from judge_server import some_items
from judges.model.factory import make_model_judge

print(make_model_judge(sys.argv[1]).judge(some_items(30)).report.num_scored, flush=True)
"""


def test_a_killed_run_loses_only_what_was_in_flight(tmp_path: Path) -> None:
    given = {"backend": "openai", "model": "scripted", "store": str(tmp_path), "concurrency": 2}
    with serving(delay=0.02) as server:
        command = [sys.executable, "-c", KILLED, json.dumps(given | {"base_url": server.url})]
        folders = [str(HELPERS), str(ROOT)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
        deadline = time.monotonic() + 120
        while len(server.paid) < 8 and time.monotonic() < deadline:
            time.sleep(0.005)
        process.kill()
        process.communicate()
        time.sleep(0.1)
        paid = len(server.paid)
        assert 8 <= paid < 29
        judge = judge_at(server, tmp_path)
        assert paid - 2 <= judge.plan(some_items(30)).num_stored <= paid
        judged = judge.judge(some_items(30))
        assert sum(server.paid.values()) <= 29 + 2  # what was in flight is the only thing asked twice
    assert judged.report.num_scored == 30
