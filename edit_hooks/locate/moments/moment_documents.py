"""Documents behind second moments as batches of token ids, and their progress.

Shapes: R rows, T tokens.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from edit_hooks.base.checks import position_limit
from edit_hooks.locate.moments.corpora import Corpus
from edit_hooks.modeling.architectures import unwrapped
from edit_hooks.modeling.forward.sampling import sample_documents
from edit_hooks.modeling.tokens import encode
from edit_hooks.utils.batching import token_batches
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.logs import get_logger

log = get_logger(__name__)


MAX_LENGTH = 256


LONGEST_CONTEXT = 4096  # the cut of later releases where a model's context is longer


BATCH_TOKENS, BLOCK_DOCUMENTS = 2**13, 256  # documents are sorted by length within a block


SAMPLED_ROWS, SAMPLED_LENGTH, SHORTEST_SAMPLE = 128, 128, 64


MEASURED_SECONDS, LONG_SECONDS = 3.0, 60.0  # a longer collection is announced after the first measurement


class DocumentLimits(Protocol):
    """Settings that limit the text: see :class:`edit_hooks.locate.moments.second_moments.MomentSettings`."""

    @property
    def num_tokens(self) -> int | None: ...

    @property
    def max_length(self) -> int | None: ...

    @property
    def seed(self) -> int: ...


class Meter:
    """A progress bar that announces a long collection by its expected time, measured on the first tokens.

    It counts tokens if their number is known, else documents.

    Args:
        what: the statistics that are collected.
    """

    def __init__(self, corpus: Corpus, num_tokens: int | None, quiet: bool, what: str = "second moments") -> None:
        self.what = what
        self.counts_tokens = num_tokens is not None
        self.total = num_tokens if self.counts_tokens else corpus.num_documents
        self.unit = "token" if self.counts_tokens else "document"
        self.count = 0
        self.is_measured = False
        self.start = time.perf_counter()
        self.bar = tqdm(total=self.total, desc=f"Collecting {what}", unit=self.unit, disable=quiet)

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, _kind: type | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        self.bar.close()

    def add(self, num_documents: int, num_tokens: int) -> None:
        """Count documents or tokens that are done."""
        done = num_tokens if self.counts_tokens else num_documents
        self.count += done
        self.bar.update(done)
        seconds = time.perf_counter() - self.start
        if self.is_measured or self.total is None or seconds < MEASURED_SECONDS:
            return
        self.is_measured = True
        expected = seconds / self.count * self.total
        if expected > LONG_SECONDS:
            log.warning(
                "%s are collected from %d %ss: about %.0f min (%.3g %ss/s), once per model and setting%s.",
                self.what,
                self.total,
                self.unit,
                max(1.0, expected / 60),
                self.count / seconds,
                self.unit,
                "; `lm-edit stats` does it ahead of edits" if self.what == "second moments" else "",
            )


def full_context(model: nn.Module) -> int:
    """Tokens of a document under ``published``: the model's context, at most 4096."""
    return min(position_limit(model.config) or LONGEST_CONTEXT, LONGEST_CONTEXT)


def check_length(
    model: nn.Module, given: int | None, what: str = "second moments", setting: str = "moment_length"
) -> None:
    """Refuse documents that are longer than the model's context.

    Args:
        what: the statistics, and their ``setting``, for the error.

    Raises:
        EditingError: positions beyond it do not exist or, rotary ones, have keys that the model was not trained on.
    """
    limit = position_limit(unwrapped(model).config)
    if given is not None and limit is not None and given > limit:
        raise EditingError(
            f"documents behind {what} are cut after {given} tokens ({setting}), and the model has {limit} positions; "
            f"give at most {limit}, or leave it out."
        )


def document_length(model: nn.Module, corpus: Corpus, given: int | None) -> int:
    """Tokens after which a document is cut.

    By default 256 or, if that is shorter, the model's context; for ``published`` the context, at most 4096.

    Raises:
        EditingError: as :func:`check_length`.
    """
    check_length(model, given)
    if given is not None:
        return given
    return full_context(model) if corpus.has_full_context else min(MAX_LENGTH, full_context(model))


def read_documents(
    model: Any, tokenizer: PreTrainedTokenizerBase, corpus: Corpus, settings: DocumentLimits, meter: Meter
) -> Iterator[list[int]]:
    """Token ids of the documents, cut to the length limit and the token budget.

    Args:
        meter: counts the tokens of sampled documents while they are sampled.
    """
    if corpus.is_sampled:
        documents = _sample(model, tokenizer, settings, meter)
    else:
        documents = (encode(tokenizer, text).ids[: settings.max_length] for text in corpus.documents())
    tokens_left = settings.num_tokens
    for ids in documents:
        if tokens_left is not None and len(ids) > tokens_left:
            ids = ids[:tokens_left]
        if ids:
            yield ids
        if tokens_left is not None:
            tokens_left -= len(ids)
            if tokens_left <= 0:
                return


def _sample(
    model: Any, tokenizer: PreTrainedTokenizerBase, settings: DocumentLimits, meter: Meter
) -> Iterator[list[int]]:
    """Sample documents without end, in equal batches that give the token budget with little left over.

    Batches are wide and their texts short, rather than narrow with long texts: a step of 128 rows takes about 1.4 times
    as long as one of 64. Their number of tokens bounds the memory of the KV cache.
    """
    num_tokens, longest = settings.num_tokens, settings.max_length
    assert num_tokens is not None and longest is not None
    longest = min(longest, SAMPLED_LENGTH)
    length = min(longest, max(SHORTEST_SAMPLE, -(-num_tokens // SAMPLED_ROWS)))
    num_batches = -(-num_tokens // (SAMPLED_ROWS * length))
    num_rows = -(-num_tokens // (num_batches * length))
    generator = torch.Generator().manual_seed(settings.seed)
    return sample_documents(model, tokenizer, num_rows, length, generator, lambda count: meter.add(0, count))


def batch_documents(documents: Iterator[list[int]]) -> Iterator[list[list[int]]]:
    """Batches of similar length, about ``BATCH_TOKENS`` padded tokens each."""
    while block := list(itertools.islice(documents, BLOCK_DOCUMENTS)):
        block.sort(key=len)
        lengths = [len(ids) for ids in block]
        for batch in token_batches(range(len(block)), lengths, BATCH_TOKENS):
            yield [block[index] for index in batch]
