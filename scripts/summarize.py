"""Result files to one markdown table: a row per metric, a column per file. Nothing is scored again.

    python scripts/summarize.py results/none results/r_rome      # files, or folders: the newest result file of each
    python scripts/summarize.py --metrics es_prob rqs_prob -- results/*

Columns are headed by mode, editor and data of the run. A cell is value ± standard error (cases scored).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any


def newest(place: Path) -> Path:
    """The result file itself, or the newest one below a folder."""
    if place.is_file():
        return place
    files = sorted(place.rglob("results_*.json"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise SystemExit(f"no results_*.json below {place}")
    return files[-1]


def heading(results: dict[str, Any]) -> str:
    """What was run: mode, editor, data."""
    stamp = results["config"].get("edited_hf")
    if stamp is None:
        return str(results["config"].get("model"))
    if stamp["mode"] == "none":
        return f"unedited ({stamp['data']})"
    size = f", {stamp['num_edits']} edits" if stamp.get("num_edits") else ""
    return f"{stamp['editor']}, {stamp['mode']}{size} ({stamp['data']})"


def metrics(results: dict[str, Any]) -> dict[tuple[str, str], str]:
    """(task, metric) -> printed cell, for every numeric metric of every task."""
    cells = {}
    for task, row in results["results"].items():
        for key, value in row.items():
            name, _, pipeline = key.partition(",")
            companion = name.endswith(("_stderr", "_n", "_excluded")) or name == "unscored"
            if not pipeline or companion or not isinstance(value, (int, float)):
                continue
            spread = row.get(f"{name}_stderr,{pipeline}")
            count = row.get(f"{name}_n,{pipeline}")
            cell = f"{value:.3f}" + (f" ± {spread:.3f}" if isinstance(spread, float) else "")
            cells[task, name] = cell + (f" ({count})" if count is not None else "")
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("places", nargs="+", type=Path, help="result files, or folders with some")
    parser.add_argument("--metrics", nargs="+", default=None, help="only these metrics, in this order")
    arguments = parser.parse_args()
    files = [json.loads(newest(place).read_text(encoding="utf-8")) for place in arguments.places]
    columns = [metrics(results) for results in files]
    rows = list(dict.fromkeys(key for column in columns for key in column))
    if arguments.metrics:
        rows = [key for name in arguments.metrics for key in rows if key[1] == name]
        if not rows:
            sys.exit(f"none of {arguments.metrics} is in these files")
    print("| task | metric | " + " | ".join(heading(results) for results in files) + " |")
    print("|---|---|" + "---|" * len(files))
    for task, name in rows:
        print(f"| {task} | {name} | " + " | ".join(column.get((task, name), "") for column in columns) + " |")


if __name__ == "__main__":
    main()
