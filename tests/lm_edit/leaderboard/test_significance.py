"""Tests and ranks against numbers worked by hand, scipy called directly, and the examples of R's manual."""

from __future__ import annotations

import math

import numpy as np
import pytest

pytest.importorskip("statsmodels", reason="the statistics are in the extra leaderboard")
pytest.importorskip("scikit_posthocs", reason="the statistics are in the extra leaderboard")

from scipy import stats
from statsmodels.stats import multitest

from lm_edit.leaderboard.significance import (
    Comparison,
    compare_pairs,
    corrected,
    rank_editors,
)

# R, ?friedman.test: Hollander and Wolfe (1973), p. 140ff; times to round first base, smaller is better.
ROUNDING_TIMES = [
    (5.40, 5.50, 5.55),
    (5.85, 5.70, 5.75),
    (5.20, 5.60, 5.50),
    (5.55, 5.50, 5.40),
    (5.90, 5.85, 5.70),
    (5.45, 5.55, 5.60),
    (5.40, 5.40, 5.35),
    (5.45, 5.50, 5.35),
    (5.25, 5.15, 5.00),
    (5.85, 5.80, 5.70),
    (5.25, 5.20, 5.10),
    (5.65, 5.55, 5.45),
    (5.60, 5.35, 5.45),
    (5.05, 5.00, 4.95),
    (5.50, 5.50, 5.40),
    (5.45, 5.55, 5.50),
    (5.55, 5.55, 5.35),
    (5.45, 5.50, 5.55),
    (5.50, 5.45, 5.25),
    (5.65, 5.60, 5.40),
    (5.70, 5.65, 5.55),
    (6.30, 6.30, 6.25),
]


def array(*values: float | None) -> np.ndarray:
    return np.array([math.nan if value is None else value for value in values], dtype=np.float64)


def test_mcnemar_by_hand():
    """Of 5 discordant cases 4 favor the first run: p = 2 (C(5,4) + C(5,5)) / 2^5 = 12/32."""
    first, second = array(1, 1, 1, 1, 0, 1, 0), array(0, 0, 0, 0, 1, 1, 0)
    assert compare_pairs(first, second) == Comparison("mcnemar", 7, pytest.approx(3 / 7), pytest.approx(12 / 32))


def test_mcnemar_on_the_example_of_r():
    """R, ?mcnemar.test: approval ratings with 150 and 86 discordant voters; exact p = 2 P(X <= 86), X ~ B(236, 1/2)."""
    first = array(*[1] * 794, *[1] * 150, *[0] * 86, *[0] * 570)
    second = array(*[1] * 794, *[0] * 150, *[1] * 86, *[0] * 570)
    comparison = compare_pairs(first, second)
    assert comparison is not None and comparison.difference == pytest.approx((150 - 86) / 1600)
    assert comparison.p == pytest.approx(2 * stats.binom.cdf(86, 236, 0.5)) == pytest.approx(3.716e-05, rel=1e-3)


def test_permutation_test_by_hand():
    """Differences 3, -1, 1: of the 8 sums +-3 +-1 +-1, six (5, 3, 3, -3, -3, -5) are as far from 0 as 3."""
    comparison = compare_pairs(array(3.5, 1, 2, 0.5), array(0.5, 2, 1, 0.5))
    assert comparison == Comparison("permutation", 4, pytest.approx(3 / 4), pytest.approx(6 / 8))


def test_permutation_test_on_the_example_of_r():
    """R, ?wilcox.test: depression scores of nine patients; all 512 sign flips, counted here."""
    first = array(1.83, 0.50, 1.62, 2.48, 1.68, 1.88, 1.55, 3.06, 1.30)
    second = array(0.878, 0.647, 0.598, 2.05, 1.06, 1.29, 1.06, 3.14, 1.29)
    signs = np.array(np.meshgrid(*[[-1, 1]] * 9)).reshape(9, -1).T
    sums = np.abs(signs @ (first - second))
    comparison = compare_pairs(first, second)
    assert comparison is not None
    assert comparison.p == pytest.approx(np.mean(sums >= (first - second).sum() - 1e-12))


@pytest.mark.parametrize(("num_cases", "permutations"), [(8, 999), (40, 4999)])
@pytest.mark.parametrize("is_ratio", [False, True])
def test_permutation_tests_are_those_of_scipy(num_cases: int, permutations: int, is_ratio: bool):
    """Equal where all 2^8 swaps are counted; of drawn ones, within four standard errors of scipy's p-value."""
    generator = np.random.default_rng(num_cases)
    first, second = generator.uniform(0.2, 1, (num_cases, 2)), generator.uniform(0, 1, (num_cases, 2))
    second[::4] = first[::4]  # cases without a difference
    if not is_ratio:
        first[:, 1] = second[:, 1] = 1

    def difference(ours: np.ndarray, theirs: np.ndarray, axis: int) -> np.ndarray:
        both = [np.concatenate([first, second])[rows.astype(int)].sum(axis=-2) for rows in (ours, theirs)]
        return both[0][..., 0] / both[0][..., 1] - both[1][..., 0] / both[1][..., 1]

    rows = (np.arange(num_cases), num_cases + np.arange(num_cases))
    options = {"permutation_type": "samples", "n_resamples": permutations, "rng": np.random.default_rng(1)}
    expected = stats.permutation_test(rows, difference, vectorized=True, **options).pvalue
    found = compare_pairs(first, second, permutations=permutations, score=lambda sums: sums[..., 0] / sums[..., 1])
    if not is_ratio:
        means = compare_pairs(first[:, 0], second[:, 0], permutations=permutations)
        assert found is not None and means is not None and found.p == means.p
    tolerance = 1e-9 if 2**num_cases <= permutations else 4 * math.sqrt(2 * expected / permutations)
    assert found is not None and found.p == pytest.approx(expected, abs=tolerance)


def test_unscored_cases_are_left_out_of_both_runs():
    comparison = compare_pairs(array(1, None, 1, 1), array(0, 0, None, 1))
    assert comparison == Comparison("mcnemar", 2, 0.5, 1.0)
    assert compare_pairs(array(1, None), array(None, 0)) is None


@pytest.mark.parametrize("permutations", [99, 9999])
def test_without_a_difference_there_is_no_significant_one(permutations: int):
    """As of an edit score whose shared cases have no neighbor; a comparison with NaN is false, and p was 0."""
    values, others = (np.random.default_rng(seed).random((8, 2)) * (1, 0) for seed in (0, 1))
    assert (
        compare_pairs(values, others, permutations=permutations, score=lambda sums: sums[..., 0] / sums[..., 1]) is None
    )


def test_ways_without_a_value_count_as_extreme():
    """Each run has a neighbor in another case; a swap of one of the cases leaves a run without any."""
    values, others = np.array([[0.9, 1.0], [0.0, 0.0]]), np.array([[0.0, 0.0], [0.1, 1.0]])
    found = compare_pairs(values, others, score=lambda sums: sums[..., 0] / sums[..., 1])
    assert found is not None and (found.difference, found.p) == (pytest.approx(0.8), 1.0)


def test_many_cases_are_tested_with_a_fixed_seed():
    generator = np.random.default_rng(5)
    first, second = generator.normal(0.2, 1, 60), generator.normal(0, 1, 60)
    comparison = compare_pairs(first, second)
    assert comparison == compare_pairs(first, second)
    assert comparison is not None and comparison.p == pytest.approx(stats.ttest_rel(first, second).pvalue, abs=0.03)


def test_holm_by_hand():
    """Sorted p-values times 4, 3, 2, 1, made monotone: 0.01 -> 0.04, 0.02 -> 0.06, 0.03 -> 0.06, 0.2 -> 0.2."""
    comparisons = [Comparison("mcnemar", 9, 0.1, p) for p in (0.03, 0.01, 0.2, 0.02)]
    adjusted = corrected([comparisons[0], None, *comparisons[1:]])
    assert [None if test is None else round(test.p, 10) for test in adjusted] == [0.06, None, 0.04, 0.2, 0.06]


def test_holm_over_a_family_of_which_some_tests_are_given():
    """Three of six: the sorted p-values times 6, 5, 4; at least Holm's adjustment within the whole family."""
    comparisons = [Comparison("mcnemar", 9, 0.1, p) for p in (0.02, 0.001, 0.004)]
    adjusted = [test.p for test in corrected(comparisons, 6) if test]
    assert adjusted == pytest.approx([0.08, 0.006, 0.02])
    for others in ([0.5] * 3, [0.002, 0.03, 0.9], [1e-5, 0.0005, 0.002]):
        whole = multitest.multipletests([0.02, 0.001, 0.004, *others], method="holm")[1][:3]
        assert all(bound >= exact - 1e-12 for bound, exact in zip(adjusted, whole, strict=True))


def test_equal_editors_differ_from_the_best_in_one_of_twenty_tables_at_most():
    """The best of ten is chosen by the cases of the tests: corrected over its nine rivals, more tables have a mark."""
    generator, marked, rivals_only, num_tables = np.random.default_rng(0), 0, 0, 300
    for _ in range(num_tables):
        scores = (generator.random((10, 100)) < 0.5).astype(float)
        best = int(scores.mean(axis=1).argmax())
        found = [compare_pairs(one, scores[best]) for place, one in enumerate(scores) if place != best]
        marked += any(test.p < 0.05 for test in corrected(found, 45) if test)
        rivals_only += any(test.p < 0.05 for test in corrected(found) if test)
    assert marked <= 0.05 * num_tables < rivals_only


def test_holm_is_that_of_statsmodels():
    p_values = np.random.default_rng(4).random(20) ** 3
    adjusted = corrected([Comparison("mcnemar", 9, 0.1, p) for p in p_values])
    expected = multitest.multipletests(p_values, method="holm")[1]
    assert [test.p for test in adjusted if test] == pytest.approx(expected)
    assert corrected([]) == [] and corrected([None]) == [None]


def test_ranks_on_the_example_of_r():
    """R, ?friedman.test: chi-squared = 11.143, df = 2, p = 0.003805; the first and the third method differ."""
    scores = (-np.array(ROUNDING_TIMES)).T.tolist()
    ranking = rank_editors(["round out", "narrow", "wide"], scores, [f"runner {number}" for number in range(22)])
    assert ranking is not None and ranking.p == pytest.approx(0.003805, abs=5e-7)
    assert ranking.names == ("wide", "narrow", "round out")
    assert ranking.mean_ranks == pytest.approx((32 / 22, 47 / 22, 53 / 22))
    assert ranking.groups == ((0, 1), (1, 2))


def test_critical_difference_of_the_textbook():
    """Demsar (2006), section 3.2.2: four classifiers on 14 data sets, CD = 2.569 sqrt(4 * 5 / (6 * 14)) = 1.25."""
    scores = np.random.default_rng(2).random((4, 14)).tolist()
    ranking = rank_editors("abcd", scores, [f"set {number}" for number in range(14)])
    assert ranking is not None and ranking.critical_difference == pytest.approx(1.25, abs=0.005)


def test_ties_share_their_mean_rank():
    """Column 1: b first, a and c share (2 + 3) / 2; columns 2 and 3: a, b, c."""
    ranking = rank_editors(["a", "b", "c"], [[1, 3, 3], [2, 2, 2], [1, 1, 1]], "xyz")
    assert ranking is not None
    assert dict(zip(ranking.names, ranking.mean_ranks, strict=True)) == pytest.approx(
        {"a": (2.5 + 1 + 1) / 3, "b": (1 + 2 + 2) / 3, "c": (2.5 + 3 + 3) / 3}
    )


def test_no_ranking_of_two_editors_or_equal_ones():
    assert rank_editors(["a", "b"], [[1, 2, 3], [2, 3, 4]], "xyz") is None
    assert rank_editors(["a", "b", "c"], [[1, 2], [2, 3], [3, 4]], "xy") is None
    assert rank_editors(["a", "b", "c"], [[1, 2, 3]] * 3, "xyz") is None


def test_a_benchmark_of_many_columns_is_one_block():
    """Five columns of one benchmark are about the same cases: repeated, they made ten equal editors differ."""
    once = rank_editors("abc", [[3, 1, 2], [2, 3, 1], [1, 2, 3]], "xyz")
    often = rank_editors("abc", [[3, 3, 3, 1, 2], [2, 2, 2, 3, 1], [1, 1, 1, 2, 3]], "xxxyz")
    assert once is not None and once == often and once.num_blocks == 3
    # x ranks by the means over its columns: a 1.5, b 1.5, c 3
    mixed = rank_editors("abc", [[3, 2, 3, 3], [2, 3, 2, 2], [1, 1, 1, 1]], "xxyz")
    assert mixed is not None
    assert dict(zip(mixed.names, mixed.mean_ranks, strict=True)) == pytest.approx(
        {"a": (1.5 + 1 + 1) / 3, "b": (1.5 + 2 + 2) / 3, "c": 3.0}
    )
    assert rank_editors("abc", [[3, 2, 3, 3], [2, 3, 2, 2], [1, 1, 1, 1]], "xxyy") is None
