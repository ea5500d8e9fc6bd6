"""The page as text: escaping, size limit, determinism. What it does in a browser is in tests/adversarial."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from typing import Any

import pytest

pytest.importorskip("statsmodels", reason="the statistics are in the extra leaderboard")
pytest.importorskip("scikit_posthocs", reason="the statistics are in the extra leaderboard")

from board_frames import document, frames

from lm_edit.leaderboard.cases import MAX_TEXT, Cases, to_json
from lm_edit.leaderboard.render_html import render_html
from lm_edit.leaderboard.site import is_part
from lm_edit.leaderboard.table import build_board

HOSTILE = "</script><script>alert(1)</script><!-- <img src=x onerror=alert(1)> \u2028 &amp; '\" ${x}"


@pytest.fixture(scope="module")
def made_up() -> tuple[Any, list[Any]]:
    results, cases = frames({editor: {"bake_es/efficacy_prob": [1.0, 0.0] * 4} for editor in ("rome", "memit")})
    documents = [document(row, n, HOSTILE) for row in results.to_dict("records") for n in range(8)]
    return build_board(results, cases, resamples=99), documents


def block(page: str, name: str) -> Any:
    return json.loads(re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', page, re.DOTALL)[1])


def cases_of(page: str, task: str) -> Any:
    """The questions and answers of a task in a page."""
    return json.loads(gzip.decompress(base64.b64decode(block(page, "cases")[task])))


def test_answers_are_data_and_come_back_unchanged(made_up):
    board, documents = made_up
    page, note, parts = render_html(board, [], Cases(documents), HOSTILE)
    assert note == "" and parts == {} and "connect-src" not in page
    assert page.count("<script") == 3 and page.count("</script>") == 3
    assert "<img" not in page and "<!--" not in page
    saved, run = cases_of(page, "bake_es"), documents[0].run
    assert saved["answers"][run]["0"]["answers"][0]["@"]["text"] == HOSTILE
    assert block(page, "board")["title"] == HOSTILE


def test_the_policy_allows_this_script_and_style_alone(made_up):
    board, documents = made_up
    page = render_html(board, [], Cases(documents), "@@board@@").text
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    script = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    style = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    for name, (text,) in (("script-src", script), ("style-src", style)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{name} 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")
    own = re.sub(r'<script type="application/json".*?</script>', "", page, flags=re.DOTALL)
    assert not re.search(r"""(src|href)\s*=|@import|url\(|innerHTML|insertAdjacent|document\.write|eval\(""", own)
    assert "<title>@@board@@</title>" in page


def test_equal_inputs_give_equal_bytes(made_up):
    board, documents = made_up
    pages = {render_html(board, [], Cases(order), "t").text for order in (documents, documents[::-1])}
    assert len(pages) == 1


def test_cases_are_thinned_by_the_stated_rule(made_up):
    """The same cases of all runs, as many as fit, and none in silence."""
    cases = Cases(made_up[1])
    whole, step = cases.packed(10**9)
    assert step == 1 and whole == cases.packed(len(to_json(whole)))[0]
    assert len(json.loads(cases.of_task("bake_es"))["questions"]) == 8
    third = json.loads(cases.of_task("bake_es", 3))
    assert [list(one) for one in (third["questions"], *third["answers"].values())] == [["0", "3", "6"]] * 3
    texts, step = cases.packed(len(to_json(whole)) - 1)
    assert step > 1 and len(to_json(texts)) < len(to_json(whole)) and texts == cases._packed(step)
    assert cases.packed(10) == ({}, 0)


def test_the_page_stays_below_its_limit(made_up):
    board, documents = made_up
    full = render_html(board, [], Cases(documents), "t").text
    assert cases_of(full, "bake_es")["questions"].keys() == {str(number) for number in range(8)}
    limit = len(full.encode())
    page, note, parts = render_html(board, [], Cases(documents), "t", limit)
    assert len(page.encode()) <= limit and note in block(page, "board")["thinned"]
    assert note.startswith("Opened as a file, the page shows") and "(--max-mb)" in note
    # Nothing is left out in silence: the files beside the page have every case of every run.
    assert "connect-src 'self'; " in page and all(map(is_part, parts))
    places = block(page, "board")["parts"]["bake_es"]
    assert set(places) == {one.run for one in documents} and set(places.values()) == set(parts)
    for run, name in places.items():
        saved = json.loads(gzip.decompress(base64.b64decode(parts[name])))
        whole = cases_of(full, "bake_es")
        assert saved == {"questions": whole["questions"], "answers": {run: whole["answers"][run]}}


def test_long_texts_are_cut_with_a_note():
    row = {"run": "r", "task": "t", "metric": "m", "editor": "e"}
    cases = Cases([document(row, 0, "x" * (MAX_TEXT + 7))])
    text = json.loads(cases.of_task("t"))["answers"]["r"]["0"]["answers"][0]["@"]["text"]
    assert text == "x" * MAX_TEXT + " [... 7 more characters]"


def test_infinite_scores_are_texts_that_javascript_reads():
    results, cases = frames({editor: {"wiki/ppl": [1.0, 2.0]} for editor in ("rome", "memit", "ft")})
    results["value"] = [float("inf"), float("-inf"), float("nan")]
    page = render_html(build_board(results, cases, resamples=99), [], Cases([]), "t").text
    rows = block(page, "board")["sections"][0]["rows"]
    assert {row["label"]: row["cells"]["0"]["value"] for row in rows} == {
        "rome": "Infinity", "memit": "-Infinity", "ft": None,
    }  # fmt: skip


def test_lone_surrogates_and_numbers_that_json_lacks():
    row = {"run": "r", "task": "t", "metric": "m", "editor": "e"}
    text = Cases([document(row, 0, "\ud83d", value=float("nan"))]).of_task("t")
    text.encode("utf-8")
    assert json.loads(text)["answers"]["r"]["0"]["scores"] == {"m,none": None}
