"""Doors between packages and rooms open one way; importing has no side effects.

The contracts are in pyproject.toml. import-linter sees every import statement, also inside of functions.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import grimp
import pytest
from package_copy import PACKAGES, copy_packages
from paths import ROOT
from warm_python import run_warm

from edit_hooks.base.editor import Editor
from edit_hooks.base.model_support import SELF_CHECK
from edit_hooks.base.registry import EDITORS, editor_class
from edit_hooks.deltas.hook_edit import HOOK_KINDS, HookKind
from edit_hooks.self_check.run import require_support
from edit_hooks.training.find import trainer_class
from edit_hooks.utils.plugins import import_object
from lm_eval_tasks.common.scoring.aggregation import AGGREGATIONS

TRAINED = {name: editor_class(name) for name in EDITORS if editor_class(name).trainer is not None}
# The tables of built-in plug-ins, and what classes name as those of other packages do: the only strings that name a
# module of a higher room.
LOOKUP_TABLES: dict[str, dict[str, str]] = {
    "edit_hooks/base/model_support.py": {"self-check": SELF_CHECK},
    "edit_hooks/base/registry.py": {name: row.path for name, row in EDITORS.items()},
    "edit_hooks/deltas/hook_edit.py": HOOK_KINDS,
    **{f"{editor.__module__.replace('.', '/')}.py": {name: str(editor.trainer)} for name, editor in TRAINED.items()},
}
COMMON = ROOT / "lm_eval_tasks" / "common"
ROOM_SIZE = 12
# Rooms that grow by one file per thing, and the thing; every other room holds at most ROOM_SIZE modules.
REGISTRIES = {"edit_hooks/editors": "editor", "lm_eval_tasks/protocols": "protocol"}
# Modules that import by a computed name, and what the names come from.
DYNAMIC_IMPORTS = {
    "edit_hooks/utils/plugins.py": "entry points, lookup tables, module:Class of a user",
    "edit_hooks/utils/public_names.py": "public names of a package, imported on first use",
    "judges/similarity.py": "optional libraries",
}


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter on the packages in a folder, under the contracts of its pyproject.toml."""
    code = "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"
    command = [sys.executable, "-c", code, "--no-cache", "--config", str(folder / "pyproject.toml")]
    environment = {**os.environ, "COLUMNS": "200"}  # names and lines are wrapped at the width of a terminal
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=120)


def outcomes(output: str) -> dict[str, str]:
    """Name of a contract -> KEPT or BROKEN."""
    text = re.sub(r"\(\d+ ignored imports?\)", "", output.partition("dependencies.")[2])
    text = " ".join(text.split()).lstrip("- ")
    return {name.strip(): outcome for name, outcome in re.findall(r"(.*?) (KEPT|BROKEN)", text)}


def sources() -> Iterator[tuple[str, ast.Module]]:
    """Path relative to the repository, and syntax tree, of every module of the packages."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def test_all_contracts_are_kept() -> None:
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    contracts = (ROOT / "pyproject.toml").read_text(encoding="utf-8").count("[[tool.importlinter.contracts]]")
    assert set(outcomes(done.stdout).values()) == {"KEPT"} and len(outcomes(done.stdout)) == contracts


# What breaks each contract: the beginning of its name, a module, and lines added to it.
FORBIDDEN = [
    ("The application uses", "judges/match.py", "def lazy():\n    from lm_eval_tasks.common.records import fields"),
    ("The application uses", "edit_hooks/contract/runner.py", "import lm_edit"),
    ("Rooms of edit_hooks", "edit_hooks/deltas/delta.py", "def lazy():\n    import edit_hooks.editors.rome"),
    ("Rooms of edit_hooks", "edit_hooks/attic/__init__.py", ""),  # a room without a floor
    ("Tasks and judges know", "judges/base.py", "import edit_hooks.modeling.tokens"),
    ("Requests, answers and utilities", "edit_hooks/request.py", "def lazy():\n    import torch"),
    ("In the engine only", "edit_hooks/base/editor.py", "import lm_eval"),
    ("Judges:", "judges/match.py", "import judges.model.factory"),
    ("Benchmarks do not know", "lm_eval_tasks/bake/benchmark.py", "import lm_eval_tasks.qaedit.benchmark"),
    ("Benchmarks do not know", "lm_eval_tasks/common/records/fields.py", "import lm_eval_tasks.protocols.wild"),
    ("The model class:", "edit_hooks/lm/options/plan.py", "import edit_hooks.lm.editing.stream"),
    ("The model class:", "edit_hooks/lm/attic.py", ""),
    ("Common parts", "lm_eval_tasks/common/records/cases.py", "import lm_eval_tasks.common.asking.probes"),
    ("Neighbors do not import", "edit_hooks/editors/rome.py", "import edit_hooks.editors.r_rome"),
    ("Commands print", "lm_edit/results/answers/samples.py", "import lm_edit.cli.main"),
    ("Runs are planned", "lm_edit/sweeps/execution/runs.py", "def lazy():\n    import torch"),
    ("Sweeps:", "lm_edit/sweeps/planning/plan.py", "import lm_edit.sweeps.execution.runs"),
    ("Results are read", "lm_edit/results/files/runs.py", "def lazy():\n    import torch"),
    ("Results:", "lm_edit/results/files/runs.py", "import lm_edit.results.tables"),
]


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, str]]:
    """`broken(1)`: name -> report of the contracts that the second forbidden lines of each break, all in one copy."""

    @functools.cache
    def lint_copy(turn: int) -> dict[str, str]:
        folder = tmp_path_factory.mktemp("broken")
        copy_packages(folder)
        shutil.copy(ROOT / "pyproject.toml", folder)
        for index, (_, module, line) in enumerate(FORBIDDEN):
            if turn_of(index) == turn:
                path = folder / module
                path.parent.mkdir(exist_ok=True)
                text = path.read_text(encoding="utf-8") if path.exists() else ""
                path.write_text(f"{text}\n\n{line}\n", encoding="utf-8")
        done = lint(folder)
        assert done.returncode == 1, done.stdout + done.stderr
        reports = re.split(r"\n([^\n]+)\n-{3,}\n", done.stdout.partition("Broken contracts")[2])
        return dict(zip(reports[1::2], reports[2::2], strict=True))

    return lint_copy


def turn_of(index: int) -> int:
    """How many lines of the table before this one break the same contract."""
    return [contract for contract, _, _ in FORBIDDEN[:index]].count(FORBIDDEN[index][0])


@pytest.mark.parametrize("index", range(len(FORBIDDEN)), ids=lambda index: FORBIDDEN[index][1])
def test_a_contract_can_fail(index: int, broken: Callable[[int], dict[str, str]]) -> None:
    """The report of the contract names the module: a door that opens for one room may also lead others to a model."""
    contract, module, line = FORBIDDEN[index]
    name = Path(module).parent.name if module.endswith("__init__.py") else Path(module).stem
    (report,) = [text for title, text in broken(turn_of(index)).items() if title.startswith(contract)]
    assert re.search(rf"\b{name} -> " if line else rf"\b{name}\b", report), report


def crowded(root: Path) -> dict[str, int]:
    """Rooms with more modules than a reader takes in at once, and how many they have."""
    counts = Counter(
        path.parent.relative_to(root).as_posix()
        for package in PACKAGES
        for path in (root / package).rglob("*.py")
        if path.name != "__init__.py"
    )
    return {room: count for room, count in counts.items() if count > ROOM_SIZE and room not in REGISTRIES}


def test_a_room_holds_at_most_a_dozen_modules(tmp_path: Path) -> None:
    assert crowded(ROOT) == {}
    assert all((ROOT / room).is_dir() for room in REGISTRIES)
    room = tmp_path / PACKAGES[0] / "attic"
    room.mkdir(parents=True)
    for number in range(ROOM_SIZE + 1):
        (room / f"box_{number}.py").touch()
    assert crowded(tmp_path) == {f"{PACKAGES[0]}/attic": ROOM_SIZE + 1}


def test_benchmarks_share_protocols_and_common_parts_only() -> None:
    """Every folder with a benchmark, so that a new one needs no contract of its own."""
    graph = grimp.build_graph("lm_eval_tasks", cache_dir=None)
    folders = {module.parent for module in (ROOT / "lm_eval_tasks").glob("*/benchmark.py")} - {COMMON}
    names = {f"lm_eval_tasks.{folder.name}" for folder in folders}
    assert {"lm_eval_tasks.bake", "lm_eval_tasks.qaedit"} <= names
    for name in names:
        imported = {other for other in names - {name} if graph.find_shortest_chains(name, other)}
        assert not imported, f"{name} imports {sorted(imported)}"


def test_modules_are_named_by_strings_only_in_the_lookup_tables() -> None:
    pattern = re.compile(rf"(?:{'|'.join(PACKAGES)})(?:\.\w+)+(?::\w+)?")
    for path, tree in sources():
        constants = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        named = {text for text in constants if isinstance(text, str) and pattern.fullmatch(text)}
        assert named <= set(LOOKUP_TABLES.get(path, {}).values()), f"{path} names modules: {sorted(named)}"


def test_few_modules_import_by_a_computed_name() -> None:
    found = {
        path
        for path, tree in sources()
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr == "import_module")
        or (isinstance(node, ast.Name) and node.id in ("__import__", "import_module"))
    }
    assert found == set(DYNAMIC_IMPORTS)


def test_the_lookup_tables_name_classes_that_exist() -> None:
    for editor in TRAINED.values():
        assert trainer_class(editor).config_class is not editor.config_class
    for name, row in EDITORS.items():
        editor = import_object(row.path, "editor")
        assert issubclass(editor, Editor) and editor.name == name
    for path in HOOK_KINDS.values():
        assert issubclass(import_object(path, "hook kind"), HookKind)
    assert import_object(SELF_CHECK, "self-check") is require_support


IMPORT_ALL = """
import json, logging, os, pkgutil, random, signal, sys, threading
import numpy, torch, transformers, lm_eval.api.registry, lm_eval.models.huggingface, lm_eval.api.task, lm_eval.evaluator

def state():
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "environment": dict(os.environ),
        "import path": list(sys.path),
        "import hooks": [repr(type(finder)) for finder in sys.meta_path],
        "root handlers": [repr(handler) for handler in logging.root.handlers],
        "root level": logging.root.level,
        "random": hash(random.getstate()),
        "numpy": hash(numpy.random.get_state()[1].tobytes()),
        "torch": torch.get_rng_state().sum().item(),
        "torch threads": torch.get_num_threads(),
        "torch dtype": str(torch.get_default_dtype()),
        "gradients": torch.is_grad_enabled(),
        "signals": [repr(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)],
        "models": sorted(lm_eval.api.registry.model_registry.keys()),
        "aggregations": sorted(lm_eval.api.registry.aggregation_registry.keys()),
        "filters": sorted(lm_eval.api.registry.filter_registry.keys()),
        "attention": sorted(transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS.keys()),
    }

names = [
    module.name
    for package in ("edit_hooks", "judges", "lm_eval_tasks", "lm_edit")
    for module in pkgutil.walk_packages(__import__(package).__path__, f"{package}.")
    if not module.name.endswith("__main__")
]
before = state()
for name in names:
    __import__(name)
after = state()
changed = {key: [before[key], after[key]] for key in before if before[key] != after[key]}
print(json.dumps({"modules": len(names), "changed": changed}))
"""


def test_importing_every_module_registers_names_for_yaml_and_changes_nothing_else() -> None:
    """lm-eval finds the filters and aggregations of a task's YAML by their registered names."""
    done = run_warm(["-c", IMPORT_ALL], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["modules"] > 180
    registered = {kind: set(report["changed"].pop(kind)[1]) for kind in ("aggregations", "filters")}
    assert set(AGGREGATIONS) <= registered["aggregations"] and {"natural_stop", "model_judge"} <= registered["filters"]
    assert report["changed"] == {}
