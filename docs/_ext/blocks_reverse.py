"""Blocks of kept runs of the plans ``reverse_locality`` and ``two_way_study``.

``docs/_data/reverse_locality`` and ``docs/_data/two_way_study`` are results repositories without samples; of the
former ``cases.json`` has the scores of single cases, by name in the plan and heading, for paired tests.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from block import ROOT, Block, table
from blocks_measured import cell_text

from edit_hooks.base.registry import editor_class
from lm_edit.leaderboard.board import Cell
from lm_edit.leaderboard.significance import Comparison, compare_pairs, corrected
from lm_edit.leaderboard.table import build_board
from lm_edit.results.filters import text_of
from lm_edit.results.tables import ResultSet, load_cases, load_results
from lm_edit.sweeps.planning.choices import UNEDITED
from lm_edit.sweeps.planning.plan import find_plan, load_plan

REVERSE, STUDY = ROOT / "docs/_data/reverse_locality", ROOT / "docs/_data/two_way_study"
COMPARED_WITH = "ice"
# (task, metric) -> heading.
REVERSE_COLUMNS = {
    ("bake_es", "efficacy_prob"): "ES",
    ("bake_rq", "reverse_qa_prob"): "RQS",
    ("bake_rq", "reverse_locality_prob"): "RLS",
}
STUDY_COLUMNS = {
    ("bake_es", "efficacy_prob"): "ES",
    ("bake_gs", "paraphrase_prob"): "GS",
    ("bake_ls", "neighborhood_prob"): "LS",
    ("bake_rq", "reverse_qa_prob"): "RQS",
    ("bake_rq", "reverse_locality_prob"): "RLS",
    ("bake_rj", "reverse_judgment_prob"): "RJS",
}
STUDY_MODELS = {"demo": "gemma-3-270m-Q4_K_M-demo", "smollm2": "SmolLM2-135M-Instruct.Q4_1"}  # folders of results


class Kept(NamedTuple):
    """A row of a kept sweep: its name in the plan, its editor, and its cells by heading.

    Attributes:
        mode: empty for the unedited model.
        saw_questions: an edit was trained on a question of the evaluation, word for word.
    """

    name: str
    editor: str
    mode: str
    cells: dict[str, Cell]
    saw_questions: bool


def _kept(folder: str, columns: dict[tuple[str, str], str]) -> Iterator[Kept]:
    read = ResultSet.of([ROOT / folder])
    board = build_board(load_results(read), load_cases(read, require_samples=False))
    rows = {id(row): row for section in board.sections for row in section.rows}
    for row in rows.values():
        cells = row.final_cells
        yield Kept(
            text_of(row.first["editor_label"]) or row.key["editor"],
            row.key["editor"],
            text_of(row.key["mode"]),
            {heading: cells[place] for place, heading in columns.items() if place in cells},
            row.questions_trained > 0,
        )


@functools.cache
def reverse_rows() -> list[Kept]:
    """The kept runs of ``reverse_locality`` in the order of the plan."""
    names = [choice.name for choice in load_plan(find_plan("reverse_locality")).editors]
    found = _kept(str(REVERSE.relative_to(ROOT)), REVERSE_COLUMNS)
    return sorted(found, key=lambda one: names.index(one.name))


@functools.cache
def reverse_cases() -> dict[str, dict[str, list[float | None]]]:
    """Name -> heading -> score of every case, ``None`` where it is unscored."""
    found: dict[str, dict[str, list[float | None]]] = json.loads((REVERSE / "cases.json").read_text(encoding="utf-8"))
    return found


def reverse_tests(heading: str) -> dict[str, Comparison | None]:
    """Name -> its paired test against the note in the prompt, corrected by Holm over the editors of the table."""
    names = [one.name for one in reverse_rows() if one.name not in (UNEDITED, COMPARED_WITH)]
    scores = {name: np.array(own[heading], dtype=float) for name, own in reverse_cases().items()}
    tests = [compare_pairs(scores[name], scores[COMPARED_WITH]) for name in names]
    return dict(zip(names, corrected(tests), strict=True))


def reverse_table(_: str) -> Block:
    """A row per editor: RQS and RLS, each with the p-value of its test."""
    tests = {heading: reverse_tests(heading) for heading in ("RQS", "RLS")}

    def test_text(heading: str, name: str) -> str:
        test = tests[heading].get(name)
        return "-" if test is None else f"{test.p:.2f}"

    rows = []
    for one in reverse_rows():
        changes = "nothing" if one.name == UNEDITED else "/".join(editor_class(one.editor).writes)
        cells = {heading: cell_text(one.cells.get(heading)) for heading in REVERSE_COLUMNS.values()}
        tested = [text for heading in tests for text in (cells[heading], test_text(heading, one.name))]
        name = f"`{one.name}`" + (" (trained on questions)" if one.saw_questions else "")
        rows.append([name, changes, cells["ES"], *tested])
    return Block(table(["editor", "changes", "ES", "RQS", "p", "RLS", "p"], rows))


@functools.cache
def study_rows(model: str, mode: str = "single") -> list[Kept]:
    """The kept runs of ``two_way_study`` of one of its models in a mode, in the order of the plan."""
    names = [choice.name for choice in load_plan(find_plan("two_way_study")).editors]
    found = _kept(str((STUDY / "results" / STUDY_MODELS[model]).relative_to(ROOT)), STUDY_COLUMNS)
    kept = [one for one in found if one.name == UNEDITED or one.mode == mode]
    return sorted(kept, key=lambda one: names.index(one.name))


def study_table(text: str) -> Block:
    """A row per editor; ``text`` is a model, and behind a slash a mode if the edits are not single."""
    rows = [
        [f"`{one.name}`", *(cell_text(one.cells.get(heading)) for heading in STUDY_COLUMNS.values())]
        for one in study_rows(*text.split("/"))
    ]
    return Block(table(["editor", *STUDY_COLUMNS.values()], rows))


REVERSE_BLOCKS: dict[str, Callable[[str], Block]] = {
    "reverse-locality": reverse_table,
    "two-way-study": study_table,
}
