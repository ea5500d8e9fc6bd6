"""The self-check finds a broken promise, and what it finds decides what editors do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch
from transformers import PreTrainedModel

from edit_hooks import Delta, EditingError, EditRequest, load_editor
from edit_hooks.contract.tiny_models import REQUESTS, build_model, build_tokenizer
from edit_hooks.deltas.delta import Factor
from edit_hooks.deltas.row_adapters import PerRowAdapters
from edit_hooks.deltas.row_edits import acts_per_row
from edit_hooks.modeling import architectures
from edit_hooks.modeling.architectures import (
    Architecture,
    architecture_of,
    attention_output,
    register_family,
    row_chosen,
)
from edit_hooks.modeling.support import Support, known_support, record_support
from edit_hooks.self_check import probes, run
from edit_hooks.self_check.run import checked, self_check
from edit_hooks.store.store import Store

REQUEST = EditRequest(**REQUESTS[0])
ROME = {"num_steps": 2, "context_templates": ["{}"], "second_moments": None, "layers": [1]}


def map_of(model: PreTrainedModel, name: str = "mlp.down_proj") -> Any:
    return model.get_submodule(f"model.layers.1.{name}")


def mixes_rows(model: PreTrainedModel, patch: Callable[..., None]) -> None:
    linear = map_of(model)
    own = linear.forward
    patch(linear, "forward", lambda x: own(x) + own(x).flip(0))


def computes_with_a_copy(model: PreTrainedModel, patch: Callable[..., None]) -> None:
    linear, kept = map_of(model), map_of(model).weight.detach().clone()
    patch(linear, "forward", lambda x: torch.nn.functional.linear(x, kept))


def reads_the_width(model: PreTrainedModel, patch: Callable[..., None]) -> None:
    mlp = map_of(model, "mlp")
    own = mlp.forward
    patch(mlp, "forward", lambda x: own(x) * x.shape[1])


def runs_twice(model: PreTrainedModel, patch: Callable[..., None]) -> None:
    mlp = map_of(model, "mlp")
    own = mlp.forward
    patch(mlp, "forward", lambda x: own(x) + own(2 * x))


def squashes_the_output(model: PreTrainedModel, patch: Callable[..., None]) -> None:
    mlp = map_of(model, "mlp")
    own = mlp.forward
    patch(mlp, "forward", lambda x: own(x).tanh())


def swaps_gate_and_value(model: PreTrainedModel, patch: Callable[..., None]) -> None:
    mlp = map_of(model, "mlp")
    patch(mlp, "forward", lambda x: mlp.down_proj(mlp.act_fn(mlp.up_proj(x)) * mlp.gate_proj(x)))


def adds_in_place(model: PreTrainedModel, patch: Callable[..., None]) -> None:
    """As Falcon and Llama 4 do: the output of a map is changed after it."""
    mlp = map_of(model, "mlp")
    own = mlp.forward
    patch(mlp, "forward", lambda x: own(x).add_(x))


def changes_its_input(model: PreTrainedModel, patch: Callable[..., None]) -> None:
    """What is kept of a block's output is changed after it."""
    norm = model.get_submodule("model.layers.1.input_layernorm")
    own = norm.forward
    patch(norm, "forward", lambda x: own(x.add_(1)))


def reads_an_earlier_block(model: PreTrainedModel, patch: Callable[..., None]) -> None:
    """As values that skip blocks do: a cached block does not leave them."""
    first, mlp = model.get_submodule("model.layers.0.mlp"), map_of(model, "mlp")
    earlier, own, left = first.forward, mlp.forward, []

    def leave(x: torch.Tensor) -> torch.Tensor:
        left[:] = [earlier(x)]
        return left[0]

    patch(first, "forward", leave)
    patch(mlp, "forward", lambda x: own(x + left.pop() if left else x))


# how a model is broken -> the checks that fail, and what is still offered
FAULTS: dict[Callable[..., None], tuple[set[str], str]] = {
    mixes_rows: ({"written", "beside"}, "attention maps only"),
    computes_with_a_copy: ({"written"}, "attention maps only"),
    reads_the_width: ({"padding"}, "context editors only"),
    runs_twice: ({"maps"}, "attention maps only"),
    squashes_the_output: ({"residual"}, "fast engine"),
    swaps_gate_and_value: ({"gate"}, "fast engine"),
    changes_its_input: ({"suffix", "labels"}, "plain engine"),
    reads_an_earlier_block: ({"labels"}, "plain engine"),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_broken_promise_is_found(fault: Callable[..., None], monkeypatch: MonkeyPatch) -> None:
    model = build_model("smollm3")
    assert not self_check(model).failed
    fault(model, monkeypatch.setattr)
    failed, offer = FAULTS[fault]
    support = self_check(model)
    assert failed == set(support.failed), support.failed
    assert support.offer.startswith(offer)
    if not support.weights or "rewrite" in support.unusable:
        record_support(model, support)
        with pytest.raises(EditingError, match=r"self-check"):
            load_editor("rome", ROME).edit(model, build_tokenizer("byte_bpe"), [REQUEST])


def test_outputs_to_which_a_model_adds_in_place_are_kept_as_they_were(monkeypatch: MonkeyPatch) -> None:
    model = build_model("smollm3")
    adds_in_place(model, monkeypatch.setattr)
    assert not self_check(model).failed


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (lambda edit, other: [edit, edit], "the edit of a row changes another row"),
        (lambda edit, other: [other, other], "an update changes its output by something else"),
    ],
    ids=["both", "none"],
)
def test_an_edit_beside_the_weights_belongs_to_its_row(
    rows: Callable[..., list[Delta | None]], reason: str, monkeypatch: MonkeyPatch
) -> None:
    model = build_model("smollm3")
    monkeypatch.setattr(probes, "PerRowAdapters", lambda model, deltas: PerRowAdapters(model, rows(*deltas)))
    support = self_check(model)
    assert reason in support.failed["beside"]
    assert (support.rows, support.fast, support.offer) == (False, False, "plain engine, weights by patching only")


def test_a_block_of_every_kind_is_checked(monkeypatch: MonkeyPatch) -> None:
    """DeepSeek's first block is dense, the others have a shared expert."""
    model = build_model("deepseek_v3")
    dense: Any = model.get_submodule("model.layers.0.mlp.down_proj")
    assert "written" not in self_check(model).failed
    kept = dense.weight.detach().clone()
    monkeypatch.setattr(dense, "forward", lambda x: torch.nn.functional.linear(x, kept))
    assert "layers.0.mlp.down_proj" in self_check(model).failed["written"]


def test_a_map_of_another_width_is_no_output_map(monkeypatch: MonkeyPatch) -> None:
    """A row from outside that names the gate in the place of the output map."""
    model = build_model("smollm3")
    row = architecture_of(model)
    monkeypatch.setattr(architectures, "_given", {})
    register_family("smollm3", dataclasses.replace(row, rewrite=row.mlp_in[0], mlp=row.mlp_in[0]))
    try:
        support = self_check(model)
    finally:
        architectures._found.clear()
    assert "rewrite" in support.unusable and "32" in support.unusable["rewrite"]


def test_a_row_belongs_to_one_model_or_to_its_type_and_so_does_its_check(monkeypatch: MonkeyPatch) -> None:
    """A check of other modules does not count, and what was found for a row holds when it is used again."""
    model, other = build_model("smollm3"), build_model("smollm3")
    support, for_attention = Support(scale=2.0), Support(scale=None)
    for one in (model, other):
        record_support(one, support)
    with row_chosen(model, attention_output):
        assert known_support(model) is None and known_support(other) is support
        assert architecture_of(model).changes_attention(0) and not architecture_of(other).changes_attention(0)
        record_support(model, for_attention)
    assert known_support(model) is support and not architecture_of(model).changes_attention(0)
    with row_chosen(model, attention_output):
        assert known_support(model) is for_attention
    monkeypatch.setattr(architectures, "_given", {})
    register_family("smollm3", attention_output)
    try:
        assert known_support(other) is None and architecture_of(other).changes_attention(0)
        assert known_support(model) is for_attention  # the same row, for all of its type
    finally:
        architectures._found.clear()


def test_without_rows_edits_are_written_and_computed_by_the_plain_engine() -> None:
    model = build_model("smollm3")
    name = architecture_of(model).rewrite_name(1)
    delta = Delta(factors={name: Factor(torch.ones(32, 1), torch.ones(64, 1), False)})
    assert acts_per_row(model, delta)
    record_support(model, Support(rows=False, fast=False, failed={"beside": "a reason"}))
    assert not acts_per_row(model, delta)
    (edit,) = load_editor("rome", ROME).edit(model, build_tokenizer("byte_bpe"), [REQUEST], measure=False)
    assert edit.meta["config"]["engine"] == "reference"


def test_a_result_is_stored_and_found_by_how_the_model_computes(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    store = Store(tmp_path)
    found = checked(build_model("granite"), store)
    assert found.scale == pytest.approx(0.22)
    monkeypatch.setattr(run, "self_check", lambda model: pytest.fail("checked again"))
    assert checked(build_model("granite", seed=1), store) == found  # a fine-tuned model
    with pytest.raises(pytest.fail.Exception):
        checked(build_model("granite", residual_multiplier=0.5), store)


def test_tested_families_are_not_checked(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(run, "self_check", lambda model: pytest.fail("checked"))
    for model_type in ("gpt2", "exaone", "gemma3_text"):
        assert checked(build_model(model_type)) == Support()
    assert known_support(build_model("smollm3")) is None


def test_a_row_of_another_kind_is_refused() -> None:
    row: Any = {"block": "model.layers.{}"}
    with pytest.raises(EditingError, match=r"smollm3.*is a dict.*Architecture"):
        register_family("smollm3", row)
    assert isinstance(architecture_of(build_model("smollm3")), Architecture)
