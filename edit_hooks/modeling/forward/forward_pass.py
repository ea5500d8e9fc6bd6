"""How the logits of a model are computed: by decoder and head apart, or by the whole model.

Decoder and head apart are fastest: the head reads the states of few positions, slice by slice. That is not every causal
model's forward pass: some call a part of the decoder, transform the states before the head, or keep other caches than
keys and values. So each way is tried once per model on a few tokens and used only if its logits are the model's own.

Shapes: R rows, T tokens, L positions, d residual width, V vocabulary.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers import DynamicCache

from edit_hooks.modeling.architectures import decoder_of, head_of, input_device
from edit_hooks.modeling.forward.kv_cache import CACHE, right_aligned, right_padded
from edit_hooks.modeling.forward.lm_head import WHOLE_VOCAB, LMHead, ModelHead, PrecomputedLogits
from edit_hooks.modeling.forward.prefix_cache import compute_prefix_cache
from edit_hooks.modeling.hooks import frozen, hooks, on_input, select_positions
from edit_hooks.modeling.tensors import at_least_float32
from edit_hooks.utils.errors import first_line
from edit_hooks.utils.logs import get_logger

log = get_logger("lm_eval.edited_hf")

# decoder and head apart; the whole model, whose head is given the states of some positions only; the whole model
Way = Literal["apart", "narrowed", "whole"]

PROBE_LENGTHS = (7, 5)  # tokens of the rows that the ways are tried on
NUM_STEPS = 2  # of these, decoded one by one on top of the others


@dataclass(frozen=True)
class ForwardPass:
    """What holds for the passes of a model.

    Attributes:
        way: how its logits are computed.
        decodes: the keys and values of earlier tokens stand for them in a pass over the next token.
        shares: they do so in a pass over several tokens, for many rows.
        pads: rows of different lengths may share a batch.
    """

    way: Way
    decodes: bool = True
    shares: bool = True
    pads: bool = True

    def head(self, model: Any) -> LMHead:
        """The head for the results of :meth:`states_at`."""
        return ModelHead(model) if self.way == "apart" else PrecomputedLogits()

    def states_at(
        self, model: Any, inputs: Mapping[str, Any], row_L: torch.Tensor, column_L: torch.Tensor, use_cache: bool
    ) -> torch.Tensor:
        """Run a batch: the decoder's outputs [L, d] at some positions, or the model's logits [L, V] there."""
        if self.way == "apart":
            return _at(decoder_of(model)(**inputs, use_cache=use_cache).last_hidden_state, row_L, column_L)
        if self.way == "whole":
            return _at(model(**inputs, use_cache=use_cache).logits, row_L, column_L)
        with hooks(on_input(head_of(model), select_positions(row_L, column_L))):
            logits_1LV: torch.Tensor = model(**inputs, use_cache=use_cache).logits
        return logits_1LV.squeeze(0)


def _at(values_RTW: torch.Tensor, row_L: torch.Tensor, column_L: torch.Tensor) -> torch.Tensor:
    return values_RTW[row_L.to(values_RTW.device), column_L.to(values_RTW.device)]


_known: weakref.WeakKeyDictionary[nn.Module, ForwardPass] = weakref.WeakKeyDictionary()


def forward_pass_of(model: Any) -> ForwardPass:
    """How this model's logits are computed; found at its first use, which takes a few short passes."""
    if model not in _known:
        with frozen(model), torch.no_grad():
            probe = _Probe(model)
            found = probe.forward_pass()
        if probe.has_nan:  # nothing is learned from NaN; the model without an edit may have numbers
            return found
        _known[model] = found
        _report(model, found, probe.reason)
    return _known[model]


def _report(model: Any, found: ForwardPass, reason: str) -> None:
    slower = []
    if found.way != "apart":
        slower.append("logits come from the whole model")
    if not found.decodes:
        slower.append("every new token runs its whole text again")
    if not found.pads:
        slower.append("texts run one by one")
    if slower:
        log.warning("%s runs slower than others: %s (%s).", type(model).__name__, ", ".join(slower), reason)


def probe_rows(model: Any, lengths: Sequence[int]) -> list[list[int]]:
    """Rows of different tokens, of these lengths, that are texts to any model."""
    num_tokens = model.get_input_embeddings().weight.shape[0]
    start = num_tokens // 3  # special tokens, such as those of images, are at the ends of a vocabulary
    return [
        [start + (7 * column + 3 * row) % max(1, num_tokens - start) for column in range(length)]
        for row, length in enumerate(lengths)
    ]


class _Probe:
    """Tries the ways to run a model on a few tokens against plain calls of the model.

    Attributes:
        reason: why the first way that was dropped was dropped.
        has_nan: the model's own logits have NaN, so nothing can be compared.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.device, self.reason = model, input_device(model), ""
        self.rows = probe_rows(model, PROBE_LENGTHS)
        self.alone = [self._plain([row])[0] for row in self.rows]
        self.has_nan = any(bool(logits_TV.isnan().any()) for logits_TV in self.alone)

    def _plain(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        ids_RT, mask_RT = right_padded(rows, self.device)
        logits_RTV: torch.Tensor = self.model(input_ids=ids_RT, attention_mask=mask_RT, use_cache=False).logits
        return logits_RTV

    def forward_pass(self) -> ForwardPass:
        pads = self._holds("padding", self._padded)
        # Compared within one batch, so that the states are the same bit by bit.
        batches = [self.rows] if pads else [[row] for row in self.rows]
        ways: tuple[Way, ...] = ("apart", "narrowed")
        way: Way = "whole"
        for candidate in ways:
            if self._holds("head", functools.partial(self._logits_by, ForwardPass(candidate), batches)):
                way = candidate
                break
        found = ForwardPass(way)
        decodes = pads and self._holds("cache", functools.partial(self._decoded, found))
        shares = decodes and self._holds("prefix cache", functools.partial(self._on_a_prefix, found))
        return ForwardPass(way, decodes, shares, pads)

    def _holds(self, what: str, pairs: Callable[[], Iterator[tuple[torch.Tensor, torch.Tensor]]]) -> bool:
        """Whether all pairs of logits agree; computing them may fail in whatever way a model's code does."""
        try:
            fails = "" if all(agree(*pair) for pair in pairs()) else "other logits"
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            fails = first_line(error)
        if fails and not self.reason:
            self.reason = f"{what}: {fails}"
        return not fails

    def _padded(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Logits of rows of different lengths in one batch."""
        together_RTV = self._plain(self.rows)
        for row_TV, alone_TV in zip(together_RTV, self.alone, strict=True):
            yield row_TV[: len(alone_TV)], alone_TV

    def _logits_by(
        self, found: ForwardPass, batches: Sequence[Sequence[Sequence[int]]]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Logits of all positions, of the whole vocabulary and of one slice with all of its tokens."""
        head = found.head(self.model)
        for rows in batches:
            ids_RT, mask_RT = right_padded(rows, self.device)
            row_L, column_L = mask_RT.nonzero(as_tuple=True)
            inputs = {"input_ids": ids_RT, "attention_mask": mask_RT}
            states_L = found.states_at(self.model, inputs, row_L, column_L, use_cache=False)
            expected_LV = _at(self._plain(rows), row_L, column_L)
            yield head.logits(states_L, WHOLE_VOCAB), expected_LV
            yield head.logits(states_L, slice(0, expected_LV.shape[1])), expected_LV
            yield head.logits(states_L[:1], WHOLE_VOCAB), expected_LV[:1]

    def _decoded(self, found: ForwardPass) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Logits of the last tokens, each on top of a right-aligned cache of those before it."""
        ids_RT, mask_RT = right_padded([row[:-NUM_STEPS] for row in self.rows], self.device)
        row_R, length_R = torch.arange(len(ids_RT), device=self.device), mask_RT.sum(1)
        cache = DynamicCache()
        inputs = {"input_ids": ids_RT, "attention_mask": mask_RT, CACHE: cache}
        states_R = found.states_at(self.model, inputs, row_R, length_R - 1, use_cache=True)
        yield self._next_logits(found, states_R), self._expected(-NUM_STEPS - 1)
        aligned = right_aligned(cache, length_R, ids_RT.shape[1])
        cache, mask_RT = aligned.cache, aligned.mask_RT
        for step in range(-NUM_STEPS, 0):
            mask_RT = torch.cat([mask_RT, torch.ones_like(mask_RT[:, :1])], 1)
            inputs = {
                "input_ids": torch.tensor([[row[step]] for row in self.rows], device=self.device),
                "attention_mask": mask_RT,
                "position_ids": length_R[:, None],
                CACHE: cache,
            }
            states_R = found.states_at(self.model, inputs, row_R, torch.zeros_like(row_R), use_cache=True)
            yield self._next_logits(found, states_R), self._expected(step)
            length_R = length_R + 1

    def _on_a_prefix(self, found: ForwardPass) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Logits of the last tokens in one pass on top of those before them."""
        row, alone_TV = self.rows[0], self.alone[0]
        prefix = compute_prefix_cache(self.model, [row[:-NUM_STEPS]])
        assert prefix is not None
        ids_RT, mask_RT = right_padded([row[-NUM_STEPS:], row[-NUM_STEPS:-1]], self.device)
        row_L, column_L = mask_RT.nonzero(as_tuple=True)
        inputs = prefix.repeated(2).inputs(ids_RT, mask_RT)
        states_L = found.states_at(self.model, inputs, row_L, column_L, use_cache=True)
        yield self._next_logits(found, states_L), alone_TV[prefix.width + column_L.to(alone_TV.device)]

    def _next_logits(self, found: ForwardPass, states_L: torch.Tensor) -> torch.Tensor:
        return found.head(self.model).logits(states_L, WHOLE_VOCAB)

    def _expected(self, position: int) -> torch.Tensor:
        return torch.stack([logits_TV[position] for logits_TV in self.alone])


def agree(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether logits are equal up to rounding, whose size depends on batch and shape.

    Other logits differ by as much as logits vary; rounding in bfloat16 is a few hundredths of that.
    """
    if found.shape != expected.shape:
        return False
    is_finite = torch.isfinite(expected)
    if not torch.equal(torch.isfinite(found), is_finite.to(found.device)):
        return False
    values, wanted = at_least_float32(found[is_finite.to(found.device)]), at_least_float32(expected[is_finite])
    spread = (wanted - wanted.mean()).norm()
    limit = 2 * torch.finfo(expected.dtype).eps ** 0.5
    return bool((values.to(wanted.device) - wanted).norm() <= limit * spread)
