"""BAKE's reverse questions and edit score, by hand."""

from __future__ import annotations

import json
import math

import pytest
from paths import RECORDS
from scripted import ScriptedLM, default_likelihood
from task_runs import build, from_nlls, metrics_of, run

from edit_hooks.deltas.context_edit import format_demonstration
from edit_hooks.prompt_context import fact_line
from edit_hooks.utils.errors import EditingError
from lm_eval_tasks.bake.benchmark import BAKE_J, BAKE_QJ
from lm_eval_tasks.bake.reversal import CATEGORIES, answer_category, judge_question, reversed_statement
from lm_eval_tasks.common.scoring.measures import Unscored
from lm_eval_tasks.common.scoring.primitives import harmonic_mean

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
    assert metrics_of(results, "bake_rj")["reverse_judgment_gen_yes"] == expected


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
    assert found["reverse_qa_prob"] == pytest.approx(1 / 3)
    assert (found["reverse_qa_prob_n"], found["reverse_qa_prob_excluded"], found["reverse_qa_prob@all_n"]) == (3, 1, 4)
    assert found["reverse_qa_prob@all"] == 0.5
    by_case = [math.exp(-1) - math.exp(-1.5), 0.0, math.exp(-1) - math.exp(-4), math.exp(-5) - math.exp(-1)]
    assert found["reverse_qa_magnitude@all"] == pytest.approx(sum(by_case) / 4)
    assert found["reverse_qa_magnitude"] == pytest.approx((by_case[0] + by_case[1] + by_case[3]) / 3)
    assert found["reverse_qa_prob_stderr"] == pytest.approx(1 / 3)  # values 1, 0, 0: sample variance 1/3, n = 3
    assert found["reverse_qa_gen_em"] == 0.25  # " Port Elna. Then" is right for the first case only


def test_each_protocol_filters_by_the_unedited_model_s_own_success() -> None:
    """Argmaxes (edited, unedited) per case; ids of the targets count up from 0, one per word."""
    argmaxes = {
        # right after the edit, nothing right before it: in both columns
        "Port Elna": ([0, 1], [7, 7]),
        # half right before the edit: known to _match only
        "Tilda Quorn": ([0, 1], [7, 1]),
        # all right before the edit: known to both
        "Ruk Dalen": ([0, 7], [0, 1]),
        # wrong before and half right after the edit
        "Fernhill Ltd": ([0, 7], [7, 7]),
    }

    def likelihoods(context: str, continuation: str, unedited: bool) -> tuple[float, list[int]]:
        target = continuation[1:]
        return -2.0, argmaxes[target][unedited] if target in argmaxes else list(range(len(target.split())))

    found = metrics_of(run("bake_rq", ScriptedLM(likelihoods)), "bake_rq")
    assert (found["reverse_qa_argmax@all"], found["reverse_qa_argmax@all_n"]) == (2 / 4, 4)
    assert (found["reverse_qa_argmax"], found["reverse_qa_argmax_n"], found["reverse_qa_argmax_excluded"]) == (
        2 / 3,
        3,
        1,
    )
    assert found["reverse_qa_match@all"] == pytest.approx((1 + 1 + 1 / 2 + 1 / 2) / 4)
    assert found["reverse_qa_match"] == pytest.approx((1 + 1 / 2) / 2)
    assert (found["reverse_qa_match_n"], found["reverse_qa_match_excluded"]) == (2, 2)


@pytest.mark.parametrize("task", ["bake_rq", "bake_rj", "bake_s"])
def test_an_unedited_model_scores_nothing_where_the_filter_applies(task: str) -> None:
    """Whatever the model answers: here the script differs from question to question, but not between the models."""
    found = metrics_of(run(task), task)
    scores = (
        "edit_score_reverse_prob",
        "edit_score_reverse_argmax",
        "edit_score_reverse_match",
        "edit_score_reverse_prob_agree",
    )
    if task != "bake_s":
        kind = {"bake_rq": "reverse_qa", "bake_rj": "reverse_judgment"}[task]
        scores = tuple(f"{kind}_{protocol}" for protocol in ("prob", "argmax", "match"))
    assert all(found[name] in (0.0, None) for name in scores)
    assert any(found[name] == 0.0 for name in scores)


def test_log_probabilities_of_both_subjects_by_hand() -> None:
    table = {
        # NLL per token (edited, unedited); the sums are -2.0 and -6.0 for the two words of Port Elna
        ("The capital of Dravonia is", "Port Elna"): (1.0, 3.0),
        ("The capital of Dravonia is", "Veldt"): (1.5, 0.5),
    }
    results = run("bake_rq", ScriptedLM(from_nlls(table)), samples={"bake_rq": [0, 1]})
    first, second = results["samples"]["bake_rq"]
    names = [f"reverse_qa_logprob_{name}" for name in ("new", "true", "new_unedited", "true_unedited")]
    assert [first[name] for name in names] == [-1.0, -1.5, -3.0, -0.5]
    assert [second[name] for name in names] == [-2.0] * 4  # the script's default
    found = metrics_of(results, "bake_rq")
    assert [found[name] for name in names] == [-1.5, -1.75, -2.5, -1.25]
    assert not any(f"{name}_or_0" in found for name in names)  # no shares of successes


def test_the_answer_is_in_the_prompt_of_the_task_that_says_so() -> None:
    prompt = "New Fact: The capital of Dravonia is Port Elna\nPrompt: The capital of Dravonia is"
    # the format is that of a demonstration, which ends with the answer
    fact = "The capital of Dravonia is", "Port Elna"
    demonstration = format_demonstration(fact_line(*fact), *fact)
    assert f"{prompt} Port Elna" == demonstration

    def likelihoods(context: str, continuation: str, unedited: bool) -> tuple[float, list[int]]:
        assert not unedited  # no filter: only the edited model is asked
        if context == prompt:
            return (-2.0, [0, 9]) if continuation == " Port Elna" else (-1.5, [9])
        return -1.0, [9] * len(continuation.split())

    task = "bake_rq_answer_in_prompt"
    found = metrics_of(run(task, ScriptedLM(likelihoods), samples={task: [0]}), task)
    # "Port Elna" has two tokens, of which the first is the argmax: NLL 1.0 against 1.5 for "Veldt"
    assert (found["reverse_qa_answer_in_prompt_match"], found["reverse_qa_answer_in_prompt_argmax"]) == (0.5, 0.0)
    assert found["reverse_qa_answer_in_prompt_prob"] == 1.0
    assert (
        found["reverse_qa_answer_in_prompt_logprob_new"] == -1.0
        and found["reverse_qa_answer_in_prompt_logprob_true"] == -1.5
    )
    assert not any(name.endswith("_unedited") for name in found)


def test_free_answers_to_the_leaking_question_have_categories() -> None:
    task = "bake_rq_answer_in_prompt"

    def answer(context: str, unedited: bool) -> str:
        assert context.startswith("New Fact: The capital of Dravonia is Port Elna\nPrompt: ") and not unedited
        return " Veldt"

    found = metrics_of(run(task, ScriptedLM(texts=answer), samples={task: [0]}), task)
    values = [found[f"reverse_qa_answer_in_prompt_gen_{name}"] for name in CATEGORIES]
    assert values == [0.0, 1.0, 0.0, 0.0] and found["reverse_qa_answer_in_prompt_gen_em"] == 0.0


@pytest.mark.parametrize(
    ("text", "category"),
    [
        (" Port Elna. The town of Veldt", "desired"),  # cut at its stop, before the original subject
        (" port elna, a harbor", "desired"),
        (" the old town of Veldt\nPort Elna", "original"),
        (" Veldt, not Port Elna", "ambiguous"),
        (" Veldtburg or Port Elnas", "other"),  # whole words only
        ("", "other"),
    ],
)
def test_a_free_answer_has_one_category(text: str, category: str) -> None:
    results = run("bake_rq", ScriptedLM(texts=lambda context, unedited: text), samples={"bake_rq": [0]})
    found = metrics_of(results, "bake_rq")
    values = {name: found[f"reverse_qa_gen_{name}"] for name in CATEGORIES}
    assert values == {**dict.fromkeys(CATEGORIES, 0.0), category: 1.0}
    assert all(found[f"reverse_qa_gen_{name}_n"] == 1 for name in CATEGORIES)


def test_categories_of_all_answers_add_up_to_one() -> None:
    answers = {
        "The capital of Dravonia is": " Veldt",
        "The author of The Amber Stair is": " Tilda Quorn and Bram Oske",
        "Asta Verrin is married to": " Ruk Dalen",
        "Inkwell was developed by": " a firm",
    }
    found = metrics_of(run("bake_rq", ScriptedLM(texts=lambda context, unedited: answers[context])), "bake_rq")
    assert [found[f"reverse_qa_gen_{name}"] for name in CATEGORIES] == [0.25, 0.25, 0.25, 0.25]


def test_a_subject_inside_the_other_is_ambiguous_and_one_without_words_is_unscored() -> None:
    assert answer_category("Paris Hilton", "Paris", "Paris Hilton") == "ambiguous"
    assert answer_category("Paris", "Paris", "Paris Hilton") == "desired"
    with pytest.raises(Unscored, match="no words"):
        answer_category("anything", "(!)", "Veldt")


# ------------------------------------------------------------------ edit score


def test_edit_score_by_hand() -> None:
    def likelihoods(context: str, continuation: str, unedited: bool) -> tuple[float, list[int]]:
        """New objects and subjects win after the edit, except that "no" always beats "yes"."""
        liked = {"Dravonia", "The Amber Stair", "Asta Verrin", "Inkwell", "Port Elna", "Tilda Quorn", "no"}
        num_tokens = len(continuation.split())
        return (-1.0 if continuation[1:] in liked and not unedited else -2.0) * num_tokens, list(range(num_tokens))

    found = metrics_of(run("bake_s", ScriptedLM(likelihoods)), "bake_s")
    # ES 100, GS 100, LS 0 (the new object also wins at the neighbors): S is 0 as soon as one factor is
    assert found["edit_score_reverse_prob"] == 0.0
    # argmax of the script is always the target: 100 everywhere
    assert (found["edit_score_reverse_argmax@all"], found["edit_score_reverse_match@all"]) == (1.0, 1.0)
    assert (found["edit_score_reverse_argmax"], found["edit_score_reverse_match"]) == (
        None,
        None,
    )  # the unedited one, too: no reverse question is left
    # ES 100, GS 100, agreement 100; RQS 50 (two of four subjects are preferred), RJS 0: RS 25
    assert found["edit_score_reverse_prob_agree"] == pytest.approx(4 / (1 + 1 + 1 + 1 / 0.25))
    assert (found["edit_score_reverse_prob_n"], found["unscored"]) == (4, 2)
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
    found = metrics_of(results, f"{prefix}_s")
    for name, protocol, locality in (
        ("prob@all", "prob@all", "prob"),
        ("prob_agree", "prob", "agree_tf"),
        ("argmax", "argmax", "argmax"),
        ("argmax@all", "argmax@all", "argmax"),
        ("match", "match", "agree_tf"),
        ("match@all", "match@all", "agree_tf"),
    ):
        forward = protocol.removesuffix("@all")
        factors = [
            parts["es"][f"efficacy_{forward}"],
            parts["gs"][f"paraphrase_{forward}"],
            parts["ls"][f"neighborhood_{locality}"],
        ]
        kinds = {"rq": "reverse_qa", "rj": "reverse_judgment"}
        reverse_scores = [parts[key][f"{kinds[key]}_{protocol}"] for key in reverse]
        if None in reverse_scores:  # the filter excludes all cases of one kind
            assert found[f"edit_score_reverse_{name}"] is None
            continue
        factors.append(sum(reverse_scores) / len(reverse))
        expected = harmonic_mean([round(100 * factor, 2) for factor in factors]) / 100
        assert found[f"edit_score_reverse_{name}"] == pytest.approx(expected, abs=1e-4)
