"""Figures of BAKE and BIRD: drawn values worked by hand."""

from __future__ import annotations

import math

import pytest
from result_rows import frame, row

from edit_hooks import EditingError
from lm_edit.figures import bird_weights
from lm_edit.figures.bake import bake_answers, bake_icl, bake_logprob

pytest.importorskip("matplotlib", reason="the report extra is not installed")
from drawn import bars, categories, lines, texts, whiskers


def logprobs(editor, new, true, **changes):
    return [
        row(editor, "bake_rq", name, value, is_rate=False, **changes)
        for name, value in (("reverse_qa_logprob_new", new), ("reverse_qa_logprob_true", true))
    ]


class TestLogProbabilities:
    def test_bars_and_lines(self):
        chart = bake_logprob.draw(
            frame(
                *logprobs("rome", -4.0, -1.0, stderr=0.5),
                *logprobs("ike", -2.0, -1.5),
                *logprobs("unedited", -5.0, -1.25),
            )
        )
        assert categories(chart) == ["ike", "rome"]
        # first the desired answers of ike and rome, then the original ones
        assert bars(chart) == [(0, -2.0), (0, -4.0), (0, -1.5), (0, -1.0)]
        # -4 -+ 1.959964 x 0.5, and no whisker at ike, whose standard error is missing
        assert whiskers(chart)[0] == (pytest.approx(-4.979982), pytest.approx(-3.020018))
        found = lines(chart)
        assert (
            found["desired answer, unedited"][0] == [-5.0, -5.0]
            and found["original answer, unedited"][0] == [-1.25] * 2
        )
        assert "n = 30 cases" in chart.caption[0] and "Data: mini" in chart.caption[0]

    def test_cases_that_all_score_the_same_have_no_whisker(self):
        """A standard error of 0 over few cases is no certainty."""
        some = bake_logprob.draw(
            frame(*logprobs("rome", -4.0, -1.0, stderr=0.5), *logprobs("ike", -2.0, -1.5, stderr=0.0))
        )
        assert [ends for ends in whiskers(some) if ends[0] == ends[1]] == []
        assert (
            "(1.96 standard errors) where scores of single cases are missing); none where all cases score the"
            in some.caption[0]
        )
        none = bake_logprob.draw(frame(*logprobs("ike", -2.0, -1.5, stderr=0.0)))
        assert whiskers(none) == [] and "No whiskers: all cases score the same, or" in none.caption[0]

    def test_the_caption_counts_unscored_cases_of_the_drawn_columns(self):
        """`unscored` counts cases in which any column of the task is missing, as chains of length 5 in KnowGIC."""
        full = [one | {"unscored": 30.0, "failed": 0.0, "n": 30.0} for one in logprobs("rome", -4.0, -1.0)]
        assert "n = 30 cases. Data" in bake_logprob.draw(frame(*full)).caption[0]
        partly = [one | {"unscored": 30.0, "failed": 2.0, "n": 28.0} for one in logprobs("rome", -4.0, -1.0)]
        assert "n = 28 cases (at most: unscored 2). Data" in bake_logprob.draw(frame(*partly)).caption[0]

    def test_without_a_run_of_the_unedited_model_the_column_beside_the_edits_counts(self):
        beside = row("rome", "bake_rq", "reverse_qa_logprob_new_unedited", -5.5, is_rate=False)
        chart = bake_logprob.draw(frame(*logprobs("rome", -4.0, -1.0), beside))
        assert {reference.name: reference.value for reference in chart.panels[0].references} == {
            "desired answer, unedited": -5.5
        }

    def beside(self, editor, value, **changes):
        return row(editor, "bake_rq", "reverse_qa_logprob_new_unedited", value, is_rate=False, **changes)

    def test_the_unedited_value_of_a_stream_is_that_of_all_its_cases(self):
        """At a checkpoint the column is over the cases edited by then."""
        stages = [self.beside("rome", value, stage=stage) for stage, value in (("", -5.5), ("10", -4.0), ("100", -5.0))]
        chart = bake_logprob.draw(frame(*logprobs("rome", -4.0, -1.0), *stages))
        assert [(line.name, line.value) for line in chart.panels[0].references] == [("desired answer, unedited", -5.5)]

    def test_unedited_values_that_differ_in_last_digits_are_one(self):
        edited = [*logprobs("rome", -4.0, -1.0), *logprobs("memit", -3.0, -1.0)]
        chart = bake_logprob.draw(frame(*edited, self.beside("rome", -5.5), self.beside("memit", -5.5000001)))
        assert [line.value for line in chart.panels[0].references] == [-5.5000001]
        own = [*logprobs("unedited", 0.3, -1.0, run="a"), *logprobs("unedited", 0.3 + 1e-8, -1.0, run="b")]
        chart = bake_logprob.draw(frame(*edited, *own))
        assert [line.value for line in chart.panels[0].references] == [0.3, -1.0]
        other = logprobs("unedited", 0.3002, -1.0, run="c")
        with pytest.raises(
            EditingError, match=r"2 runs .* different values of reverse_qa_logprob_new \(0.3 to 0.3002\)"
        ):
            bake_logprob.draw(frame(*edited, *own, *other))

    def test_unedited_values_that_differ_are_in_the_caption(self):
        edited = [*logprobs("rome", -4.0, -1.0), *logprobs("memit", -3.0, -1.0)]
        chart = bake_logprob.draw(frame(*edited, self.beside("rome", -5.5), self.beside("memit", -5.1)))
        assert chart.panels[0].references == []
        assert (
            "No line of the unedited model (desired answer): beside the edits it has -5.5 to -5.1" in chart.caption[-1]
        )

    def test_the_question_with_its_answer_in_the_prompt(self):
        leaking = [
            row(
                editor,
                "bake_rq_answer_in_prompt",
                f"reverse_qa_answer_in_prompt_logprob_{answer}",
                value,
                is_rate=False,
            )
            for editor, value in (("ike", -0.5), ("unedited", -3.0))
            for answer in ("new", "true")
        ]
        chart = bake_logprob.draw(frame(*logprobs("ike", -2.0, -1.5), *leaking))
        assert bars(chart, 0) == [(0, -2.0), (0, -1.5)] and bars(chart, 1) == [(0, -0.5), (0, -0.5)]
        assert not chart.panels[0].references, "the unedited model was asked the other form alone"
        assert [line.value for line in chart.panels[1].references] == [-3.0, -3.0]

    def test_missing_columns_name_task_and_command(self):
        with pytest.raises(
            EditingError, match=r"reverse_qa_logprob_true of bake_rq.*lm_eval --model edited_hf --tasks bake_rq"
        ):
            bake_logprob.draw(frame(row("rome", "bake_rq", "reverse_qa_logprob_new", -4.0)))

    def test_only_the_unedited_model(self):
        with pytest.raises(EditingError, match="all runs are of the unedited model"):
            bake_logprob.draw(frame(*logprobs("unedited", -5.0, -1.0)))


class TestContext:
    def rows(self):
        for editor, icl, value in (("rome", "no", 0.25), ("rome+ike", "yes", 0.75)):
            yield row(editor, "bake_rq", "reverse_qa_prob", value, icl=icl)
            yield row(editor, "bake_es", "efficacy_prob", 1.0, icl=icl)
        yield row("ike", "bake_rq", "reverse_qa_prob", 0.5)
        yield row("ike", "bake_es", "efficacy_prob", 0.9)

    def test_two_bars_per_editor(self):
        chart = bake_icl.draw(frame(*self.rows()))
        assert [panel.title for panel in chart.panels] == ["ES, the edit itself", "RQS, reverse questions"]
        assert categories(chart, 1) == ["ike", "rome"]
        assert bars(chart, 1) == [(0, 0.5), (0, 0.25), (0, 0.75)]  # ike and rome without, rome with context
        assert "not run" in texts(chart, 1)  # ike with a context: not a score of 0, and not unscored
        assert "Run in one way only: ike." in chart.caption

    def test_one_kind_of_runs_is_not_enough(self):
        with pytest.raises(EditingError, match="no editor has runs with and without icl=true"):
            bake_icl.draw(frame(row("rome", "bake_rq", "reverse_qa_prob", 0.25)))

    def test_two_runs_of_one_kind_are_not_chosen_from(self):
        twice = row("rome", "bake_rq", "reverse_qa_prob", 0.3, settings="ffff0000")
        with pytest.raises(
            EditingError, match=r"2 runs of rome without icl=true are given; choose with --only settings="
        ):
            bake_icl.draw(frame(*self.rows(), twice))

    def test_the_advice_names_the_columns_that_differ(self):
        for changes in ({"seed": 1.0}, {"edit_options": "edit_context=qa"}, {"run": "other"}):
            twice = row("rome", "bake_rq", "reverse_qa_prob", 0.3, **changes)
            (column,) = changes
            value = {"seed": "0", "run": "[0-9a-f]{12}"}.get(column, "edit_context=qa")
            with pytest.raises(EditingError, match=rf"; choose with --only {column}={value}\. It needs"):
                bake_icl.draw(frame(*self.rows(), twice))


class TestAnswers:
    def test_a_stack_per_editor_and_the_unedited_model(self):
        shares = {"rome": (0.5, 0.25, 0.0, 0.25), "unedited": (0.0, 0.75, 0.0, 0.25)}
        rows = [
            row(editor, "bake_rq", column, share)
            for editor, own in shares.items()
            for column, share in zip(bake_answers.KINDS, own, strict=True)
        ]
        chart = bake_answers.draw(frame(*rows))
        assert categories(chart) == ["rome", "unedited"]
        # desired, original, both, other: each starts where those before end
        assert bars(chart) == [
            (0, 0.5), (0, 0), (0.5, 0.25), (0, 0.75), (0.75, 0), (0.75, 0), (0.75, 0.25), (0.75, 0.25),
        ]  # fmt: skip

    def test_the_question_with_its_answer_in_the_prompt_has_a_panel_of_its_own(self):
        plain = [row("ike", "bake_rq", column, 0.25) for column in bake_answers.KINDS]
        leaking = [
            row("ike", "bake_rq_answer_in_prompt", f"reverse_qa_answer_in_prompt_gen_{kind}", share)
            for kind, share in zip(("desired", "original", "ambiguous", "other"), (0.5, 0.5, 0, 0), strict=True)
        ]
        both, alone = bake_answers.draw(frame(*plain, *leaking)), bake_answers.draw(frame(*leaking))
        assert [panel.title.endswith(", answer in the prompt") for panel in both.panels] == [False, True]
        assert bars(both, 0) == [(0, 0.25), (0.25, 0.25), (0.5, 0.25), (0.75, 0.25)]
        assert bars(both, 1) == bars(alone) == [(0, 0.5), (0.5, 0.5), (1, 0), (1, 0)]
        assert any("a control, not reversal" in sentence for sentence in alone.caption)
        assert not any("not reversal" in sentence for sentence in bake_answers.draw(frame(*plain)).caption)

    def test_likelihoods_only(self):
        with pytest.raises(EditingError, match="reverse_qa_gen_desired"):
            bake_answers.draw(frame(row("rome", "bake_rq", "reverse_qa_prob", 0.5)))


class TestWeights:
    def run(self, alpha, beta, value):
        config = {"alpha": alpha, "beta": beta, "layers": [5]}
        return row(
            "bird", "bake_j_rj", "reverse_judgment_prob", value, editor_config=config, settings=f"{alpha}-{beta}"
        )

    def test_lines_connect_runs_that_differ_in_one_weight(self):
        rows = [self.run(0.1, 1.5, 0.2), self.run(0.001, 1.5, 0.6), self.run(0.001, 3.0, 0.4)]
        chart = bird_weights.draw(frame(*rows, row("unedited", "bake_j_rj", "reverse_judgment_prob", 0.0)))
        assert [panel.title for panel in chart.panels] == ["alpha", "beta"]
        assert lines(chart, 0)["beta = 1.5"] == ([0.001, 0.1], [0.6, 0.2])  # sorted by alpha
        assert lines(chart, 1)["alpha = 0.001"] == ([1.5, 3.0], [0.6, 0.4])
        assert chart.panels[0].log_positions and not chart.panels[1].log_positions  # 100-fold; 2-fold
        assert lines(chart, 0)["unedited"][1] == [0.0, 0.0]

    def test_the_caption_is_about_the_runs_on_lines(self):
        rows = [self.run(0.1, 1.5, 0.2), self.run(0.001, 1.5, math.nan), self.run(0.5, 7.0, 0.4) | {"n": 77.0}]
        other = row("rome", "bake_j_rj", "reverse_judgment_prob", 0.5, model="large", mode="batch", n=78.0)
        chart = bird_weights.draw(
            frame(*rows, other, row("unedited", "bake_j_rj", "reverse_judgment_prob", 0.0, model="large"))
        )
        assert "n = 30 cases. Data: mini; model: tiny; mode: single." in chart.caption[0]
        assert "No run of the unedited model" in chart.caption[0]
        why = "without a run that differs in alpha alone or in beta alone"
        assert chart.sentences[1:] == [
            f"Not drawn, {why}: bird (tiny, single, settings 0.5-7.0), rome.", "Unscored: beta = 1.5 at 0.001.",
        ]  # fmt: skip

    def test_the_unedited_value_is_that_of_the_same_model(self):
        own = [self.run(0.1, 1.5, 0.2), self.run(0.001, 1.5, 0.6)]
        large = [one | {"model": "large", "run": f"large{number}"} for number, one in enumerate(own)]
        unedited = row("unedited", "bake_j_rj", "reverse_judgment_prob", 0.1)
        other = row("unedited", "bake_j_rj", "reverse_judgment_prob", 0.3, model="large")
        assert "unedited" not in lines(bird_weights.draw(frame(*own, other)), 0)
        found = lines(bird_weights.draw(frame(*own, *large, unedited, other)), 0)
        assert found["unedited, tiny"][1][0] == 0.1 and found["unedited, large"][1][0] == 0.3

    def test_other_settings_that_differ_separate_the_runs(self):
        other = self.run(0.1, 1.5, 0.2) | {"editor_config": {"alpha": 0.1, "beta": 1.5, "layers": [6]}}
        with pytest.raises(EditingError, match="no two runs differ in alpha alone or in beta alone"):
            bird_weights.draw(frame(self.run(0.001, 1.5, 0.6), other))

    def test_editors_without_the_settings(self):
        with pytest.raises(EditingError, match="reverse_judgment_prob or reverse_qa_prob or edit_score_reverse_prob"):
            bird_weights.draw(frame(row("rome", "bake_j_rj", "reverse_judgment_prob", 0.5)))
