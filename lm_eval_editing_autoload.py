"""Start-up hook: the model ``edited_hf``, the editing tasks and readable user errors for the stock ``lm_eval``.

lm-eval 0.4.13 has no plugin discovery for models, and no released version has one for tasks. The one-line file
``lm_eval_editing_autoload.pth``, installed beside the packages, imports this module when an interpreter starts. It adds
one finder to ``sys.meta_path``, and nothing else happens until ``lm_eval`` itself is imported. Then:

- after ``lm_eval.models`` has run, ``edited_hf`` is added to the model registry by name; its code is imported on first
  use;
- after the other modules of :data:`FOLLOWED` have run, :mod:`lm_eval_tasks.startup` extends them: the task manager also
  scans our tasks; ``simple_evaluate`` and ``evaluate`` check the output path, name the folder of the run and add
  anomalies; ``make_table`` prints what the papers print; the command ``lm_eval`` prints our user errors as one message.

The order matters: in 0.4.13 the registry fills itself with the built-in models only while it is empty, so a name
registered before ``lm_eval.models`` was imported makes ``hf`` and all the others "not found".

``LM_EVAL_EDITING_AUTOLOAD=0`` disables the hook. Where no ``.pth`` file is read (``pip install --target``,
``python -S``, a notebook kernel that was running during the install) ``import lm_eval_editing_autoload`` does the same,
and ``python -m lm_eval_editing_autoload`` is the command ``lm_eval`` with it.

Every interpreter of the environment runs this file, so it imports only modules that start-up has loaded already, never
raises, and reports a failure in one line on standard error.
"""

import os
import sys

TYPE_CHECKING = False  # known to type checkers; importing `typing` would cost every interpreter start
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

SWITCH = "LM_EVAL_EDITING_AUTOLOAD"
MODEL_NAME = "edited_hf"
MODEL_TARGET = "edit_hooks.lm:EditedHFLM"
# Modules of lm-eval that are extended once they have run; all but the first by `lm_eval_tasks.startup`.
MODELS = "lm_eval.models"
FOLLOWED = (
    MODELS,
    "lm_eval.tasks.manager",
    "lm_eval.evaluator",
    "lm_eval.utils",
    "lm_eval._cli.utils",
    "lm_eval._cli.harness",
)


def _report(failure: str, error: BaseException) -> None:
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    print(f"lm-eval-editing: {failure}: {reason} ({SWITCH}=0 switches this off)", file=sys.stderr)


def _register_model(models: "ModuleType") -> None:
    """Add our model to the registry, after ``lm_eval.models`` has added the built-in ones."""
    from lm_eval.api.registry import model_registry

    # Newer lm-eval may have the name from our entry point; the registry refuses a second, different target.
    if MODEL_NAME not in model_registry:
        model_registry.register(MODEL_NAME, target=MODEL_TARGET)


def _run_action(name: str, module: "ModuleType") -> None:
    """Do our part for a module of lm-eval that has just run. A failure is reported and never breaks that import."""
    try:
        if name == MODELS:
            _register_model(module)
            return
        from lm_eval_tasks.startup import extend

        extend(name, module)
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
        # The second test ends the recursion with another finder that calls all the others in turn, as this one does.
        if fullname not in FOLLOWED or fullname in self._searching:
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
        # Shadow one method of this loader object instead of wrapping the loader: everything else that tools read from a
        # loader (source, resources, pickling) stays unchanged.
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
    """Add the finder once, and run the actions for modules that have been imported already; a no-op when disabled."""
    if os.environ.get(SWITCH, "1").strip().lower() in {"0", "false", "no", "off"}:
        return
    # Compared by name: after a reload of this module the class of the finder in sys.meta_path is another object.
    if not any(getattr(finder, "name", None) == __name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())
    for name in FOLLOWED:
        if (module := sys.modules.get(name)) is not None:
            _run_action(name, module)


try:
    install()
except Exception as error:
    _report("start-up hook is off", error)

if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
