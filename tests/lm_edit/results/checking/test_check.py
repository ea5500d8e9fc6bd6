"""Checks of result files and their samples."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from result_files import change, write_run

from edit_hooks.utils.errors import EditingError
from lm_edit import load_cases, load_results
from lm_edit.results.checking.check import check_results
from lm_edit.results.checking.merge import merge_results


def problems(path: Path) -> list[str]:
    return [problem.text for problem in check_results(path).problems]


def set_metric(name: str, value: Any) -> Any:
    def set_in(content: dict[str, Any]) -> None:
        content["results"]["bake_es"][f"{name},none"] = value

    return set_in


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The result file of a run without problems."""
    return write_run(tmp_path)


def test_good_files_have_no_problem(path: Path) -> None:
    assert check_results(path.parent)[:3] == (1, [], 0)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("efficacy_prob", math.nan, "value is nan"),
        ("efficacy_prob", math.inf, "value is inf"),
        ("efficacy_prob", 1.5, "1.5 is no share"),
        ("efficacy_prob", 0.123, "the result is 0.123, but the mean of the samples is"),
        ("efficacy_prob_n", 5, "5 cases are counted, but 4 were asked"),
        ("efficacy_prob_failed", 1, "5 cases are counted"),
        ("efficacy_prob", None, "4 scored cases, but no value"),
    ],
)
def test_wrong_numbers_are_found(path: Path, name: str, value: Any, words: str) -> None:
    change(path, set_metric(name, value))
    assert any(words in text for text in problems(path)), problems(path)


@pytest.mark.parametrize("cut", [1, 100, 10_000])
def test_truncated_result_files(path: Path, cut: int) -> None:
    path.write_text(path.read_text(encoding="utf-8")[:-cut], encoding="utf-8")
    (text,) = problems(path)
    assert "not valid JSON" in text and "lm-edit sweep ... --retry" in text
    with pytest.raises(EditingError, match="not valid JSON"):
        load_results(path)


def samples_of(path: Path) -> Path:
    (samples,) = path.parent.glob("samples_*.jsonl")
    return samples


def edited_lines(path: Path, edit: Any) -> None:
    samples = samples_of(path)
    lines = samples.read_text(encoding="utf-8").split("\n")[:-1]
    samples.write_text("\n".join(edit(lines)) + "\n", encoding="utf-8")


def test_truncated_samples_name_the_line(path: Path) -> None:
    samples = samples_of(path)
    samples.write_text(samples.read_text(encoding="utf-8")[:-50], encoding="utf-8")
    assert any("line 4" in text and "not valid JSON" in text for text in problems(path))


def test_changed_scores_in_samples_are_found(path: Path) -> None:
    """The hashes cover documents and prompts, so scores are compared with the result."""

    def flip(lines: list[str]) -> list[str]:
        row = json.loads(lines[0])
        return [json.dumps(row | {"efficacy_prob": 1 - row["efficacy_prob"]}), *lines[1:]]

    edited_lines(path, flip)
    assert any("but the mean of the samples is" in text for text in problems(path))


def test_missing_samples_are_an_error_unless_allowed(tmp_path: Path) -> None:
    path = write_run(tmp_path, samples=False)
    assert problems(path) == [] and len(load_results(path))
    with pytest.raises(EditingError, match="no samples of bake_es beside it; run lm_eval with --log_samples"):
        load_cases(path)
    cases = load_cases(path, require_samples=False)
    assert cases.empty and cases.attrs["without_samples"] == [{"file": str(path), "task": "bake_es"}]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[]", "not a result file"),
        ("{}", "results is missing"),
        ('{"results": {}}', "configs is missing"),
        ("null", "not a result file"),
        ("x", "not valid JSON"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_other_files(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "results_2026.json"
    path.write_text(content, encoding="utf-8")
    assert words in problems(path)[0]
    with pytest.raises(EditingError):
        load_results(path)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda content: content["configs"].update(bake_es=[]), "not a result file"),
        (lambda content: content["results"].update(bake_es=[]), "not a result file"),
        (lambda content: content["config"].update(edited_hf="x"), "not a result file"),
        (lambda content: content["config"]["edited_hf"].pop("mode"), "not a result file"),
        (lambda content: content["configs"]["bake_es"].update(metric_list=3), "not a result file"),
        (lambda content: content["configs"]["bake_es"].update(metadata=[1]), "not a result file"),
        (lambda content: content["n-samples"].update(bake_es=3), "not a result file"),
    ],
)
def test_broken_structures_are_one_message(path: Path, make: Any, words: str) -> None:
    change(path, make)
    assert words in problems(path)[0]
    with pytest.raises(EditingError, match=words):
        load_results(path)


def test_folders_without_results(tmp_path: Path) -> None:
    with pytest.raises(EditingError, match=r"no results_\*\.json in .*--output_path"):
        check_results(tmp_path)
    with pytest.raises(EditingError, match="there is no file or folder"):
        load_results(tmp_path / "missing")


def test_merging_keeps_the_newest_result_of_each_task(tmp_path: Path) -> None:
    write_run(tmp_path / "old", "bake_es", start=1.0e9)
    new = write_run(tmp_path / "new", "bake_es", start=1.1e9, date="2026-11-22T10-00-00.000001")
    write_run(tmp_path / "gs", "bake_gs", start=1.2e9, date="2026-11-23T10-00-00.000001")
    write_run(tmp_path / "other", editor="rome")
    paths = [tmp_path / name for name in ("old", "new", "gs", "other")]
    merged = merge_results(paths, tmp_path / "merged")
    assert len([file for file in merged if file.name.startswith("results_")]) == 2
    assert check_results(tmp_path / "merged")[:3] == (2, [], 0)
    place = ["run", "task", "metric", "stage", "filter"]
    values = [*place, "value", "n", "failed", "protocol", "data_hash"]
    before = load_results(paths)[values].sort_values(place).reset_index(drop=True)
    after = load_results(tmp_path / "merged")[values].sort_values(place).reset_index(drop=True)
    assert before.equals(after)
    assert len(load_cases(tmp_path / "merged")) == len(load_cases([new, tmp_path / "gs", tmp_path / "other"]))
    with pytest.raises(EditingError, match="is not empty"):
        merge_results(paths, tmp_path / "merged")


def test_merging_separates_what_was_asked_with_different_chat_templates(tmp_path: Path) -> None:
    """A file names one template for all of its tasks."""
    chat = write_run(tmp_path / "runs/es", "bake_es", start=1.0e9)
    change(chat, lambda content: content.update(chat_template_sha="c0ffee" * 10, system_instruction_sha="bead" * 16))
    write_run(tmp_path / "runs/gs", "bake_gs", start=1.1e9, date="2026-11-22T10-00-00.000001")
    merged = merge_results(tmp_path / "runs", tmp_path / "merged")
    assert len([file for file in merged if file.name.startswith("results_")]) == 2
    rows = [load_results(tmp_path / name).groupby("task")["protocol"] for name in ("runs", "merged")]
    before, after = (tasks.agg(["first", "nunique"]) for tasks in rows)
    assert before.equals(after) and after["nunique"].eq(1).all()
    assert after["first"].str.contains("chat template c0ffee").to_dict() == {"bake_es": True, "bake_gs": False}
    assert check_results(tmp_path / "merged").problems == []


def test_the_mean_of_a_group_is_dropped_where_a_member_has_a_newer_result(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def add_group(content: dict[str, Any]) -> None:
        content["results"] |= {name: {"alias": name, "acc,none": 0.5} for name in ("all", "part", "alone", "mmlu")}
        content["group_subtasks"] = {"all": ["part"], "part": ["bake_es", "mmlu"], "alone": ["mmlu"]}
        content["n-samples"]["mmlu"] = {"original": 10, "effective": 10}
        content["configs"]["mmlu"], content["versions"]["mmlu"] = {"task": "mmlu"}, 1

    change(write_run(tmp_path / "runs/old", start=1.0e9), add_group)
    assert set(load_results(tmp_path)["task"]) == {"all", "part", "alone", "bake_es", "mmlu"}
    new = write_run(tmp_path / "runs/new", start=1.1e9, date="2026-11-22T10-00-00.000001")
    assert "all" in set(load_results(tmp_path)["task"]), "the same numbers again"
    change(new, lambda content: content["results"]["bake_es"].update({"efficacy_prob,none": 0.75}))
    caplog.clear()
    assert set(load_results(tmp_path)["task"]) == {"alone", "bake_es", "mmlu"}
    warned = [record.getMessage() for record in caplog.records]
    assert any("all is left out" in text and "other results of bake_es" in text for text in warned)
    merge_results(tmp_path / "runs", tmp_path / "merged")
    assert set(load_results(tmp_path / "merged")["task"]) == {"alone", "bake_es", "mmlu"}


def test_merging_refuses_what_one_file_cannot_hold(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    path = write_run(tmp_path / "b")
    change(path, lambda content: content["versions"].update(bake_es=99))
    with pytest.raises(EditingError, match="different results of bake_es in one run"):
        merge_results(tmp_path, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
