"""Agreement and Cohen's kappa against hand-computed values."""

from __future__ import annotations

import pytest

from judges.base import CORRECT, INCORRECT, Verdict
from judges.evaluation.agreement import compare_verdicts, compute_kappa, kappa_interval


def verdicts(letters: str) -> list[Verdict]:
    known = {"A": {"label": CORRECT}, "B": {"label": INCORRECT}, "?": {"unscored_reason": "x"}}
    return [Verdict(**known[letter]) for letter in letters]


def test_kappa_by_hand() -> None:
    agreement = compare_verdicts(verdicts("AAAAABBBB?"), verdicts("AAABBBBBAA"))
    # 9 scored by both: 3 AA, 2 AB, 1 BA, 3 BB; by chance (5*4 + 4*5) / 81
    assert agreement.counts == {
        (CORRECT, CORRECT): 3,
        (CORRECT, INCORRECT): 2,
        (INCORRECT, CORRECT): 1,
        (INCORRECT, INCORRECT): 3,
    }
    assert agreement.share == pytest.approx(6 / 9)
    assert agreement.kappa == pytest.approx((6 / 9 - 40 / 81) / (1 - 40 / 81))
    assert (agreement.num_both, agreement.num_unscored, agreement.disagreements) == (9, 1, [3, 4, 8])


@pytest.mark.parametrize(
    ("first", "second", "share", "kappa"),
    [("AB", "AB", 1, 1), ("AB", "BA", 0, -1), ("AA", "AA", 1, None), ("AA", "BB", 0, 0), ("?", "A", None, None)],
)
def test_kappa_at_its_bounds(first: str, second: str, share: float | None, kappa: float | None) -> None:
    agreement = compare_verdicts(verdicts(first), verdicts(second))
    assert (agreement.share, agreement.kappa) == (share, kappa)


def counts_of(both_correct: int, first_only: int, second_only: int, neither: int) -> dict[tuple[str, str], int]:
    cells = [(first, second) for first in (CORRECT, INCORRECT) for second in (CORRECT, INCORRECT)]
    return dict(zip(cells, (both_correct, first_only, second_only, neither), strict=True))


@pytest.mark.parametrize("cells", [(400, 90, 60, 450), (700, 40, 20, 60)])
def test_the_interval_of_many_answers_is_the_asymptotic_one(cells: tuple[int, int, int, int]) -> None:
    """Against the standard error of Fleiss, Cohen and Everitt (1969)."""
    inter_rater = pytest.importorskip("statsmodels.stats.inter_rater", reason="in the extra leaderboard")
    expected = inter_rater.cohens_kappa([cells[:2], cells[2:]])
    interval = kappa_interval(counts_of(*cells))
    assert compute_kappa(counts_of(*cells)) == pytest.approx(expected.kappa)
    assert interval == pytest.approx((expected.kappa_low, expected.kappa_upp), abs=0.015)


def test_full_agreement_over_few_answers_has_a_wide_interval() -> None:
    few, many = (kappa_interval(counts_of(number, 0, 0, number)) for number in (5, 500))
    assert few is not None and many is not None
    assert few[0] < 0.8 and many[0] > 0.98 and few[1] == many[1] == 1.0


def test_an_undefined_kappa_has_no_interval() -> None:
    assert kappa_interval(counts_of(9, 0, 0, 0)) is kappa_interval(counts_of(0, 0, 0, 0)) is None
