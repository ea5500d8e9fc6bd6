"""ZsRE's records: two flavors of one layout, and the records with a portability question."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from paths import REAL_DATA, RECORDS
from record_files import published_data, with_field

from edit_hooks.utils.errors import EditingError
from lm_eval_tasks.counterfact.benchmark import COUNTERFACT_FLAT
from lm_eval_tasks.zsre.benchmark import ZSRE, ZSRE_MEMIT, ZSRE_PORTABILITY

INVENTED = {"data": str(RECORDS / "zsre_mend_eval.json")}


def test_the_flavors_edit_the_true_and_the_counterfactual_answer() -> None:
    memit, alt = ZSRE_MEMIT.load(INVENTED).records[1], ZSRE.load(INVENTED).records[1]
    assert (memit.request.target_new, memit.request.target_true) == ("Tarnish", None)
    assert (alt.request.target_new, alt.request.target_true) == ("Old Ullish", "Tarnish")  # stripped
    assert [question.wanted for case in (memit, alt) for question in case.paraphrases] == ["Tarnish", "Old Ullish"]
    assert memit.request.prompt == alt.request.prompt == "What is the mother tongue of Orsa Lind?"
    assert memit.request.subject == "Orsa Lind"


def test_only_memits_unrelated_questions_get_a_question_mark() -> None:
    question = "nq question: when did the north canal open"
    assert ZSRE.load(INVENTED).records[0].neighbors == [(question, "1874", None)]
    assert ZSRE_MEMIT.load(INVENTED).records[0].neighbors == [(f"{question}?", "1874", None)]


def test_a_record_without_counterfactual_answer_is_left_out_and_counted() -> None:
    alt, memit = ZSRE.load(INVENTED), ZSRE_MEMIT.load(INVENTED)
    assert [case.request.case_id for case in alt.records] == ["0", "1", "2", "3"]
    assert alt.source["left_out"] == {"the counterfactual answer (alt) is empty": 1}
    assert (len(memit.records), memit.records[4].request.target_new) == (5, "1908")
    assert "left_out" not in memit.source and "skipped" not in alt.source


def test_a_file_that_is_left_out_entirely_is_an_error(tmp_path: Path) -> None:
    records = [record for record in json.loads(Path(INVENTED["data"]).read_text("utf-8")) if not record["alt"]]
    path = tmp_path / "zsre.jsonl"
    path.write_text("".join(json.dumps(record) for record in records), encoding="utf-8")
    with pytest.raises(EditingError, match=r"leaves out all 1 records: the counterfactual answer \(alt\) is empty"):
        ZSRE.load({"data": str(path)})


def test_coinciding_answers_are_kept_and_counted() -> None:
    """Pred is true in record 1 (Tarnish); pred, alt and true answer are one in record 3 (Norvania)."""
    source = ZSRE.load(INVENTED).source
    names = ("pred_is_true", "alt_is_true", "alt_is_pred", "several_true_answers", "targets_not_ascii")
    assert [source[name] for name in names] == [2, 1, 1, 1, 1]
    assert [ZSRE_MEMIT.load(INVENTED).source[name] for name in names] == [2, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("src", None, "'src' is missing"),
        ("subject", "Nobody", "'Nobody' does not occur in prompt"),
        ("alt", None, "'alt' is missing"),
        ("alt", 3, "'alt' is 3"),
        ("answers", "Tarnish", "a list of texts is needed"),
        ("loc", "when did the canal open", "does not begin with 'nq question: '"),
        ("loc_ans", "", "'loc_ans' is empty"),
    ],
)
def test_schema_errors_name_file_record_and_field(tmp_path: Path, path: str, value: Any, problem: str) -> None:
    records = json.loads(Path(INVENTED["data"]).read_text("utf-8"))
    records[1] = with_field(records[1], path, value)
    file = tmp_path / "z.json"
    file.write_text(json.dumps(records), encoding="utf-8")
    with pytest.raises(EditingError) as caught:
        ZSRE.load({"data": str(file)})
    assert "z.json, record 1" in str(caught.value) and problem in str(caught.value)


def test_the_true_answer_is_needed_only_where_it_is_the_target(tmp_path: Path) -> None:
    records = json.loads(Path(INVENTED["data"]).read_text("utf-8"))[:1]
    file = tmp_path / "z.json"
    for answers in ([], [""], None):
        file.write_text(json.dumps([records[0] | {"answers": answers, "rephrase": ["Who, then?", "Who?"]}]), "utf-8")
        (case,) = ZSRE.load({"data": str(file)}).records
        assert case.request.target_true is None
        assert [question.prompt for question in case.paraphrases] == ["Who, then?", "Who?"]
        with pytest.raises(EditingError, match=r"not of ZsRE \(MEMIT\)\. Use the tasks of zsre_syn"):
            ZSRE_MEMIT.load({"data": str(file)})


@pytest.mark.parametrize(
    ("file", "owner"), [("zsre_portability.jsonl", "ZsRE with portability"), ("knowedit.jsonl", "KnowEdit")]
)
def test_records_of_the_other_layouts_are_recognized(tmp_path: Path, file: str, owner: str) -> None:
    copy = tmp_path / "mine.jsonl"
    copy.write_bytes((RECORDS / file).read_bytes())
    for benchmark in (ZSRE, ZSRE_MEMIT):
        with pytest.raises(EditingError) as caught:
            benchmark.load({"data": str(copy)})
        assert f"it is a record of {owner}" in str(caught.value)


def test_the_embedded_samples_have_the_same_edits() -> None:
    memit, alt, portability = (b.load({"data": "mini"}) for b in (ZSRE_MEMIT, ZSRE, ZSRE_PORTABILITY))
    assert len(memit.records) == len(alt.records) == len(portability.records) >= 24
    for true, new, hop in zip(memit.records, alt.records, portability.records, strict=True):
        assert true.request.target_new == new.request.target_true and new.request == hop.request
    odd = {"unknown_fields", "skipped", "left_out"}
    assert not any(set(loaded.source) & odd for loaded in (memit, alt, portability))
    assert alt.source["alt_is_true"] == 0


@pytest.mark.realdata
def test_published_records() -> None:
    file = {"data": str(published_data() / "zsre" / "zsre_mend_eval_first34.json")}
    memit, alt = ZSRE_MEMIT.load(file), ZSRE.load(file)
    assert memit.source["records"] == alt.source["records"] == 34
    assert (alt.source["pred_is_true"], alt.source["alt_is_true"]) == (3, 0)
    assert all(case.neighbors[0].prompt.endswith("?") for case in memit.records)


@pytest.mark.parametrize("benchmark", [ZSRE, COUNTERFACT_FLAT])
def test_the_3000_records_of_locft_are_a_set_at_one_commit(benchmark: Any) -> None:
    file = benchmark.source.sets["locft_3k"]
    assert file.url.startswith("https://raw.githubusercontent.com/ICT-STAR/LocFT/51db7854feb3596085051e45bf8b3147")
    published = REAL_DATA / "locft" / f"{file.path.split('/')[1]}_3k_first60.json"
    if not published.is_file():
        pytest.skip("the first records of the published file are not here")
    assert len(benchmark.load({"data": str(published)}).records) == 60
