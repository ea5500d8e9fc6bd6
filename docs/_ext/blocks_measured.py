"""Blocks of measured numbers, read from the kept results of ``lm-edit sweep``.

``docs/_data/measured`` has the runs of the shipped plan ``demo_editors``, ``docs/_data/findings`` those of
``docs/_data/findings.yaml``, ``docs/_data/two_way`` those of ``two_way_ablations``; all are results repositories
without the scores of single cases.
``docs/_data/passports`` has files of ``lm-edit passport``.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from block import ROOT, Block, table

from edit_hooks.base.registry import editor_class
from lm_edit.figures.drawing.charts import Chart, Points, Series
from lm_edit.leaderboard.board import OUTSIDE, Cell, Row
from lm_edit.leaderboard.columns import ColumnKey
from lm_edit.leaderboard.table import build_board
from lm_edit.results.filters import text_of
from lm_edit.results.markdown import escape_cell, markdown_table
from lm_edit.results.show import comparison
from lm_edit.results.tables import ResultSet, load_cases, load_results
from lm_edit.sweeps.planning.choices import UNEDITED, EditorChoice
from lm_edit.sweeps.planning.plan import find_plan, load_plan

MEASURED, FINDINGS = ROOT / "docs/_data/measured", ROOT / "docs/_data/findings"
HEADINGS = {
    ("bake_es", "efficacy_prob"): "ES",
    ("bake_gs", "paraphrase_prob"): "GS",
    ("bake_ls", "neighborhood_prob"): "LS",
    ("bake_rq", "reverse_qa_prob"): "RQS",
    ("bake_rj", "reverse_judgment_prob"): "RJS",
    ("qaedit_wild_reliability", "efficacy_wild_em"): "WILD EM",
    ("counterfact_flat_es", "efficacy_prob"): "ES",
    ("counterfact_flat_gs", "paraphrase_prob"): "GS",
    ("counterfact_flat_ls", "neighborhood_prob"): "LS",
}
METRICS = {heading: metric for (_, metric), heading in HEADINGS.items()}
PASSPORTS = ROOT / "docs/_data/passports"
ABLATIONS = ROOT / "docs/_data/two_way"
# Columns of the ablations: (task, metric) -> heading.
PARTS_OF_TWO_WAY = {
    ("bake_gs", "paraphrase_prob"): "GS",
    ("bake_ls", "neighborhood_prob"): "LS",
    ("bake_rq", "reverse_qa_prob"): "RQS",
    ("bake_rq", "reverse_qa_argmax"): "RQS, greedy",
    ("bake_rq", "reverse_locality_prob"): "RLS",
}
SINGLE = ""
PARTS = {  # number of edits in a stream -> title
    SINGLE: "Single edits, each on the unedited model",
    "48": "A stream of 48 edits, the 48 cases scored after the last step",
    "200": "A stream of 200 edits of CounterFact, the 200 cases scored after the last step",
}
PUBLISHED = ", published settings"  # ending of names in the plan
GROUPS = {PUBLISHED: "published settings", "": "settings for this model"}
OF_QUESTIONS = "r_rome"  # the editor of the table of questions
QUESTIONS = {
    "ES": "the edited prompt: new answer likelier than the old one",
    "GS": "a paraphrase of it",
    "LS": "other facts with the old answer: it stays likelier",
    "WILD EM": "**the question, answered freely: exact match**",
    "RQS": "**the same fact in reverse: the edited subject likelier**",
    "RJS": 'the reverse fact judged: "Yes" likelier than "No"',
}
# Finding -> the conditions on its results, as after --only.
FOUND = {
    "inflation": ("benchmark=qaedit", "mode=none,single"),
    "decay": ("benchmark=qaedit", "mode=sequential"),
    "reverse": ("benchmark=bake",),
    "multi_hop": ("benchmark=mquake",),
    "preservation": ("benchmark=counterfact",),
}


class Measured(NamedTuple):
    """A row of the leaderboard as a row of the tables: the name in the plan, and the length of the stream."""

    name: str
    part: str
    row: Row

    def cells(self, columns: Sequence[ColumnKey]) -> Iterator[str]:
        """The cells, and the number of seeds."""
        yield from (cell_text(self.row.cells.get(column)) for column in columns)
        yield str(len(self.row.runs))


@functools.cache
def plan_editors() -> dict[str, EditorChoice]:
    """Name -> entry of the plan."""
    return {choice.name: choice for choice in load_plan(find_plan("demo_editors")).editors}


def unmeasured(_: str) -> Block:
    """The editors without a row, with the reason, as the plan has them."""
    without = load_plan(find_plan("demo_editors")).without
    lines = [
        f"- {', '.join(f'[`{name}`](docs/editors/{name}.md)' for name in names)}: {reason}."
        for reason, names in without.items()
    ]
    return Block("\n".join(lines))


@functools.cache
def ablations() -> dict[str, dict[str, Cell]]:
    """Name in the plan ``two_way_ablations`` -> heading -> cell, of the kept runs, in the order of the plan."""
    rows = dict(_ablation_cells())
    names = [choice.name for choice in load_plan(find_plan("two_way_ablations")).editors]
    return {name: rows[name] for name in names if name in rows}


def _ablation_cells() -> Iterator[tuple[str, dict[str, Cell]]]:
    read = ResultSet.of([ABLATIONS])
    board = build_board(load_results(read), load_cases(read, require_samples=False))
    for row in (row for section in board.sections for row in section.rows):
        cells = row.final_cells
        yield (
            text_of(row.first["editor_label"]) or row.key["editor"],
            {heading: cells[place] for place, heading in PARTS_OF_TWO_WAY.items() if place in cells},
        )


def ablation_table(_: str) -> Block:
    """A row per run of the ablations."""
    headings = list(PARTS_OF_TWO_WAY.values())
    rows = [[name, *(cell_text(cells.get(heading)) for heading in headings)] for name, cells in ablations().items()]
    return Block(table(["run", *headings], rows))


def _whiskers(vertical: Cell, horizontal: Cell) -> dict[str, list[float]]:
    if vertical.interval is None or horizontal.interval is None:
        return {}
    return {
        "low": [vertical.interval.low],
        "high": [vertical.interval.high],
        "position_low": [horizontal.interval.low],
        "position_high": [horizontal.interval.high],
    }


def ablation_front() -> Chart:
    """Two panels with a point per run: reverse questions against their locality, and paraphrases against neighbors."""
    panels = []
    for value, position in (("RQS", "RLS"), ("GS", "LS")):
        series = [
            Series(
                name=name,
                values=[cells[value].value],
                positions=[cells[position].value],
                counts=[cells[value].num_scored],
                **_whiskers(cells[value], cells[position]),
                texts=[name],
                color=number,
                style=number,
            )
            for number, (name, cells) in enumerate(ablations().items())
        ]
        title = f"{value} against {position}"
        panels.append(Points(title=title, series=series, position_label=position, value_label=value))
    return Chart(name="two_way_front", title="What each part of two-way edits buys, and what it costs", panels=panels)


@functools.cache
def measured_rows() -> list[Measured]:
    """The rows of the leaderboard of the kept runs, in the order of the plan."""
    read = ResultSet.of([MEASURED])
    board = build_board(load_results(read), load_cases(read, require_samples=False))
    rows = {id(row): row for section in board.sections for row in section.rows}  # the unedited model is in all
    found = [
        Measured(text_of(row.first["editor_label"]) or row.key["editor"], row.key["num_edits"], row)
        for row in rows.values()
    ]
    names = list(plan_editors())
    return sorted(found, key=lambda one: names.index(one.name))


def cell_text(cell: Cell | None) -> str:
    """Value and interval, after ~ that of the normal approximation; cases where the editor refused some."""
    if cell is None:
        return "-"
    text = f"{cell.value:.2f}"
    if cell.interval is not None:
        text += f" ({cell.interval.mark}{cell.interval.low:.2f}-{cell.interval.high:.2f})"
    asked = cell.num_cases - cell.left_out.get(OUTSIDE, 0)
    return text if cell.num_scored == asked else f"{text}, {cell.num_scored} of {asked}"


def _columns(rows: Sequence[Measured]) -> dict[ColumnKey, str]:
    """Column -> heading, of the columns that the rows of editors have."""
    keys = {(key.task, key.metric): key for one in rows for key in one.row.cells if not key.stage}
    return {keys[place]: heading for place, heading in HEADINGS.items() if place in keys}


def seconds_of(name: str) -> str:
    """Seconds per edit that the plan gives for one of its entries."""
    seconds = plan_editors()[name].seconds_per_edit if name in plan_editors() else None
    return "-" if seconds is None else f"{seconds:.1f}"


def measured(name: str) -> Block:
    """Rows of an editor in the tables of measured editors, with the unedited model's."""
    unedited = next(one for one in measured_rows() if one.name == UNEDITED)
    blocks = []
    for part, title in PARTS.items():
        own = [one for one in measured_rows() if (one.row.key["editor"], one.part) == (name, part)]
        if own:
            columns = _columns(own)
            rows = [["unedited model", *unedited.cells(list(columns))]]
            rows += [[GROUPS[one.name.removeprefix(name)], *one.cells(list(columns))] for one in reversed(own)]
            blocks += [f"{title}:", table(["settings", *columns.values(), "seeds"], rows)]
    return Block("\n\n".join(blocks) or "Not measured on the demo model.")


def measured_tables(_: str) -> Block:
    """All tables of measured editors."""
    unedited = next(one for one in measured_rows() if one.name == UNEDITED)
    blocks = []
    for part, title in PARTS.items():
        edited = [one for one in measured_rows() if one.part == part and one is not unedited]
        columns = _columns(edited)
        seconds = ["s/edit"] if part == SINGLE else []
        for ending, group in GROUPS.items():
            rows = []
            for one in [unedited, *(one for one in edited if one.name.endswith(PUBLISHED) == bool(ending))]:
                editor = one.row.key["editor"]
                changes = "nothing" if one is unedited else "/".join(editor_class(editor).writes)
                *cells, seeds = one.cells(list(columns))
                rows.append([f"`{editor}`", changes, *cells, *(seconds_of(one.name) for _ in seconds), seeds])
            blocks += [
                f"{title}; {group}:",
                table(["editor", "changes", *columns.values(), *seconds, "seeds"], rows),
            ]
    return Block("\n\n".join(blocks))


def kept_cells() -> dict[str, dict[str, Cell]]:
    """Editor -> heading -> cell, of single edits with settings for the demo model, and of the unedited model."""
    columns = {heading: place for place, heading in reversed(HEADINGS.items())}  # those of BAKE before CounterFact's
    rows = {one.name: one.row for one in measured_rows() if one.part == SINGLE}
    cells = {name: {key[:2]: cell for key, cell in row.cells.items()} for name, row in rows.items()}
    return {
        name: {heading: own[place] for heading, place in columns.items() if place in own} for name, own in cells.items()
    }


def question_table(decimals: int = 2) -> str:
    """The columns of one editor beside the unedited model, in words."""
    edited, unedited = (kept_cells()[name] for name in (OF_QUESTIONS, UNEDITED))
    lines = ["| question after the edit | unedited | R-ROME, 95% interval |", "|---|---|---|"]
    for heading, question in QUESTIONS.items():
        cell, interval = edited[heading], edited[heading].interval
        assert interval is not None
        value, low, high, before = (
            f"{number:.{decimals}f}" for number in (cell.value, interval.low, interval.high, unedited[heading].value)
        )
        lines.append(f"| {question} (`{METRICS[heading]}`) | {before} | {value} ({low} to {high}) |")
    return "\n".join(lines)


def headline(_: str) -> Block:
    """The table of questions with three decimals."""
    return Block(question_table(decimals=3))


def finding(name: str) -> Block:
    """The runs of a finding side by side, as ``lm-edit results show`` prints them."""
    conditions = FOUND[name]
    shown = comparison([str(FINDINGS)], only=conditions)
    command = " ".join(["lm-edit results show docs/_data/findings", *(f"--only {one}" for one in conditions)])
    notes = " ".join(escape_cell(note) for note in shown.notes)
    return Block("\n".join([*markdown_table(shown.rows), "", notes, "", "```bash", command, "```"]))


@functools.cache
def kept_passports() -> dict[str, dict[str, Any]]:
    """Editor -> its passport."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(PASSPORTS.glob("*.json"))}


def passports(_: str) -> Block:
    """The kept passports side by side: a row per score, a cell per editor; before an arrow what it is compared with."""
    kept = kept_passports()
    rows: dict[tuple[str, str, str], dict[str, str]] = {}
    for editor, passport in kept.items():
        for part in passport["parts"]:
            if part["unscored"]:
                rows.setdefault((part["name"], "", ""), {})[editor] = "unscored"
            for score in part["scores"]:
                rows.setdefault((part["name"], score["task"] or "", score["name"]), {})[editor] = _passport_cell(score)
    lines = [
        [part, f"`{task} {name}`".replace("` ", "`") if name else "", *(cells.get(editor, "-") for editor in kept)]
        for (part, task, name), cells in rows.items()
    ]
    reasons = {
        f"- `{part['name']}`: {escape_cell(part['unscored'])}"
        for passport in kept.values()
        for part in passport["parts"]
        if part["unscored"]
    }
    heads = ["part", "score", *(f"`{editor}`" for editor in kept)]
    return Block("\n".join([table(heads, lines), "", "Unscored:", "", *sorted(reasons)]))


def _passport_cell(score: dict[str, Any]) -> str:
    if score["value"] is None:
        return "unscored"
    before = "" if score["before"] is None else f"{score['before']:.3g} → "
    interval = "" if score["interval"] is None else " ({:.2f}-{:.2f})".format(*score["interval"])
    return f"{before}{score['value']:.3g}{interval}"


MEASURED_BLOCKS: dict[str, Callable[[str], Block]] = {
    "measured": measured,
    "measured-editors": measured_tables,
    "unmeasured-editors": unmeasured,
    "finding": finding,
    "headline": headline,
    "two-way-parts": ablation_table,
    "passports": passports,
}
