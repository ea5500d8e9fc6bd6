"""Files that evaluations wrote, by the command and from Python: what tests about result files start from."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import lm_eval
import lm_eval.tasks.manager
import pytest
from lm_eval.__main__ import cli_evaluate
from lm_runs import SHORT
from saved_results import evaluate_here

import lm_eval_editing_autoload
from edit_hooks.lm.model import EditedHFLM

LIMIT = 3
SETTINGS = {"num_steps": 1}


class RealRuns(NamedTuple):
    """Folders of runs of one editor on a tiny model, each with another benchmark and started in another way.

    Attributes:
        command: ``bake_es`` by the command line.
        mapping: ``qaedit_wild`` from Python, with the arguments as a mapping and a relative path of the model.
        model: ``bake_gs`` from Python, with the model as an object.
        unedited: all of them, of the unedited model.
    """

    command: Path
    mapping: Path
    model: Path
    unedited: Path

    @property
    def edited(self) -> list[Path]:
        """The folders of the editor's runs."""
        return [self.command, self.mapping, self.model]


def make_real_runs(root: Path, model: Path) -> RealRuns:
    """Evaluate; about five seconds."""
    lm_eval_editing_autoload.install()
    runs = RealRuns(*(root / name for name in RealRuns._fields))
    options = f"pretrained={model},store=off,data=mini"
    words = ["--limit", str(LIMIT), "--gen_kwargs", ",".join(f"{name}={value}" for name, value in SHORT.items())]
    by_command(runs.command, f"{options},editor=ft_m,editor_args=num_steps:1", "bake_es", *words)
    given = {"pretrained": os.path.relpath(model), "editor": "ft_m", "editor_args": dict(SETTINGS)}
    given |= {"store": "off", "data": "mini"}
    evaluate_here(runs.mapping, {**given, "mode": "single", "icl": False}, ["qaedit_wild"], "mini", limit=LIMIT)
    with pytest.MonkeyPatch.context() as patch:
        lm = EditedHFLM(**given, device="cpu", edit_context="bare", max_length=128)
        # As `evaluate_here` writes: the files of `simple_evaluate(model=lm)`.
        patch.setattr(lm_eval, "simple_evaluate", _with_model(lm_eval.simple_evaluate, lm))
        evaluate_here(runs.model, "", ["bake_gs"], "mini", limit=float(LIMIT))
    by_command(runs.unedited, f"{options},mode=none", "bake_es,bake_gs,qaedit_wild", *words)
    return runs


def _with_model(evaluate: Callable[..., Any], lm: EditedHFLM) -> Callable[..., Any]:
    def evaluate_model(**options: Any) -> Any:
        return evaluate(**{**options, "model": lm, "model_args": None})

    return evaluate_model


def by_command(folder: Path, model_args: str, tasks: str, *words: str) -> None:
    """`lm_eval --model edited_hf ... --log_samples --output_path FOLDER` in this process."""
    command = ["lm_eval", "--model", "edited_hf", "--model_args", model_args, "--tasks", tasks, "--device", "cpu"]
    with pytest.MonkeyPatch.context() as patch:
        # lm-eval's own thousands of tasks are not indexed
        patch.setattr(lm_eval.tasks.manager, "__file__", str(folder.parent / "built_in" / "manager.py"))
        patch.setattr("sys.argv", [*command, "--log_samples", "--output_path", str(folder), *words])
        cli_evaluate()


def result_file(folder: Path) -> Path:
    """The one result file below a folder."""
    (path,) = folder.rglob("results_*.json")
    return path


def content_of(folder: Path) -> dict[str, Any]:
    """What the one result file below a folder holds."""
    content: dict[str, Any] = json.loads(result_file(folder).read_text(encoding="utf-8"))
    return content


def facts_of_model(model_args: Any, **changes: Any) -> dict[str, Any]:
    """``config`` of a result file as `simple_evaluate` makes it, without an evaluation.

    Args:
        model_args: mapping of arguments of `edited_hf`. changes: of the config, as ``limit``.
    """
    lm = EditedHFLM(**{"device": "cpu", "store": "off", **copy.deepcopy(model_args)})
    config = {"model": "edited_hf", "model_args": model_args, "limit": None, **lm.get_model_info(), **changes}
    saved: dict[str, Any] = json.loads(json.dumps(config, default=str))
    return saved
