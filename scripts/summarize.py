"""One Markdown table from several result files: a row per metric, a column per file.

    python scripts/summarize.py results/none results/r_rome      # files, or folders: the newest result file of each
    python scripts/summarize.py --metrics es_prob rqs_prob -- results/*

Column headings are editor, mode and data of the run. A cell is value ± standard error (number of scored cases, and
of failed ones if there are any). Nothing is scored again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def newest_result(path: Path) -> Path:
    """The result file itself, or the newest one below a folder."""
    if path.is_file():
        return path
    files = sorted(path.rglob("results_*.json"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise SystemExit(f"no results_*.json below {path}")
    return files[-1]


def heading(results: dict[str, Any]) -> str:
    """Editor, mode and data of a run; the model class for runs without edits.

    The data are what the tasks read, which need not be what the model was given.
    """
    sources = {
        str(config["metadata"]["data_source"]["data"])
        for config in results.get("configs", {}).values()
        if "data_source" in (config.get("metadata") or {})
    }
    data = f" ({', '.join(sorted(sources))})" if sources else ""
    metadata = results["config"].get("edited_hf")
    if metadata is None:
        return str(results["config"].get("model")) + data
    if metadata["mode"] == "none":
        return f"unedited{data}"
    size = f", {metadata['num_edits']} edits" if metadata.get("num_edits") else ""
    return f"{metadata['editor']}, {metadata['mode']}{size}{data}"


def format_metrics(results: dict[str, Any]) -> dict[tuple[str, str], str]:
    """(task, metric) -> cell, for every numeric metric of every task."""
    cells = {}
    for task, row in results["results"].items():
        for key, value in row.items():
            name, _, pipeline = key.partition(",")
            is_companion = name.endswith(("_stderr", "_n", "_excluded", "_failed")) or name == "unscored"
            if not pipeline or is_companion or not isinstance(value, (int, float)):
                continue
            stderr = row.get(f"{name}_stderr,{pipeline}")
            count = row.get(f"{name}_n,{pipeline}")
            cell = f"{value:.3f}" + (f" ± {stderr:.3f}" if isinstance(stderr, float) else "")
            failed = row.get(f"{name}_failed,{pipeline}")
            counts = f"{count}, {failed} failed" if failed else count
            cells[task, name] = cell + (f" ({counts})" if count is not None else "")
    return cells


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path, help="result files, or folders that contain some")
    parser.add_argument("--metrics", nargs="+", help="only these metrics, in this order")
    args = parser.parse_args(arguments)
    files = [json.loads(newest_result(path).read_text(encoding="utf-8")) for path in args.paths]
    columns = [format_metrics(results) for results in files]
    rows = list(dict.fromkeys(key for column in columns for key in column))
    if args.metrics:
        rows = [key for name in args.metrics for key in rows if key[1] == name]
        if not rows:
            sys.exit(f"no file has a metric named {', '.join(args.metrics)}")
    print("| task | metric | " + " | ".join(heading(results) for results in files) + " |")
    print("|---|---|" + "---|" * len(files))
    for task, name in rows:
        print(f"| {task} | {name} | " + " | ".join(column.get((task, name), "") for column in columns) + " |")


if __name__ == "__main__":
    main()
