"""Results that are judged later equal those of a run that had the judge, key by key."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from judge_server import JudgeServer, serve
from judged_runs import RELIABILITY, STREAM, contents, grade_by_containment, judge_of, scripted, stream
from paths import RECORDS
from result_files import change, write_run
from saved_results import differences, evaluate_here, readable
from scripted import StockLM
from task_runs import run
from wild_answers import wild_texts

from judges.settings import JUDGE_VARIABLE
from lm_edit import load_breakdown, load_cases, load_results, load_retention
from lm_edit.judged_results.judging import Judging
from lm_edit.results.checking.check import check_results

OF_THE_MAKING = ["file", "date"]


@pytest.fixture(scope="module")
def server() -> Iterator[JudgeServer]:
    with serve(grade_by_containment) as running:
        yield running


def assert_equal_runs(judged: Path, run_with_judge: Path, without: Callable[[Any], Any] = lambda value: value) -> None:
    """The files, the tables of them, and no problem found.

    Args:
        without: removes what two equal runs do not share.
    """
    (results, samples), (wanted, wanted_samples) = contents(judged), contents(run_with_judge)
    for task in wanted["configs"]:  # where no column is judged, lm-eval leaves the user's choice of a judge
        if not any("_judge" in key for key in wanted["results"][task]):
            wanted["configs"][task]["metadata"].pop("judge", None)
        for content in (results, wanted):  # the place of `judge` among the settings is where the user gave it
            content["configs"][task]["metadata"] = dict(sorted(content["configs"][task]["metadata"].items()))
    assert differences(without(results), without(wanted)) == []
    assert differences(without(samples), without(wanted_samples)) == []
    for load in (load_results, load_cases, load_retention, load_breakdown):
        left, right = (load(folder).drop(columns=OF_THE_MAKING, errors="ignore") for folder in (judged, run_with_judge))
        left, right = (table.map(without) if len(table) else table for table in (left, right))
        pd.testing.assert_frame_equal(left, right)
    assert check_results(judged).problems == []


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("task", "model", "settings", "options"),
    [
        (RELIABILITY, scripted, {}, {}),
        ("qaedit_wild", scripted, {"micro": True, "score_by": "origin"}, {"limit": 3}),
        (RELIABILITY, stream, STREAM, {}),
        ("qaedit_wild", stream, {**STREAM, "score_unedited_cases": True}, {}),
        (RELIABILITY, StockLM, {"population": "all"}, {"gen_kwargs": {"until": ["11", "\n"], "max_gen_toks": 7}}),
        (RELIABILITY, scripted, {}, {"samples": {RELIABILITY: [1, 3]}}),
        ("qaedit_grid_qa_inst_ar_gold", stream, STREAM, {"apply_chat_template": True}),
        ("qaedit_grid_qa_inst_tf", stream, {}, {"apply_chat_template": True}),
    ],
)
def test_judged_later_or_in_the_run(
    task: str,
    model: Callable[[], Any],
    settings: dict[str, Any],
    options: dict[str, Any],
    server: JudgeServer,
    tmp_path: Path,
) -> None:
    judge = judge_of(server, tmp_path / "store")
    mode = settings.get("mode", "single")
    without = run(task, model(), settings, bootstrap_iters=0, **options)
    write_run(tmp_path / "without", results=without, mode=mode)
    with_judge = run(task, model(), {**settings, "judge": judge}, bootstrap_iters=0, **options)
    write_run(tmp_path / "with", results=with_judge, mode=mode)
    paid = sum(server.replies.values())
    Judging([str(tmp_path / "without")], judge).write(tmp_path / "judged")
    assert sum(server.replies.values()) == paid  # what is judged is the same, so that all replies are stored
    assert_equal_runs(tmp_path / "judged", tmp_path / "with")


@pytest.mark.parametrize("task", [RELIABILITY, "qaedit_grid_qa_inst_tf", "qaedit_grid_qa_inst_ar_gold"])
def test_a_run_s_own_settings_are_no_options_of_the_user(
    task: str, server: JudgeServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is logged about generation settings of a run, or about arguments of its model class."""
    path = write_run(tmp_path / "results", results=run(task, StockLM(texts=wild_texts), bootstrap_iters=0), stock=True)
    vllm = {"max_model_len": 2048, "gpu_memory_utilization": 0.8, "pretrained_": "near a setting"}
    recorded = {"until": ["\n", "."], "max_gen_toks": 50, "do_sample": False}

    def as_of_vllm(content: dict[str, Any]) -> None:
        content["configs"][task]["metadata"].update(vllm)
        content["configs"][task].setdefault("generation_kwargs", recorded)  # as earlier releases recorded them

    change(path, as_of_vllm)
    caplog.clear()
    Judging([str(tmp_path / "results")], judge_of(server, tmp_path / "store")).write(tmp_path / "judged")
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == []
    (judged,) = (tmp_path / "judged").rglob("results_*.json")
    config = json.loads(judged.read_text(encoding="utf-8"))["configs"][task]
    assert config["metadata"].items() >= vllm.items()
    assert (
        config["generation_kwargs"]
        == json.loads(path.read_text(encoding="utf-8"))["configs"][task]["generation_kwargs"]
    )


def test_a_judge_that_selects_the_cases_gives_way_to_another(server: JudgeServer, tmp_path: Path) -> None:
    """The population of all columns is over its verdicts on the unedited model's answers."""
    settings = {**STREAM, "population": "wrong_judge"}
    with serve(lambda item, attempt: "B") as strict:
        first = judge_of(strict, tmp_path / "first", served_as="strict")
        write_run(tmp_path / "without", results=run("qaedit_wild", stream(), {**settings, "judge": first}))
    judge = judge_of(server, tmp_path / "store")
    write_run(tmp_path / "with", results=run("qaedit_wild", stream(), {**settings, "judge": judge}))
    paid = sum(server.replies.values())
    Judging([str(tmp_path / "without")], judge).write(tmp_path / "judged")
    assert sum(server.replies.values()) == paid
    assert_equal_runs(tmp_path / "judged", tmp_path / "with")
    columns, before = (contents(tmp_path / name)[0]["results"][RELIABILITY] for name in ("judged", "without"))
    excluded = "efficacy_wild_em@wrong_judge_excluded,none"
    assert columns[excluded] == 1 and before[excluded] == 0


@pytest.mark.parametrize(
    "options", ["mode=single", "mode=sequential,edits=qaedit,num_edits=3,checkpoints=2,retention=true"]
)
def test_judged_later_or_in_a_run_of_the_model_class(
    options: str,
    server: JudgeServer,
    tiny_path: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Real answers, reports and diagnostics come back from the samples as they were in the run."""
    judge = json.dumps(judge_of(server, tmp_path / "store"))
    data = tmp_path / "removed_later.jsonl"
    data.write_bytes((RECORDS / "qaedit.jsonl").read_bytes())
    model = f"pretrained={tiny_path('gpt2')},store={tmp_path / 'edits'}"
    args = f"data={data},editor=ft_m,editor_args=num_steps:2,{model},{options}"
    evaluate_here(tmp_path / "without", args, ["qaedit_wild"], data)
    monkeypatch.setenv(JUDGE_VARIABLE, judge)
    evaluate_here(tmp_path / "with", args, ["qaedit_wild"], data)
    monkeypatch.delenv(JUDGE_VARIABLE)
    data.unlink()
    paid = sum(server.replies.values())
    Judging([str(tmp_path / "without")], judge).write(tmp_path / "judged")
    assert sum(server.replies.values()) == paid > 0
    assert_equal_runs(tmp_path / "judged", tmp_path / "with", readable)
