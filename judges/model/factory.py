"""Build a judge or a writer from a user's choice: a name, a settings file, JSON text or a mapping."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edit_hooks.utils.errors import EditingError, near_misses
from judges.backends.base import JUDGE, WRITER, Backend, Role
from judges.backends.hf import HFBackend
from judges.backends.openai import OpenAIBackend
from judges.base import Judge
from judges.keys import refuse_keys
from judges.model.judge import ModelJudge
from judges.model.writer import Writer
from judges.prompt import load_prompt
from judges.settings import HOW_TO, JUDGE_VARIABLE, OFF, PRESETS, JudgeSettings, read_settings
from judges.string_judge import RULES, StringJudge

WRITER_REPLY_TOKENS = 128  # unless the settings name a limit; that of judges is for one letter
WRITER_HOW_TO = (
    "openai:MODEL (the key in OPENAI_API_KEY), openai:MODEL@http://HOST:PORT/v1 (any compatible server), hf:MODEL (a "
    "local model), FILE.yaml (settings as of a judge), JSON text"
)


def chosen_judge(settings: Mapping[str, Any]) -> object | None:
    """Return the user's choice of judge, not yet validated; ``None`` if there is none.

    ``judge`` of the task's settings precedes the environment variable ``LM_EDIT_JUDGE``.
    """
    choice = settings.get("judge")
    if choice is None:
        choice = os.environ.get(JUDGE_VARIABLE)
    # YAML and command lines read a bare "off" as false.
    return None if choice in (None, "", OFF, False) else choice


def make_model_judge(source: object, *, edited: str | None = None, **overrides: Any) -> ModelJudge:
    """Build a model judge.

    Args:
        source: a choice of judge, as for :func:`~judges.settings.read_settings`.
        edited: the checkpoint under edits, if any.
        overrides: settings that replace those of ``source``.

    Raises:
        EditingError: for unknown settings, and for a local judge from the edited checkpoint.
    """
    settings = read_settings(source)
    if overrides:
        settings = JudgeSettings(**{**vars(settings), **overrides})
    _refuse_edited_checkpoint(settings, edited)
    return ModelJudge(settings, load_prompt(settings.prompt), _make_backend(settings, JUDGE))


def make_writer(source: object, *, reply_tokens: int = WRITER_REPLY_TOKENS, **overrides: Any) -> Writer:
    """Build a writer, which is named as a model judge is.

    Args:
        source: a choice of model, as for :func:`~judges.settings.read_settings`.
        reply_tokens: limit of a reply where ``source`` names none.
        overrides: settings that replace those of ``source``.

    Raises:
        EditingError: for unknown settings and values, and for settings that only a judge has.
    """
    try:
        settings = read_settings(source, defaults={"max_reply_tokens": reply_tokens}, how_to=WRITER_HOW_TO)
        settings = JudgeSettings(**{**vars(settings), **overrides})
    except EditingError as error:
        raise EditingError(f"a writer is named as a judge is: {error}") from None
    if settings.prompt != JudgeSettings.prompt:
        raise EditingError(
            "the prompt of a judge has no use for a writer; drop the setting 'prompt', or use another preset."
        )
    if settings.ask_again is not None:
        raise EditingError("ask_again is about verdicts, which a writer does not give; drop the setting.")
    return Writer(settings, _make_backend(settings, WRITER))


def _make_backend(settings: JudgeSettings, role: Role) -> Backend:
    return HFBackend(settings, role=role) if settings.backend == "hf" else OpenAIBackend(settings, role=role)


def make_judge(source: object, **overrides: Any) -> Judge:
    """Build a judge: a string rule (``em``, ``alias``, ``contains``, ``match_ratio``) or a model judge.

    Raises:
        EditingError: for unknown names and settings.
    """
    if isinstance(source, str) and source in RULES:
        return StringJudge(source)
    refuse_keys("judge", source)
    if isinstance(source, str) and source.replace("_", "").isalnum() and source not in PRESETS:
        hint = near_misses(source, [*RULES, *PRESETS])
        raise EditingError(f"judge {source!r} is unknown.{hint} String judges: {', '.join(RULES)}. Models: {HOW_TO}.")
    return make_model_judge(source, **overrides)


def _refuse_edited_checkpoint(settings: JudgeSettings, edited: str | None) -> None:
    if settings.backend != "hf" or edited is None or settings.allow_edited_checkpoint:
        return
    if settings.model == edited or _is_same_folder(settings.model, edited):
        raise EditingError(
            f"judge hf:{settings.model} is the checkpoint that is being edited: a model should not grade itself. Name "
            "another model, or set allow_edited_checkpoint=true (it is loaded a second time, without edits)."
        )


def _is_same_folder(first: str, second: str) -> bool:
    paths = Path(first).expanduser(), Path(second).expanduser()
    return all(path.is_dir() for path in paths) and paths[0].resolve() == paths[1].resolve()
