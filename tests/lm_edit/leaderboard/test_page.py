"""The page as text: escaping, size limit, determinism. What it does in a browser is in tests/adversarial."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from typing import Any

import pytest

pytest.importorskip("statsmodels", reason="the statistics are in the extra leaderboard")
pytest.importorskip("scikit_posthocs", reason="the statistics are in the extra leaderboard")

from board_frames import document, frames

from lm_edit.leaderboard.cases import MAX_TEXT, collect_cases, to_json
from lm_edit.leaderboard.render_html import MAX_BYTES, render_html
from lm_edit.leaderboard.table import build_board

HOSTILE = "</script><script>alert(1)</script><!-- <img src=x onerror=alert(1)> \u2028 &amp; '\" ${x}"


@pytest.fixture(scope="module")
def made_up() -> tuple[Any, list[Any]]:
    results, cases = frames({editor: {"bake_es/efficacy_prob": [1.0, 0.0] * 4} for editor in ("rome", "memit")})
    documents = [document(row, n, HOSTILE) for row in results.to_dict("records") for n in range(8)]
    return build_board(results, cases, resamples=99), documents


def block(page: str, name: str) -> Any:
    return json.loads(re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', page, re.DOTALL)[1])


def test_answers_are_data_and_come_back_unchanged(made_up):
    board, documents = made_up
    page, note = render_html(board, [], collect_cases(documents), HOSTILE)
    assert note == "" and page.count("<script") == 3 and page.count("</script>") == 3
    assert "<img" not in page and "<!--" not in page
    saved = block(page, "cases")
    run = documents[0].run
    assert saved["answers"][run]["bake_es"]["0"]["answers"][0]["@"]["text"] == HOSTILE
    assert block(page, "board")["title"] == HOSTILE


def test_the_policy_allows_this_script_and_style_alone(made_up):
    board, documents = made_up
    page, _ = render_html(board, [], collect_cases(documents), "@@board@@")
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
    pages = {render_html(board, [], collect_cases(order), "t")[0] for order in (documents, documents[::-1])}
    assert len(pages) == 1


def test_cases_are_thinned_by_the_stated_rule(made_up):
    """8 equal cases of size s in two runs; a budget of 3 s keeps every third: 0, 3, 6."""
    _, documents = made_up
    cases = collect_cases(documents)
    whole, step = cases.payload(10**9)
    assert step == 1 and len(whole["questions"]["bake_es"]) == 8
    size = len(to_json(whole).encode()) / 8
    values, step = cases.payload(int(3.3 * size))
    assert step == 3
    for documents_of_run in (values["questions"], *values["answers"].values()):
        assert list(documents_of_run["bake_es"]) == ["0", "3", "6"]
    assert cases.payload(10) == (
        {"questions": {"bake_es": {}}, "answers": {run: {"bake_es": {}} for run in values["answers"]}},
        0,
    )


def test_the_page_stays_below_its_limit(made_up, monkeypatch):
    board, documents = made_up
    full, _ = render_html(board, [], collect_cases(documents), "t")
    limit = len(full.encode()) - 1000
    monkeypatch.setattr("lm_edit.leaderboard.render_html.MAX_BYTES", limit)
    page, note = render_html(board, [], collect_cases(documents), "t")
    assert len(page.encode()) <= limit < MAX_BYTES
    assert (
        note.startswith("The page shows the first of every 2 cases of each task")
        and note in block(page, "board")["thinned"]
    )


def test_long_texts_are_cut_with_a_note():
    row = {"run": "r", "task": "t", "metric": "m", "editor": "e"}
    cases = collect_cases([document(row, 0, "x" * (MAX_TEXT + 7))])
    text = cases.answers["r"]["t"][0]["answers"][0]["@"]["text"]
    assert text == "x" * MAX_TEXT + " [... 7 more characters]"


def test_infinite_scores_are_texts_that_javascript_reads():
    results, cases = frames({editor: {"wiki/ppl": [1.0, 2.0]} for editor in ("rome", "memit", "ft")})
    results["value"] = [float("inf"), float("-inf"), float("nan")]
    page, _ = render_html(build_board(results, cases, resamples=99), [], collect_cases([]), "t")
    rows = block(page, "board")["sections"][0]["rows"]
    assert {row["label"]: row["cells"]["0"]["value"] for row in rows} == {
        "rome": "Infinity", "memit": "-Infinity", "ft": None,
    }  # fmt: skip


def test_lone_surrogates_and_numbers_that_json_lacks():
    row = {"run": "r", "task": "t", "metric": "m", "editor": "e"}
    text = to_json(collect_cases([document(row, 0, "\ud83d", value=float("nan"))]).answers["r"])
    text.encode("utf-8")
    assert json.loads(text)["t"]["0"]["scores"] == {"m,none": None}
