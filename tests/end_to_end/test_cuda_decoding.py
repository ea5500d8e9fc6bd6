"""On a GPU: texts decoded in slots are those decoded without, and those of a CPU.

Skipped without one. Needs no lm-eval (`pytest --noconftest` runs it where that is not installed).
"""

from __future__ import annotations

import pytest
import torch

from edit_hooks.contract.tiny_models import NATURAL_TOKENIZER, build_model, build_tokenizer
from edit_hooks.deltas.delta import Delta, Factor
from edit_hooks.inference.decoding import generate
from edit_hooks.inference.generation import slots
from edit_hooks.inference.items import GenerateItem, Limits
from edit_hooks.modeling.architectures import architecture_of, is_transposed, map_shape
from edit_hooks.modeling.device import recording, run_ahead

# CI has no GPU; tests/edit_hooks/inference/test_slots.py decodes in slots on the CPU.
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
NUM_ITEMS = 60


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "gemma3_text"])
def test_texts_in_slots(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64: texts of all lengths under edits of their own, with and without stop strings."""
    tokenizer = build_tokenizer(NATURAL_TOKENIZER[model_type])
    models = {device: build_model(model_type, dtype=torch.float64).to(device) for device in ("cpu", "cuda")}
    assert slots.uses_slots(models["cuda"], None) and not slots.uses_slots(models["cpu"], None)
    name = architecture_of(models["cpu"]).rewrite_name(1)
    module = models["cpu"].get_submodule(name)
    generator = torch.Generator().manual_seed(0)
    jobs = []
    for number in range(NUM_ITEMS):
        left, right = (torch.randn(width, 1 + number % 3, generator=generator) for width in map_shape(module))
        delta = Delta(factors={name: Factor(left, right, is_transposed(module))}) if number % 4 else None
        context = torch.randint(3, 200, (1 + number % 23,), generator=generator).tolist()
        stops = ("e",) if number % 5 == 0 else ()
        jobs.append((GenerateItem(tuple(context), stops, 1 + number % 31), delta))
    limits = Limits(16 * 64, 16)
    found, expected = (
        generate(model, tokenizer, jobs, limits, lambda count: None) for model in (models["cuda"], models["cpu"])
    )
    monkeypatch.setattr(run_ahead, "KINDS", set())
    without = generate(models["cuda"], tokenizer, jobs, limits, lambda count: None)
    assert found == expected == without


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "gemma3_text"])
def test_recorded_steps(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model without edits; the texts of steps that are launched one by one."""
    model, tokenizer = build_model(model_type).to("cuda"), build_tokenizer(NATURAL_TOKENIZER[model_type])
    generator = torch.Generator().manual_seed(0)
    contexts = [torch.randint(3, 200, (1 + number % 23,), generator=generator).tolist() for number in range(NUM_ITEMS)]
    jobs = [(GenerateItem(tuple(ids), (), 30, ignore_end=True), None) for ids in contexts]
    made: list[object] = []

    class Counting(recording.CudaRecorder):
        def capture(self, model, step):
            replay = super().capture(model, step)
            made.append(replay)
            return replay

    monkeypatch.setattr(recording, "RECORDER", Counting())
    limits = Limits(16 * 64, 16)
    recorded = generate(model, tokenizer, jobs, limits, lambda count: None)
    assert made and not recording.refusals(model)
    monkeypatch.setenv(recording.SWITCH, "0")
    assert recorded == generate(model, tokenizer, jobs, limits, lambda count: None)
