"""`compare_unedited=true`: lm-eval's own tasks on the edited and the unedited model in one run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.metrics import mean
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import make_table
from lm_runs import build, instance
from ordinary_tasks import run_tasks, write_tasks
from paths import RECORDS

import lm_eval_editing_autoload
from edit_hooks import EditingError
from edit_hooks.contract.tiny_models import save_tiny
from lm_eval_tasks.report.unedited_columns import paired_stderr

lm_eval_editing_autoload.install()  # as the .pth file does in an installed environment

DATA = {"data": str(RECORDS / "bake_qa.jsonl")}
ALL = ["tiny_group", "tiny_text", "tiny_perplexity", "tiny_macro"]
LEAVES = ["tiny_choice", "tiny_other_choice", "tiny_text", "tiny_perplexity", "tiny_macro"]
STRONG = {"editor": "ft_m", "editor_args": {"layers": [1], "num_steps": 20, "lr": 0.5}}
STREAM = {"mode": "sequential", "edits": "bake", "num_edits": 2, **DATA}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("tiny"), "llama"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def compared(model_path, folder, tmp_path_factory) -> dict[str, Any]:
    lm = build(model_path, tmp_path_factory.mktemp("run"), **STRONG, **STREAM, compare_unedited=True)
    return run_tasks(lm, folder, [*ALL, "bake_es"], DATA)


def numbers(results: dict[str, Any], task: str) -> dict[str, Any]:
    return {key.removesuffix(",none"): value for key, value in results["results"][task].items() if "," in key}


def test_both_columns_are_those_of_separate_runs(compared, model_path, folder) -> None:
    edited = run_tasks(build(model_path, **STRONG, **STREAM), folder, ALL, DATA)
    plain = run_tasks(build(model_path, mode="none"), folder, ALL, DATA)
    moved = 0
    for task in [*LEAVES, "tiny_group"]:
        both, one, other = (numbers(results, task) for results in (compared, edited, plain))
        for metric, value in one.items():
            if metric.endswith("_stderr") or value is None:
                continue
            assert both[metric] == value and both[f"{metric}@unedited"] == other[metric], (task, metric)
            assert both[f"{metric}@difference"] == value - other[metric]
            moved += value != other[metric]
    assert moved >= 2  # the edits are strong enough to tell the two apart
    assert compared["groups"]["tiny_group"] == compared["results"]["tiny_group"]


def test_the_error_of_a_mean_is_that_of_the_paired_differences(compared) -> None:
    for task in ("tiny_choice", "tiny_other_choice"):
        samples = compared["samples"][task]
        differences = [sample["acc"] - sample["unedited"]["acc"] for sample in samples]
        center = sum(differences) / 5
        expected = math.sqrt(sum((one - center) ** 2 for one in differences) / 4 / 5)
        assert numbers(compared, task)["acc@difference_stderr"] == pytest.approx(expected)
    # lm-eval's pooled error of two tasks with five documents each
    errors = [numbers(compared, task)["acc@difference_stderr"] for task in ("tiny_choice", "tiny_other_choice")]
    pooled = math.sqrt(sum(4 * 5 * error**2 for error in errors) / (10 - 2)) / math.sqrt(10)
    assert numbers(compared, "tiny_group")["acc@difference_stderr"] == pytest.approx(pooled)


def test_what_cannot_be_compared_is_named(compared, caplog) -> None:
    comparison = compared["unedited_comparison"]
    assert sorted(comparison["tasks"]) == sorted(LEAVES)
    assert comparison["not_compared"] == {"tiny_macro: missing": "it has no value on the edited model."}
    assert not any("@unedited" in key or "@difference" in key for key in compared["results"]["bake_es"])


def test_the_table_shows_direction_and_error_of_the_new_columns(compared) -> None:
    lines = [line for line in make_table(compared).splitlines() if "acc@difference" in line]
    assert len(lines) == 3 and all("↑" in line and "±" in line for line in lines)


# ------------------------------------------------------------------ anchors


@pytest.mark.parametrize(
    "options",
    [{"mode": "none"}, {**STREAM, "editor": "ft_m", "editor_args": {"layers": [1], "num_steps": 1, "lr": 1e-30}}],
)
def test_without_an_effect_every_difference_is_exactly_0(model_path, folder, options) -> None:
    results = run_tasks(build(model_path, **options, compare_unedited=True), folder, LEAVES, DATA)
    found = [
        value
        for task in LEAVES
        for name, value in numbers(results, task).items()
        if "@difference" in name and value != "N/A"
    ]
    assert len(found) == 10 and set(found) == {0.0}


def test_few_shot_prompts_are_those_of_the_first_pass(compared) -> None:
    """Sampled again, the demonstrations of the second pass would be others."""
    for sample in compared["samples"]["tiny_choice"]:
        assert sample["unedited"]["prompt_hash"] == sample["prompt_hash"]
        assert sample["unedited"]["resps"] != sample["resps"]


# ------------------------------------------------------------------ store


def test_the_store_answers_for_the_unedited_model_in_later_runs(model_path, folder, tmp_path, monkeypatch) -> None:
    asked = ["tiny_other_choice", "tiny_text", "tiny_perplexity"]
    passes: list[int] = []
    forward = HFLM._model_call
    monkeypatch.setattr(HFLM, "_model_call", lambda *args, **kw: passes.append(1) or forward(*args, **kw))

    def run_and_count(store: Path | None) -> tuple[list[dict[str, Any]], int]:
        passes.clear()
        lm = build(model_path, store, mode="none", compare_unedited=True)
        results = run_tasks(lm, folder, asked, DATA)
        return [numbers(results, task) for task in asked], len(passes)

    first, asked_twice = run_and_count(tmp_path)
    again, asked_once = run_and_count(tmp_path)
    assert first == again and asked_twice == 2 * asked_once > 0
    assert run_and_count(None) == (first, asked_twice)  # without a store both models are asked


# ------------------------------------------------------------------ failures and mistakes


def test_a_task_whose_scorer_fails_on_unedited_answers_is_named(model_path, folder, monkeypatch) -> None:
    lm = build(model_path, mode="none", compare_unedited=True)
    from lm_eval.api.task import ConfigurableTask

    process = ConfigurableTask.process_results

    def fail_unedited(task: Any, doc: Any, results: Any) -> Any:
        if task.config.task == "tiny_choice" and lm._unedited_stock.is_asked:
            raise ValueError("a scorer that does not like this answer")
        return process(task, doc, results)

    monkeypatch.setattr(ConfigurableTask, "process_results", fail_unedited)
    results = run_tasks(lm, folder, ["tiny_group", "tiny_text"], DATA)
    comparison = results["unedited_comparison"]
    assert comparison["not_compared"] == {"tiny_choice": "ValueError: a scorer that does not like this answer"}
    assert sorted(comparison["tasks"]) == ["tiny_other_choice", "tiny_text"]
    assert "acc,none" in results["results"]["tiny_choice"]  # the edited column is there
    assert "acc@difference,none" not in results["results"]["tiny_group"]  # a part of it is not the group


@pytest.mark.parametrize("options", [{}, {"mode": "batch", "edits": "bake", "group_size": 2, **DATA}])
def test_edits_of_single_cases_have_no_edited_model_to_compare(model_path, options) -> None:
    with pytest.raises(EditingError, match="each case or group has its own edits"):
        build(model_path, compare_unedited=True, **options)


GROUPS = {"mode": "batch", "edits": "bake", "group_size": 2, **DATA}


@pytest.mark.parametrize("task", ["tiny_choice", "tiny_text", "tiny_perplexity", "editglue_sst2"])
def test_groups_of_edits_refuse_ordinary_tasks_before_a_weight_is_loaded(model_path, folder, task) -> None:
    lm = build(model_path, **GROUPS)
    with pytest.raises(EditingError, match=f"group_size=2 .* no edited model to ask tasks without edits: {task}[.]"):
        run_tasks(lm, folder, ["bake_es", task], {"data": "mini"} if task == "editglue_sst2" else DATA)
    assert lm._model is None
    with pytest.raises(EditingError, match="tasks without edits: test"):  # without lm-eval's evaluate
        lm.loglikelihood([instance({}, "Port Elna is", " in")])
    assert lm._model is None and "bake_es" in run_tasks(lm, folder, ["bake_es"], DATA, limit=2)["results"]


def test_single_edits_say_once_who_answers_ordinary_tasks(model_path, folder, caplog) -> None:
    text = "tasks without edits are answered by the unedited model"
    run_tasks(build(model_path), folder, ["bake_es"], DATA, limit=1)
    run_tasks(build(model_path, mode="none"), folder, ["tiny_choice"], DATA, limit=1)
    assert text not in caplog.text
    run_tasks(build(model_path), folder, ["bake_es", "tiny_choice", "tiny_text"], DATA, limit=1)
    assert caplog.text.count(text) == 1 and f"{text}: tiny_choice, tiny_text." in caplog.text


def test_a_run_without_ordinary_tasks_says_so(model_path, folder, caplog) -> None:
    run_tasks(build(model_path, mode="none", compare_unedited=True), folder, ["bake_es"], DATA)
    assert "compare_unedited=True has no effect: no task without edits was evaluated" in caplog.text


def test_samples_are_dropped_where_the_user_wants_none(model_path, folder) -> None:
    lm = build(model_path, mode="none", compare_unedited=True)
    results = run_tasks(lm, folder, ["tiny_choice"], DATA, log_samples=False)
    assert "samples" not in results and "acc@difference,none" in results["results"]["tiny_choice"]


# ------------------------------------------------------------------ paired errors by hand


def test_paired_error_of_a_mean_by_hand() -> None:
    # Differences 1, 0, 0, -1: mean 0, squares 1 + 0 + 0 + 1 = 2, 2 / 3 / 4 = 1/6.
    pairs = [(1, 0), (1, 1), (0, 0), (0, 1)]
    assert paired_stderr(pairs, mean) == pytest.approx(math.sqrt(1 / 6))
    assert paired_stderr([(1, 1), (0, 0)], mean) == 0.0
    assert paired_stderr([(1, 0)], mean) == "N/A"


def test_the_jackknife_of_a_mean_is_the_paired_error() -> None:
    pairs = [(1, 0), (1, 1), (0, 0), (0, 1)]

    def own_mean(values: Any) -> float:
        return sum(values) / len(values)

    # Without one pair: (1+0-1)... sums of differences 0 - d, over 3: -1/3, 0, 0, 1/3; (3/4) * (2/9) = 1/6.
    assert paired_stderr(pairs, own_mean) == pytest.approx(math.sqrt(1 / 6))


def test_the_jackknife_of_a_product_by_hand() -> None:
    # max(edited) - max(unedited): all 4 - 3 = 1; without 1st 4 - 3 = 1, without 2nd 2 - 3 = -1, without 3rd 4 - 2 = 2.
    pairs = [(1, 1), (4, 2), (2, 3)]
    # mean 2/3, squares (1/3)^2 + (5/3)^2 + (4/3)^2 = 42/9, times 2/3 = 28/9.
    assert paired_stderr(pairs, max) == pytest.approx(math.sqrt(28 / 9))


def test_an_aggregation_without_a_value_has_no_error() -> None:
    assert paired_stderr([(1, 1), (2, 2)], lambda values: None) == "N/A"
