"""The plans in the package: each of them is a valid grid, and every published table has one."""

from __future__ import annotations

import dataclasses
import functools
import re
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from command_line import run_verb
from paths import ROOT

from edit_hooks import load_editor
from edit_hooks.base.registry import EDITORS, editor_class
from edit_hooks.base.shipped import find_shipped
from lm_edit.figures.evk import evk_align
from lm_edit.sweeps.checking.checks import check_plan, origin_of, shape_config
from lm_edit.sweeps.checking.tasks import benchmarks_of, leaf_tasks
from lm_edit.sweeps.planning.choices import UNEDITED, Plan
from lm_edit.sweeps.planning.grid import Grid
from lm_edit.sweeps.planning.plan import EDITOR_KEYS, load_plan, shipped_plans
from lm_eval_tasks.common.records.benchmark import all_benchmarks
from lm_eval_tasks.report.editor_settings import find_setting

# Entries in comments, which need a file of the user.
COMMENTED = re.compile(r"^ *# - (\{editor: .*\}) *(?:#.*)?$", flags=re.MULTILINE)
BETWEEN = re.compile(r", (?![^(]*\))")  # commas that are not inside parentheses
MODEL = re.compile(r"\b(llama|qwen|gpt|mistral)[- ]?(\d(?:\.\d)?|j)(?:[- ](\d+b))?")  # family, version, size


@functools.cache
def checked(name: str) -> tuple[Plan, Grid]:
    plan = load_plan(shipped_plans()[name])
    return plan, check_plan(plan)


@pytest.mark.parametrize("name", shipped_plans())
def test_a_shipped_plan_is_valid_and_names_its_source(name: str) -> None:
    plan, grid = checked(name)
    assert grid.runs and plan.description and plan.source
    assert {choice.editor for choice in plan.editors} <= {*EDITORS, UNEDITED}
    assert not grid.left_out or name == "wild_figure4"  # steps above the number of edits


@pytest.mark.parametrize("name", ["demo_editors", "end_token", "reverse_locality"])
def test_a_plan_of_all_editors_has_each_of_them_or_a_reason(name: str) -> None:
    """So a new editor is measured, or somebody says why not."""
    plan, _ = checked(name)
    planned = {choice.editor for choice in plan.editors} - {UNEDITED}
    left_out = [editor for names in plan.without.values() for editor in names]
    assert sorted([*planned, *left_out]) == sorted(EDITORS)
    if name == "end_token":
        assert all(hasattr(editor_class(editor).config_class(), "append_eos") for editor in planned)


@pytest.mark.parametrize("name", shipped_plans())
def test_what_is_unstated_is_about_models_and_settings_of_the_plan(name: str) -> None:
    """The lines of one plan were those of another."""
    plan, grid = checked(name)
    models = [re.sub(r"[^a-z0-9.]", "", model.name.lower()) for model in plan.models]
    for line in (*plan.unstated, *plan.differs):
        for words in MODEL.findall(line.lower()):
            assert any(model.startswith("".join(words)) for model in models), f"{line}: no {' '.join(words)} in {name}"
        if "judge_template" in line:
            assert any("judge_template" in run.metadata for run in grid.runs), line


def says(plan: Plan, *names: str) -> bool:
    """Whether one line of ``unstated`` has all of these names."""
    return any(all(name in line for name in names) for line in plan.unstated)


@pytest.mark.parametrize("name", shipped_plans())
def test_editors_of_shipped_plans_have_settings_for_their_models(name: str) -> None:
    plan, grid = checked(name)
    for run in {(run.model, run.editor): run for run in grid.runs}.values():
        tuning = origin_of(plan, run).tuning
        assert tuning != "unknown", run.name
        editor = run.editor.partition("(")[0]  # without the settings of an axis
        assert tuning != "untuned" or says(plan, run.model, editor), f"{run.name}: neither settings nor unstated"


def editors_with_moments_of_own_text(plan: Plan, grid: Grid) -> list[str]:
    """Editors with ``second_moments: self``, with the models where not all of theirs have it."""
    shapes = {model.name: str(model.shape) for model in plan.models}
    found: dict[str, dict[str, bool]] = {}
    for run in grid.runs:
        if run.model_args["mode"] == "none":
            continue
        editor = load_editor(str(run.model_args["editor"]), run.model_args.get("editor_args", {}))
        settings = {field.name for field in dataclasses.fields(editor.config_class)}
        if settings & {"second_moments", "base"}:
            model = SimpleNamespace(config=shape_config(shapes[run.model]))
            source = find_setting(editor.default_config(model).to_dict(), "second_moments")
            found.setdefault(str(run.model_args["editor"]), {})[run.model] = source == "self"
    return [
        editor if all(models.values()) else f"{editor} ({', '.join(name for name, is_own in models.items() if is_own)})"
        for editor, models in found.items()
        if any(models.values())
    ]


@pytest.mark.parametrize("name", shipped_plans())
def test_a_shipped_plan_names_the_editors_whose_second_moments_differ_from_the_releases(name: str) -> None:
    plan, grid = checked(name)
    lines = [line for line in plan.differs if "second_moments: published" in line]
    if plan.source.startswith("our own"):  # on the demo model, after no release
        assert not lines
        return
    editors = editors_with_moments_of_own_text(plan, grid)
    named = [line.partition("second moments of ")[2].partition(":")[0] for line in lines]
    assert [set(BETWEEN.split(text)) for text in named] == [set(editors)] * bool(editors)
    for editor in (text.partition(" ")[0] for text in editors):  # the setting is one of this editor
        given: dict[str, Any] = {"second_moments": "published"}
        if editor in ("prune", "rect"):
            given = {"base": "memit", "base_settings": given}
            assert "{base_settings: {second_moments: published}}" in lines[0]
        load_editor(editor, given)


def test_a_dry_run_says_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_verb(["sweep", "wild_figure5", "--dry-run"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("differs: ")]
    assert line.startswith("differs: second moments of memit: from text of the model here") and "12 GB" in line


@pytest.mark.parametrize("name", shipped_plans())
def test_editors_in_comments_of_shipped_plans_have_settings_for_their_models(name: str) -> None:
    """Those that need a file of the user: a trained network, a pool."""
    plan, _ = checked(name)
    for comment in COMMENTED.findall(plan.file.text):
        entry = yaml.safe_load(comment)
        assert set(entry) <= set(EDITOR_KEYS), comment
        assert set(entry.get("modes", [])) <= {mode.name for mode in plan.modes}, comment
        assert set(entry.get("models", [])) <= {model.name for model in plan.models}, comment
        kind = editor_class(entry["editor"])
        kind.config_class.from_mapping(entry["editor_args"])
        for model in plan.models:
            if kind.writes == ("context",) or model.name not in entry.get("models", [model.name]):
                continue
            has_settings = find_shipped(kind.config_folders, shape_config(str(model.shape))).file is not None
            assert has_settings or says(plan, model.name, entry["editor"]), f"{model.name}, {comment}"


def test_mend_is_in_the_comments_of_plans_whose_papers_have_it() -> None:
    commented = {name for name, path in shipped_plans().items() if "editor: mend" in path.read_text(encoding="utf-8")}
    assert commented >= {"bake_table3", "bake_table9", "bird_tables", "bird_table5", "mquake_table"}
    assert commented >= {"wild_table3", "wild_table9", "wild_figure4"}


@pytest.mark.parametrize("name", ["bake_table3", "bake_table5", "bake_table9"])
def test_rows_of_bake_have_the_settings_that_its_text_names(name: str) -> None:
    """EasyEdit's ROME, without second moments, and targets of FT; the RECT release's RECT, on ROME."""
    _, grid = checked(name)
    expected = {
        "rome": {"second_moments": None},
        "rect": {
            "base": "rome",
            "base_settings": {"second_moments": None},
            "keep": 0.2,
            "guard": 0,
            "at_threshold": "zero",
        },
        "ft_l": {"targets": "alone"},
    }
    for editor, settings in expected.items():
        given = [run.model_args["editor_args"] for run in grid.runs if run.model_args.get("editor") == editor]
        assert given and all(one == settings for one in given)


def test_a_step_of_ft_m_in_the_figure_of_batches_has_one_loss() -> None:
    """Its batch size is the number of edits whose loss is summed; by default a step of 80 is trained in chunks of 8."""
    _, grid = checked("wild_figure4")
    runs = [run.model_args for run in grid.runs if run.model_args.get("editor") == "ft_m"]
    assert {run["edit_batch_size"] for run in runs} == {1, 10, 20, 40, 80}
    assert all(run["editor_args"]["batch_size"] >= run["edit_batch_size"] for run in runs)


def test_every_published_table_has_a_plan() -> None:
    tables = [path.stem.removeprefix("_") for path in (ROOT / "lm_eval_tasks").glob("*/_*_table*.yaml")]
    planned = {
        task for name in shipped_plans() for run in checked(name)[1].runs for t in run.tasks for task in leaf_tasks(t)
    }
    assert len(tables) > 10
    assert {table for table in tables if not set(leaf_tasks(table)) <= planned} == set()


@pytest.mark.parametrize(
    ("name", "editors"),
    [
        ("evk_figure3", {"rome", "memit", "prune", "rect", "alphaedit"}),
        ("evk_figure4", {"rome", "memit", "prune", "rect"}),
    ],
)
def test_the_figures_of_evk_align_have_each_editor_with_and_without_it(name: str, editors: set[str]) -> None:
    """Read from the settings that a run records, which is how the figures choose the color."""
    plan, _ = checked(name)
    model = SimpleNamespace(config=shape_config("llama-3-8b"))
    kinds: dict[str, list[tuple[bool, float, float]]] = {}
    for choice in plan.editors:
        if choice.editor != UNEDITED:
            config = load_editor(choice.editor, choice.settings).default_config(model).to_dict()
            values = tuple(find_setting(config, key) for key in ("evk_align", "evk_sigma", "evk_weight"))
            kinds.setdefault(choice.editor, []).append(values)
    assert set(kinds) == editors
    for own in kinds.values():
        assert [is_on for is_on, *_ in own] == [False, True] and own[1] == (True, 0.2, 0.05)  # the paper's, for Llama 3


def test_the_plan_of_evk_figure_4_scores_its_panels() -> None:
    _, grid = checked("evk_figure4")
    tasks = {leaf for run in grid.runs for task in run.tasks for leaf in leaf_tasks(task)}
    drawn = {task for tasks_of_panel, _ in evk_align.COLUMNS.values() for task in tasks_of_panel}
    assert tasks == {task for task in drawn if "evk" not in task}  # EVK-Bench is not in the paper's figure
    steps = {(run.editor, run.model_args["edit_batch_size"]) for run in grid.runs if run.mode == "sequential"}
    assert {size for editor, size in steps if editor.startswith("rome")} == {1}
    assert {size for editor, size in steps if not editor.startswith("rome")} == {100}


def test_the_example_covers_all_benchmarks_on_the_demo_model() -> None:
    plan, grid = checked("example")
    single = [run for run in grid.runs if run.mode == "single"]
    assert len({run.editor for run in single}) >= 10
    asked = {benchmark.name for task in single[0].tasks for benchmark in benchmarks_of(task)}
    assert asked == {benchmark.name for benchmark in all_benchmarks().values()}
    assert {run.mode for run in grid.runs} == {"none", "single", "sequential"}
    assert all("pretrained" not in run.model_args for run in grid.runs)
    assert all(origin_of(plan, run).tuning in ("shipped", "given", "") for run in grid.runs)


def test_plans_are_listed_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_verb(["sweep", "--list"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in shipped_plans())
    assert run_verb(["sweep", "bird_table5", "--print"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["editors"][0] == "unedited"
