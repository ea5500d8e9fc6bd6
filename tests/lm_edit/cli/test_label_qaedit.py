"""``lm-edit build-qaedit --categories-only``: records in the released layout get a category from a scripted writer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import run_verb
from judge_server import JudgeServer
from paths import REAL_DATA, RECORDS
from task_runs import run
from writer_server import Asked, serve_writer, write_json

from edit_hooks.utils.storage.json_io import read_rows
from lm_edit.builders.qaedit.labeling import label, make_chats, read_records
from lm_edit.builders.qaedit.wording import CATEGORIES
from lm_edit.figures.needs import Options
from lm_edit.figures.wild import qaedit_categories

RELEASED = RECORDS / "qaedit.jsonl"
ROWS = [record for _, record in read_rows(RELEASED)]
SCIENCE, PEOPLE, ART = "Science & Technology", "People & Biographies", "Art & Culture"
NAMES = [SCIENCE, PEOPLE, ART, ART]
CHOSEN = {row["prompt"]: name for row, name in zip(ROWS, NAMES, strict=True)}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LM_EDIT_CACHE", str(tmp_path / "cache"))


def choose(asked: Asked, attempt: int) -> str:
    assert asked.prompt == "Category"
    return CHOSEN[asked.question]


def arguments(server: JudgeServer, folder: Path, *more: str, data: Path = RELEASED) -> list[str]:
    out = ["--writer", f"openai:w@{server.url}", "--out", str(folder / "out.json")]
    return ["build-qaedit", str(data), "--categories-only", *out, *more]


def labeled(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "out.json").read_text(encoding="utf-8"))


def test_every_record_gets_a_category_and_nothing_else_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve_writer(choose) as server:
        assert run_verb(arguments(server, tmp_path, "--categories-out", str(tmp_path / "map.json"))) == 0
        assert sum(server.requests.values()) == 4
    made = labeled(tmp_path)
    assert [record["category"] for record in made] == NAMES
    own = ("category", "provenance")
    assert [{name: value for name, value in one.items() if name not in own} for one in made] == ROWS
    origin = made[0]["provenance"]["category"]
    assert origin["writer"]["model"] == "w" and list(origin["prompts"]) == ["qaedit_category_v1"]
    assert json.loads((tmp_path / "map.json").read_text(encoding="utf-8")) == CHOSEN
    printed = capsys.readouterr().out
    assert f"{SCIENCE}: 1 (25.0%)" in printed and "Others: 0 (0.0%)" in printed


def test_figure_and_scores_by_category_read_the_records_and_the_map(tmp_path: Path) -> None:
    with serve_writer(choose) as server:
        assert run_verb(arguments(server, tmp_path, "--categories-out", str(tmp_path / "map.json"))) == 0
    table = qaedit_categories.draw(Options(data=str(tmp_path / "out.json")))
    assert [row[:2] for row in table.rows] == [[ART, 2], [PEOPLE, 1], [SCIENCE, 1]] and not table.notes
    for settings in (
        {"data": str(tmp_path / "out.json")},
        {"data": str(RELEASED), "categories": str(tmp_path / "map.json")},
    ):
        results = run("qaedit_wild_reliability", settings={**settings, "score_by": "category"})
        by = results["results"]["qaedit_wild_reliability"]["efficacy_wild_em_by_category,none"]
        assert set(json.loads(by)) == {SCIENCE, PEOPLE, ART}


def test_a_category_that_is_there_stays_and_costs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = write_json(
        tmp_path / "in.json", [{**ROWS[0], "category": "by hand"}, {**ROWS[1], "provenance": {"row": 3}}, *ROWS[2:]]
    )
    with serve_writer(choose) as server:
        assert run_verb(arguments(server, tmp_path, data=given)) == 0
        assert sum(server.requests.values()) == 3
    made = labeled(tmp_path)
    assert made[0] == {**ROWS[0], "category": "by hand"} and made[1]["category"] == PEOPLE
    assert made[1]["provenance"]["row"] == 3 and set(made[1]["provenance"]) == {"row", "category"}
    printed = capsys.readouterr().out
    assert "records that had a category: 1" in printed and "by hand: 1" in printed


def test_equal_questions_with_two_categories_are_in_no_map(tmp_path: Path) -> None:
    given = write_json(tmp_path / "in.json", [{**ROWS[0], "category": "by hand"}, ROWS[0], ROWS[1]])
    with serve_writer(choose) as server:
        assert run_verb(arguments(server, tmp_path, "--categories-out", str(tmp_path / "map.json"), data=given)) == 0
    assert json.loads((tmp_path / "map.json").read_text(encoding="utf-8")) == {ROWS[1]["prompt"]: PEOPLE}


def test_an_unusable_reply_leaves_its_record_without_a_category(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve_writer(lambda asked, attempt: CHOSEN[asked.question] if "Jo" in asked.question else "All") as server:
        assert run_verb(arguments(server, tmp_path)) == 0
        assert "category" not in labeled(tmp_path)[0] and "provenance" not in labeled(tmp_path)[0]
        assert labeled(tmp_path)[1]["category"] == PEOPLE
        assert "without category, category: it is not one of the ten (3): qaedit.jsonl, record 0" in (
            capsys.readouterr().out
        )
    (tmp_path / "out.json").unlink()
    with serve_writer(lambda asked, attempt: "All") as server:
        assert run_verb(arguments(server, tmp_path, "--store", "off")) == 2
    assert "could be used; nothing is written" in capsys.readouterr().err and not (tmp_path / "out.json").exists()


def test_a_limit_takes_the_first_records_and_a_dry_run_sends_nothing(tmp_path: Path) -> None:
    with serve_writer(choose) as server:
        assert run_verb(arguments(server, tmp_path, "--dry-run")) == 0 and not server.requests
        assert run_verb(arguments(server, tmp_path, "--max-calls", "1")) == 2 and not server.requests
        assert run_verb(arguments(server, tmp_path, "--limit", "2")) == 0
    assert [record["prompt"] for record in labeled(tmp_path)] == [row["prompt"] for row in ROWS[:2]]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--locality", "z.json"], "--locality has no use with --categories-only"),
        (["--num-locality", "2"], "--num-locality has no use"),
        (["--seed", "0"], "--seed has no use"),
        (["--categories-out", "out.json", "--out", "out.json"], "is also the path of another output"),
        (["--out", str(RELEASED), "--overwrite"], "is a file of the input"),
    ],
)
def test_options_without_a_use_are_refused(
    more: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with serve_writer(choose) as server:
        assert run_verb([*arguments(server, tmp_path), *more]) == 2
        assert not server.requests
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"question": "q?", "answer": "a"}, "field 'target' is missing"),
        ({**ROWS[0], "category": 3}, "field 'category' is 3"),
        ({**ROWS[0], "provenance": []}, "field 'provenance' is no object"),
        ("text", "the record is a str"),
    ],
)
def test_records_that_the_tasks_would_refuse_are_errors(
    record: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = write_json(tmp_path / "in.json", [ROWS[1], record])
    with serve_writer(choose) as server:
        assert run_verb(arguments(server, tmp_path, data=given)) == 2
        assert not server.requests
    printed = capsys.readouterr().err
    assert message in printed and "record 1" in printed


def test_building_still_needs_locality_questions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["build-qaedit", str(RELEASED), "--writer", "hf:x", "--out", str(tmp_path / "o.json")]
    assert run_verb(given) == 2 and "--locality FILE is needed" in capsys.readouterr().err
    assert run_verb([*given, "--locality", "z.json", "--categories-out", "c.json"]) == 2
    assert "--categories-out belongs to --categories-only" in capsys.readouterr().err


@pytest.mark.realdata
def test_the_released_rows_can_be_labeled() -> None:
    path = REAL_DATA / "qaedit" / "QAEdit_inter_1k.json"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    from judges.backends.base import Reply

    rows, raw = read_records(str(path))
    chats = make_chats(rows)
    assert len(rows) == len(chats) == 1000 and len(raw.origin["sha256"]) == 64
    replies = [Reply(CATEGORIES[number % 10]) for number in range(1000)]
    labeling = label(rows, replies, {})
    assert set(labeling.counts().values()) == {100} and not labeling.without_category
