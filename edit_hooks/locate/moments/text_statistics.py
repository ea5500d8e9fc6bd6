"""Statistics of ordinary text by layer: loaded from their files, or collected in one pass and stored.

The text is that of second moments (:mod:`edit_hooks.locate.moments.corpora`). What is summed up over it is given, so
statistics that need gradients can be collected here, too.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from edit_hooks.locate.moments.corpora import Corpus, Source, open_corpus
from edit_hooks.locate.moments.moment_documents import Meter, document_length, read_documents
from edit_hooks.locate.moments.sampled_texts import keep_documents, read_text_file, text_file
from edit_hooks.locate.moments.stored_matrices import StoredMatrices, collected_once, load_matrices, save_matrices
from edit_hooks.modeling.architectures import architecture_of, map_shape, unwrapped
from edit_hooks.modeling.fingerprint.identity import model_identity
from edit_hooks.modeling.hooks import frozen
from edit_hooks.utils.batching import token_batches
from edit_hooks.utils.storage.files import cache_root

TOKENS_PER_DIMENSION = 16  # of sampled text
BATCH_TOKENS, BLOCK_DOCUMENTS = 2**11, 64


class StatisticsKind(NamedTuple):
    """A kind of statistics.

    Attributes:
        what: its name, as in "K-FAC factors". format: part of the key of its files. folder: of the cache.
    """

    what: str
    format: str
    folder: str


class TextSums(Protocol):
    """Sums over the tokens read so far."""

    num_tokens: int
    num_documents: int

    def add(self, batch: Sequence[Sequence[int]]) -> None:
        """Run a batch of documents and add it."""

    def matrices(self) -> dict[int, dict[str, torch.Tensor]]:
        """The statistics by layer and name."""


@dataclass(frozen=True)
class TextSettings:
    """Text that statistics are collected from; see :class:`~edit_hooks.locate.moments.second_moments.MomentSettings`.

    ``num_tokens`` of ``None`` takes 16 per dimension of the keys where the text has no end.
    """

    source: Source
    num_tokens: int | None = None
    max_length: int | None = None
    seed: int = 0


def text_statistics(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    layers: Sequence[int],
    settings: TextSettings,
    kind: StatisticsKind,
    make_sums: Callable[[Sequence[int]], TextSums],
    *,
    folder: str | os.PathLike[str] | None = None,
    quiet: bool = False,
) -> dict[int, StoredMatrices]:
    """Load or collect the statistics of every layer.

    Args:
        make_sums: makes empty sums for some layers.
        folder: where they are stored; that of the kind in the cache by default, and nowhere for a list of texts.

    Raises:
        EditingError: the source cannot be read or has no text, or its documents are to be longer than the context.
    """
    inner = unwrapped(model)
    corpus = open_corpus(settings.source, settings.seed)
    settings = _with_defaults(settings, inner, corpus, layers)
    root: Path | None = Path(folder) if folder is not None else cache_root() / kind.folder
    if folder is None and not isinstance(settings.source, (str, os.PathLike)):
        root = None
    identity = model_identity(inner, tokenizer).to_dict() if root else {}
    descriptions = {layer: _describe(inner, layer, corpus, settings, kind, identity) for layer in layers}
    found = _load_all(root, descriptions, kind)
    if len(found) < len(descriptions):
        with collected_once(root, list(descriptions.values()), kind.what):
            found |= _load_all(root, descriptions, kind)  # another process may have been faster
            if missing := {layer: one for layer, one in descriptions.items() if layer not in found}:
                sums = make_sums(list(missing))
                text = _text_file(root, corpus, missing)
                report = _collect(inner, tokenizer, corpus, settings, kind, sums, text, quiet)
                for layer, matrices in sums.matrices().items():
                    found[layer] = StoredMatrices(matrices, report)
                    if root:
                        save_matrices(root, missing[layer], report, matrices)
    return {layer: found[layer] for layer in layers}


def _with_defaults(settings: TextSettings, model: nn.Module, corpus: Corpus, layers: Sequence[int]) -> TextSettings:
    """The settings with an explicit length limit and, unless everything is read, an explicit number of tokens."""
    num_tokens = settings.num_tokens
    if num_tokens is None and not corpus.is_finite:
        arch = architecture_of(model)
        width = max(map_shape(model.get_submodule(arch.rewrite_name(layer)))[1] for layer in layers)
        num_tokens = TOKENS_PER_DIMENSION * width
    max_length = document_length(model, corpus, settings.max_length)
    return dataclasses.replace(settings, max_length=max_length, num_tokens=num_tokens)


def _describe(
    model: Any,
    layer: int,
    corpus: Corpus,
    settings: TextSettings,
    kind: StatisticsKind,
    identity: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything that determines the statistics of a layer (JSON-able): the key of the file."""
    return {
        "format": kind.format,
        "model": identity,
        "module": architecture_of(model).rewrite_name(layer),
        "layer": layer,
        "corpus": corpus.identity,
        "num_tokens": settings.num_tokens,
        "max_length": settings.max_length,
    }


def _load_all(
    root: Path | None, descriptions: Mapping[int, dict[str, Any]], kind: StatisticsKind
) -> dict[int, StoredMatrices]:
    """The stored statistics by layer."""
    if root is None:
        return {}
    found = {layer: load_matrices(root, description, kind.what) for layer, description in descriptions.items()}
    return {layer: stored for layer, stored in found.items() if stored is not None}


def _text_file(root: Path | None, corpus: Corpus, descriptions: Mapping[int, dict[str, Any]]) -> Path | None:
    """The file of sampled text."""
    if root is None or not corpus.is_sampled:
        return None
    one = next(iter(descriptions.values()))
    return text_file(root, {name: one[name] for name in ("model", "corpus", "num_tokens", "max_length")})


@torch.inference_mode(False)
def _collect(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    corpus: Corpus,
    settings: TextSettings,
    kind: StatisticsKind,
    sums: TextSums,
    text: Path | None,
    quiet: bool,
) -> dict[str, Any]:
    """Add all text to the sums; returns a report."""
    start = time.perf_counter()
    with frozen(model), Meter(corpus, settings.num_tokens, quiet, kind.what) as meter:
        with torch.no_grad():
            kept = read_text_file(text) if text is not None else None
            documents = iter(kept) if kept else read_documents(model, tokenizer, corpus, settings, meter)
            if text is not None and not kept:
                documents = iter(list(keep_documents(text, documents)))
        for batch in _batches(documents):
            sums.add(batch)
            if kept or not corpus.is_sampled:  # sampling counts by itself
                meter.add(len(batch), sum(map(len, batch)))
    seconds = round(time.perf_counter() - start, 2)
    return {"num_tokens": sums.num_tokens, "num_documents": sums.num_documents, "seconds": seconds}


def _batches(documents: Iterator[list[int]]) -> Iterator[list[list[int]]]:
    """Batches of documents of similar length."""
    while block := list(itertools.islice(documents, BLOCK_DOCUMENTS)):
        block.sort(key=len)
        for batch in token_batches(range(len(block)), [len(ids) for ids in block], BATCH_TOKENS):
            yield [block[index] for index in batch]
