"""Every task renders and scores small invented records without a network, through lm-eval's own evaluator."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import pytest
import yaml
from lm_eval.api.instance import Instance
from lm_eval.utils import handle_non_serializable
from scripted import ScriptedLM, StockLM, default_likelihood
from task_runs import FOLDER, TASKS, build, from_nlls, metrics_of, run

from edit_hooks.request import EditRequest


@pytest.fixture(autouse=True)
def no_environment_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """`simple_evaluate` describes the machine by a dozen subprocesses, which no test here is about."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
    monkeypatch.setattr("lm_eval.evaluator.get_git_commit_hash", lambda: None)


# ------------------------------------------------------------------ promises of every task


@pytest.mark.parametrize("task", TASKS)
def test_documents_are_json_repeatable_and_carry_their_edit(task: str) -> None:
    docs = build(task).test_docs()
    assert json.loads(json.dumps(docs)) == docs == build(task).test_docs()
    assert len({doc["case_id"] for doc in docs}) == len(docs)
    for doc in docs:
        (request,) = doc["edit_requests"]
        assert EditRequest.from_dict(request).to_dict() == request
        assert isinstance(doc["ask_unedited"], bool)
        assert doc["probes"]
        for probe in doc["probes"]:
            texts = [probe["prompt"], *probe["targets"]]
            assert all(text and text == text.strip() for text in texts)


@pytest.mark.parametrize("lm_class", [ScriptedLM, StockLM])
@pytest.mark.parametrize("task", TASKS)
def test_every_record_is_scored_or_has_a_reason(task: str, lm_class: type) -> None:
    settings = {"initially_wrong": True} if task.startswith("qaedit") else {}
    results = run(task, lm_class(errors={"1": "no such layer"}), settings)
    found = metrics_of(results, task)
    samples = results["samples"][task]
    names = [metric["metric"] for metric in build(task, **settings).config.metric_list if metric.get("from") != "judge"]
    reported = {name for name in found if not name.endswith(("_n", "_excluded", "_stderr"))}
    assert reported == {*names, "unscored", "unscored_reason", "edit"}
    num_docs = found_docs = len(samples)
    assert num_docs == len(build(task).test_docs())
    for name in names:
        reasons = [sample["unscored_reason"][name] for sample in samples if name in sample["unscored_reason"]]
        scored = [sample[name] for sample in samples if sample[name] is not None]
        excluded = found.get(f"{name}_excluded", 0)
        assert found[f"{name}_n"] == len(scored)
        if not name.startswith("s_"):  # S may have some components and reasons for the others
            found_docs = found[f"{name}_n"] + excluded + len(reasons)
        assert found_docs == num_docs
    assert found["unscored"] == sum(bool(sample["unscored_reason"]) for sample in samples)
    assert samples[1]["unscored_reason"]
    if lm_class is ScriptedLM:
        assert "edit failed: no such layer" in set(samples[1]["unscored_reason"].values())
    counted = json.loads(found["unscored_reason"])
    assert counted == Counter(reason for sample in samples for reason in set(sample["unscored_reason"].values()))
    json.dumps({key: value for key, value in results.items() if key != "samples"}, allow_nan=False)
    json.dumps(samples, default=handle_non_serializable)
    assert len({tuple(sample["metrics"]) for sample in samples}) == 1  # the same keys for every document


@pytest.mark.parametrize("task", TASKS)
def test_scorers_return_every_listed_metric(task: str) -> None:
    """No task may fail on a misspelt metric name after hours of editing."""
    built = build(task, **({"initially_wrong": True} if "syn" in task else {}))
    doc = built.test_docs()[0]
    num_requests = len(built.construct_requests(doc, ["x"] * len(doc["probes"]), metadata=(task, 0, 1)))
    row = built.process_results(doc, built._filters[0].filters[0]().apply(*scripted_answers(built, doc)))
    assert num_requests > 0 and set(row) >= {metric["metric"] for metric in built.config.metric_list} - {
        metric["metric"] for metric in built.config.metric_list if metric.get("from") == "judge"
    }


def scripted_answers(task: Any, doc: dict[str, Any]) -> tuple[list[list[Any]], list[dict[str, Any]]]:
    """Responses and documents of one case, as a filter receives them."""
    requests = task.construct_requests(doc, ["x"] * len(doc["probes"]), metadata=(task.config.task, 0, 1))
    lm = ScriptedLM()
    responses = [getattr(lm, request.request_type)([request]) for request in requests]
    return responses, [request.doc for request in requests]


@pytest.mark.parametrize("task", ["bake_rq", "bake_s", "qaedit_wild_reliability"])
def test_the_unedited_model_gives_the_anchors(task: str) -> None:
    """Edited = unedited: agreement is 1, and the published filter leaves RQS and RJS at exactly 0."""
    results = run(task, settings={"initially_wrong": True})
    found = metrics_of(results, task)
    if task == "bake_rq":
        assert found["rqs_prob"] == 0.0 and found["rqs_prob_n"] + found["rqs_prob_excluded"] == 4
    elif task == "bake_s":
        assert found["s_prob"] == 0.0 and found["s_prob_all"] > 0
    else:
        assert found["reliability_wild_em_initially_wrong"] == 0.0
    for task, metric in (
        ("bake_ls", "ls_agree_tf"),
        ("bake_ls", "ls_agree_gen"),
        ("qaedit_syn_locality", "locality_syn_agree_tf"),
        ("qaedit_wild_locality", "locality_wild_agree_gen"),
    ):
        assert metrics_of(run(task), task)[metric] == 1.0


# ------------------------------------------------------------------ values computed by hand


def test_bake_reverse_questions_by_hand() -> None:
    table = {
        # per token, not in total: "Port Elna" has log-probability -2.0, "Veldt" -1.5
        ("The capital of Dravonia is", "Port Elna"): (1.0, 3.0),
        ("The capital of Dravonia is", "Veldt"): (1.5, 1.0),
        # a tie: a failure after the edit, and before it no reason to leave the case out
        ("The author of The Amber Stair is", "Tilda Quorn"): (2.0, 2.0),
        ("The author of The Amber Stair is", "Bram Oske"): (2.0, 2.0),
        # known before the edit: left out by the published filter
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


def test_bake_paraphrases_are_averaged_within_a_case_first() -> None:
    table = {
        ("Port Elna, the seat of the government of", "Dravonia"): (1.0, 1.0),
        ("Port Elna serves as capital city of", "Dravonia"): (3.0, 3.0),
        ("The book written by Tilda Quorn is", "The Amber Stair"): (1.0, 1.0),
        ("The product made by Fernhill Ltd is", "Inkwell"): (1.0, 1.0),
    }
    results = run("bake_gs", ScriptedLM(from_nlls(table)))
    found = metrics_of(results, "bake_gs")
    assert found["gs_prob"] == pytest.approx((0.5 + 1 + 1) / 3)  # over prompts it would be 3/4
    assert (found["gs_prob_n"], found["unscored"]) == (3, 1)
    assert json.loads(found["unscored_reason"]) == {"the record has no paraphrase prompts": 1}
    assert results["samples"]["bake_gs"][2]["gs_prob"] is None


def test_bake_locality_wants_the_true_object() -> None:
    prompt = "The parliament of Port Elna belongs to"
    table = {(prompt, "Ostmark"): (1.0, 1.0), (prompt, "Dravonia"): (2.0, 2.0)}

    def texts(context: str, unedited: bool) -> str:
        return " Ostmark." if unedited or context == prompt else " Dravonia."

    found = metrics_of(run("bake_ls", ScriptedLM(from_nlls(table), texts)), "bake_ls")
    assert found["ls_prob"] == pytest.approx((0.5 + 0 + 0) / 3)
    assert found["ls_agree_gen"] == pytest.approx((0.5 + 0 + 0) / 3)
    assert found["ls_agree_tf"] == 1.0  # the script's argmax is the gold answer before and after
    assert (found["ls_prob_n"], found["unscored"]) == (3, 1)


def test_bake_match_and_argmax_differ_by_partial_credit() -> None:
    def likelihoods(context: str, continuation: str, unedited: bool) -> tuple[float, list[int]]:
        argmax = list(range(len(continuation.split())))
        return -1.0, [*argmax[:-1], 99] if "Amber" in continuation else argmax

    found = metrics_of(run("bake_es", ScriptedLM(likelihoods)), "bake_es")
    assert found["es_argmax"] == 0.75
    assert found["es_match"] == pytest.approx((1 + 2 / 3 + 1 + 1) / 4)


def test_bake_edit_score_by_hand() -> None:
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


def test_edit_score_equals_the_harmonic_mean_of_the_other_tasks() -> None:
    from lm_eval_tasks.common.scoring import harmonic_mean

    def shifted(context: str, continuation: str, unedited: bool) -> tuple[float, list[int]]:
        """Edited and unedited model differ, or the filter would leave nothing for RQS and RJS to succeed at."""
        return default_likelihood(context + ("?" if unedited else ""), continuation, unedited)

    for group, reverse in (("bake_qj", ("rq", "rj")), ("bake_j", ("rj",))):
        prefix = group.removesuffix("_qj")
        results = run(group, ScriptedLM(shifted), {"generate": False})
        parts = {key: metrics_of(results, f"{prefix}_{key}") for key in ("es", "gs", "ls", *reverse)}
        for protocol, locality in (("prob_all", "prob"), ("argmax", "argmax"), ("match", "agree_tf")):
            forward = protocol.removesuffix("_all")
            factors = [parts["es"][f"es_{forward}"], parts["gs"][f"gs_{forward}"], parts["ls"][f"ls_{locality}"]]
            factors.append(sum(parts[key][f"{key}s_{protocol}"] for key in reverse) / len(reverse))
            expected = harmonic_mean([round(100 * factor, 2) for factor in factors]) / 100
            assert metrics_of(results, f"{prefix}_s")[f"s_{protocol}"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("text", "expected"), [(" Yes, it is", 1.0), ("\nYes", 0.0), (" No. Yes", 0.0), (" Yesterday", 0.0), ("", 0.0)]
)
def test_judge_question_by_free_generation(text: str, expected: float) -> None:
    results = run("bake_rj", ScriptedLM(texts=lambda context, unedited: text))
    assert metrics_of(results, "bake_rj")["rjs_gen_yes"] == expected


def test_judge_template_and_options_are_recorded() -> None:
    results = run("bake_rj", settings={"judge_template": "true"})
    doc = results["samples"]["bake_rj"][0]["doc"]
    assert (doc["judge_template"], doc["judge_options"]) == ("true", ["yes, it is true", "no, it is false"])
    assert results["configs"]["bake_rj"]["metadata"]["judge_template"] == "true"


def test_wild_by_hand() -> None:
    gold = {
        "Who designed the Fenwick aqueduct?": " Orsa Lind. She",
        "In which city was the painter Jo Marsh born?": " St. Brannock",  # the stop rule cuts "St"
        "Which mark closes the third stanza of Pim's Ode?": ")",  # a gold answer without words is never matched
        "What year did the Halden tram start running?": " 1911\nQ:",
    }

    def texts(context: str, unedited: bool) -> str:
        head, question, tail = context.partition("Q: ")[0], *context.partition("Q: ")[2].split("\n")
        assert (head, tail) == ("Please answer the question:\n\n", "A:")
        return " 1911." if unedited else gold[question]

    found = metrics_of(run("qaedit_wild_reliability", ScriptedLM(texts=texts)), "qaedit_wild_reliability")
    assert found["reliability_wild_em"] == 0.5
    # the last question was answered rightly before the edit
    assert found["reliability_wild_em_initially_wrong"] == pytest.approx(1 / 3)
    assert found["reliability_wild_em_initially_wrong_n"] == 3
    assert found["reliability_wild_em_initially_wrong_excluded"] == 1


@pytest.mark.parametrize(
    ("context", "prompt"),
    [
        ("qa_inst", "Please answer the question:\n\nQ: who founded the Orrin press\nA:"),
        ("qa_inst_single_newline", "Please answer the question:\nQ: who founded the Orrin press\nA:"),
        ("question_only", "who founded the Orrin press"),
    ],
)
def test_wild_contexts(context: str, prompt: str) -> None:
    doc = build("qaedit_wild_locality", wild_context=context).test_docs()[3]
    assert doc["probes"][0]["prompt"] == prompt
    assert doc["probes"][0]["question"] == "who founded the Orrin press"


def test_wild_locality_compares_all_tokens_and_reports_empty_pairs() -> None:
    def texts(context: str, unedited: bool) -> str:
        if "river" in context:
            return "\n"  # both models say nothing: they agree
        return " 1874. Same start" if "canal" in context and unedited else " 1874. Other end"

    found = metrics_of(run("qaedit_wild_locality", ScriptedLM(texts=texts)), "qaedit_wild_locality")
    assert found["locality_wild_agree_gen"] == 0.75
    assert found["locality_wild_both_empty"] == 0.25


def test_synthetic_by_hand() -> None:
    def likelihoods(context: str, continuation: str, unedited: bool) -> tuple[float, list[int]]:
        assert not context.startswith("Please")
        argmax = list(range(len(continuation.split())))
        return -1.0, [*argmax[:-1], 99] if unedited or "Orsa" in continuation else argmax

    lm = ScriptedLM(likelihoods)
    found = metrics_of(run("qaedit_syn_reliability", lm), "qaedit_syn_reliability")
    assert found["reliability_syn"] == pytest.approx((0.5 + 1 + 1 + 1) / 4)
    assert not any(request.request_type == "generate_until" for request in lm.seen)
    found = metrics_of(run("qaedit_syn_locality", lm), "qaedit_syn_locality")
    assert found["locality_syn_agree_tf"] == pytest.approx((0 + 0.5 + 0.5 + 0.5) / 4)


# ------------------------------------------------------------------ folders


def test_groups_list_existing_tasks_and_aggregate_nothing() -> None:
    listed = []
    for path in FOLDER.glob("*/_*.yaml"):
        group = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert "aggregate_metric_list" not in group  # lm-eval can only average, and the metrics differ
        listed += group["task"]
    assert sorted(listed) == TASKS


@pytest.mark.parametrize("task", TASKS)
def test_yaml_and_readme_agree(task: str) -> None:
    built = build(task)
    assert built.config.metadata["version"] == built.VERSION
    folder = FOLDER / task.split("_")[0]
    readme = (folder / "README.md").read_text(encoding="utf-8")
    assert f"`{task}`" in readme
    for metric in built.config.metric_list:
        assert f"`{metric['metric']}" in readme, metric["metric"]
    assert f"[{folder.name}]({folder.name}/README.md)" in (FOLDER / "README.md").read_text(encoding="utf-8")


def test_a_placeholder_request_is_never_scored() -> None:
    """A case without probes needs one request for lm-eval's sake; no metric may read its answer."""
    lm = ScriptedLM(from_nlls({}))
    results = run("bake_gs", lm, samples={"bake_gs": [2]})
    assert [request.request_type for request in lm.seen] == ["loglikelihood", "generate_until"]
    assert isinstance(lm.seen[0], Instance) and lm.seen[0].doc["asked"]["kind"] == "placeholder"
    found = metrics_of(results, "bake_gs")
    assert (found["gs_prob_n"], found["gs_gen_em_n"], found["unscored"]) == (0, 0, 1)
