"""TODO: say what is here."""

from __future__ import annotations

from collections.abc import Sequence

from edit_hooks.deltas.context_edit import ContextEdit, ContextPrompt
from edit_hooks.in_context.embeddings import nearest


def select_facts(contexts: Sequence[ContextEdit], question: str) -> ContextPrompt | None:
    """Which of several facts are told before a question: the ``num_facts`` most like it, the most alike last.

    ``None`` when none is like enough: the question is then asked as it is.
    """
    count, name, least = contexts[0].num_facts, contexts[0].embedder, contexts[0].min_similarity
    if len(contexts) <= count and least is None:
        return ContextPrompt(tuple(contexts))
    facts = [f"{context.prompt} {context.target_new}" for context in contexts]
    found = nearest(name, question, facts, count, least)
    return ContextPrompt(tuple(contexts[index] for index in reversed(found))) if found else None
