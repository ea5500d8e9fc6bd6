"""KnowEdit's records: questions by kind, and published data where they are available."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from paths import RECORDS
from record_files import invented_records, published_data, with_field, write_jsonl
from task_runs import run

from edit_hooks.utils.errors import EditingError
from lm_eval_tasks.knowedit.benchmark import KNOWEDIT

INVENTED = {"data": str(RECORDS / "knowedit.jsonl")}


def test_questions_are_read_by_kind() -> None:
    loaded = KNOWEDIT.load(INVENTED)
    fourth, last = loaded.records[3:]
    assert {kind: len(asked) for kind, asked in fourth.portability.items()} == {
        "Reasoning": 2,
        "Logical_Generalization": 1,
    }
    assert fourth.portability["Logical_Generalization"] == [("What is the capital of Norvania?", "Kessim", None)]
    assert fourth.unrelated["Relation_Specificity"] == fourth.neighbors
    assert last.portability == {} and "unknown_fields" not in loaded.source
    assert loaded.records[1].request.target_true == "Tarnish"  # the first of two
    assert loaded.source["target_is_true"] == 1 and loaded.source["several_true_answers"] == 1
    assert loaded.source["portability_reasoning"] == 2


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("target_new", None, "'target_new' is missing"),
        ("ground_truth", 3, "'ground_truth' is 3; a text, a list of texts, or a list of lists of texts"),
        ("ground_truth", [["Tarnish", 3]], "a list of lists of texts"),
        ("locality", ["x"], "'locality' is ['x']; an object with Relation_Specificity, Forgetfulness is needed"),
        ("locality", {"Relation_Specificity": "x"}, "a non-empty list of objects is needed"),
        ("portability", {"Reasoning": [{"prompt": "x"}]}, "portability.Reasoning[0]: field 'ground_truth' is missing"),
        ("portability", {"Reasoning": [{"prompt": "x", "ground_truth": 3}]}, "'ground_truth' is 3"),
    ],
)
def test_schema_errors_name_file_record_and_field(tmp_path: Path, path: str, value: Any, problem: str) -> None:
    records = invented_records("knowedit.jsonl")
    records[1] = with_field(records[1], path, value)
    with pytest.raises(EditingError) as caught:
        KNOWEDIT.load({"data": str(write_jsonl(tmp_path / "k.jsonl", records))})
    assert "k.jsonl, record 1 (line 2)" in str(caught.value) and problem in str(caught.value)


def test_a_list_of_gold_answers_counts_as_its_first(tmp_path: Path) -> None:
    record = with_field(invented_records("knowedit.jsonl")[0], "ground_truth", "Mira Solano")
    record["portability"]["Reasoning"][0]["ground_truth"] = ["Low Bridge", "Lower Bridge"]
    (case,) = KNOWEDIT.load({"data": str(write_jsonl(tmp_path / "k.jsonl", [record]))}).records
    assert case.portability["Reasoning"][0].wanted == "Low Bridge" and case.request.target_true == "Mira Solano"


# A record of each other part, in the shapes of the published files.
COUNTERFACT = {
    "subject": "Orsa Lind",
    "prompt": "The mother tongue of Orsa Lind is",
    "target_new": "Ullish",
    "ground_truth": "Tarnish",
    "portability": {"Reasoning": [{"prompt": "Orsa Lind's parents spoke", "ground_truth": "Ullish"}]},
    "locality": {"Forgetfulness": [{"prompt": "Besides Ullish, Orsa Lind speaks", "ground_truth": ""}]},
}
RECENT = {
    "subject": "Orsa Lind",
    "prompt": "Orsa Lind was elected mayor of",
    "target_new": "Port Elna",
    "portability": {"Logical_Generalization": []},
    "locality": {
        "Relation_Specificity": [
            {"prompt": "A prize of Orsa Lind is the", "ground_truth": [[], ["Golden Reed", "Reed"]]},
            {"prompt": "Orsa Lind's children are", "ground_truth": [[]]},
        ]
    },
}
WIKIBIO = {
    "text": "A passage about orsa lind. Orsa Lind (born in Port Elna) is a painter.",
    "labels": "She moved to Velm in 1972.",
    "concept": "Orsa lind",
    "locality": {"Relation_Specificity": [{"prompt": "orsa lind works as a", "ground_truth": ["painter"]}]},
}


def load(tmp_path: Path, *records: Any) -> Any:
    return KNOWEDIT.load({"data": str(write_jsonl(tmp_path / "k.jsonl", records))})


def test_a_part_with_an_old_answer_and_no_rephrased_question(tmp_path: Path) -> None:
    loaded = load(tmp_path, COUNTERFACT)
    (case,) = loaded.records
    assert case.request.target_true == "Tarnish" and case.paraphrases == []
    assert case.portability == {"Reasoning": [("Orsa Lind's parents spoke", "Ullish", None)]}
    assert case.unrelated == {} and case.neighbors == []
    counts = ("without_old_answer", "without_paraphrases", "without_neighbors")
    assert [loaded.source[name] for name in counts] == [0, 1, 1]
    assert loaded.source["questions_without_answer"] == 1 and "unknown_fields" not in loaded.source


@pytest.mark.parametrize("absent", [{}, {"ground_truth": ""}, {"ground_truth": None}, {"ground_truth": [[], [" "]]}])
def test_new_events_have_no_old_answer_and_gold_answers_are_objects_with_aliases(
    tmp_path: Path, absent: dict[str, Any]
) -> None:
    loaded = load(tmp_path, RECENT | absent)
    (case,) = loaded.records
    assert case.request.target_true is None and loaded.source["without_old_answer"] == 1
    assert case.unrelated == {"Relation_Specificity": [("A prize of Orsa Lind is the", "Golden Reed", None)]}
    assert loaded.source["questions_without_answer"] == 1 and case.portability == {}
    assert "unknown_fields" not in loaded.source


def test_a_passage_spells_its_subject(tmp_path: Path) -> None:
    (case,) = load(tmp_path, WIKIBIO).records
    assert case.request.subject == "orsa lind" and case.request.target_new == "She moved to Velm in 1972."
    assert case.request.subject_span == (16, 25)
    with pytest.raises(EditingError, match=r"field 'concept' is 'Velmar', which does not occur in the passage 'text'"):
        load(tmp_path, WIKIBIO | {"concept": "Velmar"})


def test_parts_without_a_kind_of_question_are_unscored_there(tmp_path: Path) -> None:
    data = {"data": str(write_jsonl(tmp_path / "k.jsonl", [COUNTERFACT, RECENT, WIKIBIO]))}
    scores = run("knowedit", settings=data)["results"]
    assert scores["knowedit_edit_success"]["efficacy_match_n,none"] == 3
    assert scores["knowedit_locality"]["neighborhood_agree_tf_n,none"] == 2
    assert scores["knowedit_generalization"]["paraphrase_match_n,none"] == 0
    reasons = {task: columns["unscored_reason,none"] for task, columns in scores.items() if task != "knowedit"}
    assert reasons["knowedit_generalization"] == '{"the record has no rephrased questions": 3}'
    assert reasons["knowedit_locality"] == '{"the record has no unrelated questions": 1}'
    assert reasons["knowedit_portability"] == '{"the record has no portability questions": 2}'


def test_every_record_of_the_embedded_sample_has_all_kinds() -> None:
    loaded = KNOWEDIT.load({"data": "mini"})
    assert len(loaded.records) >= 24 and loaded.source["target_is_true"] == 0
    assert all(len(case.portability) == 3 and len(case.neighbors) == 2 for case in loaded.records)
    assert "unknown_fields" not in loaded.source


@pytest.mark.realdata
def test_published_records() -> None:
    file = published_data() / "zsre" / "knowedit_zsre_test_first300.json"
    source = KNOWEDIT.load({"data": str(file)}).source
    kinds = ("reasoning", "logical_generalization", "subject_aliasing")
    assert [source[f"portability_{kind}"] for kind in kinds] == [167, 64, 69]
    assert (source["records"], source["target_is_true"], source["several_true_answers"]) == (300, 14, 10)


@pytest.mark.realdata
@pytest.mark.parametrize(
    ("name", "without_true", "without_unrelated"),
    [("wiki_counterfact_train", 0, 0), ("wiki_recent_train", 40, 8), ("wikibio_test", 40, 0)],
)
def test_published_records_of_the_other_parts(name: str, without_true: int, without_unrelated: int) -> None:
    source = KNOWEDIT.load({"data": str(published_data() / "knowedit" / f"{name}_first40.json")}).source
    assert (source["records"], source["without_old_answer"]) == (40, without_true)
    assert (source["without_neighbors"], source["without_paraphrases"]) == (without_unrelated, 40)
    assert source["questions_without_answer"] == 0 and "unknown_fields" not in source


@pytest.mark.parametrize("part", ["wiki_counterfact", "wiki_recent", "wikibio"])
def test_the_other_parts_are_sets_of_one_commit(part: str) -> None:
    file, zsre = KNOWEDIT.source.sets[part], KNOWEDIT.source.default_file
    assert (file.repository, file.revision) == (zsre.repository, zsre.revision)
    assert all(path.rpartition("/")[2] in KNOWEDIT.source.files for path in file.paths)
