"""The file in which people keep or reject triplets of a growing knowledge graph, and correct and add some.

A line is a JSON object with ``subject``, ``relation``, ``object`` and ``keep`` (true, false, or null for undecided).
Lines of the program also have ``id``, which identifies the triplet that the model gave, so a line with another triplet
is a correction of it. Lines of people need no ``id`` and no ``keep``; they are kept unless ``keep`` is false or null.

Triplets that failed validation are listed with ``problem`` and ``keep: false``, once for every question that was asked
about them. Such a line with another triplet, or another ``question`` and ``statement``, is a correction: with
``keep: true`` it is validated again. Failed questions about chains are lines with ``chain`` (a list of triplets); one
with another ``question`` is asked.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from edit_hooks.utils.errors import EditingError, unknown_keys_error
from edit_hooks.utils.storage.files import read_text, write_atomically
from edit_hooks.utils.storage.json_io import json_lines, read_rows
from lm_edit.builders.facts import Fact, read_facts
from lm_edit.builders.replies import MAX_NAME, is_usable
from lm_eval_tasks.common.records.fields import Fields

KEYS = (
    "id", "round", "subject", "relation", "object", "question", "statement", "response", "sentence", "problem", "keep",
)  # fmt: skip
CHAIN_KEYS = ("id", "round", "chain", "question", "response", "problem")
FAILED, CHAIN = "failed", "chain"  # first parts of ids

ChainPath = tuple[Fact, ...]


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

    @property
    def id(self) -> str:
        """Identity of its line."""
        return triplet_id(self.fact)

    def row(self) -> dict[str, Any]:
        """Its line, without decision."""
        texts = {"question": self.question, "response": self.response, "sentence": self.sentence}
        return {"id": self.id, "round": self.round, **self.fact._asdict(), **texts, "keep": None}


class Failure(NamedTuple):
    """A triplet that failed validation, with the texts that were tried last.

    Attributes:
        round: of the growth; 0 is the start.
        problem: the reason.
    """

    round: int
    fact: Fact
    question: str
    statement: str
    response: str
    sentence: str
    problem: str

    @property
    def id(self) -> str:
        """Identity of its line: of the triplet, and of the texts."""
        return f"{FAILED}-{triplet_id(self.fact)}-{_digest([self.question, self.statement])}"

    def row(self) -> dict[str, Any]:
        """Its line; it stays out unless people correct it."""
        texts = {name: getattr(self, name) for name in ("question", "statement", "response", "sentence", "problem")}
        return {"id": self.id, "round": self.round, **self.fact._asdict(), **texts, "keep": False}


class ChainFailure(NamedTuple):
    """A question about a chain that was not answered with the last entity, or the lack of a usable one."""

    round: int
    path: ChainPath
    question: str
    response: str
    problem: str

    @property
    def id(self) -> str:
        """Identity of its line: of the chain, and of the question."""
        return f"{CHAIN}-{_digest(self.path)}-{_digest(self.question)}"

    def row(self) -> dict[str, Any]:
        """Its line."""
        texts = {"question": self.question, "response": self.response, "problem": self.problem}
        return {"id": self.id, "round": self.round, "chain": [list(fact) for fact in self.path], **texts}


class Line(NamedTuple):
    """One line about a triplet; ``round`` is 0 where people gave none, texts are empty where the line has none.

    Attributes:
        where: file and line, for messages.
    """

    id: str | None
    round: int
    fact: Fact
    keep: bool | None
    question: str = ""
    statement: str = ""
    where: str = "the review"

    @property
    def is_failed(self) -> bool:
        """Whether the line is about a triplet that failed validation."""
        return self.id is not None and self.id.startswith(f"{FAILED}-")

    @property
    def has_other_fact(self) -> bool:
        """Whether the triplet is one of people: added, or corrected."""
        return self.id is None or self.id.removeprefix(f"{FAILED}-").partition("-")[0] != triplet_id(self.fact)

    @property
    def has_other_wording(self) -> bool:
        """Whether question and statement are those of people."""
        if self.is_failed:
            return str(self.id).rpartition("-")[2] != _digest([self.question, self.statement])
        return self.id is None and bool(self.question or self.statement)

    @property
    def is_own(self) -> bool:
        """Whether people gave the triplet or its wording."""
        return self.has_other_fact or self.has_other_wording


class ChainLine(NamedTuple):
    """One line about a question about a chain."""

    id: str | None
    path: ChainPath
    question: str
    where: str = "the review"

    @property
    def is_own(self) -> bool:
        """Whether the question is one of people."""
        return self.id is None or self.id.rpartition("-")[2] != _digest(self.question)


class Review:
    """The decisions of a file."""

    def __init__(self, lines: Sequence[Line] = (), chains: Sequence[ChainLine] = ()) -> None:
        self.lines, self.chains = lines, chains
        self._by_id = {line.id: line for line in lines if line.id is not None}
        self._ids = {*self._by_id, *(line.id for line in chains)}
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

    def own(self, number: int) -> list[Line]:
        """The triplets and wordings of people for a round; 0 is the start."""
        return [line for line in self.lines if line.round == number and line.is_own and line.keep]

    def chain_questions(self) -> Mapping[ChainPath, Sequence[str]]:
        """The questions of people about chains."""
        found: dict[ChainPath, list[str]] = {}
        for line in self.chains:
            if line.is_own:
                found.setdefault(line.path, []).append(line.question)
        return found

    def num_undecided(self, number: int) -> int:
        """Lines for a round without a decision: added ones, and failed triplets."""
        return sum(
            line.round == number and line.keep is None and (line.id is None or line.is_failed) for line in self.lines
        )

    def num_idle(self) -> int:
        """Lines of failed triplets without effect: corrected with ``keep: false``, or uncorrected with ``true``."""
        return sum(line.is_failed and line.keep is not None and line.keep != line.is_own for line in self.lines)

    def num_unmet(self, proposed: Collection[Fact], rounds: int, asked: Collection[ChainPath] = ()) -> int:
        """Lines without effect: about triplets or chains that did not occur, or for a round that was not completed."""
        known = set(map(triplet_id, proposed))
        unmet = sum(
            line.round > rounds if line.is_own else not line.is_failed and line.id not in known for line in self.lines
        )
        return unmet + sum(line.is_own and line.path not in asked for line in self.chains)

    def lacks(self, one: Proposal | Failure | ChainFailure) -> bool:
        """Whether the file has no line about it."""
        return one.id not in self._ids


def triplet_id(fact: Fact) -> str:
    """First twelve hex digits of the SHA-256 of a triplet."""
    return hashlib.sha256(json.dumps(fact).encode()).hexdigest()[:12]


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:8]


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
    chains: list[ChainLine] = []
    ids: set[str | None] = set()
    for where, record in read_rows(path, "review file"):
        if not isinstance(record, dict):
            raise EditingError(f"{where} is no JSON object; one with subject, relation, object and keep is needed.")
        known = CHAIN_KEYS if "chain" in record else KEYS
        if unknown := set(record) - set(known):
            raise unknown_keys_error(f"key in {where}:", unknown, known)
        fields = Fields(record, where)
        identity = record.get("id")
        if identity is not None and not isinstance(identity, str):
            raise fields.error("id", "is no text; leave it as it was written, or drop it from a line of your own")
        if identity is not None and identity in ids:
            raise EditingError(f"{where}: a second line with id {identity!r}; keep one, or drop the id of the other.")
        ids |= {identity} - {None}
        if "chain" in record:
            chains.append(_chain_line(fields, identity))
        else:
            lines.append(_line(fields, identity))
    return Review(lines, chains)


def _line(fields: Fields, identity: str | None) -> Line:
    fact = Fact(*(" ".join(fields.text(name).split()) for name in ("subject", "relation", "object")))
    for name, part in zip(("subject", "relation", "object"), fact, strict=True):
        if not is_usable(part):
            raise fields.error(name, f"is {part!r}; at most {MAX_NAME} characters without brackets are needed")
    number = fields.record.get("round", 0)
    keep = fields.record.get("keep", None if identity is not None else True)
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise fields.error("round", f"is {number!r}; a whole number is needed")
    if keep is not None and not isinstance(keep, bool):
        raise fields.error("keep", f"is {keep!r}; true, false or null is needed")
    question, statement = (_optional_text(fields, name) for name in ("question", "statement"))
    return Line(identity, number, fact, keep, question, statement, fields.where)


def _chain_line(fields: Fields, identity: str | None) -> ChainLine:
    facts = tuple(read_facts(fields, "chain"))
    return ChainLine(identity, facts, _optional_text(fields, "question"), fields.where)


def _optional_text(fields: Fields, name: str) -> str:
    value = fields.record.get(name)
    if value is not None and not isinstance(value, str):
        raise fields.error(name, f"is {value!r}; a text is needed")
    return value or ""


def append_lines(path: Path, found: Sequence[Proposal | Failure | ChainFailure]) -> None:
    """Append lines to the file; those in it stay as they are."""
    before = read_text(path, "review file") if path.exists() else ""
    if before and not before.endswith("\n"):
        before += "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, before + json_lines(one.row() for one in found))
