"""Dropout of adapters that are trained side by side.

Shapes: R rows, T columns, f width of a module's input.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Dropout:
    """Dropout whose masks come from generators of its own, one per edit, on the device of the masks.

    An edit's masks are those of its row alone, whatever the width of the batch.

    Args:
        lengths: tokens of each edit's row; ``None`` for an edit that has the whole batch.

    Attributes:
        generators: one per edit.
        drawn: for every edit the uniform numbers [length, f] of the step, where a :class:`StepNoise` draws them.
    """

    def __init__(
        self, share: float, device: torch.device, seed: int, number: int, lengths: Sequence[int | None]
    ) -> None:
        self.share, self.is_active, self.lengths = share, True, lengths
        self.drawn: list[torch.Tensor] | None = None
        self.generators = [torch.Generator(device).manual_seed(seed * 1_000_003 + 2 * number + 1) for _ in lengths]

    def __call__(self, x_RTF: torch.Tensor) -> torch.Tensor:
        if not self.is_active or self.share == 0:
            return x_RTF
        kept = torch.zeros_like(x_RTF, dtype=torch.bool)
        for number, (rows, length) in enumerate(zip(kept.chunk(len(self.lengths)), self.lengths, strict=True)):
            part = rows if length is None else rows[:, :length]
            if self.drawn is None:
                generator = self.generators[number]
                uniform = torch.rand(part.shape, generator=generator, device=x_RTF.device, dtype=torch.float32)
            else:
                uniform = self.drawn[number][None]
            part.copy_(uniform >= self.share)
        return x_RTF * kept / (1 - self.share)


class StepNoise:
    """The uniform numbers of a step for the dropout of all modules, drawn together, before the step.

    An edit's numbers come from a generator of its own.

    Attributes:
        buffers: one for every edit.
    """

    def __init__(self, lengths: Sequence[int], widths: Sequence[int], device: torch.device, seed: int) -> None:
        self.lengths, self.widths = lengths, widths
        self.buffers = [torch.empty(length * sum(widths), device=device) for length in lengths]
        self.generators = [torch.Generator(device).manual_seed(seed * 1_000_003 + 1) for _ in lengths]

    def of_module(self, number: int) -> list[torch.Tensor]:
        """Those of one module, [length, f] of every edit; views."""
        found = []
        for buffer, length in zip(self.buffers, self.lengths, strict=True):
            start, width = length * sum(self.widths[:number]), self.widths[number]
            found.append(buffer[start : start + length * width].view(length, width))
        return found
