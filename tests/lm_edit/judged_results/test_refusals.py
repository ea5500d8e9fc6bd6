"""What cannot be judged later is refused before the first request, with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from judge_server import JudgeServer, serve
from judged_runs import RELIABILITY, judge_of, run_without_judge, scripted
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from paths import RECORDS
from result_files import change, write_run
from task_managers import FOLDER
from task_runs import run

from lm_edit.cli.main import main


@pytest.fixture(scope="module")
def server() -> Iterator[JudgeServer]:
    with serve() as running:
        yield running


@pytest.fixture
def refused(server: JudgeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Judge and return the message of the error; nothing was paid for or written."""

    def judge(results: Path, *options: str, judge: str | None = None) -> str:
        judge = judge or json.dumps(judge_of(server, tmp_path / "store"))
        arguments = [str(results), "--judge", judge, "--write-results", str(tmp_path / "judged"), *options]
        assert main(["judge", *arguments]) == 2
        assert not server.bodies and not any((tmp_path / "judged").rglob("*"))
        return capsys.readouterr().err

    return judge


def rewrite_samples(result_file: Path, rewrite: Callable[[dict[str, Any]], object], task: str = RELIABILITY) -> None:
    (path,) = result_file.parent.glob(f"samples_{task}_*.jsonl")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        rewrite(row)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--compare", "em"], "without --compare"),
        (["--score", "match_ratio"], "without --score"),
        (["--out", "verdicts.jsonl"], "without --out"),
        (["--locality"], "without --locality"),
    ],
)
def test_options_of_the_table(options: list[str], message: str, refused: Any, tmp_path: Path) -> None:
    run_without_judge(tmp_path / "results")
    assert message in refused(tmp_path / "results", *options)


def test_judges_that_a_run_refuses(refused: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = run(RELIABILITY, scripted(), {"pretrained": "org/tiny"}, bootstrap_iters=0)
    write_run(tmp_path / "results", results=results)
    assert "judge hf:org/tiny is the checkpoint that is being edited" in refused(
        tmp_path / "results", judge="hf:org/tiny"
    )
    assert "judge 'em' compares strings" in refused(tmp_path / "results", judge="em")
    assert "judge 'qwen' is unknown" in refused(tmp_path / "results", judge="qwen")
    monkeypatch.delenv("LM_EDIT_JUDGE", raising=False)
    assert main(["judge", str(tmp_path / "results"), "--write-results", str(tmp_path / "judged")]) == 2


def test_include_path_without_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["judge", str(tmp_path), "--judge", "em", "--include-path", str(tmp_path)]) == 2
    assert "--include-path is about --write-results" in capsys.readouterr().err


def test_results_without_samples(refused: Any, tmp_path: Path) -> None:
    path = run_without_judge(tmp_path / "results", samples=False)
    message = f"{path} has no samples of {RELIABILITY} beside it"
    assert message in refused(tmp_path / "results")
    run_without_judge(tmp_path / "results", editor="memit")
    assert message in refused(tmp_path / "results")


def test_rows_and_samples_without_a_result_file(refused: Any, tmp_path: Path) -> None:
    rows = tmp_path / "mine.jsonl"
    rows.write_text(json.dumps({"question": "q", "gold": "a", "answer": "b"}) + "\n", encoding="utf-8")
    assert "mine.jsonl has no readable result file beside it" in refused(rows)
    run_without_judge(tmp_path / "results").unlink()
    run_without_judge(tmp_path / "results", editor="memit")
    assert "has no readable result file beside it" in refused(tmp_path / "results")


def test_tasks_without_judged_columns(refused: Any, tmp_path: Path) -> None:
    write_run(tmp_path / "results")
    assert "none of these tasks has a column that a judge decides: bake_es." in refused(tmp_path / "results")


def test_a_run_that_scored_nothing(refused: Any, tmp_path: Path) -> None:
    results = run(RELIABILITY, scripted(), bootstrap_iters=0, predict_only=True)
    write_run(tmp_path / "results", results=results)
    assert "runs with --predict_only have no columns" in refused(tmp_path / "results")


def test_a_task_of_another_version(refused: Any, tmp_path: Path) -> None:
    path = run_without_judge(tmp_path / "results")
    change(path, lambda content: content["versions"].update({RELIABILITY: 0.5}))
    error = refused(tmp_path / "results")
    assert "is not the task that the run had: its version was 0.5, and is " in error
    assert "Use the release that made the results (lm-eval-editing 0.1.0)" in error


@pytest.mark.parametrize(
    ("key", "changed", "message"),
    [
        (
            "other_metrics",
            {"from": "judge", "aggregation": "pooled_mean"},
            "of its metrics, efficacy_wild_judge was",
        ),
        ("filter_list", {"filter": [{"function": "natural_stop", "until": ["x"]}]}, "of its filters, none was"),
        ("settings", {"wild_context": "question_only"}, "of its settings, wild_context was"),
    ],
)
def test_a_task_of_other_settings(
    key: str, changed: dict[str, Any], message: str, refused: Any, tmp_path: Path
) -> None:
    def rewrite(content: dict[str, Any]) -> None:
        part = content["configs"][RELIABILITY][key]
        (part if isinstance(part, dict) else part[0]).update(changed)

    change(run_without_judge(tmp_path / "results"), rewrite)
    assert message in refused(tmp_path / "results")


def test_samples_that_were_changed(refused: Any, tmp_path: Path) -> None:
    path = run_without_judge(tmp_path / "results")
    rewrite_samples(path, lambda row: row["doc"]["probes"][0].update(gold="another answer"))
    assert "document 0 of the samples has another hash here than in the run" in refused(tmp_path / "results")
    rewrite_samples(path, lambda row: row.update(doc_hash="0"))
    assert "samples are missing, changed, or of another task or run" in refused(tmp_path / "results")
    rewrite_samples(path, lambda row: row.update(resps=[]))
    change(path, lambda content: content["task_hashes"].clear())
    assert "not a sample as lm-eval saves it" in refused(tmp_path / "results")


@pytest.mark.parametrize("field", ["ask_generation", "decoding"])
def test_samples_of_another_layout(field: str, refused: Any, tmp_path: Path) -> None:
    """As of an earlier release."""
    path = run_without_judge(tmp_path / "results")
    rewrite_samples(path, lambda row: row["doc"]["probes"][0].pop(field))
    change(path, lambda content: content["task_hashes"].clear())
    error = refused(tmp_path / "results")
    assert "is not the task that the run had: its documents have another layout. Use the release that made" in error


def test_scores_that_the_answers_do_not_have_here(refused: Any, tmp_path: Path) -> None:
    """As after a change of the scoring without another version."""
    path = run_without_judge(tmp_path / "results")
    rewrite_samples(path, lambda row: row.update(efficacy_wild_contains=0.25))
    error = refused(tmp_path / "results")
    assert "efficacy_wild_contains of document 0, filter none, was 0.25 in the run" in error


def test_scores_of_a_run_whose_judge_selects_the_cases(refused: Any, tmp_path: Path) -> None:
    """They are compared without a request; its own population is not."""
    with serve() as other:
        settings = {"population": "wrong_judge", "judge": judge_of(other, tmp_path / "other", served_as="other")}
        path = write_run(tmp_path / "results", results=run(RELIABILITY, scripted(), settings, bootstrap_iters=0))
    rewrite_samples(path, lambda row: row["filter"] == "none" and row.update(efficacy_wild_contains=0.25))
    error = refused(tmp_path / "results")
    assert "efficacy_wild_contains of document 0, filter none, was 0.25 in the run" in error


def test_tasks_of_a_folder_of_the_user(
    refused: Any, server: JudgeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are found with --include-path; code that is not here is named."""
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    yaml = tasks / "my_wild.yaml"
    base = FOLDER / "qaedit" / f"{RELIABILITY}.yaml"
    yaml.write_text(f"include: {base}\ntask: my_wild\n", encoding="utf-8")
    settings = {"data": str(RECORDS / "qaedit.jsonl")}
    manager = TaskManager(include_path=[FOLDER, tasks], include_defaults=False, metadata=settings)
    results = simple_evaluate(model=scripted(), tasks=["my_wild"], task_manager=manager, bootstrap_iters=0)
    write_run(tmp_path / "results", results=results)
    assert "the task my_wild is not known here" in refused(tmp_path / "results")
    assert "is no folder" in refused(tmp_path / "results", "--include-path", str(tmp_path / "nowhere"))
    yaml.write_text(
        f"include: {base}\ntask: my_wild\nprocess_results: !function not_installed.scores.score\n", encoding="utf-8"
    )
    error = refused(tmp_path / "results", "--include-path", str(tasks))
    assert "the task my_wild cannot be built here" in error and "not_installed" in error
    yaml.write_text(f"include: {base}\ntask: my_wild\n", encoding="utf-8")
    judge = json.dumps(judge_of(server, tmp_path / "store"))
    arguments = ["--judge", judge, "--write-results", str(tmp_path / "judged"), "--include-path", str(tasks)]
    assert main(["judge", str(tmp_path / "results"), *arguments]) == 0
    server.bodies.clear()


def test_a_server_that_does_not_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_without_judge(tmp_path / "results")
    arguments = ["--judge", "openai:m@http://127.0.0.1:1/v1", "--write-results", str(tmp_path / "judged")]
    assert main(["judge", str(tmp_path / "results"), *arguments]) == 2
    assert "no server answers at http://127.0.0.1:1/v1" in capsys.readouterr().err
