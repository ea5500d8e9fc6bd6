"""Figures of settings that a post-processing editor (rect, prune) has in ``base_settings``."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from command_line import run_verb
from model_shapes import MODELS, model_like
from result_files import scripted_results, write_run
from result_rows import frame, pretend_results, row

from edit_hooks import EditingError, load_editor
from edit_hooks.in_context.combined import EditorWithContext
from lm_edit import load_results
from lm_edit.figures import bird_weights
from lm_edit.figures.evk import evk_align, evk_glue
from lm_edit.figures.needs import Options

pytest.importorskip("matplotlib", reason="the report extra is not installed")
from drawn import bars, categories, lines

COUNTERFACT, ZSRE = "counterfact_es", "zsre_memit_efficacy"
GPT2_XL = model_like(MODELS["gpt2-xl"])


def resolved(editor: str, **base_settings: Any) -> dict[str, Any]:
    """The settings of an editor as a run records them; ``base_settings`` of rome are its own."""
    overrides = base_settings if editor == "rome" else {"base_settings": base_settings}
    return load_editor(editor, overrides).default_config(GPT2_XL).to_dict()


def with_context(editor: str, **base_settings: Any) -> dict[str, Any]:
    """The settings of ``editor+ice``: those of rect, which hold those of memit, are inside of ``base_settings``."""
    combined = EditorWithContext(load_editor(editor, {"base_settings": base_settings}), load_editor("ice"))
    return combined.default_config(GPT2_XL).to_dict()


def write(folder: Path, editor: str, config: dict[str, Any], task: str, value: float, **editing: Any) -> None:
    results = scripted_results(task)
    for name in [name for name in results["results"][task] if name.partition(",")[0] in METRICS]:
        results["results"][task][name] = value
    write_run(folder, task, results=copy.deepcopy(results), editor=editor, editor_config=config, **editing)


METRICS = ("efficacy_prob", "efficacy_token_acc", "efficacy_match")
VALUES = {("rome", False): 0.5, ("rome", True): 0.75, ("rect", False): 0.25, ("rect", True): 1.0}


@pytest.fixture(scope="module")
def result_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of rome and rect with and without EVK-Align, and of prune without."""
    folder = tmp_path_factory.mktemp("results")
    for (editor, on), value in VALUES.items():
        for task in (COUNTERFACT, ZSRE):
            write(folder / f"{editor}-{on}-{task}", editor, resolved(editor, evk_align=on), task, value)
    write(folder / "prune", "prune", resolved("prune"), COUNTERFACT, 0.125)
    return folder


class TestAlign:
    def test_pairs_of_a_post_processing_editor_are_drawn_from_its_files(self, result_folder: Path) -> None:
        chart = evk_align.draw(load_results(result_folder))
        assert [panel.title for panel in chart.panels] == ["CounterFact, efficacy", "ZsRE, efficacy"]
        assert chart.panels[1].value_label.startswith("efficacy_token_acc")  # that of EVK's table 1
        for place in range(2):
            assert categories(chart, place) == ["rect", "rome"]
            # without, then with EVK-Align
            assert bars(chart, place) == [(0, 0.25), (0, 0.5), (0, 1.0), (0, 0.75)]
        assert "Not drawn, run in one way only: prune." in chart.caption

    def test_the_verb_draws_them_and_another_column(self, result_folder: Path, tmp_path: Path) -> None:
        out = tmp_path / "f.svg"
        assert run_verb(["figure", "evk_align", str(result_folder), "-o", str(out)]) == 0
        default = out.read_text("utf-8")
        chosen = ["--metric", "efficacy_match", "-o", str(out), "--overwrite"]
        assert run_verb(["figure", "evk_align", str(result_folder), *chosen]) == 0
        assert out.read_text("utf-8") != default

    def test_a_chosen_column_is_drawn_of_each_task_that_has_it(self, result_folder: Path) -> None:
        rows = load_results(result_folder)
        chart = evk_align.draw(rows, Options(metric="efficacy_match"))
        assert [panel.title for panel in chart.panels] == ["CounterFact, efficacy", "ZsRE, efficacy"]
        panel = chart.panels[1]
        assert panel.value_label.startswith("efficacy_match")
        assert bars(chart, 1) == [(0, 0.25), (0, 0.5), (0, 1.0), (0, 0.75)]
        magnitude = evk_align.draw(rows, Options(metric="efficacy_magnitude"))  # -1..1, so not on the axis of shares
        assert magnitude.panels[0].limits is None and panel.limits == (0.0, 1.0)
        with pytest.raises(EditingError, match="no run has a column f1"):
            evk_align.draw(rows, Options(metric="f1"))

    def test_an_editor_with_a_context_on_top(self) -> None:
        rows = [
            row(
                "rect+ice",
                COUNTERFACT,
                "efficacy_prob",
                value,
                icl="ice",
                editor_config=with_context("rect", evk_align=on),
            )
            for on, value in ((False, 0.5), (True, 0.75))
        ]
        assert rows[0]["editor_config"]["base_settings"]["base_settings"]["evk_align"] is False
        assert bars(evk_align.draw(frame(*rows))) == [(0, 0.5), (0, 0.75)]


class TestGlue:
    def rows(self) -> list[dict[str, Any]]:
        return [
            row(
                editor, "editglue_cola", "f1", value, mode="sequential", num_edits=200.0, is_rate=False,
                editor_config=resolved(editor, evk_align=on), settings=f"{editor} {on}",
            )
            for (editor, on), value in VALUES.items()
        ]  # fmt: skip

    def test_a_line_with_and_one_without(self) -> None:
        found = lines(evk_glue.draw(frame(*self.rows())))
        assert {name: values for name, (_, values) in found.items()} == {
            "rome": [0.5], "rome + EVK-Align": [0.75], "rect": [0.25], "rect + EVK-Align": [1.0],
        }  # fmt: skip

    def test_the_verb(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        pretend_results(monkeypatch, frame(*self.rows()))
        out = tmp_path / "f.svg"
        assert run_verb(["figure", "evk_glue", "results", "-o", str(out)]) == 0
        assert b"rect + EVK-Align" in out.read_bytes()


def test_weights_of_bird_inside_of_rect() -> None:
    rows = [
        row(
            "rect", "bake_j_rj", "reverse_judgment_prob", value, settings=str(alpha),
            editor_config={"keep": 0.4, "base": "bird", "base_settings": {"alpha": alpha, "beta": 1.5}},
        )
        for alpha, value in ((0.1, 0.2), (0.001, 0.6))
    ]  # fmt: skip
    assert lines(bird_weights.draw(frame(*rows)))["beta = 1.5"] == ([0.001, 0.1], [0.6, 0.2])
