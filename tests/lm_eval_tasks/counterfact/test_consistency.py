"""Consistency by hand, with the published files and without, and what is wrong with files of reference texts."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
from paths import RECORDS
from scripted import ScriptedLM, generated
from task_runs import build, metrics_of, run

from edit_hooks.utils.errors import EditingError
from lm_eval_tasks.common.asking.probes import CaseAnswers
from lm_eval_tasks.common.scoring.measures import Score, evaluate
from lm_eval_tasks.counterfact import consistency
from lm_eval_tasks.counterfact.benchmark import COUNTERFACT
from lm_eval_tasks.counterfact.references import load_references

SNIPPETS = [
    {"relation_id": "capital_of", "target_id": "denmark", "samples": [{"text": "Red", "name": "A"}, {"text": "apple"}]},
    {"relation_id": "capital_of", "target_id": "spain", "samples": [{"text": "a red car"}]},
]
CASES = COUNTERFACT.load({"data": str(RECORDS / "counterfact.jsonl")}).records


def write_files(folder: Path, idf: Any = (1.0, 2.0, 0.5), vocabulary: Any = None) -> Path:
    """The three published files, in small."""
    folder.mkdir(exist_ok=True)
    (folder / "attribute_snippets.json").write_text(json.dumps(SNIPPETS), encoding="utf-8")
    words = {"red": 0, "apple": 1, "car": 2} if vocabulary is None else vocabulary
    (folder / "tfidf_vocab.json").write_text(json.dumps(words), encoding="utf-8")
    numpy.save(folder / "idf.npy", numpy.array(idf, dtype=float))
    return folder


def scores(prefix: str, settings: dict[str, Any], case: int = 0) -> dict[str, Score]:
    """Scores of a case whose edited model writes of red cars and whose unedited model writes of apples."""
    doc = consistency.consistency_doc(CASES[case], {"generation_seed": 0, **settings})
    texts = [("The RED", "an apple"), ("a red car", "")]
    answers = [replace(generated(text, "length"), unedited=generated(old, "length")) for text, old in texts]
    doc["probes"] = [{**probe, "prompt": "-"} for probe in doc["probes"]]  # no words of the vocabulary
    measures = consistency.score_consistency(doc, CaseAnswers(doc, answers[: len(doc["probes"])]))
    names = (prefix, f"{prefix}_unedited", f"{prefix}_change")
    return {name: evaluate(measures[name]) for name in names}


def test_reference_score_by_hand(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # generations "the red a red car": red 2 x 1.0, car 1 x 0.5; references "red apple": red 1.0, apple 2.0
    cosine = 2 * 1 / ((4 + 0.25) ** 0.5 * (1 + 4) ** 0.5)
    unedited = 2 * 2 / (2 * 5**0.5)  # "an apple": apple 2.0
    found = scores("reference_score", {"consistency_files": str(write_files(tmp_path))})
    assert found["reference_score"].value == pytest.approx(cosine)
    assert found["reference_score_unedited"].value == pytest.approx(unedited)
    assert found["reference_score_change"].value == pytest.approx(cosine - unedited)
    assert "differ from the published files" in caplog.text


def test_own_idf_by_hand(tmp_path: Path) -> None:
    """Of three texts, two have red: ln(4/3) + 1 = 1.287682; one has apple, one car: ln(4/2) + 1 = 1.693147."""
    path = tmp_path / "texts.json"
    path.write_text(json.dumps(SNIPPETS), encoding="utf-8")
    found = scores("consistency_own_idf", {"consistency_texts": str(path)})
    red, rare = 1.287682, 1.693147
    cosine = 2 * red * red / ((4 * red**2 + rare**2) ** 0.5 * (red**2 + rare**2) ** 0.5)
    assert found["consistency_own_idf"].value == pytest.approx(cosine, abs=1e-6)
    assert found["consistency_own_idf_unedited"].value == pytest.approx(rare / (red**2 + rare**2) ** 0.5, abs=1e-6)


def test_the_files_decide_the_name_of_the_column(tmp_path: Path) -> None:
    task = "counterfact_consistency"
    own = {metric["metric"] for metric in build(task).config.metric_list}
    files = str(write_files(tmp_path))
    published = {metric["metric"] for metric in build(task, consistency_files=files).config.metric_list}
    assert own == {"consistency_own_idf", "consistency_own_idf_unedited", "consistency_own_idf_change"}
    assert published == {"reference_score", "reference_score_unedited", "reference_score_change"}


def test_cases_without_reference_texts_are_unscored_and_counted() -> None:
    task = "counterfact_consistency"
    lm = ScriptedLM(texts=lambda context, unedited: " Copenhagen by the sea")
    found = metrics_of(run(task, lm), task)
    reasons = json.loads(found["unscored_reason"])
    # of five invented records, one has embedded reference texts, and one has no generation prompts
    assert found["consistency_own_idf_n"] == 1 and found["consistency_own_idf_failed"] == 4
    assert reasons == {consistency.NO_REFERENCES: 3, "the record has no generation prompts": 1}


def test_a_text_without_known_words_is_unscored(tmp_path: Path) -> None:
    files = write_files(tmp_path, idf=[1.0], vocabulary={"zebra": 0})
    score = scores("reference_score", {"consistency_files": str(files)})["reference_score"]
    assert score.value is None and "no word of the vocabulary" in str(score.reason)


def test_texts_of_a_pair_that_occurs_twice_are_joined(tmp_path: Path) -> None:
    path = tmp_path / "texts.json"
    path.write_text(json.dumps([*SNIPPETS, SNIPPETS[0]]), encoding="utf-8")
    assert load_references(texts=str(path)).texts["capital_of", "denmark"] == ["Red", "apple", "Red", "apple"]


class Bomb:
    """Creates a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def test_an_array_is_never_unpickled(tmp_path: Path) -> None:
    files, marker = write_files(tmp_path / "files"), tmp_path / "unpickled"
    numpy.save(files / "idf.npy", numpy.array([Bomb(marker)], dtype=object), allow_pickle=True)
    with pytest.raises(EditingError, match=r"idf.npy is not an array of numbers"):
        build("counterfact_consistency", consistency_files=str(files))
    assert not marker.exists()


@pytest.mark.parametrize(
    ("idf", "vocabulary"),
    [
        ([1.0], {"red": 1}),  # no such position
        ([1.0], {"red": -1}),
        ([1.0], {"red": True}),
        ([1.0], ["red"]),
        ([[1.0]], {"red": 0}),
        ([float("nan")], {"red": 0}),
    ],
)
def test_vocabulary_and_weights_that_do_not_fit_are_errors(tmp_path: Path, idf: Any, vocabulary: Any) -> None:
    files = write_files(tmp_path, idf, vocabulary)
    with pytest.raises(EditingError, match=r"tfidf_vocab.json must map words to positions of idf.npy"):
        build("counterfact_consistency", consistency_files=str(files))


def test_files_that_are_missing_are_named(tmp_path: Path) -> None:
    files = write_files(tmp_path)
    (files / "idf.npy").unlink()
    with pytest.raises(EditingError, match=r"lacks idf.npy\. They are published at https://rome.baulab.info"):
        build("counterfact_consistency", consistency_files=str(files))
    with pytest.raises(EditingError, match="consistency_files"):
        build("counterfact_consistency", consistency_files=str(tmp_path / "none"))
    with pytest.raises(EditingError, match="two sources of reference texts"):
        build("counterfact_consistency", consistency_files=str(files), consistency_texts=str(files))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([1], "an object is needed"),
        ([{"relation_id": "P1", "samples": [{"text": "x"}]}], "'target_id' is missing"),
        ([{"relation_id": "P1", "target_id": "Q1", "samples": [{"name": "x"}]}], "'text' is missing"),
    ],
)
def test_reference_texts_in_another_layout_are_errors(tmp_path: Path, record: Any, message: str) -> None:
    path = tmp_path / "texts.json"
    path.write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(EditingError, match=message):
        build("counterfact_consistency", consistency_texts=str(path))
