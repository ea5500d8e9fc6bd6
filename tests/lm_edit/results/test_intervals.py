"""95% intervals: scipy as the oracle of the formulas, and one rule for tables, figures and the leaderboard."""

from __future__ import annotations

import csv
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import printed_lines, run_verb
from hypothesis import given
from hypothesis import strategies as st
from lm_eval.api.metrics import mean_stderr
from result_files import write_run

from edit_hooks.utils.errors import EditingError
from lm_edit.figures.select import cell
from lm_edit.results.statistics.case_scores import CaseScores
from lm_edit.results.statistics.intervals import (
    Values,
    bootstrap_interval,
    normal_interval,
    wilson_interval,
)
from lm_edit.results.statistics.of_rows import (
    ALL_EQUAL,
    NO_SAMPLES,
    Estimate,
    Summary,
    describe_intervals,
    estimate,
    interval_of,
    over_seeds,
)
from lm_edit.results.tables import load_results

stats = pytest.importorskip("scipy.stats", reason="scipy, the oracle here, is in the extra leaderboard")


def scores(*cases: list[float], edits: tuple[str, ...] = (), **kind: Any) -> CaseScores:
    """Scores of one seed; a case is a list of its components."""
    values = np.array(cases, dtype=np.float64)[:, np.newaxis]
    return CaseScores(tuple(range(len(cases))), values, kind.get("factors"), {}, kind.get("is_pooled", False), edits)


def ends(interval: Any) -> tuple[float, float]:
    return interval.low, interval.high


def of_scipy(num_cases: int, score: Any, resamples: int = 300) -> tuple[float, float]:
    """The BCa interval of scipy, which draws the numbers of cases."""
    found = stats.bootstrap(
        (np.arange(num_cases),),
        lambda drawn, axis: np.apply_along_axis(score, axis, drawn),
        n_resamples=resamples,
        method="BCa",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return float(found.low), float(found.high)


# ------------------------------------------------------------------ formulas


@given(st.integers(1, 3000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilsons_interval_is_scipys(counts: tuple[int, int]) -> None:
    expected = stats.binomtest(*counts).proportion_ci(0.95, method="wilson")
    assert ends(wilson_interval(*counts)) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_the_bootstrap_of_a_mean_is_scipys() -> None:
    values = np.random.default_rng(1).random(40)
    units = np.stack([values, np.ones(40)], axis=1)
    found = bootstrap_interval(units, lambda sums: sums[..., 0] / sums[..., 1], resamples=300)
    assert ends(found) == pytest.approx(of_scipy(40, lambda drawn: values[drawn].mean()))
    # Half of the resamples that score as the cases do count as below: of 7 of 10, a quarter of them tie.
    few = np.array([1.0] * 7 + [0.0] * 3)
    tied = bootstrap_interval(
        np.stack([few, np.ones(10)], axis=1), lambda sums: sums[..., 0] / sums[..., 1], resamples=300
    )
    assert ends(tied) == pytest.approx(of_scipy(10, lambda drawn: few[drawn].mean()))
    # 30 of 100: 0.3 +- 1.96 sqrt(0.3 * 0.7 / 100) = 0.210 .. 0.390
    rate = scores(*[[1.0]] * 30, *[[0.0]] * 70).interval(is_share=False)
    assert ends(rate) == pytest.approx((0.210, 0.390), abs=0.015)


def test_the_bootstrap_of_pooled_means_and_edit_scores_is_scipys() -> None:
    """A pooled mean weighs cases; an edit score is the harmonic mean of percentages with two decimals."""
    generator = np.random.default_rng(2)
    values, weights = generator.random(25), generator.integers(1, 5, 25).astype(float)
    pooled = scores(*np.stack([values, weights], axis=1).tolist(), is_pooled=True)
    expected = of_scipy(25, lambda drawn: np.average(values[drawn], weights=weights[drawn]))
    assert ends(pooled.interval(is_share=True, resamples=300)) == pytest.approx(expected)
    parts = generator.random((25, 2))

    def harmonic(drawn: Values) -> float:
        first, second = np.round(100 * parts[drawn].mean(axis=0), 2)
        return float(2 / (1 / first + 1 / second) / 100)

    found = scores(*parts.tolist(), factors=(0, 1)).interval(is_share=True, resamples=300)
    assert ends(found) == pytest.approx(of_scipy(25, harmonic), abs=1e-4)  # both are rounded


def test_the_resamples_of_many_cases_are_those_of_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    values = scores(*np.random.default_rng(3).random((30, 1)).tolist())
    whole = values.interval(is_share=False, resamples=101)
    monkeypatch.setattr("lm_edit.results.statistics.intervals.KEPT_DRAWS", 0)
    monkeypatch.setattr("lm_edit.results.statistics.intervals.BATCH_NUMBERS", 100)
    assert values.interval(is_share=False, resamples=101) == pytest.approx(whole)


def test_intervals_need_no_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)  # importing it fails
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    assert scores([0.5], [0.25], [1.0]).interval(is_share=True) is not None
    assert scores([1.0], [0.0]).interval(is_share=True) == wilson_interval(1, 2)


# ------------------------------------------------------------------ the rule


@given(st.lists(st.sampled_from([0.0, 1 / 3, 0.5, 0.999, 1.0]), min_size=2, max_size=40))
def test_a_standard_error_shows_whether_all_cases_score_0_or_1(values: list[float]) -> None:
    """lm-eval's standard error of the mean; the number of successes follows exactly."""
    summary = Summary(float(np.mean(values)), True, mean_stderr(values), len(values))
    assert summary.successes == (pytest.approx(sum(values)) if set(values) <= {0.0, 1.0} else None)
    assert summary._replace(is_share=False).successes is None  # a count


@pytest.mark.parametrize("values", [[1, 0, 0], [1, 1, 1], [0, 0]])
def test_successes_have_wilsons_interval_with_and_without_their_cases(values: list[float]) -> None:
    summary = Summary(float(np.mean(values)), True, mean_stderr(values), len(values))
    expected = wilson_interval(int(sum(values)), len(values))
    assert estimate(summary, scores(*([value] for value in values))) == Estimate(expected, "")
    assert estimate(summary, None) == Estimate(expected, NO_SAMPLES)


@given(st.integers(2, 12), st.integers(1, 4), st.booleans(), st.data())
def test_the_standard_error_over_seeds_is_an_upper_bound(
    num_cases: int, num_seeds: int, successes: bool, data: st.DataObject
) -> None:
    score = st.sampled_from([0.0, 1.0]) if successes else st.sampled_from([0.0, 0.25, 0.5, 1.0])
    values = np.array(data.draw(st.lists(score, min_size=num_cases * num_seeds, max_size=num_cases * num_seeds)))
    seeds = values.reshape(num_seeds, num_cases)
    summaries = [Summary(float(np.mean(one)), True, mean_stderr(list(one)), num_cases) for one in seeds]
    found, means = over_seeds(summaries), seeds.mean(axis=0)
    assert found.value == pytest.approx(means.mean())
    assert found.stderr >= mean_stderr(list(means)) - 1e-12
    if num_seeds == 1:
        assert found.stderr == pytest.approx(summaries[0].stderr)
    if successes:  # Wilson's interval, which takes the same bound
        assert estimate(found, None).interval == wilson_interval(found.value * num_cases, num_cases)


def test_cases_under_one_edit_are_not_independent() -> None:
    """With samples they are drawn together; without, the approximation is named. Equal, they count once."""
    values, edits = [[1.0], [1.0], [0.0], [0.0], [1.0], [0.0]], ("a", "a", "b", "b", "c", "c")
    found = scores(*values, edits=edits).interval(is_share=True)
    assert found is not None and found.method == "BCa bootstrap"
    assert ends(found) == ends(scores([1.0], [0.0], [0.5]).interval(is_share=False))
    assert scores(*[[1.0]] * 6, edits=edits).interval(is_share=True) == wilson_interval(3, 3)
    summary = Summary(0.5, True, mean_stderr([1, 1, 0, 0, 1, 0]), 6, each_own_edit=False)
    without = estimate(summary, None).interval
    assert without == normal_interval(0.5, summary.stderr, is_share=True) and "normal" in without.method


def test_the_normal_approximation_is_clipped_for_shares_only() -> None:
    assert ends(normal_interval(0.9, 0.1, is_share=True)) == pytest.approx((0.704, 1.0), abs=1e-3)
    assert ends(normal_interval(0.9, 0.1, is_share=False)) == pytest.approx((0.704, 1.096), abs=1e-3)


def test_scores_without_an_interval_have_a_reason() -> None:
    assert estimate(Summary(math.nan, True), None).note == "no case was scored"
    assert estimate(Summary(math.inf, False), None).note == "the score is infinite"
    assert estimate(Summary(0.5, True, 0.0, 4), None) == Estimate(None, ALL_EQUAL)  # all cases score 0.5
    assert estimate(Summary(0.0, False), scores([0.0], [0.0])) == Estimate(None, ALL_EQUAL)  # a count
    assert estimate(Summary(0.5, False), None) == Estimate(None, NO_SAMPLES)
    assert estimate(Summary(0.7, False), scores([0.0], [1.0])).note == "the score does not follow from single cases"


# ------------------------------------------------------------------ one rule everywhere


def test_tables_figures_and_the_leaderboard_have_the_same_intervals(tmp_path: Path, capsys: Any) -> None:
    """Of successes, of means of log-probabilities, and of edit scores; with samples and without."""
    pytest.importorskip("statsmodels", reason="the statistics of the leaderboard are an extra")
    pytest.importorskip("scikit_posthocs", reason="the statistics of the leaderboard are an extra")
    for samples in (True, False):
        folder = tmp_path / f"samples-{samples}"
        for task in ("bake_es", "bake_qj"):
            write_run(folder, task, samples=samples, date=f"2026-11-21T10-00-0{task == 'bake_es':d}.000001")
        rows = load_results(folder).to_dict("records")
        found = {(row["task"], row["metric"]): interval_of(row).interval for row in rows}
        methods = {interval.method for interval in found.values() if interval}
        assert methods == {"Wilson", "BCa bootstrap" if samples else "normal approximation"}

        assert run_verb(["results", "show", str(folder)]) == 0
        lines = printed_lines(capsys)
        shown = {tuple(line.split(" | ")[:2]): line.split(" | ")[2] for line in lines if line.startswith("| ")}
        for (task, metric), interval in found.items():
            text = shown[f"| {task}", metric]
            mark = "~" if interval and interval.method == "normal approximation" else ""
            assert interval is None or f", {mark}{interval.low:.3f} to {interval.high:.3f} (" in text, metric
            assert interval is not None or " to " not in text
        assert ("1.96 standard errors" in lines[-1]) is not samples

        assert run_verb(["leaderboard", str(folder), "-o", str(folder / "site")]) == 0
        with (folder / "site" / "leaderboard.csv").open(encoding="utf-8", newline="") as file:
            table = {(line["task"], line["metric"]): line for line in csv.DictReader(file)}
        for place, interval in found.items():
            line = table[place]
            given_ends = (line["low"], line["high"], line["interval"])
            assert given_ends == ((repr(interval.low), repr(interval.high), interval.method) if interval else ("",) * 3)

        frame = load_results(folder)
        for place, interval in found.items():
            drawn = cell(frame[(frame["task"] == place[0]) & (frame["metric"] == place[1])])
            if interval is None:
                assert math.isnan(drawn.low)
            else:
                assert (drawn.low, drawn.high) == ends(interval)
        capsys.readouterr()


def test_a_file_that_is_written_again_is_read_again(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    row = next(row for row in load_results(path).to_dict("records") if row["metric"] == "efficacy_prob")
    assert interval_of(row).note == ""
    samples = next(tmp_path.rglob("samples_*.jsonl"))
    samples.unlink()
    path.touch()
    assert interval_of(row).note == NO_SAMPLES


def test_damaged_samples_are_an_error(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    samples = next(tmp_path.rglob("samples_*.jsonl"))
    samples.write_text("".join(samples.read_text(encoding="utf-8").splitlines(keepends=True)[:-1]), encoding="utf-8")
    with pytest.raises(EditingError, match="documents in the samples, but"):
        interval_of(load_results(path).to_dict("records")[0])


def test_frames_without_files_name_the_approximation() -> None:
    row = {"value": 2.5, "is_share": False, "stderr": 0.5, "n": 30.0, "group_size": None, "file": "elsewhere.json"}
    found = interval_of(row)
    assert found == Estimate(normal_interval(2.5, 0.5, is_share=False), NO_SAMPLES)
    assert describe_intervals([found, Estimate(None, ALL_EQUAL)]) == (
        "95% intervals over cases (normal approximation (1.96 standard errors) where scores of single cases are "
        "missing); none where all cases score the same, or there are fewer than two"
    )
