"""The result of a search as a settings file for ``editor_args``."""

from __future__ import annotations

from pathlib import Path

import yaml

from edit_hooks.utils.files import write_atomically
from lm_edit.tuning.trials import Trial


def write_settings(path: Path, trial: Trial, *, editor: str, model: str, facts: str) -> None:
    """Write a candidate's settings as YAML, with their origin in a comment.

    Args:
        model, facts: names of the model and of the facts of the search.
    """
    settings = {name: value for name, value in trial.settings.items() if name != "seed"}
    comment = (
        f"# {editor} for {model}: best of lm-edit tune on {facts}, score {trial.score:.3f}. Score it on other facts.\n"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, comment + yaml.safe_dump(settings, sort_keys=False))
