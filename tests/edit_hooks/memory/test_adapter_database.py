"""Adapter databases: the round trip, combining the steps of a stream, look-ups, adapters per row."""

from __future__ import annotations

import pytest
import torch
from adapter_databases import adapters_of, clusters_of

from edit_hooks import Delta, EditingError, Factor, edited
from edit_hooks.deltas.hook_edit import HookEdit
from edit_hooks.deltas.row_edits import RowEdits
from edit_hooks.memory.adapter_database import NO_ADAPTER, Adapter, Change, Cluster, Point, outputs_at
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


def step(model, number: int, change: Change, adapters: list[Adapter] | None = None) -> HookEdit:
    query, target = modules(model)
    numbers = {"num_before": number, "num_edits": number + 1}
    settings = {"module": query, "targets": [target], "query_token": "last_prompt", **numbers}
    return change.to_hook_edit(adapters or [adapter(model, number)], settings)


def stream(model, ids: torch.Tensor) -> list[HookEdit]:
    """One cluster and one adapter per prompt, at the prompts' own queries."""
    last = torch.full((len(ids),), ids.shape[1] - 1)
    queries = outputs_at(model, modules(model)[0], lambda: model(ids), last)
    return [
        step(model, number, Change("new", [Cluster(number, query_Q, 1e-3, [number])], [Point(number, query_Q, number)]))
        for number, query_Q in enumerate(queries)
    ]


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_each_row_runs_with_its_nearest_points_adapter(model_type, tiny_model):
    model = tiny_model(model_type)
    whole = Delta(hook_edit=HookEdit.combine(stream(model, IDS[:2])))
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


def test_a_step_holds_what_it_changes(tiny_model, tmp_path):
    """In a saved stream the steps are alike, however many there were before."""
    model = tiny_model("llama")
    steps = stream(model, IDS)
    assert [{name: tensor.shape for name, tensor in one.tensors.items()} for one in steps[1:]] == [
        {name: tensor.shape for name, tensor in steps[0].tensors.items()}
    ] * 2
    Delta(hook_edit=HookEdit.combine(steps)).save(tmp_path / "whole.safetensors")
    whole = Delta.load(tmp_path / "whole.safetensors").hook_edit
    assert sorted(adapters_of(whole)) == [0, 1, 2] and [one.label for one in clusters_of(whole)] == [[0], [1], [2]]
    assert torch.equal(adapters_of(whole)[2][0].up_KF, adapter(model, 2).up_KF)
    with (
        pytest.raises(EditingError, match="lacks 2 earlier ones of its stream"),
        edited(model, Delta(hook_edit=steps[2])),
    ):
        pass


def test_sums_of_sums_are_the_sum(tiny_model):
    """A narrowed cluster, a guard, a removed cluster; the adapters of points that are gone leave."""
    model = tiny_model("llama")
    steps = stream(model, IDS)
    query_Q = steps[0].tensors["centers"][0]
    split = [Cluster(1, query_Q, 0.5, [1]), Cluster(3, query_Q, 2.0, [3])]
    guarded = Change("split", split, [Point(1, query_Q, 1, has_adapter=False), Point(3, query_Q, 3)])
    steps.append(step(model, 3, guarded))
    overwritten = Change("overwritten", [Cluster(4, query_Q, 1.0, [4])], [Point(4, query_Q, 4)], [0], [0])
    steps.append(step(model, 4, overwritten))
    whole = HookEdit.combine(steps)
    assert [(one.label, one.adapter_ids) for one in clusters_of(whole)] == [
        ([1], [NO_ADAPTER]), ([2], [2]), ([3], [3]), ([4], [4]),
    ]  # fmt: skip
    assert sorted(adapters_of(whole)) == [2, 3, 4]
    in_turn = steps[0]
    for one in steps[1:]:
        in_turn = HookEdit.combine([in_turn, one])
    apart = HookEdit.combine([HookEdit.combine(steps[:2]), HookEdit.combine(steps[2:])])
    for total in (in_turn, apart):
        assert total.settings == whole.settings
        assert total.tensors.keys() == whole.tensors.keys()
        assert all(torch.equal(tensor, whole.tensors[name]) for name, tensor in total.tensors.items())


def test_adapters_of_different_modules_are_not_put_together(tiny_model):
    first, other = stream(tiny_model("llama"), IDS[:2])
    other.settings["targets"] = ["elsewhere"]
    with pytest.raises(EditingError, match="different modules"):
        HookEdit.combine([first, other])


def test_adapters_of_another_width_are_refused(tiny_model):
    model = tiny_model("llama")
    point = Change("first", [Cluster(0, torch.ones(4), 1.0, [0])], [Point(0, torch.ones(4), 0)])
    wrong = [Adapter(torch.ones(2, 3), torch.ones(model.config.hidden_size, 2))]
    width = map_shape(model.get_submodule(modules(model)[0]))[0]
    for center, message in (
        (torch.ones(4), f"maps {model.config.hidden_size} -> 4,"),
        (torch.ones(width), "maps 3 ->"),
    ):
        change = point._replace(clusters=[point.clusters[0]._replace(center_Q=center)])
        with pytest.raises(EditingError, match=message):
            step(model, 0, change, wrong).check(model)


@pytest.mark.parametrize("removed", ["removed_points", "removed_clusters"])
def test_steps_that_fit_alone_and_not_together_are_refused(removed, tiny_model):
    """Each passes the checks of its file; a question near a cluster without a point would end in an IndexError."""
    first, second = stream(tiny_model("llama"), IDS[:2])
    second.settings[removed] = [0]
    first.check_content()
    second.check_content()
    with pytest.raises(EditingError, match="a cluster without a point or a point without a cluster"):
        HookEdit.combine([first, second])
