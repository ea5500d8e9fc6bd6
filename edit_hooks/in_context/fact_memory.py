"""Memories of facts with models of their own (SERAC): which fact concerns a question, and who answers it.

A question whose best score over the memory is above :data:`~edit_hooks.in_context.scope_classifier.THRESHOLD` is
answered by the counterfactual model with the best fact before it, any other question by the base model as if there were
no edit. Facts of a stream are in one memory. Of facts with equal scores (an edit that replaces an earlier one of the
same prompt) the last counts.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from edit_hooks.deltas.context_edit import ContextEdit, MemoryModels
from edit_hooks.in_context.embeddings import Embedder, load_embedder
from edit_hooks.in_context.memory_artifact import MEMORY_MODELS, load_models
from edit_hooks.in_context.scope_classifier import THRESHOLD, ScopeTexts, fact_text, scope_scores
from edit_hooks.utils.errors import EditingError

IDENTITY = "identity"


class BestFact(NamedTuple):
    """The fact of a memory that fits a question best.

    Attributes:
        number: index of the fact in the memory.
        score: of the scope classifier, in (0, 1].
    """

    number: int
    score: float

    @property
    def in_scope(self) -> bool:
        """Whether the fact concerns the question."""
        return self.score > THRESHOLD


class FactMemory:
    """The models behind a memory, on one device.

    Args:
        embed: vectors of texts.
        counterfactual: answers questions in scope; ``None``: the base model does.
        texts, separator: see :func:`~edit_hooks.in_context.scope_classifier.fact_text`.
    """

    def __init__(
        self,
        embed: Embedder,
        counterfactual: PreTrainedModel | None,
        texts: ScopeTexts = "prompts",
        separator: str = "",
    ) -> None:
        self._embed, self.counterfactual, self._texts, self._separator = embed, counterfactual, texts, separator

    def scores(self, contexts: Sequence[ContextEdit], question: str) -> torch.Tensor:
        """Score [N] of a question for every fact, float64."""
        facts = [fact_text(self._texts, fact.prompt, fact.statement, self._separator) for fact in contexts]
        scores_1N = scope_scores(self._embed(facts).double(), self._embed([question]).double())
        return scores_1N[0]

    def best(self, contexts: Sequence[ContextEdit], question: str) -> BestFact:
        """The fact with the highest score for a question."""
        scores_N = self.scores(contexts, question)
        best = len(contexts) - 1 - int(scores_N.flip(0).argmax())
        return BestFact(best, float(scores_N[best]))


@functools.lru_cache(maxsize=4)
def load_memory(models: MemoryModels, embedder: str, device: str = "cpu") -> FactMemory:
    """The models that facts name, loaded once per device.

    Raises:
        EditingError: they are missing or damaged, or are not those that the facts were saved with.
    """
    if models.artifact == IDENTITY:
        return FactMemory(load_embedder(embedder), None)
    require_models(models)
    (classifier, counterfactual), manifest = load_models(models.artifact)
    classifier.to(device)
    return FactMemory(
        Embedder(classifier.one_by_one),
        counterfactual.to(device),
        manifest["editor"]["scope_texts"],
        classifier.separator,
    )


def require_models(models: MemoryModels) -> None:
    """Check that the models of facts are there and the same; reads no weights into memory.

    Raises:
        EditingError: they are not.
    """
    if models.artifact == IDENTITY:
        return
    if MEMORY_MODELS.digest(models.artifact) != models.digest:
        raise EditingError(
            f"the {MEMORY_MODELS.what} in {models.artifact} are not those that this edit was made with (SHA-256 "
            f"differs from {models.digest[:16]}...); put the artifact of the edit there, or make the edit again."
        )
