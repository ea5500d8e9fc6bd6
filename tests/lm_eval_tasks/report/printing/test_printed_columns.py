"""The printed table: at most eight columns per benchmark, in the order in which papers print them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from lm_eval.utils import make_table
from task_runs import TASKS, build, run

import lm_eval_editing_autoload  # noqa: F401  # extends make_table
from lm_eval_tasks.common.records.benchmark import all_benchmarks
from lm_eval_tasks.report.printing.printed_columns import MAX_COLUMNS, printed_columns

BENCHMARKS = sorted({benchmark.name for benchmark in all_benchmarks().values()})


def rows_of(results: dict[str, Any]) -> list[list[str]]:
    lines = [line for line in make_table(results).split("\n") if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]


def names(results: dict[str, Any]) -> list[str]:
    """The printed columns, without their numbers of cases."""
    return [row[4].partition(" ")[0] for row in rows_of(results)]


def saved_results(*tasks: str, **settings: Any) -> dict[str, Any]:
    """The parts of results that the table reads, every column with a value, of several tasks at once."""
    parts: dict[str, Any] = {key: {} for key in ("results", "configs", "versions", "n-shot", "higher_is_better")}
    parts |= {"n-samples": {}, "group_subtasks": {}}
    for task in tasks:
        built = build(task, **settings)
        listed = [metric["metric"] for metric in built.config.metric_list]
        config = built.dump_config()
        parts["results"][task] = {"alias": task, **{f"{name},none": 0.5 for name in listed}}
        parts["configs"][task], parts["higher_is_better"][task] = config, built.higher_is_better()
        parts["versions"][task], parts["n-shot"][task] = 1.0, 0
        parts["n-samples"][task] = {"original": 4, "effective": 4}
    return parts


@functools.cache
def benchmark_names() -> dict[str, str]:
    """Task -> the name of its benchmark."""
    return {task: str(build(task).benchmark.name) for task in TASKS}


def tasks_of(name: str) -> list[str]:
    return [task for task, of_task in benchmark_names().items() if of_task == name]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_has_at_most_eight_rows_in_the_order_of_its_papers(name: str) -> None:
    results = saved_results(*tasks_of(name))
    chosen = [one for columns in printed_columns(results).values() for one in columns]
    rows = rows_of(results)
    assert 0 < len(rows) == len(chosen) <= MAX_COLUMNS
    places = [
        one.place for task in dict.fromkeys(row[0] for row in rows if row[0]) for one in printed_columns(results)[task]
    ]
    assert places == sorted(places), "rows are in the order of the printed columns"


@pytest.mark.one_in(3)
@pytest.mark.parametrize("task", TASKS)
def test_a_task_alone_has_at_most_eight_rows_and_begins_with_its_printed_column(task: str) -> None:
    results = saved_results(task)
    declared = {metric["metric"]: metric.get("headline") for metric in build(task).config.metric_list}
    printed = names(results)
    assert 0 < len(printed) <= MAX_COLUMNS
    if places := [place for place in declared.values() if place is not None]:
        assert declared[printed[0]] == min(places)


@pytest.mark.parametrize(
    ("group", "printed"),
    [
        # BAKE, tables 3 and 9: S, ES, GS, LS, RQS, RJS
        (
            "bake_qj",
            "edit_score_reverse_prob efficacy_prob paraphrase_prob neighborhood_prob reverse_qa_prob "
            "reverse_judgment_prob",
        ),
        # ThinkEdit, table 5: IFR, CKP, efficacy, specificity; then the n-step values of its appendix
        (
            "knowgic_table5",
            "ifr_sampled ckp_sampled ifr_1_sampled ifr_2_sampled ifr_3_sampled ifr_5_sampled efficacy_prob "
            "neighborhood_prob",
        ),
        # WILD, tables 3 and 11: reliability, generalization, locality, over the population of the paper
        (
            "qaedit_wild",
            "efficacy_wild_em@wrong_em paraphrase_wild_em@wrong_em neighborhood_wild_agree_gen@wrong_em",
        ),
        # MQuAKE's tables
        ("mquake", "efficacy_argmax instance_wise_alias_exact multi_hop_alias_exact multi_hop_cot_alias_exact"),
        # MEMIT and EVK, ZsRE: efficacy, generalization, specificity
        ("zsre_memit", "efficacy_token_acc paraphrase_token_acc neighborhood_token_acc"),
    ],
)
def test_groups_print_the_columns_of_their_papers(group: str, printed: str) -> None:
    assert names(run(group)) == printed.split()


def test_all_columns_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    results = run("bake_rq")
    listed = [metric["metric"] for metric in build("bake_rq").config.metric_list]
    number = len(listed) - MAX_COLUMNS
    note = f"{number} further columns: --output_path DIR saves all of them, LM_EDIT_TABLE=all prints them."
    assert note in make_table(results).split("\n")
    monkeypatch.setenv("LM_EDIT_TABLE", "all")
    assert {*names(results)} == {*listed} and "LM_EDIT_TABLE" not in make_table(results)


def test_the_judge_takes_the_place_of_exact_match() -> None:
    results = saved_results("qaedit_wild_reliability", "qaedit_wild_generalization", population="wrong_em")
    assert "efficacy_wild_judge@wrong_em" in names(results) and "efficacy_wild_em" not in names(results)


def test_asked_cases_are_named_once() -> None:
    table = make_table(run("bake_qj", limit=2))
    assert table.count("--limit") == 1 and "2 of 4 cases of bake_es, bake_gs and 4 more" in table
