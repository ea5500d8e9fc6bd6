"""`lm-edit judge` and `lm-edit judge-quality`: saved answers judged again, judges compared and measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from judge_server import grade_by_equality, serve
from lm_eval.loggers.evaluation_tracker import EvaluationTracker
from paths import ROOT
from scripted import ScriptedLM, StreamLM
from task_runs import run

from edit_hooks.answers import EditedAnswer, FailedAnswer
from edit_hooks.utils.errors import EditingError
from judges.evaluation.quality import PAIRS
from judges.string_judge import RULES
from lm_edit.cli.main import main
from lm_edit.results.samples import read_saved_answers, read_saved_response

TASK = "qaedit_wild_reliability"
GOLD = {
    "Who designed the Fenwick aqueduct?": " Orsa Lind. She",
    "In which city was the painter Jo Marsh born?": " The town of Brannock",
    "Which mark closes the third stanza of Pim's Ode?": " A bracket",
    "What year did the Halden tram start running?": " In 1911\nQ:",
}


def texts(context: str, unedited: bool) -> str:
    return " 1911." if unedited else GOLD[context.partition("Q: ")[2].split("\n")[0]]


def save(results: dict[str, Any], folder: Path, task: str = TASK) -> str:
    """Samples as `lm_eval --log_samples --output_path` writes them; the file's path."""
    tracker = EvaluationTracker(output_path=str(folder))
    tracker.general_config_tracker.model_name_sanitized = "scripted"
    tracker.date_id = "2026-11-21T10-00-00.123456"
    tracker.save_results_samples(task_name=task, samples=results["samples"][task])
    (path,) = folder.rglob("samples_*.jsonl")
    return str(path)


@pytest.fixture
def samples(tmp_path: Path) -> str:
    return save(run(TASK, ScriptedLM(texts=texts, errors={"1": "no such layer"})), tmp_path / "out")


def row(printed: str, task: str, answers: str) -> list[str]:
    """The cells of the printed line of a task and subset."""
    lines = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in printed.splitlines()]
    (found,) = [line for line in lines if line[:2] == [task, answers]]
    return found


def test_saved_samples_hold_the_answers_that_were_scored(samples: str) -> None:
    found = read_saved_answers([samples])
    own, helpers = [one for one in found if not one.is_helper], [one for one in found if one.is_helper]
    assert [one.item.answer for one in own] == ["Orsa Lind", "", "A bracket", "In 1911"]
    assert own[1].failure == "edit failed: no such layer" and {one.task for one in own} == {TASK}
    assert [one.item.answer for one in helpers] == ["1911", "", "1911", "1911"]
    assert own[0].item[:2] == ("Who designed the Fenwick aqueduct?", "Orsa Lind")


def test_judging_again_asks_no_edited_model_and_pays_once(
    samples: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "verdicts.jsonl"
    with serve(lambda item, attempt: "A" if item.gold in item.answer else "B") as server:
        arguments = ["judge", samples, "--judge", f"openai:m@{server.url}", "--store", str(tmp_path), "--out", str(out)]
        assert main(arguments) == 0
        first = capsys.readouterr().out
        assert main(arguments) == 0
        assert set(server.replies.values()) == {1} and len(server.replies) == 6
    assert row(first, TASK, "all")[1:] == ["all", "4", "0.667", "3/4", "0.333"]
    # the unedited model knew case 3; case 1 is unscored before and after
    assert row(first, TASK, "initially wrong")[1:] == ["initially wrong", "4", "0.500", "2/2", "0.500"]
    assert "6 of 6 answers scored" in first and "edit failed: no such layer (2)" in first
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 8 and rows[0]["judges"]["m (correctness_v1)"]["reply"] == "A"
    assert rows[2]["judges"]["m (correctness_v1)"]["reason"] == "edit failed: no such layer"


def test_the_table_equals_that_of_the_run(samples: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serve(lambda item, attempt: "A" if item.gold in item.answer else "B") as server:
        given = {"backend": "openai", "model": "m", "base_url": server.url, "store": str(tmp_path)}
        lm = ScriptedLM(texts=texts, errors={"1": "no such layer"})
        results = run(TASK, lm, {"judge": given})["results"][TASK]
        assert main(["judge", samples, "--judge", json.dumps(given)]) == 0
        assert set(server.requests.values()) == {1}
    printed = capsys.readouterr().out
    assert row(printed, TASK, "all")[3] == f"{results['reliability_wild_judge,judge']:.3f}"
    in_run = results["reliability_wild_judge_initially_wrong,judge"]
    assert row(printed, TASK, "initially wrong")[3] == f"{in_run:.3f}"


def test_two_judges_are_compared(samples: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serve(lambda item, attempt: "A") as server:
        judge = f"openai:m@{server.url}"
        assert main(["judge", samples, "--judge", judge, "--compare", "contains", "--store", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "agreement 0.500, Cohen's kappa 0.000, over 6 answers; 2 unscored" in printed
    assert 'correct / incorrect: "Which mark closes' in printed


def test_a_dry_run_only_counts(samples: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serve() as server:
        arguments = ["judge", samples, "--judge", f"openai:m@{server.url}", "--store", str(tmp_path), "--dry-run"]
        assert main([*arguments, "--compare", "em"]) == 0
        assert not server.requests
    printed = capsys.readouterr().out
    assert "6 answers, 6 distinct, 0 in the store: 6 calls, about " in printed and "judge em: no model calls" in printed


def test_low_coverage_is_an_exit_code(samples: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serve(lambda item, attempt: "hm" if "tram" in item.question else "B") as server:
        arguments = ["judge", samples, "--judge", f"openai:m@{server.url}", "--store", str(tmp_path)]
        assert main(arguments) == 2
        assert "scored 4 of 6 answers" in capsys.readouterr().err
        assert main([*arguments, "--min-coverage", "0.5"]) == 0
        assert main([*arguments, "--min-coverage", "0.5", "--max-calls", "0"]) == 0  # all replies are stored


def test_streams_are_judged_at_their_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"mode": "sequential", "checkpoints": "1;3", "initially_wrong": False}
    results = run(TASK, StreamLM({"0": "110", "1": ".11", "2": "..1"}, {1: 0, 3: 2}), settings)
    assert main(["judge", save(results, tmp_path), "--judge", "contains"]) == 0
    printed = capsys.readouterr().out
    found = results["results"][TASK]
    for stage in ("", "@immediate", "@1", "@3"):
        assert row(printed, TASK + stage, "all")[3] == f"{found[f'reliability_wild_contains{stage},none']:.3f}"


def test_locality_is_left_to_the_comparison_with_the_unedited_model(tmp_path: Path) -> None:
    task = "qaedit_wild_locality"
    path = save(run(task, ScriptedLM()), tmp_path, task)
    with pytest.raises(EditingError, match="--locality judges them"):
        read_saved_answers([path])
    assert [one.item.answer for one in read_saved_answers([path], locality=True) if not one.is_helper] == [
        "Port Elna"
    ] * 4


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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"question": "q", "gold": "g"}', "line 1.*neither a sample of lm-eval nor a row"),
        ("[1]", "an object is needed"),
        ('{"doc_id": 0, "resps": [], "doc": {}}', "not a sample as lm-eval saves it"),
        ("{", "not valid JSON"),
    ],
)
def test_files_that_cannot_be_judged(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "samples_x.jsonl"
    path.write_text(content)
    with pytest.raises(EditingError, match=message):
        read_saved_answers([str(path)])
    assert main(["judge", str(path), "--judge", "em"]) == 2
    assert main(["judge", str(tmp_path / "nothing"), "--judge", "em"]) == 2


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


@pytest.mark.parametrize(
    ("saved", "read"),
    [
        ("plain text", "plain text"),
        (str(EditedAnswer(final=FailedAnswer("no layer"))), EditedAnswer(final=FailedAnswer("no layer"))),
        ("{not a mapping}", "{not a mapping}"),
        ("{'other': 1}", "{'other': 1}"),
        ('{"format": "another/1"}', '{"format": "another/1"}'),
        ("{__import__('os').getcwd(): 1, 'text': 2}", "{__import__('os').getcwd(): 1, 'text': 2}"),
    ],
)
def test_saved_responses_are_answers_of_ours_or_plain_texts(saved: str, read: Any) -> None:
    assert read_saved_response(saved) == read


@pytest.mark.parametrize("saved", ["{'text': 'Rome', 'token_ids': [1]}", "{'error': 'failed'}", "{'logprob': -1.0}"])
def test_samples_of_the_first_release_are_refused_with_a_way_out(saved: str) -> None:
    with pytest.raises(EditingError, match=r"release 0\.1\.0.*again"):
        read_saved_response(saved)


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


def test_readme_has_the_table_that_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["judge-quality", "--markdown"]) == 0
    readme = (ROOT / "judges" / "README.md").read_text(encoding="utf-8")
    tables = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(tables) > 20 and all(line in readme for line in tables)
    for name in RULES:
        assert f"`{name}`" in readme
