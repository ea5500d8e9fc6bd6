"""RippleEdits: sentences taken apart, conditions, and tests passed, by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paths import RECORDS
from record_files import invented_records, write_jsonl
from scripted import ScriptedLM
from task_runs import metrics_of, run

from edit_hooks.utils.errors import EditingError
from lm_eval_tasks.ripple_edits.benchmark import RIPPLE_EDITS
from lm_eval_tasks.ripple_edits.effects import names_all
from lm_eval_tasks.ripple_edits.relations import STATED, read_fact

FILE, TASK = "ripple_edits.jsonl", "ripple_edits_effects"
INVENTED = {"data": str(RECORDS / FILE)}


@pytest.mark.parametrize("relation", [*STATED, "MOTHER", "HEAD_OF_STATE", "ALMA_MATER"])
def test_a_sentence_is_its_form_subject_and_object(relation: str) -> None:
    form = STATED.get(relation, f"The name of the {relation.lower().replace('_', ' ')} of {{}} is")
    found = read_fact(f"{form.format('Ada Voss')} Ida Lind Jr..", relation)
    assert found == (form, "Ada Voss", "Ida Lind Jr.")  # one period ends the sentence


def test_the_old_sentence_decides_between_two_readings() -> None:
    new = "The name of the spouse of The Man who is King is Ida is Voss."
    assert read_fact(new, "SPOUSE") == ("The name of the spouse of {} is", "The Man who", "King is Ida is Voss")
    old = "The name of the spouse of The Man who is King is Jo Marsh."
    assert (read_fact(new, "SPOUSE", old) or ())[1:] == ("The Man who is King", "Ida is Voss")
    assert (
        read_fact("Something else.", "SPOUSE") is None and read_fact("The name of the spouse of A.", "SPOUSE") is None
    )


def test_records_are_edits_with_tests_by_kind() -> None:
    loaded = RIPPLE_EDITS.load(INVENTED)
    first = loaded.records[0].request
    assert (first.subject, first.target_new, first.target_true) == ("Ada Voss", "Freland", "Oldland")
    assert loaded.records[2].request.target_true is None and loaded.source["without_old_answer"] == 2
    assert loaded.source["tests_without_answer"] == 1  # the only name has one character
    assert loaded.source["tests_logical_generalization"] == 3  # one of them has a digit as its answer
    assert "unknown_fields" not in loaded.source


def test_tests_count_under_their_conditions_where_the_edit_took() -> None:
    """Record 0 knows its mother and no capital; record 1 does not answer its edit; record 2 passes one of two tests."""

    def texts(context: str, unedited: bool) -> str:
        if unedited:
            return " Ida V., of Karsk" if "mother" in context else " nothing"
        answers = {
            "country of citizenship of Ada": " Freland, since",
            "mother": " Jo Voss",
            "continent": " the WESTLAND",  # another case
            "of A. Voss": " the Republic of Freland",
            "Low Velm follows": " Velm",
            "is followed by": " Low Velm",
            "Low Road": " Jo Marsh and Mira Solano",
        }
        return next((answer for part, answer in answers.items() if part in context), " unknown")

    lm = ScriptedLM(texts=texts)
    found = metrics_of(run(TASK, lm), TASK)
    assert found["efficacy_named"] == pytest.approx(2 / 5)  # records 0 and 2
    assert (found["ripple_relation_specificity_passed"], found["ripple_relation_specificity_passed_n"]) == (0, 1)
    assert (found["ripple_logical_generalization_passed"], found["ripple_logical_generalization_passed_n"]) == (0.25, 2)
    # the condition of the only test fails, so that it does not count; without conditions its alias is found
    assert found["ripple_subject_aliasing_passed_n"] == 0 and found["ripple_subject_aliasing_passed_all"] == 1
    assert found["ripple_forgetfulness_passed_n"] == 0 and found["ripple_forgetfulness_passed_all"] == 1  # both objects
    assert found["ripple_executed"] == pytest.approx((2 / 4 + 1 / 2 + 1) / 3)
    asked = [request.args[0] for request in lm.seen if request.doc["case_id"] == "0"]
    assert asked.count("The name of the mother of Ada Voss is") == 2  # as a query and as a condition, once each


def test_every_object_needs_one_of_its_names() -> None:
    assert names_all("by Jo Marsh and Ida V.", [["Jo Marsh"], ["Ida Voss", "Ida V."]])
    assert not names_all("by Jo Marsh", [["Jo Marsh"], ["Ida Voss", "Ida V."]])
    assert not names_all("by jo marsh", [["Jo Marsh"]])


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("edit.prompt", "Ada Voss lives in Freland.", "does not state the relation 'COUNTRY_OF_CITIZENSHIP'"),
        ("edit.relation", None, "'edit.relation' is missing"),
        ("example_type", 3, "'example_type' is 3"),
        ("Forgetfulness", {}, "'Forgetfulness' is {}"),
    ],
)
def test_schema_errors_name_the_field(path: str, value: Any, problem: str, tmp_path: Path) -> None:
    record = json.loads(json.dumps(invented_records(FILE)[0]))
    *outer, name = path.split(".")
    place = record[outer[0]] if outer else record
    place[name] = value
    if value is None:
        del place[name]
    with pytest.raises(EditingError, match=problem):
        RIPPLE_EDITS.load({"data": str(write_jsonl(tmp_path / "x.jsonl", [record]))})


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_mutated_records_are_cases_or_errors(tmp_path: Path, data: st.DataObject) -> None:
    record = json.loads(json.dumps(data.draw(st.sampled_from(invented_records(FILE)))))
    values = st.one_of(
        st.none(), st.text(max_size=8), st.integers(), st.lists(st.text(max_size=3), max_size=2), st.just({})
    )
    for _ in range(data.draw(st.integers(1, 3))):
        place: Any = record
        while isinstance(place, (dict, list)) and place:
            key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
            if not isinstance(place[key], (dict, list)) or data.draw(st.booleans()):
                place[key] = data.draw(values)
                break
            place = place[key]
    try:
        (case,) = RIPPLE_EDITS.load({"data": str(write_jsonl(tmp_path / "x.jsonl", [record]))}).records
    except EditingError:
        return
    assert all(query.objects for tests in case.tests.values() for test in tests for query in test.queries)
