"""Figures of WILD: drawn values worked by hand."""

from __future__ import annotations

import math
import shlex

import pandas as pd
import pytest
from result_rows import frame, row

from edit_hooks import EditingError
from lm_edit.figures.drawing.output import write_figure
from lm_edit.figures.needs import Options
from lm_edit.figures.wild import answer_gap, wild_batches, wild_gap, wild_grid, wild_retention, wild_table
from lm_edit.results.filters import filter_rows

pytest.importorskip("matplotlib", reason="the report extra is not installed")
from drawn import bars, figure_of, lines, texts


class TestGap:
    def rows(self, ending="em"):
        for editor, syn, wild in (("rome", 0.95, 0.4), ("unedited", 0.1, 0.05)):
            yield row(editor, "qaedit_syn_reliability", "efficacy_match", syn)
            yield row(editor, "qaedit_wild_reliability", f"efficacy_wild_{ending}", wild)

    def test_two_bars_and_the_unedited_model(self):
        chart = wild_gap.draw(frame(*self.rows()))
        assert bars(chart) == [(0, 0.95), (0, 0.4)]
        assert lines(chart)["unedited, WILD"][0] == [0.05, 0.05]
        # The choices are not silent.
        assert "the files have no efficacy_wild_judge" in chart.caption[-2]
        assert "Over all cases; the published numbers" in chart.caption[-1]

    def test_the_judge_comes_first(self):
        rows = [*self.rows("judge"), row("rome", "qaedit_wild_reliability", "efficacy_wild_em", 0.3)]
        assert bars(wild_gap.draw(frame(*rows))) == [(0, 0.95), (0, 0.4)]
        chosen = wild_gap.draw(frame(*rows), Options(metric="efficacy_wild_em"))
        assert bars(chosen) == [(0, 0.95), (0, 0.3)]

    def test_both_columns_are_over_one_population(self):
        """The paper's is drawn where the files have it: cases that the unedited model answers wrongly."""
        columns = {"efficacy_match@wrong_judge": 0.9, "efficacy_wild_judge@wrong_judge": 0.2}
        filtered = [
            row("rome", f"qaedit_{protocol}_reliability", metric, value)
            for protocol, (metric, value) in zip(("syn", "wild"), columns.items(), strict=True)
        ]
        rows = [*self.rows("judge"), *filtered]
        chart = wild_gap.draw(frame(*rows))
        assert bars(chart) == [(0, 0.9), (0, 0.2)]
        assert chart.caption[-1] == "Over the cases that the unedited model answers wrongly."
        assert wild_table.draw(frame(*rows)).rows[0] == ["rome", "0.900", "0.200"]
        assert bars(wild_gap.draw(frame(*rows), Options(metric="efficacy_wild_judge"))) == [(0, 0.95), (0, 0.4)]
        with pytest.raises(EditingError, match="no run has the column efficacy_match@wrong_judge"):
            wild_gap.draw(frame(*self.rows("judge"), filtered[1]))

    def test_one_protocol_is_not_enough(self):
        with pytest.raises(EditingError, match="no run has the column efficacy_match"):
            wild_gap.draw(frame(row("rome", "qaedit_wild_reliability", "efficacy_wild_em", 0.3)))

    def test_a_benchmark_with_one_protocol_is_named(self):
        other = row("rome", "zsre_syn_reliability", "efficacy_match", 0.9, n=77.0)
        chart = wild_gap.draw(frame(*self.rows(), other))
        assert "n = 30 cases." in chart.caption[0] and len(chart.panels) == 1
        assert chart.caption[-1] == "Not drawn, with one of the two columns only: ZsRE, tiny."

    def test_two_populations_are_not_mixed(self):
        other = row("memit", "qaedit_syn_reliability", "efficacy_match", 0.9, population="wrong_em")
        with pytest.raises(EditingError, match=r"differ in population of efficacy_match.*--only population=all"):
            wild_gap.draw(frame(*self.rows(), other))


class TestThreeWays:
    COLUMNS = (
        ("bake_es", "efficacy_prob"),
        ("qaedit_wild_reliability", "efficacy_wild_em"),
        ("bake_rq", "reverse_qa_prob"),
    )

    def rows(self, **values):
        for editor, three in values.items():
            for (task, metric), value in zip(self.COLUMNS, three, strict=True):
                if value is not None:
                    yield row(editor, task, metric, value, n=64.0)

    def test_three_bars_per_editor_and_the_unedited_model(self):
        rows = frame(*self.rows(rome=(1.0, 0.75, 0.0), ike=(1.0, 0.9, 0.8), unedited=(0.1, 0.0, 0.2)))
        chart = answer_gap.draw(rows)
        (panel,) = chart.panels
        assert list(panel.categories) == ["ike", "rome"]
        assert [list(series.values) for series in panel.series] == [[1.0, 1.0], [0.9, 0.75], [0.8, 0.0]]
        assert [reference.value for reference in panel.references] == [0.1, 0.0, 0.2]
        assert panel.series[1].name == "free answer (exact match)" and panel.limits == (0.0, 1.0)
        assert "the files have no efficacy_wild_judge" in chart.caption[-1]

    def test_an_editor_without_one_of_the_runs_has_a_gap(self):
        chart = answer_gap.draw(frame(*self.rows(rome=(1.0, 0.75, 0.0), ft_m=(1.0, None, 0.5))))
        (panel,) = chart.panels
        assert math.isnan(panel.series[1].values[0]) and panel.series[1].gaps[0] == "not run"

    @pytest.mark.parametrize("missing", range(3))
    def test_without_one_of_the_columns_nothing_is_drawn(self, missing):
        three = [None if place == missing else 0.5 for place in range(3)]
        with pytest.raises(EditingError, match=r"answer_gap: no run has .*for example: lm_eval --model edited_hf"):
            answer_gap.draw(frame(*self.rows(rome=three)))

    def test_columns_of_other_tasks_are_not_taken(self):
        """efficacy_prob is a column of CounterFact, too."""
        other = row("rome", "counterfact_flat_es", "efficacy_prob", 0.1)
        chart = answer_gap.draw(frame(*self.rows(rome=(1.0, 0.75, 0.0)), other))
        assert list(chart.panels[0].series[0].values) == [1.0]


class TestTable:
    def rows(self, **values):
        for editor, pairs in values.items():
            for task, metric, value in zip(
                ("qaedit_syn_reliability", "qaedit_wild_reliability"),
                ("efficacy_match", "efficacy_wild_em"),
                pairs,
                strict=True,
            ):
                if value is not None:
                    yield row(editor, task, metric, value)

    def test_the_mean_is_over_editors_with_both_values(self):
        """0.9 and 0.5 against 0.4 and 0.2; an unscored or missing value takes its editor out of both means."""
        rows = frame(*self.rows(rome=(0.9, 0.4), ft_m=(0.5, 0.2), wise=(1.0, math.nan), grace=(0.7, None)))
        table = wild_table.draw(rows)
        assert [name.rpartition(", ")[2] for name in table.header] == ["editor", "synthetic", "WILD"]
        cells = {line[0]: tuple(line[1:]) for line in table.rows}
        assert cells == {
            "rome": ("0.900", "0.400"),
            "ft_m": ("0.500", "0.200"),
            "wise": ("1.000", "unscored"),
            "grace": ("0.700", "not run"),
            "mean over editors": ("0.700", "0.300"),
            "editors in the mean": (2, 2),
        }
        assert "the files have no efficacy_wild_judge" in table.notes[0]

    def test_the_seeds_of_an_editor_count_as_one(self):
        """ft_m 0.6 (0.4 and 0.8) and rome 0.9; WILD 0.1 (0.2 and 0) and 0.4. Other settings are another editor."""
        tasks = {"qaedit_syn_reliability": "efficacy_match", "qaedit_wild_reliability": "efficacy_wild_em"}
        seeds = [
            row("ft_m", task, metric, pair[number], seed=float(seed), settings=settings)
            for seed, settings, pair in ((0, "a", (0.4, 0.2)), (1, "a", (0.8, 0.0)), (0, "b", (0.6, 0.7)))
            for number, (task, metric) in enumerate(tasks.items())
        ]
        table = wild_table.draw(frame(*self.rows(rome=(0.9, 0.4)), *seeds[:4]))
        assert table.rows[-2][1:] == ["0.750", "0.250"] and table.rows[-1][1:] == [2, 2]
        table = wild_table.draw(frame(*self.rows(rome=(0.9, 0.4)), *seeds))
        assert table.rows[-2][1:] == ["0.700", "0.400"] and table.rows[-1][1:] == [3, 3]

    def test_the_unedited_model_is_no_editor(self):
        table = wild_table.draw(frame(*self.rows(unedited=(0.1, 0.0), rome=(0.9, 0.4))))
        assert [line[0] for line in table.rows] == ["rome", "mean over editors", "editors in the mean"]
        assert table.rows[1][1:] == ["0.900", "0.400"]

    def test_no_editor_with_both_has_no_mean(self):
        table = wild_table.draw(frame(*self.rows(rome=(0.9, math.nan), ft_m=(math.nan, 0.2))))
        assert table.rows[-2][1:] == ["-", "-"] and table.rows[-1][1:] == [0, 0]


class TestBatches:
    def stream(self, num_edits, size, value, **changes):
        changes = {"mode": "sequential", "num_edits": float(num_edits), "edit_batch_size": float(size), **changes}
        return row("memit", "qaedit_wild_reliability", "efficacy_wild_judge", value, **changes)

    def test_a_line_per_batch_size(self):
        rows = [self.stream(20, 1, 0.5), self.stream(10, 1, 0.75), self.stream(10, 5, 0.9), self.stream(20, 5, 0.8)]
        found = lines(wild_batches.draw(frame(*rows)))
        assert found == {"1 per step": ([10, 20], [0.75, 0.5]), "5 per step": ([10, 20], [0.9, 0.8])}

    def test_the_unedited_value_is_of_the_same_model_and_scored_alike(self):
        rows = [self.stream(20, 1, 0.5), self.stream(10, 1, 0.75)]
        task = ("unedited", "qaedit_wild_reliability", "efficacy_wild_judge")
        other = row(*task, 0.3, model="large")
        assert "unedited" not in lines(wild_batches.draw(frame(*rows, other)))
        drawn = lines(wild_batches.draw(frame(*rows, other, row(*task, 0.1, limit=100.0))))
        assert drawn["unedited"][1][0] == 0.1
        for condition, value in {"judge": "another", "data_hash": "d2"}.items():
            with pytest.raises(EditingError, match=f"the runs differ in {condition}"):
                wild_batches.draw(frame(*rows, row(*task, 0.1, **{condition: value})))

    @pytest.mark.parametrize(
        ("column", "values"), [("settings", ("low", "high")), ("seed", (0.0, 7.0)), ("answer_options", ("", "a=1"))]
    )
    def test_a_line_is_of_runs_that_differ_in_their_edits_alone(self, column, values):
        rows = [self.stream(n, 1, 0.5, **{column: value}) for n, value in zip((10, 50), values, strict=True)]
        with pytest.raises(EditingError, match=rf"memit, 1 per step, differ in {column} .*; choose with --only"):
            wild_batches.draw(frame(*rows))

    def test_edits_of_a_file_have_a_digest_for_every_number_of_them(self):
        rows = [self.stream(n, 1, 0.5, edits=f"qaedit (my.json {digest * 12})") for n, digest in ((10, "a"), (50, "b"))]
        assert lines(wild_batches.draw(frame(*rows)))["1 per step"][0] == [10, 50]
        with pytest.raises(EditingError, match=r"differ in edits \(qaedit \(my.json\), zsre \(my.json\)\)"):
            wild_batches.draw(frame(rows[0], self.stream(50, 1, 0.4, edits=f"zsre (my.json {'b' * 12})")))

    def test_the_unedited_model_answers_under_the_same_options(self):
        rows = [self.stream(20, 1, 0.5), self.stream(10, 1, 0.75)]
        task = ("unedited", "qaedit_wild_reliability", "efficacy_wild_judge")
        thinking = row(*task, 0.97, answer_options="max_thought_tokens=2048", run="thinking")
        assert "unedited" not in lines(wild_batches.draw(frame(*rows, thinking)))
        assert lines(wild_batches.draw(frame(*rows, thinking, row(*task, 0.1))))["unedited"][1][0] == 0.1

    def test_one_stream(self):
        with pytest.raises(EditingError, match="two streams that differ in num_edits or edit_batch_size"):
            wild_batches.draw(frame(self.stream(20, 1, 0.5)))

    def test_editors_with_one_stream_are_named_and_not_in_the_caption(self):
        rows = [self.stream(20, 1, 0.5), self.stream(10, 1, 0.75)]
        alone = [self.stream(n, 1, 0.3, n=77.0) | {"editor": f"e{n}", "run": f"r{n}"} for n in (5, 7)]
        chart = wild_batches.draw(frame(*rows, *alone))
        assert len(chart.panels) == 1 and "n = 30 cases." in chart.caption[0]
        task = "tiny, qaedit_wild_reliability"
        assert chart.caption[-1] == f"Not drawn, with one stream only: e5, {task}; e7, {task}."

    @pytest.mark.parametrize("suffix", [".svg", ".html"])
    def test_unscored_points_are_written(self, suffix, tmp_path):
        values = {10: 0.75, 20: math.nan, 40: 0.25}
        chart = wild_batches.draw(frame(*(self.stream(n, 1, value) for n, value in values.items())))
        text = "Unscored: 1 per step at 20."
        assert chart.sentences[-1] == text
        if suffix == ".html":
            pytest.importorskip("plotly", reason="the report extra is not installed")
            assert f"<p>{text}</p>" in write_figure(chart, tmp_path / "f.html").read_text(encoding="utf-8")
        else:
            assert figure_of(chart)._supxlabel.get_text().endswith(text)

    def test_two_streams_of_one_size(self):
        rows = [self.stream(20, 1, 0.5), self.stream(20, 1, 0.6, seed=1.0)]
        with pytest.raises(
            EditingError, match=r"2 streams of memit have 20 edits, 1 per step; choose with --only seed=0[.] It"
        ):
            wild_batches.draw(frame(*rows))

    def test_advice_has_values_with_commas(self):
        """As a command that the rows accept."""
        options = ("", "chat_template_args={'a': 1, 'b': 2}")
        rows = frame(*(self.stream(20, 1, 0.5, run=text, answer_options=text) for text in options))
        with pytest.raises(EditingError, match=r"choose with --only ") as raised:
            wild_batches.draw(rows)
        words = shlex.split(str(raised.value).partition("choose with ")[2].partition(". It")[0])
        assert words == ["--only", f"answer_options={options[1]}"]
        assert list(filter_rows(rows, words[1:])["run"]) == [options[1]]


class TestRetention:
    def draw(self, run, metric="efficacy_wild_em"):
        task = "qaedit_wild_reliability"
        stream = row("memit", task, "efficacy_wild_em", 0.5, mode="sequential", file="r.json")
        columns = ("run", "file", "task", "metric", "filter", "step", "edited_at", "value")
        place = (stream["run"] if run is None else run, "r.json", task, metric, "none")
        matrix = [(*place, 0, 0, 0.9), (*place, 1, 0, 0.4), (*place, 1, 1, math.nan)]
        return wild_retention.draw(frame(stream), pd.DataFrame(matrix, columns=columns))

    def test_lower_triangle(self):
        chart = self.draw(None)
        (panel,) = chart.panels
        assert list(panel.rows) == ["1", "2"] and panel.values[0] == [0.9] and panel.values[1][0] == 0.4
        assert texts(chart) == ["0.90", "0.40", "-"]  # the last cell is unscored, not 0
        assert panel.limits == (0.0, 1.0)

    def test_runs_without_it(self):
        with pytest.raises(EditingError, match="retention=true"):
            self.draw("another run")
        with pytest.raises(EditingError, match="no run has efficacy_wild_em@retention"):
            self.draw(None, "another metric")


class TestGrid:
    def rows(self, values=(1.0, 0.9, 0.6, 0.5, 0.2), metric="em"):
        for (task, column), value in zip(wild_grid.STEPS.values(), values, strict=True):
            yield row("wise", task, column.format(metric=metric), value)

    def test_each_bar_is_a_change(self):
        chart = wild_grid.draw(frame(*self.rows()))
        # start and change: 1.0 from 0, then -0.1, -0.3, -0.1, -0.3, and 0.2 from 0
        assert bars(chart) == [(0, 1.0), (1.0, -0.1), (0.9, -0.3), (0.6, -0.1), (0.5, -0.3), (0, 0.2)]
        assert texts(chart) == ["1.00", "-0.10", "-0.30", "-0.10", "-0.30", "0.20"]

    def test_unscored_steps_leave_gaps(self):
        chart = wild_grid.draw(frame(*self.rows((1.0, 0.9, math.nan, 0.5, 0.2))))
        assert bars(chart) == [(0, 1.0), (1.0, -0.1), (0.5, -0.3), (0, 0.2)]
        assert texts(chart).count("unscored") == 2

    def test_missing_cells_are_named(self):
        with pytest.raises(EditingError, match=r"efficacy_match \(qaedit_grid_question_only_tf\)"):
            wild_grid.draw(frame(*list(self.rows())[1:]))

    def test_metric(self):
        both = [*self.rows(), *list(self.rows((1.0, 0.9, 0.6, 0.7, 0.3), "judge"))[3:]]
        assert bars(wild_grid.draw(frame(*both)))[-1] == (0, 0.3)
        assert bars(wild_grid.draw(frame(*both), Options(metric="em")))[-1] == (0, 0.2)
        with pytest.raises(EditingError, match=r"is unknown\. Accepted: judge, em"):
            wild_grid.draw(frame(*both), Options(metric="match"))
