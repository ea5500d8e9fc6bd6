"""Rows of several seeds, and cases under one edit, on made-up results with numbers worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

pytest.importorskip("statsmodels", reason="the statistics are in the extra leaderboard")
pytest.importorskip("scikit_posthocs", reason="the statistics are in the extra leaderboard")

from board_frames import board, es, frames, one_seed, rows_of

from lm_edit.leaderboard.board import Row
from lm_edit.leaderboard.columns import ColumnKey
from lm_edit.leaderboard.significance import compare_runs
from lm_edit.results.statistics.case_scores import CaseScores, combine_seeds
from lm_edit.results.statistics.intervals import normal_interval, wilson_interval

ES = ColumnKey("bake_es", "efficacy_prob", "", "none")


def test_seeds_without_samples_have_an_interval_of_their_summaries() -> None:
    parts = [frames(es(rome=[1, 0, seed], ft=[0.5, 1, 0]), seed=seed) for seed in (0, 1)]
    for results, _ in parts:
        results["stderr"] = [1 / 3, 0.25]  # rome: 1/3 and 2/3 of three cases, each 0 or 1
    cells = {name: row.cells[ES] for name, row in rows_of(board(*((one, cases[:0]) for one, cases in parts))).items()}
    assert cells["rome"].by_seed == {"0": pytest.approx(1 / 3), "1": pytest.approx(2 / 3)}
    assert cells["rome"].interval == wilson_interval(1.5, 3) and cells["rome"].num_scored == 3
    assert cells["ft"].interval == normal_interval(0.5, 0.25, is_share=True)


def grouped(scores: dict[str, list[float | None]], edits: list[str], **common: object) -> dict[str, Row]:
    """Rows of editors whose cases were answered under these edits."""
    results, cases = frames(es(**scores), group_size=2, mode="batch", **common)
    cases["edit_key"] = edits * len(scores)
    return rows_of(board((results, cases)))


def test_cases_under_one_edit_are_swapped_and_drawn_together():
    """Four groups of two cases, all 1 against all 0: 2 of the 2 ** 4 ways to swap the groups are as extreme.

    By case, McNemar's test would have 8 discordant pairs, p = 2 / 2 ** 8.
    """
    edits = [key for key in "abcd" for _ in range(2)]
    rows = grouped({"rome": [1] * 8, "ft": [0] * 8}, edits)
    test = rows["ft"].cells[ES].versus_best
    assert test is not None and (test.test, test.num_cases, test.difference) == ("permutation", 8, -1.0)
    assert test.p == pytest.approx(2 / 16)
    own = grouped({"rome": [1] * 8, "ft": [0] * 8}, [str(number) for number in range(8)])["ft"].cells[ES].versus_best
    assert own is not None and (own.test, own.p) == ("mcnemar", pytest.approx(2 / 256))
    # The interval is that of the groups' means 1, 0, 1/2, 1, as all groups have two cases.
    values = [1, 1, 0, 0, 1, 0, 1, 1]
    by_group = grouped({"rome": values}, edits)["rome"].cells[ES]
    assert by_group.value == 5 / 8
    means = rows_of(board(frames(es(rome=[1, 0, 0.5, 1]))))["rome"].cells[ES]
    assert by_group.interval == means.interval is not None
    certain = grouped({"rome": [1.0] * 8}, ["a", "a", "b", "b", "c", "c", "d", "d"])["rome"].cells[ES]
    assert certain.interval == wilson_interval(4, 4)  # four edits, not eight cases
    assert by_group.interval != grouped({"rome": values}, [str(n) for n in range(8)])["rome"].cells[ES].interval


def test_groups_of_other_sizes_weigh_by_their_scored_cases():
    """Groups {1, 1, 1}, {0, unscored}, {0}: 3 of 5, against 0, 0, 1 | 1, - | 1: 3 of 5: no difference, but a test."""
    edits = ["a", "a", "a", "b", "b", "c"]
    rows = grouped({"rome": [1, 1, 1, 0, None, 0], "ft": [0, 0, 1, 1, None, 1]}, edits)
    ours, theirs = (rows[name].scores[ES] for name in ("rome", "ft"))
    found = compare_runs(ours, theirs, permutations=199)
    # Swapping groups changes the difference by 2 * (2, -1, -1) / 5: 8 ways, all at least as extreme as 0.
    assert found is not None and (found.num_cases, found.difference, found.p) == (5, pytest.approx(0), 1.0)
    assert rows["rome"].cells[ES].value == pytest.approx(3 / 5)


def test_pooled_means_and_edit_scores_of_groups_are_those_of_their_cases():
    """Values 1/2, 1, 1/4 with weights 2, 1, 4: (1 + 1 + 1) / 7. Components (1, 1/2) and (1/2, 1): 2 / (4/3 + 4/3)."""
    pooled = CaseScores((0, 1, 2), one_seed([[0.5, 2], [1, 1], [0.25, 4]]), None, {}, True, ("a", "a", "b"))
    nothing = CaseScores((0, 1, 2), one_seed([[0, 2], [0, 1], [0, 4]]), None, {}, True, ("a", "a", "b"))
    found = compare_runs(pooled, nothing, permutations=199)
    assert found is not None and found.difference == pytest.approx(3 / 7) and pooled.gives(3 / 7)
    assert pooled.interval(is_share=True, resamples=199) is not None
    score = CaseScores(
        (0, 1, 2), one_seed([[1, 0.5], [math.nan, 0.5], [0.5, 1.25]]), (0, 1), {}, False, ("a", "a", "b")
    )
    zero = CaseScores((0, 1, 2), one_seed([[0, 0]] * 3), (0, 1), {}, False, ("a", "a", "b"))
    compared = compare_runs(score, zero, permutations=199)
    # means (1 + 1/2) / 2 = 3/4 and (1/2 + 1/2 + 5/4) / 3 = 3/4
    assert compared is not None and compared.difference == pytest.approx(3 / 4)


def test_a_column_that_one_seed_has_names_the_seed():
    first, second = frames(es(rome=[1, 0])), frames({"rome": {"bake_gs/paraphrase_prob": [1, 0]}}, seed=1)
    cells = rows_of(board(first, second))["rome"].cells
    assert [cell.by_seed for cell in cells.values()] == [{"0": 0.5}, {"1": 0.5}]


def test_seeds_are_one_row_with_the_mean():
    """Means 3/4 and 1/2; the cases' means are 1, 1, 1/2 and 0, three of which differ from 0: p = 2 / 2^3."""
    seeds: list[list[float | None]] = [[1, 1, 1, 0], [1, 1, 0, 0]]
    parts = [frames(es(rome=scores), seed=seed) for seed, scores in enumerate(seeds)]
    rows = rows_of(board(*parts, frames(es(unedited=[0] * 4))))
    assert list(rows) == ["unedited", "rome"] and list(rows["rome"].runs) == ["0", "1"]
    cell = rows["rome"].cells[ES]
    assert cell.value == 5 / 8 and cell.by_seed == {"0": 0.75, "1": 0.5}
    assert cell.interval == rows_of(board(frames(es(rome=[1, 1, 0.5, 0]))))["rome"].cells[ES].interval is not None
    test = cell.versus_unedited
    assert test is not None and (test.test, test.num_cases, test.difference, test.p) == (
        "permutation",
        4,
        5 / 8,
        pytest.approx(2 / 8),
    )


def test_coverage_of_seeds_is_that_of_the_fewest_cases():
    """Means over 9 and 10 cases: (1/9 + 1/10) / 2."""
    zeros: list[float | None] = [0] * 8
    parts = [frames(es(rome=[1, *zeros, None]), seed=0), frames(es(rome=[1, *zeros, 0]), seed=1)]
    cell = rows_of(board(*parts))["rome"].cells[ES]
    assert (cell.num_scored, cell.num_cases, cell.left_out) == (9, 10, {"empty answer": 1})
    assert cell.value == pytest.approx(19 / 180) and cell.interval is not None


def test_a_seed_without_a_score_leaves_no_mean():
    parts = [frames(es(rome=[None, None]), seed=0), frames(es(rome=[1, 0]), seed=1)]
    cell = rows_of(board(*parts))["rome"].cells[ES]
    assert math.isnan(cell.value) and cell.by_seed["1"] == 0.5


def test_composite_scores_of_seeds_are_averaged_after_the_harmonic_mean():
    """Components (1, 1/2) and (1/2, 1/2): (2/3 + 1/2) / 2, not the harmonic mean of (3/4, 1/2)."""
    values = np.array([[[1, 0.5], [0.5, 0.5]]] * 2)
    zero = CaseScores((0, 1), np.zeros((2, 3, 2)), (0, 1), {})  # three seeds against two
    for edits in ((), ("a", "b"), ("a", "a")):
        score = CaseScores((0, 1), values, (0, 1), {}, edits=edits)
        assert score.gives(7 / 12)
        found = compare_runs(score, zero, permutations=199)
        assert found is not None and found.difference == pytest.approx(7 / 12, abs=1e-4)


def test_pooled_means_of_seeds():
    """(1/2 * 2 + 1) / 3 and 1/2, once per seed: (2/3 + 1/2) / 2."""
    values = np.array([[[0.5, 2], [0.5, 2]], [[1, 1], [0.5, 1]]])
    assert CaseScores((0, 1), values, None, {}, True).gives(7 / 12)
    assert CaseScores((0, 1), values, None, {}, True, ("a", "b")).interval(is_share=True, resamples=199) is not None


def test_seeds_with_other_cases_have_no_test():
    one = CaseScores((0, 1), np.zeros((2, 1, 1)), None, {})
    assert combine_seeds([one, one._replace(documents=(0, 2))]) is None
    assert combine_seeds([one, one._replace(factors=(0,))]) is None
