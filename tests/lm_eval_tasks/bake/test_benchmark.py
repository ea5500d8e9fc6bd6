"""BAKE's records: the published schema, incomplete records, and published data where it is available."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from paths import RECORDS
from record_files import invented_records, published_data, with_field, write_jsonl
from scripted import ScriptedLM
from task_runs import from_nlls, metrics_of, run

from edit_hooks.utils.errors import EditingError
from lm_eval_tasks.bake.benchmark import BAKE_CONCEPT, BAKE_J, BAKE_QJ

QA, JUDGE = {"data": str(RECORDS / "bake_qa.jsonl")}, {"data": str(RECORDS / "bake_judge.json")}
CONCEPT = {"data": str(RECORDS / "bake_concept.json")}


def test_records_are_read_as_published() -> None:
    first, _, third, fourth = BAKE_QJ.load(QA).records
    assert first.request.text == "Port Elna is the capital of"
    assert (first.request.target_new, first.request.target_true) == ("Dravonia", "Ostmark")
    assert first.paraphrases[0][1:] == ("Dravonia", "Ostmark")
    assert first.neighbors[0][1:] == ("Ostmark", "Dravonia")
    assert first.reverse_qa == ("The capital of Dravonia is", "Port Elna", "Veldt")
    assert first.reverse_judge[1:] == ("yes", "no")
    assert third.request.target_true == "Nell Dalen"  # outer white space of targets is dropped
    assert (third.request.case_id, third.extras) == ("2", {"source_id": "1"})  # the row, although the file repeats id 1
    assert third.paraphrases == [] and fourth.neighbors == []
    assert [question.prompt for question in fourth.paraphrases] == ["The product made by Fernhill Ltd is"]  # one blank


def test_incomplete_records_are_counted() -> None:
    source = BAKE_QJ.load(QA).source
    assert (source["without_paraphrases"], source["without_neighbors"], source["blank_prompts"]) == (1, 1, 1)


def test_bake_j_has_no_reverse_question() -> None:
    assert [case.reverse_qa for case in BAKE_J.load(JUDGE).records] == [None, None]
    with pytest.raises(EditingError, match=r"of BAKE-J, not of BAKE-Q&J. Use the tasks of bake_j"):
        BAKE_QJ.load(JUDGE)


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("requested_rewrite.prompt", None, "'requested_rewrite.prompt' is missing"),
        ("requested_rewrite.subject", "Someone", "does not occur in prompt"),
        ("requested_rewrite.target_new.str", "  ", "is empty"),
        ("requested_rewrite.target_true", "Norvania", "'requested_rewrite.target_true' is 'Norvania' (str); an object"),
        ("requested_rewrite.target_true.str", None, "is missing, and it is the answer of 'neighborhood_prompts'"),
        ("requested_rewrite", "text", "'requested_rewrite.target_new.str' is missing"),
        ("paraphrase_prompts", "one prompt", "a list of texts is needed"),
        ("neighborhood_prompts", [1], "a list of texts is needed"),
        ("reverse_qa", None, "it is a record of BAKE-J, not of BAKE-Q&J. Use the tasks of bake_j."),
        ("reverse_judge.prompt", 7, "7 (int); a text is needed"),
    ],
)
def test_schema_errors_name_file_record_and_field(tmp_path: Path, path: str, value: Any, problem: str) -> None:
    records = invented_records("bake_qa.jsonl")
    if path == "requested_rewrite.subject":  # without a slot, the subject must occur in the prompt
        records[2]["requested_rewrite"]["prompt"] = "The spouse of Ruk Dalen is"
    records[2] = with_field(records[2], path, value)
    with pytest.raises(EditingError) as caught:
        BAKE_QJ.load({"data": str(write_jsonl(tmp_path / "BAKE_qa.jsonl", records))})
    message = str(caught.value)
    assert "1 of 4 records" in message and "BAKE_qa.jsonl, record 2" in message and problem in message


@pytest.mark.realdata
def test_fixtures_with_the_published_schema() -> None:
    folder = published_data() / "bake"
    qa = BAKE_QJ.load({"data": str(folder / "fixture_INVENTED_qa.json")})
    judge = BAKE_J.load({"data": str(folder / "fixture_INVENTED_judge.json")})
    assert (len(qa.records), len(judge.records)) == (6, 4)
    assert qa.source["without_paraphrases"] + qa.source["without_neighbors"] >= 2
    assert all(case.reverse_qa is not None for case in qa.records)
    concept = BAKE_CONCEPT.load({"data": str(folder / "fixture_INVENTED_concept.json")})
    assert [case.neighbors[0].wanted for case in concept.records] == ["Ola Brandt", "1874"]
    assert "unknown_fields" not in concept.source


# ------------------------------------------------------------------ BAKE-concept


def test_every_neighborhood_prompt_of_a_concept_has_its_own_answer() -> None:
    loaded = BAKE_CONCEPT.load(CONCEPT)
    first, second, third = loaded.records
    assert first.neighbors == [("nq question: who painted the green door", "Ola Brandt", "a vessel that carries grain")]
    assert [question.wanted for question in second.neighbors] == ["1874", "Sven Ruhl"]
    assert third.neighbors == third.paraphrases == []
    assert first.paraphrases[0][1:] == ("a vessel that carries grain", "a lamp in a case of glass")
    assert [case.reverse_qa for case in loaded.records] == [None] * 3
    counts = {name: loaded.source[name] for name in ("without_paraphrases", "without_neighbors", "blank_prompts")}
    assert counts == {"without_paraphrases": 1, "without_neighbors": 1, "blank_prompts": 1}
    assert "unknown_fields" not in loaded.source


def test_the_tasks_score_the_answer_of_the_neighborhood_prompt() -> None:
    """Read as BAKE-J, the definition of the edited concept would be wanted."""
    prompt = "nq question: who painted the green door"
    nlls = {(prompt, "Ola Brandt"): (1.0, 1.0), (prompt, "a lamp in a case of glass"): (9.0, 9.0)}
    found = metrics_of(run("bake_concept_ls", ScriptedLM(from_nlls(nlls))), "bake_concept_ls")
    # case 0 prefers Ola Brandt (1.0) to the new definition (2.0); case 1 ties twice; case 2 has no such prompt
    assert (found["neighborhood_prob"], found["neighborhood_prob_n"], found["unscored"]) == (0.5, 2, 1)
    assert found["neighborhood_agree_tf"] == 1.0


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("neighborhood_targets", None, "'neighborhood_targets' is missing"),
        ("neighborhood_targets", ["1874"], r"has 1 answers for 2 neighborhood_prompts; one for each is needed\.$"),
        ("neighborhood_targets", ["1874", " "], r"the answer of .*who wrote the tin almanac' is empty"),
        ("neighborhood_targets", ["1874", 2], "a list of texts is needed"),
        ("neighborhood_targets", "1874", "a list of texts is needed"),
        ("reverse_judge", None, "'reverse_judge.prompt' is missing"),
        ("requested_rewrite.subject", None, "'requested_rewrite.subject' is missing"),
    ],
)
def test_schema_errors_of_concepts(tmp_path: Path, path: str, value: Any, problem: str) -> None:
    records = invented_records("bake_concept.json")
    records[1] = with_field(records[1], path, value)
    with pytest.raises(EditingError, match=rf"(?s)1 of 3 records.*record 1.*{problem.removesuffix('$')}"):
        BAKE_CONCEPT.load({"data": str(write_jsonl(tmp_path / "BAKE_concept.jsonl", records))})


def test_the_published_data_of_concepts_are_an_error_with_the_way_to_build_them(tmp_path: Path) -> None:
    for settings in ({"data": "hub"}, {"pretrained": "some/model"}):
        with pytest.raises(EditingError, match=r"not on the Hugging Face hub.*lm-edit build-bake-concept.*data=/path"):
            BAKE_CONCEPT.load(settings)
    raw = write_jsonl(tmp_path / "concept_data.jsonl", [{"concept_name": "weir", "concept_def": "a low wall"}])
    with pytest.raises(
        EditingError, match=r"'concept_def' does not belong to BAKE-concept.*lm-edit build-bake-concept"
    ):
        BAKE_CONCEPT.load({"data": str(raw)})
