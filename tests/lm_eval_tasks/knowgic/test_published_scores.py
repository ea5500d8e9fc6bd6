"""The published overall IFR from the published values by length: which rows recompute, with which numbers of chains."""

from __future__ import annotations

import csv
import math

import pytest
from paths import REAL_DATA

from lm_eval_tasks.common.scoring.aggregation import pooled_mean

TABLE = REAL_DATA.parent / "spec" / "published" / "thinkedit_appendix_chains.csv"
PRINTED = (21, 72, 110, 158, 205)  # chains by length, table 4
V1 = (21, 75, 102, 159, 201)
# One set of numbers of active chains that explains all rows of Qwen2.5, which knows fewer answers; not printed.
ACTIVE_QWEN = (20, 53, 62, 56, 39)


def overall(by_length: list[float], counts: tuple[int, ...]) -> float:
    """IFR from its values by length: each length weighs its number of chains over the root of the length."""
    weights = [count / math.sqrt(length) for length, count in enumerate(counts, start=1)]
    pooled = pooled_mean([{"value": value, "weight": weight} for value, weight in zip(by_length, weights, strict=True)])
    assert pooled is not None
    return pooled


def test_the_case_study_is_not_the_mean_of_its_lengths() -> None:
    """Table 2: .2, .814, .736, .484, .402 over 1, 20, 30, 35, 14 chains give .63 (active ones: .62), not .78."""
    by_length = [0.2, 0.814, 0.736, 0.484, 0.402]
    assert overall(by_length, (1, 20, 30, 35, 14)) == pytest.approx(0.630, abs=0.001)
    assert overall(by_length, (1, 14, 23, 30, 12)) == pytest.approx(0.616, abs=0.001)


@pytest.mark.skipif(not TABLE.is_file(), reason="the published tables are not here")
def test_llama_recomputes_and_qwen_does_only_with_fewer_chains() -> None:
    with TABLE.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 10
    for row in rows:
        by_length, printed = [float(row[f"IFR_{length}"]) for length in range(1, 6)], float(row["IFR_overall"])
        if row["model"].startswith("Llama"):
            assert all(abs(overall(by_length, counts) - printed) < 0.0015 for counts in (PRINTED, V1)), row
        else:
            assert all(0.045 < overall(by_length, counts) - printed < 0.13 for counts in (PRINTED, V1)), row
            assert abs(overall(by_length, ACTIVE_QWEN) - printed) < 0.001, row
