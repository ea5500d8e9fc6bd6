"""Agreement and Cohen's kappa against hand-computed values."""

from __future__ import annotations

import pytest

from judges.base import CORRECT, INCORRECT, Verdict
from judges.evaluation.agreement import compare_verdicts


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
