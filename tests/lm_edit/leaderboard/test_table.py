"""Rows, sections, ranks, marks and coverage, on made-up results with numbers worked by hand."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("statsmodels", reason="the statistics are in the extra leaderboard")
pytest.importorskip("scikit_posthocs", reason="the statistics are in the extra leaderboard")

from board_frames import board, case_rows, es, frames, one_seed, rows_of, run_row

from edit_hooks.utils.errors import EditingError
from lm_edit.leaderboard.columns import ColumnKey
from lm_edit.leaderboard.table import build_board
from lm_edit.results.statistics.case_scores import CaseScores
from lm_edit.results.statistics.intervals import normal_interval, wilson_interval

ES = ColumnKey("bake_es", "efficacy_prob", "", "none")


def test_saved_edits_stock_models_and_groups_do_not_compete_with_single_edits():
    parts = [
        frames(es(rome=[1, 0], memit=[0, 0])),
        frames(es(memit=[1, 1]), mode="loaded", edit_options="load_edit=deploy"),
        frames(es(hf=[1, 1]), mode="", model_hash="", settings=""),
        frames(es(memit=[1, 1]), mode="batch", num_edits=4),
        frames(es(memit=[1, 1]), mode="batch", num_edits=4, group_size=2),
    ]
    titles = {section.title: [row.label for row in section.rows] for section in board(*parts).sections}
    known = "demo (5f22a9bff021)"
    assert titles == {
        "demo (weights not recorded): evaluated as is": ["hf"],
        f"{known}: single edits": ["memit", "rome"],
        f"{known}: 4 edits at once": ["memit"],
        f"{known}: 4 edits in groups of 2": ["memit"],
        f"{known}: a saved edit": ["memit"],
    }


def test_models_of_other_tokenizers_or_configurations_do_not_compete():
    """The weights are the same; the title of a section has the parts that differ."""
    parts = [
        frames(es(unedited=[0, 0], rome=[1, 0]), model_parts="class=11; config=22; tokenizer=aa"),
        frames(es(unedited=[1, 1], memit=[1, 1]), model_parts="class=11; config=22; tokenizer=bb"),
        frames(es(ft_m=[1, 1])),  # a file from before parts were recorded
        frames(es(ft_l=[1, 1]), model_hash="77", model_parts="class=11; config=22; tokenizer=aa"),
    ]
    titles = {section.title: [row.label for row in section.rows] for section in board(*parts).sections}
    assert titles == {
        "demo (5f22a9bff021, tokenizer and configuration not recorded): single edits": ["ft_m"],
        "demo (5f22a9bff021, class=11; config=22; tokenizer=aa): single edits": ["unedited", "rome"],
        "demo (5f22a9bff021, class=11; config=22; tokenizer=bb): single edits": ["unedited", "memit"],
        "demo (77): single edits": ["ft_l"],
    }
    titles = [section.title for section in board(*parts[:2]).sections]
    assert titles == ["demo (tokenizer=aa): single edits", "demo (tokenizer=bb): single edits"]


def test_marks_ranks_and_corrected_tests():
    """Exact McNemar, Holm over the three editors.

    Against the unedited model, which scores 0 of 8: rome and memit 8 discordant cases, p = 2 / 2^8, times 3 and 2;
    ft 1 discordant, p = 1. Against the best, rome, memit is as good and ranked first, too; ft has 7 discordant,
    p = 2 / 2^7, times the three pairs of editors.
    """
    rows = rows_of(board(frames(es(unedited=[0] * 8, rome=[1] * 8, memit=[1] * 8, ft=[1, 0, 0, 0, 0, 0, 0, 0]))))
    cells = {name: row.cells[ES] for name, row in rows.items()}
    assert {name: cell.rank for name, cell in cells.items()} == {"unedited": None, "rome": 1, "memit": 1, "ft": 3}
    adjusted = {name: cell.versus_unedited.p for name, cell in cells.items() if cell.versus_unedited}
    assert adjusted == pytest.approx({"rome": 3 * 2 / 256, "memit": 3 * 2 / 256, "ft": 1.0})
    assert cells["ft"].versus_best is not None and cells["ft"].versus_best.p == pytest.approx(3 * 2 / 128)
    assert {name: cell.marks for name, cell in cells.items()} == {"unedited": "", "rome": "†", "memit": "†", "ft": "‡"}


def test_permutations_suffice_for_the_pairs_of_many_editors():
    """Of 199 permutations no p-value is below 0.01, and twenty editors are 190 pairs."""
    shades = np.linspace(0.3, 0.7, 30)
    scores = {f"e{number:02d}": list(shades + 0.001 * number) for number in range(18)}
    scores |= {"best": list(shades + 0.25), "worst": list(shades - 0.25)}
    cells = {name: row.cells[ES] for name, row in rows_of(board(frames(es(**scores)))).items()}
    assert cells["best"].is_best and "‡" in cells["worst"].marks


def test_lower_is_better_where_the_column_says_so():
    rows = rows_of(board(frames(es(a=[0.1, 0.2], b=[0.5, 0.4]), higher_is_better=False)))
    assert (rows["a"].cells[ES].rank, rows["b"].cells[ES].rank) == (1, 2)


def test_columns_without_a_direction_have_no_ranks_and_no_tests():
    rows = rows_of(board(frames(es(unedited=[0] * 8, a=[1] * 8), higher_is_better=None)))
    assert (rows["a"].cells[ES].rank, rows["a"].cells[ES].marks) == (None, "")


def test_coverage_counts_cases_and_reasons():
    cell = rows_of(board(frames(es(rome=[1, None, 0, None]))))["rome"].cells[ES]
    assert (cell.value, cell.num_scored, cell.num_cases, cell.left_out) == (0.5, 2, 4, {"empty answer": 2})


def test_cases_outside_the_population_are_not_unscored():
    results, cases = frames(es(rome=[1, 0, None]))
    results["excluded"], results["unscored"] = 1, 0
    cases.loc[2, "excluded"] = 1
    cell = rows_of(board((results, cases)))["rome"].cells[ES]
    assert (cell.num_scored, cell.num_cases, cell.left_out) == (2, 3, {"outside the population": 1})


def test_nothing_scored_is_no_number():
    cell = rows_of(board(frames(es(rome=[None, None], memit=[1, 0]))))["rome"].cells[ES]
    assert math.isnan(cell.value) and (cell.num_scored, cell.rank, cell.note) == (0, None, "no case was scored")


def test_without_samples_the_standard_error_gives_the_interval() -> None:
    results, cases = frames(es(rome=[1, 0, 1], ft=[0.5, 1, 0]))
    results["stderr"] = [1 / 3, 0.25]  # of rome: 2/3 (1 - 2/3) = 2 (1/3)^2, so its cases score 0 or 1
    cells = {name: row.cells[ES] for name, row in rows_of(board((results, cases[:0]))).items()}
    without = "no test: the run has no samples (--log_samples)"
    assert {name: cell.note for name, cell in cells.items()} == {"rome": without, "ft": without}
    assert cells["rome"].interval == wilson_interval(2, 3) and cells["rome"].num_scored == 3
    assert cells["ft"].interval == normal_interval(0.5, 0.25, is_share=True)
    results["stderr"] = math.nan
    cell = rows_of(board((results, cases[:0])))["rome"].cells[ES]
    assert (cell.interval, cell.note) == (None, f"no interval and {without}")


def test_scores_that_do_not_follow_from_cases_have_no_interval_and_no_test() -> None:
    results, cases = frames(es(unedited=[0] * 8, rome=[1, 0] * 4))
    results.loc[results["editor"] == "rome", "value"] = 0.7
    cell = rows_of(board((results, cases)))["rome"].cells[ES]
    assert (cell.interval, cell.versus_unedited) == (None, None)
    assert cell.note == "no interval and no test: the score does not follow from single cases"


Z2 = 1.959963984540054**2  # Wilson's interval of n successes in n cases is n / (n + Z2) to 1
EQUAL = "no interval: all cases score the same, or there are fewer than two"


def test_counts_and_differences_that_are_zero_everywhere_are_no_shares() -> None:
    cell = rows_of(board(frames(es(rome=[0] * 8), is_rate=False, is_share=False)))["rome"].cells[ES]
    assert (cell.interval, cell.note) == (None, EQUAL)


def test_shares_of_successes_have_wilsons_interval_whatever_is_better() -> None:
    rows = rows_of(board(frames(es(unedited=[0] * 8, rome=[1] * 7 + [None], ft=[1, 0] * 4), higher_is_better=None)))
    cell = rows["rome"].cells[ES]
    assert cell.interval == (pytest.approx(7 / (7 + Z2)), 1.0, "Wilson") and cell.note == ""
    assert rows["unedited"].cells[ES].interval == (0.0, pytest.approx(Z2 / (8 + Z2)), "Wilson")
    assert rows["ft"].cells[ES].interval == wilson_interval(4, 8)


def test_other_shares_have_the_bootstraps_interval() -> None:
    """A row of 0 and 1 keeps Wilson's where another has a half: scores in 0..1 never vary more than these."""
    rows = rows_of(board(frames(es(unedited=[0.5] * 4, rome=[1] * 4, ft=[1, 0.5, 0, 0]))))
    assert rows["rome"].cells[ES].interval == wilson_interval(4, 4)
    assert (rows["unedited"].cells[ES].interval, rows["unedited"].cells[ES].note) == (None, EQUAL)
    interval = rows["ft"].cells[ES].interval
    assert interval is not None and interval.method == "BCa bootstrap" and interval.low < 0.375 < interval.high


def test_edit_scores_have_intervals_and_tests_of_their_own():
    """ES = 1, LS = 0.5: S = 2 / (1 / 1 + 1 / 0.5) = 2/3; the unedited model has LS = 1 and ES = 0.25: S = 0.4.

    Four of eight cases of the edited model have LS = 0; three quarters of the unedited one's have ES = 0.
    """
    edited = [[[1.0], [float(i % 2)]] for i in range(8)]
    unedited = [[[float(i % 4 == 0)], [1.0]] for i in range(8)]
    results, cases = [], []
    for editor, components, value in (("unedited", unedited, 0.4), ("rome", edited, 2 / 3)):
        row = run_row(editor, "bake_s", "edit_score_reverse_prob", [0.0] * 8)
        # Means enter as percentages with two decimals, which are exact here.
        results.append({**row, "value": value, "is_rate": False})
        rows = case_rows(row, [None] * 8)
        cases += [{**case, "components": part, "reason": ""} for case, part in zip(rows, components, strict=True)]
    cell = rows_of(board((pd.DataFrame(results), pd.DataFrame(cases))))["rome"].cells[
        ColumnKey("bake_s", "edit_score_reverse_prob", "", "none")
    ]
    assert cell.interval is not None and cell.interval.low < 2 / 3 < cell.interval.high
    assert cell.versus_unedited is not None
    assert cell.versus_unedited.difference == pytest.approx(2 / 3 - 0.4) and cell.versus_unedited.test == "permutation"
    assert (cell.num_scored, cell.num_cases, cell.left_out) == (8, 8, {})


def test_pooled_means_have_intervals_tests_and_the_reasons_of_their_cases():
    """KnowGIC: cases with 3 and 1 chains. Edited: (0.2 * 3 + 0.6 * 1) * 3 / 12 = 0.3; unedited: 1, without spread."""
    edited: list[dict[str, float] | None] = [
        {"value": 0.6 if i % 2 else 0.2, "weight": 1.0 if i % 2 else 3.0} for i in range(6)
    ]
    unedited = [{"value": 1.0, "weight": 1.0 if i % 2 else 3.0} for i in range(6)]
    results, cases = [], []
    for editor, components, value in (("unedited", [*unedited, None], 1.0), ("rome", [*edited, None], 0.3)):
        row = run_row(editor, "knowgic_prob", "ifr_prob", [0.0] * 6 + [None], higher_is_better=False)
        results.append({**row, "value": value, "failed": 1})
        rows = [{**case, "reason": ""} for case in case_rows(row, [None] * 7)]
        rows[6]["reason"] = "no chains"
        cases += [{**case, "components": part} for case, part in zip(rows, components, strict=True)]
    rows = rows_of(board((pd.DataFrame(results), pd.DataFrame(cases))))
    key = ColumnKey("knowgic_prob", "ifr_prob", "", "none")
    cell = rows["rome"].cells[key]
    assert cell.interval is not None and 0.2 <= cell.interval.low < 0.3 < cell.interval.high <= 0.6
    assert cell.versus_unedited is not None and cell.versus_unedited.num_cases == 6
    assert cell.versus_unedited.difference == pytest.approx(-0.7)
    # All 2 ** 6 ways to swap 6 cases are tried; only the two in which one run has all low values are as extreme.
    assert cell.versus_unedited.p == pytest.approx(2 / 64)
    assert (cell.num_scored, cell.num_cases, cell.left_out) == (6, 7, {"no chains": 1})
    assert (rows["unedited"].cells[key].interval, rows["unedited"].cells[key].note) == (None, EQUAL)


def test_infinite_scores_have_no_interval_and_no_test():
    infinite = CaseScores((0, 1), one_seed([[math.inf], [1.0]]), None, {})
    assert not infinite.gives(math.inf)
    results, cases = frames(es(rome=[1, 0], ft=[1, 1]))
    results.loc[results["editor"] == "rome", "value"] = math.inf
    cell = rows_of(board((results, cases)))["rome"].cells[ES]
    assert (cell.interval, cell.note, cell.rank, cell.versus_best) == (
        None,
        "no interval and no test: the score is infinite",
        1,
        None,
    )


def test_one_case_has_a_wide_interval_and_no_mark():
    rows = rows_of(board(frames(es(unedited=[0], rome=[1], ft=[0]))))
    cell = rows["rome"].cells[ES]
    assert (cell.value, cell.note, cell.marks) == (1.0, "", "")
    assert cell.interval == (pytest.approx(1 / (1 + Z2)), 1.0, "Wilson")
    assert cell.versus_unedited is not None and cell.versus_unedited.p == 1.0


def test_bold_is_an_editor_that_another_is_worse_than():
    def bold(**scores: list[float | None]) -> list[str]:
        return [name for name, row in rows_of(board(frames(es(**scores)))).items() if row.cells[ES].is_best]

    assert bold(unedited=[0, 0], rome=[1, 1]) == [] and bold(rome=[1, 0], ft=[0, 1]) == []
    assert bold(rome=[1, 1], memit=[1, 1], ft=[0, 1]) == ["memit", "rome"]
    # 0.1 + 0.2 and 0.3 differ in the last digit only
    assert bold(rome=[0.1, 0.2, 0.0], ft=[0.3, 0.0, 0.0]) == []


def test_editors_of_very_different_coverage_are_named():
    """Rome is best on 2 of 10 cases; ft scores 9 of 10, which is within 10 points of memit's 10 of 10."""
    few: list[float | None] = [1, 1, *[None] * 8]
    section = board(frames(es(rome=few, memit=[0, 1] * 5))).sections[0]
    assert section.coverage_note.startswith(
        "Coverage differs: bake_es efficacy_prob (rome 20%, memit 100%). Values and ranks"
    )
    near: list[float | None] = [None, *[1] * 9]
    assert board(frames(es(ft=near, memit=[0, 1] * 5))).sections[0].coverage_note == ""


def test_sections_keep_single_edits_streams_and_context_editors_apart():
    parts = [
        frames(es(unedited=[0, 0], rome=[1, 1])),
        frames(es(rome=[0, 1]), mode="sequential", num_edits=2, edit_batch_size=1),
        frames(es(rome=[0, 1]), mode="sequential", num_edits=1000, edit_batch_size=100),
        frames(es(rome=[0, 1]), mode="batch", num_edits=2),
        frames(es(ike=[1, 1]), context_editor=True),
        frames(es(unedited=[1, 1]), icl="fact"),
    ]
    titles = {section.title: [row.label for row in section.rows] for section in board(*parts).sections}
    assert titles == {
        "demo: single edits": ["unedited", "rome"],
        "demo: 2 edits at once": ["unedited", "rome"],
        "demo: stream of 1000 edits, 100 per step": ["unedited", "rome"],
        "demo: stream of 2 edits": ["unedited", "rome"],
        "demo: editors that act through the prompt, single edits": ["unedited", "ike", "unedited"],
    }


def test_editors_trained_on_a_question_of_the_evaluation_are_ranked_apart():
    """Whichever of its tasks has the question; 0 or another editor's count keeps no row apart."""
    results, cases = frames(es(unedited=[0, 0], rome=[1, 1], ft=[1, 0], lora=[0, 1]))
    counts = {"ft": {"questions_trained": 3, "edits": 2}, "rome": {"questions_trained": 0}, "lora": None}
    results["edit"] = [counts.get(editor) for editor in results["editor"]]
    titles = {section.title: sorted(row.label for row in section.rows) for section in board((results, cases)).sections}
    assert titles == {
        "demo: single edits": ["lora", "rome", "unedited"],
        "demo: editors trained on questions of the evaluation, single edits": ["ft", "unedited"],
    }


def test_questions_trained_are_counted_once_per_task():
    """Every metric of a task has the summary of its edits; another task has questions of its own."""
    results, cases = frames(
        {"ft": {"bake_es/efficacy_prob": [1, 0], "bake_es/efficacy_em": [1, 0], "bake_rq/rqs": [1, 0]}}
    )
    results["edit"] = [{"questions_trained": 1 if task == "bake_es" else 2} for task in results["task"]]
    assert rows_of(board((results, cases)))["ft"].questions_trained == 3


def test_final_cells_are_not_those_of_checkpoints():
    final, at_100 = (
        ColumnKey("bake_es", "efficacy_prob", "", "none"),
        ColumnKey("bake_es", "efficacy_prob", "100", "none"),
    )
    row = rows_of(board(frames(es(rome=[1, 0]))))["rome"]
    cell = row.cells[final]
    for cells in ({final: cell, at_100: None}, {at_100: None, final: cell}):
        assert dataclasses.replace(row, cells=cells).final_cells == {("bake_es", "efficacy_prob"): cell}


def test_models_are_compared_with_their_own_unedited_model():
    one = frames(es(unedited=[0] * 6, rome=[1] * 6))
    other = frames(es(unedited=[1] * 6, rome=[1] * 6), model="other", model_hash="77")
    result = board(one, other)
    differences = {
        section.title: row.cells[ES].versus_unedited.difference
        for section in result.sections
        for row in section.rows
        if row.cells[ES].versus_unedited is not None
    }
    assert differences == {"demo: single edits": 1.0, "other: single edits": 0.0}


def test_commands_for_several_benchmarks_are_one_row():
    first, second = (
        frames({"rome": {"bake_es/efficacy_prob": [1, 0]}}),
        frames({"rome": {"zsre_x/acc": [1, 1]}}, data="hub"),
    )
    (row,) = board(first, second).sections[0].rows
    assert sorted(key.task for key in row.cells) == ["bake_es", "zsre_x"] and len(row.run_ids) == 2


def test_equal_editors_with_other_settings_are_told_apart():
    parts = [frames(es(rome=[1, 0]), settings=settings) for settings in ("aa", "bb")]
    labels = [row.label for row in board(*parts).sections[0].rows]
    assert labels == ["rome (settings aa)", "rome (settings bb)"]


def test_runs_that_differ_in_nothing_shown_have_labels_of_their_own():
    """As float32 and bfloat16, or other edits of a stream."""
    parts = [frames(es(rome=[1, 0])), frames(es(rome=[1, 1]))]
    for number, part in enumerate(parts):
        for table in part:
            table["run"] = f"{number}" * 12
    labels = [row.label for row in board(*parts).sections[0].rows]
    assert labels == ["rome [000000]", "rome [111111]"]


def test_ranking_over_the_columns_shown_first():
    """Three benchmarks in which a beats b beats c: mean ranks 1, 2, 3; d lacks a column and is left out."""
    names = ["x_es/m", "y_es/m", "z_es/m"]
    scores = {
        editor: {name: [quality, quality / 2] for name in names}
        for editor, quality in zip("cba", (0.2, 0.4, 0.8), strict=True)
    }
    scores["d"] = {names[0]: [1.0, 1.0]}
    section = board(frames(scores)).sections[0]
    assert section.ranking is not None
    assert (section.ranking.names, section.ranking.mean_ranks) == (("a", "b", "c"), (1, 2, 3))
    assert [row.label for row in section.rows] == ["a", "b", "c", "d"]
    assert section.ranking_note == "Over x_es m, y_es m, z_es m. Without d, which lacks some of these."
    of_one = {name: {f"bake_{task}": values for task, values in columns.items()} for name, columns in scores.items()}
    section = board(frames(of_one)).sections[0]
    assert (
        section.ranking is None
        and "benchmarks in common among those shown first; here they are 3 and 1" in section.ranking_note
    )


def test_editors_that_are_equal_everywhere_have_no_ranks_and_a_reason():
    scores = {editor: {f"{name}_es/m": [1.0, 0.5] for name in "xyz"} for editor in "abc"}
    section = board(frames(scores)).sections[0]
    assert section.ranking is None
    assert section.ranking_note == "No mean ranks: all of these editors are equal in x_es m, y_es m, z_es m."


def test_no_results_are_an_error():
    results, cases = frames(es(rome=[1]))
    with pytest.raises(EditingError, match="no results"):
        build_board(results[:0], cases)


def test_runs_with_other_options_are_no_seeds_of_one_row():
    """As edit_context=bare,seed=0 and edit_context=qa,seed=1; in the labels stands what differs."""
    plain = frames(es(unedited=[0] * 8, memit=[1] * 8))
    qa = frames(es(memit=[0] * 8), edit_options="edit_context=qa", seed=1)
    rows = rows_of(board(plain, qa))
    assert set(rows) == {"unedited", "memit", "memit (edit_context=qa)"}
    assert [row.cells[ES].by_seed for row in rows.values()] == [{}] * 3
    assert rows["memit (edit_context=qa)"].cells[ES].versus_unedited is not None


def test_an_editor_with_a_label_has_it_as_its_name():
    """The name of an editor in a plan; rows with the same one are distinguished by editor and settings."""
    own = frames(es(my_editor=[1] * 8), editor_label="mine")
    assert set(rows_of(board(own, frames(es(memit=[0] * 8))))) == {"mine", "memit"}
    same = frames(es(memit=[0] * 8), editor_label="mine")
    assert set(rows_of(board(own, same))) == {"mine (my_editor)", "mine (memit)"}


def test_editors_are_tested_against_the_unedited_model_under_their_options():
    plain = frames(es(unedited=[0] * 8, memit=[1] * 8))
    short = frames(es(unedited=[1] * 8, memit=[1] * 8), answer_options="max_length=64", seed=1)
    alone = frames(es(memit=[1] * 8), answer_options="max_length=32", seed=2)
    rows = rows_of(board(plain, short, alone))
    compared = {name: row.cells[ES].versus_unedited for name, row in rows.items() if name.startswith("memit")}
    p = {name: test.p if test else None for name, test in compared.items()}
    assert p["memit"] == pytest.approx(2 * 2 / 256)
    assert p["memit (max_length=64)"] == 1.0 and p["memit (max_length=32)"] is None
