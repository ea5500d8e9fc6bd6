"""The run's engine: answers items under edits, in batches or one by one, with a progress bar."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn
from tqdm import tqdm

from edit_hooks.answers import GeneratedText, ScoredContinuation, StateSimilarity
from edit_hooks.deltas.delta import Delta
from edit_hooks.inference import decoding, reference, scoring
from edit_hooks.inference.batching import limits_for
from edit_hooks.inference.effects.states import StateComparison
from edit_hooks.inference.items import GenerateItem, Item, Limits, ScoreItem, StateItem
from edit_hooks.inference.written import written
from edit_hooks.lm.asking.stored_answers import KeptAnswers
from edit_hooks.lm.loading.hflm import LateLoadingHFLM
from edit_hooks.lm.options.editing import EditingOptions
from edit_hooks.modeling.architectures import input_device
from edit_hooks.utils.progress import Finished, ignore_finished
from edit_hooks.utils.scopes import undone

ItemT = TypeVar("ItemT", ScoreItem, GenerateItem, StateItem)
AnswerT = TypeVar("AnswerT", ScoredContinuation, GeneratedText, StateSimilarity)


class Engine:
    """Answers jobs (item, edit) on an lm-eval model.

    ``engine=reference`` answers one item at a time with its edit in the weights. Otherwise items share batches, and
    with ``answer=patch`` every weight edit is written into the weights instead of acting per row.
    """

    def __init__(self, lm: LateLoadingHFLM, options: EditingOptions) -> None:
        self._lm, self._options = lm, options
        self._one_by_one = options.engine == "reference"
        self._states = StateComparison(one_by_one=self._one_by_one)
        self._other_model: nn.Module | None = None
        self._kept: KeptAnswers | None = None

    @property
    def _model(self) -> nn.Module:
        return self._lm.model if self._other_model is None else self._other_model

    @property
    def device(self) -> torch.device:
        """Where the run's model takes its token ids."""
        return input_device(self._lm.model)

    @contextlib.contextmanager
    def answering_with(self, model: nn.Module | None) -> Iterator[None]:
        """Scope in which another causal model with the run's tokenizer answers; ``None``: the run's own."""
        before = self._other_model
        with undone(lambda: setattr(self, "_other_model", before)):
            self._other_model = model
            yield

    @contextlib.contextmanager
    def keeping_answers(self, kept: KeptAnswers | None) -> Iterator[None]:
        """Scope in which answers are read from the store and kept there; the model is in the state of ``kept``."""
        before = self._kept
        with undone(lambda: setattr(self, "_kept", before)):
            self._kept = kept
            yield

    def score(self, jobs: Sequence[tuple[ScoreItem, Delta | None]]) -> list[ScoredContinuation]:
        def compute(jobs: Sequence[tuple[ScoreItem, Delta | None]], finished: Finished) -> list[ScoredContinuation]:
            with self._progress("Scoring", jobs) as bar:
                if self._one_by_one:
                    return reference.score_reference(self._model, jobs, bar.update, finished)
                return scoring.score(self._model, self._written(jobs), self._limits(), bar.update, finished)

        return self._answer(jobs, compute)

    def generate(self, jobs: Sequence[tuple[GenerateItem, Delta | None]]) -> list[GeneratedText]:
        model, tokenizer = self._model, self._lm.tokenizer

        def compute(jobs: Sequence[tuple[GenerateItem, Delta | None]], finished: Finished) -> list[GeneratedText]:
            with self._progress("Decoding", jobs) as bar:
                if self._one_by_one:
                    return reference.generate_reference(model, tokenizer, jobs, bar.update, finished)
                return decoding.generate(model, tokenizer, self._written(jobs), self._limits(), bar.update, finished)

        return self._answer(jobs, compute)

    def compare_states(self, jobs: Sequence[tuple[StateItem, Delta | None]]) -> list[StateSimilarity]:
        def compute(jobs: Sequence[tuple[StateItem, Delta | None]], finished: Finished) -> list[StateSimilarity]:
            with self._progress("Comparing hidden states", jobs) as bar:
                jobs = self._written(jobs)
                return self._states.compare(self._lm.model, jobs, self._limits(), bar.update, finished)

        return self._answer(jobs, compute)

    def _answer(
        self,
        jobs: Sequence[tuple[ItemT, Delta | None]],
        compute: Callable[[Sequence[tuple[ItemT, Delta | None]], Finished], list[AnswerT]],
    ) -> list[AnswerT]:
        """Answers from the store where they are kept; those of another model are not."""
        if self._kept is None or self._other_model is not None:
            return compute(jobs, ignore_finished)
        return self._kept.get(jobs, compute)

    def unedited_states_kept(self, items: Iterable[Item]) -> contextlib.AbstractContextManager[None]:
        """Scope in which the unedited states of items are kept, because the edits stay in the weights."""
        return self._states.unedited_kept(self._lm.model, items, self._limits())

    def _progress(self, activity: str, jobs: Sequence[tuple[object, Delta | None]]) -> tqdm[None]:
        under = " under edits" if any(delta is not None for _, delta in jobs) else ""
        return tqdm(total=len(jobs), desc=activity + under, unit="prompt", disable=self._lm.quiet)

    def _written(self, jobs: Sequence[tuple[ItemT, Delta | None]]) -> list[tuple[ItemT, Delta | None]]:
        """With ``answer=patch``, the jobs with edits that are written into the weights."""
        if self._options.answer != "patch":
            return list(jobs)
        return written(jobs)

    def _limits(self) -> Limits:
        """Bounds of a batch; a batch size above lm-eval's default of 1 bounds the rows."""
        size = self._lm.batch_size_per_gpu
        limits = limits_for(self._model, self._options.max_batch_tokens)
        return replace(limits, max_rows=size) if isinstance(size, int) and size > 1 else limits
