"""The model judge: cost estimates, stored replies, interrupted and killed runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from judge_server import ServerFault, completion_body, judge_at, labels_of, sample_items, serve
from paths import HELPERS, ROOT

from edit_hooks.utils.errors import EditingError
from judges.backends.base import Reply
from judges.base import CORRECT, INCORRECT, Item

ITEMS = sample_items(24)
LABELS = [CORRECT if item.answer == item.gold else INCORRECT for item in ITEMS]


# ------------------------------------------------------------------ plan and budget


def test_a_plan_sends_no_request(tmp_path: Path) -> None:
    with serve() as server:
        judge = judge_at(server, tmp_path)
        judge.judge(ITEMS[:5])
        num_requests = sum(server.requests.values())
        plan = judge.plan(ITEMS)
        assert sum(server.requests.values()) == num_requests
    assert (plan.num_items, plan.num_distinct, plan.num_stored, plan.num_calls) == (24, 23, 5, 18)
    length = sum(len(message["content"]) for message in judge.prompt.chat(ITEMS[6]))
    assert plan.prompt_tokens == pytest.approx(18 * length / 4, rel=0.02) and plan.reply_tokens == 18 * 16


def test_a_budget_below_the_estimate_is_refused_before_the_first_call(tmp_path: Path) -> None:
    with serve() as server:
        with pytest.raises(EditingError, match=r"more than max_calls=22\. No request was sent"):
            judge_at(server, tmp_path, max_calls=22).judge(ITEMS)
        with pytest.raises(EditingError, match="max_tokens=100"):
            judge_at(server, tmp_path, max_tokens=100).judge(ITEMS)
        assert not server.requests
        assert labels_of(judge_at(server, tmp_path, max_calls=23).judge(ITEMS).verdicts) == LABELS


# ------------------------------------------------------------------ stored replies


def test_faults_and_empty_replies_are_not_stored(tmp_path: Path) -> None:
    with serve(lambda item, attempt: ServerFault(body=completion_body(""))) as server:
        judge = judge_at(server, tmp_path, max_attempts=2)
        judged = judge.judge(ITEMS[:2])
        assert judged.report.reasons == {"the judge's reply is empty": 2} and judge.plan(ITEMS).num_stored == 0


def test_unparsable_replies_are_stored(tmp_path: Path) -> None:
    with serve(lambda item, attempt: "It depends.") as server:
        for _ in range(2):
            judged = judge_at(server, tmp_path).judge(ITEMS[:3])
        assert set(server.replies.values()) == {1}
    assert judged.report.reasons == {"the judge's reply holds no verdict": 3}
    assert judged.verdicts[0].raw_reply == "It depends."


def test_replies_without_a_verdict_are_requested_again_if_wanted(tmp_path: Path) -> None:
    """As after the repair of a server with a wrong chat template: same address, same model."""
    is_broken = True
    with serve(lambda item, attempt: "Hm." if is_broken and item != ITEMS[0] else "A") as server:
        report = judge_at(server, tmp_path).judge(ITEMS[:3]).report
        assert (report.num_scored, report.num_unreadable, report.unreadable_reply) == (1, 2, "Hm.")
        is_broken = False
        assert judge_at(server, tmp_path).judge(ITEMS[:3]).report.num_calls == 0
        again = judge_at(server, tmp_path, ask_again="unscored")
        assert (again.plan(ITEMS[:3]).num_stored, again.plan(ITEMS[:3]).num_calls) == (1, 2)
        report = again.judge(ITEMS[:3]).report
        assert (report.num_scored, report.num_calls, report.num_unreadable) == (3, 2, 0)
        assert again.describe() == judge_at(server, tmp_path).describe()
        assert judge_at(server, tmp_path).judge(ITEMS[:3]).report.num_scored == 3  # the new replies are stored


def test_the_end_of_thoughts_is_a_rule_for_reading(tmp_path: Path) -> None:
    """Stored replies are read by it, and results name it."""
    replies = dict(zip(ITEMS[:3], ("Is it B?\nB\n[end]\nA", "B", "[end]B"), strict=True))
    with serve(lambda item, attempt: replies[item]) as server:
        assert labels_of(judge_at(server, tmp_path).judge(ITEMS[:3]).verdicts) == [CORRECT, INCORRECT, None]
        judge = judge_at(server, tmp_path, think_end_token="[end]")
        judged = judge.judge(ITEMS[:3])
        assert labels_of(judged.verdicts) == [CORRECT, None, INCORRECT] and judged.report.num_calls == 0
        assert judge.describe() == judge_at(server, tmp_path).describe() | {"think_end_token": "[end]"}
    assert judged.verdicts[1].unscored_reason == "the judge's reply has no think_end_token, so its thought has no end"


def test_store_off_writes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with serve() as server:
        judge = judge_at(server, "off")
        judge.judge(ITEMS[:2])
        judge.judge(ITEMS[:2])
        assert sum(server.requests.values()) == 2
    assert judge.store.path is None and not list(tmp_path.iterdir())


def test_only_settings_that_change_replies_make_another_judge(tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("{question} {gold}\nItem\nQuestion: {question}\nReference: {gold}\nAnswer: {answer}\nA or B?")
    variants: tuple[dict[str, Any], ...] = (
        {},
        {"model": "other"},
        {"prompt": str(prompt)},
        {"temperature": 1.0},
        {"concurrency": 2},  # the only one with the same replies
    )
    with serve() as server:
        for settings in variants:
            judge_at(server, tmp_path, **settings).judge(ITEMS[:1])
        assert sum(server.requests.values()) == 4


def test_a_named_server_keeps_its_verdicts_at_another_port(tmp_path: Path) -> None:
    for expected in (1, 0):
        with serve() as server:
            judge_at(server, tmp_path, served_as="vllm").judge(ITEMS[:1])
            assert sum(server.requests.values()) == expected


# ------------------------------------------------------------------ interrupted runs


def test_an_interrupted_run_sends_no_further_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(delay=0.01) as server:
        judge = judge_at(server, tmp_path, concurrency=2)
        write, written = judge.store.write, list[Item]()

        def interrupt_at_the_fourth(item: Item, reply: Reply) -> None:
            write(item, reply)
            written.append(item)
            if len(written) == 4:
                raise KeyboardInterrupt

        monkeypatch.setattr(judge.store, "write", interrupt_at_the_fourth)
        with pytest.raises(KeyboardInterrupt):
            judge.judge(ITEMS)
        assert judge.plan(ITEMS).num_stored == len(server.replies) <= 6  # those in flight are stored as well


RUN = """
import sys
from judge_server import sample_items
from judges.model.factory import make_model_judge

print(make_model_judge(sys.argv[1]).judge(sample_items(30)).report.num_scored, flush=True)
"""


def test_a_killed_run_loses_only_the_requests_in_flight(tmp_path: Path) -> None:
    settings = {"backend": "openai", "model": "scripted", "store": str(tmp_path), "concurrency": 2}
    with serve(delay=0.02) as server:
        command = [sys.executable, "-c", RUN, json.dumps(settings | {"base_url": server.url})]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HELPERS), str(ROOT)])}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
        deadline = time.monotonic() + 120
        while len(server.replies) < 8 and time.monotonic() < deadline:
            time.sleep(0.005)
        process.kill()
        process.communicate()
        time.sleep(0.1)
        num_replies = len(server.replies)
        assert 8 <= num_replies < 29
        judge = judge_at(server, tmp_path)
        assert num_replies - 2 <= judge.plan(sample_items(30)).num_stored <= num_replies
        judged = judge.judge(sample_items(30))
        assert sum(server.replies.values()) <= 29 + 2
    assert judged.report.num_scored == 30
