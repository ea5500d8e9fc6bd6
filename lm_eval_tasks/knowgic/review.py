"""The file in which people keep or reject triplets of a growing knowledge graph, and correct and add some.

A line is a JSON object with ``subject``, ``relation``, ``object`` and ``keep`` (true, false, or null for undecided).
Lines of the program also have ``id``, which identifies the triplet that the model gave, so a line with another triplet
is a correction of it. Lines of people need no ``id`` and no ``keep``; they are kept unless ``keep`` is false or null.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from edit_hooks.utils.errors import EditingError, unknown_keys_error
from edit_hooks.utils.files import read_text, write_atomically
from edit_hooks.utils.json_io import read_rows
from lm_eval_tasks.common.facts import Fact
from lm_eval_tasks.common.fields import Fields
from lm_eval_tasks.common.replies import MAX_NAME, is_usable

KEYS = ("id", "round", "subject", "relation", "object", "question", "response", "sentence", "keep")


class Proposal(NamedTuple):
    """A validated triplet that waits for a decision.

    Attributes:
        round: of the growth, from 1.
        question: it asks for the object.
        response: that of the model to the question.
        sentence: that of the reasoning from which the triplet was extracted.
    """

    round: int
    fact: Fact
    question: str
    response: str
    sentence: str


class Line(NamedTuple):
    """One line of the file; ``round`` is 0 where people gave none."""

    id: str | None
    round: int
    fact: Fact
    keep: bool | None

    @property
    def is_own(self) -> bool:
        """Whether the triplet is one of people: added, or corrected."""
        return self.id != triplet_id(self.fact)


class Review:
    """The decisions of a file."""

    def __init__(self, lines: Sequence[Line] = ()) -> None:
        self.lines = lines
        self._by_id = {line.id: line for line in lines if line.id is not None}
        self._given = {line.fact for line in lines if line.is_own and line.keep}

    def decision(self, fact: Fact) -> bool | None:
        """Whether a triplet of the model is kept; ``None`` without a decision.

        A corrected one is not kept; one that people give as well is.
        """
        if fact in self._given:
            return True
        line = self._by_id.get(triplet_id(fact))
        if line is None or line.keep is None:
            return None
        return line.keep and not line.is_own

    def own(self, number: int) -> list[Fact]:
        """The triplets of people for a round; 0 is the start."""
        return [line.fact for line in self.lines if line.round == number and line.is_own and line.keep]

    def num_undecided(self, number: int) -> int:
        """Added lines for a round without a decision."""
        return sum(line.round == number and line.id is None and line.keep is None for line in self.lines)

    def num_unmet(self, proposed: Collection[Fact], rounds: int) -> int:
        """Lines without effect: about triplets that were not proposed, or for a round that was not completed."""
        known = set(map(triplet_id, proposed))
        return sum(line.round > rounds if line.is_own else line.id not in known for line in self.lines)

    def lacks(self, proposal: Proposal) -> bool:
        """Whether the file has no line about a triplet of the model."""
        return triplet_id(proposal.fact) not in self._by_id


def triplet_id(fact: Fact) -> str:
    """First twelve hex digits of the SHA-256 of a triplet."""
    return hashlib.sha256(json.dumps(fact).encode()).hexdigest()[:12]


def read_review(path: Path) -> Review:
    """Read the file; a missing or empty one has no decisions.

    Raises:
        EditingError: with file and line, for another layout, and for two lines with one id.
    """
    if not path.exists() or not (text := read_text(path, "review file").strip()):
        return Review()
    if text.startswith("["):
        raise EditingError(f"{path} is a JSON list; one JSON object per line is needed, so that lines can be appended.")
    lines: list[Line] = []
    ids: set[str] = set()
    for where, record in read_rows(path, "review file"):
        line = _line(where, record)
        lines.append(line)
        if line.id is not None:
            if line.id in ids:
                raise EditingError(
                    f"{where}: a second line with id {line.id!r}; keep one, or drop the id of the other."
                )
            ids.add(line.id)
    return Review(lines)


def _line(where: str, record: object) -> Line:
    if not isinstance(record, dict):
        raise EditingError(f"{where} is no JSON object; one with subject, relation, object and keep is needed.")
    if unknown := set(record) - set(KEYS):
        raise unknown_keys_error(f"key in {where}:", unknown, KEYS)
    fields = Fields(record, where)
    fact = Fact(*(" ".join(fields.text(name).split()) for name in ("subject", "relation", "object")))
    for name, part in zip(("subject", "relation", "object"), fact, strict=True):
        if not is_usable(part):
            raise fields.error(name, f"is {part!r}; at most {MAX_NAME} characters without brackets are needed")
    identity, number = record.get("id"), record.get("round", 0)
    keep = record.get("keep", None if identity is not None else True)
    if identity is not None and not isinstance(identity, str):
        raise fields.error("id", "is no text; leave it as it was written, or drop it from a line of your own")
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise fields.error("round", f"is {number!r}; a whole number is needed")
    if keep is not None and not isinstance(keep, bool):
        raise fields.error("keep", f"is {keep!r}; true, false or null is needed")
    return Line(identity, number, fact, keep)


def append_proposals(path: Path, proposals: Sequence[Proposal]) -> None:
    """Append undecided triplets to the file; the lines in it stay as they are."""
    before = read_text(path, "review file") if path.exists() else ""
    if before and not before.endswith("\n"):
        before += "\n"
    rows = [
        {
            "id": triplet_id(proposal.fact),
            "round": proposal.round,
            **proposal.fact._asdict(),
            "question": proposal.question,
            "response": proposal.response,
            "sentence": proposal.sentence,
            "keep": None,
        }
        for proposal in proposals
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    # Half of a surrogate pair, which a reply may hold, becomes its JSON escape.
    write_atomically(path, before + text.encode("utf-8", "backslashreplace").decode())
