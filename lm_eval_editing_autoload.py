"""Lets the stock ``lm_eval`` find the model ``edited_hf`` and the tasks of this project.

lm-eval 0.4.13 has no plugin discovery for models, and no released version has one for tasks. The one-line file
``lm_eval_editing_autoload.pth``, installed beside the packages, imports this module when an interpreter starts. It adds
one finder to ``sys.meta_path``, and nothing else happens until ``lm_eval`` itself is imported. Then:

- after ``lm_eval.models`` has run, ``edited_hf`` is added to the model registry by name; its code is imported on first
  use;
- after ``lm_eval.tasks.manager`` has run, every ``TaskManager`` that includes the default tasks also scans the folder
  ``lm_eval_tasks``: after the built-in tasks and before the user's ``include_path``, which therefore overrides ours.

The order matters: in 0.4.13 the registry fills itself with the built-in models only while it is empty, so a name
registered before ``lm_eval.models`` was imported makes ``hf`` and all the others "not found".

``LM_EVAL_EDITING_AUTOLOAD=0`` switches all of it off. Where no ``.pth`` file is read (``pip install --target``,
``python -S``, a notebook kernel that was running during the install) ``import lm_eval_editing_autoload`` does the same.

Every interpreter of the environment runs this file, so it imports only what start-up has loaded already, never raises,
and reports what it could not do in one line on standard error.
"""

import os
import sys

TYPE_CHECKING = False  # known to type checkers; importing `typing` would cost every interpreter start
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

SWITCH = "LM_EVAL_EDITING_AUTOLOAD"
MODEL_NAME = "edited_hf"
MODEL_TARGET = "edit_hooks.lm:EditedHFLM"
# Beside this file in a wheel and in a checkout alike; a search of sys.path could find a folder of the user's instead.
TASKS_DIR = os.path.join(os.path.dirname(os.path.abspath(__file__)), "lm_eval_tasks")


def _report(what: str, error: BaseException) -> None:
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    print(f"lm-eval-editing: {what}: {reason} ({SWITCH}=0 switches this off)", file=sys.stderr)


def _register_model(models: "ModuleType") -> None:
    """Add our model to the registry, after ``lm_eval.models`` has added the built-in ones."""
    from lm_eval.api.registry import model_registry

    # Newer lm-eval may know the name from our entry point; the registry refuses a second, different target.
    if MODEL_NAME not in model_registry:
        model_registry.register(MODEL_NAME, target=MODEL_TARGET)


def _add_task_folder(manager: "ModuleType") -> None:
    """Make ``TaskManager`` scan our folder whenever it scans the default tasks."""
    import functools
    import inspect

    task_manager = manager.TaskManager
    original = task_manager.__init__
    if getattr(original, "_lm_eval_editing", False):
        return
    signature = inspect.signature(original)
    if missing := {"include_path", "include_defaults"} - signature.parameters.keys():
        raise TypeError(f"TaskManager no longer takes {sorted(missing)}; use --include_path {TASKS_DIR}")

    @functools.wraps(original)
    def init(self: "Any", *args: "Any", **kwargs: "Any") -> None:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        asked = bound.arguments["include_path"]
        if bound.arguments["include_defaults"]:
            bound.arguments["include_path"] = _with_our_folder(asked)
        original(*bound.args, **bound.kwargs)
        if hasattr(self, "include_path"):
            self.include_path = asked  # what the caller gave, as without us

    init._lm_eval_editing = True  # type: ignore[attr-defined]
    task_manager.__init__ = init


def _with_our_folder(include_path: "Any") -> "list[Any]":
    """Our folder first: lm-eval lets later folders override earlier ones. Given by the user too, it is scanned once."""
    if not include_path:
        given = []
    elif isinstance(include_path, (list, tuple)):
        given = list(include_path)
    else:
        given = [include_path]
    ours = os.path.realpath(TASKS_DIR)
    if any(os.path.realpath(path) == ours for path in given):
        return given
    return [TASKS_DIR, *given]


_ACTIONS: "dict[str, Callable[[ModuleType], None]]" = {
    "lm_eval.models": _register_model,
    "lm_eval.tasks.manager": _add_task_folder,
}


def _run_action(name: str, module: "ModuleType") -> None:
    """Do our part for a module of lm-eval that has just run. A failure is reported and never breaks that import."""
    try:
        _ACTIONS[name](module)
    except Exception as error:
        _report(f"could not extend {name}", error)


class _AfterImport:
    """Finder that lets the other finders locate a module and runs our action once the module has run."""

    name = __name__

    def __init__(self) -> None:
        self._searching: set[str] = set()

    def find_spec(
        self, fullname: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        # The second test ends the recursion with another finder that asks all the others in turn, as this one does.
        if fullname not in _ACTIONS or fullname in self._searching:
            return None
        self._searching.add(fullname)
        try:
            for finder in sys.meta_path:
                if finder is not self and (find := getattr(finder, "find_spec", None)):
                    spec = find(fullname, path, target)
                    if spec is not None:
                        self._extend(spec)
                        return spec
            return None
        finally:
            self._searching.discard(fullname)

    @staticmethod
    def _extend(spec: "ModuleSpec") -> None:
        # Shadow one method of this loader object instead of wrapping the loader: everything else that tools ask a
        # loader for (source, resources, pickling) stays as it is.
        loader: Any = spec.loader
        try:
            original = loader.exec_module

            def exec_module(module: "ModuleType") -> None:
                original(module)
                _run_action(spec.name, module)

            loader.exec_module = exec_module
        except AttributeError as error:
            _report(f"could not follow the import of {spec.name}", error)


def install() -> None:
    """Add the finder, once, and catch up with what has been imported already. Does nothing when switched off."""
    if os.environ.get(SWITCH, "1").strip().lower() in {"0", "false", "no", "off"}:
        return
    # Compared by name: after a reload of this module the class of the finder in sys.meta_path is another object.
    if not any(getattr(finder, "name", None) == __name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())  # type: ignore[arg-type]
    for name in _ACTIONS:
        if (module := sys.modules.get(name)) is not None:
            _run_action(name, module)


try:
    install()
except Exception as error:
    _report("start-up hook is off", error)
