"""PRUNE: the restraint of singular values, small edits, and dense updates."""

from __future__ import annotations

import math

import pytest
import torch
from editor_settings import MEMIT_CONFIG
from hypothesis import given
from hypothesis import strategies as st
from layered_edits import (
    EDIT_REQUESTS,
    each_model,
    load_wide,
    rounding_bound,
)
from tiny_architectures import ARCHITECTURES

from edit_hooks import Delta, edited, load_editor
from edit_hooks.contract.tiny_models import EDIT_LAYER, build_model, build_tokenizer
from edit_hooks.editors.prune import PRUNEConfig, restrain


@given(
    log_base=st.sampled_from([math.e, 2.0, 1.5, 1.2]),
    function=st.sampled_from(["log", "linear"]),
    safe=st.booleans(),
    largest=st.floats(0.05, 50),
)
def test_restrains_large_singular_values_only(log_base, function, safe, largest):
    config = PRUNEConfig(log_base=log_base, function=function, safe=safe)
    values = torch.linspace(0, 4 * largest, 401, dtype=torch.float64)
    out = restrain(values, largest, config)
    below = values < largest
    assert torch.equal(out[below], values[below])
    assert bool((out.diff() > -1e-9).all())
    edge = restrain(torch.tensor([largest * (1 - 1e-9), largest * (1 + 1e-9)], dtype=torch.float64), largest, config)
    assert float(edge[1] - edge[0]) < 1e-6 * largest * max(1, 1 / largest)
    if safe:
        assert bool((out <= values + 1e-12).all())
    if function == "linear":
        torch.testing.assert_close(out[~below], (values[~below] + largest) / 2)


@pytest.mark.parametrize(("log_base", "bound"), [(math.e, 1), (1.05, 0.02)])
def test_a_step_of_a_stream_has_the_rank_of_what_changes(log_base, bound):
    """Its own update and the singular values that F changes, at most the rank of the sum: not the rank of two sums."""
    model, tokenizer = load_wide("llama")
    config = {"log_base": log_base, "base_settings": {**MEMIT_CONFIG, "second_moments": None}}
    editor = load_editor("prune", config=config)
    editor._largest = _Constant(bound)
    history: list[Delta] = []
    changed: dict[str, int] = {}
    for number, request in enumerate([*EDIT_REQUESTS[:3], *EDIT_REQUESTS[:2]], 1):
        with edited(model, *history):
            history += editor.edit(model, tokenizer, [request], history=history)
        for name, facts in history[-1].diagnostics["prune"].items():
            rank = history[-1].factors[name.removesuffix(".weight")].left.shape[1]
            assert rank == min(number, 1 + facts["num_restrained"] + changed.get(name, 0))
            changed[name] = facts["num_restrained"]
    assert max(changed.values()) == (5 if bound < 1 else 0)


class _Constant(dict):
    """Largest singular values of original weights, set for a test."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __contains__(self, key: object) -> bool:
        return True

    def __getitem__(self, key: object) -> float:
        return self.value


def test_dense_steps_are_decomposed_once(monkeypatch):
    """The sum before a step is that after the one before, also for an editor that resumes the stream."""
    model, tokenizer = build_model("llama"), build_tokenizer("byte_bpe_bos")
    base = {"layers": [EDIT_LAYER], "num_steps": 2, "lr": 5e-2}
    config = {"base": "ft_m", "base_settings": base, "function": "linear", "layers": [EDIT_LAYER]}
    svd, calls = torch.linalg.svd, []
    monkeypatch.setattr(torch.linalg, "svd", lambda *args, **named: calls.append(0) or svd(*args, **named))
    editor, history = load_editor("prune", config=config), []
    for request in EDIT_REQUESTS[:3]:
        with edited(model, *history):
            history += editor.edit(model, tokenizer, [request], history=history)
    assert len(calls) == 3
    with edited(model, *history[:2]):
        (resumed,) = load_editor("prune", config=config).edit(model, tokenizer, [EDIT_REQUESTS[2]], history=history[:2])
    assert resumed.checksum() == history[2].checksum()
    total = sum(next(iter(delta.weights().values())) for delta in history)
    raw = sum(next(tensor for name, tensor in delta.stream_state.items() if "/dense/" in name) for delta in history)
    values, largest = torch.linalg.svdvals(raw.double()), history[0].diagnostics["prune"]
    expected = restrain(values, next(iter(largest.values()))["largest_original"], PRUNEConfig(function="linear"))
    torch.testing.assert_close(torch.linalg.svdvals(total.double()), expected.sort(descending=True).values)


@each_model
def test_leaves_a_small_edit_unchanged(model_type):
    """Nothing above the largest original singular value: the base editor's update, in a stream too."""
    model, tokenizer = load_wide(model_type)
    config = {**MEMIT_CONFIG, "second_moments": None, "clamp_factor": 0.05}
    history: list[Delta] = []
    base: list[Delta] = []
    editor, plain = load_editor("prune", config={"base_settings": config}), load_editor("memit", config=config)
    for request in EDIT_REQUESTS[:3]:
        with edited(model, *history):
            history += editor.edit(model, tokenizer, [request], history=history)
        with edited(model, *base):
            base += plain.edit(model, tokenizer, [request], history=base)
    assert all(facts["num_restrained"] == 0 for facts in history[-1].diagnostics["prune"].values())
    for name, update in Delta.summed(base).weights().items():
        ours = sum(delta.weights()[name] for delta in history)
        assert float((ours - update).norm() / update.norm()) < max(rounding_bound(model_type), 1e-5)


def test_accepts_editors_with_dense_updates():
    model, tokenizer = build_model("gpt2"), build_tokenizer("byte_bpe")
    base = {"layers": [EDIT_LAYER], "num_steps": 5, "lr": 0.05}  # crude on purpose: singular values above the original
    editor = load_editor("prune", config={"base": "ft_m", "base_settings": base, "safe": True})
    history: list[Delta] = []
    for request in EDIT_REQUESTS[:2]:
        with edited(model, *history):
            history += editor.edit(model, tokenizer, [request], history=history)
    name = f"{ARCHITECTURES['gpt2'].rewrite_name(EDIT_LAYER)}.weight"
    facts = history[-1].diagnostics["prune"][name]
    assert facts["num_restrained"] > 0
    total = sum(delta.weights()[name].double() for delta in history)
    assert float(torch.linalg.svdvals(total)[0]) == pytest.approx(facts["largest_after"], rel=1e-4)
