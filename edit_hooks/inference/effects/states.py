"""Hidden states of edited and unedited model at the last token of a prompt, and how alike they are.

Of states it is the cosine. Of the distributions p and q of the next token it is the overlap, one minus their total
variation, with the tokens beyond the :data:`LEADING` likeliest of the unedited model as one:
sum over v of min(p(v), q(v)).

Noise is added to the outputs of the embedding module, which is what ``inputs_embeds`` would hold. It is drawn per
instance on the CPU in float64, so that device, dtype, batch and padding do not matter. Both models run over the same
rows in the same batch wherever the weights allow it: an edit without effect then has exactly 1.

Shapes: R rows, T tokens, P perturbed tokens, d residual width, V vocabulary, K leading tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from edit_hooks.answers import ModelAnswer, ScoredContinuation, StateSimilarity
from edit_hooks.deltas.apply import edited
from edit_hooks.deltas.delta import Delta
from edit_hooks.deltas.row_edits import RowEdits, acts_per_row
from edit_hooks.inference.batching import Batch, run_in_batches
from edit_hooks.inference.effects.distributions import NoisyPrompt, batch_log_probs
from edit_hooks.inference.items import Item, Limits, ScoreItem, StateItem
from edit_hooks.modeling.architectures import architecture_of, decoder_of, input_device, num_layers, unwrapped
from edit_hooks.modeling.forward.embedding_noise import gaussian_noise, generator_of, noise_at, noisy_embeddings
from edit_hooks.modeling.forward.kv_cache import right_padded
from edit_hooks.modeling.hooks import frozen, hooks, on_output, record_at, stop_after
from edit_hooks.modeling.tensors import at_least_float32
from edit_hooks.state_reading import NEXT_TOKEN, HiddenState, State
from edit_hooks.utils.progress import Finished, Progress, ignore_finished

LEADING = 1000  # of 128,000 tokens they hold all but a few percent, and a kept distribution takes 8 kB

Job: TypeAlias = tuple[ScoreItem | StateItem, Delta | None]


class StateComparison:
    """Compares hidden states, or distributions, under edits with those of the unedited model.

    Where a run keeps its edits in the weights, the unedited ones are computed before the first edit and kept in memory
    for one call (per instance one vector in the model's dtype, or K tokens); elsewhere both come batch by batch.

    Args:
        one_by_one: the reference engine: one item at a time, with its edit in the weights.
    """

    def __init__(self, *, one_by_one: bool) -> None:
        self.one_by_one = one_by_one
        self._unedited: dict[StateItem, torch.Tensor] = {}

    @contextlib.contextmanager
    def unedited_kept(self, model: nn.Module, items: Iterable[Item], limits: Limits) -> Iterator[None]:
        """Scope in which the unedited states are kept, of those items that ask for one; computed on entry."""
        distinct = list(dict.fromkeys(item for item in items if isinstance(item, StateItem)))
        self._unedited = dict(zip(distinct, unedited_states(model, distinct, limits), strict=True))
        try:
            yield
        finally:
            self._unedited = {}

    def compare(
        self,
        model: nn.Module,
        jobs: Sequence[tuple[StateItem, Delta | None]],
        limits: Limits,
        progress: Progress,
        finished: Finished = ignore_finished,
    ) -> list[StateSimilarity]:
        """The similarity of every item under its edit, in the order of the jobs.

        Args:
            finished: gets the answers of each batch.
        """
        if self.one_by_one:
            return self._compare_one_by_one(model, jobs, progress, finished)
        similar: dict[int, StateSimilarity] = {}
        for state in dict.fromkeys(item.state for item, _ in jobs):
            indices = [index for index, (item, _) in enumerate(jobs) if item.state == state]

            def of_state(places: Sequence[int], found: Sequence[StateSimilarity], indices: list[int] = indices) -> None:
                finished([indices[place] for place in places], found)

            found = self._similarities(model, [jobs[index] for index in indices], limits, progress, of_state)
            similar.update(zip(indices, found, strict=True))
        return [similar[index] for index in range(len(jobs))]

    def _compare_one_by_one(
        self,
        model: nn.Module,
        jobs: Sequence[tuple[StateItem, Delta | None]],
        progress: Progress,
        finished: Finished,
    ) -> list[StateSimilarity]:
        inner = unwrapped(model)
        answers: list[StateSimilarity] = []
        with frozen(inner):
            for item, delta in jobs:
                before = self._unedited.get(item)
                if before is None:
                    (before,) = _kept(item.state, _last_alone(inner, item))
                with edited(model, *([] if delta is None else [delta]), prompt_lengths=[len(item.context)]):
                    after = _last_alone(inner, item)
                answers += _similarity(item.state, [before], after)
                finished([len(answers) - 1], answers[-1:])
                progress(1)
        return answers

    def _similarities(
        self,
        model: nn.Module,
        jobs: Sequence[tuple[StateItem, Delta | None]],
        limits: Limits,
        progress: Progress,
        finished: Finished,
    ) -> list[StateSimilarity]:
        inner = unwrapped(model)
        similar: dict[int, StateSimilarity] = {}
        kept = self._before_writing(model, jobs, limits)
        kept |= {index: self._unedited[item] for index, (item, _) in enumerate(jobs) if item in self._unedited}

        def run(batch: Batch) -> None:
            items = [jobs[index][0] for index in batch.indices]
            after = last_states(inner, items, batch.deltas)
            state = items[0].state
            if all(index in kept for index in batch.indices):
                before = [kept[index] for index in batch.indices]
            elif any(delta is not None for delta in batch.deltas):
                before = _kept(state, last_states(inner, items, [None] * len(items)))
            else:
                before = _kept(state, after)
            found = _similarity(state, before, after)
            similar.update(zip(batch.indices, found, strict=True))
            finished(batch.indices, found)
            progress(len(items))

        run_in_batches(model, [delta for _, delta in jobs], [len(item.context) for item, _ in jobs], limits, run)
        return [similar[index] for index in range(len(jobs))]

    def _before_writing(
        self, model: nn.Module, jobs: Sequence[tuple[StateItem, Delta | None]], limits: Limits
    ) -> dict[int, torch.Tensor]:
        """Unedited states by job, of jobs whose edit will be written into the weights; in the batches of that edit."""
        written: dict[Delta, list[int]] = {}
        for index, (item, delta) in enumerate(jobs):
            if delta is not None and not acts_per_row(model, delta) and item not in self._unedited:
                written.setdefault(delta, []).append(index)
        kept: dict[int, torch.Tensor] = {}
        for indices in written.values():
            states = unedited_states(model, [jobs[index][0] for index in indices], limits)
            kept.update(zip(indices, states, strict=True))
        return kept


def answer_by_kind(
    jobs: Sequence[Job],
    score: Callable[[Sequence[tuple[ScoreItem, Delta | None]]], Sequence[ScoredContinuation]],
    compare: Callable[[Sequence[tuple[StateItem, Delta | None]]], Sequence[StateSimilarity]],
) -> list[ModelAnswer]:
    """Answers in the order of the jobs; tasks of one run send both kinds of items together."""
    texts = [(item, delta) for item, delta in jobs if isinstance(item, ScoreItem)]
    states = [(item, delta) for item, delta in jobs if isinstance(item, StateItem)]
    scored, compared = iter(score(texts) if texts else ()), iter(compare(states) if states else ())
    return [next(compared) if isinstance(item, StateItem) else next(scored) for item, _ in jobs]


def unedited_states(model: nn.Module, items: Sequence[StateItem], limits: Limits) -> list[torch.Tensor]:
    """The states [d] of items on the model as it is, on the CPU; of distributions the leading tokens [2, K]."""
    return states_under(model, [(item, None) for item in items], limits)


def states_under(
    model: nn.Module, jobs: Sequence[tuple[StateItem, Delta | None]], limits: Limits
) -> list[torch.Tensor]:
    """The states [d] of items under their edits, on the CPU, or [2, K]; items of one state share batches."""
    inner = unwrapped(model)
    states: dict[int, torch.Tensor] = {}
    for state in dict.fromkeys(item.state for item, _ in jobs):
        indices = [index for index, (item, _) in enumerate(jobs) if item.state == state]

        def run(batch: Batch, indices: list[int] = indices) -> None:
            items = [jobs[indices[index]][0] for index in batch.indices]
            found = _kept(items[0].state, last_states(inner, items, batch.deltas))
            states.update({indices[index]: row for index, row in zip(batch.indices, found, strict=True)})

        lengths = [len(jobs[index][0].context) for index in indices]
        run_in_batches(model, [jobs[index][1] for index in indices], lengths, limits, run)
    return [states[index] for index in range(len(jobs))]


@torch.no_grad()
def last_states(model: nn.Module, items: Sequence[StateItem], deltas: Sequence[Delta | None]) -> torch.Tensor:
    """Hidden states [R, d] of a batch at the last tokens, or log-probabilities [R, V] of the next ones, on the CPU.

    Args:
        items: one per row, all with the same ``state``.
        deltas: the edit of each row that acts per row.
    """
    state = items[0].state
    if state == NEXT_TOKEN:
        return batch_log_probs(model, [NoisyPrompt(item.context) for item in items], deltas).cpu()
    device = input_device(model)
    ids_RT, mask_RT = right_padded([item.context for item in items], device)
    length_R = mask_RT.sum(1)
    noise_RTD = _noise(model, items, ids_RT.shape[1])
    with RowEdits(model, deltas).prefill(mask_RT, length_R), noisy_embeddings(model, noise_RTD):
        return _read(model, ids_RT, mask_RT, length_R - 1, state)


@torch.no_grad()
def _last_alone(model: Any, item: StateItem) -> torch.Tensor:
    """:func:`last_states` of one item as a row; log-probabilities come from a plain call of the whole model."""
    if item.state != NEXT_TOKEN:
        return last_states(model, [item], [None])
    ids_1T = torch.tensor([item.context], device=input_device(model))
    logits_1V = model(input_ids=ids_1T, attention_mask=torch.ones_like(ids_1T), use_cache=False).logits[:, -1]
    return at_least_float32(logits_1V).log_softmax(1).cpu()


def _read(
    model: Any, ids_RT: torch.Tensor, mask_RT: torch.Tensor, last_R: torch.Tensor, state: HiddenState
) -> torch.Tensor:
    decoder = decoder_of(model)
    if state == "after_norm":
        hidden_RTD = decoder(input_ids=ids_RT, attention_mask=mask_RT, use_cache=False).last_hidden_state
        row_R = torch.arange(len(last_R), device=hidden_RTD.device)
        return hidden_RTD[row_R, last_R.to(hidden_RTD.device)].cpu()
    layer = num_layers(model) - 1 if state == "before_norm" else state
    block = model.get_submodule(architecture_of(model).block_name(layer))
    records: dict[str, torch.Tensor] = {}
    with hooks(on_output(block, record_at(records, "state", last_R))), stop_after(block):
        decoder(input_ids=ids_RT, attention_mask=mask_RT, use_cache=False)
    return records["state"].cpu()


def _noise(model: Any, items: Sequence[StateItem], width: int) -> torch.Tensor | None:
    """The noise of a batch [R, T, d] in the dtype of the embeddings; ``None`` if no row has any."""
    if all(item.noise is None for item in items):
        return None
    weight = model.get_input_embeddings().weight
    noise_RTD = torch.zeros(len(items), width, weight.shape[1], dtype=weight.dtype, device=weight.device)
    for row, item in enumerate(items):
        if (noise := item.noise) is not None:
            shape = (len(noise.positions), weight.shape[1])
            drawn_PD = gaussian_noise(shape, noise.sigma, generator_of(noise.seed), torch.float64)
            noise_RTD[row] = noise_at(noise.positions, width, drawn_PD).to(noise_RTD)
    return noise_RTD


def _kept(state: State, rows_RX: torch.Tensor) -> list[torch.Tensor]:
    """What is kept of the unedited model, by row: the state [d], or the leading log-probabilities and tokens [2, K]."""
    if state != NEXT_TOKEN:
        return list(rows_RX)
    largest_RK, token_RK = rows_RX.topk(min(LEADING, rows_RX.shape[1]), dim=1)
    return list(torch.stack([largest_RK, token_RK.to(largest_RK)], dim=1))  # whole numbers below 2**24 are exact


def _similarity(state: State, before: Sequence[torch.Tensor], after_RX: torch.Tensor) -> list[StateSimilarity]:
    """Similarities of kept rows and those of the edited model."""
    before_RX = torch.stack(list(before))
    if state != NEXT_TOKEN:
        return [StateSimilarity(cosine=cosine) for cosine in _cosine(before_RX, after_RX)]
    log_p_RK, token_RK = before_RX.unbind(1)
    return [StateSimilarity(overlap=share) for share in _overlap(log_p_RK, after_RX.gather(1, token_RK.long()))]


def _overlap(log_p_RK: torch.Tensor, log_q_RK: torch.Tensor) -> list[float]:
    """One minus the total variation in float64, all other tokens as one; exactly 1 for equal distributions."""
    p_RK, q_RK = log_p_RK.double().exp(), log_q_RK.double().exp()
    differences_R = (p_RK - q_RK).abs().sum(1) + (p_RK.sum(1) - q_RK.sum(1)).abs()
    overlaps: list[float] = (1 - differences_R / 2).clamp(0, 1).tolist()
    return overlaps


def _cosine(before_RD: torch.Tensor, after_RD: torch.Tensor) -> list[float]:
    """Cosines in float64; exactly 1 for equal vectors, since the square root of a square is exact."""
    before_RD, after_RD = before_RD.double(), after_RD.double()
    dots_R = (before_RD * after_RD).sum(1)
    squares_R = (before_RD * before_RD).sum(1) * (after_RD * after_RD).sum(1)
    cosines: list[float] = (dots_R / squares_R.sqrt()).clamp(-1, 1).tolist()
    return cosines
