"""Adapter databases: the round trip, combining the steps of a stream, look-ups, adapters per row."""

from __future__ import annotations

import pytest
import torch

from edit_hooks import Delta, EditingError, Factor, edited
from edit_hooks.deltas.hook_edit import HookEdit
from edit_hooks.deltas.row_edits import RowEdits
from edit_hooks.memory.adapter_database import Adapter, Cluster, Database, Point, outputs_at
from edit_hooks.modeling.architectures import architecture_of, is_transposed, map_shape

IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]])


def modules(model) -> tuple[str, str]:
    """The query module, and a target in a later block."""
    architecture = architecture_of(model)
    return architecture.module_names("mlp_in", 0)[0], architecture.rewrite_name(1)


def adapter(model, seed: int) -> Adapter:
    width_out, width_in = map_shape(model.get_submodule(modules(model)[1]))
    generator = torch.Generator().manual_seed(seed)
    return Adapter(torch.randn(2, width_in, generator=generator), torch.randn(width_out, 2, generator=generator))


def database(model, ids: torch.Tensor) -> Database:
    """One cluster and one adapter per prompt, at the prompts' own queries."""
    last = torch.full((len(ids),), ids.shape[1] - 1)
    queries = outputs_at(model, modules(model)[0], lambda: model(ids), last)
    clusters = [Cluster(query_Q, 1e-3, [number], [Point(query_Q, number)]) for number, query_Q in enumerate(queries)]
    return Database(clusters, {number: [adapter(model, number)] for number in range(len(ids))}, len(ids))


def hook_edit_of(model, content: Database, changed: set[int], num_before: int = 0) -> HookEdit:
    query, target = modules(model)
    settings = {"module": query, "targets": [target], "query_token": "last_prompt", "num_before": num_before}
    return content.to_hook_edit(settings, changed)


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_each_row_runs_with_its_nearest_points_adapter(model_type, tiny_model):
    model = tiny_model(model_type)
    whole = Delta(hook_edit=hook_edit_of(model, database(model, IDS[:2]), {0, 1}))
    with torch.no_grad():
        plain = model(IDS).logits
        with edited(model, whole):
            inside = model(IDS).logits
        with RowEdits(model, [whole, None, whole]).prefill(torch.ones_like(IDS), torch.tensor([4, 4, 4])):
            mixed = model(IDS).logits
    assert torch.equal(inside[2], plain[2]) and torch.equal(mixed[1:], plain[1:])  # no cluster, and no edit
    torch.testing.assert_close(mixed[0], inside[0], atol=1e-5, rtol=1e-5)
    name = modules(model)[1]
    for number in (0, 1):
        up_KF, down_DK = adapter(model, number)
        delta = Delta(factors={name: Factor(down_DK, up_KF.T, is_transposed(model.get_submodule(name)))})
        with torch.no_grad(), edited(model, delta):
            torch.testing.assert_close(inside[number], model(IDS[number : number + 1]).logits[0], atol=1e-3, rtol=1e-3)
        assert not torch.allclose(inside[number], plain[number], atol=1e-2)


def test_a_database_survives_the_round_trip(tiny_model):
    model = tiny_model("llama")
    content = database(model, IDS)
    again = Database.from_hook_edit(hook_edit_of(model, content, {0, 2}))
    assert again.next_id == 3 and sorted(again.adapters) == [0, 2]
    assert torch.equal(again.adapters[2][0].up_KF, content.adapters[2][0].up_KF)
    for ours, theirs in zip(again.clusters, content.clusters, strict=True):
        assert torch.equal(ours.center_Q, theirs.center_Q) and ours.label == theirs.label
        assert [point.adapter_id for point in ours.points] == [point.adapter_id for point in theirs.points]
    assert Database.from_hook_edit(None) == Database()


def test_adapters_without_a_point_are_dropped_from_the_sum_of_steps(tiny_model):
    model = tiny_model("llama")
    content = database(model, IDS)
    first = hook_edit_of(model, content, {0, 1})
    content.clusters = content.clusters[1:]
    combined = HookEdit.combine([first, hook_edit_of(model, content, {2}, num_before=3)])
    assert sorted(Database.from_hook_edit(combined).adapters) == [1, 2]
    other = hook_edit_of(model, content, {2})
    other.settings["targets"] = ["elsewhere"]
    with pytest.raises(EditingError, match="different modules"):
        HookEdit.combine([first, other])


def test_adapters_of_another_width_are_refused(tiny_model):
    model = tiny_model("llama")
    content = database(model, IDS[:1])
    content.adapters[0] = [Adapter(torch.ones(2, 3), torch.ones(model.config.hidden_size, 2))]
    with pytest.raises(EditingError, match="maps 3 ->"):
        hook_edit_of(model, content, {0}).check(model)
