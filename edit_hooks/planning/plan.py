"""Memory and time of one edit of a model, by editor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from edit_hooks.base.editor import Editor
from edit_hooks.base.footprint import Footprint, Work
from edit_hooks.modeling.architectures import text_config
from edit_hooks.planning.outline import Outline
from edit_hooks.planning.rates import Rates, measured_flops, measured_overheads
from edit_hooks.utils.errors import EditingError


class EditorPlan(NamedTuple):
    """What an editor takes on a model.

    Attributes:
        layers: the edited blocks; empty for contexts.
        footprint: of one edit; ``None`` if the editor cannot edit the model.
        seconds: of one edit alone; ``None`` if it depends on more than shapes, or without rates.
        reason: why it cannot edit the model.
    """

    editor: str
    layers: tuple[int, ...] = ()
    footprint: Footprint | None = None
    seconds: float | None = None
    reason: str = ""


class Device(NamedTuple):
    """Where edits are computed.

    Attributes:
        free_bytes: memory of one device; ``None`` if it is not known.
        is_main: it is the main memory, so statistics and finished edits count, too.
        rates: ``None`` to plan memory alone; a device that is here is measured.
    """

    free_bytes: int | None
    is_main: bool
    rates: RateSource | None = None

    def needed(self, weights: int, footprint: Footprint) -> int:
        """Bytes of one edit on a device that holds these weights."""
        return weights + footprint.device_bytes + (footprint.main_bytes if self.is_main else 0)


class RateSource:
    """Rates for products of any number of tokens: those of a device that is here, measured once each, or one stated."""

    def __init__(self, outline: Outline, device: torch.device | None = None, stated: Rates | None = None) -> None:
        self._stated, self._device, self._known = stated, device, dict[int, Rates]()
        config, self._dtype = text_config(outline.model), outline.model.dtype
        self._shape = config.hidden_size, getattr(config, "intermediate_size", None) or 4 * config.hidden_size

    def seconds(self, work: Work) -> float:
        """The time of one edit alone."""
        if self._stated is not None:
            return self._stated.seconds(work)
        assert self._device is not None
        rows = 2 ** (work.rows - 1).bit_length()
        if rows not in self._known:
            flops = measured_flops(self._device, self._dtype, rows, *self._shape)
            self._known[rows] = Rates(flops, *measured_overheads(self._device))
        return self._known[rows].seconds(work)


def plan_editors(outline: Outline, editors: Mapping[str, Editor[Any]], rates: RateSource | None) -> list[EditorPlan]:
    """The plan of every editor, in order; those that cannot edit the model have the reason."""
    return [plan_editor(name, editor, outline, rates) for name, editor in editors.items()]


def plan_editor(name: str, editor: Editor[Any], outline: Outline, rates: RateSource | None = None) -> EditorPlan:
    """The plan of one editor with its settings for the model: the shipped ones, or the defaults."""
    if outline.bits is not None and not editor.edits_quantized and editor.writes != ("context",):
        return EditorPlan(name, reason="needs plain weights")
    try:
        config = editor.default_config(outline.model)
        footprint = editor.footprint(config, outline.model)
    except EditingError as error:
        return EditorPlan(name, reason=str(error))
    seconds = None if rates is None or footprint.work is None else rates.seconds(footprint.work)
    layers = () if editor.writes == ("context",) else tuple(config.layers or ())
    return EditorPlan(name, layers, footprint, seconds)
