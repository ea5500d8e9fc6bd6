"""Written figures and tables: formats, determinism, texts of strangers, dataset tables, the verbs."""

from __future__ import annotations

import csv
import io
import math
import re

import pytest
from command_line import run_verb
from paths import ROOT
from result_rows import frame, pretend_results, row

from edit_hooks import EditingError
from lm_edit.figures import causal_trace
from lm_edit.figures.bake import bake_logprob, bake_statistics
from lm_edit.figures.drawing.charts import Bars, Chart, HeatMap, Series, Waterfall
from lm_edit.figures.drawing.look import number, shown, text_on
from lm_edit.figures.drawing.output import write_figure
from lm_edit.figures.drawing.style import Style
from lm_edit.figures.drawing.tables import Table, as_csv, as_markdown
from lm_edit.figures.needs import Options
from lm_edit.figures.registry import all_figures
from lm_edit.figures.select import edited_labels
from lm_edit.figures.wild import qaedit_categories, wild_grid
from lm_eval_tasks.common.records.benchmark import find_benchmark

HOSTILE = "<img src=x onerror=alert(1)> $x^$ \x1b[31m </script>"
pytest.importorskip("matplotlib", reason="the report extra is not installed")


def chart(name="rome"):
    rows = [row(name, "bake_rq", metric, -1.0, is_rate=False, stderr=0.1) for metric in bake_logprob.ANSWERS]
    return bake_logprob.draw(frame(*rows))


@pytest.mark.parametrize("suffix", [".svg", ".png", ".pdf", ".html"])
def test_equal_results_give_equal_bytes_and_hostile_names_stay_text(tmp_path, suffix):
    if suffix == ".html":
        pytest.importorskip("plotly", reason="the report extra is not installed")
    first, second = (write_figure(chart(HOSTILE), tmp_path / f"{name}{suffix}").read_bytes() for name in "ab")
    assert first == second and len(first) > 2000
    if suffix == ".html":
        page = first.decode()
        assert "<img src=x" not in page and "</script> $" not in page and "\x1b" not in page
        assert not re.search(
            r"<(script|link|img)[^>]*(src|href)=", page.split("plotly.js v")[0]
        )  # one file, no network


def test_user_settings_of_matplotlib_do_not_matter(tmp_path):
    import matplotlib

    first = write_figure(chart(), tmp_path / "a.svg").read_bytes()
    before = dict(matplotlib.rcParams)
    with matplotlib.rc_context({"font.size": 20, "axes.facecolor": "red", "svg.hashsalt": "mine"}):
        assert write_figure(chart(), tmp_path / "b.svg").read_bytes() == first
    assert dict(matplotlib.rcParams) == before


def test_interactive_figures_show_the_same_values():
    pytest.importorskip("plotly", reason="the report extra is not installed")
    from lm_edit.figures.drawing.interactive import draw_interactive

    steps = [row("wise", task, column.format(metric="em"), value) for (task, column), value in
             zip(wild_grid.STEPS.values(), (1.0, 0.9, math.nan, 0.5, 0.2), strict=True)]  # fmt: skip
    (trace,) = draw_interactive(wild_grid.draw(frame(*steps))).data
    assert trace.x == (1.0, pytest.approx(-0.1), None, None, pytest.approx(-0.3), 0.2)
    assert trace.base[4] == 0.5 and trace.text[2] == "unscored"
    whiskers = [step | {"stderr": 0.05} for step in steps]
    (trace,) = draw_interactive(wild_grid.draw(frame(*whiskers))).data
    assert trace.error_x.array[1] == pytest.approx(0.05 * 1.959964) and trace.error_x.arrayminus[5] == pytest.approx(
        0.05 * 1.959964
    )
    gap = Series(name="a", values=[math.nan, 0.5], low=[math.nan, 0.4], high=[math.nan, 0.7], counts=[None, 8])
    panel = Bars(title="", categories=["x", "y"], series=[gap], value_label="v")
    (bar,) = draw_interactive(Chart(name="c", title="t", panels=[panel])).data
    assert bar.x == (None, 0.5) and bar.error_x.array[1] == pytest.approx(0.2)
    drawn = draw_interactive(Chart(name="c", title="t", panels=[panel]))
    assert [(note.x, note.y) for note in drawn.layout.annotations if note.text == "unscored"] == [(0, 0)]
    assert bar.hovertext == ("a<br>unscored", "a<br>0.5<br>95% interval 0.4 to 0.7<br>n = 8")


def test_bars_whose_shortened_names_are_equal_stay_apart():
    """plotly adds up the bars of one category."""
    pytest.importorskip("plotly", reason="the report extra is not installed")
    from lm_edit.figures.drawing.interactive import draw_interactive

    long = "alphaedit (sequential, 1000 edits, batches of {}, edit_context=qa, seed 0)"
    names = [long.format(10), long.format(50), "memit"]
    assert shown(names[0]) == shown(names[1])
    bars = Bars(title='Who said "hi"?', categories=names, series=[Series(name="v", values=[0.9, 0.2, 0.5])],
                value_label="v")  # fmt: skip
    figure = draw_interactive(Chart(name="c", title="t", panels=[bars]))
    assert figure.data[0].y == (0, 1, 2) and figure.layout.yaxis.tickvals == (0, 1, 2)
    assert [text.replace("<br>", " ") for text in figure.layout.yaxis.ticktext] == names
    assert figure.layout.annotations[0].text == 'Who said "hi"?'
    steps = Waterfall(title="", steps=names[:2], values=Series(name="v", values=[0.9, 0.2]), last="last",
                      value_label="v", limits=(0.0, 1.0))  # fmt: skip
    figure = draw_interactive(Chart(name="c", title="t", panels=[steps]))
    assert figure.data[0].y == (0, 1, 2) and len(set(figure.layout.yaxis.ticktext)) == 3


def test_heat_maps_name_every_cell_and_few_columns():
    pytest.importorskip("plotly", reason="the report extra is not installed")
    from lm_edit.figures.drawing.interactive import draw_interactive

    panel = HeatMap(title="", rows=["a<b", "a<b"], columns=[f"c{n}" for n in range(30)], values=[[0.5] * 30, [0.25]],
                    row_label="row", column_label="column", value_label="v", limits=(0.0, 1.0))  # fmt: skip
    figure = draw_interactive(Chart(name="c", title="t", panels=[panel]))
    assert figure.data[0].y == (0, 1) and figure.layout.xaxis.ticktext[:2] == ("c0", "c3")
    assert figure.data[0].hovertext[1][0] == "column: c0<br>row: a&lt;b<br>0.25"


def test_labels_name_what_differs():
    runs = [
        row("rome", "t", "m", 1.0), row("rome", "t", "m", 1.0, settings="ffff0000"),
        row("memit", "t", "m", 1.0, mode="sequential", num_edits=100.0), row("unedited", "t", "m", 1.0),
    ]  # fmt: skip
    assert list(edited_labels(frame(*runs)).values()) == [
        "memit (sequential, 100 edits)", "rome (single, settings 0000aaaa)", "rome (single, settings ffff0000)",
    ]  # fmt: skip


def test_labels_are_the_names_of_the_plan():
    runs = [row("rome", "t", "m", 1.0, editor_label="ROME (tuned)"), row("memit", "t", "m", 1.0, editor_label="")]
    assert list(edited_labels(frame(*runs)).values()) == ["ROME (tuned)", "memit"]


def test_numbers_and_inks():
    assert [number(value) for value in (0.0, 1.0, 0.456, 0.00123, 100.0, math.nan)] == [
        "0.00", "1.00", "0.46", "0.0012", "100", "unscored",
    ]  # fmt: skip
    assert (text_on("#0072B2"), text_on("#E69F00")) == ("white", "black")


def test_tables_as_markdown_and_csv():
    table = Table(name="t", title="T", header=["", "n"], rows=[["a|<b>", 1], ["=1+1", 2]], notes=["Note."])
    assert as_markdown(table) == "**T**\n\n|  | n |\n|---|--:|\n| a\\|\\<b\\> | 1 |\n| =1+1 | 2 |\n\nNote.\n"
    assert list(csv.reader(io.StringIO(as_csv(table)))) == [["", "n"], ["a|<b>", "1"], ["'=1+1", "2"]]


def test_statistics_of_bake_are_those_of_its_records():
    table = bake_statistics.draw(Options(data="mini"))
    records = find_benchmark("bake").load({"data": "mini"}).records
    counts = {str(name): number for name, number, *_ in table.rows}
    assert counts["edits"] == len(records) == counts["reverse questions"]
    assert counts["paraphrases"] == sum(len(record.paraphrases) for record in records)
    assert counts["relations"] == len({record.request.relation_id for record in records})
    assert {row[0]: row[2] for row in table.rows}["reverse questions"] == "-"  # BAKE-J has none


def test_categories_of_qaedit_add_up(tmp_path):
    table = qaedit_categories.draw(Options(data="mini"))
    assert sum(int(row[1]) for row in table.rows) == len(find_benchmark("qaedit").load({"data": "mini"}).records)
    record = (ROOT / "lm_eval_tasks/qaedit/data/mini.jsonl").read_text(encoding="utf-8").split("\n")[0]
    (tmp_path / "QAEdit.jsonl").write_text(re.sub(r'"category": "[^"]*", |, "category": "[^"]*"', "", record) + "\n")
    with pytest.raises(EditingError, match="has a category"):
        qaedit_categories.draw(Options(data=str(tmp_path / "QAEdit.jsonl")))


def test_a_saved_trace(tmp_path, capsys):
    trace = tmp_path / "trace.json"
    trace.write_text('{"model": "tiny"}')
    assert run_verb(["figure", "causal_trace", str(trace), "-o", str(tmp_path / "t.svg")]) == 2
    assert "the file is no causal trace (KeyError: 'effects')" in capsys.readouterr().err
    groups = {"subject_last": {"mean": [0.0, 0.5]}, "last": {"mean": [0.25, 0.0]}}
    made = {"settings": {"window": 2}, "num_facts": 3, "skipped": {}, "clean": 0.9, "corrupted": 0.1}
    (panel,) = causal_trace.draw({**made, "effects": {"mlp": groups}}).panels
    assert (panel.title, panel.values, panel.limits) == ("MLP, window of 2", [[0.0, 0.5], [0.25, 0.0]], (0.0, 0.5))


class TestVerbs:
    def test_figures_are_listed_with_their_needs(self, capsys):
        assert run_verb(["figures"]) == 0
        listed = capsys.readouterr().out
        assert all(spec.name in listed for spec in all_figures())
        assert run_verb(["figures", "wild_grid"]) == 0
        assert "needs: the tasks of wild_grid" in (shown := capsys.readouterr().out) and "choices: --metric" in shown
        assert run_verb(["figures", "bake_logprob"]) == 0 and "choices" not in capsys.readouterr().out

    def test_a_figure_is_drawn_from_rows(self, tmp_path, monkeypatch, capsys):
        rows = [row(editor, "bake_rq", name, -1.0) for editor in ("rome", "memit") for name in bake_logprob.ANSWERS]
        pretend_results(monkeypatch, frame(*rows))
        out = tmp_path / "sub" / "f.svg"
        assert run_verb(["figure", "bake_logprob", "results", "--only", "editor=rome", "-o", str(out)]) == 0
        assert f"written to {out}" in capsys.readouterr().out and out.read_bytes().startswith(b"<?xml")
        assert run_verb(["figure", "bake_logprob", "results", "-o", str(out)]) == 2  # it exists
        assert run_verb(["figure", "bake_statistics", "-o", str(tmp_path / "t.csv")]) == 0

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["bake_logprop", "x", "-o", "f.svg"], "Did you mean"),
            (["bake_logprob", "x", "-o", "f.gif"], "ends in .svg, .png, .pdf, .html"),
            (["bake_statistics", "-o", "f.svg"], "ends in .md, .csv"),
            (["bake_logprob", "-o", "f.svg"], "no files are given. It needs the columns reverse_qa_logprob_new"),
            (["bake_logprob", "x", "--only", "editor", "-o", "f.svg"], "FIELD=VALUE[,VALUE] is needed"),
            (
                ["bake_logprob", "x", "--metric", "efficacy_prob", "-o", "f.svg"],
                "--metric efficacy_prob: the figure",
            ),
            (["evk_align", "x", "--case", "3", "-o", "f.svg"], "--case 3: the figure evk_align has no such choice"),
            (
                ["bake_statistics", "--metric", "efficacy_prob", "-o", "f.md"],
                "the figure bake_statistics has no such choice",
            ),
            (
                ["bake_statistics", "x", "-o", "f.md"],
                "is about a data set and reads no result files",
            ),
            (
                ["bake_statistics", "--only", "editor=a", "-o", "f.md"],
                "--only editor=a: bake_statistics reads no",
            ),
            (["bake_logprob", "x", "--data", "hub", "-o", "f.svg"], "--only data=hub chooses"),
            (["causal_trace", "x", "--only", "editor=a", "-o", "f.svg"], "causal_trace reads no results of runs"),
        ],
    )
    def test_user_errors(self, arguments, message, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        assert run_verb(["figure", *arguments]) == 2
        assert message in capsys.readouterr().err
        assert not list(tmp_path.iterdir())


def test_a_dark_page_has_the_same_values_in_other_ink(tmp_path):
    series = [Series(name="a", values=[0.25, 0.5], low=[0.1, 0.4], high=[0.3, 0.7]), Series(name="b", values=[1, 0])]
    chart = Chart(name="c", title="t", panels=[Bars(title="p", categories=["x", "y"], series=series, value_label="v")])
    light, dark = (
        write_figure(chart, tmp_path / f"{name}.svg", Style(dark=name == "dark")) for name in ("light", "dark")
    )
    light, dark = (path.read_text(encoding="utf-8") for path in (light, dark))

    def colors(text):
        return {color.lower() for color in re.findall("#[0-9a-fA-F]{6}", text)}

    def brightness(color):
        return sum(int(color[place : place + 2], 16) for place in (1, 3, 5)) / 3

    def texts(text):
        return re.findall("<!-- (.*?) -->", text)

    assert texts(dark) == texts(light)
    assert re.sub("#[0-9a-fA-F]{6}", "", dark).count("<path") >= light.count("<path")
    ground = "#14181e"
    assert ground in colors(dark) and not {"#ffffff", "#000000", "#222222"} & colors(dark)
    assert all(abs(brightness(color) - brightness(ground)) > 25 for color in colors(dark) - {ground}), colors(dark)
    assert light == write_figure(chart, tmp_path / "again.svg").read_text(encoding="utf-8"), "the theme does not stay"
    with pytest.raises(EditingError, match=r"--dark is for .svg, .png, .pdf; c.html is drawn without it"):
        write_figure(chart, tmp_path / "c.html", Style(dark=True))
