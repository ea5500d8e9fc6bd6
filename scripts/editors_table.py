"""Summarize the runs of measure_editors.py, and render the summary into edit_hooks/README.md.

    python scripts/measure_editors.py --out results/editors --summary docs/measured_editors.json
    python scripts/editors_table.py            # rewrite the tables of edit_hooks/README.md from that file
    python scripts/editors_table.py --check    # exit code 1 if they are out of date

A cell is the mean over cases of a case's mean over seeds. Its interval is Wilson's for 95 % with the number of cases:
seeds repeat a case and add none. Wilson's interval takes p (1 - p) for the variance of a case, the largest that scores
between 0 and 1 can have, so it is too wide rather than too narrow for scores that are shares (GS and LS average several
questions).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from _readme_section import replace_section
from measure_editors import PARTS, PLAN, SEEDS, Job, Row, draws_nothing, read_result

ROOT = Path(__file__).resolve().parents[1]
SUMMARY = ROOT / "docs" / "measured_editors.json"
README = ROOT / "edit_hooks" / "README.md"
SECTION = "measured editors"
Z95 = 1.959964
GROUP_ORDER = ("nothing", "weights", "hooks", "context")
# part -> (heading, task, metric)
SAMPLE_COLUMNS = (
    ("ES", "bake_es", "es_prob"),
    ("GS", "bake_gs", "gs_prob"),
    ("LS", "bake_ls", "ls_prob"),
    ("RQS", "bake_rq", "rqs_prob"),
    ("RJS", "bake_rj", "rjs_prob"),
    ("WILD EM", "qaedit_wild_reliability", "reliability_wild_em"),
)
COLUMNS = {
    "single": SAMPLE_COLUMNS,
    "stream48": SAMPLE_COLUMNS,
    "stream200": (
        ("ES", "counterfact_flat_es", "es_prob"),
        ("GS", "counterfact_flat_gs", "gs_prob"),
        ("LS", "counterfact_flat_ls", "ls_prob"),
    ),
}
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


def summarize(rows: Sequence[Row], out: Path) -> dict[str, Any]:
    """The machine-readable summary of the finished runs."""
    plan = _read_plan()
    found = [(row, _summarize_row(row, out)) for row in rows]
    records = [record for row in rows for record in _records(row, out)]
    return {
        "version": 1,
        "groups": {name: group["title"] for name, group in plan["groups"].items()},
        "left_out": plan["left_out"],
        "weights": sorted({run["weights"] for record in records for run in record.get("runs", [])}),
        "versions": sorted({json.dumps(run["versions"]) for record in records for run in record.get("runs", [])}),
        "commits": sorted({str(record["commit"]) for record in records}),
        "hours": round(sum(record["wall_seconds"] for record in records) / 3600, 1),
        "rows": [summary for _, summary in found if summary["parts"]],
    }


def _read_plan() -> dict[str, Any]:
    import yaml

    plan: dict[str, Any] = yaml.safe_load(PLAN.read_text(encoding="utf-8"))
    return plan


def _records(row: Row, out: Path) -> list[dict[str, Any]]:
    found = [read_result(Job(row, part, seed).path(out)) for part in PARTS for seed in SEEDS]
    return [record for record in found if record is not None]


def _summarize_row(row: Row, out: Path) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "group": row.group,
        "editor": row.editor,
        "changes": _changes(row),
        "settings": dict(row.settings),
        "parts": {},
    }
    for part, columns in COLUMNS.items():
        results = {seed: result for seed in SEEDS if (result := read_result(Job(row, part, seed).path(out)))}
        if not results:
            continue
        if any(result["limit"] is not None for result in results.values()):
            raise SystemExit(f"{row.name} {part}: a run with --limit is no measurement; use another --out")
        summary["config"] = next(iter(results.values()))["runs"][0]["editor_config"]
        cells = {heading: _cell(results.values(), task, metric) for heading, task, metric in columns}
        summary["parts"][part] = {
            "seeds": "any" if draws_nothing(row, part, out) or row.is_unedited else sorted(results),
            "cells": cells,
            "warnings": [run["warnings"] for result in results.values() for run in result["runs"] if run["warnings"]],
        }
    if timed := read_result(Job(row, "seconds", 0).path(out)):
        summary["seconds_per_edit"] = round(timed["seconds"], 2)
    return summary


def _changes(row: Row) -> str:
    """The part of the model that an editor changes: weights, hooks or context."""
    if row.is_unedited:
        return "nothing"
    from edit_hooks.base.registry import editor_class

    return "/".join(editor_class(row.editor).writes)


def _cell(results: Iterable[dict[str, Any]], task: str, metric: str) -> dict[str, Any] | None:
    """Mean, interval and counts of one metric; ``None`` if no case has a score."""
    by_case = list(zip(*(result["scores"][task][metric] for result in results), strict=True))
    means = [math.fsum(scores) / len(scores) for case in by_case if (scores := [s for s in case if s is not None])]
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


def render(summary: dict[str, Any]) -> str:
    """The tables as Markdown."""
    lines: list[str] = []
    for part, columns in COLUMNS.items():
        headings = [heading for heading, _, _ in columns]
        timed = part == "single"
        for group, title in summary["groups"].items():
            rows = [row for row in summary["rows"] if row["group"] in ("", group)]
            rows = [row for row in rows if part in row["parts"] or row["editor"] == "unedited"]
            if not any(row["group"] for row in rows):
                continue
            cells = ["editor", "changes", *headings, *(["s/edit"] if timed else []), "seeds"]
            lines += ["", f"{TITLES[part]}; {title}:", "", _line(cells), "|---" * len(cells) + "|"]
            for row in sorted(rows, key=lambda row: GROUP_ORDER.index(row["changes"])):
                lines.append(_line(_render_row(row, part, headings, timed)))
    return "\n".join(lines).strip()


def _render_row(row: dict[str, Any], part: str, headings: Sequence[str], timed: bool) -> list[str]:
    found = row["parts"].get(part, {"cells": {}, "seeds": []})
    cells = [_format(found["cells"].get(heading)) for heading in headings]
    seeds = found["seeds"] if found["seeds"] == "any" else str(len(found["seeds"]) or "-")
    seconds = [f"{row['seconds_per_edit']:.1f}" if "seconds_per_edit" in row else "-"] if timed else []
    return [f"`{row['editor']}`", row["changes"], *cells, *seconds, seeds]


def _format(cell: dict[str, Any] | None) -> str:
    return "-" if cell is None else f"{cell['mean']:.2f} ({cell['low']:.2f}-{cell['high']:.2f})"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite or check the README."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if the README is out of date")
    check = parser.parse_args(arguments).check
    text = README.read_text(encoding="utf-8")
    new = replace_section(text, SECTION, render(json.loads(SUMMARY.read_text(encoding="utf-8"))))
    if new == text:
        return 0
    if check:
        print(f"out of date: {README}; run python scripts/editors_table.py")
        return 1
    README.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
