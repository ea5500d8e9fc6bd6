"""The recipe for a benchmark, followed in a temporary folder: as part of this project and as a package."""

from __future__ import annotations

import json
import os
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import lm_eval
import pytest
from distributions import write_metadata
from lm_eval.tasks import TaskManager
from paths import ROOT
from scripted import ScriptedLM
from task_runs import metrics_of
from templates import TEMPLATES, copy_template
from warm_python import run_warm

import lm_eval_tasks
from edit_hooks.contract.tiny_models import save_tiny
from edit_hooks.lm.options.edit_sources import load_edits
from lm_edit.cli.main import main
from lm_edit.mend_data import load_edit_data
from lm_edit.tuning.cases import load_cases
from lm_eval_tasks.common.records.benchmark import ENTRY_POINTS, all_benchmarks

RECIPE = (ROOT / "docs/project/recipes.md").read_text(encoding="utf-8").split("## A benchmark")[1].split("\n## ")[0]
TEMPLATE = TEMPLATES / "benchmark"
TASKS = ["es", "gs", "ls", "s", "wild_reliability"]


def copy_benchmark(folder: Path, name: str, module: str) -> Path:
    """Copy the template to ``folder/name`` with its names replaced; ``module`` is the copy's import path."""
    title = "".join(part.capitalize() for part in name.split("_"))
    words = {"my_benchmark": name, "MY_BENCHMARK": name.upper(), "MyBenchmark": title, "my-benchmark": name}
    return copy_template("benchmark", folder / name, {**words, "lm_eval_tasks.my_benchmark": module})


@pytest.fixture(autouse=True)
def fresh_discovery() -> Iterator[None]:
    all_benchmarks.cache_clear()
    yield
    all_benchmarks.cache_clear()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that holds the package ``town_facts`` and its metadata, as ``pip install`` leaves them."""
    site = tmp_path / "site"
    copy_benchmark(site, "town_facts", "town_facts")
    write_metadata(site, "town_facts", {ENTRY_POINTS: {"town_facts": "town_facts.benchmark:BENCHMARKS"}})
    monkeypatch.syspath_prepend(str(site))
    return site


def test_the_template_declares_every_setting_of_its_tasks(package: Path) -> None:
    """Undeclared ones are no part of what a result says about itself, so runs that differ in them would be one."""
    text = (TEMPLATE / "_my_benchmark_base").read_text(encoding="utf-8")
    metadata = re.findall(r"^  (\w+):", text.split("\nmetadata:\n")[1], flags=re.MULTILINE)
    benchmark = all_benchmarks()["town_facts"]
    assert "wild_context" in metadata and set(metadata) - {"version"} <= {
        setting.name for setting in benchmark.declared_settings
    }
    assert benchmark.resolved_settings({"wild_context": "question_only"})["wild_context"] == "question_only"


def test_the_recipe_names_the_template_and_its_files() -> None:
    assert f"`{TEMPLATE.relative_to(ROOT)}/`" in RECIPE
    for name in ("benchmark.py", "_my_benchmark_base", "data/mini.jsonl", "README.md"):
        assert f"`{name}`" in RECIPE and (TEMPLATE / name).is_file()
    assert f'[project.entry-points."{ENTRY_POINTS}"]' in RECIPE


def test_a_folder_of_this_project_is_found_and_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copy_benchmark(tmp_path, "river_facts", "lm_eval_tasks.river_facts")
    monkeypatch.setattr(lm_eval_tasks, "__path__", [*lm_eval_tasks.__path__, str(tmp_path)])
    assert "river_facts" in all_benchmarks()
    manager = TaskManager(include_path=folder, include_defaults=False, metadata={"data": "mini"})
    results = lm_eval.simple_evaluate(model=ScriptedLM(), tasks=["river_facts"], task_manager=manager)
    assert sorted(results["samples"]) == [f"river_facts_{task}" for task in TASKS]
    assert metrics_of(results, "river_facts_gs")["paraphrase_prob_n"] == 4
    assert metrics_of(results, "river_facts_s")["edit_score_prob_n"] == 4
    assert metrics_of(results, "river_facts_wild_reliability")["efficacy_wild_em_n"] == 4
    readme = (folder / "README.md").read_text(encoding="utf-8")
    for task in TASKS:
        for metric in manager.load([f"river_facts_{task}"])["tasks"][f"river_facts_{task}"].config.metric_list:
            assert f"`{metric['metric']}`" in readme


def test_a_package_serves_edits_validation_tuning_and_training(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [request.subject for request in load_edits("town_facts", {}, 2)] == ["Port Amelin", "Ilse Varga"]
    assert main(["validate", "town_facts"]) == 0
    assert capsys.readouterr().out.strip().endswith("4 good, 0 bad, 0 repeated")
    cases = load_cases("town_facts", {})
    assert [len(case.neighbors) for case in cases] == [2, 1, 1, 2]
    data = load_edit_data("town_facts", {}, validation_share=0.5)
    assert (len(data.train), len(data.validation)) == (2, 2)
    assert data.train[0].locality[0] == ("The village of Ostermoor lies in", "Brenholt")


LM_EVAL = """
    import sys
    import lm_eval_editing_autoload
    from lm_eval.tasks import manager
    manager.__file__ = sys.argv.pop(1)  # a small folder instead of the 14,000 built-in files
    from lm_eval import evaluator
    from lm_eval.__main__ import cli_evaluate
    evaluator.add_env_info = lambda storage: None  # no dozen programs to describe the machine
    cli_evaluate()
"""


def test_a_package_runs_with_the_stock_command(package: Path, tmp_path: Path) -> None:
    """Its tasks need no --include_path, and its edits are available by name."""
    (tmp_path / "built_in").mkdir()
    model = {
        "pretrained": str(save_tiny(tmp_path, "llama")),
        **{"editor": "ft_m", "editor_args": "num_steps:2"},
        **{"mode": "sequential", "edits": "town_facts", "data": "mini", "store": "off"},
    }
    words = ["--model", "edited_hf", "--model_args", ",".join(f"{key}={value}" for key, value in model.items())]
    words += ["--tasks", "town_facts", "--device", "cpu", "--output_path", str(tmp_path / "out")]
    words += ["--gen_kwargs", "max_gen_toks=12"]
    path = os.pathsep.join([str(package), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = run_warm(
        ["-c", textwrap.dedent(LM_EVAL), str(tmp_path / "built_in" / "manager.py"), *words],
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (file,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(file.read_text(encoding="utf-8"))["results"]
    assert {f"town_facts_{task}" for task in TASKS} < set(results)
    assert (
        results["town_facts_es"]["efficacy_prob_n,none"]
        == results["town_facts_es"]["efficacy_prob@immediate_n,none"]
        == 4
    )
    assert json.loads(results["town_facts_es"]["edit,none"])["edits"] == 4
