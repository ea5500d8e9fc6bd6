"""Render docs/_data/published_tables.yaml into the READMEs of the benchmarks.

python scripts/published_tables.py            # rewrite the sections between the markers
python scripts/published_tables.py --check    # exit code 1 if one is out of date
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from _readme_section import replace_section

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "docs/_data/published_tables.yaml"
SECTION = "published tables"


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
    """Rewrite or check the READMEs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a README is out of date")
    check = parser.parse_args(arguments).check
    stale = []
    for name, benchmark in yaml.safe_load(SOURCE.read_text(encoding="utf-8")).items():
        path = ROOT / "lm_eval_tasks" / name / "README.md"
        text = path.read_text(encoding="utf-8")
        if (new := replace_section(text, SECTION, render(benchmark))) != text:
            stale.append(path)
            if not check:
                path.write_text(new, encoding="utf-8")
    for path in stale:
        print(f"{'out of date' if check else 'rewritten'}: {path.relative_to(ROOT)}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
