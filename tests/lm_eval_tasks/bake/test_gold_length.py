"""BAKE's greedy answers of the target's length, by hand."""

from __future__ import annotations

import pytest
from scripted import StockLM
from spaced_words import SpacedLM
from task_runs import build, metrics_of, run

# prompt -> (edited, unedited). Targets: "Dravonia"; "The Amber Stair"; "Asta Verrin". The third case is right but for
# the last token of its only target.
ANSWERS = {
    "Port Elna is the capital of": ("Dravonia", "Ostmark"),
    "Tilda Quorn is the author of": ("The Amber Gate", "Low Tide now"),
    "The spouse of Ruk Dalen is": ("Nell Verrin", "Nell Dalen"),
    "The capital of Dravonia is": ("Port Elna", "Veldt or"),
    "The author of The Amber Stair is": ("Tilda Quorn", "Tilda Marsh"),
}


def words(prompt: str, unedited: bool) -> str:
    return ANSWERS.get(prompt, ("", ""))[unedited]


def scores(task: str) -> dict[str, float]:
    return metrics_of(run(task, SpacedLM(words)), task)


def test_the_documents_ask_for_both_lengths() -> None:
    (doc, *_) = build("bake_syn_ar_rq").test_docs()
    asked = [(probe["kind"], probe["ask"], probe["decoding"]["length_of_alone"]) for probe in doc["probes"]]
    assert asked == [("reverse_qa_unspaced", "both", True), ("reverse_qa", "both", False)]
    assert {probe["decoding"]["length_of"] for probe in doc["probes"]} == {"Port Elna"}
    (doc, *_) = build("bake_syn_ar_ls").test_docs()
    assert {(probe["ask"], probe["decoding"]["length_of"]) for probe in doc["probes"]} == {("both", "Ostmark")}


def test_efficacy_compares_the_tokens_with_and_without_the_space() -> None:
    """Without the space the first token is never the target's; the others are."""
    lm = SpacedLM(words)
    found = metrics_of(run("bake_syn_ar_es", lm), "bake_syn_ar_es")
    cases = len({request.doc["case_id"] for request in lm.seen})
    assert cases == found["efficacy_ar_match_unspaced_n"] >= 3
    assert found["efficacy_ar_match_unspaced"] == pytest.approx((0 + 1 / 3 + 1 / 2) / cases)
    assert found["efficacy_ar_match"] == pytest.approx((1 + 2 / 3 + 1 / 2) / cases)


def test_the_filter_excludes_what_the_unedited_model_has_a_token_of() -> None:
    """The unedited model has "Tilda", a token of the second answer only if the space before it counts."""
    found = scores("bake_syn_ar_rq")
    total = found["reverse_qa_ar_match_unspaced@all_n"]
    assert (found["reverse_qa_ar_match_unspaced_n"], found["reverse_qa_ar_match_n"]) == (total, total - 1)
    assert found["reverse_qa_ar_match_excluded"] == 1
    assert (
        found["reverse_qa_ar_match_unspaced"]
        == found["reverse_qa_ar_match_unspaced@all"]
        == pytest.approx((1 / 2 + 1 / 2) / total)
    )
    assert found["reverse_qa_ar_match@all"] == pytest.approx((1 + 1) / total)
    assert found["reverse_qa_ar_match"] == pytest.approx(1 / (total - 1))


def test_locality_is_the_share_of_equal_positions() -> None:
    """One of Port Elna's two neighbors changes its only token."""

    def moved(prompt: str, unedited: bool) -> str:
        return "Ostmark" if unedited or prompt != "Lake Mirrow lies in" else "Dravonia"

    found = metrics_of(run("bake_syn_ar_ls", SpacedLM(moved)), "bake_syn_ar_ls")
    assert found["neighborhood_agree_ar"] == pytest.approx(1 - 0.5 / found["neighborhood_agree_ar_n"])


@pytest.mark.parametrize("task", ["bake_syn_ar_es", "bake_j_syn_ar_gs"])
def test_other_model_classes_are_unscored(task: str) -> None:
    found = metrics_of(run(task, StockLM()), task)
    assert found["unscored"] > 0 and "answers of a given length" in found["unscored_reason"]
