"""Causal tracing against ROME's release: its noise, and the probabilities with one token restored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from golden_data import golden_case, golden_names

from edit_hooks import EditRequest
from edit_hooks.locate.tracing.causal_trace import Trace, TraceSettings, trace_facts

# Absolute, of probabilities; a window that is too wide by one gives 0.04.
SCORE_BOUND = 1e-6
KINDS = {"state": "state", "mlp": "mlp", "attention": "attn"}  # ours and the release's


def groups_of(case: dict[str, Any]) -> dict[str, list[int]]:
    """Group -> its tokens, counted from the subject on, from which the scores are stored."""
    first, end = case["subject_range"]
    last, num_subject = case["num_tokens"] - 1 - first, end - first
    groups = {
        "subject_first": [0],
        "subject_middle": list(range(1, num_subject - 1)),
        "subject_last": [num_subject - 1],
        "after_first": [num_subject],
        "after_further": list(range(num_subject + 1, last)),
        "last": [last],
    }
    if num_subject == last:
        del groups["after_first"]  # the only token behind the subject is the last
    return {group: tokens for group, tokens in groups.items() if tokens}


@pytest.mark.parametrize("noise", ["drawn", "given"])
@pytest.mark.parametrize(("model_name", "name"), golden_names("causal-trace"))
def test_traces_are_those_of_the_release(model_name, name, noise, golden_model):
    """The noise of the release is that of our generator under its seed, times the unit of the release."""
    case, tensors = golden_case("causal-trace", model_name, name)
    model, tokenizer = golden_model(model_name)
    record = case["request"]
    request = EditRequest(
        prompt=record["prompt"], subject=record["subject"], target_new="-", target_true=record["target_true"]
    )
    settings = TraceSettings(
        samples=case["samples"],
        noise=case["noise_factor"],
        seed=case["noise_seed"],
        window=case["window"],
        answer="predicted",
    )
    first, end = case["subject_range"]
    shape = (case["samples"], end - first, model.get_input_embeddings().weight.shape[1])
    drawn = case["noise_std"] * torch.randn(shape, generator=torch.Generator().manual_seed(case["noise_seed"]))
    given = {request.text: drawn} if noise == "given" else None
    trace = trace_facts(model, tokenizer, [request], settings, noise=given, quiet=True)
    if noise == "drawn":  # over n - 1; over n it is smaller by 0.07 to 0.1 %
        assert trace.noise_std == pytest.approx(case["noise_std"], rel=1e-6)
    assert trace.clean == pytest.approx(case["high_score"], abs=SCORE_BOUND)
    assert trace.corrupted == pytest.approx(case["low_score"], abs=SCORE_BOUND)
    check_effects(trace, case, tensors)


def check_effects(trace: Trace, case: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    for kind, theirs in KINDS.items():
        effects_TL = tensors[f"scores.{theirs}"].double() - case["low_score"]
        groups = groups_of(case)
        assert trace.effects[kind].keys() == groups.keys()
        for group, tokens in groups.items():
            found = trace.effects[kind][group]
            assert found["count"] == len(tokens)
            assert found["mean"] == pytest.approx(effects_TL[tokens].mean(0).tolist(), abs=SCORE_BOUND)
