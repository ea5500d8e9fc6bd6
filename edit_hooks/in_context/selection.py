"""Selection of the facts stated before a question."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from edit_hooks.deltas.context_edit import ContextEdit, ContextPrompt
from edit_hooks.in_context.embeddings import most_similar
from edit_hooks.in_context.fact_memory import load_memory

_QUESTION = re.compile(r"(?:^|\n)(?:Q|Question):")
# The bare question at the end of a prompt.
_LAST_QUESTION = re.compile(rf"{_QUESTION.pattern}[ \t]*([^\n]*?)\s*(?:\b(?:A|Answer|Thoughts):)?\s*$")


def bare_question(prompt: str) -> str:
    """The question of a prompt without demonstrations, "Q:" and "A:"; a prompt of another form unchanged."""
    match = _LAST_QUESTION.search(prompt.rstrip())
    return match.group(1) if match else prompt.strip()


class FactSelection(NamedTuple):
    """The facts stated before a question.

    Attributes:
        prompt: the facts; ``None`` if none is similar enough: the prompt is then left unchanged.
        best_fact: index of the fact that fits the question best, stated or not; ``None`` if nothing was compared.
        scope_score: its score, of a memory's scope classifier.
        similarity: its cosine similarity, where there is no memory.
    """

    prompt: ContextPrompt | None
    best_fact: int | None = None
    scope_score: float | None = None
    similarity: float | None = None


def select_facts(contexts: Sequence[ContextEdit], question: str, device: str = "cpu") -> FactSelection:
    """The ``num_facts`` facts most similar to a question, the most similar last; or the one that a memory chooses.

    The settings (``num_facts``, ``embedder``, ``min_similarity``, ``memory``) are those of the first fact. Of a prompt
    with several questions only the last is compared: demonstrations before it are the same for every question, and
    longer.

    Args:
        device: where the models of a memory run.
    """
    settings = contexts[0]
    query = bare_question(question) if len(_QUESTION.findall(question)) > 1 else question
    if settings.memory is not None:
        best = load_memory(settings.memory, settings.embedder, device).best(contexts, query)
        return FactSelection(
            ContextPrompt((contexts[best.number],)) if best.in_scope else None, best.number, best.score
        )
    if len(contexts) == 1 and settings.min_similarity is None:
        return FactSelection(ContextPrompt(tuple(contexts)))
    facts = [context.statement for context in contexts]
    nearest = most_similar(settings.embedder, query, facts, settings.num_facts)
    limit = -math.inf if settings.min_similarity is None else settings.min_similarity
    stated = [fact for fact in nearest if fact.similarity >= limit]
    prompt = ContextPrompt(tuple(contexts[fact.number] for fact in reversed(stated))) if stated else None
    return FactSelection(prompt, best_fact=nearest[0].number, similarity=nearest[0].similarity)
