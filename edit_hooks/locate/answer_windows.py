"""States that make a long answer likely, one per window of its tokens.

For the answer a_0 .. a_{m-1} to a question of q tokens, a window of w tokens starts at every (w - o)-th of them, o the
overlap. The offset of a window is optimized at the output of block L, at the token before the window:

    row = question + a[: end - 1],   L = mean over the window's tokens of -log p + weight_decay ||delta|| / ||h0||^2

with the offsets of all earlier windows held. There is no KL term and no context template. h0, the block's output there,
does not depend on them, because they enter behind the block. UnKE has a single window, the whole answer; AnyEdit has
several. A window whose tokens are all in the one before is left out (the release puts it one token too late).

Shapes: W windows of an answer, d residual width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from edit_hooks.base.config import EditorConfig, config_field
from edit_hooks.base.footprint import Footprint, Work, kept_activations, passes
from edit_hooks.base.job import EditJob
from edit_hooks.deltas.delta import Delta
from edit_hooks.locate.text_states import StatedText
from edit_hooks.locate.value_editor import UNLIKELY_NLL, UNLIKELY_TARGET_WARNING, batch_diagnostics
from edit_hooks.locate.values.rows import TokenRow
from edit_hooks.locate.values.value_batch import ValueProblem
from edit_hooks.locate.values.value_optimization import OptimizedValue, ValueSettings, optimize_values
from edit_hooks.modeling.architectures import num_layers
from edit_hooks.modeling.tokens import require_eos, split_continuation
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import UnusableRequestError
from edit_hooks.utils.progress import Rounds
from edit_hooks.utils.settings.numbers import NON_NEGATIVE, POSITIVE

ANSWER_TOKENS = 128  # of a typical long answer, for the footprint


@dataclass(kw_only=True)
class AnswerConfig(EditorConfig):
    """Settings of the optimization of an answer's states."""

    num_steps: int = config_field(
        "loss evaluations of the value optimization; one update fewer is made", within=POSITIVE, default=25
    )
    lr: float = config_field("Adam learning rate of the offset", within=POSITIVE, default=0.5)
    weight_decay: float = config_field(
        "factor of the penalty ||delta|| / ||h0||^2 on the offset", within=NON_NEGATIVE, default=1e-3
    )
    clamp_factor: float = config_field("radius of the offset's ball in units of ||h0||", within=POSITIVE, default=4.0)
    early_stop_loss: float = config_field("stop when the loss of a window falls below this; 0: never", default=0.0)
    append_eos: bool = config_field(
        "append the end-of-text token to the answer; the releases append the end of the turn", default=True
    )
    keep_intermediates: bool = config_field("keep the optimized states on the delta for inspection", default=False)


ConfigT = TypeVar("ConfigT", bound=AnswerConfig)


@dataclass(frozen=True)
class WindowedAnswer:
    """Token ids of a question and its answer, and the windows of the answer.

    Attributes:
        ids: both, the answer's last token included.
        windows: positions of each window's tokens in ``ids``; none is empty.
    """

    ids: tuple[int, ...]
    windows: tuple[range, ...]

    @property
    def question(self) -> tuple[int, ...]:
        return self.ids[: self.windows[0].start]

    @property
    def positions(self) -> list[int]:
        """The token before each window, at which its state is written."""
        return [window.start - 1 for window in self.windows]

    def problem(self, number: int, earlier: Sequence[OptimizedValue]) -> ValueProblem:
        """The optimization of one window's offset with those of earlier windows held."""
        window = self.windows[number]
        row = TokenRow(
            ids=self.ids[: window.stop - 1],
            position=window.start - 1,
            labels=tuple((position - 1, self.ids[position]) for position in window),
            prompt_length=window.start,
            held=tuple(zip(self.positions[:number], [value.delta_D for value in earlier], strict=True)),
        )
        return [row], TokenRow(self.ids[:1], 0)  # no KL term: the shortest row


def answer_of(
    tokenizer: PreTrainedTokenizerBase, request: EditRequest, append_eos: bool, width: int | None, overlap: int
) -> WindowedAnswer:
    """Encode a request's question and answer, and cut the answer into windows.

    Args:
        width: tokens of a window; ``None``: the whole answer is one.
        overlap: tokens that a window shares with the one before, fewer than ``width``.

    Raises:
        EditingError: the answer adds no token, no token precedes it, or the tokenizer has no end-of-text token.
    """
    question, answer = split_continuation(tokenizer, request.text, request.continuation)
    if not question:
        raise UnusableRequestError(f"prompt {request.text!r} has no token before the answer; nothing could predict it.")
    if not answer:
        raise UnusableRequestError(f"answer {request.target_new!r} has no token of its own after {request.text!r}.")
    ids = (*question, *answer, *([require_eos(tokenizer)] if append_eos else []))
    start, stop = len(question), len(ids)
    windows = [range(start, stop)]
    if width is not None:
        starts = range(start, stop, width - overlap)
        windows = [range(first, min(first + width, stop)) for first in starts]
        windows = [one for one in windows if one.start == start or one.stop > min(one.start + overlap, stop)]
    return WindowedAnswer(ids, tuple(windows))


def optimize_answers(
    job: EditJob[ConfigT], answers: Sequence[WindowedAnswer], layer: int
) -> list[list[OptimizedValue]]:
    """The offsets of every answer's windows at the output of a block, one window after the other.

    The same windows of all answers are solved together.
    """
    config = job.config
    settings = ValueSettings(
        layer=layer,
        site="block",
        num_steps=config.num_steps,
        lr=config.lr,
        weight_decay=config.weight_decay,
        clamp_factor=config.clamp_factor,
        kl_factor=0.0,
        early_stop_loss=config.early_stop_loss,
    )
    values: list[list[OptimizedValue]] = [[] for _ in answers]
    rounds = Rounds(len(answers), sum(len(answer.windows) for answer in answers), job.progress)
    for number in range(max(len(answer.windows) for answer in answers)):
        chosen = [index for index, answer in enumerate(answers) if number < len(answer.windows)]
        problems = [answers[index].problem(number, values[index]) for index in chosen]
        solved = optimize_values(job.model, problems, settings, config.engine, progress=rounds.next)
        for index, value in zip(chosen, solved, strict=True):
            values[index].append(replace(value, losses=[_without_kl(record) for record in value.losses]))
    return values


def stated(ids: tuple[int, ...], answer: WindowedAnswer, values: Sequence[OptimizedValue]) -> StatedText:
    """A text with the states that an answer's windows should have.

    Args:
        ids: the question, or more of the answer.
    """
    return StatedText(ids, answer.positions, torch.stack([value.v0_D + value.delta_D for value in values]))


def record_answers(
    job: EditJob[ConfigT], deltas: Sequence[Delta], texts: Sequence[StatedText], values: Sequence[list[OptimizedValue]]
) -> None:
    """Add the diagnostics of the optimizations behind each delta, and its states with ``keep_intermediates``."""
    start = 0
    for delta, group in zip(deltas, job.groups, strict=True):
        part = slice(start, start + len(group))
        delta.diagnostics = {**answer_diagnostics(values[part]), **delta.diagnostics}
        if job.config.keep_intermediates:
            delta.intermediates |= {f"z.{number}": text.states_WD for number, text in enumerate(texts[part])}
        start += len(group)


def answer_warnings(delta: Delta) -> list[str]:
    """A warning of an answer that is still unlikely after the optimization."""
    return [UNLIKELY_TARGET_WARNING] if delta.diagnostics["final_nll"] > UNLIKELY_NLL else []


def with_answers(footprint: Footprint, config: AnswerConfig, model: nn.Module) -> Footprint:
    """The footprint of writing states, and that of their optimization: one row of a long answer through the blocks."""
    above = min(config.edited_layers[-1] + 1, num_layers(model) - 1)
    optimizing = passes(model, first=above, rows=1, tokens=ANSWER_TOKENS, steps=config.num_steps, labels=ANSWER_TOKENS)
    kept = kept_activations(model, first=above, rows=1, tokens=ANSWER_TOKENS, labels=ANSWER_TOKENS)
    return replace(footprint, activations=kept, work=optimizing + (footprint.work or Work()))


def answer_diagnostics(values: Sequence[Sequence[OptimizedValue]]) -> dict[str, Any]:
    """Diagnostics of the optimizations behind one delta, over all windows of its answers."""
    diagnostics = batch_diagnostics([value for of_answer in values for value in of_answer])
    if len(values) > 1:
        diagnostics["num_requests"] = len(values)
    else:
        diagnostics.pop("num_requests", None)
    return {**diagnostics, "num_windows": sum(map(len, values))}


def _without_kl(record: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in record.items() if name != "kl"}
