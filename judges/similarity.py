"""Scores of likeness in meaning, from packages of the extra ``similarity``; imported when asked for.

They are graded scores, not judges: a high value says that two texts are about the same thing,
and "Paris" is much like "Rome".
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from types import ModuleType

from edit_hooks.errors import EditingError

EMBEDDING_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
BERTSCORE_MODEL = "roberta-large"  # bert-score's own choice for English; its layer is the package's


def bertscore(answers: Sequence[str], golds: Sequence[str]) -> list[float]:
    """BERTScore F1 of each answer against its gold answer (Zhang et al. 2020), without baseline rescaling.

    Raises:
        EditingError: when the package is missing.
    """
    package = _need("bert_score", "bert-score")
    *_, f1_N = package.score(list(answers), list(golds), model_type=BERTSCORE_MODEL, verbose=False)
    return [float(value) for value in f1_N]


def embedding(answers: Sequence[str], golds: Sequence[str]) -> list[float]:
    """Cosine of sentence embeddings (Reimers and Gurevych 2019) of answer and gold answer, in -1..1.

    Raises:
        EditingError: when the package is missing.
    """
    package = _need("sentence_transformers", "sentence-transformers")
    model = package.SentenceTransformer(EMBEDDING_MODEL)
    answers_ND, golds_ND = (
        model.encode(list(texts), normalize_embeddings=True, show_progress_bar=False) for texts in (answers, golds)
    )
    return [float((a_D * b_D).sum()) for a_D, b_D in zip(answers_ND, golds_ND, strict=True)]


SIMILARITIES: dict[str, Callable[[Sequence[str], Sequence[str]], list[float]]] = {
    "bertscore": bertscore,
    "embedding": embedding,
}


def similarity(name: str, answers: Sequence[str], golds: Sequence[str]) -> list[float]:
    """A score of :data:`SIMILARITIES`, one number per pair; 0 where answer or gold answer is empty."""
    pairs = [n for n, (a, b) in enumerate(zip(answers, golds, strict=True)) if a.strip() and b.strip()]
    scores = [0.0] * len(answers)
    if pairs:
        found = SIMILARITIES[name]([answers[n] for n in pairs], [golds[n] for n in pairs])
        for place, value in zip(pairs, found, strict=True):
            scores[place] = value
    return scores


def _need(module: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise EditingError(
            f'this score needs the package {package}: pip install "lm-eval-editing[similarity]". '
            "Scores without it: match_ratio."
        ) from error
