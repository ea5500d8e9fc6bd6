"""The page of findings: its plan names real tasks and columns, its numbers are those of the summary."""

from __future__ import annotations

import json
import re
from types import ModuleType
from typing import Any

import lm_eval
import pytest
import yaml
from lm_eval.tasks import TaskManager
from paths import ROOT
from task_runs import TASKS, build

PLAN: dict[str, Any] = yaml.safe_load((ROOT / "scripts/findings.yaml").read_text(encoding="utf-8"))


@pytest.fixture
def findings(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import findings

    return findings


@pytest.mark.parametrize("name", PLAN)
def test_rows_name_tasks_and_columns(name: str) -> None:
    finding = PLAN[name]
    for label, task, column in finding["rows"].values():
        metric, _, stage = column.partition("@")
        assert task in TASKS and metric in [entry["metric"] for entry in build(task).config.metric_list], label
        for options in finding["runs"].values():
            assert stage in ("", "immediate") or stage in str(options["checkpoints"]).split(";"), label
    for first, second in finding["differences"].values():
        assert {first, second} <= set(finding["rows"])
    against = finding.get("against", {})
    assert {*against, *against.values()} <= set(finding["runs"])


def test_every_finding_has_its_tables_on_the_page(findings: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert findings.main([]) == 0
    printed = capsys.readouterr().out
    assert "No run of this finding" not in printed and all(findings.tables(name) in printed for name in PLAN)
    page = (ROOT / "docs/explain/findings.md").read_text(encoding="utf-8")
    assert re.findall(r"^<!-- generated: finding (\w+) -->$", page, flags=re.MULTILINE) == list(PLAN)


def test_estimates_are_over_the_scored_cases_and_differences_over_pairs(findings: ModuleType) -> None:
    mean, error, number = findings.Estimate.of([1.0, None, 0.0, 1.0])
    assert (mean, number) == (pytest.approx(2 / 3), 3)
    assert error == pytest.approx((((1 / 3) ** 2 * 2 + (2 / 3) ** 2) / 2 / 3) ** 0.5)  # = 1/3
    assert findings.differences([1.0, None, 0.5], [0.25, 1.0, None]) == [0.75, None, None]
    assert findings.Estimate.of([None]) is None
    assert findings.cell(findings.Estimate.of([0.5])) == "0.500 (n = 1)"
    assert findings.cell([-0.25, 0.125, 4], sign="+") == "-0.250 ± 0.125"


def test_a_summary_is_made_of_the_finished_runs(findings: ModuleType, tmp_path: Any) -> None:
    finding = {
        "runs": {"a": {}, "unfinished": {}},
        "rows": {"x": ["first", "task", "m"], "y": ["second", "task", "n@4"]},
        "differences": {"first above second": ["x", "y"]},
    }
    run = {"options": {}, "versions": {"torch": "2"}, "weights": "w"}
    record = {
        "scores": {"task": {"m": [1.0, 0.0], "n@4": [0.0, None]}},
        "runs": [run],
        "failed": {},
        "commit": "c" * 40,
        "limit": None,
    }
    (tmp_path / "a.json").write_text(json.dumps(record), encoding="utf-8")
    summary = json.loads(json.dumps(findings.summarize(finding, tmp_path)))
    assert list(summary) == ["a"] and summary["a"]["rows"] == {"x": [0.5, 0.5, 2], "y": [0.0, None, 1]}
    text = findings.render(finding, summary)
    assert "| first | 0.500 ± 0.500 |" in text and "| first above second | +1.000 (n = 1) |" in text
    assert "Cases per cell: 1 to 2. Commits cccccccc; torch 2." in text


def test_a_summary_reads_what_a_run_writes(
    findings: ModuleType, tmp_path: Any, tiny_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = lm_eval.simple_evaluate

    def evaluate_quickly(metadata: dict[str, Any], **options: Any) -> Any:
        metadata = {**options["model_args"], **metadata}  # as lm-eval builds it
        manager = TaskManager(include_path=str(ROOT / "lm_eval_tasks"), include_defaults=False, metadata=metadata)
        return evaluate(task_manager=manager, **options)

    monkeypatch.setattr(lm_eval, "simple_evaluate", evaluate_quickly)
    options = {"mode": "none", "pretrained": str(tiny_path("llama")), "device": "cpu", "data": "mini", "store": "off"}
    findings.execute(tmp_path / "a.json", options, ["bake_es"], 2)
    finding = {"runs": {"a": {}}, "rows": {"x": ["first", "bake_es", "efficacy_prob"]}, "differences": {}}
    summary = findings.summarize(finding, tmp_path)["a"]
    assert summary["rows"]["x"].number == 2 and summary["options"]["mode"] == "none" and summary["versions"]["torch"]


def test_runs_without_any_edit_are_named(findings: ModuleType, tmp_path: Any) -> None:
    record = {"scores": {}, "failed": {"task": "no relation"}, "runs": [], "commit": None, "limit": None}
    (tmp_path / "a.json").write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(SystemExit, match="no relation"):
        findings.summarize({"runs": {"a": {}}, "rows": {}, "differences": {}}, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "x", "--findings", "nothing"], "--findings: no nothing; there are"),
        (["--out", "x", "--runs", "nothing"], "--runs: no nothing; there are"),
    ],
)
def test_options_that_do_nothing_are_errors(
    arguments: list[str], message: str, findings: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        findings.main(arguments)
    assert message in capsys.readouterr().err


def test_a_summary_keeps_the_runs_of_another_machine(findings: ModuleType) -> None:
    finding = {"runs": {"a": {}, "b": {}, "c": {}, "unfinished": {}}}
    merged = findings.merged(finding, {"gone": 0, "c": 1, "a": 1}, {"b": 2, "c": 2})
    assert list(merged.items()) == [("a", 1), ("b", 2), ("c", 2)]


def test_runs_are_compared_case_by_case(findings: ModuleType, tmp_path: Any) -> None:
    finding = {
        "runs": {"plain": {}, "better": {}},
        "rows": {"x": ["first", "task", "m"]},
        "differences": {},
        "against": {"better": "plain", "unfinished": "plain"},
    }
    run = {"options": {}, "versions": {}, "weights": "w"}
    for name, values in {"plain": [0.5, 0.25, None], "better": [0.75, 0.75, 1.0]}.items():
        record = {"scores": {"task": {"m": values}}, "runs": [run], "failed": {}, "commit": "c" * 40, "limit": None}
        (tmp_path / f"{name}.json").write_text(json.dumps(record), encoding="utf-8")
    summary = json.loads(json.dumps(findings.summarize(finding, tmp_path)))
    # Differences 0.25 and 0.5: mean 0.375, standard deviation sqrt(0.03125), error sqrt(0.03125 / 2) = 0.125.
    assert "| | `better` minus `plain` |\n|---|---|\n| first | +0.375 ± 0.125 |" in findings.render(finding, summary)
