"""Measured numbers about thousands of edits: kept runs are runs of the plans, and the pages have their numbers."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import blocks_field
import blocks_measured
import blocks_reverse
import pytest
from blocks import BLOCKS
from blocks_field import (
    END_TOKEN,
    END_TOKEN_COLUMNS,
    FIELD,
    FIELD_COLUMNS,
    difference,
    kept_streams,
    long_stream_curves,
    measured_rows,
)
from paths import ROOT

from edit_hooks.base.registry import EDITORS, editor_class
from lm_edit.figures.drawing.charts import Lines
from lm_edit.leaderboard.board import Cell
from lm_edit.results.checking.check import check_results
from lm_edit.results.files.runs import read_result_files
from lm_edit.results.statistics.intervals import wilson_interval
from lm_edit.sweeps.checking.checks import check_plan
from lm_edit.sweeps.planning.changes import with_model, with_num_edits
from lm_edit.sweeps.planning.plan import find_plan, load_plan

WIDTHS = {"f": 64, "d": 32}  # of the tiny model of the long streams
# Bytes per edit of memories that grow with every edit, by the table of docs/guides/long-streams.md.
GROWTH = {
    "grace": 4 * (WIDTHS["f"] + WIDTHS["d"]),
    "neural_db": 4 * (WIDTHS["f"] + WIDTHS["d"]),
}
CONSTANT = ("alphaedit", "ultraedit", "memit", "emmet", "crisp_edit", "nas")


def run_of(args: Any, editor: str) -> tuple[Any, ...]:
    """Editor, mode, number of edits and seed of a run."""
    if args["mode"] == "none":
        return editor, "none"
    return editor, args["mode"], args.get("num_edits"), args.get("seed") or 0


@pytest.mark.parametrize("folder", [END_TOKEN, FIELD])
def test_the_kept_runs_are_runs_of_their_plan(folder: Any) -> None:
    plan = load_plan(find_plan("end_token"))
    if folder == FIELD:
        plan = with_num_edits(with_model(load_plan(find_plan("field_3k")), "demo"), 200)
    settings: dict[tuple[Any, ...], list[Any]] = {}
    for run in check_plan(plan).runs:
        given = run.model_args.get("editor_args", {})
        settings.setdefault(run_of(run.model_args, run.model_args.get("editor", "unedited")), []).append(given)
    files = read_result_files([folder])
    for file in files:
        config = dict(file.facts.editor_config)
        planned = settings[run_of(file.content["config"]["edited_hf"], file.facts.editor)]
        assert any(all(config[name] == value for name, value in given.items()) for given in planned), file.path
    assert len(files) > 2
    assert not check_results([folder]).problems


def test_the_plan_of_the_end_token_has_editors_that_train_on_one() -> None:
    plan = load_plan(find_plan("end_token"))
    trains = {
        name
        for name in EDITORS
        if "append_eos" in {one.name for one in dataclasses.fields(editor_class(name).config_class)}
    }
    planned = {choice.editor for choice in plan.editors} - {"unedited"}
    without = {name for names in plan.without.values() for name in names}
    assert planned <= trains and len(planned) > 15 and trains <= planned | without
    assert {choice.settings["append_eos"] for choice in plan.editors if not choice.is_unedited} == {False, True}


def test_every_number_of_the_end_token_is_that_of_the_files() -> None:
    shown = "".join(BLOCKS["end-token"](mode).text for mode in ("single", "sequential"))
    for file in read_result_files([END_TOKEN]):
        if file.facts.mode == "none":
            continue
        token = "yes" if dict(file.facts.editor_config)["append_eos"] else "no"
        rows = re.findall(rf"^\| `{file.facts.editor}` \| {token} \|(.*)\|$", shown, flags=re.MULTILINE)
        values = [
            round(task[f"{metric},none"], 2)
            for metric in END_TOKEN_COLUMNS
            for task in file.tasks.values()
            if f"{metric},none" in task
        ]
        assert len(values) == len(END_TOKEN_COLUMNS)
        cells = [[float(cell.split()[0]) for cell in row.split("|")[:4]] for row in rows]
        seeds = [row.split("|")[-1].strip() for row in rows]
        assert values in cells or "1" not in seeds, file.path


def test_streams_of_the_field_are_scored_after_all_edits() -> None:
    """Not at their last checkpoint, whose columns have the same metric; and the page quotes these numbers."""
    shown = BLOCKS["field"]("").text
    for file in read_result_files([FIELD]):
        name = file.facts.editor_label or file.facts.editor
        (row,) = re.findall(rf"^\| `{name}` \|[^|]*\|[^|]*\|(.*)\|$", shown, flags=re.MULTILINE)
        values = [
            next(task[f"{metric},none"] for task in file.tasks.values() if f"{metric},none" in task)
            for metric in FIELD_COLUMNS
        ]
        assert [float(cell.split()[0]) for cell in row.split("|")[: len(values)]] == [round(one, 2) for one in values]
        if name in ("alphaedit", "ultraedit"):
            page = " ".join((ROOT / "docs/guides/field.md").read_text(encoding="utf-8").split())
            assert f"{values[0]:.2f} and {values[1]:.2f}" in page


def test_the_interval_of_a_difference_is_newcombes() -> None:
    """The worked example of the paper's method 10 (Newcombe 1998): 56/70 - 48/80 is 0.2, 0.0524 to 0.3339."""
    first, second = (
        Cell(successes / cases, cases, cases, {}, interval=wilson_interval(successes, cases))
        for successes, cases in ((56, 70), (48, 80))
    )
    value, interval = difference(first, second)
    assert interval is not None
    assert (round(value, 4), round(interval.low, 4), round(interval.high, 4)) == (0.2, 0.0524, 0.3339)
    assert difference(dataclasses.replace(first, interval=None), second)[1] is None


def test_long_streams_were_resumed_and_are_flat_but_for_what_the_page_names() -> None:
    kept = kept_streams()
    assert {"alphaedit", "memit", "ultraedit", "grace", "memoir"} <= set(kept)
    for editor, record in kept.items():
        first, last = record["sections"][0], record["sections"][-1]
        assert record["resumed"] is True and record["killed_at"] < last["last_step"], editor
        if editor in CONSTANT:
            assert last["state"] == first["state"], editor
        if editor in GROWTH:  # merged entries make it less, numbers and radii a little more
            edits = last["last_step"] - first["last_step"]
            assert last["state"] - first["state"] <= 1.05 * GROWTH[editor] * edits, editor
    shown = BLOCKS["long-streams"]("").text
    assert all(f"| `{editor}` |" in shown for editor in kept) and "DIFFERENT" not in shown


def test_the_curves_have_every_section_of_every_editor() -> None:
    chart = long_stream_curves()
    for panel, name in zip(chart.panels, ("seconds", "memory", "state"), strict=True):
        assert isinstance(panel, Lines)
        assert [one.name for one in panel.series] == [*kept_streams()]
        for one in panel.series:
            sections = kept_streams()[one.name]["sections"]
            assert list(one.positions) == [section["last_step"] for section in sections]
            steepest = max(range(len(sections)), key=lambda number: sections[number][name])
            assert one.values[steepest] == max(one.values)


def test_the_page_says_of_every_editor_what_a_stream_carries() -> None:
    shown = BLOCKS["stream-growth"]("").text
    first = "".join(line.split(" | ")[0] for line in shown.splitlines())
    assert sorted(re.findall(r"`(\w+)`", first)) == sorted(EDITORS)
    assert "<!-- generated: stream-growth -->" in (ROOT / "docs/guides/long-streams.md").read_text(encoding="utf-8")


def test_the_estimate_of_an_8b_model_is_the_commands() -> None:
    text = BLOCKS["field-estimate"]("8b").text
    assert re.search(r"^48 runs; to do: about [\d.]+ h one after another$", text, flags=re.MULTILINE)
    page = (ROOT / "docs/guides/field.md").read_text(encoding="utf-8")
    assert "<!-- generated: field-estimate 8b -->" in page and blocks_field.ESTIMATES["demo"].startswith("field_3k")


def test_every_table_has_the_numbers_after_all_edits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a stream whose files have a checkpoint beside each final number."""
    place = ("zsre_wild_reliability", "efficacy_wild_em")
    rows = {one.name: one for one in blocks_reverse._kept(str(FIELD.relative_to(ROOT)), {place: "EM"})}
    (stream,) = (one for one in measured_rows(FIELD, "sequential") if one.editor == "ultraedit")
    by_stage = {key.stage: cell.value for key, cell in stream.row.cells.items() if (key.task, key.metric) == place}
    assert {"", "100"} <= set(by_stage)
    assert by_stage[""] not in [value for stage, value in by_stage.items() if stage]
    assert rows["ultraedit"].cells["EM"].value == stream.cells["efficacy_wild_em"].value == by_stage[""]
    monkeypatch.setattr(blocks_measured, "HEADINGS", {place: "EM"})
    columns = blocks_measured._columns([blocks_measured.Measured("ultraedit", "", stream.row)])
    assert [(key.metric, key.stage) for key in columns] == [("efficacy_wild_em", "")]
