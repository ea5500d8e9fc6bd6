"""Curves over the checkpoints of a stream, from the kept run of the gallery; lines of 10,000 steps."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest

from edit_hooks import EditingError
from lm_edit.figures import stream_curves
from lm_edit.figures.drawing.charts import MAX_POINTS, Chart, Lines, Series, thinned
from lm_edit.figures.drawing.output import write_figure
from lm_edit.figures.inputs import Inputs
from lm_edit.figures.needs import Options

pytest.importorskip("matplotlib", reason="the report extra is not installed")
from drawn import lines

(RUN,) = (Path(__file__).parents[3] / "docs/_data/gallery/results").glob("*/ft_m__sequential-16__*")
STAGES = [2, 4, 8, 16]


@pytest.fixture(scope="module")
def chart() -> Chart:
    inputs = Inputs([str(RUN)])
    return stream_curves.draw(stream_curves.Streams(inputs.rows(), inputs.cases(), inputs.steps()))


def samples(task: str) -> list[dict[str, float]]:
    (path,) = RUN.glob(f"samples_{task}_*.jsonl")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("metric", ["efficacy_prob", "efficacy_gen_em"])
def test_retained_and_immediate_scores_are_over_the_same_cases(metric):
    inputs = Inputs([str(RUN)])
    found = stream_curves.Streams(inputs.rows(), inputs.cases(), inputs.steps())
    chart = stream_curves.draw(found, Options(metric=metric))
    drawn = lines(chart)
    own = samples("bake_es")
    assert len(own) == 16
    edited = {stage: [one for one in own if one[f"{metric}@{stage}_n"]] for stage in STAGES}
    assert {stage: len(cases) for stage, cases in edited.items()} == {stage: stage for stage in STAGES}
    for name, column in (("ft_m", f"{metric}@{{}}"), ("ft_m, right after each edit", f"{metric}@immediate")):
        by_hand = [sum(one[column.format(stage)] for one in edited[stage]) / stage for stage in STAGES]
        assert drawn[name] == (STAGES, pytest.approx(by_hand))
    assert drawn["ft_m"][1][-1] < drawn["ft_m, right after each edit"][1][-1]
    assert all(
        low < high for low, high in zip(chart.panels[0].series[0].low, chart.panels[0].series[0].high, strict=True)
    )


def test_the_drift_is_that_of_every_step(chart):
    (path,) = RUN.glob("results_*.json")
    steps = json.loads(path.read_text(encoding="utf-8"))["config"]["edited_hf"]["steps"]
    assert [panel.title for panel in chart.panels[2:]] == ["Drift of the weights", "Drift on a plain sentence"]
    for panel, measure in ((2, "norm_ratio"), (3, "probe_loss")):
        assert lines(chart, panel)["ft_m"] == (list(range(1, 17)), pytest.approx([one[measure] for one in steps]))


def test_a_column_can_be_chosen_and_streams_are_needed():
    inputs = Inputs([str(RUN)])
    found = stream_curves.Streams(inputs.rows(), inputs.cases(), inputs.steps())
    chosen = stream_curves.draw(found, Options(metric="neighborhood_prob"))
    assert "neighborhood_prob" in chosen.panels[0].value_label
    with pytest.raises(EditingError, match="no stream has the column gone at a checkpoint"):
        stream_curves.draw(found, Options(metric="gone"))
    alone = found._replace(rows=found.rows[found.rows["stage"] == ""])
    with pytest.raises(EditingError, match="no run is a stream with checkpoints"):
        stream_curves.draw(alone)
    without = stream_curves.draw(found._replace(cases=found.cases.iloc[:0]))
    assert list(without.panels[0].series[1].positions) == [16.0]  # the mean over the whole stream


def test_a_long_line_keeps_its_extremes_and_says_so(tmp_path):
    values = [0.5 + 0.1 * math.sin(step / 50) for step in range(10_000)]
    values[6_543], values[7_000] = 40.0, math.nan
    series = Series(name="a", values=values, positions=list(range(10_000)), counts=list(range(10_000)))
    found = thinned(series)
    assert len(found.values) <= MAX_POINTS + 3 and max(v for v in found.values if not math.isnan(v)) == 40.0
    assert found.positions[0] == 0 and found.positions[-1] == 9_999 and 6_543 in found.positions
    assert any(map(math.isnan, found.values)) and list(found.counts) == list(found.positions)
    assert thinned(Series(name="b", values=[1.0] * MAX_POINTS)).values == [1.0] * MAX_POINTS
    panel = Lines(title="t", series=[series], position_label="x", value_label="y", bands=True)
    drawn = Chart(name="stream_curves", title="t", panels=[panel])
    assert "Lines of up to 10000 points are drawn by the smallest and the largest value" in drawn.sentences[-1]
    began = time.process_time()
    for name in ("long.svg", "long.html"):
        write_figure(drawn, tmp_path / name)
    assert (tmp_path / "long.svg").stat().st_size < 100_000 and time.process_time() - began < 10
