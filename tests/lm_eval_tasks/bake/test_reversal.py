"""BAKE's reverse questions and edit score, by hand."""

from __future__ import annotations

import json
import math

import pytest
from paths import RECORDS
from scripted import ScriptedLM, default_likelihood
from task_runs import build, from_nlls, metrics_of, run

from edit_hooks.utils.errors import EditingError
from lm_eval_tasks.bake.benchmark import BAKE_J, BAKE_QJ
from lm_eval_tasks.bake.reversal import judge_question, reversed_statement
from lm_eval_tasks.common.scoring import harmonic_mean

# ------------------------------------------------------------------ judge question


@pytest.mark.parametrize(
    ("template", "prompt", "options"),
    [
        ("raw", "Whether the capital of Dravonia is Port Elna?", ("yes", "no")),
        (
            "correct",
            "The capital of Dravonia is Port Elna, is the information described in this sentence correct?",
            ("yes, it is true", "no, it is false"),
        ),
        (
            "true",
            "The capital of Dravonia is Port Elna, is the information described in this sentence true?",
            ("yes, it is true", "no, it is false"),
        ),
    ],
)
def test_judge_templates(template: str, prompt: str, options: tuple[str, str]) -> None:
    case = BAKE_QJ.load({"data": str(RECORDS / "bake_qa.jsonl")}).records[0]
    assert judge_question(case, template) == (prompt, *options)


def test_statement_without_a_reverse_question() -> None:
    case = BAKE_J.load({"data": str(RECORDS / "bake_judge.json")}).records[1]
    assert reversed_statement(case) == "Curling is the sport played by Ina Holt"
    # no space before the statement, as published
    assert "wrong:Curling is the sport played by Ina Holt. Is" in judge_question(case, "instruction").prompt


def test_template_and_options_are_recorded() -> None:
    results = run("bake_rj", settings={"judge_template": "true"})
    doc = results["samples"]["bake_rj"][0]["doc"]
    assert (doc["judge_template"], doc["judge_options"]) == ("true", ["yes, it is true", "no, it is false"])
    assert results["configs"]["bake_rj"]["metadata"]["judge_template"] == "true"
    with pytest.raises(EditingError, match=r"judge_template='corect' is unknown\. Did you mean 'correct'"):
        build("bake_rj", judge_template="corect")


@pytest.mark.parametrize(
    ("text", "expected"), [(" Yes, it is", 1.0), ("\nYes", 0.0), (" No. Yes", 0.0), (" Yesterday", 0.0), ("", 0.0)]
)
def test_judge_question_by_free_generation(text: str, expected: float) -> None:
    results = run("bake_rj", ScriptedLM(texts=lambda context, unedited: text))
    assert metrics_of(results, "bake_rj")["rjs_gen_yes"] == expected


# ------------------------------------------------------------------ reverse questions


def test_reverse_questions_by_hand() -> None:
    table = {
        # per token, not in total: "Port Elna" has log-probability -2.0, "Veldt" -1.5
        ("The capital of Dravonia is", "Port Elna"): (1.0, 3.0),
        ("The capital of Dravonia is", "Veldt"): (1.5, 1.0),
        # a tie: a failure after the edit, and before it no reason to exclude the case
        ("The author of The Amber Stair is", "Tilda Quorn"): (2.0, 2.0),
        ("The author of The Amber Stair is", "Bram Oske"): (2.0, 2.0),
        # known before the edit: excluded by the published filter
        ("Asta Verrin is married to", "Ruk Dalen"): (1.0, 1.0),
        ("Asta Verrin is married to", "Ivo Verrin"): (4.0, 2.0),
        ("Inkwell was developed by", "Fernhill Ltd"): (5.0, 5.0),
        ("Inkwell was developed by", "Northlight"): (1.0, 1.0),
    }
    found = metrics_of(run("bake_rq", ScriptedLM(from_nlls(table))), "bake_rq")
    assert found["rqs_prob"] == pytest.approx(1 / 3)
    assert (found["rqs_prob_n"], found["rqs_prob_excluded"], found["rqs_prob_all_n"]) == (3, 1, 4)
    assert found["rqs_prob_all"] == 0.5
    by_case = [math.exp(-1) - math.exp(-1.5), 0.0, math.exp(-1) - math.exp(-4), math.exp(-5) - math.exp(-1)]
    assert found["rqm_prob_all"] == pytest.approx(sum(by_case) / 4)
    assert found["rqm_prob"] == pytest.approx((by_case[0] + by_case[1] + by_case[3]) / 3)
    assert found["rqs_prob_stderr"] == pytest.approx(1 / 3)  # values 1, 0, 0: sample variance 1/3, n = 3
    assert found["rqs_gen_em"] == 0.25  # " Port Elna. Then" is right for the first case only


# ------------------------------------------------------------------ edit score


def test_edit_score_by_hand() -> None:
    def likelihoods(context: str, continuation: str, unedited: bool) -> tuple[float, list[int]]:
        """New objects and subjects win after the edit, except that "no" always beats "yes"."""
        liked = {"Dravonia", "The Amber Stair", "Asta Verrin", "Inkwell", "Port Elna", "Tilda Quorn", "no"}
        num_tokens = len(continuation.split())
        return (-1.0 if continuation[1:] in liked and not unedited else -2.0) * num_tokens, list(range(num_tokens))

    found = metrics_of(run("bake_s", ScriptedLM(likelihoods)), "bake_s")
    # ES 100, GS 100, LS 0 (the new object also wins at the neighbors): S is 0 as soon as one factor is
    assert found["s_prob"] == 0.0
    # argmax of the script is always the target: 100 everywhere
    assert (found["s_argmax"], found["s_match"]) == (1.0, 1.0)
    assert (found["s_prob_n"], found["unscored"]) == (4, 2)
    assert set(json.loads(found["unscored_reason"])) == {
        "the record has no paraphrase prompts",
        "the record has no neighborhood prompts",
    }


@pytest.mark.parametrize(("group", "reverse"), [("bake_qj", ("rq", "rj")), ("bake_j", ("rj",))])
def test_edit_score_equals_the_harmonic_mean_of_the_other_tasks(group: str, reverse: tuple[str, ...]) -> None:
    def shifted(context: str, continuation: str, unedited: bool) -> tuple[float, list[int]]:
        """Edited and unedited model differ, or the filter would leave nothing for RQS and RJS to succeed at."""
        return default_likelihood(context + ("?" if unedited else ""), continuation, unedited)

    prefix = group.removesuffix("_qj")
    results = run(group, ScriptedLM(shifted), {"generate": False})
    parts = {key: metrics_of(results, f"{prefix}_{key}") for key in ("es", "gs", "ls", *reverse)}
    for protocol, locality in (("prob_all", "prob"), ("argmax", "argmax"), ("match", "agree_tf")):
        forward = protocol.removesuffix("_all")
        factors = [parts["es"][f"es_{forward}"], parts["gs"][f"gs_{forward}"], parts["ls"][f"ls_{locality}"]]
        factors.append(sum(parts[key][f"{key}s_{protocol}"] for key in reverse) / len(reverse))
        expected = harmonic_mean([round(100 * factor, 2) for factor in factors]) / 100
        assert metrics_of(results, f"{prefix}_s")[f"s_{protocol}"] == pytest.approx(expected, abs=1e-4)
