"""Start-up hook: the model ``edited_hf``, the editing tasks and readable user errors for the stock ``lm_eval``.

lm-eval 0.4.13 has no plugin discovery for models, and no released version has one for tasks. The one-line file
``lm_eval_editing_autoload.pth``, installed beside the packages, imports this module when an interpreter starts. It adds
one finder to ``sys.meta_path``, and nothing else happens until ``lm_eval`` itself is imported. Then:

- after ``lm_eval.models`` has run, ``edited_hf`` is added to the model registry by name; its code is imported on first
  use;
- after ``lm_eval.tasks.manager`` has run, every ``TaskManager`` that includes the default tasks also scans the folder
  ``lm_eval_tasks`` and the folders of the benchmarks that other packages register (:data:`BENCHMARKS`): after the
  built-in tasks and before the user's ``include_path``, which therefore overrides ours;
- after ``lm_eval.evaluator`` has run, ``simple_evaluate`` checks the output path of a run of ``edited_hf``, adds the
  anomalies to its results and names the folder of the run, and ``evaluate`` adds the columns of the unedited model to
  lm-eval's own tasks (``compare_unedited=true``) and gives all processes of a run the few-shot prompts of one;
- after ``lm_eval.utils`` has run, ``make_table`` prints the scores of editing tasks without their counts and summaries,
  and below the last table what was left out, and anomalies;
- after ``lm_eval._cli.utils`` has run, an option of the command may hold a brace, as in
  ``editor_args=context_templates:['{}']``; lm-eval takes every such text for JSON and ends with a traceback;
- after ``lm_eval._cli.harness`` has run, which only the command ``lm_eval`` imports, that command prints our user
  errors as one message without a traceback and ends with exit code 2. ``lm_eval.simple_evaluate`` raises them as
  before, and all other exceptions are unchanged. ``LM_EDIT_DEBUG=1`` brings the traceback back.

The order matters: in 0.4.13 the registry fills itself with the built-in models only while it is empty, so a name
registered before ``lm_eval.models`` was imported makes ``hf`` and all the others "not found".

``LM_EVAL_EDITING_AUTOLOAD=0`` disables the hook. Where no ``.pth`` file is read (``pip install --target``,
``python -S``, a notebook kernel that was running during the install) ``import lm_eval_editing_autoload`` does the same.

Every interpreter of the environment runs this file, so it imports only modules that start-up has loaded already, never
raises, and reports a failure in one line on standard error.
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
# Entry-point group of other packages' benchmarks; the YAML files of their tasks are beside the module that it names.
BENCHMARKS = "lm_eval_editing.benchmarks"
# Beside this file in a wheel and in a checkout alike; a search of sys.path could find a folder of the user's instead.
TASKS_DIR = os.path.join(os.path.dirname(os.path.abspath(__file__)), "lm_eval_tasks")


def _report(failure: str, error: BaseException) -> None:
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    print(f"lm-eval-editing: {failure}: {reason} ({SWITCH}=0 switches this off)", file=sys.stderr)


def _register_model(models: "ModuleType") -> None:
    """Add our model to the registry, after ``lm_eval.models`` has added the built-in ones."""
    from lm_eval.api.registry import model_registry

    # Newer lm-eval may have the name from our entry point; the registry refuses a second, different target.
    if MODEL_NAME not in model_registry:
        model_registry.register(MODEL_NAME, target=MODEL_TARGET)


def _allow_braces(utils: "ModuleType") -> None:
    """Let options such as ``--model_args`` hold a brace; only a text that begins with one is JSON."""
    import functools

    original = utils.try_parse_json
    if getattr(original, "_lm_eval_editing", False):
        return

    @functools.wraps(original)
    def try_parse_json(value: "Any") -> "Any":
        try:
            return original(value)
        except ValueError:
            if not isinstance(value, str) or value.lstrip().startswith("{"):
                raise
            return value

    vars(try_parse_json)["_lm_eval_editing"] = True
    vars(utils)["try_parse_json"] = try_parse_json


def _print_user_errors(cli: "ModuleType") -> None:
    """Let the command ``lm_eval`` end with the message of an ``EditingError``."""
    import functools

    original = cli.HarnessCLI.execute
    if getattr(original, "_lm_eval_editing", False):
        return

    @functools.wraps(original)
    def execute(self: "Any", *args: "Any", **kwargs: "Any") -> "Any":
        try:
            return original(self, *args, **kwargs)
        except ValueError as error:
            errors = sys.modules.get("edit_hooks.utils.errors")  # it is loaded if the error is ours
            if errors is None or not isinstance(error, errors.EditingError) or errors.traceback_wanted():
                raise
            rank = os.environ.get("RANK", "0")
            print(f"lm_eval{'' if rank == '0' else f' (rank {rank})'}: {error}", file=sys.stderr)
            raise SystemExit(errors.EXIT_CODE) from None

    vars(execute)["_lm_eval_editing"] = True
    cli.HarnessCLI.execute = execute


# Model arguments, and metadata of the task manager, of a `simple_evaluate` whose tasks are not known yet.
_to_compare: "list[tuple[Any, Any]]" = []
# Its `gen_kwargs`.
_generation_settings: "list[Any]" = []


def _add_anomalies(evaluator: "ModuleType") -> None:
    """Let ``simple_evaluate`` look for anomalies in the results of our model, and name the run."""
    import functools
    import inspect

    original = evaluator.simple_evaluate
    if getattr(original, "_lm_eval_editing", False):
        return

    @functools.wraps(original)
    def simple_evaluate(*args: "Any", **kwargs: "Any") -> "Any":
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        tracker = given.get("evaluation_tracker")
        if given.get("model") == MODEL_NAME:
            _check_output(tracker)
            if (manager := given.get("task_manager")) is not None:  # lm-eval's own has the arguments in its metadata
                _to_compare.append((given.get("model_args"), getattr(manager, "metadata", None)))
        if given.get("gen_kwargs"):
            _generation_settings.append(given["gen_kwargs"])
        try:
            results = original(*args, **kwargs)
        finally:
            _to_compare.clear()
            _generation_settings.clear()
        if results and given.get("samples") and "config" in results:  # lm-eval does not record them
            results["config"]["samples"] = given["samples"]
        if results and "edited_hf" in results.get("config", {}):
            from lm_eval_tasks.report.anomalies import add_anomalies

            add_anomalies(results)
            _name_run(tracker, results)
        return results

    vars(simple_evaluate)["_lm_eval_editing"] = True
    vars(evaluator)["simple_evaluate"] = simple_evaluate


def _check_output(tracker: "Any") -> None:
    """Refuse an ``--output_path`` that cannot be written, before the run.

    lm-eval logs a warning after it, and ends with exit code 0. The first of several processes saves.
    """
    place = getattr(tracker, "output_path", None)
    if place and os.environ.get("RANK", "0") == "0":
        from edit_hooks.utils.outputs import check_writable_folder

        is_file = os.path.splitext(place)[1] == ".json"  # lm-eval adds the date to its name
        check_writable_folder(os.path.dirname(place) or "." if is_file else place)


def _name_run(tracker: "Any", results: "Any") -> None:
    """Name the folder of a run; hours of answers are not lost for a name."""
    if tracker is None:
        return
    try:
        from lm_eval_tasks.report.run_facts import name_run

        name_run(tracker, results)
    except Exception as error:
        _report("could not name the folder of the run", error)


def _compare_with_unedited(evaluator: "ModuleType") -> None:
    """Let ``evaluate`` evaluate ordinary tasks on the unedited model, too, if our model is asked for it."""
    import functools

    original = evaluator.evaluate
    if getattr(original, "_lm_eval_editing", False):
        return

    @functools.wraps(original)
    def evaluate(*args: "Any", **kwargs: "Any") -> "Any":
        lm = args[0] if args else kwargs.get("lm")
        loaded = args[1] if len(args) > 1 else kwargs.get("task_dict") or {}
        named = loaded.get("tasks") or {}
        tasks = list(named.values())
        if (begin := getattr(lm, "begin_evaluation", None)) is not None:
            from lm_eval_tasks.report.run_facts import generation_settings_of_ordinary, ordinary_tasks

            begin(generation_settings_of_ordinary(tasks), ordinary_tasks(named))
        if _to_compare:
            from lm_eval_tasks.report.run_options import check_task_settings

            check_task_settings(*_to_compare.pop(), tasks)
        if _generation_settings:
            from lm_eval_tasks.report.run_options import unused_generation_settings

            if (note := unused_generation_settings(_generation_settings.pop(), tasks)) is not None:
                import logging

                logging.getLogger("lm_eval.lm_eval_editing").warning(note)
        if lm is None or begin is None:
            return original(*args, **kwargs)
        from lm_eval_tasks.report.rank_prompts import prompts_of_one_process

        with prompts_of_one_process(lm, tasks):
            from lm_eval_tasks.report.broken_answers import without_broken_answers

            answered = without_broken_answers(original)
            if not getattr(lm, "compares_unedited", False):
                return answered(*args, **kwargs)
            from lm_eval_tasks.report.unedited_columns import evaluate_both

            return evaluate_both(answered, *args, **kwargs)

    vars(evaluate)["_lm_eval_editing"] = True
    vars(evaluator)["evaluate"] = evaluate


def _extend_evaluator(evaluator: "ModuleType") -> None:
    _add_anomalies(evaluator)
    _compare_with_unedited(evaluator)


def _shorten_table(utils: "ModuleType") -> None:
    """Let ``make_table`` print the scores of editing tasks, and below its last table what was left out and anomalies.

    A result that we cannot read is printed as lm-eval prints it.
    """
    import functools

    original = utils.make_table
    if getattr(original, "_lm_eval_editing", False):
        return

    @functools.wraps(original)
    def make_table(result_dict: "Any", column: str = "results", *args: "Any", **kwargs: "Any") -> "Any":
        try:
            from lm_eval_tasks.report.anomalies import table_note
            from lm_eval_tasks.report.printed_table import left_out_note, shown_results

            shown = shown_results(result_dict, column)
            is_last = column != "results" or "groups" not in result_dict
            note = left_out_note(result_dict) + table_note(result_dict) if is_last else ""
        except Exception as error:
            _report("could not shorten the table of results", error)
            shown, note = result_dict, ""
        printed = original(shown, column, *args, **kwargs)
        return f"{printed}{note}" if note else printed

    vars(make_table)["_lm_eval_editing"] = True
    vars(utils)["make_table"] = make_table


def _add_task_folders(manager: "ModuleType") -> None:
    """Make ``TaskManager`` scan the folders of editing tasks whenever it scans the default tasks."""
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
        include_path = bound.arguments["include_path"]
        if bound.arguments["include_defaults"]:
            bound.arguments["include_path"] = _with_task_folders(include_path)
        original(*bound.args, **bound.kwargs)
        if hasattr(self, "include_path"):
            self.include_path = include_path  # unchanged for the caller

    vars(init)["_lm_eval_editing"] = True
    task_manager.__init__ = init


def _with_task_folders(include_path: "Any") -> "list[Any]":
    """The include path with our folders first, since lm-eval lets later folders override earlier ones.

    A folder that the user gives, too, is scanned once.
    """
    if not include_path:
        own = []
    elif isinstance(include_path, (list, tuple)):
        own = list(include_path)
    else:
        own = [include_path]
    known = {os.path.realpath(path) for path in own}
    # Other packages come before us, so that none of them replaces a task of a published benchmark.
    return [folder for folder in (*_plugin_folders(), TASKS_DIR) if os.path.realpath(folder) not in known] + own


def _plugin_folders() -> "list[str]":
    """The task folders of the benchmarks that other packages register; a broken entry point is reported and skipped."""
    from importlib.metadata import entry_points

    folders = []
    try:
        for entry in entry_points(group=BENCHMARKS):
            try:
                folders.append(_folder_of(entry.module))
            except Exception as error:
                _report(f"could not find the tasks of benchmark {entry.name!r}", error)
    except Exception as error:
        _report("could not read the entry points of benchmarks", error)
    return list(dict.fromkeys(folders))


def _folder_of(module: str) -> str:
    """The folder of a module inside a package, found without importing either of them."""
    from importlib.util import find_spec

    package, *parts = module.split(".")
    spec = find_spec(package)
    if spec is None:
        raise ModuleNotFoundError(f"no module named {package!r}")
    # A module outside a package is refused: its folder would be site-packages as a whole.
    for location in spec.submodule_search_locations or ():
        path = os.path.join(location, *parts)
        if os.path.isdir(path):
            return path
        if os.path.isfile(f"{path}.py"):
            return os.path.dirname(path)
    raise ModuleNotFoundError(f"{module!r} is no module of a package")


_ACTIONS: "dict[str, Callable[[ModuleType], None]]" = {
    "lm_eval.models": _register_model,
    "lm_eval.tasks.manager": _add_task_folders,
    "lm_eval.evaluator": _extend_evaluator,
    "lm_eval.utils": _shorten_table,
    "lm_eval._cli.utils": _allow_braces,
    "lm_eval._cli.harness": _print_user_errors,
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
        # The second test ends the recursion with another finder that calls all the others in turn, as this one does.
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
    for name in _ACTIONS:
        if (module := sys.modules.get(name)) is not None:
            _run_action(name, module)


try:
    install()
except Exception as error:
    _report("start-up hook is off", error)
