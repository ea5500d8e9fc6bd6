"""The page in headless Chromium: focus, preferred answers, seeds, mean ranks, numbers that JSON lacks."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("statsmodels", reason="the statistics are in the extra leaderboard")
pytest.importorskip("scikit_posthocs", reason="the statistics are in the extra leaderboard")
pytest.importorskip("playwright.sync_api", reason="needs playwright")

import pandas as pd
from board_frames import document, frames
from chromium import Visits, chromium, needs_chromium, open_viewer
from playwright.sync_api import expect

import lm_edit
from lm_edit import CaseDocument, SavedQuestion, SavedResponse
from lm_edit.leaderboard.cases import Cases
from lm_edit.leaderboard.render_html import EditorKind, render_html
from lm_edit.leaderboard.table import build_board

pytestmark = needs_chromium

ES = "bake_es/efficacy_prob"
LONG = "an_editor_of_one_name_and (settings {})"
Frames = tuple[pd.DataFrame, pd.DataFrame]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture
def visit(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Make the page of these results and open it; afterwards nothing may have been logged."""
    visits = Visits(browser)

    def open_page(
        *parts: Frames,
        documents: Sequence[CaseDocument] = (),
        edit: Callable[[str], str] = str,
        fragment: str = "",
        kinds: Mapping[str, EditorKind] | None = None,
        **options: Any,
    ) -> Any:
        results, cases = (pd.concat(tables, ignore_index=True) for tables in zip(*parts, strict=True))
        results.attrs["groups"] = parts[0][0].attrs.get("groups", {})
        text = render_html(build_board(results, cases, resamples=99), [], Cases(documents), "t", kinds=kinds).text
        path = tmp_path / "index.html"
        path.write_text(edit(text), encoding="utf-8")
        return visits.open(path, fragment, **options)

    yield open_page
    visits.close()


def two_regimes() -> tuple[Frames, Frames]:
    scores = {"rome": {ES: [1.0, 0.0, 1.0]}, "memit": {ES: [1.0, 0.0, 0.0]}}
    return frames(scores), frames(scores, mode="sequential", num_edits=3)


def documents_of(*parts: Frames, number: int = 3) -> list[CaseDocument]:
    rows = [row for results, _ in parts for row in results.to_dict("records")]
    return [document(row, case, f" answer {case}") for row in rows for case in range(number)]


def focused(page: Any) -> str:
    return page.evaluate("document.activeElement.id || document.activeElement.dataset.sort || ''")


def test_a_control_that_redraws_keeps_the_focus(visit):
    page = visit(*two_regimes())
    page.locator("#tables thead").nth(1).locator("button", has_text="efficacy_prob").focus()
    for order in ("descending", "ascending", "none"):
        page.keyboard.press("Enter")
        table = page.locator("#tables table").nth(1)
        assert table.locator("th[aria-sort]").nth(1).get_attribute("aria-sort") == order
        assert focused(page) == "0" and table.locator("button:focus").count() == 1


def test_the_viewer_keeps_the_focus(visit):
    parts = two_regimes()
    page = visit(*parts, documents=documents_of(*parts))
    open_viewer(page, page.locator("#tables button.cell").first)
    page.focus("#next")
    page.keyboard.press("Enter")
    assert focused(page) == "next" and "doc=1" in page.evaluate("location.hash")
    page.keyboard.press("Enter")  # to the last case, where there is no next one
    assert focused(page) == "before" and "doc=2" in page.evaluate("location.hash")
    for select, value in (("viewscore", {"index": 0}), ("viewb", {"index": 1})):
        page.focus(f"#{select}")
        page.select_option(f"#{select}", **value)
        assert focused(page) == select


def pair(row: dict[str, Any], kind: str, tokens: Sequence[int | None]) -> CaseDocument:
    """A case whose first candidate is likelier per token, the second one in total."""
    questions = [
        SavedQuestion(
            kind=kind, prompt="P", wanted="", target=target,
            answers={"": SavedResponse(logprob=logprob, num_tokens=number, is_greedy=False)},
        )
        for target, logprob, number in zip((" long", " short"), (-6.0, -4.0), tokens, strict=True)
    ]  # fmt: skip
    return dataclasses.replace(document(row, 0, ""), questions=questions)


@pytest.mark.parametrize(
    ("kind", "tokens", "bold", "criterion"),
    [
        ("efficacy", (6, 1), "long", "per token"),
        ("", (6, 1), "short", "of the whole text"),  # lm-eval's acc
        ("efficacy", (None, None), "short", "of the whole text"),
    ],
)
def test_the_bold_answer_is_the_one_that_the_score_prefers(visit, kind, tokens, bold, criterion):
    results, cases = frames({"rome": {ES: [1.0]}})
    page = visit((results, cases), documents=[pair(results.to_dict("records")[0], kind, tokens)])
    open_viewer(page, page.locator("#tables button.cell").first)
    assert page.locator(".prefers").all_inner_texts()[0].strip().startswith(bold)
    assert f"Bold: highest log-probability {criterion}." in page.locator(".question").inner_text()


def test_a_seed_has_its_own_number_beside_the_mean(visit):
    """Seeds with 4 of 4 and 1 of 4: the mean is 0.625; one task was evaluated with the second seed alone."""
    first = frames({"rome": {ES: [1.0] * 4}})
    second = frames({"rome": {ES: [0.0, 0.0, 0.0, 1.0], "bake_gs/paraphrase_prob": [1.0, 0.0]}}, seed=1)
    page = visit(first, second, documents=documents_of(first, second, number=2))
    open_viewer(page, page.locator("#tables button.cell").first)
    for index, own in ((0, "1.000"), (1, "0.250")):
        page.select_option("#viewa", index=index)
        page.click("#viewscores")
        text = page.locator("#viewerbody details .facts").first.inner_text()
        assert f"rome, seed {index}: {own} Over all seeds, mean 0.625: 4 of 4 cases have a score." in text
    page.select_option("#viewtask", "bake_gs")
    for index, own in ((0, "\u2013"), (1, "0.500")):
        page.select_option("#viewa", index=index)
        page.click("#viewscores")
        text = page.locator("#viewerbody details .facts").first.inner_text()
        assert f"rome, seed {index}: {own} " in text and "Evaluated with seed 1 alone." in text


def test_subjects_are_no_patterns_of_a_replacement(visit):
    results, cases = frames({"rome": {ES: [1.0]}})
    case = document(results.to_dict("records")[0], 0, "")
    edit = {"prompt": "{} sings", "subject": "A$$AP $& Rocky", "target_new": "x"}
    page = visit((results, cases), documents=[dataclasses.replace(case, edits=[edit])])
    open_viewer(page, page.locator("#tables button.cell").first)
    assert "Edit: A$$AP $& Rocky sings" in page.locator("#viewerbody").inner_text()


def test_names_at_the_mean_ranks_are_inside_unique_and_listed(visit):
    names = [*(LONG.format(number) for number in ("0badcafe", "deadbeef")), "編集手法の長い名前" * 3, "W" * 40, "rome"]
    tasks = [f"{name}_es/m" for name in "xyz"]
    scores = {name: {task: [float(case < k) for case in range(8)] for task in tasks} for k, name in enumerate(names)}
    page = visit(frames(scores))
    texts = """[...document.querySelectorAll('.ranks text')].map((text) => {
        const box = text.getBBox();
        return [text.firstChild.textContent, box.x, box.x + box.width];
    })"""
    drawn = page.evaluate(texts)
    assert all(left >= 0 and right <= 640 for _, left, right in drawn), drawn
    labels = [text for text, *_ in drawn if re.match(r"\d+\. ", text)]
    assert len(set(labels)) == len(names) and sum("…" in label for label in labels) >= 2
    assert all(re.search(r" \d\.\d\d$", label) for label in labels)
    listed = page.locator(".ranks ol li").all_inner_texts()
    assert listed == [f"{name}: {place}.00" for place, name in enumerate(reversed(names), start=1)]


def test_infinite_numbers_are_shown_and_sorted(visit):
    results, cases = frames({"rome": {"wiki/ppl": [1.0]}, "memit": {"wiki/ppl": [7.0]}}, higher_is_better=False)
    results.loc[results["editor"] == "rome", "value"] = math.inf
    page = visit((results, cases))
    page.locator("#tables thead button", has_text="ppl").click()
    assert page.locator("#tables tbody .value").all_inner_texts() == ["∞", "7.000"]
    assert "the score is infinite" in str(page.locator("button.cell").first.get_attribute("title"))


def test_groups_show_why_they_have_no_cases(visit):
    results, cases = frames({"rome": {"mmlu/acc": [1.0, 0.0]}})
    results.attrs["groups"] = {"mmlu": ["mmlu_anatomy"]}
    results["n"] = math.nan
    page = visit((results, cases[:0]))
    cell = page.locator("button.cell")
    assert cell.inner_text().strip() == "0.500"
    assert "a group has no cases of its own" in str(cell.get_attribute("title"))
    cell.click()
    assert "A group has no cases of its own" in page.locator("#viewerbody").inner_text()


def test_a_large_page_is_drawn_when_typing_pauses(visit):
    def enlarge(text: str) -> str:
        block = re.search(r'(?<=id="board">)(.*?)(?=</script>)', text, re.DOTALL)
        assert block is not None
        board = json.loads(block[0])
        board["columns"] += [{**board["columns"][0], "name": f"other {n}", "shown": False} for n in range(2001)]
        return text.replace(block[0], json.dumps(board).replace("<", "\\u003c"))

    typed = """() => {
        const find = document.getElementById("find");
        find.value = "rome";
        find.dispatchEvent(new Event("input"));
        return document.querySelectorAll("#tables tbody tr").length;
    }"""
    assert visit(*two_regimes()).evaluate(typed) == 2
    page = visit(*two_regimes(), edit=enlarge)
    assert page.evaluate(typed) == 4
    expect(page.locator("#tables tbody tr")).to_have_count(2)


# --- cases as a table ------------------------------------------------------------------------------------------------

ROME, MEMIT = [1, 1, 1, 1, 0, 0, None, 1], [0, 0, 0, 1, 0, 1, 1, 0]
KINDS = ["city", "work"]


def compared(visit: Callable[..., Any], fragment: str = "") -> Any:
    """Eight cases of two editors: rome better on 4, memit on 1, equal on 2, one without a score."""
    parts = frames({name: {ES: [math.nan if value is None else float(value) for value in values]}
                    for name, values in (("rome", ROME), ("memit", MEMIT))})  # fmt: skip
    scores = {"rome": ROME, "memit": MEMIT}
    documents = [
        dataclasses.replace(
            document(row, case, f" {row['editor']} says {case}", value=scores[row["editor"]][case]),
            category=KINDS[case % 2], report={"final_loss": 0.1 * case},
        )
        for row in parts[0].to_dict("records") for case in range(8)
    ]  # fmt: skip
    page = visit(parts, documents=documents, fragment=fragment)
    if not fragment:
        open_viewer(page, page.locator("#compare"))
        page.select_option("#viewa", label="rome")
        page.select_option("#viewb", label="memit")
    return page


def listed(page: Any) -> list[str]:
    return [text.split(":")[0] for text in page.locator(".caselist tbody th").all_inner_texts()]


def test_wins_and_losses_of_two_editors_with_their_test(visit):
    scipy_stats = pytest.importorskip("scipy.stats")
    page = compared(visit)
    assert page.locator("#viewsummary").inner_text() == (
        "Of 7 cases with both scores: rome better on 4, memit better on 1, equal on 2; exact sign test, p = 0.375."
    )
    for wins, losses in ((4, 1), (0, 0), (12, 3), (400, 310), (700, 1)):
        expected = scipy_stats.binomtest(wins, wins + losses).pvalue if wins + losses else 1.0
        # The page's script is one closed block: its function is read from the shipped file.
        source = (Path(lm_edit.__file__).parent / "leaderboard/templates/cases.js").read_text(encoding="utf-8")
        (function,) = re.findall(r"^function signTest.*?^}", source, flags=re.M | re.S)
        assert page.evaluate(f"({function})({wins}, {losses})") == pytest.approx(expected, rel=1e-9)
    rows = page.locator(".kinds tbody tr").all_inner_texts()
    assert [row.split("\t")[:6] for row in rows] == [
        ["city", "3", "0.667", "0.000", "2", "0"],
        ["work", "4", "0.750", "0.500", "2", "1"],
    ]


def test_cases_are_filtered_found_and_sorted(visit):
    page = compared(visit)
    for name, cases in (
        ("first", "0127"),
        ("second", "5"),
        ("equal", "34"),
        ("unscored", "6"),
        ("because empty answer", "6"),
        ("", "01234567"),
    ):
        page.select_option("#viewfilter", value=name)
        assert listed(page) == list(cases)
    gone = compared(visit, fragment=page.evaluate("location.hash") + "&filter=because+a+timeout")
    gone.locator("#viewer[open]").wait_for()
    assert listed(gone) == [] and gone.locator("#viewfilter option:checked").inner_text() == "unscored: a timeout"
    page.fill("#viewtext", "memit says 5")
    assert listed(page) == ["5"] and page.locator("#viewcount").inner_text() == "1 of 8 cases"
    page.fill("#viewtext", "")
    page.select_option("#viewmore", label="final loss")
    page.click("#order-more")
    assert listed(page) == list("76543210")
    page.click("#order-left")
    assert listed(page) == list("01237456"), "without a score last"
    assert page.locator('.caselist th[aria-sort="descending"]').count() == 1


def test_keys_move_through_the_listed_cases_and_links_hold(visit):
    page = compared(visit)
    page.select_option("#viewfilter", value="first")
    page.locator("#viewertitle").click()
    seen = []
    for key in ("j", "ArrowRight", "j", "j", "k"):
        page.keyboard.press(key)
        seen.append(page.locator(".question pre.prompt").first.inner_text().split("?")[0][-1])
    assert "".join(seen) == "12772"
    page.keyboard.press("/")
    page.keyboard.type("says 1")
    address = page.evaluate("location.hash")
    again = compared(visit, fragment=address)
    again.locator("#viewer[open]").wait_for()
    assert listed(again) == listed(page) == ["1"] and again.locator("#stale").count() == 0
    gone = compared(visit, fragment=re.sub("doc=[0-9]+", "doc=77", address))
    gone.locator("#viewer[open]").wait_for()
    assert "does not have: case 77" in gone.locator("#stale").inner_text()


# --- filters ---------------------------------------------------------------------------------------------------------


def test_rows_and_columns_are_filtered(visit):
    """By what edits change, set, mode, model and benchmark; the address keeps it, and the keyboard suffices."""
    values = {ES: [1.0, 0.0], "mquake_edit_wise/efficacy_argmax": [1.0, 1.0]}
    scores = dict.fromkeys(("unedited", "rome", "wise", "x"), values)
    kinds = {"rome": EditorKind("core", ("weights",)), "wise": EditorKind("more", ("weights", "hooks"))}
    parts = frames(scores), frames({"x": scores["x"]}, mode="sequential", num_edits=2, context_editor=True)
    other = frames({"rome": values}, model="other", model_hash="other")
    page = visit(*parts, other, kinds=kinds, viewport={"width": 375, "height": 700}, color_scheme="dark")

    def editors() -> list[str]:
        return [text.split("\n")[0] for text in page.locator("#tables tbody th").all_inner_texts()]

    everything = ["unedited", "rome", "wise", "x", "unedited", "x", "rome"]
    assert editors() == everything
    for label, value, expected in (
        ("Kind", "hooks", ["unedited", "wise"]),
        ("Kind", "context", ["unedited", "x"]),
        ("Set", "core", ["unedited", "rome", "rome"]),
        ("Set", "not installed", ["unedited", "x", "unedited", "x"]),
        ("Mode", "sequential", ["unedited", "x"]),
        ("Model", "other", ["rome"]),
    ):
        chooser = page.get_by_role("combobox", name=label, exact=True)
        chooser.focus()
        chooser.select_option(label=value)
        assert editors() == expected and focused(page).startswith("filter-")
        page.click("#nofilters")
        assert editors() == everything and focused(page) == "find"
    page.get_by_role("combobox", name="Benchmark", exact=True).select_option("bake")
    page.get_by_role("combobox", name="Set", exact=True).select_option("more")
    assert "tier=more" in page.evaluate("location.hash") and "benchmark=bake" in page.evaluate("location.hash")
    content, window = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert content <= window
    page.reload()
    assert editors() == ["unedited", "wise"] and page.locator("#tables thead button", has_text="_").count() == 1
    page.goto(page.url.split("#")[0] + "#mode=gone")
    assert editors() == [] and page.locator("#filter-mode option:checked").inner_text() == "gone"


# --- pairs -----------------------------------------------------------------------------------------------------------


def test_every_two_editors_are_compared(visit):
    """rome wins six cases of eight against ft and memit, which tie; Holm makes 0.03125 of three tests 0.094."""
    scores = {"rome": {ES: [1.0] * 8}, "ft": {ES: [0.0] * 6 + [1.0] * 2}, "memit": {ES: [0.0] * 6 + [1.0] * 2}}
    parts = frames(scores | {"unedited": {ES: [0.0] * 8}})
    page = visit(parts, documents=documents_of(parts, number=2), viewport={"width": 375, "height": 700})
    page.focus(".pairs summary")
    page.keyboard.press("Enter")
    table = page.locator(".pairs table")
    table.wait_for()
    assert focused(page) == "pairs" and page.locator("#status").inner_text().startswith("3 rows in 1 table.")
    rows = [row.split("\t") for row in table.locator("tr").all_inner_texts()]
    assert rows[0] == ["editor", "ft", "memit", "rome"]
    assert [" ".join(cell.split()) for cell in rows[3]] == ["rome", "6/2/0 p = 0.094", "6/2/0 p = 0.094", ""]
    assert " ".join(rows[1][2].split()) == "0/8/0 p = 1.000"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.select_option("#pairs-0", index=0)
    assert page.locator('[id="undefined"]').count() == 0
    test = "p = 0.094 (exact McNemar test, Holm over 3 pairs)"
    name = f"rome against ft: 6 wins, 2 ties, 0 losses; +0.750 on 8 cases, {test}"
    open_viewer(page, page.get_by_role("button", name=name, exact=True))
    assert page.locator("#viewertitle").inner_text().startswith("rome and ft")


# --- cost ------------------------------------------------------------------------------------------------------------


def test_scores_stand_against_the_cost_of_the_edits(visit):
    """rome is cheap and poor, memit dear and good; ft costs more than rome and is no better."""
    values = {"rome": ([1.0, 0.0, 0.0], 0.5), "ft": ([1.0, 0.0, 0.0], 2.0), "memit": ([1.0, 1.0, 0.0], 4.0)}
    results, cases = frames({name: {ES: scores} for name, (scores, _) in values.items()})
    results["edit"] = [
        {"edits": 3, "seconds_per_edit": values[name][1], "peak_memory_gib": 1.5} for name in results["editor"]
    ]
    page = visit((results, cases))
    page.click("#chooser summary")
    page.check('input[data-column="cost seconds per edit"]')
    page.keyboard.press("Escape")
    page.locator("#tables thead button", has_text="seconds per edit").click()
    rows = page.locator("#tables tbody tr")
    assert [(row.split()[0], row.split()[-1]) for row in rows.all_inner_texts()] == [
        ("memit", "4.0"), ("ft", "2.0"), ("rome", "0.50"),
    ]  # fmt: skip
    page.click(".frontier summary")
    caption = page.locator(".frontier figcaption").inner_text()
    assert "from the cheapest on: rome (0.333 at 0.50), memit (0.667 at 4.0)." in caption
    assert page.locator(".frontier circle.front").count() == 2 and page.locator(".frontier circle").count() == 3
    page.locator(".frontier select").nth(1).select_option(label="peak GiB")
    assert "memit (0.667 at 1.5)." in page.locator(".frontier figcaption").inner_text()


def test_mean_ranks_are_over_the_scores_on_screen(visit):
    gs = "bake_gs/paraphrase_prob"
    right = {"rome": (3, 2), "memit": (2, 1), "ft": (1, 3)}  # ranks 1 2 3 and 2 3 1
    scores = {
        name: {task: [float(case < count) for case in range(4)] for task, count in zip((ES, gs), both, strict=True)}
        for name, both in right.items()
    }
    results, cases = frames(scores)
    norms = {"rome": 0.04, "memit": 0.5}
    results["edit"] = [{"edits": 4, "seconds_per_edit": 1.0, "update_norm_ratio": norms.get(name)}
                       for name in results["editor"]]  # fmt: skip
    columns = "bake_es efficacy_prob|bake_gs paraphrase_prob|cost size of the update|mean rank"
    page = visit((results, cases), fragment=f"#columns={columns.replace(' ', '+')}&sort=%2Bmean+rank")
    rows = [row.split("\t") for row in page.locator("#tables tbody tr").all_inner_texts()]
    assert [(row[0].split()[0], *row[-2:]) for row in rows] == [
        ("rome", "0.040", "1.50"), ("ft", "", "2.00"), ("memit", "0.50", "2.50"),
    ]  # fmt: skip
    page.locator("#chooser summary").click()
    page.locator('[data-column="bake_gs paraphrase_prob"]').uncheck()
    assert [row.split("\t")[-1] for row in page.locator("#tables tbody tr").all_inner_texts()] == [
        "1.00",
        "2.00",
        "3.00",
    ]


def test_what_differs_between_two_editors(visit):
    results, cases = frames({"rome": {ES: [1.0, 0.0]}, "memit": {ES: [1.0, 1.0]}})
    results["editor_config"] = [{"layers": [5], "steps": len(name)} for name in results["editor"]]
    page = visit((results, cases), documents=documents_of((results, cases), number=2))
    open_viewer(page, page.locator("#compare"))
    page.select_option("#viewa", label="rome")
    page.select_option("#viewb", label="memit")
    page.click("#viewdiffers")
    rows = [row.split("\t") for row in page.locator(".differing tbody tr").all_inner_texts()]
    assert rows == [["editor", "rome", "memit"], ["editor config: steps", "4", "5"]]


def test_the_table_on_screen_is_there_for_a_paper(visit):
    """Rows, columns and order are those shown; names are escaped."""
    scores = {"ft_m": [1.0, 0.0, 0.0], "memit": [1.0, 1.0, 0.0], "a&b|": [0.0, 0.0, 0.0]}
    page = visit(frames({name: {ES: values, "bake_rq/reverse_qa_prob": values} for name, values in scores.items()}))
    page.click("#chooser summary")
    page.click("#none")
    page.check('input[data-column="bake_es efficacy_prob"]')
    page.keyboard.press("Escape")
    page.locator("#tables thead button", has_text="efficacy_prob").click()
    latex, markdown = (page.locator(".paper textarea").nth(index).input_value().splitlines() for index in range(2))
    assert latex[4:11] == [
        r"\toprule",
        r"Editor & bake\_es efficacy\_prob \\",
        r"\midrule",
        r"memit & \textbf{0.667} \\",
        r"ft\_m & 0.333 \\",
        r"a\&b| & 0.000 \\",
        r"\bottomrule",
    ]
    assert markdown == [
        "| editor | bake_es efficacy_prob |",
        "| --- | ---: |",
        "| memit | **0.667** |",
        "| ft_m | 0.333 |",
        "| a&b\\| | 0.000 |",
    ]
