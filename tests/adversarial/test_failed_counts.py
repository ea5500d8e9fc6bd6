"""Failed cases are counted per metric, and a second column counts them as failures."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from record_files import invented_records, write_jsonl
from scripted import ScriptedLM
from task_runs import TASKS, build, metrics_of, run


class Diverged(ScriptedLM):
    """The log-likelihoods of two edited cases are not numbers."""

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
        answers = []
        for request, answer in zip(requests, super().loglikelihood(requests), strict=True):
            broken = request.doc["case_id"] in ("0", "2")
            final = dataclasses.replace(answer.final, logprob=math.nan) if broken else answer.final
            answers.append(dataclasses.replace(answer, final=final))
        return answers


def test_failures_are_counted_for_each_metric_and_as_zero() -> None:
    row = metrics_of(run("bake_es", lm=Diverged(), settings={"generate": False}), "bake_es")
    assert (row["efficacy_prob_n"], row["efficacy_prob_failed"], row["unscored"]) == (2, 2, 2)
    assert row["efficacy_prob_or_0"] == row["efficacy_prob"] * 2 / 4 and row["efficacy_prob_zeroed"] == 2
    assert row["efficacy_argmax_or_0"] == row["efficacy_argmax"] * 2 / 4
    assert "efficacy_magnitude_or_0" not in row and row["efficacy_magnitude_failed"] == 2, (
        "a magnitude is no share of successes"
    )


def test_exclusion_and_failure_are_told_apart() -> None:
    row = metrics_of(run("bake_rq", lm=Diverged(), settings={"generate": False}), "bake_rq")
    for metric in ("reverse_qa_prob", "reverse_qa_magnitude"):
        assert row[f"{metric}_n"] + row[f"{metric}_failed"] + row[f"{metric}_excluded"] == 4
    # of the two broken cases, the unedited model knows the answer of one: the filter excludes it
    assert (row["reverse_qa_prob_failed"], row["reverse_qa_prob@all_failed"]) == (1, 2)


def test_what_is_unknown_for_another_reason_is_no_zero(tmp_path: Any) -> None:
    records = invented_records("bake_qa.jsonl")
    records[0]["paraphrase_prompts"] = []
    data = str(write_jsonl(tmp_path / "records.jsonl", records))
    row = metrics_of(run("bake_gs", settings={"data": data, "generate": False}), "bake_gs")
    assert (row["paraphrase_prob_n"], row["paraphrase_prob_failed"]) == (
        2,
        2,
    )  # one of the invented records has none either
    assert row["paraphrase_prob_or_0"] == row["paraphrase_prob"] and row["paraphrase_prob_zeroed"] == 0


def test_columns_that_a_model_class_does_not_report_have_no_zero() -> None:
    class Stock(ScriptedLM):
        def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
            return [(answer.final.logprob, True) for answer in super().loglikelihood(requests)]

    row = metrics_of(run("bake_es", lm=Stock(), settings={"generate": False}), "bake_es")
    assert row["efficacy_prob_n"] == 0 and row["efficacy_prob_or_0"] is None
    assert row["efficacy_argmax_or_0"] == row["efficacy_argmax"] == 1.0


# Magnitudes, entropies, and what is no success of the edit: of the unedited model, or neither good nor bad.
VALUES = {"negation_shift", "fluency_entropy"}
VALUES |= {f"reverse_qa{prompt}_logprob_{target}" for prompt in ("", "_answer_in_prompt") for target in ("new", "true")}
VALUES |= {"consistency_own_idf", "truth_called_true", "revert_old_prob"}
VALUES |= {"multi_hop_cot_answered", "neighborhood_overlap"}
VALUES |= {"evk_es", "evk_es_subject", "evk_es_relation", "evk_es_all", "evk_ts"}
VALUE_ENDINGS = ("_unedited", "_change", "_magnitude", "_magnitude@all")


@pytest.mark.parametrize("task", TASKS)
def test_only_shares_of_successes_have_the_column(task: str) -> None:
    built = build(task)
    columns, directions = built.aggregation(), built.higher_is_better()
    for metric in built.config.metric_list:
        name = metric["metric"]
        is_value = name in VALUES or name.endswith(VALUE_ENDINGS)
        is_share = metric["aggregation"] == "mean_scored" and bool(directions[name]) and not is_value
        assert (f"{name}_or_0" in columns) == (f"{name}_zeroed" in columns) == is_share, name
        assert f"{name}_failed" in columns
