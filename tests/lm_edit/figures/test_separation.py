"""The figure of areas under the curve, from the kept files of ``lm-edit results separate --out``."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

from edit_hooks import EditingError
from lm_edit.figures.drawing.charts import Bars, Chart
from lm_edit.figures.inputs import Inputs
from lm_edit.figures.needs import DEFAULTS
from lm_edit.figures.separation import MOST_COLUMNS, NEEDS, SPEC, draw, read_groups

KEPT = ROOT / "docs/_data/metrics_judged"


def content(editor: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((KEPT / f"{editor}.json").read_text(encoding="utf-8"))
    return found


def test_every_column_that_separates_is_a_bar_with_its_interval() -> None:
    chart = SPEC.draw(Inputs([str(KEPT)]), DEFAULTS)
    assert isinstance(chart, Chart)
    files = {path.stem: content(path.stem) for path in KEPT.glob("*.json")}
    found = {}
    for panel in chart.panels:
        assert isinstance(panel, Bars) and panel.start == 0.5 and 1 <= len(panel.categories) <= MOST_COLUMNS
        for series in panel.series:
            for number, column in enumerate(panel.categories):
                key = series.name, panel.title.removesuffix(", continued"), column
                found[key] = series.values[number], series.low[number], series.high[number]
    drawn = {(task, column) for _, task, column in found}
    separating = {
        (one["task"], "@".join(filter(None, (one["metric"], one["stage"]))))
        for kept in files.values()
        for one in kept["columns"]
        if one["separates"] and not one["unedited"]
    }
    assert drawn == separating and len(found) == len(files) * len(drawn)
    for (editor, task, column), numbers in found.items():
        (kept,) = (
            one
            for one in files[editor]["columns"]
            if (one["task"], "@".join(filter(None, (one["metric"], one["stage"])))) == (task, column)
        )
        assert numbers == (kept["auc"], *kept["interval"])


def test_a_column_without_an_area_is_a_gap_and_another_one_not_compared() -> None:
    first, second = content("ft_m"), content("grace")
    (kept,) = (one for one in first["columns"] if one["metric"] == "reverse_qa_prob" and not one["stage"])
    kept |= {"auc": None, "interval": None, "separates": False}
    second["columns"] = [one for one in second["columns"] if one["metric"] != "paraphrase_magnitude"]
    panels = draw([read_groups(one) for one in (first, second)]).panels
    reasons = {
        column: (series.gaps[number], math.isnan(series.low[number]))
        for panel in panels
        if isinstance(panel, Bars)
        for series in panel.series
        for number, column in enumerate(panel.categories)
        if math.isnan(series.values[number])
    }
    assert reasons == {"reverse_qa_prob": ("", True), "paraphrase_magnitude": ("not compared", True)}


def test_columns_of_several_filters_are_several_bars_in_order_of_strength() -> None:
    """A column without an area in one file has the place that its other areas give it."""
    first, second = content("ft_m"), content("grace")
    (weak,) = (one for one in first["columns"] if one["metric"] == "paraphrase_gen_em")
    first["columns"].insert(0, weak | {"filter": "judged", "auc": 0.9, "interval": [0.8, 1.0], "separates": True})
    (strong,) = (one for one in second["columns"] if one["metric"] == "paraphrase_magnitude")
    strong |= {"auc": None, "interval": None}
    (panel,) = (one for one in draw([read_groups(one) for one in (first, second)]).panels if one.title == "bake_gs")
    assert isinstance(panel, Bars)
    values = dict(zip(panel.categories, panel.series[0].values, strict=True))
    assert values["paraphrase_gen_em,judged"] == 0.9 and values["paraphrase_gen_em"] == weak["auc"]
    strengths = [
        min(abs(series.values[number] - 0.5) for series in panel.series if not math.isnan(series.values[number]))
        for number in range(len(panel.categories))
    ]
    assert strengths == sorted(strengths, reverse=True)


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    other = content("grace")
    other["first"]["compared"] = 11
    with pytest.raises(EditingError, match=r"several first groups: document_training \(12 of 12\) with .*\(11 of 12\)"):
        draw([read_groups(one) for one in (content("ft_m"), other)])
    with pytest.raises(EditingError, match="two files are about ft_m"):
        draw([read_groups(content("ft_m"))] * 2)
    with pytest.raises(EditingError, match=r"a file is of another kind \(KeyError: 'second'\)"):
        read_groups({"first": content("ft_m")["first"]})
    with pytest.raises(EditingError, match=r"there is no file .*\*\.json"):
        Inputs([str(tmp_path)]).files(NEEDS)


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="the report extra is not installed")
def test_bars_begin_at_chance() -> None:
    from matplotlib.patches import Rectangle

    from lm_edit.figures.drawing.static import draw_static

    kept = content("r_rome")
    kept["columns"] = [one for one in kept["columns"] if one["task"] in ("bake_es", "bake_truth")]
    chart = draw([read_groups(kept)])
    for panel, axes in zip(chart.panels, draw_static(chart).axes, strict=True):
        assert isinstance(panel, Bars)
        bars = [bar for bar in axes.patches if isinstance(bar, Rectangle)]
        ends = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in bars]
        assert ends == [(0.5, pytest.approx(value)) for value in panel.series[0].values]
