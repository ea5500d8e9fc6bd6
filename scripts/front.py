"""Draw the picture of the README and write its table, both from the kept runs of measure_editors.py.

    python scripts/front.py            # rewrite docs/_static/figures/answer_gap*.svg and the table of the README
    python scripts/front.py --check    # exit code 1 if the table or a number of the picture is out of date

Means are over cases of a case's mean over seeds, intervals are those of the tables of editors (editors_table.py).
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from _measurements import SAMPLE_COLUMNS, UNEDITED, Finished
from _readme_section import replace_section
from editors_table import summarize
from measure_editors import PLAN, load_rows

from lm_edit.figures.drawing.charts import Chart
from lm_edit.figures.drawing.look import number
from lm_edit.figures.drawing.output import write_figure
from lm_edit.figures.select import Cell
from lm_edit.figures.wild import answer_gap

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
FIGURES = ROOT / "docs/_static/figures"
PICTURES = {False: FIGURES / "answer_gap.svg", True: FIGURES / "answer_gap-dark.svg"}
GROUP, PART = "tuned", "single"
PANELS = {
    "Locate, then edit": ("rome", "r_rome", "memit", "alphaedit"),
    "Train, store, or prompt": ("ft_m", "grace", "wise", "ike"),
}
BARS = ("ES", "WILD EM", "RQS")
METRICS = {heading: metric for heading, _, metric in SAMPLE_COLUMNS}
OF_TABLE = "r_rome"
QUESTIONS = {
    "ES": "the edited prompt: new answer likelier than the old one",
    "GS": "a paraphrase of it",
    "LS": "other facts with the old answer: it stays likelier",
    "WILD EM": "**the question, answered freely: exact match**",
    "RQS": "**the same fact in reverse: the edited subject likelier**",
    "RJS": 'the reverse fact judged: "Yes" likelier than "No"',
}
SECTION = "measured"


def kept_cells() -> dict[str, dict[str, Any]]:
    """Editor -> column -> mean, interval and number of cases, of single edits with settings for the demo model."""
    found = summarize(load_rows(PLAN, {}), Finished.read(None))
    return {row["editor"]: row["parts"][PART]["cells"] for row in found if row["group"] in (GROUP, "")}


def picture() -> Chart:
    """Three bars per editor; the caption is in the README."""
    cells = kept_cells()
    panels = []
    for title, editors in PANELS.items():
        columns = [[_cell(cells[editor][heading]) for editor in editors] for heading in BARS]
        panels.append(answer_gap.three_bars(title, editors, columns, METRICS["WILD EM"]))
    return Chart(name=answer_gap.NEEDS.figure, title=answer_gap.TITLE, panels=panels)


def _cell(summary: dict[str, Any]) -> Cell:
    mean = summary["mean"]
    return Cell(mean, min(summary["low"], mean), max(summary["high"], mean), summary["cases"])


def table() -> str:
    """The rows of one editor beside the unedited model."""
    cells = kept_cells()
    lines = ["| question after the edit | unedited | R-ROME, 95% interval |", "|---|---|---|"]
    for heading, question in QUESTIONS.items():
        edited = cells[OF_TABLE][heading]
        value = f"{edited['mean']:.2f} ({edited['low']:.2f} to {edited['high']:.2f})"
        unedited = f"{cells[UNEDITED][heading]['mean']:.2f}"
        lines.append(f"| {question} (`{METRICS[heading]}`) | {unedited} | {value} |")
    return "\n".join(lines)


def numbers_of(svg: str) -> list[str]:
    """The numbers beside the bars of a drawn picture, in its order: matplotlib writes texts as comments."""
    return re.findall(r"<!-- (\d\.\d{2,}) -->", svg)


def drawn_numbers() -> list[str]:
    """The numbers that the picture has to show, in the same order."""
    return [number(value) for panel in picture().panels for series in panel.series for value in series.values]


def is_current() -> bool:
    """Whether the table and the numbers of both pictures are those of the kept runs."""
    text = README.read_text(encoding="utf-8")
    drawn = [numbers_of(path.read_text(encoding="utf-8")) for path in PICTURES.values()]
    return replace_section(text, SECTION, table()) == text and drawn == [drawn_numbers()] * 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if something is out of date")
    if parser.parse_args().check:
        return 0 if is_current() else 1
    for dark, path in PICTURES.items():
        write_figure(picture(), path, dark=dark)
    README.write_text(replace_section(README.read_text(encoding="utf-8"), SECTION, table()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
