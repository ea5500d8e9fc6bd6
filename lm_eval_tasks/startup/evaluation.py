"""``simple_evaluate`` and ``evaluate`` for runs of ``edited_hf``; ``make_table`` for their results."""

from __future__ import annotations

import functools
import inspect
import os
import subprocess
from types import ModuleType
from typing import Any

from lm_eval_tasks.startup.report import report
from lm_eval_tasks.startup.saving import save_or_fail

# Model arguments, and metadata of the task manager, of a `simple_evaluate` whose tasks are not known yet.
_to_compare: list[tuple[Any, Any]] = []
# Its `gen_kwargs`.
_generation_settings: list[Any] = []
# Date and warnings of the last run, which its table repeats. Not part of the results: they name folders and the state
# of the store, so the same run would have other files when it is repeated.
_warnings_of: list[tuple[Any, dict[str, int]]] = []


def _add_anomalies(evaluator: ModuleType) -> None:
    """Let ``simple_evaluate`` look for anomalies in the results of our model, and name the run."""
    original = evaluator.simple_evaluate
    if getattr(original, "_lm_eval_editing", False):
        return

    @functools.wraps(original)
    def simple_evaluate(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        tracker = given.get("evaluation_tracker")
        if given.get("model") == "edited_hf":
            check_output(tracker)
            save_or_fail(tracker)
            if (manager := given.get("task_manager")) is not None:  # lm-eval's own has the arguments in its metadata
                _to_compare.append((given.get("model_args"), getattr(manager, "metadata", None)))
        if given.get("gen_kwargs"):
            _generation_settings.append(given["gen_kwargs"])
        from edit_hooks.utils.logs import counted_warnings

        try:
            with counted_warnings() as warnings:
                results = original(*args, **kwargs)
        finally:
            _to_compare.clear()
            _generation_settings.clear()
        if results and given.get("samples") and "config" in results:  # lm-eval does not record them
            results["config"]["samples"] = given["samples"]
        if results and "edited_hf" in results.get("config", {}):
            look_for_anomalies(results)
            name_run_folder(tracker, results)
            _warnings_of[:] = [(results.get("date"), warnings)]
        return results

    vars(simple_evaluate)["_lm_eval_editing"] = True
    vars(evaluator)["simple_evaluate"] = simple_evaluate


def check_output(tracker: Any) -> None:
    """Refuse an ``--output_path`` that cannot be written, before the run.

    lm-eval logs a warning after it, and ends with exit code 0. The first of several processes saves.
    """
    place = getattr(tracker, "output_path", None)
    if place and os.environ.get("RANK", "0") == "0":
        from edit_hooks.utils.storage.outputs import check_writable_folder

        is_file = os.path.splitext(place)[1] == ".json"  # lm-eval adds the date to its name
        check_writable_folder(os.path.dirname(place) or "." if is_file else place)


def look_for_anomalies(results: Any) -> None:
    """Add the anomalies of a run to its results; hours of answers are not lost for them."""
    try:
        from lm_eval_tasks.report.printing.anomalies import add_anomalies

        add_anomalies(results)
    except Exception as error:
        report("could not look for anomalies in the results", error)


def name_run_folder(tracker: Any, results: Any) -> None:
    """Name the folder of a run; hours of answers are not lost for a name."""
    if tracker is None:
        return
    try:
        from lm_eval_tasks.report.run_facts import name_run

        name_run(tracker, results)
    except Exception as error:
        report("could not name the folder of the run", error)


def _compare_with_unedited(evaluator: ModuleType) -> None:
    """Let ``evaluate`` evaluate ordinary tasks on the unedited model, too, if our model is asked for it."""
    original = evaluator.evaluate
    if getattr(original, "_lm_eval_editing", False):
        return

    @functools.wraps(original)
    def evaluate(*args: Any, **kwargs: Any) -> Any:
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
                from edit_hooks.utils.logs import get_logger

                get_logger("lm_eval.lm_eval_editing").warning(note)
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


def _ask_git_quietly(evaluator: ModuleType) -> None:
    """Let lm-eval look for the commit of the working folder without the error that git prints outside of a clone."""
    original = getattr(evaluator, "get_git_commit_hash", None)
    if original is None or getattr(original, "_lm_eval_editing", False):
        return

    @functools.wraps(original)
    def get_git_commit_hash() -> Any:
        try:
            asked = subprocess.run(["git", "rev-parse"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        except OSError:  # without git lm-eval reads the files itself
            return original()
        if asked.returncode == 0:
            return original()
        from lm_eval.loggers.utils import get_commit_from_path

        return get_commit_from_path(os.getcwd())  # as lm-eval does after git's error

    vars(get_git_commit_hash)["_lm_eval_editing"] = True
    vars(evaluator)["get_git_commit_hash"] = get_git_commit_hash


def extend_evaluator(evaluator: ModuleType) -> None:
    """Extend ``simple_evaluate`` and ``evaluate``, and the look for a commit."""
    _add_anomalies(evaluator)
    _compare_with_unedited(evaluator)
    _ask_git_quietly(evaluator)


def warnings_note(results: Any) -> str:
    """The warnings of the run, once each; empty for results of files."""
    date, warnings = _warnings_of[-1] if _warnings_of else (None, {})
    if not warnings or date is None or results.get("date") != date:
        return ""
    lines = [text + (f" ({number} times)" if number > 1 else "") for text, number in warnings.items()]
    return "".join(f"\nWarning: {line}" for line in lines)


def shorten_table(utils: ModuleType) -> None:
    """Let ``make_table`` print the scores of editing tasks, and below its last table what was left out and anomalies.

    A result that we cannot read is printed as lm-eval prints it.
    """
    original = utils.make_table
    if getattr(original, "_lm_eval_editing", False):
        return

    @functools.wraps(original)
    def make_table(result_dict: Any, column: str = "results", *args: Any, **kwargs: Any) -> Any:
        try:
            from lm_eval_tasks.report.printing.anomalies import table_note
            from lm_eval_tasks.report.printing.printed_table import left_out_note, shown_results

            shown = shown_results(result_dict, column)
            is_last = column != "results" or "groups" not in result_dict
            note = left_out_note(result_dict) + table_note(result_dict) + warnings_note(result_dict) if is_last else ""
        except Exception as error:
            report("could not shorten the table of results", error)
            shown, note = result_dict, ""
        printed = original(shown, column, *args, **kwargs)
        return f"{printed}{note}" if note else printed

    vars(make_table)["_lm_eval_editing"] = True
    vars(utils)["make_table"] = make_table
