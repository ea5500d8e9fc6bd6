"""Value optimization: the suffix-only engine, the reference engine and a loop written by hand agree on every family.

Comparisons run in float64, where the three differ by rounding only (1e-12 or so), so that a bound of 1e-8 separates
another formula from noise; float32 is checked once per family against its own bound. Models that narrow to float32 on
the way (norms, GPT-J's and Gemma 2's attention) are kept wide: Adam makes a full step of the smallest gradient, so that
a single float32 rounding, different on every machine, would decide individual coordinates.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from state import assert_same_state
from tiny_architectures import ARCHITECTURES
from transformers import LlamaConfig
from value_problems import (
    EDIT_REQUESTS,
    LIMIT,
    SETTINGS,
    assert_same_values,
    each_model,
    keep_wide,
    loaded,
    problem,
    relative,
)

from edit_hooks import EditRequest
from edit_hooks.contract.state import snapshot
from edit_hooks.contract.tiny_models import ALL_MODEL_TYPES, CONTEXT_TEMPLATES, NUM_LAYERS
from edit_hooks.locate.values import rows as rows_module
from edit_hooks.locate.values.rows import TokenRow
from edit_hooks.locate.values.value_optimization import ValueLimits, optimize_values, split_problems
from edit_hooks.locate.values.value_steps import OptimizedValue, ValueSettings
from edit_hooks.modeling.forward import lm_head
from edit_hooks.modeling.memory import cache_bytes_per_token, free_bytes


@pytest.fixture(autouse=True)
def _keep_wide() -> Iterator[None]:
    with keep_wide():
        yield


# --- an oracle: one edit, one loop, torch's own Adam ---------------------------------------------------------------


def oracle(model, rows: list[TokenRow], kl: TokenRow, s: ValueSettings) -> tuple[torch.Tensor, list[float]]:
    """The value optimization of ROME (eq. 4 and the released code), one unpadded full forward per row.

    Returns:
        The offset, and the loss at every evaluation.
    """
    architecture = ARCHITECTURES[model.config.model_type]
    site = architecture.mlp_name(s.layer) if s.site == "mlp" else architecture.block_name(s.layer)
    module, seen = model.get_submodule(site), {}

    def forward(row: TokenRow, delta: torch.Tensor) -> torch.Tensor:
        def add(_module: Any, _args: Any, output: Any) -> Any:
            hidden = output if isinstance(output, torch.Tensor) else output[0]
            seen.setdefault("v0", hidden[0, row.position].detach().clone())
            one_hot = torch.zeros(hidden.shape[1], dtype=hidden.dtype)
            one_hot[row.position] = 1
            hidden = hidden + one_hot[None, :, None] * delta
            return hidden if isinstance(output, torch.Tensor) else (hidden, *output[1:])

        handle = module.register_forward_hook(add)
        try:
            return model(torch.tensor([row.ids])).logits[0].log_softmax(-1)
        finally:
            handle.remove()

    delta = torch.zeros(model.config.hidden_size, dtype=model.dtype, requires_grad=True)
    optimizer, losses, original = torch.optim.Adam([delta], lr=s.lr), [], None
    for step in range(s.num_steps):
        nll = torch.zeros((), dtype=model.dtype)
        for row in rows:
            log_p = forward(row, delta)
            nll = nll - torch.stack([log_p[at, token] for at, token in row.labels]).mean() / len(rows)
        log_p = forward(kl, delta)[kl.position]
        original = log_p.detach() if original is None else original
        divergence = (log_p.exp() * (log_p - original)).sum()
        radius = seen["v0"].norm()
        loss = nll + s.kl_factor * divergence + s.weight_decay * delta.norm() / radius**2
        losses.append(float(loss.detach()))
        if losses[-1] < s.early_stop_loss or step == s.num_steps - 1:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            if delta.norm() > s.clamp_factor * radius:
                delta.mul_(s.clamp_factor * radius / delta.norm())
    return delta.detach(), losses


SITES = (("mlp", 4.0), ("block", 0.5))  # the families take turns; those with norms behind the MLP have both among them
PLACES = [(model_type, *SITES[row % len(SITES)]) for row, model_type in enumerate(ALL_MODEL_TYPES)]


@pytest.mark.parametrize(("model_type", "site", "clamp"), PLACES)
def test_both_engines_agree_with_the_loop_by_hand(model_type, clamp, site):
    model, tokenizer = loaded(model_type)
    value_settings = dataclasses.replace(SETTINGS, site=site, clamp_factor=clamp)
    problems = [problem(tokenizer, request) for request in EDIT_REQUESTS[:2]]
    before = snapshot(model, tokenizer)
    fast = optimize_values(model, problems, value_settings, "fast")
    reference = optimize_values(model, problems, value_settings, "reference")
    assert_same_state(before, snapshot(model, tokenizer))
    assert_same_values(fast, reference, LIMIT)
    for value, (rows, kl) in zip(fast, problems, strict=True):
        delta, losses = oracle(model, rows, kl, value_settings)
        assert relative(value.delta_D, delta) < LIMIT
        assert [record["loss"] for record in value.losses] == pytest.approx(losses, abs=LIMIT)
        assert value.clamped == bool(delta.norm() > clamp * value.v0_D.norm() * (1 - 1e-6))


@pytest.mark.parametrize("engine", ["fast", "reference"])
@pytest.mark.parametrize("model_type", ALL_MODEL_TYPES)
def test_float32_stays_close_to_float64(model_type, engine):
    """Rounding through five Adam steps, where small gradients count as much as large ones: worst seen 4e-4."""
    value_settings = dataclasses.replace(SETTINGS, lr=0.1)
    runs = []
    for dtype in (torch.float32, torch.float64):
        model, tokenizer = loaded(model_type, dtype)
        runs.append(optimize_values(model, [problem(tokenizer, r) for r in EDIT_REQUESTS[:2]], value_settings, engine))
    assert_same_values(*runs, limit=5e-3)


@each_model
def test_bfloat16_keeps_offsets_and_losses_in_float32(model_type):
    """Our own numbers are not rounded to bfloat16, and the first loss is the model's own to bfloat16 precision."""
    half, tokenizer = loaded(model_type, torch.bfloat16)
    full, _ = loaded(model_type, torch.float32)
    problems = [problem(tokenizer, request) for request in EDIT_REQUESTS[:2]]
    brief = dataclasses.replace(SETTINGS, num_steps=2)
    for engine in ("fast", "reference"):
        ours = optimize_values(half, problems, brief, engine)
        exact = optimize_values(full, problems, brief, engine)
        for value, other in zip(ours, exact, strict=True):
            assert value.delta_D.dtype == value.v0_D.dtype == value.keys_NF.dtype == torch.float32
            assert value.losses[0]["nll"] == pytest.approx(other.losses[0]["nll"], abs=0.15)
            assert relative(value.v0_D, other.v0_D) < 0.1  # eight bits, a dozen matrices
            assert torch.isfinite(value.delta_D).all()


# --- random batches ------------------------------------------------------------------------------------------------

TARGETS = ("Rome", "a", "English and French", "the University of Uppsala in spring")
SUBJECTS = ("Velm", "Mina Okabe", "the museum in Karsk", "Zoë")
random_requests = st.builds(
    lambda before, subject, after, target: EditRequest(
        prompt=f"{before}{{}}{after}", subject=subject, target_new=target
    ),
    st.sampled_from(["", "The river of ", "Because of the rain, the opera of "]),
    st.sampled_from(SUBJECTS),
    st.sampled_from(["", " is", ", published in London in the spring of 1871, is now in"]),
    st.sampled_from(TARGETS),
)


def threshold(values: list[OptimizedValue], where: float) -> float:
    """A stop threshold between losses of runs that did not stop, in a gap where rounding cannot decide."""
    losses = sorted([0.0, *(record["loss"] for value in values for record in value.losses), 100.0])
    # A target beyond the attention window gives the same loss at every step, but for rounding.
    gaps = [(low, high) for low, high in itertools.pairwise(losses) if high - low > 1e-6]
    start = round(where * (len(gaps) - 1))
    low, high = max(gaps[start : start + 3], key=lambda gap: gap[1] - gap[0])
    return (low + high) / 2


@settings(max_examples=12)
@given(
    model_type=st.sampled_from(["gpt2", "gptj", "mistral", "gemma2", "gemma3_text", "olmo2"]),
    requests=st.lists(random_requests, min_size=1, max_size=4),
    num_templates=st.integers(1, 3),
    layer=st.integers(0, NUM_LAYERS - 2),  # from the last block an offset reaches no later token: the gradient is noise
    site=st.sampled_from(["mlp", "block"]),
    num_steps=st.integers(1, 5),
    clamp=st.sampled_from([0.05, 0.7, 4.0]),
    stop_at=st.floats(0, 1),
    max_tokens=st.sampled_from([1, 20, 60, 512]),
    max_logits=st.sampled_from([1, 2**10, 2**30]),
)
def test_any_batch_equals_its_edits_one_by_one(
    model_type, requests, num_templates, layer, site, num_steps, clamp, stop_at, max_tokens, max_logits
):
    """Random lengths, target lengths, stops (at step 0, later, never), clamps, layers and chunk sizes."""
    model, tokenizer = loaded(model_type)
    value_settings = dataclasses.replace(SETTINGS, layer=layer, site=site, num_steps=num_steps, clamp_factor=clamp)
    problems = [problem(tokenizer, request, CONTEXT_TEMPLATES[:num_templates]) for request in requests]
    endless = optimize_values(model, problems, dataclasses.replace(value_settings, early_stop_loss=0.0), "reference")
    value_settings = dataclasses.replace(value_settings, early_stop_loss=threshold(endless, stop_at))
    limits = ValueLimits(max_tokens=max_tokens, max_logits=max_logits)
    with mock.patch.object(lm_head, "MIN_SLICE_WIDTH", 5):
        together = optimize_values(model, problems, value_settings, "fast", limits)
    alone = [optimize_values(model, [one], value_settings, "reference")[0] for one in problems]
    assert_same_values(together, alone, LIMIT)


def test_edits_that_stop_at_once_do_not_affect_the_others():
    """A threshold between the first losses: some edits stop before any step, the others run to the end."""
    model, tokenizer = loaded("llama")
    problems = [problem(tokenizer, request) for request in EDIT_REQUESTS]
    first = sorted(
        v.losses[0]["loss"] for v in optimize_values(model, problems, dataclasses.replace(SETTINGS, num_steps=1))
    )
    value_settings = dataclasses.replace(SETTINGS, lr=1e-3, early_stop_loss=(first[1] + first[2]) / 2)
    values = optimize_values(model, problems, value_settings)
    at_once = [value for value in values if value.num_updates == 0]
    assert len(at_once) == 2
    for value in at_once:
        assert value.stop_reason == "loss" and len(value.losses) == 1 and not value.clamped
        assert torch.count_nonzero(value.delta_D) == 0
    for value, one in zip(values, problems, strict=True):
        assert_same_values([value], optimize_values(model, [one], value_settings, "reference"), 1e-8)
    assert {value.stop_reason for value in values if value.num_updates} == {"steps"}


@pytest.mark.parametrize("model_type", ["llama", "mistral", "gpt2"])
def test_an_edit_that_stops_midway_does_not_affect_the_others(model_type):
    """The Adam moments, losses and prefixes of the others stay aligned when an edit leaves between steps."""
    model, tokenizer = loaded(model_type)
    problems = [problem(tokenizer, request, ["{}"]) for request in EDIT_REQUESTS]
    value_settings = dataclasses.replace(SETTINGS, lr=0.2, num_steps=8, early_stop_loss=0.0)
    losses = [
        [record["loss"] for record in v.losses] for v in optimize_values(model, problems, value_settings, "reference")
    ]
    early = min(range(len(losses)), key=lambda edit: losses[edit][3])
    others = min(loss for edit, path in enumerate(losses) if edit != early for loss in path)
    bar = (losses[early][2] + losses[early][3]) / 2
    assert losses[early][3] < bar < min(others, *losses[early][:3]), "the tiny model no longer fits this test"
    values = optimize_values(model, problems, dataclasses.replace(value_settings, early_stop_loss=bar))
    assert [value.num_updates for value in values] == [3 if edit == early else 7 for edit in range(len(values))]
    for edit, (value, path) in enumerate(zip(values, losses, strict=True)):
        assert [record["loss"] for record in value.losses] == pytest.approx(path[: len(value.losses)], abs=1e-8), edit
        assert value.stop_reason == ("loss" if edit == early else "steps")


def test_clamped_edits_end_on_the_ball():
    model, tokenizer = loaded("qwen2")
    problems = [problem(tokenizer, request) for request in EDIT_REQUESTS]
    for value in optimize_values(model, problems, dataclasses.replace(SETTINGS, clamp_factor=0.05)):
        assert value.clamped
        assert float(value.delta_D.norm()) == pytest.approx(0.05 * float(value.v0_D.norm()), rel=1e-9)


@pytest.mark.parametrize("engine", ["fast", "reference"])
def test_one_update_fewer_than_evaluations(engine):
    """No step follows the last evaluation; with one evaluation the offset is exactly zero."""
    model, tokenizer = loaded("gpt_neox")
    problems = [problem(tokenizer, EDIT_REQUESTS[0])]
    for num_steps in (1, 2, 4):
        (value,) = optimize_values(model, problems, dataclasses.replace(SETTINGS, num_steps=num_steps), engine)
        assert (len(value.losses), value.num_updates) == (num_steps, num_steps - 1)
        assert bool(value.delta_D.any()) == (num_steps > 1)
        assert value.losses[0]["kl"] == 0 and value.losses[0]["weight_decay"] == 0


def test_progress_counts_every_edit_once():
    model, tokenizer = loaded("llama")
    counts: list[int] = []
    problems = [problem(tokenizer, request) for request in EDIT_REQUESTS]
    optimize_values(model, problems, SETTINGS, limits=ValueLimits(max_edits=1), progress=counts.append)
    assert sum(counts) == len(EDIT_REQUESTS) and min(counts) > 0


# --- irrelevant text and slicing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["fast", "reference"])
@pytest.mark.parametrize("model_type", ["gpt2", "gptj", "llama", "gemma3_text"])
def test_text_after_the_subject_of_the_kl_row_is_irrelevant(model_type, engine, monkeypatch):
    """The divergence is read at the subject, so by causality " is a" constrains nothing."""
    model, tokenizer = loaded(model_type)
    runs, lengths = [], set()
    for template in ("{} is a", "{}", "{} was never seen in the tower again"):
        monkeypatch.setattr(rows_module, "KL_TEMPLATE", template)
        problems = [problem(tokenizer, request) for request in EDIT_REQUESTS[:2]]
        lengths.add(len(problems[0][1].ids))
        runs.append(optimize_values(model, problems, SETTINGS, engine))
    assert len(lengths) == 3  # each template was used
    assert_same_values(runs[1], runs[0], LIMIT)
    assert_same_values(runs[2], runs[0], LIMIT)


@pytest.mark.parametrize("min_width", [7, 64])
@pytest.mark.parametrize("engine", ["fast", "reference"])
def test_slicing_the_vocabulary_changes_nothing(engine, min_width, monkeypatch):
    model, tokenizer = loaded("llama")
    problems = [problem(tokenizer, request) for request in EDIT_REQUESTS]
    whole = optimize_values(model, problems, SETTINGS, engine)
    assert len({value.losses[-1]["kl"] for value in whole}) == len(whole)  # mixed-up rows would show
    monkeypatch.setattr(lm_head, "MIN_SLICE_WIDTH", min_width)
    sliced = optimize_values(model, problems, SETTINGS, limits=ValueLimits(max_logits=1))
    assert_same_values(sliced, whole, LIMIT)


@given(
    suffixes=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), max_size=12),
    max_tokens=st.integers(1, 60),
    max_edits=st.integers(1, 5),
)
def test_chunks_hold_every_edit_once_within_the_limits(suffixes, max_tokens, max_edits):
    """The cost of an edit is its suffix tokens without padding, and one token of its KL row."""
    problems = [([TokenRow((0,) * (2 + length), 2) for length in lengths], TokenRow((0, 0), 1)) for lengths in suffixes]
    chunks = split_problems(problems, ValueLimits(max_tokens=max_tokens, max_edits=max_edits))
    assert sorted(index for chunk in chunks for index in chunk) == list(range(len(problems)))
    for chunk in chunks:
        assert len(chunk) <= max_edits
        assert len(chunk) == 1 or sum(sum(suffixes[index]) + 1 for index in chunk) <= max_tokens


@given(
    edits=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 200)), min_size=1, max_size=8),
    max_tokens=st.integers(1, 200),
)
def test_chunks_count_the_prefix_caches(edits, max_tokens):
    """Each row of a batch, the KL row included, holds as many columns as the longest prefix has tokens."""
    problems = [([TokenRow((0,) * (prefix + 1), prefix)] * rows, TokenRow((0, 0), 1)) for rows, prefix in edits]
    chunks = split_problems(problems, ValueLimits(max_tokens=max_tokens, prefix_share=0.25))
    assert sorted(index for chunk in chunks for index in chunk) == list(range(len(problems)))
    for chunk in chunks:
        num_rows = sum(edits[index][0] + 1 for index in chunk)
        columns = num_rows * max(1, *(edits[index][1] for index in chunk))
        assert len(chunk) == 1 or num_rows + 0.25 * columns <= max_tokens


def test_long_contexts_are_solved_in_smaller_batches_on_a_gpu(monkeypatch):
    """Keys and values of Llama 3 8B: 131 kB per token and row, 2.7 GB for 21 rows behind 1000 tokens."""
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    weight = SimpleNamespace(device=torch.device("cuda"), element_size=lambda: 2)
    model = SimpleNamespace(config=config, get_input_embeddings=lambda: SimpleNamespace(weight=weight))
    assert cache_bytes_per_token(model) == 131072
    free = 60 * 10**9
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    limits = ValueLimits.for_device(model)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free - 2 * 10**9, free))
    assert ValueLimits.for_device(model) == limits  # a repeated run has the same batches
    for length in (10, 1000):
        edit = [TokenRow((0,) * (length + 4), length)] * 20, TokenRow((0,) * (length + 1), length)
        (chunk, *_) = split_problems([edit] * 64, limits)
        assert len(chunk) * 21 * length * 3 * 131072 <= free // 4
        assert len(chunk) == (1 if length == 1000 else 16)


def test_memory_that_pytorch_holds_unused_is_free(monkeypatch):
    """After one long batch the allocator keeps its blocks; the next batch must not be small because of them."""
    held = {"mem_get_info": (10, 100), "memory_reserved": 60, "memory_allocated": 25}
    for name, value in held.items():
        monkeypatch.setattr(torch.cuda, name, lambda _device, value=value: value)
    assert free_bytes(torch.device("cuda")) == 45


def test_prefixes_do_not_bound_batches_on_a_cpu():
    """There a batch is bounded for speed, and the last bits of an edit depend on its batch."""
    assert ValueLimits().prefix_share == 0
