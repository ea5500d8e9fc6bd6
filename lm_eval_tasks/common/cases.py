"""TODO: say what is here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from edit_hooks.request import EditRequest


class Question(NamedTuple):
    """A prompt, the answer it should get, and the one that should lose against it where there is one."""

    prompt: str
    wanted: str
    other: str | None = None


@dataclass(frozen=True)
class Case:
    """An edit, rewordings of its prompt (wanted: the new answer), and other facts (wanted: their own answer)."""

    request: EditRequest
    paraphrases: Sequence[Question]
    neighbors: Sequence[Question]
