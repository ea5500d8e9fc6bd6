"""The engine of ``server=``: a server answers, with one adapter per edit.

Edits are made in this process. Each one is exported as a LoRA adapter named by its content, loaded into the server
while its questions are asked, and unloaded. The server batches requests of different adapters itself.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from edit_hooks.answers import GeneratedText, ScoredContinuation, StateSimilarity, StopReason
from edit_hooks.deltas.delta import Delta
from edit_hooks.deltas.saving.export import export_peft
from edit_hooks.deltas.saving.truncation import adapter_name, editor_of, rank_of_edit, vllm_words
from edit_hooks.inference import scoring
from edit_hooks.inference.generation.continuations import end_token_ids, generated_text, has_full_length, is_stopped
from edit_hooks.inference.items import GenerateItem, ScoreItem, StateItem
from edit_hooks.lm.asking.engine import Engine
from edit_hooks.lm.asking.server import Server
from edit_hooks.lm.loading.hflm import LateLoadingHFLM
from edit_hooks.lm.options.editing import EditingOptions
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.logs import get_logger

log = get_logger("lm_eval.edited_hf")

TOGETHER = 32  # adapters that are loaded at a time
REQUESTS = 64  # at a time
PLAIN_TEXT = "The weather was fine in the morning, so they walked to the market and bought bread, apples and cheese."
SAME_MODEL = 0.1  # mean difference of log-probabilities that another precision explains

JobT = TypeVar("JobT", ScoreItem, GenerateItem)
AnswerT = TypeVar("AnswerT")


class ServedEngine(Engine):
    """Answers jobs (item, edit) on a server; no answer is kept in the store."""

    def __init__(self, lm: LateLoadingHFLM, options: EditingOptions, url: str) -> None:
        super().__init__(lm, options)
        self._server = Server(url)
        self._base: str | None = None

    def score(self, jobs: Sequence[tuple[ScoreItem, Delta | None]]) -> list[ScoredContinuation]:
        def ask(item: ScoreItem, model: str) -> ScoredContinuation:
            scored = self._server.score(model, item.context, item.continuation)
            return item.answer(scored.logprobs, scored.argmax)

        return self._served("Scoring", jobs, ask)

    def generate(self, jobs: Sequence[tuple[GenerateItem, Delta | None]]) -> list[GeneratedText]:
        for item, _ in jobs:
            _refuse_unserved(item)
        ends = end_token_ids(self._model, self._lm.tokenizer)

        def ask(item: GenerateItem, model: str) -> GeneratedText:
            tokens = self._server.continue_(
                model, item.context, item.max_new_tokens, item.stops, ignore_end=item.ignore_end
            )
            tokens, stop = self._natural_end(tokens, item, ends)
            return generated_text(self._lm.tokenizer, tokens, item, stop)

        return self._served("Decoding", jobs, ask)

    def compare_states(self, jobs: Sequence[tuple[StateItem, Delta | None]]) -> list[StateSimilarity]:
        raise EditingError("server=: a server reports no hidden states; ask tasks without them, or drop server=.")

    def _natural_end(
        self, tokens: Sequence[int], item: GenerateItem, ends: set[int]
    ) -> tuple[list[int], StopReason | None]:
        """The tokens up to the first stop, by the rules of this package's decoder, and its reason."""
        for number in range(1, len(tokens) + 1):
            so_far = list(tokens[:number])
            if so_far[-1] in ends and not item.ignore_end:
                return so_far, "eos"
            if is_stopped(self._lm.tokenizer, so_far, item):
                return so_far, "stop_string"
            if has_full_length(self._lm.tokenizer, so_far, item):
                return so_far, "length"
        return list(tokens), None

    def _served(
        self, activity: str, jobs: Sequence[tuple[JobT, Delta | None]], ask: Callable[[JobT, str], AnswerT]
    ) -> list[AnswerT]:
        self._base = self._base or self._find_base()
        answers: dict[int, AnswerT] = {}
        with self._progress(activity, jobs) as bar, ThreadPoolExecutor(REQUESTS) as pool:

            def answer(job: tuple[int, str]) -> tuple[int, AnswerT]:
                index, model = job
                return index, ask(jobs[index][0], model)

            for portion in _portions([delta for _, delta in jobs]):
                named: dict[Delta, str] = {}
                with tempfile.TemporaryDirectory(prefix="lm-edit-adapters-") as folder, self._unloaded(named):
                    self._load(Path(folder), [delta for delta, _ in portion if delta is not None], named)
                    wanted = [
                        (index, self._base if delta is None else named[delta])
                        for delta, indices in portion
                        for index in indices
                    ]
                    for index, found in pool.map(answer, wanted):
                        answers[index] = found
                        bar.update()
        return [answers[index] for index in range(len(jobs))]

    def _find_base(self) -> str:
        """Name of the server's model, after a comparison with the model of this process.

        An adapter fits any model of the same shapes, so another checkpoint would answer without an error.
        """
        name, ids = self._server.model(), self._lm.tok_encode(PLAIN_TEXT)
        item = ScoreItem(tuple(ids[:1]), tuple(ids[1:]))
        (here,) = scoring.score(self._model, [(item, None)], self._limits(), lambda count: None)
        there = self._server.score(name, item.context, item.continuation).logprobs
        own = here.token_logprobs or [math.nan] * len(there)  # none if logits are not finite
        gaps = [abs(one - other) for one, other in zip(own, there, strict=True)]
        if not (gap := math.fsum(gaps) / len(gaps)) <= SAME_MODEL:
            log.warning(
                "the server's model %s differs from that of pretrained= by %.2g nats per token of a plain sentence. "
                "Edits are made on one and answered by the other; if these are not the same weights in another "
                "precision, serve the model that pretrained= names.",
                *(name, gap),
            )
        return name

    @contextlib.contextmanager
    def _unloaded(self, named: Mapping[Delta, str]) -> Iterator[None]:
        """Scope after which the server has forgotten the adapters that ``named`` has by then."""
        try:
            yield
        except BaseException:
            for name in set(named.values()):
                with contextlib.suppress(EditingError):  # the block's error matters; one may not have been loaded
                    self._server.unload(name)
            raise
        for name in set(named.values()):
            self._server.unload(name)

    def _load(self, folder: Path, deltas: Sequence[Delta], named: dict[Delta, str]) -> None:
        """Export and load edits, and record the name of each before it is loaded. Equal ones share an adapter."""
        for delta in deltas:  # before the first one is loaded
            if delta.runtime_part is not None or not delta.is_low_rank or not delta.factors:
                raise EditingError(
                    "server=: the edits of this editor are no low-rank updates of weights, which an adapter cannot "
                    "hold. Use r_rome, memit, lora or another editor of low rank; or export the edited model "
                    "(lm-edit export --format merged) and serve that."
                )
        for delta in deltas:
            name = adapter_name(editor_of(delta.meta), delta.checksum())
            is_new = name not in named.values()
            named[delta] = name
            if is_new:
                try:
                    self._server.load(name, export_peft(delta, folder / name))
                except EditingError as error:
                    raise EditingError(f"{error} ({vllm_words(rank_of_edit(delta))}.)") from None


def _portions(deltas: Sequence[Delta | None]) -> Iterator[list[tuple[Delta | None, list[int]]]]:
    """The edits with the indices of their jobs, in portions that are loaded together."""
    by_edit: dict[Delta | None, list[int]] = {}
    for index, delta in enumerate(deltas):
        by_edit.setdefault(delta, []).append(index)
    edits = list(by_edit.items())
    for start in range(0, len(edits), TOGETHER):
        yield edits[start : start + TOGETHER]


def _refuse_unserved(item: GenerateItem) -> None:
    unserved = {
        "teacher forcing": item.forced,
        "drawn tokens": item.sampling is not None,
        "thoughts": item.think_end is not None,
    }
    if asked := [name for name, is_asked in unserved.items() if is_asked]:
        raise EditingError(f"server=: {asked[0]} are not served; ask tasks without them, or drop server=.")
