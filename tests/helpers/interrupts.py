"""Interrupts (Ctrl-C) at chosen lines of this package."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import numpy
import torch
from paths import ROOT

from edit_hooks.contract.state import snapshot, tensor_digest

PACKAGE = str(ROOT / "edit_hooks")


class Line(NamedTuple):
    """The ``occurrence``-th execution of a line."""

    file: str
    number: int
    occurrence: int


class _Tracer:
    """Counts the executed lines of some files, and raises KeyboardInterrupt at one of them."""

    def __init__(self, files: tuple[str, ...], target: Line | None) -> None:
        self.files, self.target = files, target
        self.counts: dict[tuple[str, int], int] = {}
        self.fired = False

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> Any:
        code = frame.f_code
        # What a __del__ raises is reported, but does not reach the program.
        return self._at_line if code.co_filename.startswith(self.files) and code.co_name != "__del__" else None

    def _at_line(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if event != "line":
            return self._at_line
        key = (frame.f_code.co_filename, frame.f_lineno)
        self.counts[key] = self.counts.get(key, 0) + 1
        if self.target == (*key, self.counts[key]) and not self.fired:
            self.fired = True
            raise KeyboardInterrupt
        return self._at_line


def _traced(action: Callable[[], object], tracer: _Tracer) -> None:
    sys.settrace(tracer)
    try:
        action()
    except KeyboardInterrupt:
        assert tracer.fired
    finally:
        sys.settrace(None)


def executed_lines(action: Callable[[], object], *files: str) -> list[Line]:
    """Every execution of every line of some files of the package; of all by default."""
    tracer = _Tracer(tuple(f"{PACKAGE}/{file}" for file in files) or (PACKAGE,), None)
    _traced(action, tracer)
    return [Line(*key, number) for key, count in tracer.counts.items() for number in range(1, count + 1)]


def interrupt_at(line: Line, action: Callable[[], object]) -> None:
    """Run an action with a KeyboardInterrupt at one line."""
    tracer = _Tracer((line.file,), line)
    _traced(action, tracer)
    assert tracer.fired, f"{line} was not reached"


def complete_state(model: Any, tokenizer: Any = None) -> dict[str, Any]:
    """Snapshot of a model and of what belongs to the process: random generators, inference mode, thread settings."""
    kind, keys, *rest = numpy.random.get_state()
    return {
        **snapshot(model, tokenizer),
        "random": random.getstate(),
        "numpy random": (kind, keys.tolist(), *rest),
        "torch random": tensor_digest(torch.get_rng_state()),
        "inference mode": torch.is_inference_mode_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
    }
