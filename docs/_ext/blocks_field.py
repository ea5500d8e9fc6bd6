"""Blocks of numbers about thousands of edits: long streams, the end token, and the plan ``field_3k`` on the demo model.

``docs/_data/long_streams.json`` is written by ``scripts/perf/long_streams.py``; ``docs/_data/end_token`` and
``docs/_data/field`` have runs of the shipped plans of these names, without the scores of single cases.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from block import ROOT, Block, table, unique
from blocks_measured import cell_text

from edit_hooks.base.describe import describe_editor
from edit_hooks.base.registry import EDITORS
from lm_edit.cli.main import main
from lm_edit.figures.drawing.charts import Chart, Lines, Series
from lm_edit.leaderboard.board import Cell, Row
from lm_edit.leaderboard.table import build_board
from lm_edit.results.filters import filter_rows
from lm_edit.results.statistics.intervals import Interval
from lm_edit.results.tables import ResultSet, load_cases, load_results

LONG_STREAMS = ROOT / "docs/_data/long_streams.json"
END_TOKEN, FIELD = ROOT / "docs/_data/end_token", ROOT / "docs/_data/field"
KIB, MIB = 2**10, 2**20
FLAT = 0.1  # rise of the time per step over a stream
QUESTION, INSTRUCTION = "efficacy_gen_em", "efficacy_wild_em"
END_TOKEN_COLUMNS = {
    QUESTION: "question only",
    "efficacy_gen_goes_on": "right, and goes on",
    INSTRUCTION: "QA instruction",
    "neighborhood_wild_agree_gen": "locality",
}
FIELD_COLUMNS = {
    INSTRUCTION: "QA instruction",
    QUESTION: "question only",
    "efficacy_gen_goes_on": "right, and goes on",
    "paraphrase_wild_em": "paraphrase, QA instruction",
    "paraphrase_gen_em": "paraphrase alone",
    "neighborhood_wild_agree_gen": "locality, QA instruction",
    "neighborhood_agree_gen": "locality alone",
}
TRAINED = {False: "no", True: "yes"}


class Measured(NamedTuple):
    """A row of the leaderboard with its cells by metric, after all edits."""

    row: Row
    cells: Mapping[str, Cell]

    @property
    def editor(self) -> str:
        """Name of the editor in the plan, without settings."""
        return str(self.row.first["editor_label"] or self.row.key["editor"]).partition("(")[0]

    def texts(self, metrics: Sequence[str]) -> Iterator[str]:
        """The cells of some metrics, and the number of seeds."""
        yield from (cell_text(self.cells.get(metric)) for metric in metrics)
        yield str(len(self.row.runs))


@functools.cache
def measured_rows(folder: Path, mode: str) -> list[Measured]:
    """The rows of kept runs of one mode, the unedited model first if it was asked the same cases."""
    read = ResultSet.of([folder])
    found = filter_rows(load_results(read), [f"mode={mode}"])
    cases = load_cases(read, require_samples=False)
    board = build_board(found, cases[cases["run"].isin(found["run"])])
    return [
        Measured(row, unique((metric, cell) for (_, metric), cell in row.final_cells.items()))
        for section in board.sections
        for row in section.rows
    ]


def difference(first: Cell, second: Cell) -> tuple[float, Interval | None]:
    """The difference of two shares with Newcombe's interval, as if their cases were independent."""
    value = first.value - second.value
    if first.interval is None or second.interval is None:
        return value, None
    (a, low_a, high_a), (b, low_b, high_b) = (
        (one.value, one.interval.low, one.interval.high) for one in (first, second) if one.interval is not None
    )
    low = value - ((a - low_a) ** 2 + (high_b - b) ** 2) ** 0.5
    high = value + ((high_a - a) ** 2 + (b - low_b) ** 2) ** 0.5
    return value, first.interval._replace(low=low, high=high)


def _has_token(one: Measured) -> bool:
    return bool(dict(one.row.first["editor_config"]).get("append_eos"))


def end_token(mode: str) -> Block:
    """Rows of every editor without and with the end token, and the gap between the two questions that is left."""
    heads = ["editor", "end token", *END_TOKEN_COLUMNS.values(), "instruction - question only", "seeds"]
    lines = []
    for one in sorted(measured_rows(END_TOKEN, mode), key=lambda one: (one.editor, _has_token(one))):
        *cells, seeds = one.texts(list(END_TOKEN_COLUMNS))
        value, interval = difference(one.cells[INSTRUCTION], one.cells[QUESTION])
        gap = f"{value:+.2f}" + (f" ({interval.low:+.2f} to {interval.high:+.2f})" if interval else "")
        lines.append([f"`{one.editor}`", TRAINED[_has_token(one)], *cells, gap, seeds])
    return Block(table(heads, lines))


def field(_: str) -> Block:
    """The kept runs of ``field_3k``: a row per editor and mode."""
    modes = set(load_results([FIELD])["mode"])
    heads = ["editor", "edits", "end token", *FIELD_COLUMNS.values(), "s/edit"]
    lines = []
    for mode, name in {"none": "none", "batch": "at once", "sequential": "stream"}.items():
        for one in measured_rows(FIELD, mode) if mode in modes else ():
            *cells, _seeds = one.texts(list(FIELD_COLUMNS))
            edits = "-" if mode == "none" else f"{int(one.row.first['num_edits'])} {name}"
            config = dict(one.row.first["editor_config"])
            token = TRAINED[bool(config["append_eos"])] if "append_eos" in config else "-"
            seconds = dict(one.row.first["edit"] or {}).get("seconds_per_edit")
            lines.append([f"`{one.editor}`", edits, token, *cells, "-" if seconds is None else f"{seconds:.2g}"])
    return Block(table(heads, lines))


@functools.cache
def kept_streams() -> dict[str, dict[str, Any]]:
    """Editor -> its measurement."""
    kept: dict[str, dict[str, Any]] = json.loads(LONG_STREAMS.read_text(encoding="utf-8"))
    return kept


def long_streams(_: str) -> Block:
    """Time, memory and state after a tenth of the steps and after the last one."""
    heads = ["editor", "steps", "ms per step", "MiB of the process", "KiB carried", "bytes per step", "resumed"]
    lines = []
    for editor, record in kept_streams().items():
        first, last = (record["sections"][place] for place in (0, -1))
        grown = (last["state"] - first["state"]) / (last["last_step"] - first["last_step"])
        lines.append(
            [
                f"`{editor}`",
                f"{first['last_step']:,} and {last['last_step']:,}",
                *(
                    f"{first[name] / unit:,.1f} and {last[name] / unit:,.1f} ({last[name] / first[name] - 1:+.0%})"
                    for name, unit in (("seconds", 1e-3), ("memory", MIB))
                ),
                f"{first['state'] / KIB:,.1f} and {last['state'] / KIB:,.1f}",
                f"{grown:,.0f}",
                f"after {record['killed_at']:,}: {'equal' if record['resumed'] else 'DIFFERENT'}",
            ]
        )
    records = list(kept_streams().values())
    dates = sorted({record["date"] for record in records})
    one = records[0]
    facts = (
        f"torch {one['versions']['torch'].partition('+')[0]}, transformers {one['versions']['transformers']}, one "
        f"thread on a busy machine with {one['cores']} cores, {' to '.join(dict.fromkeys([dates[0], dates[-1]]))}; "
        "seconds are of the processor, medians of a tenth of the steps."
    )
    return Block(f"{table(heads, lines)}\n\n{facts} {_flatness('seconds')} {_flatness('memory')}")


QUANTITIES = {"seconds": "Time per step", "memory": "Memory of the process"}


def _flatness(quantity: str) -> str:
    """Which editors take as much after a tenth of the steps as after all of them, to :data:`FLAT`."""
    rises = {
        editor: record["sections"][-1][quantity] / record["sections"][0][quantity] - 1
        for editor, record in kept_streams().items()
    }
    rising = ", ".join(f"`{editor}` ({rise:+.0%})" for editor, rise in rises.items() if rise > FLAT) or "none"
    flat = ", ".join(f"`{editor}`" for editor, rise in rises.items() if rise <= FLAT) or "none"
    return f"{QUANTITIES[quantity]}, flat to {FLAT:.0%} or falling: {flat}; rising: {rising}."


def long_stream_curves() -> Chart:
    """Time per step, memory of the process and what is carried over the steps, a line per editor."""
    panels = []
    for title, name, unit, label in (
        ("Processor time", "seconds", 1e-3, "ms per step"),
        ("Memory of the process", "memory", MIB, "MiB"),
        ("Carried to the next step", "state", KIB, "KiB"),
    ):
        series = [
            Series(
                name=editor,
                values=[section[name] / unit for section in record["sections"]],
                positions=[section["last_step"] for section in record["sections"]],
                color=number,
                style=number,
            )
            for number, (editor, record) in enumerate(kept_streams().items())
        ]
        panels.append(Lines(title=title, series=series, position_label="steps", value_label=label))
    return Chart(name="long_streams", title="Streams of one fact per step on a tiny model", panels=panels)


def stream_growth(_: str) -> Block:
    """What every editor states about its streams; editors that state the same share a row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name in EDITORS:
        growth = describe_editor(name).stream_growth
        assert growth is not None, name
        rows.setdefault((growth.carries, growth.grows), []).append(f"`{name}`")
    lines = [[", ".join(names), carries, grows] for (carries, grows), names in rows.items()]
    return Block(table(["editor", "carried from step to step", "grows"], lines))


ESTIMATES = {
    "8b": "field_3k",
    "demo": "field_3k --pretrained demo --model-args data=hub:locft_3k --num-edits 200 --limit 200 "
    "--only zsre --estimate-from docs/_data/field",
}


def field_estimate(which: str) -> Block:
    """The command of a dry run and the last line that it prints."""
    options = ESTIMATES[which].split()
    printed = io.StringIO()
    given = [str(ROOT / option) if option.startswith("docs/") else option for option in options]
    with contextlib.redirect_stdout(printed):
        code = main(["sweep", *given, "--dry-run", "--out", str(ROOT / "runs" / "none")])
    if code:
        raise ValueError(f"the dry run of {ESTIMATES[which]} failed with exit code {code}; its reason is above")
    last = printed.getvalue().splitlines()[-1]
    return Block(f"```\n$ lm-edit sweep {' '.join(options)} --dry-run\n{last}\n```")


FIELD_BLOCKS: dict[str, Callable[[str], Block]] = {
    "end-token": end_token,
    "field": field,
    "field-estimate": field_estimate,
    "long-streams": long_streams,
    "stream-growth": stream_growth,
}
