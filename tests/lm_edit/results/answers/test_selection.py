"""``lm-edit results select-wrong``: records that several unedited models answer wrongly; missing answers are errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import run_verb
from judge_server import JudgeServer, serve
from paths import RECORDS
from result_files import change, write_run
from scripted import ScriptedLM, StockLM
from task_runs import run
from wild_answers import WILD_ANSWERS, WILD_TASK

from edit_hooks.utils.storage.json_io import read_rows
from judges.base import Item
from lm_eval_tasks.qaedit.benchmark import QAEDIT

RELEASED = RECORDS / "qaedit.jsonl"
ROWS = [record for _, record in read_rows(RELEASED)]
QUESTIONS = [row["prompt"] for row in ROWS]
UNEDITED = {"mode": "none", "editor": None, "editor_config": None}


def answers(*known: int) -> Any:
    """A script that answers the questions of these rows correctly; "1911" is the answer of row 3."""
    texts = {QUESTIONS[row]: f" {ROWS[row]['target'].strip()}\n" for row in known}
    return lambda context, unedited: texts.get(context.partition("Q: ")[2].split("\n")[0], " no idea.")


def model(folder: Path, name: str, *known: int, lm: Any = ScriptedLM, **given: Any) -> Path:
    """Write the run of an unedited model that knows the answers of some rows."""
    options = {"settings": {"population": "all", **given.pop("settings", {})}, "bootstrap_iters": 0}
    script = {"texts": given.pop("texts", answers(*known)), "errors": given.pop("errors", None)}
    results = run(WILD_TASK, lm=lm(**script), **options, **given.pop("run", {}))
    edit = {"stock": True} if lm is StockLM else {"model_identity": {"weights": name * 8}} | UNEDITED | given
    return write_run(folder / name, WILD_TASK, results=results, model_args=f"pretrained=org/{name}", **edit)


def select(folder: Path, *more: str, runs: tuple[str, ...] = ("a", "b")) -> int:
    paths = [str(folder / name) for name in runs]
    given = ["results", "select-wrong", *paths, "--out", str(folder / "wrong.json"), "--data", str(RELEASED)]
    return run_verb([*given, *more])


def chosen(folder: Path) -> list[str]:
    return [record["prompt"] for record in json.loads((folder / "wrong.json").read_text(encoding="utf-8"))]


def test_the_rows_that_every_model_answers_wrongly_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model(tmp_path, "a", 0)
    model(tmp_path, "b", 3)
    model(tmp_path, "c", lm=StockLM)
    assert select(tmp_path, runs=("a", "b", "c")) == 0
    # Row 2 has the gold answer ")", which is empty after normalization: no answer matches it.
    assert chosen(tmp_path) == [QUESTIONS[1], QUESTIONS[2]]
    printed = capsys.readouterr().out
    assert printed.count("3 of 4 wrong") == 2 and "4 of 4 wrong" in printed and "wrong in all 3 runs: 2" in printed
    made = json.loads((tmp_path / "wrong.json").read_text(encoding="utf-8"))
    assert [{key: value for key, value in one.items() if key != "provenance"} for one in made] == ROWS[1:3]
    origin = made[0]["provenance"]["selection"]
    assert [entry["model"] for entry in origin["models"]] == ["org/a", "org/b", "org/c"]
    assert (origin["metric"], origin["judge"]) == ("efficacy_wild_em", "")
    loaded = QAEDIT.load({"data": str(tmp_path / "wrong.json")})
    assert len(loaded.records) == 2 and "unknown_fields" not in loaded.source


def judge_of(server: JudgeServer, name: str = "w") -> dict[str, Any]:
    return {"judge": {"backend": "openai", "model": name, "base_url": server.url, "min_coverage": 0.0, "store": "off"}}


def test_a_judge_decides_if_it_is_wanted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A judge accepts an answer with more words, which exact match calls wrong; an unclear verdict is no verdict."""

    def grade(item: Item, attempt: int) -> str:
        if item.question == QUESTIONS[1]:
            return "I cannot decide."
        return "A" if item.gold in item.answer else "B"

    with serve(grade) as server:
        for name in ("a", "b"):
            given = judge_of(server)
            model(tmp_path, name, texts=lambda context, unedited: " It was Orsa Lind in 1911.", settings=given)
    assert select(tmp_path) == 0
    assert len(chosen(tmp_path)) == 4
    assert select(tmp_path, "--by", "judge", "--overwrite") == 2
    assert "no score for 1 of 4 records: judge: the judge's reply holds no verdict (1)" in capsys.readouterr().err
    assert select(tmp_path, "--by", "judge", "--skip-unscored", "--overwrite") == 0
    assert chosen(tmp_path) == [QUESTIONS[2]]
    record = json.loads((tmp_path / "wrong.json").read_text(encoding="utf-8"))[0]
    assert "w" in record["provenance"]["selection"]["judge"]


def test_without_a_judge_there_is_nothing_to_select_by_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model(tmp_path, "a")
    assert select(tmp_path, "--by", "judge", runs=("a",)) == 2
    assert "no column efficacy_wild_judge. Run it with a judge" in capsys.readouterr().err


def test_records_that_were_not_asked_are_an_error_and_never_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model(tmp_path, "a")
    model(tmp_path, "b", run={"limit": 2})
    for more in ((), ("--skip-unscored",)):
        assert select(tmp_path, *more) == 2
        assert "no score for 2 of 4 records: not asked (2). A missing answer is not a wrong one" in (
            capsys.readouterr().err
        )
    assert not (tmp_path / "wrong.json").exists()


def test_unscored_records_are_an_error_or_left_out_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model(tmp_path, "a")
    model(tmp_path, "b", errors={"1": "too long"})
    assert select(tmp_path) == 2
    assert "no score for 1 of 4 records: edit failed: too long (1)" in capsys.readouterr().err
    assert select(tmp_path, "--skip-unscored") == 0
    assert chosen(tmp_path) == [QUESTIONS[0], *QUESTIONS[2:]]
    assert "left out, without a score in some run, edit failed: too long: 1" in capsys.readouterr().out


def test_a_model_that_knows_everything_leaves_nothing_to_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "two.jsonl"
    data.write_text("".join(json.dumps(ROWS[row]) + "\n" for row in (0, 3)), encoding="utf-8")
    model(tmp_path, "a", 0, settings={"data": str(data)})
    model(tmp_path, "b", 3, settings={"data": str(data)})
    assert select(tmp_path, "--data", str(data)) == 2
    assert "nothing is written" in capsys.readouterr().err and not (tmp_path / "wrong.json").exists()


def test_runs_of_edited_models_and_of_other_data_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model(tmp_path, "a")
    model(tmp_path, "b", mode="single", editor="r_rome", editor_config={"layers": [5]})
    assert select(tmp_path) == 2 and "is a run of an edited model" in capsys.readouterr().err
    model(tmp_path, "c", icl="ike")
    assert select(tmp_path, runs=("a", "c")) == 2 and "is a run of an edited model" in capsys.readouterr().err
    other = tmp_path / "other.jsonl"
    other.write_text(RELEASED.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    assert select(tmp_path, "--data", str(other), runs=("a",)) == 2
    assert "their SHA-256 differs" in capsys.readouterr().err
    model(tmp_path, "d", settings={"subset": "all", "subset_seed": 1})
    assert select(tmp_path, runs=("a", "d")) == 2 and "without subset" in capsys.readouterr().err
    assert not (tmp_path / "wrong.json").exists()


def test_two_results_of_one_run_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model(tmp_path, "a")
    model(tmp_path / "again", "a")
    assert select(tmp_path, runs=("a", "again")) == 2
    assert "two results are of the same run" in capsys.readouterr().err


def test_runs_that_were_asked_differently_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model(tmp_path, "a")
    model(tmp_path, "b", settings={"wild_context": "question_only"})
    assert select(tmp_path) == 2 and "differ in the protocol" in capsys.readouterr().err
    with serve() as server:
        for name in ("c", "d"):
            model(tmp_path, name, settings=judge_of(server, f"judge-{name}"))
    assert select(tmp_path, "--by", "judge", runs=("c", "d")) == 2
    assert "differ in the judge" in capsys.readouterr().err
    assert select(tmp_path, runs=("c", "d")) == 0  # by exact match the judge does not matter


def test_chat_templates_of_different_models_are_alike_and_other_tasks_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, sha in (("a", "ab" * 32), ("b", "cd" * 32)):
        change(model(tmp_path, name), lambda content, sha=sha: content.update(chat_template_sha=sha))
    assert select(tmp_path) == 0
    assert select(tmp_path, "--task", "qaedit_wild_generalization", "--overwrite") == 2
    assert "no run has the task" in capsys.readouterr().err


def test_a_run_without_samples_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = model(tmp_path, "a")
    for samples in path.parent.glob("samples_*"):
        samples.unlink()
    assert select(tmp_path, runs=("a",)) == 2 and "--log_samples" in capsys.readouterr().err


def test_the_scripts_of_this_file_cover_every_record() -> None:
    assert set(WILD_ANSWERS) == set(QUESTIONS)
