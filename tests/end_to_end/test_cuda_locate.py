"""On a GPU: tracing, second moments, projectors and tuning say what they say on the CPU, and leave results on the CPU.

Skipped without one. Needs no lm-eval (`pytest --noconftest` runs it where that is not installed).
"""

from __future__ import annotations

import pytest
import torch

from edit_hooks import EditRequest, load_editor
from edit_hooks.contract.tiny_models import NATURAL_TOKENIZER, REQUESTS, SENTENCES, build_model, build_tokenizer
from edit_hooks.locate.moments.null_space import null_space_of
from edit_hooks.locate.moments.second_moments import MomentSettings, second_moments
from edit_hooks.locate.moments.solve import SecondMoment
from edit_hooks.locate.tracing.causal_trace import KINDS, TraceSettings, trace_facts
from lm_edit.tuning.search import tune
from lm_edit.tuning.trials import TrialRunner
from lm_eval_tasks.common.records.cases import Case, Question

# CI has no GPU; devices are pretended in tests/contract/test_*_devices.py.
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
FACTS = [EditRequest(**request) for request in REQUESTS]


def on_both(model_type):
    """The same float64 model on the CPU and on the GPU, and its tokenizer."""
    models = [build_model(model_type, dtype=torch.float64).to(device) for device in ("cpu", "cuda")]
    return *models, build_tokenizer(NATURAL_TOKENIZER[model_type])


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "gemma3_text"])
def test_traces_agree(model_type):
    cpu, gpu, tokenizer = on_both(model_type)
    settings = TraceSettings(samples=3, answer="true", max_tokens=200)
    first, second = (trace_facts(model, tokenizer, FACTS, settings, quiet=True) for model in (cpu, gpu))
    assert first.noise_std == pytest.approx(second.noise_std, rel=1e-9)
    for kind in KINDS:
        for group, values in first.effects[kind].items():
            assert values["mean"] == pytest.approx(second.effects[kind][group]["mean"], abs=1e-7)


def test_second_moments_and_projectors_agree():
    cpu, gpu, tokenizer = on_both("llama")
    texts = list(SENTENCES)
    first, second = (
        second_moments(model, tokenizer, [1], MomentSettings(texts, dtype="float64"), quiet=True)[1].matrix_FF
        for model in (cpu, gpu)
    )
    assert second.device.type == "cpu"
    # The norms of the model compute in float32.
    torch.testing.assert_close(first, second, rtol=0.0, atol=1e-6 * float(first.abs().max()))
    here = null_space_of(SecondMoment(first), None, 0.3)
    there = null_space_of(SecondMoment(first), None, 0.3, torch.device("cuda"))
    assert there.basis_FR.device.type == "cpu" and here.rank == there.rank
    keys_EF = torch.randn(4, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(here.metric_product(keys_EF), there.metric_product(keys_EF), rtol=1e-6, atol=1e-9)


def test_solves_agree_and_their_matrices_stay():
    basis = torch.randn(200, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    keys_EF, matrix_FF = basis[:4], (basis.T @ basis / 200).float()
    for precision, tolerance in (("float64", 1e-9), ("float32", 1e-3)):
        moment = SecondMoment(matrix_FF)
        here, *there = (moment.solve(keys_EF.to(device), precision) for device in ("cpu", "cuda", "cuda"))
        for found in there:
            assert found.is_cuda
            torch.testing.assert_close(found.cpu(), here, rtol=tolerance, atol=tolerance)
    factor = moment._cholesky_factor(matrix_FF, torch.device("cuda"))
    assert factor.like(keys_EF.cuda()) is factor.like(keys_EF.cuda())


@pytest.mark.parametrize("editor", ["r_rome", "memit", "alphaedit"])
def test_warnings_are_recorded(editor):
    _, gpu, tokenizer = on_both("llama")
    singular = torch.eye(64, dtype=torch.float64)
    singular[0, 0] = 0.0
    settings = {"layers": [1], "num_steps": 2, "context_templates": ["{}"], "second_moments": {1: singular}}
    (delta,) = load_editor(editor, settings).edit(gpu, tokenizer, FACTS[:1])
    expected = "may not take" if editor == "alphaedit" else "a ridge of"
    assert any(expected in text for text in delta.warnings)


def test_tuning_scores_agree():
    cpu, gpu, tokenizer = on_both("llama")
    cases = [Case(request, [], [Question("The village of Brenholt is in", "Velm", "Rome")]) for request in FACTS]
    settings = {"layers": [1], "num_steps": 3, "context_templates": ["{}"]}
    first, second = (tune(TrialRunner(model, tokenizer, "r_rome", None), [settings], cases)[0] for model in (cpu, gpu))
    assert first.mean("margin") == pytest.approx(second.mean("margin"), abs=1e-6)
