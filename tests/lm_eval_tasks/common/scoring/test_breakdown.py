"""Scores by a field of the records, by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from judge_server import serve
from scripted import ScriptedLM
from task_runs import build, metrics_of, run
from wild_answers import WILD_TASK, wild_texts

from edit_hooks.utils.errors import EditingError

# Origins of the records: NQ aqueduct, TQA painter, SQA ode, NQ tram; ids 7, 7, 9, 10.


def by(found: dict[str, Any], column: str) -> Any:
    return json.loads(found[column])


def write(path: Path, categories: Any) -> str:
    path.write_text(json.dumps(categories), encoding="utf-8")
    return str(path)


def test_every_metric_of_every_pipeline_by_origin(tmp_path: Path) -> None:
    with serve(lambda item, attempt: "A" if item.gold in item.answer else "B") as server:
        judge = {"backend": "openai", "model": "m", "base_url": server.url, "store": str(tmp_path)}
        results = run(WILD_TASK, ScriptedLM(texts=wild_texts), {"judge": judge, "score_by": "origin"})
    found, judged = metrics_of(results, WILD_TASK), metrics_of(results, WILD_TASK, "judge")
    # exact match: the aqueduct only; the tram's "In 1911" contains the gold answer, as a judge accepts it
    assert by(found, "efficacy_wild_em_by_origin") == {
        "NQ": {"value": 0.5, "n": 2},
        "SQA": {"value": 0.0, "n": 1},
        "TQA": {"value": 0.0, "n": 1},
    }
    assert by(judged, "efficacy_wild_judge_by_origin")["NQ"] == {"value": 1.0, "n": 2}
    # the unedited model answers the tram question rightly, so NQ keeps the aqueduct
    assert by(found, "efficacy_wild_em@wrong_em_by_origin")["NQ"] == {"value": 1.0, "n": 1}


def test_an_unscored_group_has_no_value() -> None:
    lm = ScriptedLM(texts=wild_texts, errors={"2": "no such layer"})
    found = metrics_of(run(WILD_TASK, lm, {"score_by": "origin", "population": "all"}), WILD_TASK)
    assert by(found, "efficacy_wild_em_by_origin")["SQA"] == {"value": None, "n": 0}


def test_categories_come_from_a_file_by_id_or_question(tmp_path: Path) -> None:
    """Two records have the id 7: it decides for neither, and their questions do."""
    given = {"7": "Wrong", "10": "Transport", "Who designed the Fenwick aqueduct?": "Transport"}
    settings = {"score_by": "category;origin", "categories": write(tmp_path / "c.json", given), "population": "all"}
    results = run(WILD_TASK, ScriptedLM(texts=wild_texts), settings)
    found = metrics_of(results, WILD_TASK)
    assert by(found, "efficacy_wild_em_by_category") == {
        "(none)": {"value": 0.0, "n": 2},
        "Transport": {"value": 0.5, "n": 2},
    }
    assert by(found, "efficacy_wild_em_by_origin")["NQ"]["n"] == 2
    assert results["configs"][WILD_TASK]["metadata"]["data_source"]["without_category"] == 2


def test_an_id_of_several_records_gives_none_in_a_subset_with_one_of_them(tmp_path: Path) -> None:
    categories = write(tmp_path / "c.json", {"7": "Wrong", "9": "Art", "10": "Transport"})
    docs = build(WILD_TASK, categories=categories, subset=3).test_docs()
    assert {doc["source_id"]: doc.get("category") for doc in docs} == {"7": None, "9": "Art", "10": "Transport"}


def test_ids_are_those_of_the_benchmark_that_has_the_setting(tmp_path: Path) -> None:
    """Other data have the same ids by coincidence; an edit question is the same fact anywhere."""
    ids = write(tmp_path / "ids.json", {"7": "Art", "0": "Wrong", "1": "Wrong"})
    with pytest.raises(EditingError, match="no edit question of the data is in it"):
        build("counterfact_flat_es", categories=ids)
    question = build("counterfact_flat_es").test_docs()[0]["probes"][0]["prompt"]
    both = write(tmp_path / "both.json", {"1": "Wrong", question: "Places"})
    found = [doc.get("category") for doc in build("counterfact_flat_es", categories=both).test_docs()]
    assert found == ["Places", *[None] * (len(found) - 1)] and len(found) > 1


def test_questions_about_no_edit_have_no_category(tmp_path: Path) -> None:
    """Those of EVK-Bench in a stream."""
    categories = write(tmp_path / "c.json", {"0": "Wrong"})
    built = build("counterfact_evk_es", mode="sequential", categories=categories)
    assert not any(doc["edit_requests"] or "category" in doc for doc in built.test_docs())
    assert built.config.metadata["data_source"]["without_category"] == 0


def test_the_embedded_sample_has_categories() -> None:
    docs = build("qaedit_syn_reliability", data="mini", score_by="category").test_docs()
    assert {"geography"} < {doc["category"] for doc in docs}


def test_by_default_nothing_is_split() -> None:
    found = metrics_of(run(WILD_TASK, ScriptedLM(texts=wild_texts)), WILD_TASK)
    assert not [name for name in found if "_by_" in name]


@pytest.mark.parametrize(
    ("settings", "categories", "message"),
    [
        ({"score_by": "orign"}, None, "no record has this field. Did you mean 'origin'"),
        ({"score_by": "category"}, None, "Give categories=FILE.json"),
        ({}, {"400": "Sports"}, "is it of other data"),
        ({}, ["Sports"], "is no JSON object of texts"),
        ({}, {"7": 3}, "is no JSON object of texts"),
        ({"categories": "/nowhere.json"}, None, "/nowhere.json"),
    ],
)
def test_what_cannot_be_used_is_an_error(
    tmp_path: Path, settings: dict[str, Any], categories: Any, message: str
) -> None:
    if categories is not None:
        settings = settings | {"categories": write(tmp_path / "c.json", categories)}
    with pytest.raises(EditingError) as caught:
        build(WILD_TASK, **settings)
    assert message in str(caught.value)
