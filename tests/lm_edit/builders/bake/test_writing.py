"""``lm-edit build-bake --writer``: templates that a scripted model writes, checks of its replies, and their reuse."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from command_line import run_verb
from hypothesis import given
from hypothesis import strategies as st
from judge_server import JudgeServer, serve

from edit_hooks.utils.errors import EditingError
from judges.backends.base import UNFINISHED_THOUGHT, Fault, Reply
from lm_edit.builders.bake.building import FactTable
from lm_edit.builders.bake.templates import RelationTemplates, read_templates
from lm_edit.builders.bake.writing import (
    ENDS_IN_SLOT,
    HAS_BLANK,
    HAS_NAME,
    IS_FINISHED,
    NO_JUDGE,
    NO_SLOT,
    NO_WORDS,
    NOT_A_TEXT,
    REPEATED,
    UNREADABLE,
    examples,
    make_chats,
    read_replies,
)
from lm_edit.builders.facts import Fact

FACTS = [
    ["Ada", "mayor", "Elm"],
    ["Bo", "mayor", "Fir"],
    ["Cy", "mayor", "Gum"],
    ["Oak", "P190", "Elm"],
    ["Yew", "P190", "Elm"],
    ["Ash", "P190", "Fir"],
    ["Box", "P190", "Gum"],
]
TABLE: dict[str, Any] = {"relations": {"mayor": {}, "P190": {"label": "twin town"}}, "facts": FACTS}
MAYOR = {
    "prompts": ["{subject} is the mayor of", "Which town has {subject} as its mayor?", "As mayor, {subject} runs"],
    "reverse": ["The mayor of {object} is", "Who is the mayor of {object}?"],
    "judge": "Whether the mayor of {object} is {subject}?",
}
TWIN = {
    "prompts": ["{subject} is a twin of", "The twin town of {subject} is"],
    "reverse": ["The twin town of {object} is"],
    "judge": "Whether {object} is a twin of {subject}?",
}
REPLIES = {"mayor": json.dumps(MAYOR), "twin town": json.dumps(TWIN)}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LM_EDIT_CACHE", str(tmp_path / "cache"))


def parse_asked(prompt: str) -> str:
    """The relation in a filled prompt: the last but one line."""
    return str(json.loads(prompt.splitlines()[-2].removeprefix("Relation: ")))


def serve_templates(replies: dict[str, str]) -> Any:
    return serve(lambda asked, attempt: replies[asked], 0.0, parse_asked)


def words(folder: Path, *more: str, table: Any = TABLE, out: str = "bake.json") -> list[str]:
    (folder / "facts.json").write_text(json.dumps(table), encoding="utf-8")
    return ["build-bake", str(folder / "facts.json"), "--filter", "none", "--out", str(folder / out), *more]


def writer(server: JudgeServer, folder: Path) -> list[str]:
    return ["--writer", f"openai:w@{server.url}", "--templates-out", str(folder / "templates.json")]


# ------------------------------------------------------------------ the verb


def test_written_templates_become_records_and_make_the_same_ones_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve_templates(REPLIES) as server:
        assert run_verb(words(tmp_path, *writer(server, tmp_path))) == 0
        assert server.requests == {"mayor": 1, "twin town": 1} and {one["max_tokens"] for one in server.bodies} == {
            1024
        }
    printed = capsys.readouterr().out
    assert "templates of 2 relations: prompts 5, reverse 3, judge 2" in printed and "dropped" not in printed
    content = json.loads((tmp_path / "templates.json").read_text(encoding="utf-8"))
    assert content["relations"]["mayor"] == {
        "prompts": ["{} is the mayor of", "Which town has {} as its mayor?", "As mayor, {} runs"],
        "reverse": ["The mayor of {} is", "Who is the mayor of {}?"],
        "judge": MAYOR["judge"],
    }
    assert content["provenance"]["writer"]["model"] == "w" and len(content["provenance"]["prompts"]) == 1
    first = (tmp_path / "bake.json").read_bytes()
    records = json.loads(first)
    assert len(records) > 0 and {record["relation"] for record in records} <= {"mayor", "P190"}
    for record in records:
        assert len(record["provenance"]["templates_sha256"]) == 64
    again = words(tmp_path, "--templates", str(tmp_path / "templates.json"), out="again.json")
    assert run_verb(again) == 0
    assert (tmp_path / "again.json").read_bytes() == first


def test_templates_of_people_stay_and_a_changed_one_shows_in_the_records(tmp_path: Path) -> None:
    own = {"prompts": ["{} leads", "{} is head of"], "reverse": ["{} is led by"], "judge": MAYOR["judge"]}
    table = TABLE | {"relations": TABLE["relations"] | {"mayor": own}}
    with serve_templates(REPLIES) as server:
        given = words(tmp_path, *writer(server, tmp_path), "--relations", "mayor", table=table)
        assert run_verb(given) == 0
        assert list(server.requests) == ["twin town"]
    records = json.loads((tmp_path / "bake.json").read_text(encoding="utf-8"))
    assert {record["requested_rewrite"]["prompt"] for record in records} <= set(own["prompts"])
    path = tmp_path / "templates.json"
    path.write_text(path.read_text(encoding="utf-8").replace("is a twin of", "is twinned with"), encoding="utf-8")
    again = words(tmp_path, "--relations", "mayor", "--templates", str(path), table=table, out="again.json")
    assert run_verb(again) == 0
    changed = (tmp_path / "again.json").read_text(encoding="utf-8")
    assert "is twinned with" in changed and "is a twin of" not in changed


def test_half_of_a_surrogate_pair_in_a_reply_costs_that_template_alone(tmp_path: Path) -> None:
    """The reply is paid for: nothing that is written may fail on it."""
    broken = MAYOR | {"prompts": [*MAYOR["prompts"], "{subject} is mayor \ud800 of"]}
    with serve_templates(REPLIES | {"mayor": json.dumps(broken)}) as server:
        assert run_verb(words(tmp_path, *writer(server, tmp_path))) == 0
    content = json.loads((tmp_path / "templates.json").read_text(encoding="utf-8"))
    assert len(content["relations"]["mayor"]["prompts"]) == 3
    assert json.loads((tmp_path / "bake.json").read_text(encoding="utf-8"))


def test_a_second_run_and_a_dry_run_send_no_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serve_templates(REPLIES) as server:
        given = words(tmp_path, *writer(server, tmp_path), "--overwrite")
        assert run_verb([*given, "--dry-run"]) == 0
        assert not server.requests and not (tmp_path / "bake.json").exists()
        assert 'Relation: "mayor"' in capsys.readouterr().out
        assert run_verb([*given, "--max-calls", "1"]) == 2 and not server.requests
        assert run_verb(given) == 0
        assert run_verb([*given, "--max-calls", "0"]) == 0
        assert sum(server.requests.values()) == 2


def test_an_incomplete_relation_ends_the_run_with_all_usable_templates_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = MAYOR | {
        "judge": "Is the mayor of {object} {subject}?",
        "prompts": [*MAYOR["prompts"], "Ada is the mayor of"],
    }
    replies = {"mayor": f"Sure!\n```json\n{json.dumps(bad)}\n```", "twin town": "I cannot help with that."}
    with serve_templates(replies) as server:
        assert run_verb(words(tmp_path, *writer(server, tmp_path))) == 2
    printed = capsys.readouterr()
    assert f"template dropped, {NO_JUDGE} (1): mayor | Is the mayor of" in printed.out
    assert f"template dropped, {NO_SLOT} (1): mayor | Ada is the mayor of" in printed.out
    assert f"relation without templates, {UNREADABLE} (1): P190" in printed.out
    assert "relation 'mayor' needs a judge question" in printed.err and "(2 such relations)" in printed.err
    assert not (tmp_path / "bake.json").exists()
    path = tmp_path / "templates.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    assert len(content["relations"]["mayor"]["prompts"]) == 3 and "judge" not in content["relations"]["mayor"]
    assert content["provenance"]["unreadable"] == [["P190", UNREADABLE]]
    content["relations"]["mayor"]["judge"] = MAYOR["judge"]  # by hand, as the message advises
    content["relations"]["P190"] = {"prompts": ["{} is a twin of"]}
    path.write_text(json.dumps(content), encoding="utf-8")
    assert run_verb(words(tmp_path, "--relations", "mayor", "--templates", str(path))) == 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--max-calls", "3"], "--max-calls belongs to --writer"),
        (["--dry-run"], "--dry-run belongs to --writer"),
        (["--templates-out", "t.json"], "--templates-out belongs to --writer"),
        (["--writer", "hf:x"], "--writer needs --templates-out"),
        (["--writer", "nobody", "--templates-out", "t.json"], "a writer is named as a judge is"),
        (["--writer", "hf:x", "--templates-out", "bake.json"], "is also the path of another output"),
        ([], "relation 'mayor' has no templates"),
        (["--templates", "facts.json"], "relation 'mayor' has no templates"),
        (["--templates", "list.json"], "is no file of templates"),
        (["--templates", "good.json", "good.json"], "relation 'mayor' has templates in two files"),
        (["--relations", "major", "--writer", "hf:x", "--templates-out", "t.json"], "Did you mean 'mayor'"),
    ],
)
def test_mistakes_are_errors_before_any_request(
    more: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "good.json").write_text(json.dumps({"relations": {"mayor": {"prompts": ["{} is", "{} was"]}}}))
    monkeypatch.setattr("judges.backends.hf.HFBackend.complete", lambda *args: pytest.fail("asked"))
    assert run_verb([*words(tmp_path, out="bake.json"), *more]) == 2
    assert message in capsys.readouterr().err


def test_a_wikidata_id_without_a_label_and_a_table_without_gaps_need_no_writer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve_templates(REPLIES) as server:
        table = TABLE | {"relations": {"mayor": {}, "P190": {}}}
        assert run_verb(words(tmp_path, *writer(server, tmp_path), table=table)) == 2
        assert "'P190' is a Wikidata id" in capsys.readouterr().err
        full = {"prompts": ["{} is", "{} was"]}
        table = TABLE | {"relations": {"mayor": full, "P190": full}}
        assert run_verb(words(tmp_path, *writer(server, tmp_path), table=table)) == 2
        assert "drop --writer" in capsys.readouterr().err
        table = TABLE | {"relations": {"mayor": {"words": []}, "P190": full}}
        assert run_verb(words(tmp_path, *writer(server, tmp_path), table=table)) == 2
        assert "field 'words' is not known" in capsys.readouterr().err
        assert not server.requests


# ------------------------------------------------------------------ prompt and replies


def table_of(facts: list[list[str]]) -> FactTable:
    return FactTable({"r": RelationTemplates()}, [Fact(*fact) for fact in facts])


def test_the_examples_share_no_name_and_are_quoted() -> None:
    rows = [
        ["A", "r", "B"],
        ["A", "r", "C"],
        ["B", "r", "D"],
        ["E", "r", 'F"]\nIgnore'],
        ["G", "r", "H"],
        ["I", "r", "J"],
    ]
    table = table_of(rows)
    assert [fact.subject for fact in examples(table, "r")] == ["A", "E", "G"]
    ((message,),) = make_chats(table, ["r"])
    relation, facts = message["content"].splitlines()[-2:]
    assert relation == 'Relation: "r"'
    assert json.loads(facts.removeprefix("Facts: ")) == [["A", "B"], ["E", 'F"]\nIgnore'], ["G", "H"]]


def read(reply: Any, finish: str | None = "stop") -> Any:
    text = reply if isinstance(reply, str) else json.dumps(reply)
    return read_replies(table_of([["Ada Moss", "r", "Elm"]]), ["r"], [Reply(text, finish)])


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("{subject} is the mayor of", ""),
        ("  {subject}  is the\nmayor of ", ""),
        ("Which town does {subject} govern?", ""),
        ("Which town is governed by {subject}?", ""),
        ("The elms of {subject} grow in", ""),  # "Elm" is no whole word of it
        ("The town is governed by {subject}", ENDS_IN_SLOT),
        ("The town of {subject}:", ENDS_IN_SLOT),
        ("{subject} governs.", IS_FINISHED),
        ("{subject} governs ____", HAS_BLANK),
        ("{subject} governs...", HAS_BLANK),
        ("{subject} governs Elm in", HAS_NAME),
        ("{subject} succeeds ada moss in", HAS_NAME),
        ("{subject}", NO_WORDS),
        ("{subject}, ,", NO_WORDS),
        ("governs", NO_SLOT),
        ("{} governs", NO_SLOT),
        ("{subject} and {subject} govern", NO_SLOT),
        ("{subject} governs {object} in", NOT_A_TEXT),
        ("{subject} <b>governs</b> in", NOT_A_TEXT),
        ("{subject} governs" + " x" * 200, NOT_A_TEXT),
        ("{subject} \u202egoverns\ue000 in", NOT_A_TEXT),
    ],
)
def test_a_template_is_kept_or_dropped_with_a_reason(prompt: str, reason: str) -> None:
    written = read(MAYOR | {"prompts": [prompt]})
    assert [(text, why) for _, text, why in written.dropped] == ([(" ".join(prompt.split()), reason)] if reason else [])
    template = " ".join(prompt.split()).replace("{subject}", "{}")
    assert list(written.wordings["r"].prompts) == ([] if reason else [template])
    mirrored = read(
        MAYOR | {"reverse": [prompt.translate({}).replace("{object}", "{o}").replace("{subject}", "{object}")]}
    )
    assert bool(mirrored.dropped) == bool(reason)


@pytest.mark.parametrize(
    "judge",
    [
        "Whether {object} is governed by {subject}",
        "Is {object} governed by {subject}?",
        "Whether {object} is governed?",
        "Whether {object} is governed by Ada Moss and {subject}?",
        "Whether {object} or {object} is governed by {subject}?",
    ],
)
def test_a_judge_question_that_does_not_fit_the_schema_is_dropped(judge: str) -> None:
    written = read(MAYOR | {"judge": judge})
    assert written.wordings["r"].judge is None and len(written.dropped) == 1


def test_equal_templates_are_kept_once() -> None:
    written = read(MAYOR | {"prompts": ["{subject} runs", "{subject} Runs", "{subject} leads"]})
    assert written.wordings["r"].prompts == ("{} runs", "{} leads")
    assert written.dropped == [("r", "{subject} Runs", REPEATED)]


@pytest.mark.parametrize(
    ("reply", "finish"),
    [
        ("", "stop"),
        ("no", "stop"),
        (json.dumps(MAYOR) + json.dumps(MAYOR), "stop"),  # which of them is meant?
        (json.dumps(MAYOR), "length"),
        (json.dumps(MAYOR), "content_filter"),
        (json.dumps(MAYOR), UNFINISHED_THOUGHT),
        (json.dumps(MAYOR | {"prompts": "{subject} governs"}), "stop"),
        (json.dumps(MAYOR | {"prompts": ["{subject} governs", 3]}), "stop"),
        (json.dumps(MAYOR | {"prompts": ["{subject} governs"] * 21}), "stop"),
        (json.dumps(MAYOR | {"judge": None}), "stop"),
        (json.dumps(MAYOR | {"more": 1}), "stop"),
        (json.dumps({"prompts": [], "reverse": [], "judge": "x"}), "stop"),
        ("[" * 100_000, "stop"),
    ],
)
def test_an_unreadable_reply_is_counted_and_never_guessed(reply: str, finish: str) -> None:
    written = read(reply, finish)
    assert written.wordings == {} and [relation for relation, _ in written.unreadable] == ["r"]


def test_a_request_without_a_reply_leaves_its_relation_without_templates() -> None:
    written = read_replies(table_of([["A", "r", "B"]]), ["r"], [Fault("HTTP 400")])
    assert written.unreadable == [("r", "HTTP 400")]


@given(st.lists(st.text(alphabet="{}subject ?.Ada_[<\n", max_size=40), max_size=4), st.text(max_size=40))
def test_whatever_is_kept_fits_the_file_of_templates(prompts: list[str], judge: str) -> None:
    written = read(MAYOR | {"prompts": prompts, "reverse": prompts, "judge": judge})
    for wording in written.wordings.values():
        for template in (*wording.prompts, *wording.reverse):
            assert template.count("{}") == 1 and len(re.findall(r"[{}]", template)) == 2 and template != "{}"
            assert "Ada Moss" not in template and template == " ".join(template.split())


def test_a_file_of_templates_is_checked_as_a_file_of_facts_is(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"relations": {"r": {"prompts": ["{} and {}"]}}}))
    with pytest.raises(EditingError, match="words and one"):
        read_templates(path)
    path.write_text(json.dumps({"relations": {}}))
    assert read_templates(path) == {}
