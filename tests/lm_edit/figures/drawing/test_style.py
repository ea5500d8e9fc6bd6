"""Options of the command line: size, font, order, palette, and figures without title and caption."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from edit_hooks import EditingError
from lm_edit.cli.main import main
from lm_edit.figures.drawing.charts import Bars, Chart, Lines, Reference, Series, arranged
from lm_edit.figures.drawing.output import write_figure
from lm_edit.figures.drawing.style import PALETTES, Style, read_palette

pytest.importorskip("matplotlib", reason="the report extra is not installed")
from lm_edit.figures.drawing.static import draw_static
from lm_edit.figures.drawing.style import drawn_in

RESULTS = Path(__file__).parents[4] / "docs/_data/gallery/results"
NAMES = ("rome", "memit", "grace")


@pytest.fixture(scope="module")
def chart() -> Chart:
    series = [
        Series(name="before", values=[0.1, 0.2, 0.3], low=[0.0, 0.1, 0.2], high=[0.2, 0.3, 0.4], gaps=["a", "b", "c"]),
        Series(name="after", values=[0.4, 0.5, 0.6], color=1),
    ]
    bars = Bars(
        title="p", categories=NAMES, series=series, value_label="v", references=[Reference(name="r", value=0.3)]
    )
    return Chart(name="c", title="The title", panels=[bars, bars], caption=["The caption."])


def sizes(style: Style, chart: Chart) -> tuple[float, float, set[float]]:
    with drawn_in(style):
        figure = draw_static(chart)
    texts = [text for axes in figure.axes for text in [*axes.texts, *axes.get_xticklabels(), axes.xaxis.label]]
    return (*figure.get_size_inches(), {round(text.get_fontsize(), 2) for text in texts})


def test_size_and_font_are_those_that_were_asked_for(chart):
    width, height, fonts = sizes(Style(), chart)
    assert (width, fonts) == (6.8, {5.5, 7.0, 7.5})
    assert sizes(Style(font_size=15.0), chart)[2] == {11.0, 14.0, 15.0}
    narrow = sizes(Style(width=3.25), chart)
    assert narrow[0] == 3.25 and narrow[1] > height  # the panels are below each other
    assert sizes(Style(width=3.25, height=2.0), chart)[:2] == (3.25, 2.0)


def test_title_and_caption_are_left_out_on_request(chart, tmp_path):
    def shown(**options: bool) -> str:
        with drawn_in(Style(**options)):
            figure = draw_static(chart)
        of_legend = [legend.get_title().get_text() for legend in figure.legends]
        return "\n".join([*of_legend, *(text.get_text() for text in figure.texts)])

    assert "The title" in shown() and "The caption." in shown()
    assert "The title" not in shown(title=False) and "The caption." in shown(title=False)
    assert "The title" in shown(caption=False) and "The caption." not in shown(caption=False)
    path = write_figure(chart, tmp_path / "c.svg", Style(title=False, caption=False, width=3.25, font="DejaVu Serif"))
    assert 'width="234pt"' in path.read_text()
    same = write_figure(chart, tmp_path / "d.svg", Style(title=False, caption=False, width=3.25, font="DejaVu Serif"))
    assert path.read_bytes() == same.read_bytes()


def test_colors_of_a_palette_are_drawn(chart, tmp_path):
    def colors(palette: str) -> set[str]:
        path = write_figure(chart, tmp_path / "c.svg", Style(palette=read_palette(palette)))
        return set(re.findall(r"fill: (#[0-9a-f]{6})", path.read_text()))

    assert {"#222222", "#888888"} <= colors("gray") and {"#4477aa", "#ee6677"} <= colors("tol-bright")
    assert {"#112233", "#abcdef"} <= colors("#112233,#ABCDEF")
    assert read_palette("okabe-ito") == PALETTES["okabe-ito"]
    for text in ("okabe_ito", "#12345", "red,green", ""):
        with pytest.raises(EditingError, match=r"--palette .*okabe-ito"):
            read_palette(text)


def test_names_that_are_asked_for_come_first_with_their_values(chart):
    (bars, _) = arranged(chart, ["grace", "after"]).panels
    assert list(bars.categories) == ["grace", "rome", "memit"]
    assert [(one.name, list(one.values)) for one in bars.series] == [
        ("after", [0.6, 0.4, 0.5]),
        ("before", [0.3, 0.1, 0.2]),
    ]
    assert list(bars.series[1].low) == [0.2, 0.0, 0.1] and list(bars.series[1].gaps) == ["c", "a", "b"]
    lines = Lines(title="", series=[Series(name=name, values=[1.0], color=n) for n, name in enumerate(NAMES)],
                  position_label="x", value_label="y")  # fmt: skip
    (moved,) = arranged(Chart(name="c", title="t", panels=[lines]), ["grace"]).panels
    assert [(one.name, one.color) for one in moved.series] == [("grace", 2), ("rome", 0), ("memit", 1)]
    with pytest.raises(EditingError, match=r"--order graze: .*Did you mean 'grace'.*after, before, grace, memit, rome"):
        arranged(chart, ["graze"])


def test_options_of_the_command_line(tmp_path, capsys):
    words = ["figure", "wild_gap", str(RESULTS), "--only", "mode=none,single", "--order", "r_rome", "--overwrite"]
    options = ["--width", "3.25", "--font-size", "9", "--palette", "gray", "--no-title", "--no-caption"]
    path = tmp_path / "gap.svg"
    assert main([*words, *options, "-o", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "cases. Data: mini" in printed and 'width="234pt"' in path.read_text()  # the caption is not lost
    assert main([*words, "--no-title", "-o", str(tmp_path / "gap.html")]) == 2
    assert "--no-title is for .svg, .png, .pdf" in capsys.readouterr().err
    assert main([*words, "--font", "No Such Font", "-o", str(path)]) == 2
    assert "--font No Such Font: not installed here." in capsys.readouterr().err
    assert main(["figure", "bake_statistics", "--order", "a", "-o", str(tmp_path / "t.md")]) == 2
    assert "is a table, which has no such choice" in capsys.readouterr().err
