"""A user's own facts in the flat layout: new events, several paraphrases, several neighbors, and next to nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from record_files import write_jsonl
from scripted import ScriptedLM
from task_runs import metrics_of, run

from edit_hooks.utils.errors import EditingError
from lm_eval_tasks.common.records.benchmark import benchmark_of_file
from lm_eval_tasks.common.records.cases import Case
from lm_eval_tasks.common.records.dataset import LoadedRecords
from lm_eval_tasks.counterfact.benchmark import COUNTERFACT_FLAT

OLD = {
    "id": 7,
    "prompt": "The largest town of Norvania is",
    "subject": "Norvania",
    "target_new": "Velm",
    "ground_truth": "Kessim",
    "rephrase_prompt": ["Norvania's largest town is called", "In Norvania, most people live in"],
    "locality_prompt": ["The largest town of Ostmark is", "The capital of Ostmark is"],
    "locality_ground_truth": ["Port Elna", "Tarsk"],
}
EVENT = {
    "prompt": "The telescope that Norvania opened last year is called",
    "subject": "Norvania",
    "target_new": "Farsight",
    "ground_truth": "",
    "rephrase_prompt": "Last year Norvania opened a telescope called",
    "locality_prompt": "The longest bridge of Ostmark is",
    "locality_ground_truth": "Low Bridge",
}
SMALLEST = {"prompt": "The mayor of Tarsk is", "target_new": "Orsa Lind"}
NO_OLD = "the record has no old answer to compare with"


def load(tmp_path: Path, *records: dict[str, Any]) -> LoadedRecords[Case]:
    return COUNTERFACT_FLAT.load({"data": str(write_jsonl(tmp_path / "facts.jsonl", records))})


def test_lists_of_paraphrases_and_neighbors_are_questions_of_one_case(tmp_path: Path) -> None:
    loaded = load(tmp_path, OLD)
    (case,) = loaded.records
    assert case.paraphrases == [(text, "Velm", "Kessim") for text in OLD["rephrase_prompt"]]
    assert case.neighbors == [
        ("The largest town of Ostmark is", "Port Elna", "Velm"),
        ("The capital of Ostmark is", "Tarsk", "Velm"),
    ]
    assert case.extras == {"source_id": "7"} and "unknown_fields" not in loaded.source


def test_the_first_of_several_old_answers_counts(tmp_path: Path) -> None:
    loaded = load(tmp_path, OLD | {"ground_truth": ["Kessim", "Kesim"]}, OLD | {"target_true": "Kessim"})
    assert [case.request.target_true for case in loaded.records] == ["Kessim", "Kessim"]


def test_ignored_fields_are_named_with_those_that_they_may_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    record = SMALLEST | {"subject": "Tarsk", "rephrase": "x", "neighbors": ["y"], "relation": "mayor", "note": "z"}
    loaded = load(tmp_path, record, SMALLEST)  # a field `relation` does not make it a record of WikiBigEdit
    assert sorted(loaded.source["unknown_fields"]) == ["neighbors", "note", "relation", "rephrase"]
    warning = caplog.records[-1].getMessage()
    assert " neighbors: Did you mean 'locality_prompt'?" in warning and " rephrase: Did you mean 'rephrase_p" in warning
    assert warning.count("note") == 1
    assert benchmark_of_file(str(tmp_path / "facts.jsonl")) is COUNTERFACT_FLAT


@pytest.mark.parametrize("absent", [{}, *({"ground_truth": value} for value in ("", "  ", None, []))])
def test_a_new_event_has_no_old_answer(tmp_path: Path, absent: dict[str, Any]) -> None:
    record = {name: value for name, value in EVENT.items() if name != "ground_truth"}
    loaded = load(tmp_path, record | absent, OLD)
    assert [case.request.target_true for case in loaded.records] == [None, "Kessim"]
    assert loaded.source["without_old_answer"] == 1 and loaded.source["neighbors_with_another_object"] == 2


def test_the_smallest_record_is_an_edit_request_and_every_field_of_one_is_read(tmp_path: Path) -> None:
    further = {"subject": "Tarsk", "target_true": "Ivo Tarn", "relation_id": "P6", "case_id": "mine"}
    loaded = load(tmp_path, SMALLEST, SMALLEST | further)
    small, whole = (case.request for case in loaded.records)
    assert (small.subject, small.target_true, small.target_new) == (None, None, "Orsa Lind")
    assert (whole.subject, whole.target_true, whole.relation_id) == ("Tarsk", "Ivo Tarn", "P6")
    assert [loaded.source[f"without_{part}"] for part in ("old_answer", "paraphrases", "neighbors")] == [1, 2, 2]
    assert "unknown_fields" not in loaded.source


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"locality_ground_truth": ["Port Elna"]}, "'locality_ground_truth' has 1 answers for 2 of 'locality_prompt'"),
        ({"locality_prompt": None}, "'locality_ground_truth' has 2 answers for 0 of 'locality_prompt'"),
        ({"rephrase_prompt": ["Velm?", " "]}, r"'rephrase_prompt\[1\]' is empty; give a text or drop the entry"),
        ({"rephrase_prompt": ["x", ["Velm?"]]}, r"'rephrase_prompt\[1\]' is .*; a list of texts is needed"),
        ({"rephrase_prompt": 3}, "'rephrase_prompt' is 3 .*; a text is needed"),
        ({"ground_truth": {"str": "Kessim"}}, "'ground_truth' is .*; a text is needed"),
        ({"ground_trut": "Kessim", "ground_truth": None}, None),
        ({"target_new": ""}, "'target_new' is empty"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, changes: dict[str, Any], problem: str | None) -> None:
    if problem is None:  # a misspelled optional field
        record = {name: value for name, value in (OLD | changes).items() if value is not None}
        problem = "'ground_trut' is not known. Did you mean 'ground_truth'"
    else:
        record = OLD | changes
    with pytest.raises(EditingError, match=problem):
        load(tmp_path, record)


def test_only_comparisons_with_the_old_answer_are_unscored_and_counted(tmp_path: Path) -> None:
    data = {"data": str(write_jsonl(tmp_path / "facts.jsonl", [OLD, EVENT]))}
    scores = {
        task: metrics_of(run(f"counterfact_{task}", ScriptedLM(), data), f"counterfact_{task}")
        for task in ("flat_es", "flat_gs", "flat_ls", "flat_s", "syn_reliability", "wild_generalization")
    }
    es, gs, ls, total = (scores[f"flat_{name}"] for name in ("es", "gs", "ls", "s"))
    counts = {"prob": 1, "magnitude": 1, "argmax": 2, "match": 2, "gen_em": 2}
    assert {name: es[f"efficacy_{name}_n"] for name in counts} == counts
    assert es["efficacy_prob_failed"] == es["efficacy_magnitude_failed"] == 1
    assert json.loads(es["unscored_reason"]) == {NO_OLD: 1}
    assert (gs["paraphrase_prob_n"], gs["paraphrase_argmax_n"], gs["paraphrase_gen_em_n"]) == (1, 2, 2)
    assert ls["neighborhood_prob_n"] == ls["neighborhood_agree_gen_n"] == 2 and ls["unscored"] == 0
    assert total["edit_score_argmax_n"] == total["edit_score_match_n"] == 2 and total["edit_score_argmax"] is not None
    assert json.loads(total["unscored_reason"]) == {NO_OLD: 1}
    assert scores["syn_reliability"]["efficacy_match_n"] == 2
    assert scores["wild_generalization"]["paraphrase_wild_em_n"] == 2


def test_new_events_alone_are_edited_and_answered(tmp_path: Path) -> None:
    data = {"data": str(write_jsonl(tmp_path / "facts.jsonl", [EVENT, SMALLEST]))}
    lm = ScriptedLM(texts=lambda context, unedited: " Farsight.")
    results = run("counterfact_flat", lm, data)["results"]
    es, total = results["counterfact_flat_es"], results["counterfact_flat_s"]
    # No record can fill a comparison with the old answer, so there is none.
    assert not [name for name in (*es, *total) if name.startswith(("efficacy_prob", "edit_score_prob"))]
    assert es["efficacy_gen_em,none"] == 0.5 and es["unscored,none"] == 0
    assert total["edit_score_match,none"] is not None
    gs = results["counterfact_flat_gs"]
    assert json.loads(gs["unscored_reason,none"]) == {"the record has no paraphrase prompts": 1}
    for group in ("counterfact_syn", "counterfact_wild", "counterfact_syn_ar", "counterfact_flat_questions"):
        assert run(group, lm, data)["results"]
