"""Two studies of metrics: kept numbers follow from kept scores, are of the plans, and are those of the pages."""

from __future__ import annotations

import re

import numpy as np
import pytest
from block import unique
from blocks_judged import (
    JUDGED,
    LOCALITY_COLUMNS,
    ORDER,
    REGULARIZERS,
    areas,
    kept_regularized,
    kept_separations,
    locality_judged,
    metrics_judged,
    moved,
)
from paths import ROOT

from lm_edit.results.statistics.separation import area_interval, area_under_curve
from lm_edit.sweeps.planning.plan import find_plan, load_plan

PAGE, OVERLAP = ROOT / "docs/explain/metrics-judged.md", ROOT / "docs/benchmarks/overlap.md"


def test_kept_files_are_of_editors_of_the_plan() -> None:
    planned = [choice.editor for choice in load_plan(find_plan("metrics_judged")).editors]
    assert planned == ["document_training", *ORDER]
    assert sorted(path.stem for path in JUDGED.glob("*.json")) == sorted(kept_separations())
    for editor, kept in kept_separations().items():
        assert (kept["first"]["editors"], kept["second"]["editors"]) == (["document_training"], [editor])
        assert kept["matched"] == {"efficacy_argmax": 1.0} and len(kept["columns"]) > 50


@pytest.mark.parametrize("editor", kept_separations())
def test_areas_and_intervals_follow_from_the_scores(editor: str) -> None:
    for one in kept_separations()[editor]["columns"]:
        first, second = (np.asarray(one[side]["scores"], dtype=float) for side in ("first", "second"))
        if not (len(first) and len(second)):
            assert one["auc"] is None and one["interval"] is None and not one["separates"]
            continue
        assert one["auc"] == pytest.approx(area_under_curve(first, second))
        interval = area_interval(one["auc"], len(first), len(second))
        assert one["interval"] == pytest.approx([interval.low, interval.high])
        assert one["separates"] == (not interval.low <= 0.5 <= interval.high)
        assert one["first"]["mean"] == pytest.approx(first.mean()) and one["first"]["facts"] == len(first)


def test_every_column_is_in_the_table_or_below_it() -> None:
    text = metrics_judged("").text
    assert all(text.count(f"`{name}`") == 1 for name in areas())


def test_numbers_of_the_page_are_those_of_the_table() -> None:
    """Written as `column` editor AUC in the text: "`reverse_qa_prob` (ft_m 0.92)"."""
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    quoted = re.findall(r"`([\w@]+)` \(((?:\w+ \d\.\d\d(?:, )?)+)\)", page)
    assert len(quoted) >= 3
    for name, numbers in quoted:
        for editor, value in re.findall(r"(\w+) (\d\.\d\d)", numbers):
            assert f"{areas()[name][editor]['auc']:.2f}" == value, (name, editor)


def test_a_name_with_two_values_is_refused() -> None:
    assert unique([("a", 1), ("b", 2)]) == {"a": 1, "b": 2}
    with pytest.raises(ValueError, match="a has several values"):
        unique([("a", 1), ("b", 2), ("a", 3)])


def test_the_regularizers_of_the_page_are_those_of_the_plan() -> None:
    names = [choice.name for choice in load_plan(find_plan("locality_judged")).editors][1:]
    assert names == [f"{editor} {strength}" for editor in REGULARIZERS for strength in ("weak", "strong")]
    by_name = {choice.name: choice.settings for choice in load_plan(find_plan("locality_judged")).editors[1:]}
    for editor, text in REGULARIZERS.items():
        setting, _, values = text.strip("`").partition("` ")
        planned = [by_name[f"{editor} {strength}"] for strength in ("weak", "strong")]
        assert planned == [{setting: float(value)} for value in values.split(", ")]


def test_the_page_of_the_overlap_quotes_its_table() -> None:
    page = " ".join(OVERLAP.read_text(encoding="utf-8").split())
    changes = {name: [moved(columns[name]) for columns in kept_regularized().values()] for name in LOCALITY_COLUMNS}
    rises = {name: sum(up for up, _ in found) for name, found in changes.items()}
    num_pairs = sum(len(columns["neighborhood_overlap"]["first"]["scores"]) for columns in kept_regularized().values())
    assert changes["neighborhood_overlap"] == [(8, 0), (8, 0), (8, 0), (6, 2)] and changes["neighborhood_prob"][2] == (
        0,
        0,
    )
    agree, prob = rises["neighborhood_agree_tf"], rises["neighborhood_prob"]
    assert f"in {rises['neighborhood_overlap']} of {num_pairs} pairs of edits" in page
    assert f"rises in {prob} of {num_pairs}, and the agreement along that answer in {agree}" in page
    assert f"0.10 rises in {rises['neighborhood_within_10']} of {num_pairs}" in page
    memit = kept_regularized()["memit"]["neighborhood_overlap"]
    assert f"from {memit['second']['mean']:.3f} to {memit['first']['mean']:.3f}" in page
    written = [
        sum(kept_regularized()[name]["efficacy_prob"]["first"]["scores"]) for name in ("ft_l", "r_rome", "memit")
    ]
    assert written == [4, 6, 7]
    assert locality_judged("").text.count("\n") == len(LOCALITY_COLUMNS) + 1
