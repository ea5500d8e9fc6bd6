"""`lm-edit judge` and `lm-edit judge-quality`: saved answers judged again, judges compared and measured."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
from judge_server import grade_by_equality, serve
from paths import ROOT
from saved_results import save_samples
from scripted import ScriptedLM, StreamLM
from task_runs import run
from wild_answers import WILD_TASK, wild_texts

from edit_hooks import EditingError
from judges.evaluation.quality import PAIRS
from judges.similarity import SIMILARITIES
from judges.string_judge import RULES
from lm_edit.cli.main import main


@pytest.fixture
def samples(tmp_path: Path) -> str:
    results = run(WILD_TASK, ScriptedLM(texts=wild_texts, errors={"1": "no such layer"}))
    return save_samples(results, tmp_path / "out", WILD_TASK)


def row(printed: str, task: str, answers: str) -> list[str]:
    """The cells of the printed line of a task and subset, from the task on."""
    lines = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in printed.splitlines()]
    (found,) = [line for line in lines if line[1:3] == [task, answers]]
    return found[1:]


def test_judging_again_asks_no_edited_model_and_pays_once(
    samples: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "verdicts.jsonl"
    with serve(lambda item, attempt: "A" if item.gold in item.answer else "B") as server:
        arguments = ["judge", samples, "--judge", f"openai:m@{server.url}", "--store", str(tmp_path), "--out", str(out)]
        assert main(arguments) == 0
        first = capsys.readouterr().out
        assert main([*arguments, "--overwrite"]) == 0
        assert set(server.replies.values()) == {1} and len(server.replies) == 7
    assert row(first, WILD_TASK, "all")[1:] == ["all", "4", "0.667", "3/4", "0.333"]
    # the unedited model knew case 3; it was wrong about case 1, whose edit failed
    assert row(first, WILD_TASK, "initially wrong")[1:] == ["initially wrong", "4", "0.500", "2/3", "0.500"]
    assert "7 of 7 answers scored" in first and "edit failed: no such layer (1)" in first
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["file"] for row in rows} == {samples} and {row["run"] for row in rows} == {""}
    assert len(rows) == 8 and rows[0]["judges"]["m (correctness_v1)"]["reply"] == "A"
    assert rows[2]["judges"]["m (correctness_v1)"]["reason"] == "edit failed: no such layer"


def test_the_table_equals_that_of_the_run(samples: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serve(lambda item, attempt: "A" if item.gold in item.answer else "B") as server:
        given = {"backend": "openai", "model": "m", "base_url": server.url, "store": str(tmp_path)}
        lm = ScriptedLM(texts=wild_texts, errors={"1": "no such layer"})
        results = run(WILD_TASK, lm, {"judge": given})["results"][WILD_TASK]
        assert main(["judge", samples, "--judge", json.dumps(given)]) == 0
        assert set(server.requests.values()) == {1}
    printed = capsys.readouterr().out
    assert row(printed, WILD_TASK, "all")[3] == f"{results['efficacy_wild_judge,judge']:.3f}"
    in_run = results["efficacy_wild_judge@wrong_em,judge"]
    assert row(printed, WILD_TASK, "initially wrong")[3] == f"{in_run:.3f}"


def test_two_judges_are_compared(samples: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serve(lambda item, attempt: "A") as server:
        judge = f"openai:m@{server.url}"
        assert main(["judge", samples, "--judge", judge, "--compare", "contains", "--store", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "agreement 0.429, Cohen's kappa 0.000, over 7 answers; 1 unscored" in printed
    assert 'correct / incorrect: "Which mark closes' in printed


def test_two_judges_of_one_name_are_told_apart(
    samples: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "verdicts.jsonl"
    with serve(lambda item, attempt: "A") as first, serve(lambda item, attempt: "B") as second:
        judges = [
            json.dumps({"backend": "openai", "model": "m", "base_url": server.url, "temperature": temperature})
            for server, temperature in ((first, 0.0), (second, 0.5))
        ]
        arguments = ["judge", samples, "--judge", judges[0], "--store", str(tmp_path)]
        assert main([*arguments, "--compare", judges[1], "--out", str(out)]) == 0
        requests = len(first.requests)
        assert main([*arguments, "--compare", judges[0]]) == 2  # before any request
        assert len(first.requests) == requests
    verdicts = [json.loads(line)["judges"] for line in out.read_text().splitlines()]
    names = [
        f"m (correctness_v1), temperature={number}, base_url={server.url}"
        for number, server in ((0.0, first), (0.5, second))
    ]
    assert {tuple(row) for row in verdicts} == {tuple(names)}
    assert [verdicts[0][name]["verdict"] for name in names] == ["correct", "incorrect"]
    assert "are the same judge, m (correctness_v1)" in capsys.readouterr().err


def test_a_dry_run_only_counts(samples: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serve() as server:
        arguments = ["judge", samples, "--judge", f"openai:m@{server.url}", "--store", str(tmp_path), "--dry-run"]
        assert main([*arguments, "--compare", "em"]) == 0
        assert not server.requests
    printed = capsys.readouterr().out
    assert "7 answers, 7 distinct, 0 in the store: 7 calls, about " in printed and "judge em: no model calls" in printed


def test_low_coverage_is_an_exit_code(samples: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serve(lambda item, attempt: "hm" if "tram" in item.question else "B") as server:
        arguments = ["judge", samples, "--judge", f"openai:m@{server.url}", "--store", str(tmp_path)]
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert "scored 5 of 7 answers" in error and "are in the verdict store" in error
        assert main([*arguments, "--store", "off"]) == 2
        assert "no reply is kept" in capsys.readouterr().err
        assert main([*arguments, "--min-coverage", "0.5"]) == 0
        assert main([*arguments, "--min-coverage", "0.5", "--max-calls", "0"]) == 0  # all replies are stored


def test_a_repaired_judge_is_asked_again(samples: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replies = ["I cannot\nsay."]
    with serve(lambda item, attempt: replies[-1]) as server:
        arguments = ["judge", samples, "--judge", f"openai:m@{server.url}", "--store", str(tmp_path)]
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert r"A reply without a verdict: 'I cannot\nsay.'" in error and "--ask-again unscored" in error
        assert "the next run requests only" not in error
        replies.append("A")
        assert main(arguments) == 2 and "0 calls" in capsys.readouterr().out
        assert main([*arguments, "--ask-again", "unscored"]) == 0 and "7 calls" in capsys.readouterr().out
        assert main(arguments) == 0


def test_streams_are_judged_at_their_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"mode": "sequential", "checkpoints": "1;3", "population": "all"}
    results = run(WILD_TASK, StreamLM({"0": "110", "1": ".11", "2": "..1"}, {1: 0, 3: 2}), settings)
    assert main(["judge", save_samples(results, tmp_path, WILD_TASK), "--judge", "contains"]) == 0
    printed = capsys.readouterr().out
    found = results["results"][WILD_TASK]
    for stage in ("", "@immediate", "@1", "@3"):
        assert row(printed, WILD_TASK + stage, "all")[3] == f"{found[f'efficacy_wild_contains{stage},none']:.3f}"


def test_answers_of_other_tasks_and_plain_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sample = {
        "doc_id": 0,
        "doc": {"question": "Two and two?"},
        "target": "4",
        "arguments": {"gen_args_0": {"arg_0": "Q: Two and two?\nA:", "arg_1": {"until": ["\n"]}}},
        "resps": [[" 4\nQ:"]],
        "filtered_resps": ["4"],
        "filter": "none",
    }
    samples = tmp_path / "samples_sums_2026-11-21T10-00-00.5.jsonl"
    samples.write_text(json.dumps(sample) + "\n" + json.dumps(sample | {"filter": "other"}) + "\n")
    plain = tmp_path / "mine.jsonl"
    rows = [{"question": "q", "gold": ["a", "b"], "answer": "B"}, {"question": "q", "gold": "a", "answer": "c"}]
    plain.write_text("".join(json.dumps(one) + "\n" for one in rows))
    assert main(["judge", str(samples), str(plain), "--judge", "em", "--score", "match_ratio"]) == 0
    printed = capsys.readouterr().out
    assert row(printed, "sums", "all")[1:] == ["all", "1", "1.000", "1/1", "1.000", "1.000"]
    assert row(printed, "mine", "all")[1:] == ["all", "2", "0.500", "2/2", "0.500", "0.000"]


def test_unreadable_samples_are_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["judge", str(tmp_path / "nothing"), "--judge", "em"]) == 2
    assert "there is no file or folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("score", "message"), [("nonsense", "score 'nonsense' is unknown"), ("bertscore", "bert-score")]
)
def test_scores_are_checked_before_a_request_is_paid(
    score: str, message: str, samples: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bert_score", None)  # as where it is not installed
    with serve() as server:
        for options in ([], ["--dry-run"]):
            arguments = ["judge", samples, "--judge", f"openai:m@{server.url}", "--store", "off", *options]
            assert main([*arguments, "--score", "match_ratio", "--score", score]) == 2
            assert message in capsys.readouterr().err
        assert not server.bodies


def test_a_score_that_fails_costs_no_request(
    samples: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the weights of BERTScore cannot be downloaded."""

    def fail(answers: Sequence[str], golds: Sequence[str]) -> list[float]:
        raise EditingError("no weights")

    monkeypatch.setitem(SIMILARITIES, "bertscore", fail)
    monkeypatch.setitem(sys.modules, "bert_score", ModuleType("bert_score"))
    with serve() as server:
        arguments = ["judge", samples, "--judge", f"openai:m@{server.url}", "--store", "off", "--score", "bertscore"]
        assert main(arguments) == 2 and not server.bodies
    assert "no weights" in capsys.readouterr().err


def test_unknown_judges_and_scores_are_errors(
    samples: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LM_EDIT_JUDGE", raising=False)
    assert main(["judge", samples]) == 2
    assert main(["judge", samples, "--judge", "emm"]) == 2
    assert main(["judge", samples, "--judge", "em", "--score", "bertscor"]) == 2
    printed = capsys.readouterr().err
    assert "no judge is configured" in printed and "String judges: em, alias" in printed
    assert "Did you mean 'bertscore'" in printed


# ------------------------------------------------------------------ judge-quality


def test_quality_of_any_judge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    some = tmp_path / "some.jsonl"
    some.write_text("\n".join(PAIRS.read_text(encoding="utf-8").splitlines()[::12]), encoding="utf-8")
    options = ["--pairs", str(some), "--store", str(tmp_path), "--errors"]
    with serve(grade_by_equality) as server:
        assert main(["judge-quality", "--judge", f"openai:m@{server.url}", *options]) == 0
    printed = capsys.readouterr().out
    assert "m (correctness_v1)" in printed and ", labeled correct (" in printed and "continuation" in printed
    with serve(lambda item, attempt: "maybe") as server:
        assert main(["judge-quality", "--judge", f"openai:n@{server.url}", *options]) == 0
    assert "0 of 33 answers scored (0.0%)" in capsys.readouterr().out


def test_kappa_with_labels_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs = tmp_path / "pairs.jsonl"
    rows = [("g", "correct"), ("g", "correct"), ("h", "incorrect"), ("well, g", "correct")]
    shared = {"question": "q", "gold": "g"}
    pairs.write_text("".join(json.dumps(shared | {"answer": a, "label": label}) + "\n" for a, label in rows))
    assert main(["judge-quality", "--judge", "em", "--pairs", str(pairs), "--errors"]) == 0
    printed = capsys.readouterr().out
    (cells,) = [line.split() for line in printed.splitlines() if line.startswith("em ")]
    # agreement 3/4, by chance 3/4 * 2/4 + 1/4 * 2/4 = 1/2
    assert cells[:6] == ["em", "0.75", "1.00", "0.67", "1.00", "0.50"] and cells[7] == "to"
    assert float(cells[6]) < 0.5 < float(cells[8])
    assert "em, uncategorized-04: incorrect, labeled correct: 'well, g'" in printed
    with serve(lambda item, attempt: "hm") as server:
        assert (
            main(["judge-quality", "--judge", f"openai:m@{server.url}", "--pairs", str(pairs), "--store", "off"]) == 0
        )
    assert any(line.split()[-2:] == ["-", "-"] for line in capsys.readouterr().out.splitlines())


def test_the_page_has_the_table_that_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["judge-quality", "--markdown"]) == 0
    page = (ROOT / "docs/reference/judges.md").read_text(encoding="utf-8")
    tables = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(tables) > 20 and all(line in page for line in tables)
    for name in RULES:
        assert f"`{name}`" in page
