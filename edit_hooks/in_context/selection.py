"""Selection of the facts stated before a question."""

from __future__ import annotations

from collections.abc import Sequence

from edit_hooks.deltas.context_edit import ContextEdit, ContextPrompt
from edit_hooks.in_context.embeddings import most_similar


def select_facts(contexts: Sequence[ContextEdit], question: str) -> ContextPrompt | None:
    """The ``num_facts`` facts most similar to a question, the most similar last.

    The settings (``num_facts``, ``embedder``, ``min_similarity``) are those of the first fact.

    Returns:
        ``None`` if no fact is similar enough; the prompt is then left unchanged.
    """
    settings = contexts[0]
    if len(contexts) <= settings.num_facts and settings.min_similarity is None:
        return ContextPrompt(tuple(contexts))
    facts = [f"{context.prompt} {context.target_new}" for context in contexts]
    indices = most_similar(settings.embedder, question, facts, settings.num_facts, settings.min_similarity)
    return ContextPrompt(tuple(contexts[index] for index in reversed(indices))) if indices else None
