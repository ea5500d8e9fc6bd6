"""The printed table of editing tasks: scores only, and one line per task about what was left out."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from lm_eval.utils import make_table
from result_files import scripted_results

import lm_eval_editing_autoload  # noqa: F401  # extends make_table


def split_table(results: dict[str, Any]) -> tuple[list[list[str]], list[str]]:
    """Cells of the rows, and the lines below the table."""
    lines = make_table(results).split("\n")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    return rows[2:], [line for line in lines if line and not line.startswith("|")]


def test_the_table_has_scores_only() -> None:
    results = scripted_results()
    before = copy.deepcopy(results)
    rows, lines = split_table(results)
    assert results == before, "everything stays in the results"
    names = [row[4] for row in rows]
    companions = ("_n", "_failed", "_zeroed", "_or_0", "_stderr")
    assert "efficacy_prob" in names and not [name for name in names if name.endswith(companions)]
    assert not {"edit", "judge", "unscored", "unscored_reason"} & set(names)
    assert not any("{" in cell for row in rows for cell in row)
    assert lines == ["Edits of bake_es: 4 made, 0 failed, seconds_per_edit 0.1."]


def test_standard_errors_and_arrows_stay() -> None:
    rows, _ = split_table(scripted_results())
    (row,) = [row for row in rows if row[4] == "efficacy_prob"]
    assert row[5] == "↑" and row[7] == "±" and float(row[8]) >= 0


def test_what_was_left_out_is_one_line() -> None:
    rows, lines = split_table(scripted_results(errors=(("0", "no edit"), ("2", "other"))))
    assert rows[0][4] == "efficacy_prob (2 of 4)" and rows[0][5] == "↑"  # the number of cases, and still an arrow
    (line,) = [line for line in lines if line.startswith("bake_es: ")]
    assert line.startswith(
        "bake_es: 2 of 4 cases unscored: edit failed: no edit (1), edit failed: other (1); with failed"
    )
    assert "Edits of bake_es: 2 made, 2 failed, seconds_per_edit 0.1." in lines


def test_limits_and_exclusions_are_named() -> None:
    results = scripted_results("bake_rq")
    results["n-samples"]["bake_rq"] = {"original": 64, "effective": 4}
    results["results"]["bake_rq"]["reverse_qa_prob_excluded,none"] = 3
    _, lines = split_table(results)
    text = next(line for line in lines if line.startswith("bake_rq: "))
    assert "Asked (--limit or --samples): 4 of 64 cases of bake_rq." in lines
    assert "3 of 4 cases excluded by the published filter from reverse_qa_prob" in text


def test_texts_of_numbers_become_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LM_EDIT_TABLE", "all")
    results = scripted_results()
    results["results"]["bake_es"] |= {
        "efficacy_prob_by_origin,none": '{"zsre": {"value": 0.5, "n": 2}}',
        "efficacy_prob@retention,none": (
            '{"num_steps": 1, "diagonal_mean": 0.75, "last_row_mean": 0.25, "matrix": [[0.5]]}'
        ),
    }
    rows, _ = split_table(results)
    values = {row[4]: row[6] for row in rows}
    assert values["efficacy_prob_by_origin zsre"] == "0.5000"
    assert values["efficacy_prob@retention (right after each step)"] == "0.7500"
    assert values["efficacy_prob@retention (after the last step)"] == "0.2500"


def test_hostile_texts_are_escaped_and_shortened() -> None:
    _, lines = split_table(scripted_results(errors=(("0", "\x1b[2J" + "x" * 5000),)))
    (line,) = [line for line in lines if line.startswith("bake_es: ")]
    assert "\x1b" not in line and "\\x1b[2J" in line and len(line) < 600


def test_other_tasks_keep_their_table() -> None:
    other = {
        "results": {"arc": {"alias": "arc", "acc,none": 0.5, "acc_stderr,none": 0.1, "acc_n,none": 3}},
        "configs": {"arc": {"metadata": {"version": 1.0}}},
        "versions": {"arc": 1.0},
        "n-shot": {"arc": 0},
        "higher_is_better": {"arc": {"acc": True}},
    }
    original = make_table.__wrapped__  # lm-eval's own
    assert make_table(other) == original(other) and "acc_n" in make_table(other)
    mixed = scripted_results()
    for part in other:
        mixed[part] |= other[part]
    rows, _ = split_table(mixed)
    assert [row[4] for row in rows if row[0] == "arc" or row[4] == "acc_n"] == ["acc", "acc_n"]


def test_a_result_that_cannot_be_read_is_printed_as_before(capsys: Any) -> None:
    results = scripted_results()
    results["results"]["bake_es"]["unscored_reason,none"] = "{broken"
    results["results"]["bake_es"]["unscored,none"] = 1
    assert "unscored_reason" in make_table(results)
    assert "could not shorten the table" in capsys.readouterr().err
