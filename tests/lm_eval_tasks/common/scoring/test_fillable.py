"""Columns that no record of the loaded data can fill are left out before anything is asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lm_eval.utils import make_table
from result_files import scripted_results, write_run
from task_runs import build, metrics_of, run

from lm_edit.judged_results.replay import SavedTask, build_task, task_files
from lm_edit.results.files.runs import read_result_file
from lm_eval_tasks.common.fillable import LEFT_OUT, unfillable
from lm_eval_tasks.common.scoring.measures import ComponentMeasure, Excluded, Unscored


def names_of(task: str, **settings: Any) -> list[str]:
    return [metric["metric"] for metric in build(task, **settings).config.metric_list]


def chains_file(folder: Path, *lengths: int) -> str:
    """A record of KnowGIC's earlier layout with one chain of each length."""

    def hops(steps: int) -> dict[str, list[str]]:
        people = ["Pell Arden", *(f"Person {number}" for number in range(1, steps)), "Northgate"]
        return {
            "questions": [f"Who follows {one}?" for one in people[:-1]],
            "answers": people[1:],
            "prompts": ["{} is followed by"] * steps,
            "subjects": people[:-1],
        }

    record = {
        "case_id": 0,
        "requested_rewrite": [
            {
                "prompt": "{} studied at",
                "subject": "Pell Arden",
                "target_new": {"str": "Southmere"},
                "target_true": {"str": "Northgate"},
            }
        ],
        "chains": [hops(steps) for steps in lengths],
        "broader_context": hops(1) | {"subjects": ["Ivo Lunt"], "questions": ["Who follows Ivo Lunt?"]},
    }
    path = folder / "chains.json"
    path.write_text(json.dumps([record]), encoding="utf-8")
    return str(path)


def test_lengths_that_no_chain_has_are_left_out_with_their_counts(tmp_path: Path) -> None:
    data = chains_file(tmp_path, 1, 3, 7)
    task = build("knowgic", data=data)
    lengths = {name.split("_")[1] for name in names_of("knowgic", data=data) if name.startswith("ifr_")}
    assert {"1", "3", "longer"} <= lengths and not {"2", "4", "5"} & lengths
    left_out = task.config.metadata["data_source"][LEFT_OUT]
    assert "ifr_2_sampled" in left_out and "ifr_2_active_after_sampled" in left_out
    assert not {*left_out} & {name.partition("_or_0")[0] for name in task.aggregation()}
    # Of a published length every edit with direct chains has some: one to three steps.
    assert [f"deep_edited_{steps}_sampled" in names_of("knowgic", data=data) for steps in range(1, 6)] == [True] * 5


def test_no_case_is_unscored_for_chains_that_it_lacks() -> None:
    """The invented records have chains of one, two, three and five steps, and no edit has all of these."""
    found = metrics_of(run("knowgic_prob"), "knowgic_prob")
    assert "of length" not in found["unscored_reason"] and "steps" not in found["unscored_reason"]
    assert found["ifr_1_prob_failed"] == 0 and found["ifr_1_prob_excluded"] > 0
    assert found["ifr_1_prob_n"] + found["ifr_1_prob_excluded"] == found["ifr_prob_n"]


def test_facts_without_old_answers_have_no_comparison_with_one(tmp_path: Path) -> None:
    """New events have no old answer: neither a likelihood comparison nor an edit score by likelihood."""
    path = tmp_path / "events.json"
    fact = {"prompt": "{} was opened by", "subject": "Harrow viaduct", "target_new": "Mira Solano"}
    path.write_text(json.dumps([fact, fact | {"subject": "Elna bridge"}]), encoding="utf-8")
    assert names_of("counterfact_flat_es", data=str(path)) == ["efficacy_argmax", "efficacy_match", "efficacy_gen_em"]
    assert "mcq_old" in names_of("bake_mcq") and "mcq_old" not in names_of("qaedit_mcq")


def test_a_task_without_any_question_keeps_its_columns_and_their_reason(tmp_path: Path) -> None:
    path = tmp_path / "events.json"
    path.write_text(json.dumps([{"prompt": "{} was opened by", "subject": "Elna bridge", "target_new": "Mira"}]))
    found = metrics_of(run("counterfact_flat_gs", settings={"data": str(path)}), "counterfact_flat_gs")
    assert found["unscored"] == 1 and "the record has no paraphrase prompts" in found["unscored_reason"]


def test_the_data_decide_and_not_the_limit() -> None:
    """The first document has no chain of two steps; columns are those of all records."""
    results = run("knowgic_prob", limit=1)
    columns = {name.partition(",")[0] for name in results["results"]["knowgic_prob"]}
    assert set(names_of("knowgic_prob")) <= columns


def test_a_value_of_several_components_needs_each_of_them() -> None:
    def value() -> float:
        return 1.0

    def absent() -> float:
        raise Unscored("the record has no paraphrase prompts")

    def excluded() -> float:
        raise Excluded

    docs: list[dict[str, Any]] = [{"case_id": str(number), "probes": []} for number in range(2)]
    metrics = [{"metric": name} for name in ("both", "one", "never", "plain")]
    by_doc = {
        "0": {"both": [value, absent], "one": [value, absent], "never": [excluded, absent], "plain": [absent]},
        "1": {"both": [absent, value], "one": [value, excluded], "never": [absent, absent], "plain": [value]},
    }

    def measures_of(doc: Any, answers: Any, wanted: Any) -> Any:
        parts = by_doc[doc["case_id"]]
        return {one["metric"]: ComponentMeasure([[part] for part in parts[one["metric"]]]) for one in wanted}

    assert unfillable(docs, metrics, measures_of) == ["one", "never"]
    assert unfillable(docs, [{"metric": "never"}], measures_of) == []  # a table of reasons is of more use than none


def test_a_run_that_is_judged_later_has_the_columns_of_the_run(tmp_path: Path) -> None:
    """Its documents are those that were asked, whose records may lack what others of the data have."""
    results = scripted_results("knowgic_prob")
    results["samples"]["knowgic_prob"] = results["samples"]["knowgic_prob"][:1]
    file = read_result_file(write_run(tmp_path, "knowgic_prob", results=results))
    task = build_task(SavedTask(file, "knowgic_prob"), None, task_files(()), None)
    assert [metric["metric"] for metric in task.config.metric_list] == names_of("knowgic_prob")


def test_the_table_has_no_case_unscored_for_missing_chains() -> None:
    table = make_table(run("knowgic_prob"))
    assert "of length" not in table and "ifr_longer" not in table
