"""The result of a search as a settings file for ``editor_args``."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

from edit_hooks.utils.printable import printable
from edit_hooks.utils.storage.files import write_atomically
from edit_hooks.utils.storage.hashing import key_of
from lm_edit.tuning.trials import Trial
from lm_eval_tasks.common.records.cases import Case

MAX_LISTED = 100  # facts by name; of more their number and a digest
WIDTH = 118  # characters of a line of names


class SearchRecord(NamedTuple):
    """The origin of the settings, in words.

    Attributes:
        model: its name, with what decides which weights are loaded.
        facts: their number and where they come from.
        cases: the facts of the search.
        seed: of the editor and of the search, where no setting of the editor holds it.
    """

    editor: str
    model: str
    facts: str
    cases: Sequence[Case]
    seed: int | None = None


def write_settings(path: Path, trial: Trial, record: SearchRecord) -> None:
    """Write a candidate's settings as YAML, with their origin in a comment.

    A seed that is not among the user's settings stays out of the file, where it would replace those of runs that
    repeat an evaluation with several; the comment names it unless it is the default.
    """
    settings = {name: value for name, value in trial.settings.items() if name != "seed" or record.seed is None}
    comment = [
        f"{record.editor} for {record.model}: best of lm-edit tune on {record.facts}, score {trial.score:.3f}. "
        "Score it on other facts.",
        *textwrap.wrap(f"Facts: {list_cases(record.cases)}", WIDTH, break_long_words=False, break_on_hyphens=False),
    ]
    if record.seed:
        comment.append(f"Edits were made with seed={record.seed}, an option of edited_hf.")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(map(_comment_line, comment)) + yaml.safe_dump(settings, sort_keys=False))


def list_cases(cases: Sequence[Case]) -> str:
    """Facts by label, or their number and a digest of the list of names."""
    names = [case.request.label for case in cases]
    if len(names) > MAX_LISTED:
        return f"{len(names)} cases, SHA-256 of the JSON list of their names: {key_of(names)}"
    return ", ".join(names)


def _comment_line(text: str) -> str:
    """A line with users' texts, in which a line feed would end the comment."""
    text = text.replace("\n", "\\n")
    return f"# {printable(text, limit=sys.maxsize)}\n"
