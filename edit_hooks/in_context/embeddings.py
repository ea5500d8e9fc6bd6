"""Sentence embeddings, by name: to find demonstrations and facts that are like a question.

``words`` needs nothing: hashed words and character trigrams. ``minilm`` is all-MiniLM-L6-v2, which the IKE release
uses, from an installed package, so that nothing is downloaded later (extra ``ike``). Any other name is a
sentence-transformers model, a hub id or a folder (same extra).
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence

import torch
from tqdm import tqdm

from edit_hooks.assets.minilm import load_minilm, require_minilm
from edit_hooks.utils.errors import EditingError

Embed = Callable[[Sequence[str]], torch.Tensor]


MINILM = "minilm"


WIDTH = 4096


CHUNK = 256


def word_vectors(texts: Sequence[str]) -> torch.Tensor:
    """Unit rows [n, WIDTH]: square roots of the counts of hashed words and character trigrams."""
    rows = torch.zeros(len(texts), WIDTH)
    for row, text in zip(rows, texts, strict=True):
        words = text.lower().split()
        pieces = words + [f" {word} "[i : i + 3] for word in words for i in range(len(word))]
        for piece in pieces:
            row[zlib.crc32(piece.encode()) % WIDTH] += 1
    return _unit_rows(rows.sqrt())


def _unit_rows(rows: torch.Tensor) -> torch.Tensor:
    return rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-12)


# name -> how to make it. Tests and other packages may add rows.
EMBEDDERS: dict[str, Callable[[], Embed]] = {"words": lambda: word_vectors, MINILM: load_minilm}


# name -> raises an EditingError when something is not installed; quick, nothing is read.
REQUIREMENTS: dict[str, Callable[[], object]] = {MINILM: require_minilm}


def require(name: str) -> None:
    """Raise an EditingError when a named embedder is not installed."""
    REQUIREMENTS.get(name, lambda: None)()


@functools.cache
def _made(make: Callable[[], Embed]) -> Embed:
    return make()


def embedder(name: str) -> Embed:
    """Texts to unit rows [n, k].

    Raises:
        EditingError: when a package is missing or damaged, or sentence-transformers has no such model.
    """
    return _made(EMBEDDERS[name]) if name in EMBEDDERS else _sentence_transformer(name)


@functools.cache
def _sentence_transformer(name: str) -> Embed:
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        raise EditingError(
            f"embedder {name!r} needs sentence-transformers: pip install 'lm-eval-editing[ike]'; or use "
            "embedder=words, which needs nothing and is not what the papers use."
        ) from None
    try:
        model = SentenceTransformer(name, device="cpu")
    except Exception as error:
        raise EditingError(
            f"embedder {name!r} cannot be loaded ({error}). Accepted: a folder with a sentence-transformers model, a "
            f"hub id that can be reached or is cached, or one of: {', '.join(EMBEDDERS)}."
        ) from error

    def embed(texts: Sequence[str]) -> torch.Tensor:
        return torch.as_tensor(model.encode(list(texts), normalize_embeddings=True, show_progress_bar=False))

    return embed


_known: dict[str, dict[str, torch.Tensor]] = {}


def embedded(name: str, texts: Sequence[str], label: str = "Embedding sentences") -> torch.Tensor:
    """Unit rows of texts, each text embedded once per process; with progress when there are many new ones."""
    embed = embedder(name)
    known = _known.setdefault(name if name not in EMBEDDERS else f"{name} {id(EMBEDDERS[name])}", {})
    missing = list(dict.fromkeys(text for text in texts if text not in known))
    with tqdm(total=len(missing), desc=label, unit="text", disable=len(missing) <= CHUNK) as bar:
        for start in range(0, len(missing), CHUNK):
            part = missing[start : start + CHUNK]
            known.update(zip(part, embed(part).float().cpu(), strict=True))
            bar.update(len(part))
    return torch.stack([known[text] for text in texts])


def nearest(name: str, query: str, texts: Sequence[str], count: int, least: float | None = None) -> list[int]:
    """Indices of the ``count`` texts most like ``query``, the most alike first; ties go to the earlier text.

    Args:
        least: texts with a smaller cosine are left out.
    """
    scores = embedded(name, texts) @ embedded(name, [query])[0]
    found = scores.argsort(descending=True, stable=True)[:count].tolist()
    return found if least is None else [index for index in found if scores[index] >= least]
