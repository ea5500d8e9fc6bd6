"""Markdown, CSV and LaTeX of a small leaderboard."""

from __future__ import annotations

import csv
import io

import pytest

pytest.importorskip("statsmodels", reason="the statistics are in the extra leaderboard")
pytest.importorskip("scikit_posthocs", reason="the statistics are in the extra leaderboard")

from board_frames import frames

from lm_edit.leaderboard.published import published_rows
from lm_edit.leaderboard.render_text import format_minutes, render_csv, render_latex, render_markdown
from lm_edit.leaderboard.table import build_board

SCORES = {
    "unedited": {"bake_es/efficacy_prob": [0.0] * 8},
    "rome": {"bake_es/efficacy_prob": [1.0] * 7 + [None]},
    "=cmd|x_<b>": {"bake_es/efficacy_prob": [1.0, 0.0] * 4},
}


@pytest.fixture(scope="module")
def board():
    return build_board(*frames(SCORES, data="hub", or_0=0.875), resamples=99)


def line(text: str, start: str) -> str:
    return next(line for line in text.split("\n") if line.startswith(start))


def test_markdown(board):
    """rome: 7 of 7 against 0: p = 2 / 2^7 times 2 = 0.03; the other editor: 4 of 8: p = 2 / 2^4."""
    text = render_markdown(board, board.default_columns, [])
    assert line(text, "| unedited") == "| unedited | 0.000 [0.000, 0.324] (8/8) |"
    assert line(text, "| rome") == "| rome | **1.000**† [0.646, 1.000] (7/8) |"
    (other,) = [row for row in board.sections[0].rows if row.label.startswith("=")]
    low, high, _ = other.cells[board.columns[0].key].interval
    assert line(text, "| =cmd") == rf"| =cmd\|x_\<b\> | 0.500 [{low:.3f}, {high:.3f}] (8/8) |"


def test_a_note_names_editors_of_very_different_coverage(board):
    """Rome has 7 of 8 cases, the other editor all: 12 points apart."""
    note = "Coverage differs: bake_es efficacy_prob (rome 88%, =cmd"
    assert line(render_markdown(board, board.default_columns, []), note)
    assert line(render_latex(board, board.default_columns, []), f"% {note}")


def test_csv_has_every_number_and_no_formula(board):
    rows = list(csv.DictReader(io.StringIO(render_csv(board, []))))
    assert [row["editor"] for row in rows] == ["unedited", "'=cmd|x_<b>", "rome"]
    rome = rows[-1]
    assert (rome["value"], rome["scored"], rome["cases"], rome["left_out"]) == ("1.0", "7", "8", "empty answer: 1")
    assert float(rome["p_unedited"]) == pytest.approx(2 * 2 / 128) and rome["test_unedited"] == "mcnemar"
    assert rome["or_0"] == "0.875"
    assert [row["test_best"] for row in rows] == ["", "mcnemar", ""]


def test_latex_escapes_and_marks(board):
    text = render_latex(board, board.default_columns, [])
    assert r"rome & \textbf{1.000}$^{\dagger}$ {\scriptsize [0.646, 1.000] (7/8)} \\" in text, (
        "its eighth case is unscored"
    )
    assert r"=cmd|x\_<b> & 0.500" in text and r"bake\_es efficacy\_prob" in text


def test_published_rows_are_marked_with_their_source(board):
    published = published_rows(board.default_columns)
    text = render_markdown(board, board.default_columns, published)
    assert "| GPT-2 XL (1.5B) | ROME | single edits | BIRD table 3 | 0.987 (same) |" in text
    rows = [
        row for row in csv.DictReader(io.StringIO(render_csv(board, published))) if row["section"] == "BIRD table 3"
    ]
    assert {row["origin"] for row in rows} == {"published (same)"}


def test_a_table_has_the_columns_that_its_editors_were_evaluated_on():
    """The unedited model has both columns, the editor one: the other would be empty."""
    results, cases = frames(
        {
            "unedited": {"bake_es/efficacy_prob": [0.0], "bake_rq/reverse_qa_prob": [0.0]},
            "rome": {"bake_es/efficacy_prob": [1.0]},
        }
    )
    board = build_board(results, cases, resamples=99)
    (section,) = board.sections
    assert [column.key.metric for column in section.evaluated(board.columns)] == ["efficacy_prob"]
    for text in (render_markdown(board, board.columns, ()), render_latex(board, board.columns, ())):
        assert text.count("reverse_qa_prob") <= 1  # in the notes only


@pytest.mark.parametrize(
    ("minutes", "text"), [(0.00002, "<0.01"), (0.0324, "0.03"), (9.99, "9.99"), (439.4, "439"), (1e6, "1000000")]
)
def test_minutes_have_no_exponent(minutes: float, text: str) -> None:
    assert format_minutes(minutes) == text
