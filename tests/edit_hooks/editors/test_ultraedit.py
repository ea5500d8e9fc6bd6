"""UltraEdit against explicit sums in float64, its statistics, and its streams."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tiny_architectures import ARCHITECTURES

from edit_hooks import Delta, EditingError, EditRequest, edited, load_editor
from edit_hooks.contract.tiny_models import ALL_MODEL_TYPES, NATURAL_TOKENIZER, REQUESTS, build_model, build_tokenizer
from edit_hooks.deltas.apply import AppliedDeltas
from edit_hooks.gradient.labeled_rows import batch_rows, target_row
from edit_hooks.gradient.token_factors import token_factors
from edit_hooks.lm.editing.joint import write_together
from edit_hooks.modeling.architectures import is_transposed
from edit_hooks.modeling.tokens import split_continuation

EDITS = [EditRequest(**record) for record in REQUESTS]
TEXTS = ["The mother tongue of Elena is Serbian.", "He speaks English, French and Italian."]
CONFIG = {"layers": [1], "lr": 3e-3, "start": "calibrated", "calibration": TEXTS}
UPDATE_BOUND = 1e-8
FLOAT32_BOUND = 1e-5
FLOAT32_ATTENTION = {"gptj", "gemma2"}  # the softmax is float32 under every dtype of the weights


def wide(model_type: str):
    return build_model(model_type, dtype=torch.float64), build_tokenizer(NATURAL_TOKENIZER[model_type])


def by_hand(model, name: str, ids: list[int], labels: list[tuple[int, int]], positions: list[int]):
    """Inputs of a map and gradients of the summed loss at its output, from a forward hook and ``retain_grad``."""
    kept = {}

    def hook(_module, args, output):
        kept["h"], kept["y"] = args[0], output
        output.retain_grad()

    handle = model.get_submodule(name).register_forward_hook(hook)
    try:
        with torch.enable_grad():
            log_p = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            (-sum(log_p[position, token] for position, token in labels)).backward()
    finally:
        handle.remove()
        model.zero_grad(set_to_none=True)
    return kept["h"][0, positions].detach(), kept["y"].grad[0, positions].detach()


def request_features(model, tokenizer, name: str, request: EditRequest, tokens: str = "target"):
    context, target = split_continuation(tokenizer, request.text, " " + request.target_new)
    ids = context + target[:-1]
    labels = [(len(context) - 1 + i, token) for i, token in enumerate(target)]
    positions = list(range(len(ids))) if tokens == "all" else [position for position, _ in labels]
    return by_hand(model, name, ids, labels, positions)


def text_features(model, tokenizer, name: str, text: str):
    ids = tokenizer(text)["input_ids"]
    return by_hand(model, name, ids[:-1], list(enumerate(ids[1:])), list(range(len(ids) - 1)))


def expected_update(new, seen, lr: float, ridge: float, std=None) -> torch.Tensor:
    """W' - W [d, f] of the paper's form, with an f x f system, from plain means and standard deviations."""
    inputs_TF, gradients_TD = (torch.cat(part) for part in zip(*new, strict=True))
    everything = torch.cat([torch.cat(pair, 1) for pair in [*seen, *new]])
    std = everything.std(0) if std is None else std
    hat = (torch.cat([inputs_TF, gradients_TD], 1) - everything.mean(0)) / std
    width = inputs_TF.shape[1]
    values_TD = -lr * hat[:, :width].norm(dim=1, keepdim=True) ** 2 * hat[:, width:]
    system_FF = inputs_TF.T @ inputs_TF + ridge * torch.eye(width, dtype=torch.float64)
    return torch.linalg.solve(system_FF, inputs_TF.T @ values_TD).T


def stored(model, name: str, update: torch.Tensor) -> torch.Tensor:
    return update.T if is_transposed(model.get_submodule(name)) else update


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.double() - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("model_type", ALL_MODEL_TYPES)
def test_single_and_joint_updates_match_the_equations(model_type):
    model, tokenizer = wide(model_type)
    name = ARCHITECTURES[model_type].rewrite_name(1)
    bound = FLOAT32_BOUND if model_type in FLOAT32_ATTENTION else UPDATE_BOUND
    editor = load_editor("ultraedit", CONFIG)
    seen = [text_features(model, tokenizer, name, text) for text in TEXTS]
    new = [request_features(model, tokenizer, name, request) for request in EDITS]
    singles = editor.edit(model, tokenizer, EDITS)
    for delta, own in zip(singles, new, strict=True):
        wanted = stored(model, name, expected_update([own], seen, 3e-3, 1.0))
        assert relative(delta.weights()[f"{name}.weight"], wanted) < bound
    (joint,) = editor.edit(model, tokenizer, EDITS, joint=True)
    wanted = stored(model, name, expected_update(new, seen, 3e-3, 1.0))
    assert relative(joint.weights()[f"{name}.weight"], wanted) < bound
    assert joint.diagnostics["num_tokens"] == sum(len(h) for h, _ in new)


def test_all_tokens_the_mean_loss_and_an_empty_start():
    """The rules of the other public versions; with more tokens than the matrix has rows the update is dense."""
    model, tokenizer = wide("llama")
    name = ARCHITECTURES["llama"].rewrite_name(1)
    features = [request_features(model, tokenizer, name, request, "all") for request in EDITS]
    counts = [len(request_features(model, tokenizer, name, request)[0]) for request in EDITS]
    longest_first = sorted(range(len(EDITS)), key=lambda i: -len(features[i][0]))
    assert longest_first != list(range(len(EDITS)))  # so that the order shows
    new = []
    for batch in (longest_first[:2], longest_first[2:]):
        labels = sum(counts[i] for i in batch)
        new += [(features[i][0], features[i][1] / labels) for i in batch]
    settings = {**CONFIG, "calibration": [], "tokens": "all", "micro_batch_size": 2, "ridge": 0.5}
    (delta,) = load_editor("ultraedit", {**settings, "variance": "pooled"}).edit(model, tokenizer, EDITS, joint=True)
    assert not delta.factors
    assert relative(delta.weights()[f"{name}.weight"], expected_update(new, [], 3e-3, 0.5)) < UPDATE_BOUND
    # Released: every micro-batch of T tokens adds T / (T - 1) times its squared deviations.
    first, second = (torch.cat([torch.cat(pair, 1) for pair in new[i : i + 2]]) for i in (0, 2))
    n, m = len(first), len(second)
    squares = n * first.var(0) + m * second.var(0) + (first.mean(0) - second.mean(0)) ** 2 * n * m / (n + m)
    std = (squares / (n + m - 1)).sqrt()
    (delta,) = load_editor("ultraedit", settings).edit(model, tokenizer, EDITS, joint=True)
    assert relative(delta.weights()[f"{name}.weight"], expected_update(new, [], 3e-3, 0.5, std)) < UPDATE_BOUND


def test_only_edits_made_alone_are_calibrated_by_default():
    model, tokenizer = wide("gpt2")

    def update(joint: bool, **settings):
        editor = load_editor("ultraedit", {"layers": [1], "lr": 3e-3, "calibration": TEXTS, **settings})
        (delta,) = editor.edit(model, tokenizer, EDITS[2:3], joint=joint)
        # Beside its update an edit made alone leaves other statistics, see below.
        return delta.diagnostics["start"], dataclasses.replace(delta, stream_state={}).checksum()

    assert update(False) == update(False, start="calibrated") == update(True, start="calibrated")
    assert update(True) == update(True, start="empty") == update(False, start="empty")
    assert update(False)[0] == "calibrated" and update(True)[0] == "empty"
    assert update(False)[1] != update(True)[1]


def test_a_stream_of_edits_made_alone_is_the_released_one_from_its_second_step_on():
    """Through the public API, without ``joint``: the calibration of the first step does not enter the statistics."""
    model, tokenizer = wide("llama")
    name = ARCHITECTURES["llama"].rewrite_name(1)
    settings = {"layers": [1], "lr": 3e-3, "calibration": TEXTS}
    editor = load_editor("ultraedit", settings)
    history: list[Delta] = []
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    with AppliedDeltas(model) as applied:
        for request in EDITS[:3]:
            inputs_TF, gradients_TD = request_features(model, tokenizer, name, request)
            new = (inputs_TF, gradients_TD / len(inputs_TF))  # of the mean loss
            (delta,) = editor.edit(model, tokenizer, [request], history=history)
            seen.append(new)
            steps = [torch.cat(pair, 1) for pair in seen]
            everything = torch.cat(steps)
            # Released: a step of T tokens adds T / (T - 1) times its squared deviations.
            squares = sum(len(x) * x.var(0) + len(x) * (x.mean(0) - everything.mean(0)) ** 2 for x in steps)
            shape = "64x32"
            assert int(delta.stream_state[f"ultraedit/count/{shape}"]) == len(everything)
            torch.testing.assert_close(delta.stream_state[f"ultraedit/squares/{shape}"], squares)
            if history:
                std = (squares / (len(everything) - 1)).sqrt()
                wanted = expected_update([new], seen[:-1], 3e-3, 1.0, std)
                assert relative(delta.weights()[f"{name}.weight"], wanted) < UPDATE_BOUND
            history.append(delta)
            applied.add(delta)
    assert [delta.diagnostics["start"] for delta in history] == ["calibrated", "empty", "empty"]
    (alone,) = load_editor("ultraedit", {**settings, "start": "calibrated"}).edit(model, tokenizer, EDITS[:1])
    assert torch.equal(alone.weights()[f"{name}.weight"], history[0].weights()[f"{name}.weight"])


def test_a_stream_may_begin_with_a_target_of_one_token():
    """The runner writes every step jointly; one token gives no variance, so this step is one made alone."""
    model, tokenizer = wide("gpt2")
    name = ARCHITECTURES["gpt2"].rewrite_name(1)
    editor = load_editor("ultraedit", {"layers": [1], "lr": 3e-3, "calibration": TEXTS})
    one_token = EditRequest(prompt="The", target_new="a")
    first = write_together(editor, model, tokenizer, [one_token])
    (alone,) = editor.edit(model, tokenizer, [one_token])
    assert first.diagnostics["start"] == "calibrated" and first.checksum() == alone.checksum()
    seen = request_features(model, tokenizer, name, one_token)
    counts = [int(value) for key, value in first.stream_state.items() if "/count/" in key]
    assert len(seen[0]) == 1 and counts == [1]
    with edited(model, first):
        second = write_together(editor, model, tokenizer, EDITS[:1], [first])
        new = request_features(model, tokenizer, name, EDITS[0])
    # Released: the mean loss, T / (T - 1) times the squared deviations of T tokens, none of a single one.
    new = (new[0], new[1] / len(new[0]))
    x, y = (torch.cat(pair, 1) for pair in (seen, new))
    everything = torch.cat([x, y])
    shifts = sum(len(part) * (part.mean(0) - everything.mean(0)) ** 2 for part in (x, y))
    std = ((len(y) * y.var(0) + shifts) / (len(everything) - 1)).sqrt()
    wanted = stored(model, name, expected_update([new], [seen], 3e-3, 1.0, std))
    assert relative(second.weights()[f"{name}.weight"], wanted) < UPDATE_BOUND
    assert second.diagnostics["start"] == "empty"
    with pytest.raises(EditingError, match="seen a single one"):
        write_together(load_editor("ultraedit", {**CONFIG, "start": "empty"}), model, tokenizer, [one_token])


@pytest.mark.parametrize("start", ["empty", "calibrated"])
@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_without_lr_the_update_is_relative_to_the_weights(model_type, start):
    model, tokenizer = wide(model_type)
    settings = {"layers": [1, 2], "start": start, "calibration": TEXTS}

    def ratio(delta) -> float:
        updates = delta.weights()
        weights = sum(float(model.get_parameter(name).detach().norm()) ** 2 for name in updates)
        return (sum(float(update.norm()) ** 2 for update in updates.values()) / weights) ** 0.5

    (joint,) = load_editor("ultraedit", {**settings, "relative_update": 0.02}).edit(model, tokenizer, EDITS, joint=True)
    assert ratio(joint) == pytest.approx(0.02 * len(EDITS) ** 0.5)
    (same,) = load_editor("ultraedit", {**settings, "lr": 1.0}).edit(model, tokenizer, EDITS, joint=True)
    shrunk = {name: update * ratio(joint) / ratio(same) for name, update in same.weights().items()}
    assert all(relative(joint.weights()[name], update) < 1e-9 for name, update in shrunk.items())


def test_factors_at_all_positions_add_up_to_the_gradient_of_the_weight():
    """dW = sum over rows and tokens of g h^T: an oracle without hooks; padded positions add nothing."""
    model, tokenizer = wide("gemma3_text")
    name = ARCHITECTURES["gemma3_text"].rewrite_name(1)
    loss, requests = 0.0, EDITS[1:3]
    for request in requests:
        context, target = split_continuation(tokenizer, request.text, " " + request.target_new)
        log_p = model(torch.tensor([context + target])).logits[0].log_softmax(-1)
        loss -= sum(log_p[len(context) - 1 + i, token] for i, token in enumerate(target)) / 3
    (gradient,) = torch.autograd.grad(loss, model.get_submodule(name).weight)
    rows = batch_rows(model, [target_row(tokenizer, request.text, request.continuation) for request in requests])
    assert not rows.mask_RT.all()
    factors, nll_L = token_factors(model, rows, 3, [name])
    inputs_RTF, gradients_RTD = factors[name]
    assert relative(torch.einsum("rtd,rtf->df", gradients_RTD, inputs_RTF), gradient) < 1e-10
    assert float(nll_L.sum()) / 3 == pytest.approx(float(loss.detach()))


def test_a_stream_carries_the_statistics(tmp_path):
    """Step two normalizes by everything seen; the second step's own features are read with the first in place."""
    model, tokenizer = wide("llama")
    name = ARCHITECTURES["llama"].rewrite_name(1)
    editor = load_editor("ultraedit", CONFIG)
    seen = [text_features(model, tokenizer, name, text) for text in TEXTS]
    seen += [request_features(model, tokenizer, name, request) for request in EDITS[:2]]
    (first,) = editor.edit(model, tokenizer, EDITS[:2], joint=True)
    first.save(tmp_path / "first.safetensors")
    first = Delta.load(tmp_path / "first.safetensors")
    with edited(model, first):
        new = [request_features(model, tokenizer, name, request) for request in EDITS[2:]]
        (second,) = editor.edit(model, tokenizer, EDITS[2:], joint=True, history=[first])
    assert relative(second.weights()[f"{name}.weight"], expected_update(new, seen, 3e-3, 1.0)) < UPDATE_BOUND
    with pytest.raises(EditingError, match="one editor throughout"):
        editor.edit(model, tokenizer, EDITS[:1], history=[Delta()])


def test_roles_resolve_to_the_published_modules():
    model, tokenizer = wide("llama")
    settings = {**CONFIG, "layers": None, "modules": {"gate": [0], "up": [0, 2]}}
    (delta,) = load_editor("ultraedit", settings).edit(model, tokenizer, EDITS[:1])
    gate, *ups = names = ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj", "model.layers.2.mlp.up_proj"]
    assert list(delta.factors) == names
    # Maps of one shape share their statistics.
    seen = [text_features(model, tokenizer, name, text) for name in names for text in TEXTS]
    new = {name: request_features(model, tokenizer, name, EDITS[0]) for name in names}
    others = [new[name] for name in ups]
    wanted = expected_update([new[gate]], [*seen, *others], 3e-3, 1.0)
    assert relative(delta.weights()[f"{gate}.weight"], wanted) < UPDATE_BOUND
    with edited(model, delta):
        pass  # shapes and names fit


def test_wrong_settings_are_refused():
    model, tokenizer = wide("gpt2")
    with pytest.raises(EditingError, match="Did you mean 'gate'"):
        load_editor("ultraedit", {"modules": {"gates": [1]}})
    with pytest.raises(EditingError, match="set one of them"):
        load_editor("ultraedit", {"modules": {"up": [1]}, "layers": [2]})
    with pytest.raises(EditingError, match="'modules' names 2 more than once"):
        load_editor("ultraedit", {"modules": {"up": [2, 2]}})
    with pytest.raises(EditingError, match="no separate map"):
        load_editor("ultraedit", {"modules": {"gate": [1]}}).edit(model, tokenizer, EDITS[:1])
    one_token = EditRequest(prompt="The", target_new="a")
    assert len(split_continuation(tokenizer, "The", " a")[1]) == 1
    with pytest.raises(EditingError, match="seen a single one"):
        load_editor("ultraedit", {**CONFIG, "calibration": []}).edit(model, tokenizer, [one_token])
