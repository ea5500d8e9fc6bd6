"""MELO's own rules: how clusters grow, split and forget, how adapters are trained, and which prompt uses which."""

from __future__ import annotations

import pytest
import torch
from adapter_databases import Found, adapters_of, clusters_of
from hook_edits import EDIT_REQUESTS, make, nll, stream_of
from safetensors.torch import save_file
from tiny_architectures import ARCHITECTURES
from value_problems import keep_wide

from edit_hooks import Delta, EditingError, EditRequest, edited, load_editor
from edit_hooks.contract.tiny_models import EDIT_LAYER, NATURAL_TOKENIZER, build_model, build_tokenizer
from edit_hooks.deltas.hook_edit import HookEdit
from edit_hooks.editors.melo import MELOConfig, _initial_up, _target_row, add_point
from edit_hooks.memory.adapter_database import NO_ADAPTER, Adapter, Change, Cluster, Database, Point
from edit_hooks.modeling.architectures import map_shape
from edit_hooks.modeling.tokens import split_continuation

CONFIG = MELOConfig(radius=1.0)


def step(number: int, change: Change) -> HookEdit:
    numbers = {"num_before": number, "num_edits": number + 1}
    return change.to_hook_edit([], {"module": "m", "targets": [], "query_token": "last_prompt", **numbers})


def cluster(*points: float, label: int = 0, radius: float = 1.0) -> tuple[list[float], list[int], float]:
    """On a line."""
    return list(points), [label], radius


def add(clusters, place: float, label: int = 0, rounding: float = 0.0, tokens: list[int] | None = None):
    """The clusters after one more edit, and the rule that applied. Edits are numbered from 0."""
    steps = []
    for points, own_label, radius in clusters:
        number = len(steps)
        for point in points:
            center = Cluster(number, torch.tensor([sum(points) / len(points), 0.0]), radius, own_label)
            steps.append(
                step(len(steps), Change("", [center], [Point(len(steps), torch.tensor([point, 0.0]), number)]))
            )
    database, query_Q = Database(HookEdit.combine(steps)), torch.tensor([place, 0.0])
    change = add_point(database, len(steps), query_Q, tokens or [label], CONFIG, CONFIG.same_query, rounding)
    return clusters_of(HookEdit.combine([*steps, step(len(steps), change)])), change.reason


def places(found: Found) -> list[float]:
    return [float(query_Q[0]) for query_Q in found.queries]


# -- the rules -------------------------------------------------------------------------------------------------------


def test_edit_far_from_every_cluster_starts_one():
    found, reason = add([], 3.0)
    assert reason == "first" and places(found[0]) == [3.0] and found[0].radius == 1.0
    near, reason = add([cluster(0.0)], 2.25)  # beyond its radius and that of a new one
    assert reason == "new" and [places(part) for part in near] == [[0.0], [2.25]]


def test_same_target_nearby_joins_the_cluster():
    found, reason = add([cluster(0.0)], 1.75)
    assert reason == "joined" and len(found) == 1 and places(found[0]) == [0.0, 1.75]
    assert float(found[0].center_Q[0]) == pytest.approx(0.875) and found[0].radius == 1.0  # never below a new one's
    wider, _ = add([cluster(0.0, 3.0, radius=1.5)], 3.9)
    assert float(wider[0].center_Q[0]) == pytest.approx(2.3) and wider[0].radius == pytest.approx(2.3)
    rounded, _ = add([cluster(-3.0, 0.0, radius=1.5)], -3.9, rounding=0.1)  # the point at 0 is the farthest
    assert rounded[0].radius == pytest.approx(2.3)
    rounded, _ = add([cluster(0.0, 3.0, radius=1.5)], 3.9, rounding=0.1)
    assert rounded[0].radius == pytest.approx(2.3) and add([cluster(3.0)], 4.5, rounding=0.1)[0][0].radius > 1.15


def test_other_target_nearby_splits_and_drops_outside_points():
    old = cluster(-1.0, 0.0, 1.0, radius=1.0)
    found, reason = add([cluster(50.0, label=3), old], 1.2, label=5)
    assert reason == "split" and [part.label for part in found] == [[3], [0], [5]]
    assert places(found[1]) == [0.0] and found[1].radius == pytest.approx(0.6, abs=1e-4)
    assert found[2].radius > 0.6 > found[1].radius  # a prompt half way belongs to the newer one
    emptied, _ = add([cluster(-0.5, 0.5)], 0.2, label=5)
    assert [part.label for part in emptied] == [[0], [5]]  # it stays, and selects no adapter
    assert emptied[0].adapter_ids == [NO_ADAPTER] and places(emptied[0]) == [0.0]


def test_the_same_prompt_with_another_target_is_overwritten():
    found, reason = add([cluster(2.0, radius=1.3), cluster(9.0, label=4)], 2.0, label=5)
    assert reason == "overwritten" and sorted(part.label[0] for part in found) == [4, 5]
    (new,) = [part for part in found if part.label == [5]]
    assert places(new) == [2.0] and new.adapter_ids == [2] and new.radius == 1.3


def test_targets_are_compared_token_by_token():
    """The release compares sums, which agree for (1, 4) and (2, 3)."""
    found, reason = add([([0.0], [1, 4], 1.0)], 0.5, tokens=[2, 3])
    assert reason == "split" and len(found) == 2


# -- training and use ------------------------------------------------------------------------------------------------


@pytest.fixture
def wide():
    """Adam decides by the smallest signs."""
    with keep_wide():
        yield


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("model_type", ["gpt2", "llama", "gemma3_text"])
def test_adapters_are_those_of_a_plain_loop(model_type):
    """One edit, whole forwards, torch's Adam and StepLR."""
    model = build_model(model_type, dtype=torch.float64)
    tokenizer = build_tokenizer(NATURAL_TOKENIZER[model_type])
    request, steps, scale = EDIT_REQUESTS[0], 7, 8.0
    (delta,) = make("melo", num_steps=steps, halve_every=3).edit(model, tokenizer, [request])
    names = ARCHITECTURES[model_type].module_names("mlp_in", EDIT_LAYER)
    leaves = []
    for name in names:
        width_out, width_in = map_shape(model.get_submodule(name))
        up = _initial_up(request, name, (2, width_in), (2 * scale) ** -0.5, 0)
        leaves.append(up.clone().requires_grad_(True))
        leaves.append(torch.zeros(width_out, 2, dtype=torch.float64, requires_grad=True))
    context, target = split_continuation(tokenizer, request.text, f" {request.target_new}")
    ids = torch.tensor([[*context, *target[:-1]]])
    optimizer = torch.optim.Adam(leaves, lr=0.01)
    losses = []
    handles = [
        model.get_submodule(name).register_forward_hook(
            lambda _m, args, out, up=leaves[2 * n], down=leaves[2 * n + 1]: out + scale * args[0] @ up.T @ down.T
        )
        for n, name in enumerate(names)
    ]
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * 0.5 ** (step // 3)
        logp = model(ids).logits[0, len(context) - 1 :].log_softmax(-1)
        loss = -logp[range(len(target)), target].mean()
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for handle in handles:
        handle.remove()
    assert [entry["loss"] for entry in delta.diagnostics["losses"]] == pytest.approx(losses, rel=1e-8)
    assert losses[-1] < losses[0]
    (adapters,) = adapters_of(delta.hook_edit).values()
    for n, adapter in enumerate(adapters):
        product = scale * leaves[2 * n + 1] @ leaves[2 * n]
        found = adapter.down_DK @ adapter.up_KF
        assert (found - product.detach()).norm() < 1e-8 * product.detach().norm()


def test_the_starting_draw_is_as_wide_as_the_released_one():
    """Uniform within 1 / sqrt(number of blocks x rank), whatever the width of the map."""
    model, tokenizer = build_model("llama"), build_tokenizer("byte_bpe_bos")
    (delta,) = make("melo", num_steps=1, lr=1e-9, scale=50.0, rank=8).edit(model, tokenizer, EDIT_REQUESTS[:1])
    (adapters,) = adapters_of(delta.hook_edit).values()
    for adapter in adapters:
        largest = float(adapter.up_KF.abs().max())
        assert 0.9 / 20 < largest <= 1 / 20 + 1e-6
        assert float(adapter.up_KF.std()) == pytest.approx(1 / 20 / 3**0.5, rel=0.2)


@pytest.mark.parametrize("from_file", [False, True])
def test_given_factors_replace_the_draw(from_file, tmp_path):
    model, tokenizer = build_model("gpt2"), build_tokenizer("byte_bpe")
    (name,) = ARCHITECTURES["gpt2"].module_names("mlp_in", EDIT_LAYER)
    given = 0.1 * torch.randn(map_shape(model.get_submodule(name))[1], 5)
    save_file({name: given, "other": torch.zeros(1)}, tmp_path / "factors.safetensors")
    source = str(tmp_path / "factors.safetensors") if from_file else {name: given}
    settings = {"initial_factors": source, "num_steps": 1, "lr": 1e-9}
    steps = stream_of("melo", model, tokenizer, EDIT_REQUESTS[:2], **settings)
    for number, step in enumerate(steps):
        (adapter,) = adapters_of(step.hook_edit)[number]
        assert torch.allclose(adapter.up_KF.T, given[:, 2 * number : 2 * number + 2], atol=1e-6)
    with pytest.raises(EditingError, match="enough for 2 edits of rank 2, and this is edit 3"):
        make("melo", **settings).edit(model, tokenizer, EDIT_REQUESTS[2:3], history=steps)


def test_the_query_of_the_whole_text_misses_the_prompt():
    """Released: the query is that of the last token of prompt, target and end of text."""
    model, tokenizer = build_model("llama"), build_tokenizer("byte_bpe_bos")
    request, settings = EDIT_REQUESTS[0], {"num_steps": 40, "append_eos": "released", "radius": 1e-4}
    whole, prompt = (
        make("melo", **settings, query_token=token).edit(model, tokenizer, [request])[0]
        for token in ("last_text", "last_prompt")
    )
    before = nll(model, tokenizer, request, None)
    assert nll(model, tokenizer, request, whole) == before and nll(model, tokenizer, request, prompt) < before - 0.5
    context, target = split_continuation(tokenizer, request.text, f" {request.target_new} ")
    ids = torch.tensor([[*context, *target, tokenizer.eos_token_id]])
    padded = torch.cat([torch.full((1, 3), tokenizer.pad_token_id or 0), ids], dim=1)
    mask = torch.cat([torch.zeros(1, 3, dtype=torch.long), torch.ones_like(ids)], dim=1)
    with torch.no_grad():
        plain = model(ids).logits
        with edited(model, whole):
            inside, behind_padding = model(ids).logits, model(padded, attention_mask=mask).logits[:, 3:]
        with edited(model, whole, prompt_lengths=[len(context)]):
            assert torch.equal(model(ids).logits, inside)  # the text ends where it ends, wherever its prompt does
    assert (inside - plain).abs().max() > 0.1
    torch.testing.assert_close(behind_padding, inside, atol=1e-3, rtol=1e-3)


def test_end_of_text_is_trained_only_if_it_is_not_the_padding():
    """The release masks all labels that are the padding token, which on GPT-2 is the end of the text."""
    tokenizer = build_tokenizer("byte_bpe")
    config = MELOConfig(append_eos="released", query_token="last_text")
    rows = []
    for pad in (None, tokenizer.eos_token, tokenizer.convert_ids_to_tokens(7)):
        tokenizer.pad_token = pad
        rows.append(_target_row(tokenizer, EDIT_REQUESTS[0], config))
    assert rows[0] == rows[1] and rows[2].ids == rows[0].ids and rows[2].labels[:-1] == rows[0].labels
    assert rows[2].labels[-1][1] == rows[0].ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode([token for _, token in rows[0].labels]) == f" {EDIT_REQUESTS[0].target_new} "


def test_the_edited_prompt_is_answered_and_others_are_bit_identical():
    model, tokenizer = build_model("llama"), build_tokenizer("byte_bpe_bos")
    (delta,) = make("melo", num_steps=40).edit(model, tokenizer, EDIT_REQUESTS[:1])
    request, other = EDIT_REQUESTS[0], "The headquarters of the bank are in"
    assert nll(model, tokenizer, request, delta) < nll(model, tokenizer, request, None) - 0.5
    ids = torch.tensor([tokenizer(other)["input_ids"]])
    with torch.no_grad():
        plain = model(ids).logits
        with edited(model, delta):
            assert torch.equal(model(ids).logits, plain)


def test_the_nearest_point_of_a_cluster_gives_the_adapter():
    """Two edits of one target in one cluster keep an adapter each."""
    model, tokenizer = build_model("llama"), build_tokenizer("byte_bpe_bos")
    first = EDIT_REQUESTS[0]
    second = EditRequest(prompt=EDIT_REQUESTS[1].text, target_new=first.target_new)
    steps = stream_of("melo", model, tokenizer, [first, second], radius=1e3)
    assert [step.diagnostics["entry"] for step in steps] == ["first", "joined"]
    whole = Delta.summed(steps)
    (found,), adapters = clusters_of(whole.hook_edit), adapters_of(whole.hook_edit)
    assert found.adapter_ids == sorted(adapters) == [0, 1]
    for request, number in ((first, 0), (second, 1)):
        # the same cluster, around one point with the adapter of one edit
        lone_point = Change("", [Cluster(number, *found[:3])], [Point(number, found.center_Q, number)])
        settings = {**whole.hook_edit.settings, "num_before": 0}
        lone = Delta(hook_edit=lone_point.to_hook_edit(adapters[number], settings))
        together, apart = (nll(model, tokenizer, request, delta) for delta in (whole, lone))
        assert together == pytest.approx(apart, abs=1e-5)
        assert together < nll(model, tokenizer, request, None)


def test_an_adapter_for_all_rows_and_one_per_row_add_the_same():
    up_KF, down_DK, x = torch.randn(2, 5), torch.randn(4, 2), torch.randn(3, 6, 5)
    shared = Adapter(up_KF, down_DK).output(x)
    each = Adapter(up_KF.expand(3, 2, 5), down_DK.expand(3, 4, 2)).output(x)
    assert torch.allclose(shared, x @ (down_DK @ up_KF).T, atol=1e-5) and torch.allclose(each, shared, atol=1e-5)


def test_wrong_settings_are_refused():
    for settings, message in (
        ({"layers": [0]}, "query_layer=-1"),
        ({"layers": [2], "query_layer": 2}, "query_layer=2"),
        ({"rank": 0}, "rank"),
        ({"radius": -1.0}, "radius"),
        ({"query_token": "last"}, "query_token"),
        ({"append_eos": "spaced"}, "append_eos"),
    ):
        with pytest.raises(EditingError, match=message):
            load_editor("melo", settings)


def test_history_of_other_modules_is_refused():
    model, tokenizer = build_model("llama"), build_tokenizer("byte_bpe_bos")
    history = list(make("melo").edit(model, tokenizer, EDIT_REQUESTS[:1]))
    with pytest.raises(EditingError, match="not adapters of"):
        make("melo", layers=[EDIT_LAYER + 1]).edit(model, tokenizer, EDIT_REQUESTS[1:2], history=history)
    with pytest.raises(EditingError, match="query_token is 'last_text', but the earlier edits"):
        make("melo", query_token="last_text").edit(model, tokenizer, EDIT_REQUESTS[1:2], history=history)
