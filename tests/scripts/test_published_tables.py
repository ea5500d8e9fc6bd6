"""The map from published tables to columns names only what exists, covers every table, and is what the READMEs show."""

from __future__ import annotations

import functools
import re
from types import ModuleType
from typing import Any

import pytest
import yaml
from lm_eval.tasks._yaml_loader import load_yaml
from paths import ROOT
from task_runs import build

from edit_hooks import EDITORS
from edit_hooks.base.registry import editor_class
from edit_hooks.lm.model import OWN_OPTIONS
from judges.settings import PRESETS
from lm_edit.sweeps.planning.choices import UNEDITED
from lm_edit.sweeps.planning.plan import load_plan, shipped_plans
from lm_eval_tasks.bake.reversal import JUDGE_TEMPLATES
from lm_eval_tasks.common.records.dataset import HUB, named_set
from lm_eval_tasks.common.scoring.population import POPULATION, POPULATIONS, WRONG_EM, WRONG_JUDGE
from lm_eval_tasks.common.task.stages import RETENTION
from lm_eval_tasks.knowgic.forms import CONTEXTS as KNOWGIC_CONTEXTS
from lm_eval_tasks.protocols.wild import CONTEXTS

MAP: dict[str, Any] = yaml.safe_load((ROOT / "docs/_data/published_tables.yaml").read_text(encoding="utf-8"))
TABLES = [(name, table) for name, benchmark in MAP.items() for table in benchmark["tables"]]
MAPPED = [(name, table) for name, table in TABLES if table["agreement"] != "none"]
ALL_EDITORS = [editor for benchmark in MAP.values() for editor in benchmark.get("editors", [])]
SETTINGS = {
    "judge": PRESETS,
    "judge_template": JUDGE_TEMPLATES,
    "wild_context": CONTEXTS,
    "population": POPULATIONS,
    "score_by": ("origin", "category"),
    "released_tokenizer": ("true", "false"),
    "knowgic_context": KNOWGIC_CONTEXTS,
    "token_prompts": ("as_decoded", "extra_space"),
}


@pytest.fixture
def published_tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import published_tables

    return published_tables


def title(case: Any) -> str:
    return str(case["published"])[:50] if isinstance(case, dict) else str(case)


@functools.cache
def declared_columns(task: str) -> set[str]:
    """The metrics of a task under any setting, with those over either population."""
    tasks = [build(task, judge="off")]
    tasks += [build(task, population=WRONG_EM)] if POPULATION in tasks[0].benchmark.settings else []
    columns = {metric["metric"] for built in tasks for metric in built.config.metric_list}
    (path,) = (ROOT / "lm_eval_tasks").glob(f"*/{task}.yaml")
    columns |= {metric["metric"] for metric in load_yaml(path, resolve_func=False)["metric_list"]}
    return columns | {name.replace(WRONG_EM, WRONG_JUDGE) for name in columns}


@pytest.mark.parametrize(("benchmark", "table"), MAPPED, ids=title)
def test_every_named_task_and_column_exists(benchmark: str, table: dict[str, Any]) -> None:
    columns = {task: declared_columns(task) for task in table["tasks"]}
    assert table["columns"] and set(table["columns"]) <= set().union(*columns.values())
    assert all(found & set(table["columns"]) for found in columns.values())  # no task is named in vain
    assert set(table.get("stages", [])) <= {RETENTION}


@pytest.mark.parametrize(("benchmark", "table"), TABLES, ids=title)
def test_what_differs_is_stated(benchmark: str, table: dict[str, Any]) -> None:
    assert table["agreement"] in ("same", "near", "none")
    if table["agreement"] == "none":
        assert table["differs"] and not {"tasks", "columns", "run", "population"} & set(table)
    else:
        assert table["run"] and table["population"]
        assert table["differs"] or table["agreement"] == "same"


@pytest.mark.parametrize(("benchmark", "table"), MAPPED, ids=title)
def test_every_named_setting_is_accepted(benchmark: str, table: dict[str, Any]) -> None:
    for quoted in re.findall(r"`([^`]*=[^`]*)`", table["run"] + table["differs"]):
        for setting in quoted.split(","):
            key, value = setting.split("=")
            assert key in SETTINGS or key in OWN_OPTIONS, setting
            if key in SETTINGS:
                assert value in SETTINGS[key], setting
            if key == "data":
                sets = build(table["tasks"][0]).benchmark.source.sets
                assert value == HUB or named_set(value) in [(HUB, name) for name in sets], setting


@pytest.mark.parametrize(("benchmark", "table"), MAPPED, ids=title)
def test_every_named_group_has_the_tasks_of_its_table(benchmark: str, table: dict[str, Any]) -> None:
    files = {path.stem.removeprefix("_"): path for path in (ROOT / "lm_eval_tasks").glob("*/_*.yaml")}
    groups = re.findall(r"`(\w+_table\d+)`", table["run"])
    members = [task for group in groups for task in yaml.safe_load(files[group].read_text(encoding="utf-8"))["task"]]
    assert not groups or set(table["tasks"]) <= set(members)


@pytest.mark.parametrize("editor", ALL_EDITORS, ids=title)
def test_every_named_editor_configuration_exists(editor: dict[str, Any]) -> None:
    assert editor["editor"] in EDITORS
    folders = [ROOT / "edit_hooks/configs" / folder for folder in editor_class(editor["editor"]).config_folders]
    for name in editor["configs"]:
        assert any((folder / f"{name}.yaml").is_file() for folder in folders), name


@pytest.mark.parametrize(
    ("benchmark", "name"),
    [
        ("counterfact", "evk_table1"),
        ("counterfact", "evk_figure4"),
        ("zsre", "evk_table1"),
        ("zsre", "evk_figure4"),
        ("zsre", "bird_table5"),
        ("mquake", "mquake_table"),
    ],
)
def test_the_editors_of_a_plan_are_listed_with_the_files_of_its_models(benchmark: str, name: str) -> None:
    plan = load_plan(shipped_plans()[name])
    shapes = {model.shape for model in plan.models}
    for editor in {choice.editor for choice in plan.editors} - {UNEDITED}:
        listed = {config for row in MAP[benchmark]["editors"] if row["editor"] == editor for config in row["configs"]}
        folders = [ROOT / "edit_hooks/configs" / folder for folder in editor_class(editor).config_folders]
        exist = {shape for shape in shapes if any((folder / f"{shape}.yaml").is_file() for folder in folders)}
        assert editor in {row["editor"] for row in MAP[benchmark]["editors"]} and exist <= listed, editor


def test_the_map_of_a_benchmark_is_printed(published_tables: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert published_tables.main(["qaedit"]) == 0
    printed = capsys.readouterr().out
    assert all(f"| {table['published']} | {table['agreement']} |" in printed for table in MAP["qaedit"]["tables"])
