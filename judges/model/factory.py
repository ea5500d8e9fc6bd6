"""From what a user wrote to a judge."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edit_hooks.utils.errors import EditingError, near_misses
from judges.backends.base import Backend
from judges.backends.hf import LocalModel
from judges.backends.openai import Endpoint
from judges.base import Judge
from judges.model.judge import ModelJudge
from judges.prompt import load_prompt
from judges.settings import ENVIRONMENT, HOW_TO, OFF, PRESETS, JudgeSettings, read_settings
from judges.strings import RULES, StringJudge


def chosen_judge(settings: Mapping[str, Any]) -> Any | None:
    """The judge a run asks for: ``judge`` of the task's settings, else of the environment; ``None`` without one."""
    given = settings.get("judge")
    if given is None:
        given = os.environ.get(ENVIRONMENT)
    # YAML and command lines read a bare "off" as false
    return None if given in (None, "", OFF, False) else given


def make_model_judge(given: Any, *, edited: str | None = None, **overrides: Any) -> ModelJudge:
    """A model judge from anything :func:`~judges.settings.read_settings` reads.

    Args:
        edited: the checkpoint that is being edited, if any.
        overrides: settings that replace those given.

    Raises:
        EditingError: for unknown settings, and for a local judge from the edited checkpoint.
    """
    settings = read_settings(given)
    if overrides:
        settings = JudgeSettings(**{**vars(settings), **overrides})
    _refuse_edited(settings, edited)
    backend: Backend = LocalModel(settings) if settings.backend == "hf" else Endpoint(settings)
    return ModelJudge(settings, load_prompt(settings.prompt), backend)


def make_judge(given: Any, **overrides: Any) -> Judge:
    """A judge by name: a string rule (``em``, ``alias``, ``contains``, ``match_ratio``) or a model judge."""
    if isinstance(given, str) and given in RULES:
        return StringJudge(given)
    if isinstance(given, str) and given.replace("_", "").isalnum() and given not in PRESETS:
        hint = near_misses(given, [*RULES, *PRESETS])
        raise EditingError(f"judge {given!r} is unknown.{hint} String judges: {', '.join(RULES)}. Models: {HOW_TO}.")
    return make_model_judge(given, **overrides)


def _refuse_edited(settings: JudgeSettings, edited: str | None) -> None:
    if settings.backend != "hf" or edited is None or settings.allow_edited_checkpoint:
        return
    if settings.model == edited or _same_folder(settings.model, edited):
        raise EditingError(
            f"judge hf:{settings.model} is the checkpoint that is being edited: a model should not grade itself. Name "
            "another model, or set allow_edited_checkpoint=true (it is loaded a second time, without edits)."
        )


def _same_folder(first: str, second: str) -> bool:
    paths = Path(first).expanduser(), Path(second).expanduser()
    return all(path.is_dir() for path in paths) and paths[0].resolve() == paths[1].resolve()
