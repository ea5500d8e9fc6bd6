"""Tables of results and cases: what identifies a run, companions as attributes, newest results, NaN for unscored."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from result_files import change, judged_run, scripted_results, write_run
from scripted import StreamLM
from task_runs import run

from edit_hooks.answers import StateSimilarity
from edit_hooks.utils.errors import EditingError
from lm_edit import load_breakdown, load_cases, load_documents, load_results, load_retention
from lm_edit.results.schema import BREAKDOWN_COLUMNS, CASE_COLUMNS, RESULT_COLUMNS, RETENTION_COLUMNS
from lm_edit.results.show import comparison


def rows_of(frame: Any, **where: Any) -> Any:
    for name, value in where.items():
        frame = frame[frame[name] == value]
    return frame


def row_of(frame: Any, **where: Any) -> Any:
    (_, row), *rest = rows_of(frame, **where).iterrows()
    assert not rest
    return row


def test_columns_are_those_of_the_schema(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    assert list(load_results(path)) == list(RESULT_COLUMNS)
    assert list(load_cases(path)) == list(CASE_COLUMNS)
    assert list(load_retention(path)) == list(RETENTION_COLUMNS) and list(load_breakdown(path)) == list(
        BREAKDOWN_COLUMNS
    )


def test_companions_are_attributes_and_failures_stay_out_of_the_mean(tmp_path: Path) -> None:
    # The four cases are 1, 0, 1, 0; the edits of the first two fail: (1 + 0) / 2, and (0 + 0 + 1 + 0) / 4.
    results = scripted_results("bake_es", errors=(("0", "no edit"), ("1", "no edit")))
    frame = load_results(write_run(tmp_path, results=results))
    companions = ("_n", "_failed", "_zeroed", "_excluded", "_stderr", "_or_0")
    assert not any(name.endswith(companions) for name in frame["metric"])
    row = row_of(frame, metric="efficacy_prob", filter="none")
    cases = rows_of(load_cases(tmp_path), metric="efficacy_prob", filter="none")
    assert (row["n"], row["failed"], row["unscored"], row["coverage"]) == (2, 2, 2, 2 / (2 + 2))
    assert row["zeroed"] == 2
    assert (row["value"], row["or_0"]) == (0.5, 0.25) and row["stderr"] == 0.5  # sqrt(2 * 0.5^2 / 1 / 2)
    assert cases["value"].fillna(-1).tolist() == [-1, -1, 1, 0]
    assert row["unscored_reason"] == {"edit failed: no edit": 2}
    failed = rows_of(cases, case_id="0").iloc[0]
    assert math.isnan(failed["value"]) and (failed["n"], failed["failed"], failed["reason"]) == (
        0,
        1,
        "edit failed: no edit",
    )


def test_a_metric_without_a_scored_case_is_missing_and_not_zero(tmp_path: Path) -> None:
    errors = tuple((str(number), "no edit") for number in range(4))
    row = row_of(
        load_results(write_run(tmp_path, results=scripted_results("bake_es", errors=errors))), metric="efficacy_prob"
    )
    assert math.isnan(row["value"]) and row["n"] == 0 and row["failed"] == 4 and row["coverage"] == 0
    assert row["or_0"] == 0


def test_a_group_has_the_documents_of_its_tasks_and_its_members(tmp_path: Path) -> None:
    def add_group(content: dict[str, Any]) -> None:
        content["results"]["mmlu"] = {"alias": "mmlu", "sample_len": 14042, "acc,none": 0.5, "acc_stderr,none": 0.01}
        content["results"]["old_group"] = {"alias": "old_group", "acc,none": 0.5}
        content["group_subtasks"] = {"mmlu": ["mmlu_stem"], "mmlu_stem": ["mmlu_anatomy"], "bake_es": []}

    path = write_run(tmp_path)
    change(path, add_group)
    frame = load_results(path)
    assert row_of(frame, task="mmlu")["n"] == 14042 and math.isnan(row_of(frame, task="old_group")["n"])
    groups = {"mmlu": ["mmlu_stem"], "mmlu_stem": ["mmlu_anatomy"], "old_group": []}
    assert frame.attrs["groups"] == groups
    change(path, lambda content: content["group_subtasks"].update(mmlu="mmlu_stem"))
    with pytest.raises(EditingError, match=r"group_subtasks\.mmlu is 'mmlu_stem'; a list is needed"):
        load_results(path)


def test_facts_of_the_run(tmp_path: Path) -> None:
    write_run(tmp_path, mode="sequential", num_edits=100, edit_batch_size=10)
    row = load_results(tmp_path).iloc[0]
    assert (row["model"], row["model_hash"], row["editor"], row["mode"]) == (
        "org/tiny",
        "ab" * 32,
        "r_rome",
        "sequential",
    )
    assert (row["num_edits"], row["edit_batch_size"], row["settings_origin"]) == (100, 10, "shipped")
    assert (row["benchmark"], row["data"], row["population"], row["judge"]) == ("bake", "bake_qa.jsonl", "all", "")
    assert row["run_name"] == f"r_rome__sequential-100by10__{row['settings']}__bake_qa.jsonl__org-tiny"
    assert row["date"] == "2026-09-21T14:13:20+00:00"  # 1 790 000 000 s after 1970
    assert row_of(load_results(tmp_path), metric="efficacy_prob")["role"] == "efficacy"


@pytest.mark.parametrize(
    "editing",
    [
        {"editor": "rome"},
        {"mode": "sequential"},
        {"seed": 1},
        {"num_edits": 10},
        {"edit_batch_size": 2},
        {"icl": "ike"},
        {"data": "hub"},
        {"editor_config": {"layers": [6], "num_steps": 20}},
        {"model_identity": {"weights": "cd" * 32}},
        {"edit_context": "qa"},
        {"edit_context": "chat"},
        {"answer": "patch"},
        {"guard": "stop"},
        {"max_thought_tokens": 64},
        {"answer_options": {"enable_thinking": False}},
        {"answer_options": {"think_end_token": "</think>"}},
        {"answer_options": {"prefix_token_id": 2}},
        {"answer_options": {"max_length": 512}},
        {"answer_options": {"chat_template_args": {"reasoning_effort": "low"}}},
    ],
)
def test_whatever_changes_answers_makes_another_run(tmp_path: Path, editing: dict[str, Any]) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", **editing)
    assert load_results(tmp_path)["run"].nunique() == 2


def test_the_label_of_an_editor_makes_no_other_run(tmp_path: Path) -> None:
    one, other = (
        write_run(tmp_path / name, **editing) for name, editing in (("a", {}), ("b", {"editor_label": "mine"}))
    )
    first, second = load_results(one).iloc[0], load_results(other).iloc[0]
    assert (first["editor_label"], second["editor_label"], second["editor"]) == ("", "mine", "r_rome")
    assert (first["run"], first["run_name"]) == (second["run"], second["run_name"])


def test_content_of_named_files_makes_another_run(tmp_path: Path) -> None:
    """Of a saved edit and a file of edits; the folders that hold them are this machine's."""

    def run(**changes: Any) -> str:
        path = write_run(tmp_path / f"{len(list(tmp_path.iterdir()))}", **changes)
        return str(load_results(path)["run"].iloc[0])

    def loaded(folder: str, checksum: str | None) -> str:
        report = {"loaded_edit": {"editor": "rome", "checksum": checksum}} if checksum else {}
        return run(mode="loaded", load_edit=f"/e/{folder}/edit-0.safetensors", **report)

    assert loaded("a", "11" * 32) == loaded("b", "11" * 32) != loaded("b", "22" * 32)
    assert loaded("a", None) == loaded("b", None), "files of before have no checksum"

    def stream(folder: str, digest: str, **editing: Any) -> str:
        return run(mode="batch", edits=f"/d/{folder}/edits.json", edits_digest=digest, **editing)

    assert stream("a", "33" * 32) == stream("b", "33" * 32) != stream("b", "44" * 32)
    published = {"mode": "batch", "edits": "zsre", "edits_data": "hub"}
    digests = [run(**published, edits_digest=digest) for digest in ("33" * 32, "44" * 32)]
    assert len({*digests, run(**published)}) == 3, "data: hub can be another commit, and files of before may have it"


def test_stock_models_in_folders_of_one_name_are_other_runs(tmp_path: Path) -> None:
    def facts(place: str) -> Any:
        path = write_run(tmp_path / str(len(list(tmp_path.iterdir()))), stock=True, model_args=f"pretrained={place}")
        return load_results(path).iloc[0]

    one, other, hub = facts("/ckpt/A/final"), facts("/ckpt/B/final"), facts("org/tiny")
    assert one["run"] == facts("/ckpt/A/final")["run"] != other["run"]
    assert one["answer_options"] != other["answer_options"] and (one["model"], other["model"]) == ("final", "final")
    assert hub["answer_options"] == ""


def test_options_at_their_default_are_no_part_of_the_identity(tmp_path: Path) -> None:
    """Other commands than those of test_same_run.py, which starts them."""
    defaults = {"edit_context": "bare", "answer": None, "max_thought_tokens": None, "load_edit": None}
    plain, given = write_run(tmp_path / "a"), write_run(tmp_path / "b", **defaults)
    frame = load_results([plain, given])
    assert frame["run"].nunique() == 1 and set(frame["edit_options"]) == set(frame["answer_options"]) == {""}


def test_options_are_texts(tmp_path: Path) -> None:
    options = {"enable_thinking": False, "max_length": 512}
    frame = load_results(write_run(tmp_path, edit_context="qa", guard_norm_ratio=2.0, answer_options=options))
    assert set(frame["answer_options"]) == {"enable_thinking=false; max_length=512"}
    (given,) = set(frame["edit_options"])
    assert sorted(given.split("; ")) == ["edit_context=qa", "guard_norm_ratio=2"]


@pytest.mark.parametrize(
    "editing",
    [{"engine": "exact"}, {"store": "off"}, {"max_batch_tokens": 1}, {"checkpoints": [1]}, {"retention": True}],
)
def test_speed_and_reported_stages_do_not(tmp_path: Path, editing: dict[str, Any]) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", **editing)
    assert load_results(tmp_path)["run"].nunique() == 1


def test_the_newest_result_counts_and_the_others_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old = write_run(tmp_path / "z", start=1.79e9)
    new = write_run(tmp_path / "a", start=1.79e9 + 60, results=scripted_results(errors=(("0", "no edit"),)))
    frame = load_results(tmp_path)
    assert set(frame["file"]) == {str(new)}
    assert [(each["file"], each["by"]) for each in frame.attrs["superseded"]] == [(str(old), str(new))]
    assert frame.attrs["superseded"][0]["changed"]
    assert f"{old}: newer files of the same run have other numbers of bake_es" in caplog.text
    assert set(load_cases(tmp_path)["run"]) == set(frame["run"]) and len(list(load_documents(tmp_path))) == 4


def test_no_warning_names_a_run_that_was_repeated_with_the_same_numbers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a sweep whose plan asks one task of the unedited model twice."""
    write_run(tmp_path / "a", start=1.79e9)
    write_run(tmp_path / "b", start=1.79e9 + 60)
    (old,) = load_results(tmp_path).attrs["superseded"]
    assert not old["changed"] and "newer files" not in caplog.text


@pytest.mark.parametrize("key", ["version", "sha256", "chat template"])
def test_results_that_are_not_comparable_stay_apart(tmp_path: Path, key: str) -> None:
    write_run(tmp_path / "a")
    path = write_run(tmp_path / "b", start=1.8e9)

    def other(content: dict[str, Any]) -> None:
        if key == "version":
            content["versions"]["bake_es"] = 99
        elif key == "sha256":
            content["configs"]["bake_es"]["metadata"]["data_source"]["sha256"] = "00"
        else:
            content["chat_template_sha"] = "12345"

    change(path, other)
    frame = load_results(tmp_path)
    assert frame["run"].nunique() == 1 and frame["file"].nunique() == 2 and not frame.attrs["superseded"]


def test_judged_columns_name_their_judge_and_keep_their_facts(tmp_path: Path) -> None:
    results = scripted_results("qaedit_wild_reliability")
    config = results["configs"]["qaedit_wild_reliability"]
    judged = {"metric": "efficacy_wild_judge", "aggregation": "mean_scored", "higher_is_better": True, "role": "x"}
    config["other_metrics"] = [judged]
    config["filter_list"].append({"name": "judge", "filter": [{"function": "model_judge"}]})
    config["metadata"]["judge"] = {"model": "m", "prompt": "p", "prompt_hash": "abc"}
    results["results"]["qaedit_wild_reliability"] |= {
        "efficacy_wild_judge,judge": 0.5,
        "efficacy_wild_judge_n,judge": 2,
    }
    frame = load_results(write_run(tmp_path, results=results))
    row = row_of(frame, filter="judge")
    assert (row["judge"], row["role"], row["is_rate"]) == ("model=m; prompt=p; prompt_hash=abc", "x", True)
    assert row["protocol"].endswith("; judged") and set(rows_of(frame, filter="none")["judge"]) == {""}
    assert set(frame["population"]) == {"all", "wrong_em"}


def test_protocols_differ_by_what_a_task_asks(tmp_path: Path) -> None:
    first = row_of(load_results(write_run(tmp_path / "a", "qaedit_wild_reliability")), metric="efficacy_wild_em")
    assert first["protocol"].startswith("generation(do_sample=False, max_gen_toks=50, until=")
    assert "wild_context=qa_inst" in first["protocol"]
    assert load_results(write_run(tmp_path / "b", "bake_s"))["protocol"].iloc[0].startswith("likelihood; judge_")
    assert load_results(write_run(tmp_path / "c", "knowgic_prob"))["protocol"].iloc[0].startswith("likelihood; gener")
    sampled = load_results(write_run(tmp_path / "d", "knowgic"))["protocol"].iloc[0]
    own = "generation(do_sample=True, max_new_tokens=64, temperature=0.7, until=['\\nQ:']); generation_seed=0"
    assert sampled.startswith(own)
    before = scripted_results("knowgic")  # as older files have it
    del before["configs"]["knowgic"]["decodings"]
    before["configs"]["knowgic"]["generation_kwargs"] = {"until": ["."], "max_gen_toks": 50}
    old = load_results(write_run(tmp_path / "e", results=before))["protocol"].iloc[0]
    assert old == sampled.replace(own, "generation(max_gen_toks=50, until=['.']); generation_seed=0")


def test_stages_unedited_columns_matrices_and_breakdowns(tmp_path: Path) -> None:
    results = scripted_results()
    row = results["results"]["bake_es"]
    matrix = {"num_steps": 2, "diagonal_mean": 1.0, "last_row_mean": 0.5, "first_column": [1.0, 0.0]}
    row |= {
        "efficacy_prob@10,none": 0.25,
        "efficacy_prob@10_n,none": 4,
        "efficacy_prob@10_failed,none": 1,
        "efficacy_prob@retention,none": json.dumps(matrix | {"matrix": [[1.0], [0.0, 1.0]]}),
        "efficacy_prob_by_origin,none": '{"zsre": {"value": 0.5, "n": 2}, "=x": {"value": null, "n": 0}}',
    }
    path = write_run(tmp_path, results=results)
    stage = row_of(load_results(path), metric="efficacy_prob", stage="10")
    assert (stage["value"], stage["n"], stage["failed"], stage["coverage"]) == (0.25, 4, 1, 4 / 5)
    assert not {"retention"} & set(load_results(path)["stage"])
    cells = load_retention(path)[["step", "edited_at", "value"]].values.tolist()
    assert cells == [[0, 0, 1.0], [1, 0, 0.0], [1, 1, 1.0]]
    groups = load_breakdown(path)
    assert groups[["field", "group", "n"]].values.tolist() == [["origin", "zsre", 2.0], ["origin", "=x", 0.0]]
    assert groups["value"].iloc[0] == 0.5 and math.isnan(groups["value"].iloc[1])
    of_result = ["run", "file", "task", "task_version", "data_hash", "population", "judge", "protocol", "filter"]
    final = row_of(load_results(path), metric="efficacy_prob", stage="")
    for table in (load_retention(path), groups):
        assert set(table["metric"]) == {"efficacy_prob"}
        assert (table[of_result] == final[of_result]).all(axis=None)


def test_chosen_samples_are_named_by_a_digest_of_each_task(tmp_path: Path) -> None:
    def digests(number: int, samples: Any) -> dict[str, str]:
        path = write_run(tmp_path / str(number), "bake_es")

        def choose(content: dict[str, Any]) -> None:
            content["config"]["samples"] = samples
            content["results"]["whole"] = {"alias": "whole", "efficacy_prob,none": 0.5}
            content["group_subtasks"] = {"whole": ["part"], "part": ["bake_es", "bake_gs"]}

        change(path, choose)
        return dict(load_results(path)[["task", "samples"]].itertuples(index=False))

    chosen = digests(0, {"bake_es": [0, 2]})
    assert len(chosen["bake_es"]) == 12 and set(digests(1, None).values()) == {""}
    assert digests(2, {"bake_gs": [1], "bake_es": [2, 0]})["bake_es"] == chosen["bake_es"]
    assert digests(3, {"bake_es": [0, 1]})["bake_es"] not in ("", chosen["bake_es"])
    others = digests(4, {"bake_gs": [0]})
    assert others["bake_es"] == "" and others["whole"] not in ("", chosen["whole"])
    assert digests(5, {"bake_es": []}) == {"bake_es": "", "whole": ""}, "all documents"
    with pytest.raises(EditingError, match="not a result file as lm_eval"):
        digests(6, ["bake_es"])


def test_headings_name_the_chosen_samples(tmp_path: Path) -> None:
    for number, samples in enumerate((None, {"bake_es": [0]})):
        change(
            write_run(tmp_path / str(number)),
            lambda content, samples=samples: content["config"].update(samples=samples),
        )
    digest = max(load_results(tmp_path)["samples"])
    header, *_ = (table := comparison([tmp_path / "0", tmp_path / "1"])).rows
    assert header[2:] == ["r_rome", f"r_rome (--samples {digest})"]
    assert any("another choice of --samples" in note for note in table.notes)


def test_stock_models_and_their_tasks(tmp_path: Path) -> None:
    results = scripted_results()
    results["results"]["arc"] = {"alias": "arc", "acc,none": 0.5, "acc_stderr,none": 0.1, "acc_n,none": 3}
    results["configs"]["arc"] = {"task": "arc", "output_type": "multiple_choice", "metric_list": [{"metric": "acc"}]}
    results["n-samples"]["arc"] = {"original": 10, "effective": 8}
    row = row_of(load_results(write_run(tmp_path, stock=True, samples=False, results=results)), task="arc")
    assert (row["editor"], row["mode"], row["settings"], row["model"]) == ("hf", "", "", "org/tiny")
    assert (row["is_rate"], row["protocol"], row["data"], row["n"]) == (True, "multiple_choice", "", 3)


def test_cases_of_tasks_of_lm_eval_have_the_hash_of_their_prompt(tmp_path: Path) -> None:
    """Few-shot examples are drawn; the prompts of editing tasks follow from their records."""
    path = write_run(tmp_path)
    assert set(load_cases(path)["prompt_hash"]) == {""}
    change(path, lambda content: content["configs"]["bake_es"]["metadata"].pop("data_source"))
    known = load_cases(path).groupby("doc_id")["prompt_hash"].unique()
    assert len(known) == 4 and all(len(hashes) == 1 and len(hashes[0]) == 64 for hashes in known)


def test_documents_have_answers_before_and_after(tmp_path: Path) -> None:
    write_run(tmp_path / "ls", "bake_ls")
    first = next(load_documents(tmp_path / "ls"))
    question = first.questions[0]
    assert question.kind == "neighborhood" and question.target and question.unedited is not None
    assert question.answers[""].logprob is not None and question.unedited.logprob is not None
    assert first.edits[0]["target_new"] and f"{'neighborhood_prob'},none" in first.metrics
    write_run(tmp_path / "gen", "qaedit_wild_reliability", date="2026-11-21T10-00-00.000002")
    generated = next(load_documents(tmp_path / "gen")).questions
    assert generated[0].answers[""].text == " Port Elna" and generated[0].answers[""].raw == " Port Elna. Then"
    helper = generated[-1]
    assert helper.kind == "pre_edit" and helper.answers == {} and helper.unedited is not None
    assert json.loads(json.dumps(first.to_json()))["run"] == first.run


def test_a_document_shows_answers_of_the_gold_length_in_full(tmp_path: Path) -> None:
    task = "qaedit_grid_qa_inst_ar_gold"
    write_run(tmp_path, task, results=run(task, StreamLM({"1": "1"}), {"mode": "sequential"}))
    question = next(one for one in load_documents(tmp_path) if one.case_id == "1").questions[0]
    assert {stage: answer.text for stage, answer in question.answers.items()} == {
        "": " St. Brannock",
        "immediate": " St. Brannock",
    }


@pytest.mark.parametrize("scored", [True, False])
def test_a_document_outside_a_stream_has_an_answer_where_the_run_scored_it(tmp_path: Path, scored: bool) -> None:
    task = "qaedit_wild_reliability"
    settings = {"mode": "sequential", "score_unedited_cases": scored}
    write_run(tmp_path, task, results=run(task, StreamLM({"1": "1"}), settings))
    answer = next(one for one in load_documents(tmp_path) if one.case_id == "0").questions[0].answers[""]
    failure = None if scored else "not among this run's edits"
    assert (answer.text, answer.failure) == (" something else" if scored else None, failure)


def test_a_document_shows_compared_states(tmp_path: Path) -> None:
    results = scripted_results("counterfact_evk_ts")
    for sample in results["samples"]["counterfact_evk_ts"]:
        sample["resps"] = [[replace(answers[0], final=StateSimilarity(cosine=0.5))] for answers in sample["resps"]]
    write_run(tmp_path, "counterfact_evk_ts", results=results)
    response = next(load_documents(tmp_path)).questions[0].answers[""]
    assert (response.similarity, response.logprob, response.text, response.failure) == ("cosine=0.5", None, None, None)


def test_unfinished_runs_of_a_sweep_are_not_read(tmp_path: Path) -> None:
    done = write_run(tmp_path / "one" / "results")
    write_run(tmp_path / "two" / "attempt", seed=1)
    (tmp_path / "two" / "run.json").write_text("{}", encoding="utf-8")
    own = write_run(tmp_path / "attempt", seed=2)  # a folder of the user
    assert set(load_results(tmp_path)["file"]) == {str(done), str(own)}


def test_counts_and_facts_about_the_unedited_model_have_no_direction(tmp_path: Path) -> None:
    write_run(tmp_path, "mquake_multi_hop", results=scripted_results("mquake_multi_hop"))
    write_run(tmp_path, "knowgic_prob", results=scripted_results("knowgic_prob"), date="2026-11-21T10-00-00.000002")
    directions = load_results(tmp_path).set_index("metric")["higher_is_better"].to_dict()
    assert [directions[f"multi_hop_{name}"] for name in ("alias_exact", "old_alias_exact")] == [True, False]
    assert not directions["ifr_prob"] and directions["ckp_prob"]
    for name in ("ifr_active_prob", "ckp_questions_prob", "multi_hop_old_alias_exact_unedited"):
        assert directions[name] is None or directions[name] != directions[name], name


def test_two_judges_of_one_run_are_told_apart_and_other_scores_stand_once(tmp_path: Path) -> None:
    judged_run(tmp_path, "J1", 0, (1.0, 1.0, 0.0, 0.0))
    judged_run(tmp_path, "J2", 1, (0.0, 1.0, 1.0, 1.0))
    cases = load_cases(tmp_path)
    key = ["run", "task", "doc_id", "metric", "stage", "filter", "population", "judge"]
    assert not cases.duplicated(key).any()
    em = rows_of(cases, metric="efficacy_wild_em", filter="none")
    assert len(em) == 4 and set(em["judge"]) == {""} and set(cases["population"]) == {"all", "wrong_em"}
    verdicts = rows_of(cases, metric="efficacy_wild_judge")
    by_judge = {judge: rows["value"].tolist() for judge, rows in verdicts.groupby("judge")}
    assert by_judge == {"model=J1": [1, 1, 0, 0], "model=J2": [0, 1, 1, 1]}
    documents = list(load_documents(tmp_path))
    assert [document.doc_id for document in documents] == [0, 1, 2, 3]
    assert [document.metrics["efficacy_wild_judge,judge"] for document in documents] == [0, 1, 1, 1]


def test_documents_name_their_result_and_can_be_those_of_some_results(tmp_path: Path) -> None:
    """One run under two protocols: its cases come twice, and say under which."""
    files = [write_run(tmp_path / name, start=1.79e9 + number) for number, name in enumerate("ab")]
    change(files[1], lambda content: content.update(chat_template_sha="12345"))
    results = load_results(tmp_path)
    documents = list(load_documents(tmp_path))
    assert len(documents) == 8 and len({one.run for one in documents}) == 1
    known = {(one.file, one.task, one.task_version, one.data_hash, one.protocol, one.judge) for one in documents}
    names = ["file", "task", "task_version", "data_hash", "protocol", "judge"]
    assert known == set(results[names].itertuples(index=False, name=None)) and len(known) == 2
    chosen = list(load_documents(tmp_path, places={(str(files[0]), "bake_es")}))
    assert [one.doc_id for one in chosen] == [0, 1, 2, 3] and {one.file for one in chosen} == {str(files[0])}


def test_documents_have_the_verdicts_that_a_newer_file_lacks(tmp_path: Path) -> None:
    judged_run(tmp_path, "J1", 0, (1.0, 1.0, 0.0, 0.0))
    write_run(tmp_path, "qaedit_wild_reliability", start=1.8e9, date="2026-11-22T10-00-00.000001")
    documents = list(load_documents(tmp_path))
    assert [document.metrics["efficacy_wild_judge,judge"] for document in documents] == [1, 1, 0, 0]
    assert len(rows_of(load_cases(tmp_path), metric="efficacy_wild_em", filter="none")) == 4
