"""WISE's fast engine makes the edits of its plain loop and runs nothing twice that a change of the map cannot reach."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hook_edits import EDIT_REQUESTS, SETTINGS, prompt_distance, stream_of, weight_of
from torch import nn

from edit_hooks import Delta
from edit_hooks.contract.tiny_models import ALL_MODEL_TYPES, EDIT_LAYER, NATURAL_TOKENIZER, NUM_LAYERS
from edit_hooks.editors import wise
from edit_hooks.editors.wise import WISEConfig, training_rows
from edit_hooks.gradient import map_forward
from edit_hooks.gradient.map_forward import KeptActivations, MapActivations, map_activations
from edit_hooks.memory.side_memory import MemoryBank

# Rows of different lengths, and an unrelated text that is longer than the shortest of them.
TEMPLATES = ["{}", "The band released a second album in the spring. {}", "You can see. {}"]
LONG_TEXT = "The museum in Karsk shows paintings by João Sá and Zoë Brandt, and a café sells bread, jam and tea."
BASE: dict[str, Any] = {**SETTINGS["wise"], "context_templates": TEMPLATES, "num_steps": 3}
LAST = NUM_LAYERS - 1
CHAT = "<|user|>\n{% for m in messages %}{{ m['content'] }}{% endfor %}<|end|>\n<|assistant|>\n"

# Every switch that changes rows, losses or steps.
SWITCHES: dict[str, dict[str, Any]] = {
    "first block": {"layers": [0]},
    "last block": {"layers": [LAST]},
    "an unrelated text longer than every row": {"context_templates": ["{}"], "loc_prompts": [LONG_TEXT]},
    "chat": {"chat": True},
    "replay, merged by two": {"replay": True, "save_every": 1, "merge_every": 2},
    "replay, never merged": {"replay": True, "save_every": 2, "merge_every": 8},
    "merging": {"save_every": 1, "merge_every": 2, "merge": "linear"},
    "merging into one": {"save_every": 1, "merge_every": 1, "retrieve": False},
    "decay of all entries": {"weight_decay": 0.1, "decayed_entries": "all"},
    "decay of trained entries": {"weight_decay": 0.1, "decayed_entries": "trained"},
    "a ball": {"norm_constraint": 0.01},
    "paper": {"distance": "plain", "target_mean": "plain"},
}


def assert_same_steps(ours: list[Delta], expected: list[Delta], bound: float) -> None:
    """Losses of every evaluation, thresholds and the stored memories."""
    assert len(ours) == len(expected)
    for one, other in zip(ours, expected, strict=True):
        for name in ("steps", "stop_reason", "memories"):
            assert one.diagnostics[name] == other.diagnostics[name]
        for name in ("threshold", "distance_in", "distance_out", "final_nll"):
            assert one.diagnostics[name] == pytest.approx(other.diagnostics[name], rel=bound, abs=bound)
        for record, of_plain in zip(one.diagnostics["losses"], other.diagnostics["losses"], strict=True):
            assert record == pytest.approx(of_plain, rel=bound, abs=bound)
        tensors, others = one.hook_edit.tensors, other.hook_edit.tensors
        assert tensors.keys() == others.keys()
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                assert float((tensor - others[name]).norm() / others[name].norm()) < bound, name
            else:
                assert torch.equal(tensor, others[name]), name


def both_streams(model: Any, tokenizer: Any, num_edits: int, **changes: Any) -> tuple[list[Delta], list[Delta]]:
    """The same stream of edits by the fast engine and by the plain loop."""
    fast, plain = (
        stream_of("wise", model, tokenizer, EDIT_REQUESTS[:num_edits], **{**BASE, **changes, "engine": engine})
        for engine in ("fast", "reference")
    )
    return fast, plain


@pytest.mark.parametrize("model_type", ALL_MODEL_TYPES)
def test_edits_are_those_of_the_plain_loop_on_every_family(
    model_type: str, tiny_model: Callable[..., Any], tiny_tokenizer: Callable[..., Any]
) -> None:
    """In float64, where both engines differ by rounding alone: sums of a thousand terms in three steps, below 1e-10.

    Gemma 2 and GPT-J take the attention's softmax in float32, where Gemma's mask of a float64 model is infinite.
    """
    dtype = torch.float32 if model_type == "gemma2" else torch.float64
    bound = {"gemma2": 1e-4, "gptj": 1e-6}.get(model_type, 1e-10)
    model, tokenizer = tiny_model(model_type, dtype=dtype), tiny_tokenizer(NATURAL_TOKENIZER[model_type])
    assert_same_steps(*both_streams(model, tokenizer, 1), bound)
    if model_type in ("gpt2", "gptj", "gpt_neox", "phi3"):  # of the others two maps lead into the MLP
        assert_same_steps(*both_streams(model, tokenizer, 1, module="mlp_in"), bound)


@pytest.mark.parametrize("switch", SWITCHES)
def test_edits_are_those_of_the_plain_loop_under_every_switch(
    switch: str, tiny_model: Callable[..., Any], tiny_tokenizer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams of three edits in float64; the bound as above."""
    model, tokenizer = tiny_model("llama", dtype=torch.float64), tiny_tokenizer("byte_bpe_bos")
    monkeypatch.setattr(tokenizer, "chat_template", CHAT if switch == "chat" else None)
    fast, plain = both_streams(model, tokenizer, 3, **SWITCHES[switch])
    assert_same_steps(fast, plain, 1e-10)
    assert any("replay" in record for record in fast[-1].diagnostics["losses"]) == switch.startswith("replay")


def test_an_early_stop_comes_at_the_step_of_the_plain_loop(
    tiny_model: Callable[..., Any], tiny_tokenizer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wise, "STOP_LOSS", 10.0)
    monkeypatch.setattr(wise, "STOP_CHANGE", 0.3)
    model, tokenizer = tiny_model("llama", dtype=torch.float64), tiny_tokenizer("byte_bpe_bos")
    fast, plain = both_streams(model, tokenizer, 2, num_steps=40)
    assert {delta.diagnostics["stop_reason"] for delta in fast} == {"loss"}
    assert len({delta.diagnostics["steps"] for delta in fast}) > 1
    assert_same_steps(fast, plain, 1e-10)


@pytest.mark.parametrize("engine", ["fast", "reference"])
def test_distances_are_means_over_the_tokens_of_each_row(
    engine: str, tiny_model: Callable[..., Any], tiny_tokenizer: Callable[..., Any]
) -> None:
    """Padding is in no mean: the second evaluation, under the change of the first step, by hand row by row."""
    model, tokenizer = tiny_model("llama"), tiny_tokenizer("byte_bpe_bos")
    settings = {**BASE, "engine": engine}
    (one,), (two,) = (
        stream_of("wise", model, tokenizer, EDIT_REQUESTS[:1], **{**settings, "num_steps": steps}) for steps in (1, 2)
    )
    memory = MemoryBank.from_hook_edit(one.hook_edit, weight_of(model, one)).current
    assert memory is not None
    edits = [EDIT_REQUESTS[0].in_template(template) for template in TEMPLATES]
    texts = [edit.text + edit.continuation for edit in edits]
    distances = [prompt_distance(model, tokenizer, text, memory, one) for text in (*texts, settings["loc_prompts"][0])]
    *inside, outside = distances
    assert two.diagnostics["distance_in"] == pytest.approx(sum(inside) / len(inside), rel=1e-4)
    assert two.diagnostics["distance_out"] == pytest.approx(outside, rel=1e-4)


@contextlib.contextmanager
def recorded_shapes(modules: dict[str, nn.Module]) -> Iterator[dict[str, list[tuple[int, ...]]]]:
    """Rows and columns of every output of some modules that run; a cached output is not one."""
    shapes: dict[str, list[tuple[int, ...]]] = {name: [] for name in modules}
    plain = {name: module.forward for name, module in modules.items()}

    def recording(name: str) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            output = plain[name](*args, **kwargs)
            shapes[name].append(tuple(output.shape[:2]))
            return output

        return forward

    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(module.__dict__, "forward", recording(name))
        yield shapes


def test_what_a_change_cannot_reach_runs_once(
    tiny_model: Callable[..., Any], tiny_tokenizer: Callable[..., Any]
) -> None:
    """Once per edit: all below the map and the map itself. Per step: labeled rows, up to the last label."""
    model, tokenizer = tiny_model("llama"), tiny_tokenizer("byte_bpe_bos")
    settings = {**BASE, "loc_prompts": [LONG_TEXT], "weight_decay": 0.0}
    edited, above = model.model.layers[EDIT_LAYER], model.model.layers[LAST]
    once = {
        "block below": model.model.layers[0].self_attn.k_proj,
        "attention": edited.self_attn.o_proj,
        "gate": edited.mlp.gate_proj,
        "up": edited.mlp.up_proj,
        "map": edited.mlp.down_proj,
    }
    each_step = {"keys": above.self_attn.k_proj, "attention out": above.self_attn.o_proj, "MLP": above.mlp.down_proj}
    rows = training_rows(tokenizer, EDIT_REQUESTS[0], WISEConfig(**settings))
    width = max(len(row.ids) for row in rows)
    to_label = max(column for row in rows for column, _ in row.labels) + 1
    num_positions = sum(len(row.labels) for row in rows)
    assert width == len(rows[-1].ids) > to_label
    with recorded_shapes(once) as shapes, recorded_shapes(each_step) as step_shapes:
        stream_of("wise", model, tokenizer, EDIT_REQUESTS[:1], **settings)
    assert shapes == {name: [(len(TEMPLATES) + 1, width)] for name in once}
    assert step_shapes["keys"] == [(len(TEMPLATES), to_label)] * settings["num_steps"]
    assert step_shapes["attention out"] == step_shapes["MLP"] == [(1, num_positions)] * settings["num_steps"]


def test_the_plain_loop_runs_every_token_through_the_whole_model_in_every_step(
    tiny_model: Callable[..., Any], tiny_tokenizer: Callable[..., Any]
) -> None:
    """The head included, also on the row without labels, as the release does."""
    model, tokenizer = tiny_model("llama"), tiny_tokenizer("byte_bpe_bos")
    modules = {"lowest": model.model.layers[0].mlp.down_proj, "head": model.lm_head}
    settings = {**BASE, "engine": "reference"}
    width = max(len(row.ids) for row in training_rows(tokenizer, EDIT_REQUESTS[0], WISEConfig(**settings)))
    with recorded_shapes(modules) as shapes:
        stream_of("wise", model, tokenizer, EDIT_REQUESTS[:1], **settings)
    assert shapes == {name: [(len(TEMPLATES) + 1, width)] * settings["num_steps"] for name in modules}


@pytest.mark.parametrize(("budget", "passes"), [(2**40, 3), (0, 12)])
def test_rows_of_past_edits_run_once_per_edit_where_they_fit_into_the_memory(
    budget: int,
    passes: int,
    tiny_model: Callable[..., Any],
    tiny_tokenizer: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Six steps replay two merged edits in turn and the present one."""
    calls: list[torch.Tensor] = []

    def counting(model: Any, name: str, ids_RT: torch.Tensor, mask_RT: torch.Tensor) -> MapActivations:
        calls.append(ids_RT)
        return map_activations(model, name, ids_RT, mask_RT)

    monkeypatch.setattr(map_forward, "map_activations", counting)
    monkeypatch.setattr(wise, "memory_budget", lambda model: budget)
    model, tokenizer = tiny_model("llama", dtype=torch.float64), tiny_tokenizer("byte_bpe_bos")
    settings = {**BASE, "num_steps": 6, "replay": True, "save_every": 2, "merge_every": 2}
    fast = stream_of("wise", model, tokenizer, EDIT_REQUESTS[:3], **settings)
    assert len(calls) == passes
    calls.clear()
    plain = stream_of("wise", model, tokenizer, EDIT_REQUESTS[:3], **settings, engine="reference")
    assert len(calls) == 12
    assert_same_steps(fast, plain, 1e-10)


def test_kept_activations_stay_within_their_budget() -> None:
    """Two of three batches fit; they are kept and the third is computed at every call."""
    computed: list[int] = []

    def compute(number: int) -> MapActivations:
        computed.append(number)
        return MapActivations(torch.full((2, 3, 4), float(number)), torch.zeros(2, 3, 1))

    size = compute(0).size
    assert size == 2 * 3 * 5 * 4
    kept = KeptActivations(compute, 2 * size + 1)
    computed.clear()
    for number in (0, 1, 2, 0, 1, 2):
        assert float(kept(number).x_RTF[0, 0, 0]) == number
    assert computed == [0, 1, 2, 2]
