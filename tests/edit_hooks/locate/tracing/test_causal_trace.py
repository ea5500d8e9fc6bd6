"""Causal tracing: effects against a plain loop over full forward passes, in float64, on every family."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from state import assert_same_state

from edit_hooks import EditingError, EditRequest
from edit_hooks.contract.state import snapshot
from edit_hooks.contract.tiny_models import ALL_MODEL_TYPES, NATURAL_TOKENIZER, REQUESTS, build_model, build_tokenizer
from edit_hooks.locate.tracing.causal_trace import GROUPS, Trace, TraceSettings, group_of, trace_facts
from edit_hooks.locate.tracing.restored_runs import KINDS, TracedFact, subject_noise
from edit_hooks.modeling.architectures import architecture_of
from edit_hooks.store.store import Store

FACTS = [EditRequest(**{"case_id": f"c{number}", **request}) for number, request in enumerate(REQUESTS)]
has_matplotlib = importlib.util.find_spec("matplotlib") is not None


def loaded(model_type, dtype=torch.float64):
    return build_model(model_type, dtype=dtype), build_tokenizer(NATURAL_TOKENIZER[model_type])


# --- the oracle --------------------------------------------------------------------------------------------------


def first_of(output):
    return output if isinstance(output, torch.Tensor) else output[0]


def swapped(output, hidden):
    return hidden if isinstance(output, torch.Tensor) else (hidden, *output[1:])


@torch.no_grad()
def forward(model, ids, hooks):
    """Probabilities of the next token [rows, V] of one prompt, repeated; every module hook returns the new output."""
    handles = [module.register_forward_hook(hook) for module, hook in hooks]
    try:
        return model(ids).logits[:, -1].softmax(-1)
    finally:
        for handle in handles:
            handle.remove()


def oracle(model, tokenizer, request, samples, noise_std, seed, window, predicted):
    """(clean, corrupted, {kind: [tokens from the subject on][layers]}) for one fact, module by module."""
    arch = architecture_of(model)
    encoded = tokenizer(request.text, return_offsets_mapping=True)
    start, end = request.subject_span
    subject = [i for i, (a, b) in enumerate(encoded["offset_mapping"]) if a < end and b > start and b > a]
    ids = torch.tensor([encoded["input_ids"]])
    embedding = model.get_input_embeddings()
    depth = model.config.num_hidden_layers
    modules = {
        "state": [model.get_submodule(arch.block.format(n)) for n in range(depth)],
        "mlp": [model.get_submodule(arch.mlp.format(n)) for n in range(depth)],
        "attention": [model.get_submodule(arch.attention.format(n)) for n in range(depth)],
    }
    clean = {}

    def recorder(kind, layer):
        def record(_module, _args, output):
            clean[kind, layer] = first_of(output).clone()

        return record

    recorders = [(modules[kind][n], recorder(kind, n)) for kind in modules for n in range(depth)]
    plain = forward(model, ids, recorders)[0]
    if predicted:
        answer = int(plain.argmax())
    else:
        answer = tokenizer(f"{request.text} {request.target_true}")["input_ids"][ids.shape[1]]
    generator = torch.Generator().manual_seed(seed)
    noise = noise_std * torch.randn(samples, len(subject), embedding.weight.shape[1], generator=generator)

    def corrupt(_module, _args, output):
        output = output.clone()
        output[:, subject[0] : subject[-1] + 1] += noise.to(output.dtype)
        return output

    def restorer(kind, layer, token):
        def restore(_module, _args, output):
            hidden = first_of(output).clone()
            hidden[:, token] = clean[kind, layer][0, token]
            return swapped(output, hidden)

        return restore

    rows = ids.repeat(samples, 1)
    low = forward(model, rows, [(embedding, corrupt)])[:, answer].mean()
    effects = {kind: [] for kind in modules}
    for kind in modules:
        for token in range(subject[0], ids.shape[1]):
            by_layer = []
            for layer in range(depth):
                around = [layer]
                if kind != "state":  # the published window: [layer - w // 2, layer + ceil(w / 2))
                    around = range(max(0, layer - window // 2), min(depth, layer - (-window // 2)))
                restorers = [(modules[kind][n], restorer(kind, n, token)) for n in around]
                high = forward(model, rows, [(embedding, corrupt), *restorers])[:, answer].mean()
                by_layer.append(float(high - low))
            effects[kind].append(by_layer)
    return float(plain[answer]), float(low), effects


CASES = [(model_type, 2, "true", 4096) for model_type in ALL_MODEL_TYPES]
CASES += [(model_type, 3, "predicted", 40) for model_type in ("gptj", "gemma3_text")]


@pytest.mark.parametrize(("model_type", "window", "answer", "max_tokens"), CASES)
def test_effects_equal_those_of_the_plain_loop(model_type, window, answer, max_tokens):
    """Facts of different lengths share passes; with few tokens per pass they are split."""
    model, tokenizer = loaded(model_type)
    exact = 1e-7 if model_type == "gptj" else 1e-8  # its attention always runs in float32
    before = snapshot(model, tokenizer)
    settings = TraceSettings(samples=2, window=window, answer=answer, seed=5, max_tokens=max_tokens)
    requests = FACTS[:2]
    trace = trace_facts(model, tokenizer, requests, settings, quiet=True)
    assert_same_state(before, snapshot(model, tokenizer))
    expected = [oracle(model, tokenizer, r, 2, trace.noise_std, 5, window, answer == "predicted") for r in requests]
    assert trace.clean == pytest.approx(sum(e[0] for e in expected) / 2, abs=exact)
    assert trace.corrupted == pytest.approx(sum(e[1] for e in expected) / 2, abs=exact)
    rows: dict[tuple[str, str], list[list[float]]] = {}
    for request, (_, _, effects) in zip(requests, expected, strict=True):
        encoded = tokenizer(request.text, return_offsets_mapping=True)
        start, end = request.subject_span
        inside = [i for i, (a, b) in enumerate(encoded["offset_mapping"]) if a < end and b > start and b > a]
        fact = TracedFact("", tuple(encoded["input_ids"]), inside[0], inside[-1] + 1, 0)
        for kind in KINDS:
            for offset, by_layer in enumerate(effects[kind]):
                rows.setdefault((kind, group_of(fact, inside[0] + offset)), []).append(by_layer)
    assert {(kind, group) for kind in KINDS for group in trace.effects[kind]} == set(rows)
    largest = 0.0
    for (kind, group), values in rows.items():
        ours = trace.effects[kind][group]
        assert ours["count"] == len(values)
        table = torch.tensor(values, dtype=torch.float64)
        mean = table.mean(0)
        torch.testing.assert_close(torch.tensor(ours["mean"], dtype=torch.float64), mean, rtol=0, atol=exact)
        if len(values) == 1:
            assert ours["stderr"] == [None] * len(mean)
        else:
            stderr = ((table - mean).square().sum(0) / (len(values) - 1) / len(values)).sqrt()
            torch.testing.assert_close(torch.tensor(ours["stderr"], dtype=torch.float64), stderr, rtol=0, atol=exact)
        largest = max(largest, float(mean.abs().max()))
    assert largest > 1e-3 * trace.clean  # something was restored


def test_a_single_token_has_no_standard_error():
    model, tokenizer = loaded("gpt2")
    trace = trace_facts(model, tokenizer, FACTS[:1], TraceSettings(samples=1, answer="predicted"), quiet=True)
    for kind in KINDS:
        values = trace.effects[kind]["last"]
        assert values["count"] == 1 and values["stderr"] == [None] * model.config.num_hidden_layers


def test_restoring_the_last_states_restores_the_clean_answer():
    """At the last block and the last token no corruption remains."""
    model, tokenizer = loaded("llama")
    trace = trace_facts(model, tokenizer, FACTS, TraceSettings(samples=3, answer="predicted"), quiet=True)
    assert trace.effects["state"]["last"]["mean"][-1] == pytest.approx(trace.clean - trace.corrupted, abs=1e-9)


def test_the_noise_is_measured_in_standard_deviations_of_the_subjects():
    model, tokenizer = loaded("gpt2")
    values = []
    for request in FACTS:
        encoded = tokenizer(request.text, return_offsets_mapping=True)
        start, end = request.subject_span
        ids = [
            i
            for i, (a, b) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
            if a < end and b > start
        ]
        values.append(model.get_input_embeddings().weight[ids].flatten())
    std = float(torch.cat(values).std().detach())  # over n - 1, as ROME's release
    for factor in (1.0, 3.0):
        settings = TraceSettings(samples=1, noise=factor, answer="predicted")
        assert trace_facts(model, tokenizer, FACTS, settings, quiet=True).noise_std == pytest.approx(factor * std)


def test_batching_does_not_change_the_effects():
    model, tokenizer = loaded("gemma2")
    together = trace_facts(model, tokenizer, FACTS, TraceSettings(samples=2, answer="true"), quiet=True)
    split = trace_facts(model, tokenizer, FACTS, TraceSettings(samples=2, answer="true", max_tokens=1), quiet=True)
    for kind in KINDS:
        for group, values in together.effects[kind].items():
            torch.testing.assert_close(
                torch.tensor(values["mean"]), torch.tensor(split.effects[kind][group]["mean"]), rtol=0, atol=1e-8
            )


def test_every_token_belongs_to_one_group():
    fact = TracedFact("", tuple(range(10)), 2, 6, 0)
    groups = [group_of(fact, token) for token in range(2, 10)]
    assert groups == [
        "subject_first",
        *["subject_middle"] * 2,
        "subject_last",
        "after_first",
        *["after_further"] * 2,
        "last",
    ]
    assert group_of(TracedFact("", (0, 1, 2), 1, 2, 0), 1) == "subject_last"
    assert group_of(TracedFact("", (0, 1), 0, 2, 0), 1) == "last" and set(groups) == set(GROUPS)


def test_unknown_facts_are_skipped_with_a_reason():
    model, tokenizer = loaded("qwen2")
    with pytest.raises(EditingError, match=r"none of the 4 facts.*does not predict.*--answer predicted"):
        trace_facts(model, tokenizer, FACTS, quiet=True)
    plain = EditRequest(**{**FACTS[0].to_dict(), "target_true": None, "case_id": "without an answer"})
    trace = trace_facts(model, tokenizer, [*FACTS, plain], TraceSettings(samples=1), quiet=True)
    assert trace.num_facts == 1 and list(trace.skipped) == ["c0", "c1", "c2", "c3"]


@pytest.mark.parametrize("settings", [{"samples": 0}, {"noise": -1.0}, {"window": 0}, {"answer": "best"}])
def test_settings_are_checked(settings):
    with pytest.raises(EditingError):
        TraceSettings(**settings)


def test_a_subject_is_needed():
    with pytest.raises(EditingError, match="needs the field 'subject'"):
        trace_facts(*loaded("llama"), [EditRequest(prompt="A b", target_new="c")], quiet=True)


def test_finished_facts_come_from_the_store(tmp_path, monkeypatch):
    model, tokenizer = loaded("llama")
    store = Store(tmp_path)
    settings = TraceSettings(samples=2, answer="predicted")
    first = trace_facts(model, tokenizer, FACTS, settings, store=store, quiet=True)
    assert store.size()["traces"][0] == len(FACTS)
    monkeypatch.setattr("edit_hooks.locate.tracing.causal_trace._trace_batch", lambda *_: pytest.fail("run again"))
    assert trace_facts(model, tokenizer, FACTS, settings, store=store, quiet=True) == first


def trace_with(mlp):
    effects = {kind: {"subject_last": {"mean": mlp, "stderr": [0.1] * len(mlp), "count": 3}} for kind in KINDS}
    return Trace({"window": 2}, 3, {}, 1.0, 0.5, 0.1, effects)


def test_layers_are_suggested_where_restoring_helps_most():
    assert trace_with([0.0, 0.1, 0.5, 0.2, 0.1, 0.1, 0.0]).suggested() == {"one": [2], "several": [1, 2, 3, 4, 5]}
    assert trace_with([0.3, 0.1]).suggested() == {"one": [0], "several": [0, 1]}
    assert trace_with([-0.3, 0.0]).suggested() == {}


def test_facts_with_as_many_subject_tokens_share_their_noise():
    first, second, other = (subject_noise(3, 2, 8, 0.5, seed) for seed in (1, 1, 2))
    assert first.shape == (3, 2, 8) and torch.equal(first, second) and not torch.equal(first, other)
