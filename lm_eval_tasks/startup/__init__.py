"""Extensions of lm-eval, applied by the start-up hook right after a module of lm-eval has run.

Imported with lm-eval itself, so a module here imports the rest of the package inside of functions.
"""

from __future__ import annotations

from types import ModuleType


def extend(name: str, module: ModuleType) -> None:
    """Extend a module of lm-eval that has just run.

    Args:
        name: its full name; one of those that the start-up hook follows.
    """
    from lm_eval_tasks.startup.command import allow_braces, print_user_errors
    from lm_eval_tasks.startup.evaluation import extend_evaluator, shorten_table
    from lm_eval_tasks.startup.task_folders import add_task_folders

    {
        "lm_eval.tasks.manager": add_task_folders,
        "lm_eval.evaluator": extend_evaluator,
        "lm_eval.utils": shorten_table,
        "lm_eval._cli.utils": allow_braces,
        "lm_eval._cli.harness": print_user_errors,
    }[name](module)
