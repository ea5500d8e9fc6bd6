"""Deltas as values: sums, checksums, files."""

from __future__ import annotations

import json

import pytest
import torch
from random_deltas import codebook, dense_delta, masked_delta, random_delta, rewrite_name
from safetensors import safe_open
from safetensors.torch import save_file

from edit_hooks import Delta, EditingError, Factor
from edit_hooks.deltas.context_edit import ContextEdit
from edit_hooks.deltas.delta import HEADER_CHECKSUM
from edit_hooks.utils.storage.hashing import key_of

FACT = ContextEdit("Port Elna is the capital of", "Dravonia", demonstrations=("a", "b"), min_similarity=0.5)


def full_delta(model) -> Delta:
    """A delta with every part."""
    delta = masked_delta(model)
    delta.factors["other"] = Factor(torch.ones(2, 1), torch.ones(3, 1), transposed=True)
    delta.dense = dense_delta(model, layer=0).dense
    delta.hook_edit, delta.contexts = codebook(model), (FACT,)
    delta.stream_state = {"keys": torch.arange(6.0).view(2, 3)}
    delta.diagnostics, delta.meta = {"losses": [1.0, 0.5]}, {"editor": "test"}
    return delta


def rewrite_header(path, **changes):
    """Write a saved edit again with other header entries, and with the checksum of the header unless that is given."""
    with safe_open(path, framework="pt") as file:
        header = {name: value for name, value in {**file.metadata(), **changes}.items() if value is not None}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    content = {name: value for name, value in header.items() if name != HEADER_CHECKSUM}
    save_file(tensors, path, header if HEADER_CHECKSUM in changes else {**content, HEADER_CHECKSUM: key_of(content)})


def test_every_part_survives_the_round_trip(tiny_model, tmp_path):
    delta = full_delta(tiny_model("gpt2"))
    delta.intermediates = {"keys": torch.ones(2)}
    delta.save(tmp_path / "edit.safetensors")
    again = Delta.load(tmp_path / "edit.safetensors")
    assert again.checksum() == delta.checksum() and not again.intermediates
    assert again.contexts == delta.contexts and again.meta == delta.meta and again.diagnostics == delta.diagnostics
    assert torch.equal(again.stream_state["keys"], delta.stream_state["keys"])
    assert again.hook_edit.kind == "codebook" and again.hook_edit.settings == delta.hook_edit.settings
    assert {name: factor.transposed for name, factor in again.factors.items()} == {
        name: factor.transposed for name, factor in delta.factors.items()
    }
    for name, update in delta.weights().items():
        assert torch.equal(again.weights()[name], update)


def test_the_checksum_covers_every_part_of_the_effect(tiny_model):
    model = tiny_model("gpt2")
    base = full_delta(model).checksum()
    changed = [full_delta(model) for _ in range(6)]
    name = rewrite_name(model)
    changed[0].factors[name] = changed[0].factors[name]._replace(left=changed[0].factors[name].left + 1)
    changed[1].dense[f"{rewrite_name(model, 0)}.weight"][0, 0] += 1
    changed[2].masks[name] = changed[2].masks[name] ^ 1
    changed[3].hook_edit.settings["replacement"] = "replace_all"
    changed[4].contexts = (ContextEdit("Port Elna is the capital of", "Peru"),)
    changed[5].stream_state["keys"] = torch.zeros(2, 3)
    assert len({base, *(delta.checksum() for delta in changed)}) == 7
    same = full_delta(model)
    same.meta, same.diagnostics = {}, {}
    assert same.checksum() == base


def test_parts_are_named_and_separated(tiny_model):
    model = tiny_model("gpt2")
    full, weights = full_delta(model), random_delta(model)
    assert full.writes == ["weights", "hooks", "context"] and weights.writes == ["weights"] and Delta().writes == []
    assert weights.runtime_part is None and full.runtime_part.writes == ["hooks", "context"]
    assert full.without_contexts.writes == ["weights", "hooks"] and weights.without_contexts is weights
    assert Delta(contexts=(FACT,)).without_contexts is None
    assert weights.is_low_rank and weights.rank == 2 and Delta().rank == 0
    assert not any(delta.is_low_rank for delta in (full, masked_delta(model), dense_delta(model)))


def test_low_rank_and_hook_edits_act_per_row(tiny_model):
    model = tiny_model("gpt2")
    assert random_delta(model).acts_per_row and Delta(hook_edit=codebook(model)).acts_per_row
    assert not masked_delta(model).acts_per_row and not dense_delta(model).acts_per_row


def test_a_mask_selects_the_written_entries(tiny_model):
    model = tiny_model("gpt2")
    delta, whole = masked_delta(model), random_delta(model)
    (update,), (full,) = delta.weights().values(), whole.weights().values()
    written = update != 0
    assert 0.3 < float(written.float().mean()) < 0.7 and torch.equal(update[written], full[written])


def test_a_sum_equals_its_summands_written_in_order(tiny_model):
    model = tiny_model("gpt2")
    deltas = [random_delta(model, layers=(0, 1), ranks=(1, 3), seed=1), random_delta(model, seed=2), dense_delta(model)]
    deltas += [masked_delta(model, seed=3), Delta(contexts=(FACT,)), Delta(contexts=(ContextEdit("a", "b"),))]
    total = Delta.summed(deltas)
    assert total.parameter_names == list(total.weights())
    assert f"{rewrite_name(model)}.weight" in total.dense and rewrite_name(model) in total.factors
    for name, update in total.weights().items():
        expected = sum(delta.weights()[name] for delta in deltas if name in delta.weights())
        torch.testing.assert_close(update, expected, atol=1e-6, rtol=1e-5)
    assert total.factors[rewrite_name(model)].left.shape[1] == 5
    assert [context.target_new for context in total.contexts] == ["Dravonia", "b"]
    assert total.meta["parts"] == [delta.meta for delta in deltas]


def test_values_that_are_not_finite_are_found_in_every_part(tiny_model):
    model = tiny_model("gpt2")
    full_delta(model).check_finite()
    for spoil in (
        lambda delta: delta.dense[f"{rewrite_name(model, 0)}.weight"].fill_(torch.inf),
        lambda delta: delta.hook_edit.tensors["values"].fill_(torch.nan),
        lambda delta: delta.stream_state["keys"].fill_(torch.nan),
    ):
        delta = full_delta(model)
        spoil(delta)
        with pytest.raises(EditingError, match="not finite"):
            delta.check_finite()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "another/1"}, "is not a saved edit"),
        ({"meta": "{"}, "cannot be used: meta, column 2: not valid JSON"),
        ({"meta": None}, "its header has no 'meta'"),
        ({"hooked": json.dumps({"kind": "codebook", "settings": {}, "tensors": {}})}, "the unknown field 'tensors'"),
        ({"hooked": json.dumps({"settings": {}})}, "hooked lacks 'kind'"),
        ({"contexts": json.dumps([{"prompt": "a"}])}, r"contexts\[0\] lacks 'choice'"),
        ({"checksum": "0"}, r"is damaged \(checksum differs"),
        ({"header_checksum": "0"}, "checksum of the header differs"),
        ({"header_checksum": None}, "checksum of the header differs"),
    ],
)
def test_damaged_files_are_refused_in_one_sentence(changes, message, tiny_model, tmp_path):
    path = tmp_path / "edit.safetensors"
    full_delta(tiny_model("gpt2")).save(path)
    rewrite_header(path, **changes)
    with pytest.raises(EditingError, match=message):
        Delta.load(path)


def test_files_that_are_no_tensors_are_refused(tmp_path):
    (tmp_path / "text").write_text("not a tensor file")
    for path in (tmp_path / "text", tmp_path / "missing"):
        with pytest.raises(EditingError, match="cannot be read"):
            Delta.load(path)
