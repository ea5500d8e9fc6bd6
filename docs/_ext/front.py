"""Draw the picture of the README and write its table, both from the kept runs behind the tables of editors.

    python docs/_ext/front.py            # rewrite docs/_static/figures/answer_gap*.svg and the table of the README
    python docs/_ext/front.py --check    # exit code 1 if the table or a number of the picture is out of date

Means are over seeds, and intervals those of the tables of editors (blocks_measured.py).
"""

from __future__ import annotations

import argparse
import re
import sys

from block import ROOT
from blocks_measured import METRICS, kept_cells, question_table

from lm_edit.figures.drawing.charts import Chart
from lm_edit.figures.drawing.look import number
from lm_edit.figures.drawing.output import write_figure
from lm_edit.figures.drawing.style import Style
from lm_edit.figures.select import Cell
from lm_edit.figures.wild import answer_gap
from lm_edit.leaderboard import board

README = ROOT / "README.md"
PICTURES = {dark: ROOT / f"docs/_static/figures/answer_gap{'-dark' if dark else ''}.svg" for dark in (False, True)}
PANELS = {
    "Locate, then edit": ("rome", "r_rome", "memit", "alphaedit"),
    "Train, store, or prompt": ("ft_m", "grace", "wise", "ike"),
}
BARS = ("ES", "WILD EM", "RQS")
SECTION = re.compile(r"(?<=<!-- measured: begin -->\n).*?(?=\n<!-- measured: end -->)", flags=re.DOTALL)


def picture() -> Chart:
    """Three bars per editor; the caption is in the README."""
    cells = kept_cells()
    panels = []
    for title, editors in PANELS.items():
        columns = [[_bar(cells[editor][heading]) for editor in editors] for heading in BARS]
        panels.append(answer_gap.three_bars(title, editors, columns, METRICS["WILD EM"]))
    return Chart(name=answer_gap.NEEDS.figure, title=answer_gap.TITLE, panels=panels)


def _bar(cell: board.Cell) -> Cell:
    assert cell.interval is not None
    return Cell(cell.value, min(cell.interval.low, cell.value), max(cell.interval.high, cell.value), cell.num_scored)


def with_table(text: str) -> str:
    """The text of the README with the present table."""
    if len(SECTION.findall(text)) != 1:
        raise SystemExit("the README has no comments <!-- measured: begin --> and <!-- measured: end -->")
    return SECTION.sub(lambda _: question_table(), text)


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
    return with_table(text) == text and drawn == [drawn_numbers()] * 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if something is out of date")
    if parser.parse_args().check:
        return 0 if is_current() else 1
    for dark, path in PICTURES.items():
        write_figure(picture(), path, Style(dark=dark))
    README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
