"""WikiBigEdit's records in their two layouts, their oddities, and the scores by kind of question."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paths import REAL_DATA, RECORDS
from record_files import invented_records, write_jsonl
from scripted import ScriptedLM
from task_runs import metrics_of, run

from edit_hooks.utils.errors import EditingError
from lm_eval_tasks.wikibigedit.benchmark import INCREMENTS, WIKIBIGEDIT

FILE = "wikibigedit.jsonl"
INVENTED = {"data": str(RECORDS / FILE)}


def test_a_record_is_an_edit_and_five_kinds_of_questions() -> None:
    first, second, *_ = WIKIBIGEDIT.load(INVENTED).records
    assert (first.request.prompt, first.request.subject) == (
        "In which county is Vossgate Chapel located?",
        "Vossgate Chapel",
    )
    assert first.request.target_new == "Merlow" == first.paraphrases[0].wanted == first.portability["Persona"][0].wanted
    assert first.portability["Multi_Hop"][0].wanted == "Low Merlow" and first.neighbors[0].wanted == "Eastmoor"
    assert (first.change, second.change) == ("new", "update") and "Multi_Hop" not in second.portability


def test_odd_records_are_kept_and_counted() -> None:
    loaded = WIKIBIGEDIT.load(INVENTED)
    names = ("records", "without_paraphrases", "without_neighbors", "with_persona", "with_multi_hop", "new_facts")
    assert [loaded.source[name] for name in names] == [6, 2, 1, 5, 3, 2]
    assert loaded.records[2].request.subject is None and loaded.source["subject_not_in_prompt"] == 1
    assert not loaded.records[2].paraphrases and loaded.source["placeholder_rephrases"] == 1
    assert loaded.source["targets_with_inner_period"] == 1
    assert "Multi_Hop" not in loaded.records[5].portability  # an answer without a question


@pytest.mark.parametrize("name", ["tag", "rephrase", "personas", "loc", "loc_ans", "mhop", "mhop_ans"])
def test_nan_is_an_absent_text(name: str, tmp_path: Path) -> None:
    """As pandas writes it; the text is no JSON."""
    path = tmp_path / "wiki_big_edit_20240201_20240220.json"
    record = {**invented_records(FILE)[0], name: float("nan")}
    path.write_text(json.dumps([record]), encoding="utf-8")
    (case,) = WIKIBIGEDIT.load({"data": str(path)}).records
    absent = WIKIBIGEDIT.load({"data": str(write_jsonl(tmp_path / "x.jsonl", [{**record, name: None}]))}).records
    assert [case] == absent


@pytest.mark.parametrize("name", ["update", "ans"])
def test_the_edit_is_needed(name: str, tmp_path: Path) -> None:
    record = {**invented_records(FILE)[0], name: None}
    with pytest.raises(EditingError, match=name):
        WIKIBIGEDIT.load({"data": str(write_jsonl(tmp_path / "x.jsonl", [record]))})


FLAT = {
    "prompt": "In which county is Vossgate Chapel located?",
    "target_new": "Merlow",
    "subject": "Vossgate Chapel",
    "rephrase_prompt": "Which county is home to Vossgate Chapel?",
    "locality_prompt": "In which county is Tarn Chapel located?",
    "locality_ground_truth": "Eastmoor",
}


def test_the_layout_of_locft_has_the_same_edit(tmp_path: Path) -> None:
    (flat,) = WIKIBIGEDIT.load({"data": str(write_jsonl(tmp_path / "wikibigedit_3k.json", [FLAT]))}).records
    published = WIKIBIGEDIT.load(INVENTED).records[0]
    assert (flat.request, flat.paraphrases, flat.neighbors) == (
        published.request,
        published.paraphrases,
        published.neighbors,
    )
    assert not flat.portability


def test_the_first_published_records_are_read() -> None:
    path = REAL_DATA / "locft/wikibigedit_3k_first60.json"
    if not path.is_file():
        pytest.skip("the first records of the published file are not here")
    assert WIKIBIGEDIT.load({"data": str(path)}).source["records"] == 60


def test_increments_are_sets_in_order() -> None:
    paths = WIKIBIGEDIT.source.default_file.paths
    assert len(paths) == len(INCREMENTS) == 8 and list(paths) == sorted(paths)
    assert paths[0] == "wiki_big_edit_20240201_20240220.json" == WIKIBIGEDIT.source.sets[INCREMENTS[0]].paths[0]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_mutated_records_are_cases_or_errors(tmp_path: Path, data: st.DataObject) -> None:
    record: dict[str, Any] = dict(data.draw(st.sampled_from([*invented_records(FILE), FLAT])))
    values = st.one_of(
        st.none(), st.text(max_size=8), st.floats(), st.lists(st.text(max_size=3), max_size=2), st.booleans()
    )
    for name in data.draw(st.lists(st.sampled_from(sorted(record)), min_size=1, max_size=3)):
        record[name] = data.draw(values)
    path = tmp_path / "wiki_big_edit_20240201_20240220.json"
    path.write_text(json.dumps([record]), encoding="utf-8")
    try:
        (case,) = WIKIBIGEDIT.load({"data": str(path)}).records
    except EditingError:
        return
    assert case.request.prompt and case.request.target_new
    assert all(question.prompt and question.wanted for asked in case.portability.values() for question in asked)


def test_kinds_are_scored_over_the_records_that_have_them() -> None:
    found = metrics_of(run("wikibigedit_tf_portability", ScriptedLM()), "wikibigedit_tf_portability")
    assert (found["portability_persona_match_n"], found["portability_persona_match_excluded"]) == (5, 1)
    assert (found["portability_multi_hop_match_n"], found["portability_multi_hop_match_excluded"]) == (3, 3)
