"""Promises that every task and every benchmark folder keeps, on invented records through lm-eval's own evaluator.

New tasks are tested here as soon as their YAML files exist.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from documented_columns import is_documented
from lm_eval.utils import handle_non_serializable
from paths import ROOT
from scripted import ScriptedLM, StockLM
from task_managers import task_manager
from task_runs import FOLDER, TASKS, benchmark_of, build, metrics_of, run

from edit_hooks.request import EditRequest
from edit_hooks.utils.storage.pinned_file import UrlFile

ALL_COLUMNS = {"population": "wrong_em"}  # off by default where it costs a generation

# Sections of the reference page of every benchmark; docs/templates/benchmark/README.md is the template.
SECTIONS = ["Tasks", "Protocols", "Settings", "Odd records", "Checklist", "Changelog"]
PAGES = ROOT / "docs/benchmarks"


GROUPS = sorted(
    path.stem.removeprefix("_") for path in FOLDER.glob("*/_*.yaml") if path.parent.name != "general_ability"
)


def path_of(task: str) -> Path:
    (path,) = FOLDER.glob(f"*/{task}.yaml")
    return path


# ------------------------------------------------------------------ documents and scores


@pytest.mark.parametrize("task", TASKS)
def test_documents_are_json_repeatable_and_carry_their_edit(task: str) -> None:
    docs = build(task).test_docs()
    assert json.loads(json.dumps(docs)) == docs == build(task).test_docs()
    assert len({doc["case_id"] for doc in docs}) == len(docs)
    for doc in docs:
        assert doc["edit_requests"]
        for request in doc["edit_requests"]:
            assert EditRequest.from_dict(request).to_dict() == request
        assert doc["probes"]
        for probe in doc["probes"]:
            texts = [probe["prompt"], *probe["targets"]]
            assert all(text and text == text.strip() for text in texts)
            assert probe["ask"] in ("edited", "unedited", "both")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("task", TASKS)
def test_recorded_generation_settings_are_those_of_a_question(task: str) -> None:
    """Unless a switch or a population of the task adds questions that follow its ``generation_kwargs``."""
    built = build(task)
    recorded = built.dump_config()
    assert ("decodings" in recorded) <= ("generation_kwargs" not in recorded)
    switches = ({}, {"generate": True}, {"population": "wrong_em"})
    docs = [doc for settings in switches for doc in build(task, **settings).test_docs()]
    generates = any(probe["generate"] for doc in docs for probe in doc["probes"])
    assert generates is (built.config.output_type == "generate_until")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("lm_class", [ScriptedLM, StockLM])
@pytest.mark.parametrize("task", TASKS)
def test_every_record_is_scored_or_has_a_reason(task: str, lm_class: type) -> None:
    results = run(task, lm_class(errors={"1": "no such layer"}), ALL_COLUMNS)
    found = metrics_of(results, task)
    samples = results["samples"][task]
    names = own_metrics(build(task, **ALL_COLUMNS))
    companions = ("_n", "_excluded", "_failed", "_zeroed", "_or_0", "_stderr")
    reported = {name for name in found if not name.endswith(companions)}
    assert reported == {*names, "unscored", "unscored_reason", "edit"}
    num_docs = found_docs = len(samples)
    assert num_docs == len(build(task).test_docs())
    for name in names:
        reasons = [sample["unscored_reason"][name] for sample in samples if name in sample["unscored_reason"]]
        scored = [sample[name] for sample in samples if sample[name] is not None]
        excluded = found.get(f"{name}_excluded", 0)
        assert found[f"{name}_n"] == len(scored)
        if not name.startswith("edit_score_"):  # S may have some components and reasons for the others
            assert found[f"{name}_failed"] == len(reasons)
            found_docs = found[f"{name}_n"] + excluded + len(reasons)
        assert found_docs == num_docs
    assert found["unscored"] == sum(bool(sample["unscored_reason"]) for sample in samples)
    if lm_class is ScriptedLM:  # whose edit of this case fails; texts of a stock model may be scored in every column
        assert "edit failed: no such layer" in set(samples[1]["unscored_reason"].values())
    counted = json.loads(found["unscored_reason"])
    assert counted == Counter(reason for sample in samples for reason in set(sample["unscored_reason"].values()))
    json.dumps({key: value for key, value in results.items() if key != "samples"}, allow_nan=False)
    json.dumps(samples, default=handle_non_serializable)
    assert len({tuple(sample["metrics"]) for sample in samples}) == 1  # the same keys for every document


def own_metrics(task: Any) -> list[str]:
    """The metrics that need no judge."""
    return [metric["metric"] for metric in task.config.metric_list if metric.get("from") != "judge"]


@pytest.mark.parametrize("task", TASKS)
def test_scorers_return_every_listed_metric(task: str) -> None:
    """No task may fail on a misspelled metric name after hours of editing."""
    built = build(task, **ALL_COLUMNS)
    doc = built.test_docs()[0]
    responses, docs = scripted_answers(built, doc)
    row = built.process_results(doc, built.pipelines[0].filters[0]().apply(responses, docs))
    assert responses and set(row) >= set(own_metrics(built))


def scripted_answers(task: Any, doc: dict[str, Any]) -> tuple[list[list[Any]], list[dict[str, Any]]]:
    """Responses and documents of one case, as a filter receives them."""
    requests = task.construct_requests(doc, ["x"] * len(doc["probes"]), metadata=(task.config.task, 0, 1))
    lm = ScriptedLM()
    responses = [getattr(lm, request.request_type)([request]) for request in requests]
    return responses, [request.doc for request in requests]


@pytest.mark.parametrize(
    ("task", "metric", "anchor"),
    [
        ("bake_ls", "neighborhood_agree_tf", 1.0),
        ("bake_ls", "neighborhood_agree_gen", 1.0),
        ("qaedit_syn_locality", "neighborhood_agree_tf", 1.0),
        ("qaedit_wild_locality", "neighborhood_wild_agree_gen", 1.0),
        ("bake_rq", "reverse_qa_prob", 0.0),
        ("bake_rj", "reverse_judgment_prob", 0.0),
        ("bake_s", "edit_score_reverse_prob", 0.0),
        ("bake_s", "edit_score_reverse_prob_agree", 0.0),
        ("bake_concept_ls", "neighborhood_agree_tf", 1.0),
        ("bake_concept_rj", "reverse_judgment_prob", 0.0),
        ("qaedit_wild_reliability", "efficacy_wild_em@wrong_em", 0.0),
    ],
)
def test_an_unedited_model_agrees_with_itself_and_knows_no_filtered_case(task: str, metric: str, anchor: float) -> None:
    assert metrics_of(run(task, settings=ALL_COLUMNS), task)[metric] == anchor


# ------------------------------------------------------------------ folders


def test_groups_list_existing_tasks_and_aggregate_nothing() -> None:
    members: dict[str, list[str]] = {}
    for path in FOLDER.glob("*/_*.yaml"):
        if not (path.parent / "benchmark.py").exists() and path.parent.name != "protocols":
            continue
        group = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert "aggregate_metric_list" not in group  # lm-eval can only average, and the metrics differ
        members[group["group"]] = group["task"]
        assert len(set(group["task"])) == len(group["task"])
    listed = {member for group in members.values() for member in group}
    # A task may be in the group of its benchmark and in those of published tables. The settings of qaedit_grid_cell
    # choose the protocol, so no group has it.
    assert (listed | {"qaedit_grid_cell"}) - members.keys() == set(TASKS)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("task", TASKS)
def test_a_chat_template_changes_prompts_and_no_column(task: str) -> None:
    """The answers are scripted by target and stop, so another prompt gives the same scores."""
    plain, chat = ScriptedLM(), ScriptedLM()
    without = run(task, plain, ALL_COLUMNS, limit=2)
    within = run(task, chat, ALL_COLUMNS, limit=2, apply_chat_template=True)
    assert metrics_of(within, task) == metrics_of(without, task)
    prompts = [[request.args[0] for request in lm.seen] for lm in (plain, chat)]
    assert len(prompts[0]) == len(prompts[1]) > 0
    assert all(bare in wrapped and bare != wrapped for bare, wrapped in zip(*prompts, strict=True))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("group", GROUPS)
def test_every_group_builds_its_tasks(group: str) -> None:
    path = next(FOLDER.glob(f"*/_{group}.yaml"))
    listed = set(yaml.safe_load(path.read_text(encoding="utf-8"))["task"])
    tasks = set(task_manager({"data": "mini"}).load([group])["tasks"])
    assert tasks <= set(TASKS) and (listed <= tasks or group == "questions")  # that is a group of groups


def test_lm_eval_validates_every_task_and_group(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its command only looks the names up; the other tests here build the tasks. Without lm-eval's own thousands."""
    from lm_eval._cli.harness import HarnessCLI

    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda **options: task_manager({}))
    monkeypatch.setattr("sys.argv", ["lm_eval", "validate", "--tasks", ",".join([*TASKS, *GROUPS])])
    cli = HarnessCLI()
    cli.execute(cli.parse_args())
    assert "All tasks found and valid" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["lm_eval", "validate", "--tasks", "bake_es,bake_ess"])
    with pytest.raises(SystemExit):
        cli.execute(cli.parse_args())


@pytest.mark.parametrize("task", TASKS)
def test_yaml_and_reference_page_agree(task: str) -> None:
    built = build(task)
    assert built.config.metadata["version"] == built.VERSION
    page = (PAGES / f"{path_of(task).parent.name}-details.md").read_text(encoding="utf-8")
    assert f"`{task}`" in page
    for metric in built.config.metric_list:
        name = metric.get("over", metric["metric"])  # columns over a population are described, not listed
        assert is_documented(name, page), name


@pytest.mark.parametrize("task", TASKS)
def test_a_task_is_named_after_its_benchmark_and_asks_its_cases(task: str) -> None:
    built = build(task)
    assert built.benchmark.name == benchmark_of(task).name
    published = built.benchmark.source.default_file
    assert built.config.dataset_path == (published.url if isinstance(published, UrlFile) else published.repository)
    assert len(built.test_docs()) == len(built.benchmark.load(built.config.metadata).records)


@pytest.mark.parametrize("folder", sorted({path_of(task).parent.name for task in TASKS}))
def test_a_folder_has_its_pages_and_a_row(folder: str) -> None:
    page, details, published = (
        (PAGES / f"{folder}{part}.md").read_text(encoding="utf-8") for part in ("", "-details", "-published")
    )
    assert [section for section in SECTIONS if f"\n## {section}\n" not in details] == []
    blocks = [f"<!-- generated: record {folder}/data/", f"<!-- generated: tasks {folder} -->"]
    for part in ("## What counts as right\n", "```bibtex", *blocks):
        assert part in page
    assert f"<!-- generated: published {folder} -->" in published
    assert f"../../docs/benchmarks/{folder}.md" in (FOLDER / folder / "README.md").read_text(encoding="utf-8")
    row = f"| [{folder}]({folder}.md) | family | what it measures | protocols | paper |"
    table = (PAGES / "index.md").read_text(encoding="utf-8")
    assert row.partition(" | family")[0] in table, f"docs/benchmarks/index.md has no row of this benchmark; add: {row}"
