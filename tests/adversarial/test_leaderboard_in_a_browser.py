"""The page in headless Chromium, from a file: sorting, filters, columns, links, cases, hostile answers, a phone."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import pytest

pytest.importorskip("statsmodels", reason="the statistics are in the extra leaderboard")
pytest.importorskip("scikit_posthocs", reason="the statistics are in the extra leaderboard")
pytest.importorskip("playwright.sync_api", reason="needs playwright")

import pandas as pd
from board_frames import document, frames
from chromium import Visits, chromium, needs_chromium, open_viewer

from lm_edit.leaderboard.cases import Cases
from lm_edit.leaderboard.published import published_rows
from lm_edit.leaderboard.render_html import render_html
from lm_edit.leaderboard.table import build_board

pytestmark = needs_chromium

HOSTILE = '<img src=x onerror="window.broken=1"></script><script>window.broken=1</script>'
TASKS = ("bake_es/efficacy_prob", "bake_es/efficacy_match", "bake_es/efficacy_argmax", "bake_rq/reverse_qa_prob")
EDITORS = {"unedited": 1, "rome": 7, "memit": 5, HOSTILE: 3}


@pytest.fixture(scope="module")
def page_file(tmp_path_factory) -> Path:
    """Four columns of which two are shown; an editor that scores k of 8 has its own answers."""
    scores = {
        editor: {task: [float(case < (k + shift) % 8) for case in range(8)] for shift, task in enumerate(TASKS)}
        for editor, k in EDITORS.items()
    }
    singles = frames(scores, data="hub")
    streams = frames({"rome": scores["rome"]}, data="hub", mode="sequential", num_edits=8)
    results, cases = (pd.concat(tables, ignore_index=True) for tables in zip(singles, streams, strict=True))
    board = build_board(results, cases, resamples=99)
    documents = [
        document(
            row, case, HOSTILE if row["editor"] == HOSTILE else f" answer of {row['editor']}", value=float(case % 2)
        )
        for row in results.to_dict("records")
        if row["metric"] == "efficacy_prob"
        for case in range(3)
    ]
    page = render_html(board, published_rows(board.columns), Cases(documents), HOSTILE).text
    path = tmp_path_factory.mktemp("board") / "index.html"
    path.write_text(page, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started


@pytest.fixture
def visit(browser, page_file):
    """Open the page; afterwards nothing may have been logged, loaded or run by an answer."""
    visits = Visits(browser)
    yield functools.partial(visits.open, page_file)
    assert all(page.evaluate("window.broken") is None for page in visits.pages)
    visits.close()


@pytest.fixture(scope="module")
def page_of_two_precisions(tmp_path_factory) -> Path:
    """Two models of one name; only the runs of the unedited models have its answers."""
    parts = [
        frames({editor: {TASKS[0]: [1.0, 0.0]} for editor in ("unedited", "rome")}, data="hub", model_hash=precision)
        for precision in ("float32", "bfloat16")
    ]
    results, cases = (pd.concat(tables, ignore_index=True) for tables in zip(*parts, strict=True))
    documents = [
        dataclasses.replace(one, questions=[dataclasses.replace(one.questions[0], unedited=None)])
        for row in results.to_dict("records")
        for one in [document(row, 0, f" {row['editor']} in {row['model_hash']}")]
    ]
    page = render_html(build_board(results, cases, resamples=99), [], Cases(documents), "two").text
    path = tmp_path_factory.mktemp("two") / "index.html"
    path.write_text(page, encoding="utf-8")
    return path


def test_an_edit_is_compared_with_the_unedited_model_of_its_own_precision(browser, page_of_two_precisions):
    page = browser.new_context().new_page()
    page.set_default_timeout(8000)
    page.goto(f"file://{page_of_two_precisions}")
    open_viewer(page, page.locator("#tables button.cell", has_text="0.500").first)
    options = page.locator("#viewa option").all_inner_texts()
    assert len(set(options)) == 4 and any("bfloat16" in text for text in options)
    for precision, other in (("float32", "bfloat16"), ("bfloat16", "float32")):
        page.select_option("#viewa", label=f"rome (demo {precision}, single edits)")
        text = page.locator("#viewerbody").inner_text()
        assert f"rome in {precision}" in text and f"unedited in {precision}" in text
        assert f"unedited in {other}" not in text
    page.context.close()


def first_column(page, table: int = 0) -> list[str]:
    cells = page.locator("#tables table").nth(table).locator("tbody th")
    return [text.split("\n")[0] for text in cells.all_inner_texts()]


def header(page, name: str):
    return page.locator("#tables table").first.locator("thead button", has_text=name)


def test_tables_sort_filter_and_show_columns(visit):
    page = visit()
    assert page.locator("h1").inner_text() == HOSTILE  # as text
    assert first_column(page) == ["unedited", HOSTILE, "memit", "rome"]
    # efficacy_prob: rome 7/8, memit 5/8, the other 3/8; the unedited model stays on top.
    header(page, "efficacy_prob").click()
    assert first_column(page) == ["unedited", "rome", "memit", HOSTILE]
    header(page, "efficacy_prob").click()
    assert first_column(page) == ["unedited", HOSTILE, "memit", "rome"]
    assert page.locator("th[aria-sort=ascending]").count() >= 1
    header(page, "efficacy_prob").click()
    assert page.locator("th[aria-sort=ascending]").count() == 0

    page.fill("#find", "memit single")
    assert first_column(page) == ["unedited", "memit"]
    page.fill("#find", "no such editor")
    assert page.locator("#tables table").count() == 0 and page.locator("#status").inner_text() == "Nothing matches."
    page.fill("#find", "")
    page.select_option("#section", "demo: stream of 8 edits")
    assert page.locator("#tables table").count() == 1 and first_column(page) == ["unedited", "rome"]
    page.select_option("#section", "")

    assert "reverse_qa_prob" in page.locator("#tables thead").first.inner_text()
    assert "efficacy_match" not in page.locator("#tables thead").first.inner_text()
    page.click("#chooser summary")
    page.fill("#findcolumn", "efficacy_match")
    page.check('input[data-column="bake_es efficacy_match"]')
    assert "efficacy_match" in page.locator("#tables thead").first.inner_text().replace("\n", "")
    page.keyboard.press("Escape")
    assert not page.locator("#chooser .panel").is_visible()


def test_cells_have_interval_coverage_marks_and_reasons(visit):
    page = visit()
    cell = page.locator("#tables tbody tr", has_text="rome").first.locator("td button").first
    assert "8/8" in cell.inner_text()
    title = cell.get_attribute("title")
    assert "8 of 8 cases have a score." in title and "Against the unedited model: +" in title and "Holm" in title
    printed = page.locator("section", has=page.locator("h2", has_text="Printed in papers"))
    assert "BIRD table 3" in printed.inner_text() and printed.locator(".badge", has_text="printed").count() > 5


def test_cases_of_two_editors_side_by_side(visit):
    page = visit("#columns=bake_es+efficacy_prob")
    open_viewer(page, page.locator("#tables tbody tr", has_text="rome").first.locator("td button").first)
    viewer = page.locator("#viewer")
    assert viewer.is_visible()
    text = viewer.inner_text()
    # Edit, prompt, answers before and after with what follows the stop, scores, diagnostics.
    for part in ("tower 0 is in Rome (before: Paris)", "Where is tower 0?", "Paris", "answer of rome", "and then?"):
        assert part in text
    for part in ("efficacy_prob", "0.000", "final loss", "0.046123", "log-probability -0.500", "Italy"):
        assert part in text
    page.select_option("#viewb", label=HOSTILE)
    sides = page.locator(".question").first.locator(".side")
    assert [side.split("\n")[0] for side in sides.all_inner_texts()] == [
        "before the edit",
        "rome (single edits)",
        HOSTILE,
    ]
    assert HOSTILE in sides.nth(2).locator("pre").inner_text()
    page.click("#next")
    assert "Where is tower 1?" in page.locator(".question").first.inner_text()

    # The address holds all of it: another visit shows the same.
    again = visit(page.evaluate("location.hash"))
    again.locator("#viewer[open]").wait_for()
    assert again.locator("#viewertitle").inner_text() == page.locator("#viewertitle").inner_text()
    assert "Where is tower 1?" in again.locator(".question").first.inner_text()
    again.keyboard.press("Escape")
    # The event of closing comes after the key.
    again.wait_for_function("!document.getElementById('viewer').open && !location.hash.includes('task=')")


def test_links_restore_the_table(visit):
    page = visit()
    page.fill("#find", "e")
    header(page, "efficacy_prob").click()
    header(page, "efficacy_prob").click()
    page.click("#chooser summary")
    page.click("#none")
    page.check('input[data-column="bake_es efficacy_prob"]')
    again = visit(page.evaluate("location.hash"))
    assert again.locator("#tables").inner_text() == page.locator("#tables").inner_text()
    assert again.locator("#find").input_value() == "e"
    # A link with other names shows what exists.
    broken = visit("#columns=nothing&sort=-nothing&task=nothing&doc=7&a=nobody")
    broken.locator("#viewer[open]").wait_for()
    assert "does not have: task nothing, case 7, editor nobody" in broken.locator("#stale").inner_text()


def test_keyboard_alone_opens_and_closes_a_case(visit):
    page = visit("#columns=bake_es+efficacy_prob")
    page.locator("#tables tbody td button").nth(1).focus()
    page.keyboard.press("Enter")
    page.locator("#viewer[open]").wait_for()
    page.keyboard.press("Escape")
    assert not page.locator("#viewer").is_visible()


def test_dark_mode_follows_the_system_and_the_switch(visit):
    background = "getComputedStyle(document.body).backgroundColor"
    page = visit(color_scheme="dark")
    dark = page.evaluate(background)
    page.click("#theme")
    light = page.evaluate(background)
    assert (dark, light) == ("rgb(20, 23, 27)", "rgb(255, 255, 255)")
    assert visit().evaluate(background) == light


def test_a_phone_scrolls_tables_and_not_the_page(visit):
    page = visit(viewport={"width": 375, "height": 700})
    widths = "[document.documentElement.scrollWidth, innerWidth]"
    content, window = page.evaluate(widths)
    assert content <= window
    page.click("#chooser summary")
    box = page.locator("#chooser .panel").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 375
    page.keyboard.press("Escape")
    viewer = open_viewer(page, page.locator("#compare"))
    assert viewer.bounding_box()["width"] == 375
    assert page.evaluate("document.querySelector('#viewer').scrollWidth") <= 375


def test_the_data_in_the_page_are_the_numbers_of_the_table(visit):
    page = visit()
    data = json.loads(page.locator("#board").text_content())
    (rome,) = [row for row in data["sections"][0]["rows"] if row["label"] == "rome"]
    assert rome["cells"]["0"]["value"] == 7 / 8 and "0.875" in page.locator("#tables").inner_text()
