"""What `pip install` gives: stock `lm_eval` finds our model and tasks, start-up is cheap, uninstalling leaves nothing.

The project is built and installed into fresh environments that see the packages of the running one, torch and lm-eval
among them, but process none of its `.pth` files: an editable install there cannot stand in for the one under test.
What needs an installation is slow; `scripts/check_release.sh` and the continuous integration run it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
import yaml
from distributions import write_metadata
from fresh_environments import SWITCH, Environment
from paths import ROOT

PACKAGES = ("edit_hooks", "judges", "lm_eval_tasks", "lm_edit")
MODULE = "lm_eval_editing_autoload"
MAX_START_UP_US = 5000


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, "--wheel-dir", str(folder)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def from_wheel(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    environment = Environment(tmp_path_factory.mktemp("from_wheel"))
    environment.pip("install", "--no-deps", "--no-index", str(wheel))
    return environment


@pytest.fixture(scope="module")
def editable(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    environment = Environment(tmp_path_factory.mktemp("editable"))
    environment.pip("install", "--no-deps", "--no-index", "--no-build-isolation", "--editable", str(ROOT))
    return environment


@pytest.fixture
def hook_only(tmp_path: Path) -> Environment:
    """Only the start-up hook and what extends lm-eval, copied by hand, and no package of the running environment."""
    environment = Environment(tmp_path / "hook_only", sees_running_packages=False)
    parts = ["lm_eval_tasks/__init__.py", "lm_eval_tasks/folder.py"]
    parts += [f"lm_eval_tasks/startup/{path.name}" for path in (ROOT / "lm_eval_tasks/startup").glob("*.py")]
    parts += ["edit_hooks/__init__.py", "edit_hooks/utils/__init__.py", "edit_hooks/utils/public_names.py"]
    for name in (f"{MODULE}.pth", f"{MODULE}.py", *parts):
        (environment.site / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, environment.site / name)
    return environment


def task_names() -> set[str]:
    """Names of all tasks and groups, read from our YAML files."""

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_multi_constructor("!", lambda loader, suffix, node: None)
    configs = [yaml.load(path.read_text(encoding="utf-8"), Loader) for path in (ROOT / "lm_eval_tasks").rglob("*.yaml")]
    return {config.get("group") or config["task"] for config in configs}


# --- the wheel -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_wheel_holds_every_file_of_the_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if ".dist-info/" not in name}
    present = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert shipped == present | {f"{MODULE}.py", f"{MODULE}.pth"}


# --- stock lm_eval ---------------------------------------------------------------------------------------------------


# The index of all tasks takes ten seconds, and `ls tasks` reads every file once more: it lists a small folder instead.
LISTS = """
    import json, logging, sys
    from pathlib import Path
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.tasks import manager

    warnings = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("lm_eval").addHandler(handler)
    index = list(manager.TaskManager().task_index)

    folder = Path("few")
    folder.mkdir(exist_ok=True)
    (folder / "some_task.yaml").write_text("task: some_task")
    manager.__file__ = str(folder / "manager.py")
    sys.argv = ["lm_eval", "ls", "tasks"]
    try:
        cli_evaluate()
    except SystemExit as ended:
        assert not ended.code
    print(json.dumps([index, warnings]))
"""


@pytest.mark.slow
def test_lm_eval_lists_our_tasks_beside_the_built_in_ones(from_wheel: Environment) -> None:
    *table, last = from_wheel.run(LISTS).stdout.strip().splitlines()
    listed = set(re.findall(r"^\|\s*([^\s|]+)\s*\|", "\n".join(table), flags=re.MULTILINE))
    index, warnings = json.loads(last)
    ours = task_names()
    assert {"bake_rq", "qaedit_wild"} <= ours
    assert {*ours, "some_task"} - listed == set() and ours - set(index) == set()
    assert {"mmlu", "hellaswag", "glue"} <= set(index)
    # lm-eval logs when a task of one folder replaces a task of the same name in an earlier one
    assert not [warning for warning in warnings if "overrides existing task" in warning]


FINDS = """
    import json, lm_eval
    from importlib.metadata import distribution
    from lm_eval.api.registry import get_model

    class Found(Exception): pass

    def stop(*args, **kwargs): raise Found

    points = distribution("lm-eval-editing").entry_points
    facts = {
        "models": [get_model(name).__name__ for name in ("edited_hf", "hf", "dummy")],
        "points": {f"{point.group} {point.name}": point.load().__name__ for point in points},
    }
    for name in ("create_from_arg_string", "create_from_arg_obj"):
        setattr(get_model("edited_hf"), name, stop)
    try:
        lm_eval.simple_evaluate(model="edited_hf", tasks=["bake_rq"])
    except Found:
        facts["evaluated"] = True
    print(json.dumps(facts))
"""


@pytest.mark.slow
def test_our_model_is_found_and_the_built_in_ones_still_are(from_wheel: Environment) -> None:
    """By the registry and `simple_evaluate`; every entry point resolves. One process for all."""
    assert from_wheel.evaluate(FINDS) == {
        "models": ["EditedHFLM", "HFLM", "DummyLM"],
        "points": {
            "console_scripts lm-edit": "main",
            "lm_eval.models edited_hf": "EditedHFLM",
            "lm_eval_editing.edit_sources benchmarks": "load_edit_requests",
            "lm_eval_editing.settings auto": "auto_settings",
        },
        "evaluated": True,
    }


@pytest.mark.slow
def test_importing_our_model_first_keeps_the_built_in_ones(from_wheel: Environment) -> None:
    code = """
        import json, edit_hooks.lm
        from lm_eval.api.registry import get_model
        print(json.dumps([get_model(name).__name__ for name in ("hf", "dummy", "edited_hf")]))
    """
    assert from_wheel.evaluate(code) == ["HFLM", "DummyLM", "EditedHFLM"]


TASK_MANAGERS = """
    import json, logging
    from pathlib import Path
    from lm_eval.tasks import manager
    from lm_eval_tasks.folder import TASKS_DIR as ours

    builtin, user = Path("builtin"), Path("user")
    for folder, text in ((builtin, "builtin"), (user, "user")):
        folder.mkdir(exist_ok=True)
    (builtin / "some_task.yaml").write_text("task: some_task")
    (user / "mine.yaml").write_text("task: bake_rq")
    manager.__file__ = str(builtin / "manager.py")  # a small folder instead of the 14,000 built-in files

    warnings = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("lm_eval").addHandler(handler)

    def where(**options):
        task_manager = manager.TaskManager(**options)
        folders = {name: entry.yaml_path.parent for name, entry in task_manager.task_index.items() if entry.yaml_path}
        places = {name: folders[name] for name in ("some_task", "bake_rq") if name in folders}
        labels = {name: "ours" if Path(ours) in place.parents else place.name for name, place in places.items()}
        return labels, task_manager.include_path

    once = where(include_path=ours)[0]
    print(json.dumps({
        "ours_once": [once, warnings.copy()],
        "default": where(),
        "user": where(include_path="user"),
        "user_list": where(include_path=["user"]),
        "user_path": where(include_path=user)[0],
        "ours_too": where(include_path=["user", ours])[0],
        "positional": [e for e in manager.TaskManager(None, "user").task_index if e == "bake_rq"],
        "no_defaults": where(include_defaults=False),
        "no_defaults_user": where(include_path="user", include_defaults=False),
        "no_defaults_ours": where(include_path=ours, include_defaults=False)[0],
    }))
"""


@pytest.mark.slow
def test_include_path_overrides_ours_and_no_defaults_leaves_ours_out(from_wheel: Environment) -> None:
    tasks = from_wheel.evaluate(TASK_MANAGERS)
    assert tasks["default"] == [{"some_task": "builtin", "bake_rq": "ours"}, None]
    assert tasks["user"] == [{"some_task": "builtin", "bake_rq": "user"}, "user"]
    assert tasks["user_list"] == [{"some_task": "builtin", "bake_rq": "user"}, ["user"]]
    assert tasks["user_path"] == {"some_task": "builtin", "bake_rq": "user"}
    assert tasks["ours_once"] == [{"some_task": "builtin", "bake_rq": "ours"}, []]  # no "overrides existing task"
    assert tasks["ours_too"] == {"some_task": "builtin", "bake_rq": "ours"}  # the order the user gave
    assert tasks["positional"] == ["bake_rq"]
    assert tasks["no_defaults"] == [{}, None]
    assert tasks["no_defaults_user"] == [{"bake_rq": "user"}, "user"]
    assert tasks["no_defaults_ours"] == {"bake_rq": "ours"}


@pytest.mark.slow
def test_editable_install_uses_the_tasks_of_the_checkout(editable: Environment) -> None:
    imports = f"import json, {MODULE} as module, lm_eval_tasks.folder as tasks"
    code = f"{imports}; print(json.dumps([module.__file__, str(tasks.TASKS_DIR)]))"
    module, tasks = editable.evaluate(code)
    assert Path(module).resolve() == ROOT / f"{MODULE}.py"
    assert Path(tasks).resolve() == ROOT / "lm_eval_tasks"


@pytest.mark.parametrize("value", ["0", "off", "False", "1"])
def test_the_switch_is_read_before_the_hook_is_installed(hook_only: Environment, value: str) -> None:
    code = "import json, sys; print(json.dumps([type(finder).__module__ for finder in sys.meta_path]))"
    assert (MODULE in hook_only.evaluate(code, **{SWITCH: value})) == (value == "1")


@pytest.mark.slow
def test_a_switched_off_hook_leaves_lm_eval_alone(from_wheel: Environment) -> None:
    code = """
        import json, sys
        import lm_eval.models
        from lm_eval.api.registry import model_registry
        from lm_eval.tasks.manager import TaskManager
        hooks = [finder for finder in sys.meta_path if type(finder).__module__ == "lm_eval_editing_autoload"]
        print(json.dumps(["edited_hf" in model_registry, TaskManager.__init__.__module__, len(hooks)]))
    """
    assert from_wheel.evaluate(code, **{SWITCH: "off"}) == [False, "lm_eval.tasks.manager", 0]


# --- start-up --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_start_up_costs_less_than_five_milliseconds(from_wheel: Environment) -> None:
    def cost() -> int:
        """Microseconds that the import takes, what it imports itself included."""
        report = from_wheel.call("-X", "importtime", "-c", "pass").stderr
        (cumulative,) = re.findall(rf"^import time:\s*\d+ \|\s*(\d+) \|\s*{MODULE}$", report, flags=re.MULTILINE)
        return int(cumulative)

    assert statistics.median(cost() for _ in range(9)) < MAX_START_UP_US


def test_start_up_imports_nothing_else(hook_only: Environment, tmp_path: Path) -> None:
    code = "import sys, json; print(json.dumps(sorted(sys.modules)))"
    plain = Environment(tmp_path / "plain", sees_running_packages=False)
    assert set(hook_only.evaluate(code)) - set(plain.evaluate(code)) == {MODULE}


BROKEN = {
    "missing": (None, "ModuleNotFoundError"),
    "syntax error": ("def (", "SyntaxError"),
    "import error": ("import a_module_that_is_not_there", "a_module_that_is_not_there"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_module_prints_one_reason_and_python_starts(hook_only: Environment, case: str) -> None:
    content, reason = BROKEN[case]
    (hook_only.site / f"{MODULE}.py").unlink()
    if content is not None:
        (hook_only.site / f"{MODULE}.py").write_text(content)
    done = hook_only.run("print('alive')")
    assert done.stdout == "alive\n"
    (line,) = done.stderr.splitlines()
    assert line.startswith("lm-eval-editing: ") and reason in line


FAKE_LM_EVAL = {
    "__init__.py": "",
    "api/__init__.py": "",
    "api/registry.py": """
        class Registry(dict):
            def register(self, name, target):
                assert name not in self
                self[name] = target
        model_registry = Registry()
    """,
    "models/__init__.py": """
        from lm_eval.api.registry import model_registry
        model_registry.register("hf", target="somewhere:HF")
    """,
    "tasks/__init__.py": "from lm_eval.tasks.manager import TaskManager",
    "tasks/manager.py": """
        class TaskManager:
            def __init__(self, include_path=None, include_defaults=True):
                self.include_path, self.scanned = include_path, include_path
    """,
}

LOOK_AT_FAKE = """
    import json, lm_eval.models, lm_eval.tasks
    from lm_eval.api import registry
    scanned = vars(lm_eval.tasks.TaskManager()).get("scanned")
    print(json.dumps([list(getattr(registry, "model_registry", {}).items()), scanned]))
"""


def fake_lm_eval(folder: Path, **changed: str) -> str:
    """Write a package that imitates another release of lm-eval; return its folder for PYTHONPATH."""
    for name, content in {**FAKE_LM_EVAL, **changed}.items():
        path = folder / "lm_eval" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(content))
    return str(folder)


def test_model_known_from_an_entry_point_is_left_alone(hook_only: Environment, tmp_path: Path) -> None:
    known = '"edited_hf", target="entry:Point"'
    models = FAKE_LM_EVAL["models/__init__.py"].replace('"hf", target="somewhere:HF"', known)
    path = fake_lm_eval(tmp_path, **{"models/__init__.py": models})
    done = hook_only.run(LOOK_AT_FAKE, PYTHONPATH=path)
    assert done.stderr == ""
    assert dict(json.loads(done.stdout)[0]) == {"edited_hf": "entry:Point"}


def test_changed_lm_eval_gives_a_reason_and_still_imports(hook_only: Environment, tmp_path: Path) -> None:
    manager = "class TaskManager:\n    def __init__(self, folders=None): self.scanned = folders\n"
    path = fake_lm_eval(tmp_path, **{"tasks/manager.py": manager, "api/registry.py": "", "models/__init__.py": ""})
    done = hook_only.run(LOOK_AT_FAKE, PYTHONPATH=path)
    assert json.loads(done.stdout) == [[], None]
    about_models, about_tasks = done.stderr.splitlines()
    assert "could not extend lm_eval.models" in about_models and "model_registry" in about_models
    assert "could not extend lm_eval.tasks.manager" in about_tasks and "--include_path" in about_tasks


def test_importing_the_module_late_catches_up(tmp_path: Path) -> None:
    """Where no .pth file is read, e.g. after an install into a running notebook kernel."""
    environment = Environment(tmp_path / "no_hook", sees_running_packages=False)
    path = os.pathsep.join([fake_lm_eval(tmp_path), str(ROOT)])
    code = f"import lm_eval.models, lm_eval.tasks, {MODULE}, importlib; importlib.reload({MODULE})\n"
    models, scanned = environment.evaluate(code + textwrap.dedent(LOOK_AT_FAKE), PYTHONPATH=path)
    assert dict(models) == {"hf": "somewhere:HF", "edited_hf": "edit_hooks.lm:EditedHFLM"}
    assert scanned == [str(ROOT / "lm_eval_tasks")]


def test_other_hooks_on_the_same_modules_get_along(hook_only: Environment, tmp_path: Path) -> None:
    """A second finder that delegates to all others, as ours does, must not cause a loop."""
    other = """
        import sys
        class Other:
            def find_spec(self, name, path=None, target=None):
                if name.startswith("lm_eval"):
                    specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
                    return next(filter(None, specs), None)
        sys.meta_path.insert(0, Other())
    """
    code = textwrap.dedent(other) + textwrap.dedent(LOOK_AT_FAKE)
    done = hook_only.run(code, PYTHONPATH=fake_lm_eval(tmp_path))
    assert done.stderr == ""
    assert "edited_hf" in dict(json.loads(done.stdout)[0])


PLUGINS = {"good": "a_package.sub.benchmark:BENCHMARKS", "folder": "a_package.whole:B", "top": "a_package:B"}
BROKEN_PLUGINS = {"absent": "no_such_package.x:B", "no_package": "a_module:B", "no_module": "a_package.none:B"}


def test_task_folders_of_other_packages_are_scanned_without_importing_them(
    hook_only: Environment, tmp_path: Path
) -> None:
    for name in ("a_package/__init__.py", "a_package/sub/benchmark.py", "a_package/whole/__init__.py", "a_module.py"):
        path = tmp_path / "plugins" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise RuntimeError('imported')")
    write_metadata(tmp_path / "plugins", "some_benchmarks", {"lm_eval_editing.benchmarks": PLUGINS | BROKEN_PLUGINS})
    path = os.pathsep.join([fake_lm_eval(tmp_path), str(tmp_path / "plugins")])
    done = hook_only.run(LOOK_AT_FAKE, PYTHONPATH=path)
    package = tmp_path / "plugins" / "a_package"
    folders = [str(package / "sub"), str(package / "whole"), str(package), str(hook_only.site / "lm_eval_tasks")]
    assert json.loads(done.stdout)[1] == folders
    reported = sorted(re.findall("tasks of benchmark '(\\w+)'", done.stderr))
    assert reported == sorted(BROKEN_PLUGINS) and len(done.stderr.splitlines()) == len(reported)


# --- leaving ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_uninstall_leaves_nothing(wheel: Path, tmp_path: Path, kind: str) -> None:
    environment = Environment(tmp_path / "environment")
    before = environment.files()
    source = [str(wheel)] if kind == "wheel" else ["--no-build-isolation", "--editable", str(ROOT)]
    environment.pip("install", "--no-deps", "--no-index", *source)
    assert f"{MODULE}.pth" in environment.files()
    environment.run("import lm_eval.models, edit_hooks")  # byte code written by a run must go as well
    environment.pip("uninstall", "--yes", "lm-eval-editing")
    assert environment.files() == before
    done = environment.run(f"import sys; print({MODULE!r} in sys.modules)")
    assert (done.stdout, done.stderr) == ("False\n", "")


# --- folders without .pth files --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_target_folder_has_the_command_as_a_module(wheel: Path, tmp_path: Path) -> None:
    """`pip install --target` with PYTHONPATH runs no `.pth` file, as the documents state."""
    environment, target = Environment(tmp_path / "environment"), tmp_path / "target"
    environment.pip("install", "--no-deps", "--no-index", "--target", str(target), str(wheel))
    assert (target / f"{MODULE}.pth").is_file(), "it is there, and not read"
    hooked = f"import sys; print({MODULE!r} in sys.modules)"
    assert environment.run(hooked, PYTHONPATH=str(target)).stdout == "False\n"
    # Our model refuses the unknown option, before any work: lm-eval found the model and the task.
    words = ["--model", "edited_hf", "--model_args", "no_option=1", "--tasks", "bake_rq"]
    done = environment.call("-m", MODULE, *words, PYTHONPATH=str(target))
    assert done.returncode == 2 and "no_option" in done.stderr and "Traceback" not in done.stderr, done.stderr[-3000:]
    assert f"python -m {MODULE}" in (ROOT / "docs/start/install.md").read_text(encoding="utf-8")
