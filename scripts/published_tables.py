"""Tables of docs/_data/published_tables.yaml, which the documentation site shows.

python scripts/published_tables.py qaedit     # print those of a benchmark
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "docs/_data/published_tables.yaml"


def render(benchmark: dict[str, Any]) -> str:
    """The papers, the table of columns and the table of editors, as Markdown."""
    papers = [f"- {name}: *{title}*." for name, title in benchmark["papers"].items()]
    column = f"column ({benchmark['unit']})"
    tables = [f"| published | agreement | {column} | run, and population | differs |", "|---|---|---|---|---|"]
    for table in benchmark["tables"]:
        stages = [f"@{stage}" for stage in table.get("stages", [])] or [""]
        columns = ", ".join(f"`{column}{stage}`" for column in table.get("columns", []) for stage in stages)
        run = "; ".join(table[key] for key in ("run", "population") if key in table)
        tables.append(
            f"| {table['published']} | {table['agreement']} | {columns or '-'} | {run or '-'} | {table['differs']} |"
        )
    if not benchmark.get("editors"):
        return "\n".join([*papers, "", *tables])
    editors = ["| published editor | here | settings in `configs/` for | differs |", "|---|---|---|---|"]
    for editor in benchmark["editors"]:
        configs = ", ".join(f"`{name}`" for name in editor["configs"])
        differs = editor["differs"] or "-"
        editors.append(f"| {editor['published']} | `{editor['editor']}` | {configs} | {differs} |")
    return "\n".join([*papers, "", *tables, "", *editors])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables of a benchmark."""
    maps: dict[str, Any] = yaml.safe_load(SOURCE.read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmark", choices=list(maps))
    print(render(maps[parser.parse_args(arguments).benchmark]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
