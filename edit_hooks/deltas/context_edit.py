"""Edits that are text before the question: a fact, optionally after demonstrations.

The format is that of in-context knowledge editing (IKE): demonstrations of two lines, ``New Fact: {prompt} {target}``
and ``Prompt: {question} {answer}``, then the edited fact and the question. The model class inserts the text into
prompts (chat templates, truncation).

A fact with :class:`MemoryModels` (SERAC) precedes the question as plain text: ``{prompt} {target} {question}``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from edit_hooks.prompt_context import NEW_FACT, QUESTION_PREFIX, SPACE, fact_line, statement
from edit_hooks.utils.settings.numbers import Range
from edit_hooks.utils.text.readable import readable

SEPARATOR = "\n\n"
MOST_ROUNDS = Range("a whole number from 1 to 1000", least=1, most=1000)


def format_demonstration(fact: str, question: str, answer: str, separator: str | None = None) -> str:
    """One demonstration: the line of a fact, a question, and the correct answer given the fact.

    Args:
        separator: white space between question and answer, if their record has one.
    """
    return f"{fact}{QUESTION_PREFIX}{statement(question, answer, separator)}"


def before_question(text: str) -> str:
    """A fact as plain text before a question: one space ends it in every script, since it has no period."""
    return text + SPACE


@dataclass(frozen=True)
class MemoryModels:
    """The models behind a memory of facts: one chooses the fact that concerns a question, one answers that question.

    Attributes:
        artifact: folder of the trained models, or ``identity``: the embedder of the fact chooses, and the base model
            answers.
        digest: SHA-256 of the artifact's file; empty without a folder.
    """

    artifact: str
    digest: str = ""


@dataclass(frozen=True)
@readable
class ContextEdit:
    """One fact for prompts.

    Attributes:
        prompt, target_new: the fact, as in the edit request (subject filled in).
        separator: white space between them.
        demonstrations: formatted demonstrations, the most similar one last.
        include_fact: whether the fact is stated; ``False`` shows demonstrations only (a control).
        num_facts: number of facts stated before a question if there are several, the most similar ones.
        embedder: similarity measure of facts and questions; see :mod:`edit_hooks.in_context.embeddings`.
        min_similarity: smallest cosine of fact and question at which the fact is stated; ``None``: before every one.
        rounds: most rounds of a generated answer, with a fact between two of them; 0: the fact precedes the question
            (:mod:`edit_hooks.in_context.rounds`).
        memory: models that choose the fact of a question and answer it (:mod:`edit_hooks.in_context.fact_memory`);
            ``None``: the facts most similar to a question are stated, and the base model answers.
        choice: how the reply is read by which the model chooses one of the ``num_facts`` most similar facts
            (:mod:`edit_hooks.in_context.fact_choice`); ``None``: all of them are stated.
    """

    prompt: str
    target_new: str
    demonstrations: tuple[str, ...] = ()
    include_fact: bool = True
    num_facts: int = 1
    embedder: str = "words"
    min_similarity: float | None = None
    rounds: int = 0
    memory: MemoryModels | None = None
    separator: str = SPACE
    choice: Literal["released", "named"] | None = None

    @property
    def statement(self) -> str:
        """The fact as one text."""
        return statement(self.prompt, self.target_new, self.separator)

    @property
    def line(self) -> str:
        """The line that states the fact."""
        return fact_line(self.prompt, self.target_new, self.separator)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able mapping for :meth:`from_dict`."""
        return {**asdict(self), "demonstrations": list(self.demonstrations)}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> ContextEdit:
        """Read a mapping of :meth:`to_dict`."""
        memory = None if record["memory"] is None else MemoryModels(**record["memory"])
        return cls(**{**record, "demonstrations": tuple(record["demonstrations"]), "memory": memory})

    def before(self, question: str = "") -> str:
        """The text before a question if this is the only fact."""
        return ContextPrompt((self,)).text(len(self.demonstrations), question)


class ContextPrompt(NamedTuple):
    """The facts stated before one question, the most similar one last; only its demonstrations are shown."""

    facts: tuple[ContextEdit, ...]

    @property
    def demonstrations(self) -> tuple[str, ...]:
        return self.facts[-1].demonstrations

    def text(self, num_demonstrations: int, question: str = "") -> str:
        """The text before a question, with the last ``num_demonstrations`` demonstrations.

        A question that states a fact of its own, in the format of a demonstration, follows the demonstrations directly:
        that is the reverse question of BAKE's release.
        """
        if self.facts[-1].memory is not None:
            return "".join(before_question(fact.statement) for fact in self.facts)
        shown = self.demonstrations[len(self.demonstrations) - num_demonstrations :]
        before = "".join(demonstration + SEPARATOR for demonstration in shown)
        if self.states_fact(question):
            return before
        facts = [fact.line for fact in self.facts if fact.include_fact]
        return f"{before}{''.join(facts)}{QUESTION_PREFIX}"

    def num_facts(self, question: str) -> int:
        """The number of facts in the text before a question."""
        if self.facts[-1].memory is not None:
            return len(self.facts)
        return 0 if self.states_fact(question) else sum(fact.include_fact for fact in self.facts)

    def has_fact(self, question: str) -> bool:
        """Whether a fact stands before a question or in it."""
        return self.num_facts(question) > 0 or self.states_fact(question)

    @staticmethod
    def states_fact(question: str) -> bool:
        """Whether a question begins with a fact of its own."""
        return question.startswith(NEW_FACT)
