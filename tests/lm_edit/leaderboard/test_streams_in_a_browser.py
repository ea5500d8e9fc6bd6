"""The curves of a section's streams, from the kept run of the gallery, in headless Chromium."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("statsmodels", reason="the statistics are in the extra leaderboard")
pytest.importorskip("scikit_posthocs", reason="the statistics are in the extra leaderboard")
pytest.importorskip("playwright.sync_api", reason="needs playwright")

from chromium import Visits, chromium, needs_chromium

from lm_edit.leaderboard.site import make_site

pytestmark = needs_chromium

(RUN,) = (Path(__file__).parents[3] / "docs/_data/gallery/results").glob("*/ft_m__sequential-16__*")


def test_checkpoints_intervals_and_the_score_right_after_each_edit(tmp_path):
    page = tmp_path / "index.html"
    page.write_text(make_site([str(RUN)], resamples=99).files["index.html"], encoding="utf-8")
    (path,) = RUN.glob("results_*.json")
    saved = json.loads(path.read_text(encoding="utf-8"))["results"]["bake_es"]
    with chromium() as browser:
        visits = Visits(browser)
        shown = visits.open(page)
        shown.locator("summary", has_text="Over the stream").click()
        figure = shown.locator("details[open] figure")
        assert figure.locator("polyline").get_attribute("points").count(",") == 4
        assert figure.locator("polygon.band").count() == 1 and figure.locator("circle.immediate").count() == 1
        words = figure.locator("figcaption").inner_text()
        for stage in (2, 4, 8, 16):
            assert f"{saved[f'efficacy_prob@{stage},none']:.3f} after {stage}" in words
        assert f"right after each edit {saved['efficacy_prob@immediate,none']:.3f}" in words
        # Another score of the same streams; the block stays open.
        shown.select_option("#curve-0", "bake_es efficacy_gen_em")
        assert f"{saved['efficacy_gen_em@16,none']:.3f} after 16" in shown.locator("figcaption").first.inner_text()
        assert figure.locator("title", has_text="right after each edit").count() == 1
        visits.close()


def test_a_single_checkpoint_has_a_mark_with_its_interval(tmp_path):
    """Beside a stream with several; a line through one point draws nothing."""
    (path,) = RUN.glob("results_*.json")
    saved = json.loads(path.read_text(encoding="utf-8").replace('"ft_m"', '"rome"'))
    for scores in saved["results"].values():
        for name in [name for name in scores if name.partition("@")[2].split(",")[0].split("_")[0] in ("2", "4", "8")]:
            del scores[name]
    other = tmp_path / "other"
    other.mkdir()
    (other / path.name).write_text(json.dumps(saved), encoding="utf-8")
    page = tmp_path / "index.html"
    page.write_text(make_site([str(RUN), str(other)], resamples=99).files["index.html"], encoding="utf-8")
    with chromium() as browser:
        visits = Visits(browser)
        shown = visits.open(page)
        shown.locator("summary", has_text="Over the stream").click()
        figure = shown.locator("details[open] figure")
        assert sorted(line.get_attribute("points").count(",") for line in figure.locator("polyline").all()) == [1, 4]
        assert figure.locator("circle.only").count() == 1
        visits.close()
