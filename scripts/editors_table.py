"""Tables of the kept runs of measure_editors.py, which the documentation site shows.

    python scripts/measure_editors.py --out results/editors --keep  # keeps finished runs in docs/_data
    python scripts/editors_table.py            # print the tables
    python scripts/editors_table.py --pairs    # print paired tests: against the unedited model, and between the groups

A cell is the mean over cases of a case's mean over seeds. Its interval is Wilson's for 95 % with the number of cases:
seeds repeat a case and add none. Wilson's interval takes p (1 - p) for the variance of a case, the largest that scores
between 0 and 1 can have, and cases for independent: those of one relation are not. Two cells are about the same cases,
so their difference is tested case by case (--pairs), not by whether their intervals overlap. Where fewer cases have a
score than of the unedited model (the editor refused the others), the cell says how many do.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from _measurements import COLUMNS, NUM_STREAMED, UNEDITED, Finished, Row
from measure_editors import PLAN, load_rows, load_titles
from numpy.typing import NDArray

from lm_edit.leaderboard.significance import Comparison, compare_pairs, corrected

Z95 = 1.959964
PERMUTATIONS = 49_999  # p-values go down to 2 / 50,000, and families have up to 84 tests
GROUP_ORDER = ("nothing", "weights", "hooks", "context")
TITLES = {
    "single": "Single edits, each on the unedited model",
    "stream48": "A stream of 48 edits, the 48 cases scored after the last step",
    "stream200": "A stream of 200 edits of CounterFact, the 200 cases scored after the last step",
}


def wilson(mean: float, number: int) -> tuple[float, float]:
    """Ends of Wilson's 95 % interval for a mean of ``number`` scores between 0 and 1."""
    squared = Z95**2 / number
    center = (mean + squared / 2) / (1 + squared)
    half = math.sqrt(mean * (1 - mean) * squared + squared**2 / 4) / (1 + squared)
    return max(0.0, center - half), min(1.0, center + half)


def summarize(rows: Sequence[Row], finished: Finished) -> list[dict[str, Any]]:
    """One entry per row with a finished part: its cells, seeds and seconds per edit."""
    found = [_summarize_row(row, finished) for row in rows]
    return [summary for summary in found if summary["parts"]]


def _summarize_row(row: Row, finished: Finished) -> dict[str, Any]:
    summary: dict[str, Any] = {"group": row.group, "editor": row.editor, "changes": _changes(row), "parts": {}}
    for part, columns in COLUMNS.items():
        if records := _records(row, part, finished):
            cells = {heading: _cell(records.values(), heading) for heading, _, _ in columns}
            seeds = "any" if finished.draws_nothing(row, part) or row.is_unedited else str(len(records))
            summary["parts"][part] = {"seeds": seeds if any(cells.values()) else "-", "cells": cells}
    if (timed := finished.get(row, "seconds", 0)) is not None:
        summary["seconds_per_edit"] = timed["seconds"]
    return summary


def _records(row: Row, part: str, finished: Finished) -> dict[int, dict[str, Any]]:
    """Seed -> record of a part; of the unedited model the cases of a stream are the first ones of the whole samples."""
    if not (row.is_unedited and part == "stream48"):
        return finished.of(row, part)
    return {
        seed: {"scores": {heading: scores[:NUM_STREAMED] for heading, scores in record["scores"].items()}}
        for seed, record in finished.of(row, "single").items()
    }


def _changes(row: Row) -> str:
    """The part of the model that an editor changes: weights, hooks or context."""
    if row.is_unedited:
        return "nothing"
    from edit_hooks.base.registry import editor_class

    return "/".join(editor_class(row.editor).writes)


def _cell(records: Iterable[dict[str, Any]], heading: str) -> dict[str, Any] | None:
    """Mean, interval and counts of one metric; ``None`` if no case has a score.

    A run in which the editor could use no edit has no scores at all.
    """
    by_case = _by_case(records, heading)
    means = [mean for mean in by_case if not math.isnan(mean)]
    if not means:
        return None
    mean = math.fsum(means) / len(means)
    low, high = wilson(mean, len(means))
    return {
        "mean": round(mean, 4),
        "low": round(low, 4),
        "high": round(high, 4),
        "cases": len(means),
        "without_score": len(by_case) - len(means),
    }


class Pair(NamedTuple):
    """A paired test of two rows on the cases that both scored, corrected by Holm within its family.

    Attributes:
        part, heading: the column. first, second: names of the rows.
        gained, lost: cases in which the first row scores higher, and lower.
    """

    part: str
    heading: str
    first: str
    second: str
    gained: int
    lost: int
    test: Comparison


def pairs(rows: Sequence[Row], finished: Finished) -> list[Pair]:
    """Every row against the unedited model, a family per column; and published against own settings, one per part."""
    unedited = next(row for row in rows if row.is_unedited)
    tuned = {row.editor: row for row in rows if row.group == "tuned"}
    found: list[Pair] = []
    for part, columns in COLUMNS.items():
        for heading, _, _ in columns:
            editors = [(row, unedited) for row in rows if not row.is_unedited]
            found += _corrected([(part, heading, *both) for both in editors], finished)
        groups = [(row, tuned[row.editor]) for row in rows if row.group == "published" and row.editor in tuned]
        found += _corrected([(part, heading, *both) for both in groups for heading, _, _ in columns], finished)
    return found


def _corrected(wanted: Iterable[tuple[str, str, Row, Row]], finished: Finished) -> list[Pair]:
    made = []
    for part, heading, first, second in wanted:
        values = [_by_case(_records(row, part, finished).values(), heading) for row in (first, second)]
        ours, theirs = (one[: min(map(len, values))] for one in values)  # the unedited model's of a stream are cut
        if (test := compare_pairs(ours, theirs, permutations=PERMUTATIONS)) is not None:
            differences = np.nan_to_num(ours - theirs)
            gained, lost = int((differences > 0).sum()), int((differences < 0).sum())
            made.append(Pair(part, heading, first.name, second.name, gained, lost, test))
    tests = corrected([pair.test for pair in made])
    return [pair._replace(test=test) for pair, test in zip(made, tests, strict=True) if test is not None]


def _by_case(records: Iterable[dict[str, Any]], heading: str) -> NDArray[np.float64]:
    """Means over seeds, [cases]; NaN where no seed has a score."""
    scored = [scores for record in records if (scores := record["scores"][heading])]
    means = [_mean([score for score in case if score is not None]) for case in zip(*scored, strict=True)]
    return np.array(means, dtype=np.float64)


def _mean(scores: Sequence[float]) -> float:
    return math.fsum(scores) / len(scores) if scores else math.nan


def render(rows: Sequence[Row], groups: Mapping[str, str], finished: Finished) -> str:
    """The tables as Markdown, and a line on the runs behind them; ``groups`` are the titles."""
    lines: list[str] = []
    summaries = summarize(rows, finished)
    unedited: Mapping[str, Any] = next((row["parts"] for row in summaries if row["editor"] == UNEDITED), {})
    for part, columns in COLUMNS.items():
        headings = [heading for heading, _, _ in columns]
        timed = part == "single"
        for group, title in groups.items():
            shown = [row for row in summaries if row["group"] in ("", group)]
            shown = [row for row in shown if part in row["parts"] or row["editor"] == UNEDITED]
            if not any(row["group"] for row in shown):
                continue
            cells = ["editor", "changes", *headings, *(["s/edit"] if timed else []), "seeds"]
            lines += ["", f"{TITLES[part]}; {title}:", "", _line(cells), "|---" * len(cells) + "|"]
            for row in sorted(shown, key=lambda row: GROUP_ORDER.index(row["changes"])):
                lines.append(_line(_render_row(row, part, headings, timed, unedited.get(part, {}).get("cells", {}))))
    records = [record for row in rows for part in COLUMNS for record in finished.of(row, part).values()]
    return "\n".join([*lines, "", _cost(records)]).strip()


def _cost(records: Sequence[Mapping[str, Any]]) -> str:
    """The number of runs by device, and the processor time of those on a CPU."""
    on_gpu = [name for record in records if (name := _gpu_of(record)) is not None]
    on_cpu = [record for record in records if _gpu_of(record) is None]
    costs = [record["cpu_seconds"] for record in on_cpu if record["cpu_seconds"] is not None]
    unknown = f", {len(on_cpu) - len(costs)} of unknown cost not counted" if len(costs) < len(on_cpu) else ""
    time = f"{sum(costs) / 3600:.1f} hours of processor time{unknown}"
    if not on_gpu:
        return f"The {len(records)} runs behind these tables took {time}."
    counts = ", ".join(f"{on_gpu.count(name)} on a GPU ({name})" for name in sorted(set(on_gpu)))
    made = f"{len(on_cpu)} were made on a CPU and took {time}; {counts}"
    return f"Of the {len(records)} runs behind these tables, {made}."


def _gpu_of(record: Mapping[str, Any]) -> str | None:
    """The GPU that computed a run; records of before devices were kept are of a CPU, which has no name."""
    name: str | None = record.get("device", {}).get("name")
    return name


def _render_row(
    row: dict[str, Any], part: str, headings: Sequence[str], timed: bool, unedited: Mapping[str, Any]
) -> list[str]:
    found = row["parts"].get(part, {"cells": {}, "seeds": "-"})
    cells = [format_cell(found["cells"].get(heading), unedited.get(heading)) for heading in headings]
    seconds = [f"{row['seconds_per_edit']:.1f}" if "seconds_per_edit" in row else "-"] if timed else []
    return [f"`{row['editor']}`", row["changes"], *cells, *seconds, found["seeds"]]


def format_cell(cell: dict[str, Any] | None, unedited: Mapping[str, Any] | None) -> str:
    """One cell; ``unedited`` is the same cell of the unedited model, which no editor can refuse."""
    if cell is None:
        return "-"
    shown = f"{cell['mean']:.2f} ({cell['low']:.2f}-{cell['high']:.2f})"
    possible = cell["cases"] if unedited is None else unedited["cases"]
    return shown if cell["cases"] >= possible else f"{shown}, {cell['cases']} of {possible}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables, or the paired tests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", action="store_true", help="print paired tests instead of tables")
    if not parser.parse_args(arguments).pairs:
        print(render(load_rows(PLAN, {}), load_titles(PLAN), Finished.read(None)))
        return 0
    for pair in pairs(load_rows(PLAN, {}), Finished.read(None)):
        difference, cases = f"{pair.test.difference:+.3f}", f"{pair.gained} up, {pair.lost} down"
        names = f"{pair.part} {pair.heading}: {pair.first} - {pair.second}"
        print(f"{names}: {difference} ({cases} of {pair.test.num_cases}), p {pair.test.p:.2g} after Holm")
    return 0


if __name__ == "__main__":
    sys.exit(main())
