"""Sentence embeddings by name, for finding the demonstrations and facts most similar to a question.

``words`` needs no package: hashed words and character trigrams. ``minilm`` is all-MiniLM-L6-v2, which the IKE release
uses, from an installed package (extra ``ike``), without the network. Any other name is a sentence-transformers model, a
hub id or a folder (same extra).

Shapes: N texts, E embedding width.
"""

from __future__ import annotations

import functools
import importlib.util
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from tqdm import tqdm

from edit_hooks.assets.minilm import load_minilm, require_minilm
from edit_hooks.utils.errors import EditingError

Embed = Callable[[Sequence[str]], torch.Tensor]

MINILM = "minilm"
WORD_WIDTH = 4096  # embedding width of ``words``
CHUNK = 256  # texts embedded in one call


class Embedder:
    """Unit vectors of texts; each text is embedded once.

    Args:
        embed: a function from texts to unit rows [N, E].
    """

    def __init__(self, embed: Embed) -> None:
        self._embed = embed
        self._vectors: dict[str, torch.Tensor] = {}

    def __call__(self, texts: Sequence[str]) -> torch.Tensor:
        """Unit rows [N, E] on the CPU, with a progress bar if many texts are new."""
        missing = list(dict.fromkeys(text for text in texts if text not in self._vectors))
        with tqdm(total=len(missing), desc="Embedding sentences", unit="text", disable=len(missing) <= CHUNK) as bar:
            for start in range(0, len(missing), CHUNK):
                chunk = missing[start : start + CHUNK]
                self._vectors.update(zip(chunk, self._embed(chunk).float().cpu(), strict=True))
                bar.update(len(chunk))
        return torch.stack([self._vectors[text] for text in texts])


class SimilarText(NamedTuple):
    """A text by its number, and its cosine similarity with a query."""

    number: int
    similarity: float


def most_similar(name: str, query: str, texts: Sequence[str], count: int) -> list[SimilarText]:
    """The ``count`` texts most similar to ``query``, the most similar first; ties go to the earlier text.

    Args:
        name: of the embedder.
    """
    embedder = load_embedder(name)
    scores_N = embedder(texts) @ embedder([query])[0]
    nearest = scores_N.argsort(descending=True, stable=True)[:count]
    return [SimilarText(*pair) for pair in zip(nearest.tolist(), scores_N[nearest].tolist(), strict=True)]


def embed_words(texts: Sequence[str]) -> torch.Tensor:
    """Unit rows [N, WORD_WIDTH]: square roots of the counts of hashed words and character trigrams."""
    rows = torch.zeros(len(texts), WORD_WIDTH)
    for row, text in zip(rows, texts, strict=True):
        words = text.lower().split()
        trigrams = [f" {word} "[i : i + 3] for word in words for i in range(len(word))]
        for feature in words + trigrams:
            row[zlib.crc32(feature.encode()) % WORD_WIDTH] += 1
    rows = rows.sqrt()
    return rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-12)


# Name -> factory of the embedding function. Tests and other packages can add rows.
EMBEDDERS: dict[str, Callable[[], Embed]] = {"words": lambda: embed_words, MINILM: load_minilm}

# Name -> check that raises an EditingError if the embedder is not installed, without reading it.
REQUIREMENTS: dict[str, Callable[[], object]] = {MINILM: require_minilm}


def require_embedder(name: str) -> None:
    """Raise EditingError if an embedder's package is not installed; reads no model."""
    if name in REQUIREMENTS:
        REQUIREMENTS[name]()
    elif name not in EMBEDDERS and importlib.util.find_spec("sentence_transformers") is None:
        raise _no_sentence_transformers(name)


def load_embedder(name: str) -> Embedder:
    """The embedder of this name, loaded once per process.

    Raises:
        EditingError: a package is missing or damaged, or sentence-transformers has no such model.
    """
    return _built_in(EMBEDDERS[name]) if name in EMBEDDERS else _sentence_transformer(name)


@functools.cache
def _built_in(factory: Callable[[], Embed]) -> Embedder:
    return Embedder(factory())


def _no_sentence_transformers(name: str) -> EditingError:
    return EditingError(
        f"embedder {name!r} needs sentence-transformers: pip install 'lm-eval-editing[ike]'; or use embedder=words, "
        "which needs no package (the papers do not use it)."
    )


@functools.cache
def _sentence_transformer(name: str) -> Embedder:
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        raise _no_sentence_transformers(name) from None
    try:
        model = SentenceTransformer(name, device="cpu")
    except Exception as error:
        raise EditingError(
            f"embedder {name!r} cannot be loaded ({error}). Accepted: a folder with a sentence-transformers model, a "
            f"hub id that can be reached or is cached, or one of: {', '.join(EMBEDDERS)}."
        ) from error

    def embed(texts: Sequence[str]) -> torch.Tensor:
        return torch.as_tensor(model.encode(list(texts), normalize_embeddings=True, show_progress_bar=False))

    return Embedder(embed)
