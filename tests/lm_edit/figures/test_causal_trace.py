"""The heat maps of a causal trace."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from edit_hooks import EditingError
from edit_hooks.locate.tracing.causal_trace import KINDS, Trace
from lm_edit.figures.causal_trace import plot_trace
from lm_edit.figures.drawing.output import check_output

has_matplotlib = importlib.util.find_spec("matplotlib") is not None


def trace_with(mlp: list[float]) -> Trace:
    """A trace with these effects by layer, at the subject's last token and for every kind."""
    effects = {kind: {"subject_last": {"mean": mlp, "stderr": [0.1] * len(mlp), "count": 3}} for kind in KINDS}
    return Trace({"window": 2}, 3, {}, 1.0, 0.5, 0.1, effects)


def test_a_missing_matplotlib_is_reported_before_anything_runs(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EditingError, match=r'pip install "lm-eval-editing\[report\]"'):
        check_output(Path("trace.svg"))


@pytest.mark.skipif(not has_matplotlib, reason="the report extra is not installed")
@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_plots_are_written_and_reproducible(tmp_path, suffix):
    trace = trace_with([0.0, 0.1, 0.5, 0.2])
    first, second = (plot_trace(trace, tmp_path / f"{name}{suffix}", "a title").read_bytes() for name in "ab")
    assert len(first) > 2000
    if suffix == ".svg":  # element ids are random
        assert b"<svg" in first and first.count(b"<image") >= len(KINDS)
    else:
        assert first == second and first.startswith(b"\x89PNG")
