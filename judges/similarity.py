"""Semantic similarity of an answer and its gold answer, as graded scores.

A high score means that two texts are about the same thing, not that they agree: "Paris" is similar to "Rome". The
packages (extras ``similarity`` and ``ike``) are imported on use.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, TypeAlias

from edit_hooks.assets.minilm import PACKAGE as MINILM_PACKAGE
from edit_hooks.assets.minilm import load_minilm
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.files import packaged_file

if TYPE_CHECKING:
    import numpy
    import torch

    # Texts to unit rows [N, D]: a tensor from the packaged model, an array from sentence-transformers.
    Embedder: TypeAlias = Callable[[Sequence[str]], torch.Tensor | numpy.ndarray]

EMBEDDING_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
EMBEDDING_PACKAGE = ("sentence_transformers", "sentence-transformers")  # module and package
BERTSCORE_PACKAGE = ("bert_score", "bert-score")
BERTSCORE_MODEL = "roberta-large"  # the default of bert-score for English, which also chooses the layer


def bertscore_f1(answers: Sequence[str], golds: Sequence[str]) -> list[float]:
    """BERTScore F1 of each answer against its gold answer (Zhang et al. 2020), without baseline rescaling.

    Raises:
        EditingError: if the package is missing.
    """
    package = _import_package(*BERTSCORE_PACKAGE)
    *_, f1_N = package.score(list(answers), list(golds), model_type=BERTSCORE_MODEL, verbose=False)
    return [float(value) for value in f1_N]


def embedding_cosine(answers: Sequence[str], golds: Sequence[str]) -> list[float]:
    """Cosine of the all-MiniLM-L6-v2 embeddings of answer and gold answer (Reimers and Gurevych 2019), in -1..1.

    The model comes from the package of the extra ``ike`` if that is installed (no network), else from the hub.

    Raises:
        EditingError: if neither package is installed.
    """
    embed = load_minilm() if _has_packaged_minilm() else _load_hub_embedder()
    answers_ND, golds_ND = embed(answers), embed(golds)
    return [float((a_D * b_D).sum()) for a_D, b_D in zip(answers_ND, golds_ND, strict=True)]


def _has_packaged_minilm() -> bool:
    return packaged_file(MINILM_PACKAGE, "model", "config.json") is not None


def _load_hub_embedder() -> Embedder:
    model = _import_package(*EMBEDDING_PACKAGE).SentenceTransformer(EMBEDDING_MODEL)
    return lambda texts: model.encode(list(texts), normalize_embeddings=True, show_progress_bar=False)


SIMILARITIES: dict[str, Callable[[Sequence[str], Sequence[str]], list[float]]] = {
    "bertscore": bertscore_f1,
    "embedding": embedding_cosine,
}


def require_packages(name: str) -> None:
    """Check that the packages of a score of :data:`SIMILARITIES` can be imported.

    Raises:
        EditingError: if they cannot.
    """
    if name == "bertscore":
        _import_package(*BERTSCORE_PACKAGE)
    elif not _has_packaged_minilm():
        _import_package(*EMBEDDING_PACKAGE)


def similarity(name: str, answers: Sequence[str], golds: Sequence[str]) -> list[float]:
    """Compute a score of :data:`SIMILARITIES` for each pair; 0 where answer or gold answer is empty."""
    pairs = [n for n, (a, b) in enumerate(zip(answers, golds, strict=True)) if a.strip() and b.strip()]
    scores = [0.0] * len(answers)
    if pairs:
        pair_scores = SIMILARITIES[name]([answers[n] for n in pairs], [golds[n] for n in pairs])
        for n, score in zip(pairs, pair_scores, strict=True):
            scores[n] = score
    return scores


def _import_package(module: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise EditingError(
            f'this score needs the package {package}: pip install "lm-eval-editing[similarity]". '
            "match_ratio needs no package."
        ) from error
