"""Arrows stand where an editor can move a column, and the printed clauses name the filter that excluded cases."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from lm_eval.utils import make_table
from result_files import scripted_results
from scripted import ScriptedLM
from task_runs import TASKS, build, run

from lm_eval_tasks.common.scoring.columns import TOTALS
from lm_eval_tasks.common.scoring.metric_list import CLAUSES


def edited_by(number: int, answers: dict[str, list[str]]) -> ScriptedLM:
    """A model that answers at random, every other question right; the unedited model is the same for all numbers.

    Args:
        answers: prompt -> gold answer, then other answers.
    """

    def drawn(text: str, unedited: bool) -> random.Random:
        return random.Random(f"{0 if unedited else number} {text}")

    def likelihood(context: str, continuation: str, unedited: bool) -> tuple[float, list[int]]:
        draw, num_tokens = drawn(context + continuation, unedited), len(continuation.split())
        wrong = draw.randrange(2)
        return -num_tokens * draw.random(), [
            index + (wrong if unedited else draw.randrange(2)) for index in range(num_tokens)
        ]

    def text(context: str, unedited: bool) -> str:
        draw = drawn(context, unedited)
        own = answers[context]
        answer = draw.choice([own[0], own[0], draw.choice(own), f"{own[0]} or {own[-1]}"])
        plain = f" {answer}."
        return draw.choice([plain, plain, f" {answer} or so.", f" Yes, {answer}.", f" So.\nAnswer: {answer}"])

    return ScriptedLM(likelihood, text)


def movable(task: str) -> Iterator[str]:
    """The columns of a task whose value differs between edited models that share their unedited one."""
    answers = {
        probe["prompt"]: [probe["gold"], *probe["targets"], *doc.get("old_answers", ())]
        for doc in build(task).test_docs()
        for probe in doc["probes"]
    }
    runs = [run(task, edited_by(number, answers))["samples"][task] for number in range(1, 25)]
    for metric in build(task).config.metric_list:
        name = metric["metric"]
        if len({str([sample.get(name) for sample in samples]) for samples in runs}) > 1:
            yield name


@pytest.mark.parametrize("task", ["bake_rq", "bake_truth", "mquake_multi_hop", "mquake_instance_wise", "knowgic_prob"])
def test_what_no_edit_moves_has_no_arrow(task: str) -> None:
    directions = build(task).higher_is_better()
    moved = {*movable(task)}
    for metric in build(task).config.metric_list:
        name = metric["metric"]
        if metric.get("model") == "unedited":
            assert name not in moved and directions[name] is None, name
        elif name not in moved and metric.get("aggregation") not in TOTALS and directions[name] is not None:
            pytest.fail(f"{name} has an arrow, and no edited model moved it")


@pytest.mark.parametrize("task", TASKS)
def test_columns_of_the_unedited_model_are_declared_as_such(task: str) -> None:
    for metric in build(task).config.metric_list:
        is_declared = metric.get("model") == "unedited"
        assert metric["metric"].partition("@")[0].endswith("_unedited") <= is_declared, metric
        assert not is_declared or metric["higher_is_better"] is None


def test_the_reason_of_an_exclusion_is_that_of_the_metric() -> None:
    """BAKE's published filter is that of likelihoods; its match ratio has one of ours, WILD's columns a population."""
    results = scripted_results("bake_rq")
    declared = {metric["metric"]: metric for metric in results["configs"]["bake_rq"]["metric_list"]}
    for name, count in (("reverse_qa_prob", 1), ("reverse_qa_match", 2)):
        assert declared[name]["filtered"] in CLAUSES
        results["results"]["bake_rq"][f"{name}_excluded,none"] = count
    table = make_table(results)
    assert "1 of 4 cases excluded by the published filter from reverse_qa_prob" in table
    assert "2 of 4 cases excluded from reverse_qa_match: the unedited model has that answer already" in table
    wild = run("qaedit_wild_reliability", settings={"population": "wrong_em"})
    wild["results"]["qaedit_wild_reliability"]["efficacy_wild_em@wrong_em_excluded,none"] = 3
    table = make_table(wild)
    assert "published" not in table and "3 of 4 cases outside the population of efficacy_wild_em@wrong_em" in table


@pytest.mark.parametrize("task", TASKS)
def test_every_filter_is_named(task: str) -> None:
    filters = {metric.get("filtered") for metric in build(task, population="wrong_em").config.metric_list}
    assert filters - {None} <= CLAUSES.keys()


def test_the_unedited_value_beside_an_ordinary_task_has_no_arrow() -> None:
    from lm_eval_tasks.report.unedited_columns import _declare

    results: dict[str, Any] = {"higher_is_better": {"arc": {"acc": True}}}
    _declare(results, "arc", "acc")
    assert results["higher_is_better"]["arc"] == {"acc": True, "acc@unedited": None, "acc@difference": True}
