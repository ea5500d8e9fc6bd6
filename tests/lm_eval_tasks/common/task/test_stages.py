"""Tasks in a stream of edits: stages, cases outside it, retention, diagnostics; by script and on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lm_eval.utils import handle_non_serializable, make_table
from scripted import RankedStreamLM, ScriptedLM, StockLM, StreamLM
from task_runs import RECORDS, TASKS, build, data_of, metrics_of, run, run_on_two_ranks

from edit_hooks.answers import IMMEDIATE, ScoredContinuation
from edit_hooks.utils.errors import EditingError
from lm_eval_tasks.common.scoring.columns import split_stage

STREAM = {"mode": "sequential", "checkpoints": "1;3", "retention": True}
# Cases 0, 1 and 3 are edited in this order, case 2 is not among the edits.
HOLDS = {"0": "100", "1": ".11", "3": "..0"}
TAKEN = {1: 0, 3: 2}


def in_stream(task: str, lm: Any = None, **settings: Any) -> dict[str, Any]:
    """The columns of a task after the stream above, or another one."""
    return metrics_of(run(task, lm or StreamLM(HOLDS, TAKEN, retention=True), STREAM | settings), task)


# ------------------------------------------------------------------ stages by hand


def test_final_immediate_and_checkpoint_scores_by_hand() -> None:
    found = in_stream("bake_es")
    for metric in ("efficacy_prob", "efficacy_argmax", "efficacy_match", "efficacy_gen_em"):
        assert (found[metric], found[f"{metric}_n"]) == (pytest.approx(1 / 3), 3)
        assert (found[f"{metric}@immediate"], found[f"{metric}@immediate_n"]) == (pytest.approx(2 / 3), 3)
        assert (found[f"{metric}@1"], found[f"{metric}@1_n"]) == (1.0, 1)
        assert (found[f"{metric}@3"], found[f"{metric}@3_n"]) == (pytest.approx(1 / 3), 3)
    assert found["efficacy_prob@immediate_stderr"] == pytest.approx(1 / 3)  # values 1, 1, 0: sample variance 1/3, n = 3
    assert found["efficacy_prob@1_stderr"] == "N/A"
    assert json.loads(found["unscored_reason"]) == {"not among this run's edits": 1}
    assert found["unscored"] == 1  # not yet edited at checkpoint 1 is no reason


def test_retention_is_the_triangular_matrix_with_its_summaries() -> None:
    found = in_stream("bake_es")
    assert json.loads(found["efficacy_prob@retention"]) == {
        "num_steps": 3,
        "diagonal_mean": 0.6667,
        "last_row_mean": 0.3333,
        "first_column": [1.0, 0.0, 0.0],
        "matrix": [[1.0], [0.0, 1.0], [0.0, 1.0, 0.0]],
    }
    assert found["efficacy_prob@retention_n"] == 3
    samples = run("bake_es", StreamLM(HOLDS, TAKEN, retention=True), STREAM)["samples"]["bake_es"]
    assert [sample["efficacy_prob@retention"] for sample in samples] == [
        {"step": 0, "values": [1.0, 0.0, 0.0]},
        {"step": 1, "values": [1.0, 1.0]},
        None,
        {"step": 2, "values": [0.0]},
    ]


def test_published_filters_use_the_one_unedited_answer_at_every_stage() -> None:
    found = in_stream("bake_rq", StreamLM(HOLDS, TAKEN, retention=True, known=("1",)))
    assert (found["reverse_qa_prob"], found["reverse_qa_prob_n"], found["reverse_qa_prob_excluded"]) == (0.0, 2, 1)
    assert (found["reverse_qa_prob@immediate"], found["reverse_qa_prob@immediate_excluded"]) == (0.5, 1)
    assert (found["reverse_qa_prob@1"], found["reverse_qa_prob@1_n"], found["reverse_qa_prob@1_excluded"]) == (
        1.0,
        1,
        0,
    )
    assert (found["reverse_qa_prob@3"], found["reverse_qa_prob@3_n"], found["reverse_qa_prob@3_excluded"]) == (
        0.0,
        2,
        1,
    )
    assert found["reverse_qa_prob@all@immediate"] == pytest.approx(2 / 3)
    retention = json.loads(found["reverse_qa_prob@retention"])
    assert retention["matrix"] == [[1.0], [0.0, None], [0.0, None, 0.0]]
    assert (retention["diagonal_mean"], retention["last_row_mean"]) == (0.5, 0.0)
    assert (found["reverse_qa_prob@retention_n"], found["reverse_qa_prob@retention_excluded"]) == (2, 1)


def test_agreement_compares_every_stage_with_the_unedited_model() -> None:
    """Case 0: unedited wrong, then right, then wrong again, so it agrees at the end only; case 1 never changes."""
    lm = StreamLM({"0": "10", "1": ".1"}, {1: 0}, known=("1",))
    found = in_stream("bake_ls", lm, checkpoints=1, retention=False)
    for metric in ("neighborhood_agree_tf", "neighborhood_agree_gen"):
        assert (found[metric], found[f"{metric}@immediate"], found[f"{metric}@1"]) == (1.0, 0.5, 0.0)


def test_the_edit_score_has_stages_too() -> None:
    found = in_stream("bake_s", StreamLM({"0": "10", "1": ".1"}, {1: 0}, retention=True), checkpoints=[1])
    assert (
        found["edit_score_reverse_prob"],
        found["edit_score_reverse_prob@immediate"],
        found["edit_score_reverse_prob@1"],
    ) == (0.5, 1.0, 1.0)
    assert (found["edit_score_reverse_prob_n"], found["edit_score_reverse_prob@1_n"]) == (2, 1)
    assert json.loads(found["edit_score_reverse_prob@retention"])["matrix"] == [[1.0], [0.0, 1.0]]


def test_a_checkpoint_inside_a_step_is_taken_after_it() -> None:
    lm = StreamLM({"0": "10", "1": "10", "2": ".1", "3": ".0"}, {2: 0, 3: 1}, batch_size=2)
    found = in_stream("bake_es", lm, edit_batch_size=2, checkpoints="2;3", retention=False)
    assert (found["efficacy_prob@2"], found["efficacy_prob@2_n"]) == (1.0, 2)
    assert (found["efficacy_prob@3"], found["efficacy_prob@3_n"]) == (0.25, 4)
    assert found["unscored"] == 0


def test_a_stopped_stream_is_unscored_where_an_edit_was_due() -> None:
    """Two of four edits were made: the others are unscored, and so is a checkpoint that was never reached."""
    lm = StreamLM({"0": "10", "1": ".1", "2": "..?", "3": "...?"}, {1: 0}, retention=True)
    results = run("bake_es", lm, STREAM)
    found = metrics_of(results, "bake_es")
    assert (found["efficacy_prob"], found["efficacy_prob_n"]) == (0.5, 2)
    assert (found["efficacy_prob@immediate"], found["efficacy_prob@immediate_n"]) == (1.0, 2)
    assert (found["efficacy_prob@1"], found["efficacy_prob@1_n"]) == (1.0, 1)
    assert (found["efficacy_prob@3"], found["efficacy_prob@3_n"]) == (None, 0)
    assert json.loads(found["efficacy_prob@retention"])["matrix"] == [[1.0], [0.0, 1.0]]
    failed, late = "edit failed: the guard stopped the stream", "the stream ended after 2 cases, before checkpoint 3"
    assert json.loads(found["unscored_reason"]) == {failed: 2, late: 2}
    first, _, third, fourth = (sample["unscored_reason"] for sample in results["samples"]["bake_es"])
    assert first == {
        f"{name}@3": late
        for name in ("efficacy_prob", "efficacy_magnitude", "efficacy_argmax", "efficacy_match", "efficacy_gen_em")
    }
    assert {"efficacy_prob", "efficacy_prob@immediate", "efficacy_prob@3", "efficacy_prob@retention"} < set(third)
    assert (
        "efficacy_prob@1" not in third and "efficacy_prob@3" not in fourth
    )  # those edits were not due at the checkpoint


def test_checkpoints_count_cases_where_a_case_has_several_edits() -> None:
    """Two cases of three edits each: six edits reach no checkpoint of three cases."""
    lm = StreamLM({"0": "10", "1": ".1", "2": "..?", "3": "...?"}, {1: 0}, num_edits=6)
    reasons = in_stream("bake_es", lm, retention=False)["unscored_reason"]
    assert json.loads(reasons)["the stream ended after 2 cases, before checkpoint 3"] == 2


# ------------------------------------------------------------------ cases outside the stream


def test_cases_outside_the_stream_can_be_scored_on_the_final_weights() -> None:
    lm = StreamLM(HOLDS, TAKEN, known=("2",))
    found = in_stream("bake_es", lm, score_unedited_cases="true", retention=False)
    assert (found["efficacy_prob"], found["efficacy_prob_n"], found["unscored"]) == (0.5, 4, 0)
    assert (found["efficacy_prob@immediate_n"], found["efficacy_prob@3_n"]) == (
        3,
        3,
    )  # they have no place in the stream's stages


def test_the_rule_for_cases_outside_the_stream_holds_in_batch_mode_and_for_agreement() -> None:
    lm = StreamLM({"0": "1"}, known=("1", "2", "3"))
    for task, metric, scored in (
        ("bake_es", "efficacy_prob", 1),
        ("qaedit_wild_locality", "neighborhood_wild_agree_gen", 1),
    ):
        found = metrics_of(run(task, lm, {"mode": "batch"}), task)
        assert found[f"{metric}_n"] == scored and not any(split_stage(name)[1] for name in found)
        found = metrics_of(run(task, lm, {"mode": "batch", "score_unedited_cases": True}), task)
        assert found[f"{metric}_n"] == 4


def test_being_outside_the_stream_comes_before_every_other_reason() -> None:
    found = in_stream("bake_gs")  # case 2 has no paraphrase either
    assert json.loads(found["unscored_reason"]) == {"not among this run's edits": 1}


def test_single_edits_are_never_outside() -> None:
    found = metrics_of(run("bake_es", settings={"mode": "single"}), "bake_es")
    assert found["efficacy_prob_n"] == 4 and not any(split_stage(name)[1] for name in found)


# ------------------------------------------------------------------ promises of every task

MIXED = {"0": "10", "1": "..?"}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("task", TASKS)
def test_every_case_is_scored_excluded_reasoned_or_not_yet_edited(task: str) -> None:
    settings = STREAM | {"population": "wrong_em"}
    results = run(task, StreamLM(MIXED, {1: 0}, retention=True), settings)
    found, samples = metrics_of(results, task), results["samples"][task]
    assert len({tuple(sample["metrics"]) for sample in samples}) == 1
    json.dumps({key: value for key, value in results.items() if key != "samples"}, allow_nan=False)
    json.dumps(samples, default=handle_non_serializable)
    built = build(task, **settings)
    for metric in built.config.metric_list:
        if metric.get("from") == "judge" or metric["metric"].startswith("s_"):
            continue  # S may have some components and reasons for the others
        for stage, concerned in (("", len(samples)), ("@immediate", 2), ("@1", 1), ("@3", 2), ("@retention", 2)):
            if stage == "@retention" and metric.get("filtered") == "not_counted":
                continue  # a test is scored after the steps that leave the edit in place, and has a reason after others
            name = metric["metric"] + stage
            reasons = sum(name in sample["unscored_reason"] for sample in samples)
            assert found[f"{name}_n"] + found.get(f"{name}_excluded", 0) + reasons == concerned, name
            assert name in built.aggregation()
            if stage != "@retention":
                assert built.higher_is_better().get(name) == built.higher_is_better()[metric["metric"]]


@pytest.mark.parametrize("task", ["bake_rq", "bake_s", "qaedit_wild_locality"])
def test_two_ranks_give_the_results_of_one(task: str) -> None:
    """One rank has the edited case 0 and one outside, the other the failed case 1 and one outside."""
    script: dict[str, Any] = {"holds": MIXED, "checkpoints": {1: 0}, "retention": True}
    together = run_on_two_ranks(task, RankedStreamLM, STREAM, **script)
    assert metrics_of(together, task) == metrics_of(run(task, StreamLM(**script), STREAM), task)


def test_models_without_stages_say_so() -> None:
    found = in_stream("bake_es", StockLM())
    assert (found["efficacy_argmax_n"], found["efficacy_argmax@immediate_n"], found["efficacy_argmax@1_n"]) == (4, 0, 0)
    assert "answers at stages of a stream; run with --model edited_hf" in found["unscored_reason"]
    assert found["efficacy_argmax@retention"] == "{}"
    found = in_stream("bake_es", StreamLM(HOLDS, {3: 2}), immediate=False)
    assert not any("@immediate" in name for name in found)
    assert found["efficacy_prob@1_n"] == 0 and "did not report its answers at stage '1'" in found["unscored_reason"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"checkpoints": "ten"}, "checkpoints="), ({"retention": "yes"}, "retention="), ({"immediate": 2}, "immediate=")],
)
def test_unreadable_settings_are_errors(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(EditingError, match=message):
        build("bake_es", **STREAM | settings)


# ------------------------------------------------------------------ diagnostics of edits


def test_samples_and_results_tell_about_the_edits() -> None:
    results = run("bake_es", StreamLM(HOLDS | {"2": "...?"}, TAKEN), STREAM | {"retention": False})
    samples = results["samples"]["bake_es"]
    assert samples[1]["edit"] == {"editor": "scripted", "step": 1, "num_edits": 2, "seconds": 0.5, "final_loss": 0.25}
    assert samples[2]["edit"] == {"error": "the guard stopped the stream"}
    assert json.loads(metrics_of(results, "bake_es")["edit"]) == {
        "edits": 3,
        "failed": 1,
        "final_loss": 0.25,
        "seconds_per_edit": 0.5,
    }
    outside = run("bake_es", StreamLM(HOLDS, TAKEN), STREAM)["samples"]["bake_es"][2]
    assert outside["edit"] is None


def test_without_edits_there_is_nothing_to_tell() -> None:
    results = run("bake_es", StockLM())
    assert metrics_of(results, "bake_es")["edit"] == "{}"
    assert all(sample["edit"] is None for sample in results["samples"]["bake_es"])
    failed = run("bake_es", ScriptedLM(errors=dict.fromkeys("0123", "no such layer")))
    assert json.loads(metrics_of(failed, "bake_es")["edit"]) == {"edits": 0, "failed": 4}


def test_the_printed_table_stays_readable() -> None:
    marks = {str(case): "." * case + "1" * (400 - case) for case in range(4)}
    lm = StreamLM(marks, {1: 0, 3: 2}, retention=True, num_edits=400)
    table = make_table(run("bake_es", lm, STREAM))
    (row,) = (line for line in table.splitlines() if "|efficacy_prob@immediate " in line)
    assert "↑" in row and max(map(len, table.splitlines())) < 700  # 400 steps do not print 80,000 numbers


# ------------------------------------------------------------------ a real model


def prefers_new(answer: ScoredContinuation, other: ScoredContinuation) -> float:
    """`efficacy_prob` of a case, written out."""
    return float(answer.logprob / len(answer.token_ids) > other.logprob / len(other.token_ids))


def test_columns_agree_with_values_recomputed_from_the_samples(tiny_path: Callable[..., Path]) -> None:
    from edit_hooks.lm.model import EditedHFLM

    options = {"mode": "sequential", "edits": "bake", "data": str(RECORDS / "bake_qa.jsonl"), "num_edits": 3}
    stages = {"checkpoints": "1;3", "retention": True}
    arguments = {"context_templates": ["{}", "Then they said. {}"], "num_steps": 6}
    lm = EditedHFLM(
        pretrained=str(tiny_path("llama")), device="cpu", store="off", editor_args=arguments, **options, **stages
    )
    results = run("bake_es", lm, options | stages | {"data": data_of("bake")}, bootstrap_iters=0)
    found, samples = metrics_of(results, "bake_es"), results["samples"]["bake_es"]
    answers = [(sample["resps"][0][0], sample["resps"][1][0]) for sample in samples[:3]]

    def mean(values: list[float]) -> Any:
        return pytest.approx(sum(values) / len(values))

    assert found["efficacy_prob"] == mean([prefers_new(new.final, true.final) for new, true in answers])
    immediate = [prefers_new(new.stages[IMMEDIATE], true.stages[IMMEDIATE]) for new, true in answers]
    assert found["efficacy_prob@immediate"] == mean(immediate)
    first_new, first_true = answers[0]
    assert found["efficacy_prob@1"] == prefers_new(first_new.stages["1"], first_true.stages["1"])
    assert found["efficacy_prob@3"] == found["efficacy_prob"]
    assert [found[f"efficacy_prob{stage}_n"] for stage in ("", "@immediate", "@1", "@3", "@retention")] == [
        3,
        3,
        1,
        3,
        3,
    ]
    rows = [
        [prefers_new(answers[column][0].stages[row], answers[column][1].stages[row]) for column in range(row + 1)]
        for row in range(3)
    ]
    retention = json.loads(found["efficacy_prob@retention"])
    assert retention["matrix"] == rows and retention["first_column"] == [row[0] for row in rows]
    assert retention["last_row_mean"] == pytest.approx(sum(rows[2]) / 3, abs=1e-4)
    magnitudes = json.loads(found["efficacy_magnitude@retention"])["matrix"]
    assert magnitudes[0] != [row[0] for row in magnitudes[1:2]]  # later edits move the first one's probability
    assert json.loads(found["unscored_reason"]) == {"not among this run's edits": 1}
    summary = json.loads(found["edit"])
    assert (summary["edits"], summary["failed"]) == (3, 0)
    losses = [sample["edit"]["final_loss"] for sample in samples[:3]]
    assert summary["final_loss"] == pytest.approx(sum(losses) / 3, rel=0.01)
    assert {"steps", "update_norm_ratio", "seconds_per_edit"} < set(summary)
