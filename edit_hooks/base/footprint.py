"""Memory and arithmetic of one edit, from shapes and settings alone.

Nothing is measured and no weight is read, so the numbers can be had from a configuration. They are of a typical
request: a prompt of :data:`ROW_TOKENS` tokens with :data:`SUFFIX_TOKENS` from the end of the subject to the end of the
target, of which :data:`TARGET_TOKENS` are the target's.

Shapes: d residual width, f MLP width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from edit_hooks.modeling.architectures import (
    architecture_of,
    head_of,
    input_device,
    map_shape,
    num_layers,
    text_config,
    weight_of,
)
from edit_hooks.modeling.forward.lm_head import default_max_logits
from edit_hooks.modeling.memory import bytes_per_token
from edit_hooks.utils.text.readable import readable

ROW_TOKENS, SUFFIX_TOKENS, TARGET_TOKENS = 12, 6, 2
FLOAT32, FLOAT64 = 4, 8  # bytes
ADAM_COPIES = 4  # of what is trained: itself, its gradient, two moments
ADAM_TRAFFIC = 9  # times its size: Adam reads four and writes three, the gradient is written and set to zero
LOGIT_BYTES = 4 * FLOAT32  # a logit, its exponential, and their gradients


@readable
@dataclass(frozen=True)
class StreamGrowth:
    """What a stream carries from step to step, and with what that grows.

    Attributes:
        carries: with sizes; f and d are the input and output width of an edited map, numbers have four bytes unless
            noted.
        grows: ``no``, or with what, as in ``with edits``.
        is_read: whether later edits read anything of earlier ones, beside the model.
    """

    carries: str
    grows: str
    is_read: bool = True


NOTHING_CARRIED = StreamGrowth("nothing", "no", is_read=False)
TEXTS_CARRIED = StreamGrowth("the texts of the facts", "with edits", is_read=False)


@dataclass(frozen=True, kw_only=True)
class Work:
    """Arithmetic of an edit.

    Attributes:
        flops: floating point operations.
        moved: bytes that element-wise updates, as an optimizer's, read and write, and those of the head.
        block_passes: blocks that run one after another, backward passes included; each waits for its launches.
        rows: tokens that pass through a block together.
    """

    flops: float = 0.0
    moved: float = 0.0
    block_passes: float = 0.0
    rows: int = 1

    def __add__(self, other: Work) -> Work:
        largest = self if self.flops >= other.flops else other
        return Work(
            flops=self.flops + other.flops,
            moved=self.moved + other.moved,
            block_passes=self.block_passes + other.block_passes,
            rows=largest.rows,
        )


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """What one edit takes beside the weights, in bytes, and its arithmetic.

    Attributes:
        copies: on the weights' devices during the edit: trained copies, gradients, optimizer moments.
        activations: there, too: of the tokens that are kept for the backward pass, and logits.
        solve: there, too, before or after the passes: the largest step of collecting statistics and solving with them.
        models: there, too: further networks that the editor runs.
        statistics: in main memory, kept for all edits: second moments with their factors, or projectors.
        update: of a finished edit, in main memory and in the store.
        work: ``None`` if it depends on more than shapes.
    """

    copies: int = 0
    activations: int = 0
    solve: int = 0
    models: int = 0
    statistics: int = 0
    update: int = 0
    work: Work | None = field(default_factory=Work)

    @property
    def device_bytes(self) -> int:
        """The largest sum of what is on the devices at the same time, beside the weights."""
        return self.models + max(self.copies + self.activations, self.solve)

    @property
    def main_bytes(self) -> int:
        """What main memory holds with one edit finished."""
        return self.statistics + self.update


def passes(
    model: nn.Module, *, first: int, rows: int, tokens: int, steps: int, backward: bool = True, labels: int = 0
) -> Work:
    """The arithmetic of passes through the blocks from ``first`` on, and through the head.

    A product with a weight takes two operations per entry and token, its backward pass to the input two more.

    Args:
        tokens: per row. labels: positions per row at which logits are computed.
    """
    arch = architecture_of(model)
    depth = num_layers(model)
    entries = sum(_matrix_entries(model.get_submodule(arch.block_name(layer))) for layer in range(first, depth))
    config = text_config(model)
    head = config.vocab_size * config.hidden_size
    both = 2 if backward else 1
    element = weight_of(head_of(model)).element_size()
    return Work(
        flops=2.0 * both * steps * rows * (tokens * entries + labels * head),
        moved=float(both * steps * head * element * bool(labels)),  # few positions: reading the head takes longer
        block_passes=float(both * steps * (depth - first)),
        rows=rows * tokens,
    )


def kept_activations(model: nn.Module, *, first: int, rows: int, tokens: int, labels: int) -> int:
    """Bytes that the tokens of one edit keep for a backward pass through the blocks from ``first`` on, and logits."""
    depth = num_layers(model)
    kept = rows * tokens * bytes_per_token(model) * (depth - first) // depth
    logits = rows * labels * text_config(model).vocab_size
    return kept + min(logits, default_max_logits(input_device(model))) * LOGIT_BYTES


def low_rank_footprint(
    model: nn.Module, names: Sequence[str], layers: Sequence[int], settings: object, rank: int = 1
) -> Footprint:
    """The footprint of an edit that trains something small at some maps, in ``num_steps`` passes of one row.

    Args:
        settings: an editor's; without ``num_steps`` there is one pass.
    """
    first, steps = min(layers), int(getattr(settings, "num_steps", 1))
    update = low_rank_bytes(model, names, rank)
    return Footprint(
        copies=ADAM_COPIES * update,
        activations=kept_activations(model, first=first, rows=1, tokens=ROW_TOKENS, labels=TARGET_TOKENS),
        update=update,
        work=training_work(model, first=first, steps=steps, trained=update),
    )


def training_work(model: nn.Module, *, first: int, steps: int, trained: int, rows: int = 1) -> Work:
    """The arithmetic of training float32 tensors of ``trained`` bytes at blocks from ``first`` on."""
    below = passes(model, first=0, rows=rows, tokens=ROW_TOKENS, steps=1, backward=False)
    work = passes(model, first=first, rows=rows, tokens=ROW_TOKENS, steps=steps, labels=TARGET_TOKENS)
    return below + work + Work(moved=float(steps * trained * ADAM_TRAFFIC))


def low_rank_bytes(model: nn.Module, names: Iterable[str], rank: int) -> int:
    """Size of float32 factors of this rank for maps."""
    return sum(FLOAT32 * rank * sum(map_shape(model.get_submodule(name))) for name in names)


def dense_bytes(model: nn.Module, names: Iterable[str]) -> int:
    """Size of float32 tensors as large as the weights of maps."""
    return sum(FLOAT32 * math.prod(map_shape(model.get_submodule(name))) for name in names)


def copies_bytes(model: nn.Module, names: Iterable[str]) -> int:
    """What training the weights of maps takes: see :class:`~edit_hooks.gradient.weight_copies.WeightCopies`.

    The copy, its gradient and Adam's two moments in float32; the start in float32 where the weights are of 16 bits; and
    the difference of the two at the end.
    """
    names = list(names)
    is_float32 = all(weight_of(model.get_submodule(name)).dtype == torch.float32 for name in names)
    return (5 if is_float32 else 6) * dense_bytes(model, names)


def _matrix_entries(block: nn.Module) -> int:
    """Entries of the matrices that a token passes in a block."""
    return sum(parameter.numel() for parameter in block.parameters() if parameter.dim() == 2)
