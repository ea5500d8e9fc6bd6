"""Edits that are text before the prompt: a fact, with or without demonstrations of how to use one.

The wording is that of in-context knowledge editing (IKE): blocks of two lines, ``New Fact: {prompt} {target}`` and
``Prompt: {question} {answer}``; the last block states the edit and stops after the question. Where the text goes (chat
templates) and what of it fits is decided by the model class, which builds the prompt again from text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

QUESTION, BLOCK_END = "Prompt: ", "\n\n"
# Fields that saved edits know under an earlier name; the checksum of a saved edit covers these names.
FILE_NAMES = {"include_fact": "states_fact", "min_similarity": "min_likeness"}


def fact_line(prompt: str, target: str) -> str:
    """The line that tells a fact, with its line break."""
    return f"New Fact: {prompt} {target}\n"


def block(prompt: str, target: str, question: str, answer: str) -> str:
    """One demonstration: the fact, a question, and the answer wanted after reading the fact."""
    return f"{fact_line(prompt, target)}{QUESTION}{question} {answer}"


@dataclass(frozen=True)
class ContextEdit:
    """One fact that is told to the model before a question.

    Attributes:
        prompt, target_new: the fact, as in the edit request (subject filled in).
        demonstrations: whole blocks, the one most alike last.
        states_fact: whether the fact itself is told; without it only demonstrations are shown (a control).
        num_facts: of several facts, how many are told: those most like the question.
        embedder: what measures likeness; see :mod:`edit_hooks.in_context.embeddings`.
        min_likeness: the fact is told only before questions at least so like it (cosine); ``None``: before all.
    """

    prompt: str
    target_new: str
    demonstrations: tuple[str, ...] = ()
    include_fact: bool = True
    num_facts: int = 1
    embedder: str = "words"
    min_similarity: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able mapping from which :meth:`from_dict` makes an equal one."""
        record = {**asdict(self), "demonstrations": list(self.demonstrations)}
        return {FILE_NAMES.get(name, name): value for name, value in record.items()}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> ContextEdit:
        current = {name: name for name in record} | {old: name for name, old in FILE_NAMES.items() if old in record}
        fields = {current[name]: value for name, value in record.items()}
        return cls(**{**fields, "demonstrations": tuple(record["demonstrations"])})

    def before(self, question: str = "") -> str:
        """The text in front of a question when this is the only fact."""
        return ContextPrompt((self,)).before(len(self.demonstrations))


class ContextPrompt(NamedTuple):
    """The facts told before one question, the one most like it last; that one's demonstrations are shown."""

    facts: tuple[ContextEdit, ...]

    @property
    def demonstrations(self) -> tuple[str, ...]:
        return self.facts[-1].demonstrations

    def before(self, num_demonstrations: int) -> str:
        """The text in front of the question; what does not fit is left out from the far end, block by block."""
        shown = self.demonstrations[len(self.demonstrations) - num_demonstrations :]
        told = [fact_line(fact.prompt, fact.target_new) for fact in self.facts if fact.include_fact]
        return "".join(text + BLOCK_END for text in shown) + "".join(told) + QUESTION
