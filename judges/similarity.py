"""Scores of likeness in meaning, from packages of the extras ``similarity`` and ``ike``; imported when asked for.

They are graded scores, not judges: a high value says that two texts are about the same thing,
and "Paris" is much like "Rome".
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from edit_hooks.assets.minilm import PACKAGE as MINILM_PACKAGE
from edit_hooks.assets.minilm import load_minilm
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.files import packaged_file

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
    """Cosine of all-MiniLM-L6-v2 embeddings (Reimers and Gurevych 2019) of answer and gold answer, in -1..1.

    The model comes from the package of the extra ``ike`` where that is installed (no network), else from the hub.

    Raises:
        EditingError: when neither package is there.
    """
    embed = load_minilm() if packaged_file(MINILM_PACKAGE, "model", "config.json") else _from_the_hub()
    answers_ND, golds_ND = embed(answers), embed(golds)
    return [float((a_D * b_D).sum()) for a_D, b_D in zip(answers_ND, golds_ND, strict=True)]


def _from_the_hub() -> Callable[[Sequence[str]], Any]:
    model = _need("sentence_transformers", "sentence-transformers").SentenceTransformer(EMBEDDING_MODEL)
    return lambda texts: model.encode(list(texts), normalize_embeddings=True, show_progress_bar=False)


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
