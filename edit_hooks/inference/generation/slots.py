"""Decoding on a GPU: many items take turns in a batch of fixed shape.

A GPU waits for the host whenever a step's shapes are new, and whenever the host reads its tokens. So the rows of a
batch are slots of one preallocated KV cache, whose numbers of rows and columns are a few round ones. The tokens of a
slot begin in column 0 and a new one is written behind them, so a slot is refilled without moving the others. The host
reads tokens two steps late, while the GPU is at work; a row that turns out to have stopped has then been continued by
two tokens that are dropped. A row whose next token the host decides (a draw, a checkpoint's rule, a given target) is
read at every step. Where no edit acts beside the weights, the step of a small batch, which waits for its launches, is
recorded once and replayed (:mod:`edit_hooks.modeling.device.recording`).

The masks that a model would derive from a rectangular batch are given to it ready, per row. Models whose logits are not
their own that way, found at their first use, decode as on a CPU.

Shapes: B slots, C columns, N rows of a prefill, T tokens, H key heads, K head width.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer

from edit_hooks.answers import GeneratedText
from edit_hooks.deltas.delta import Delta
from edit_hooks.deltas.row_edits import RowEdits
from edit_hooks.inference.batching import Batch
from edit_hooks.inference.generation.continuations import Continuations
from edit_hooks.inference.items import Limits
from edit_hooks.modeling.architectures import input_device, text_config
from edit_hooks.modeling.device.recording import recording_of, records, release_memory
from edit_hooks.modeling.device.run_ahead import LateRead, runs_ahead, upload
from edit_hooks.modeling.forward.forward_pass import ForwardPass, agree, forward_pass_of, probe_rows
from edit_hooks.modeling.forward.kv_cache import CACHE, right_padded
from edit_hooks.modeling.forward.length_dependence import length_rules
from edit_hooks.modeling.forward.lm_head import WHOLE_VOCAB, LMHead
from edit_hooks.modeling.forward.prefix_cache import PrefixCache
from edit_hooks.modeling.forward.vocab_loss import greedy_tokens
from edit_hooks.modeling.hooks import frozen
from edit_hooks.utils.errors import first_line
from edit_hooks.utils.logs import get_logger

log = get_logger("lm_eval.edited_hf")

STEPS_AHEAD = 2  # that are started before the tokens of a step are read
REFILLED_SHARE = 8  # slots are refilled when an eighth is free: a prefill of one row takes as long as a step
MIN_COLUMNS = 64
RECORDED = "decoding"
KINDS_OF_LAYERS = {"full_attention", "sliding_attention"}
PROBE_STEPS = 2
# A recording keeps its cache, and is tried on a copy of it; a large batch gains little.
MOST_RECORDED_BYTES = 2**28

Keep = Callable[[Sequence[int], Sequence[GeneratedText]], None]


def uses_slots(model: Any, delta: Delta | None) -> bool:
    """Whether the items of an edit decode in slots.

    Not under hook edits, which keep a state per row, and not where keys depend on the length of the text.
    """
    if delta is not None and delta.hook_edit is not None:
        return False
    return runs_ahead(input_device(model)) and _suits(model)


_known: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def _suits(model: Any) -> bool:
    """Whether a model's logits in slots are its own; found at its first use, which takes a few short passes."""
    if model not in _known:
        reason = _unsuitable(model)
        if reason:
            log.info("%s decodes without slots: %s.", type(model).__name__, reason)
        _known[model] = not reason
    return _known[model]


@torch.no_grad()
def _unsuitable(model: Any) -> str:
    if not forward_pass_of(model).decodes or length_rules(model):
        return "its keys and values cannot stand in columns of a row's own"
    if len({parameter.device for parameter in model.parameters()}) > 1:
        return "it is on several devices"
    if not _kinds_of_layers(model) <= KINDS_OF_LAYERS:
        return f"it has layers of the kinds {', '.join(sorted(_kinds_of_layers(model)))}"
    try:
        with frozen(model):
            return "" if all(agree(*pair) for pair in _probe(model)) else "its logits are others there"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # in whatever way a model's code fails
        return first_line(error)


def _probe(model: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Logits of the last tokens of rows of different lengths in slots, and those of the model."""
    rows = probe_rows(model, (7, 5))
    batch = _SlotBatch(model, len(rows), MIN_COLUMNS)
    head = batch.forward.head(model)
    edits = RowEdits(model, [None] * len(rows))
    batch.prefill([1, 0], [row[:-PROBE_STEPS] for row in rows], edits, None)
    device = input_device(model)
    for step in range(-PROBE_STEPS, 0):
        batch.ids_B.copy_(torch.tensor([row[step] for row in reversed(rows)]))
        found = head.logits(batch.step(edits), WHOLE_VOCAB)
        for slot, row in enumerate(reversed(rows)):
            ids_1T = torch.tensor([row[: len(row) + step + 1]], device=device)
            yield found[slot], model(input_ids=ids_1T, use_cache=False).logits[0, -1]


def _kinds_of_layers(model: Any) -> set[str]:
    config = text_config(model.config)
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return {*kinds}
    return {"full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"}


class _SlotLayer(DynamicLayer):
    """Keys and values of one block by slot; a new token's are written into a column of each row's own."""

    def __init__(self, like: DynamicLayer, num_slots: int, columns: int) -> None:
        super().__init__()
        self.keys, self.values = (
            tensor.new_zeros(num_slots, tensor.shape[1], columns, tensor.shape[3])
            for tensor in (like.keys, like.values)
        )
        self.is_initialized, self.device = True, like.keys.device

    def write(self, slot_N: torch.Tensor, prefilled: DynamicLayer) -> None:
        """Put the right-padded rows of a prefill into slots; their padding is behind the tokens, where it is masked.

        What an earlier text left behind them is zeroed: a NaN in it, of an edit that broke the model, would reach the
        new text through attention weights of zero.
        """
        width = prefilled.keys.shape[2]
        for states, new in ((self.keys, prefilled.keys), (self.values, prefilled.values)):
            states[slot_N, :, :width] = new
            states[slot_N, :, width:] = 0

    def select(self, slot_B: torch.Tensor) -> None:
        """Keep some slots."""
        self.keys, self.values = self.keys[slot_B], self.values[slot_B]


class _SlotCache(Cache):
    """The layers, and the column into which the tokens of a step are written."""

    def __init__(self, layers: list[_SlotLayer], slot_B: torch.Tensor, column_B: torch.Tensor) -> None:
        super().__init__(layers=layers)
        self.slot_B, self.column_B = slot_B, column_B

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_args: Any, **_more: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self.layers[layer_idx]
        layer.keys[self.slot_B, :, self.column_B] = key_states[:, :, 0]
        layer.values[self.slot_B, :, self.column_B] = value_states[:, :, 0]
        return layer.keys, layer.values


class _SlotBatch:
    """The tensors of a batch in slots, and the passes over it.

    Attributes:
        ids_B: token that each slot reads next. length_B: number of tokens before it.
    """

    def __init__(self, model: Any, num_slots: int, columns: int) -> None:
        self.model, self.device, self.columns = model, input_device(model), columns
        self.forward: ForwardPass = forward_pass_of(model)
        self.window = getattr(text_config(model.config), "sliding_window", None) or columns
        self.kinds = _kinds_of_layers(model)
        self.layers: list[_SlotLayer] = []
        self.replay: Callable[[], None] | None = None
        self._set_slots(torch.zeros(num_slots, dtype=torch.long), torch.zeros(num_slots, dtype=torch.long))

    def _set_slots(self, ids_B: torch.Tensor, length_B: torch.Tensor) -> None:
        self.ids_B, self.length_B = ids_B.to(self.device), length_B.to(self.device)
        self.slot_B = torch.arange(len(ids_B), device=self.device)
        self.first_B = torch.zeros_like(self.slot_B)
        self.column_C = torch.arange(self.columns, device=self.device)
        self.tokens_B, self.states_BD = torch.zeros_like(self.slot_B), torch.empty(0)
        self.replay = None

    def prefill(
        self, slots: Sequence[int], rows: Sequence[Sequence[int]], edits: RowEdits, prefix: PrefixCache | None
    ) -> torch.Tensor:
        """Run prompts, keep their keys and values in slots; the states [N, d] of their last tokens."""
        batch = Batch([*slots], [None] * len(rows), prefix)
        ids_NT, mask_NT = right_padded([row[batch.num_known :] for row in rows], self.device)
        inputs = {CACHE: DynamicCache(), **batch.inputs(ids_NT, mask_NT)}
        new_N = mask_NT.sum(1)
        with edits.prefill(mask_NT, new_N):
            row_N = torch.arange(len(rows), device=self.device)
            states_ND = self.forward.states_at(self.model, inputs, row_N, new_N - 1, use_cache=True)
        slot_N = upload(torch.tensor(slots), self.device)
        if not self.layers:
            self.layers = [_SlotLayer(layer, len(self.slot_B), self.columns) for layer in inputs[CACHE].layers]
        for layer, prefilled in zip(self.layers, inputs[CACHE].layers, strict=True):
            layer.write(slot_N, prefilled)
        self.length_B[slot_N] = new_N + batch.num_known
        return states_ND

    def step(self, edits: RowEdits) -> torch.Tensor:
        """Run one token per slot; the states [B, d]. A slot without an item computes what nothing reads."""
        inputs = {
            "input_ids": self.ids_B[:, None],
            "attention_mask": self._masks(),
            "position_ids": self.length_B[:, None],
            CACHE: _SlotCache(self.layers, self.slot_B, self.length_B),
        }
        with edits.step():
            states_BD = self.forward.states_at(self.model, inputs, self.slot_B, self.first_B, use_cache=True)
        self.length_B.add_(1).clamp_(max=self.columns - 1)  # a slot without an item stays in its last column
        return states_BD

    def advance(self, edits: RowEdits, head: LMHead) -> torch.Tensor:
        """Run one token per slot; the most likely tokens [B], which the slots read next."""
        if self.replay is not None:
            self.replay()
            return self.tokens_B
        states_BD = self.step(edits)
        if self.states_BD.shape != states_BD.shape:
            self.states_BD = torch.empty_like(states_BD)
        self.states_BD.copy_(states_BD)
        self.tokens_B.copy_(greedy_tokens(head, states_BD))
        self.ids_B.copy_(self.tokens_B.clamp(min=0))  # the host finds out about logits without a token later
        return self.tokens_B

    def record(self, edits: RowEdits, head: LMHead) -> None:
        """Replay the steps after the first one, if they can be recorded; there is no edit beside the weights."""
        caches = [tensor for layer in self.layers for tensor in (layer.keys, layer.values)]
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in caches)
        if num_bytes > MOST_RECORDED_BYTES or not records(self.model, self.device, RECORDED):
            return
        constant = [self.slot_B, self.first_B, self.column_C]
        tensors = [self.states_BD, self.tokens_B, self.ids_B, self.length_B, *constant, *caches]

        def step() -> None:
            self.advance(edits, head)

        recording = recording_of(self.model, RECORDED, None, step, tensors, tensors[:1])
        if recording is not None:
            self.states_BD, self.tokens_B, self.ids_B, self.length_B, *rest = recording.tensors
            self.slot_B, self.first_B, self.column_C, *caches = rest
            for layer, keys, values in zip(self.layers, caches[::2], caches[1::2], strict=True):
                layer.keys, layer.values = keys, values
            self.replay = recording.replay

    def select(self, slots: Sequence[int]) -> None:
        """Keep some slots."""
        slot_B = upload(torch.tensor(slots), self.device)
        for layer in self.layers:
            layer.select(slot_B)
        self._set_slots(self.ids_B[slot_B], self.length_B[slot_B])

    def _masks(self) -> torch.Tensor | dict[str, torch.Tensor]:
        """The columns that each slot's token attends to, [B, 1, 1, C], by kind of layer if there are several."""
        last_B1 = self.length_B[:, None]
        before_BC = self.column_C <= last_B1
        masks = {"full_attention": before_BC}
        if "sliding_attention" in self.kinds:
            masks["sliding_attention"] = before_BC & (self.column_C > last_B1 - self.window)
        ready = {kind: self._as_read(masks[kind]) for kind in self.kinds}
        return ready if len(ready) > 1 else next(iter(ready.values()))

    def _as_read(self, mask_BC: torch.Tensor) -> torch.Tensor:
        """Numbers that are added to the scores: fused attention would make them of booleans in every layer."""
        hidden_B11C, dtype = ~mask_BC[:, None, None], self.model.get_input_embeddings().weight.dtype
        return torch.zeros_like(hidden_B11C, dtype=dtype).masked_fill_(hidden_B11C, torch.finfo(dtype).min)


class _LateTokens(NamedTuple):
    """Tokens on their way to the host, and the rows that they continue, by position."""

    tokens: LateRead
    rows: list[tuple[int, int]]


def decode_in_slots(
    model: Any, continuations: Continuations, batch: Batch, rows: Sequence[int], limits: Limits, keep: Keep
) -> None:
    """Continue rows of a batch of any size.

    Args:
        continuations: of all rows of the batch.
        limits: bounds of the cache: its slots, and its slots times columns.
        keep: gets indices of the batch and their answers as rows finish.
    """
    groups: dict[tuple[int, bool], list[int]] = {}
    for row in rows:
        item = continuations.items[row]
        columns = _bucket(len(item.context) + max(1, item.most_tokens))
        groups.setdefault((columns, continuations.is_greedy(row)), []).append(row)
    for (columns, reads_late), members in groups.items():
        most = min(limits.max_rows, max(1, limits.max_tokens // columns))
        num_slots = min(_power_of_two(len(members)), 1 << (most.bit_length() - 1))
        while members:
            loop = _SlotLoop(_SlotBatch(model, num_slots, columns), continuations, batch, members, keep)
            try:
                loop.run(STEPS_AHEAD if reads_late else 0, limits)
            except torch.OutOfMemoryError:
                if num_slots == 1:
                    raise
            members = [row for row in members if continuations.stop[row] is None]
            if members:  # here the exception is gone, and with it the frames that hold the tensors of the failed pass
                num_slots //= 2
                del loop
                release_memory()
                log.warning("memory is short: texts of up to %d tokens continue %d at a time", columns, num_slots)
                continuations.restart(members)


def _bucket(columns: int) -> int:
    """The next number of columns that caches have: four of them between two powers of two."""
    step = max(MIN_COLUMNS, _power_of_two(columns) // 8)
    return -(-columns // step) * step


def _power_of_two(number: int) -> int:
    """The smallest that is not below a number."""
    return 1 << (number - 1).bit_length()


class _SlotLoop:
    """Items that wait, those in slots, and tokens on their way."""

    def __init__(
        self, slots: _SlotBatch, continuations: Continuations, batch: Batch, rows: Sequence[int], keep: Keep
    ) -> None:
        self.slots, self.continuations, self.batch, self.keep = slots, continuations, batch, keep
        self.head = slots.forward.head(slots.model)
        self.waiting = deque(rows)
        self.row_of_slot: list[int | None] = [None] * len(slots.slot_B)
        self.num_started = dict.fromkeys(rows, 0)  # tokens that are computed or under way
        self.late: deque[_LateTokens] = deque()
        self.edits: RowEdits
        self.is_bare = True  # no edit acts beside the weights

    @torch.no_grad()
    def run(self, steps_ahead: int, limits: Limits) -> None:
        """Decode until nothing waits and all tokens are read."""
        while self.waiting or self.late or self._taken:
            if self.waiting and len(self._taken) * REFILLED_SHARE <= len(self.row_of_slot) * (REFILLED_SHARE - 1):
                self._refill(steps_ahead, limits)
            elif not self.waiting and self._taken and 2 * len(self._taken) <= len(self.row_of_slot):
                self._shrink()
            if taken := self._taken:
                self._step(taken, steps_ahead)
            while self.late and (len(self.late) > steps_ahead or not self._taken):
                self._read()

    @property
    def _taken(self) -> list[int]:
        return [slot for slot, row in enumerate(self.row_of_slot) if row is not None]

    def _refill(self, steps_ahead: int, limits: Limits) -> None:
        """Prefill waiting items into the free slots, as many as one pass may have."""
        free = [slot for slot, row in enumerate(self.row_of_slot) if row is None]
        chosen: list[int] = []
        width = 0
        while self.waiting and len(chosen) < len(free):
            width = max(width, len(self.continuations.items[self.waiting[0]].context))
            if chosen and width * (len(chosen) + 1) > limits.max_tokens:
                break
            chosen.append(self.waiting.popleft())
        slots = free[: len(chosen)]
        prefix = self.batch.prefix
        if prefix is not None:
            prefix = prefix.select(upload(torch.tensor(chosen), prefix.mask_RP.device))
        edits = RowEdits(self.slots.model, [self.batch.deltas[row] for row in chosen])
        states_ND = self.slots.prefill(slots, [self.continuations.items[row].context for row in chosen], edits, prefix)
        for slot, row in zip(slots, chosen, strict=True):
            self.row_of_slot[slot] = row
        self._bind_edits()
        self._choose(states_ND, range(len(slots)), slots, steps_ahead)

    def _bind_edits(self) -> None:
        deltas = [None if row is None else self.batch.deltas[row] for row in self.row_of_slot]
        self.edits = RowEdits(self.slots.model, deltas)
        self.is_bare = not any(deltas)
        if not self.is_bare:
            self.slots.replay = None

    def _step(self, taken: Sequence[int], steps_ahead: int) -> None:
        """Continue all slots by a token."""
        if steps_ahead == 0:
            self._choose(self.slots.step(self.edits), taken, taken, steps_ahead)
            return
        is_first = not len(self.slots.states_BD)
        self._send(self.slots.advance(self.edits, self.head), taken, taken)
        if is_first and self.is_bare:
            self.slots.record(self.edits, self.head)

    def _shrink(self) -> None:
        """Keep as many slots as the items need."""
        taken = self._taken
        free = [slot for slot, row in enumerate(self.row_of_slot) if row is None]
        kept = sorted([*taken, *free[: _power_of_two(len(taken)) - len(taken)]])
        self.slots.select(kept)
        self.row_of_slot = [self.row_of_slot[slot] for slot in kept]
        self._bind_edits()

    def _choose(
        self, states_ND: torch.Tensor, positions: Sequence[int], slots: Sequence[int], steps_ahead: int
    ) -> None:
        """Choose the next tokens of slots, by states at some positions."""
        rows = [row for slot in slots if (row := self.row_of_slot[slot]) is not None]
        tokens_N = greedy_tokens(self.head, states_ND)
        if steps_ahead == 0:
            tokens = tokens_N.tolist()
            self._decide(rows, slots, [tokens[position] for position in positions], states_ND[list(positions)])
            return
        self.slots.ids_B[upload(torch.tensor(slots), self.slots.device)] = tokens_N.clamp(min=0)
        self._send(tokens_N, positions, slots)

    def _send(self, tokens_N: torch.Tensor, positions: Sequence[int], slots: Sequence[int]) -> None:
        """Let tokens of slots, by position, go to the host; a slot whose item has all of its tokens is free."""
        rows = [row for slot in slots if (row := self.row_of_slot[slot]) is not None]
        self.late.append(_LateTokens(LateRead(tokens_N), list(zip(positions, rows, strict=True))))
        for slot, row in zip(slots, rows, strict=True):
            self.num_started[row] += 1
            if self.num_started[row] == self.continuations.items[row].most_tokens:
                self.row_of_slot[slot] = None

    def _decide(self, rows: Sequence[int], slots: Sequence[int], tokens: list[int], states_ND: torch.Tensor) -> None:
        """Let the host choose the tokens of rows."""
        chosen = self.continuations.chosen(rows, tokens, states_ND, self.head)
        stopped = [row for row, token in zip(rows, chosen, strict=True) if self.continuations.append(row, token)]
        self._finish(stopped)
        read = {
            slot: self.continuations.token_read(row)
            for slot, row in zip(slots, rows, strict=True)
            if row not in stopped
        }
        if read:
            slot_N = upload(torch.tensor(list(read)), self.slots.device)
            self.slots.ids_B[slot_N] = upload(torch.tensor(list(read.values())), self.slots.device)

    def _read(self) -> None:
        """Read the tokens of the oldest step; what follows the end of a text is dropped."""
        late = self.late.popleft()
        tokens, continuations = late.tokens.wait().tolist(), self.continuations
        going_on = [(row, tokens[position]) for position, row in late.rows if continuations.stop[row] is None]
        self._finish([row for row, token in going_on if continuations.append(row, token)])

    def _finish(self, rows: Sequence[int]) -> None:
        """Free the slots of rows that have stopped, and pass their answers on."""
        if rows:
            stopped = {*rows}
            self.row_of_slot = [None if row in stopped else row for row in self.row_of_slot]
            self.keep([self.batch.indices[row] for row in rows], [self.continuations.answer(row) for row in rows])
