"""Which columns separate two groups of runs: the area and its interval, matching, and what is counted."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import printed_lines, run_verb
from hypothesis import given
from hypothesis import strategies as st
from real_runs import RealRuns
from result_files import change, scripted_results, write_run

from edit_hooks.utils.errors import EditingError
from lm_edit.results.separating import EXCLUDED, SeparatingColumn, read_rules, separation
from lm_edit.results.statistics.intervals import QUANTILE
from lm_edit.results.statistics.separation import area_interval, area_under_curve

SCORES = st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=9)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([3, 2], [1, 0], 1.0),
        ([0], [1], 0.0),
        ([1, 1], [1], 0.5),
        # 9 pairs: 1 beats .5 and 0 twice (3), .5 ties once and beats 0 twice (2.5), 0 ties twice (1)
        ([1, 0.5, 0], [0.5, 0, 0], 6.5 / 9),
        # of successes it is (1 + p - q) / 2: p = 3/4, q = 1/2
        ([1, 1, 1, 0], [1, 0], 0.625),
    ],
)
def test_areas_worked_by_hand(first: list[float], second: list[float], expected: float) -> None:
    assert area_under_curve(np.array(first, float), np.array(second, float)) == pytest.approx(expected)


@given(SCORES, SCORES)
def test_the_area_is_the_share_of_pairs(first: list[float], second: list[float]) -> None:
    pairs = [(a > b) + (a == b) / 2 for a, b in itertools.product(first, second)]
    area = area_under_curve(np.array(first), np.array(second))
    assert area == pytest.approx(sum(pairs) / len(pairs))
    assert area + area_under_curve(np.array(second), np.array(first)) == pytest.approx(1)


@given(st.floats(0, 1), st.integers(1, 40), st.integers(1, 40))
def test_ends_of_an_interval_are_rejected_at_their_own_standard_error(area: float, m: int, n: int) -> None:
    found = area_interval(area, m, n)
    assert 0 <= found.low <= area <= found.high <= 1
    for end in (found.low, found.high):
        # Hanley and McNeil: q1 = t / (2 - t), q2 = 2 t^2 / (1 + t), here with both sizes at their mean
        q1, q2, size = end / (2 - end), 2 * end**2 / (1 + end), (m + n) / 2 - 1
        variance = (end * (1 - end) + size * (q1 - end**2) + size * (q2 - end**2)) / (m * n)
        if end not in (0.0, 1.0):
            assert abs(area - end) == pytest.approx(QUANTILE * math.sqrt(variance), abs=1e-6)
    mirrored = area_interval(1 - area, m, n)
    assert mirrored.low == pytest.approx(1 - found.high, abs=1e-6)


def test_complete_separation_has_an_interval() -> None:
    """A bootstrap over facts has none; one fact a side says nothing."""
    # at t = .832: t^2 .692, q1 .712, q2 .755, var (.140 + 11 * .020 + 11 * .063) / 144 = .00735, 1.96 sd .168
    assert area_interval(1.0, 12, 12).low == pytest.approx(0.832, abs=5e-4)
    assert area_interval(1.0, 1, 1).low < 0.5 < area_interval(1.0, 4, 4).low


def write_scores(folder: Path, scores: list[float], editor: str, **options: Any) -> Path:
    """A run of four cases whose column `efficacy_magnitude` has these scores."""
    results = scripted_results(**options)
    for sample, score in zip(results["samples"]["bake_es"], scores, strict=True):
        sample["efficacy_magnitude"] = score
    return write_run(folder, results=results, editor=editor)


def column_of(found: Any, metric: str) -> SeparatingColumn:
    return next(one for one in found.columns if one.metric == metric)


def test_columns_of_two_groups(tmp_path: Path) -> None:
    """Two runs of the first group: the score of a fact is their mean."""
    write_scores(tmp_path / "a" / "1", [1.0, 1.0, 0.0, 4.0], "ft_m")
    write_scores(tmp_path / "a" / "2", [3.0, 1.0, 2.0, 4.0], "lora")
    write_scores(tmp_path / "b", [0.0, 1.0, 1.0, 0.5], "grace", errors=(("3", "no edit"),))
    found = separation(tmp_path / "a", tmp_path / "b")
    one = column_of(found, "efficacy_magnitude")
    assert one.first.scores == (2.0, 1.0, 1.0, 4.0) and one.second.scores == (0.0, 1.0, 1.0, 0.5)
    # 2 and 4 beat all four; each 1 beats 0 and .5 and ties twice
    assert one.area == pytest.approx((4 + 4 + 3 + 3) / 16)
    failed = column_of(found, "efficacy_prob")
    assert failed.second.unscored and sum(failed.second.unscored.values()) == 1 and not failed.first.unscored
    assert len(failed.first.scores) == 4 and len(failed.second.scores) == 3
    areas = [abs((column.area or 0.5) - 0.5) for column in found.columns if not column.unedited]
    assert areas == sorted(areas, reverse=True)
    assert (found.first.names, found.second.names) == (("ft_m", "lora"), ("grace",))
    assert any("4 facts are in both groups" in note for note in found.notes())
    many = replace(found, columns=(one,) * 300)
    assert any(note.endswith("by chance alone about 15 would.") for note in many.notes())


def test_facts_are_matched_by_their_score_in_each_run(tmp_path: Path) -> None:
    write_scores(tmp_path / "a" / "1", [1.0, 1.0, 0.0, 4.0], "ft_m")
    write_scores(tmp_path / "a" / "2", [3.0, 0.0, 2.0, 4.0], "lora")
    write_scores(tmp_path / "b", [0.0, 1.0, 1.0, 0.5], "grace")
    found = separation(tmp_path / "a", tmp_path / "b", matched={"efficacy_magnitude": 1.0})
    one = column_of(found, "efficacy_magnitude")
    assert one.first.scores == (2.0, 1.0, 2.0, 4.0) and one.second.scores == (1.0, 1.0)
    assert (found.first.facts, found.first.kept, found.second.facts, found.second.kept) == (4, 4, 4, 2)
    with pytest.raises(EditingError, match="no fact of the first group has efficacy_magnitude >= 9"):
        separation(tmp_path / "a", tmp_path / "b", matched={"efficacy_magnitude": 9.0})
    with pytest.raises(EditingError, match=r"has no metric 'efficacy_magnitud'.*Did you mean 'efficacy_magnitude'"):
        separation(tmp_path / "a", tmp_path / "b", matched={"efficacy_magnitud": 1.0})


def test_runs_without_samples_are_refused_unless_they_are_left_out(tmp_path: Path) -> None:
    write_scores(tmp_path / "a" / "1", [1.0, 1.0, 0.0, 4.0], "ft_m")
    write_run(tmp_path / "a" / "2", editor="grace", samples=False)
    with pytest.raises(EditingError, match=r"no samples of bake_es.*--log_samples"):
        separation(tmp_path / "a", tmp_path / "a")
    found = separation(tmp_path / "a", tmp_path / "a", only=["editor=ft_m"], only_second=["editor=ft_m"])
    assert found.columns and found.second.names == ("ft_m",)


def test_columns_with_two_meanings_are_left_out_and_counted(tmp_path: Path) -> None:
    write_scores(tmp_path / "a", [1.0, 1.0, 0.0, 4.0], "ft_m")
    other = write_scores(tmp_path / "b", [0.0, 1.0, 1.0, 0.5], "grace")
    change(other, lambda content: content["versions"].update(bake_es="9.9"))
    found = separation(tmp_path / "a", tmp_path / "b")
    assert not found.columns and set(found.left_out.values()) == {"another task version"}
    write_run(tmp_path / "c", "bake_gs")
    with pytest.raises(EditingError, match="no column in common"):
        separation(tmp_path / "a", tmp_path / "c")


def test_real_runs_are_separated_by_the_command(real_runs: RealRuns, tmp_path: Path, capsys: Any) -> None:
    """An edited model against the unedited one: the edited prompt separates them, its own past does not."""
    out = tmp_path / "out.json"
    words = ["results", "separate", str(real_runs.command), "--from", str(real_runs.unedited), "--out", str(out)]
    assert run_verb(words) == 0
    printed = "\n".join(printed_lines(capsys))
    saved = json.loads(out.read_text(encoding="utf-8"))
    assert saved["first"]["facts"] == saved["first"]["compared"] == 3 and saved["second"]["editors"] == ["unedited"]
    columns = {one["metric"]: one for one in saved["columns"]}
    assert len(columns["efficacy_magnitude"]["first"]["scores"]) == 3
    assert columns["efficacy_magnitude"]["auc"] > 0.5 and str(tmp_path) not in out.read_text(encoding="utf-8")
    assert len(columns) == len(saved["columns"]) and all(name in printed for name in columns)
    assert "of one group alone" in {one["why"] for one in saved["left_out"]}  # the other tasks of the unedited run
    assert run_verb(words) == 2 and "--overwrite" in capsys.readouterr().err


def test_excluded_facts_are_named(tmp_path: Path) -> None:
    """A published filter takes facts out of a column, which is no failure."""
    write_run(tmp_path / "a", "bake_rq")
    found = separation(tmp_path / "a", tmp_path / "a")
    excluded = [one for one in found.columns if EXCLUDED in one.first.unscored]
    assert excluded and all(one.area in (None, 0.5) for one in found.columns)


@pytest.mark.parametrize("text", ["=1", "efficacy_prob=high", "efficacy_prob=nan"])
def test_rules_that_cannot_be_read(text: str) -> None:
    assert read_rules(["a", "b=0.5"]) == {"a": 1.0, "b": 0.5}
    with pytest.raises(EditingError, match="METRIC or METRIC=SCORE"):
        read_rules([text])
