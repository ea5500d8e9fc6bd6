"""The judge of a column whose pipeline has a filter of the task's own in place of the model judge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from result_files import change, judged_run

from lm_edit import load_results
from lm_edit.results.files.task_facts import JUDGE
from lm_eval_tasks.common.task.judge_filter import PIPELINE

TASK = "qaedit_wild_reliability"
VERDICTS = (1.0, 1.0, 0.0, 0.0)
OWN = [{"function": "natural_stop"}, {"function": "own_judge", "threshold": 0.5, "layer": "last"}]
MODEL = [{"function": "natural_stop"}, {"function": "model_judge"}]


def results_of(folder: Path, steps: list[dict[str, Any]], metadata: dict[str, Any]) -> pd.DataFrame:
    def rewrite(content: dict[str, Any]) -> None:
        config = content["configs"][TASK]
        config["filter_list"][-1]["filter"] = steps
        config["metadata"] |= {"judge": None} | metadata

    change(judged_run(folder, "unused", 0, VERDICTS), rewrite)
    return load_results(folder)


def test_tables_and_filters_name_one_pipeline() -> None:
    assert JUDGE == PIPELINE


@pytest.mark.parametrize(
    ("steps", "metadata", "judge"),
    [
        (OWN, {}, "natural_stop; own_judge(layer='last', threshold=0.5)"),
        (OWN, {"judge": "published_setting"}, "natural_stop; own_judge(layer='last', threshold=0.5)"),
        (OWN, {"own_judges": {"judge": {"name": "probe", "version": 2}}}, "name=probe; version=2"),
        (MODEL, {"judge": {"model": "m"}}, "model=m"),
        (MODEL, {"judge": {"model": "m"}, "own_judges": {"judge": {"model": "n"}}}, "model=n"),
    ],
)
def test_a_filter_in_the_pipeline_judge_is_the_judge(
    steps: list[dict[str, Any]], metadata: dict[str, Any], judge: str, tmp_path: Path
) -> None:
    frame = results_of(tmp_path, steps, metadata)
    (judged,) = frame[frame["filter"] == "judge"].to_dict("records")
    assert judged["judge"] == judge and judged["protocol"].endswith("; judged")
    others = frame[frame["filter"] == "none"]
    assert set(others["judge"]) == {""} and not others["protocol"].str.contains("judged").any()


@pytest.mark.parametrize("steps", [OWN, MODEL])
def test_the_judge_of_the_population_is_named_beside_another_one(steps: list[dict[str, Any]], tmp_path: Path) -> None:
    def select(content: dict[str, Any]) -> None:
        content["configs"][TASK]["other_metrics"][0]["population"] = "wrong_judge"

    results_of(tmp_path, steps, {"judge": {"model": "m"}})
    (path,) = tmp_path.rglob("results_*.json")
    change(path, select)
    frame = load_results(tmp_path)
    own = "natural_stop; own_judge(layer='last', threshold=0.5); population by "
    assert list(frame[frame["filter"] == "judge"]["judge"]) == [(own if steps is OWN else "") + "model=m"]
