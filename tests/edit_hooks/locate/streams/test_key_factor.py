"""The factor of carried keys: the system it stands for, whatever the blocks, and the switch from keys to factor."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layered_edits import random_keys
from pretended_device import DEVICE, Remote, pretended_device

from edit_hooks import Delta, EditingError
from edit_hooks.locate.moments.null_space import MatrixProjector, null_space
from edit_hooks.locate.moments.solve import SecondMoment, ridge_keys
from edit_hooks.locate.streams import key_factor
from edit_hooks.locate.streams.carried_keys import CarriedKeys, KeySystem, key_name
from edit_hooks.locate.streams.key_factor import KeyFactor
from edit_hooks.modeling import memory

WIDTH = 24


def metrics():
    spread = random_keys(60, WIDTH, 7) * torch.logspace(-2, 0, WIDTH, dtype=torch.float64)
    moment = spread.T @ spread / len(spread)
    values, vectors = torch.linalg.eigh(moment)
    projector = null_space(values, vectors, float(values[WIDTH // 2]))
    dense = projector.metric_product(torch.eye(WIDTH, dtype=torch.float64))
    return {
        "moment": SecondMoment(moment),
        "identity": SecondMoment(None),
        "null space": projector,
        "matrix": MatrixProjector(dense.float()),
    }


def steps_of(keys, sizes):
    return [Delta(stream_state={key_name(3): part.T}) for part in keys.split(sizes)]


def relative(ours, theirs):
    return float((ours - theirs).norm() / theirs.norm())


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6), block=st.sampled_from([1, 5, 16, 128]))
def test_the_factor_is_that_of_the_system(sizes, block):
    keys = random_keys(sum(sizes), WIDTH, sum(sizes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_factor, "BLOCK", block)
        factor = KeyFactor.start(SecondMoment(None), 0.3, WIDTH)
        for part in keys.split(sizes):
            factor = factor.add(part)
    system = 0.3 * torch.eye(WIDTH, dtype=torch.float64) + keys.T @ keys
    assert torch.equal(factor.factor_FF, factor.factor_FF.triu())
    assert relative(factor.factor_FF.T @ factor.factor_FF, system) < 1e-13
    assert relative(factor.products(keys), torch.linalg.solve(system, keys.T).T) < 1e-10
    without = factor.remove(keys[: sizes[0]]).add(keys[: sizes[0]])
    assert relative(without.factor_FF.T @ without.factor_FF, system) < 1e-12


@pytest.mark.parametrize("name", metrics())
@pytest.mark.parametrize("ridge", [0.4, 0.9])
def test_keys_and_factor_give_the_same_updates(name, ridge):
    """Switched at any step; independent groups of new keys share the past; another ridge than before, too."""
    metric, keys, new = metrics()[name], random_keys(30, WIDTH, 1), random_keys(5, WIDTH, 2)
    all_keys = torch.cat([keys, new[:2]])
    expected = ridge_keys(all_keys, metric.metric_product(all_keys), ridge)[len(keys) :]
    for sizes in ([30], [4] * 7 + [2], [11, 1, 18]):
        past = CarriedKeys.after(steps_of(keys, sizes), 3, WIDTH, metric, lambda keys_UF: 0.4)
        assert past.factor is not None and past.keys_FP.shape == (WIDTH, 0)
        system = KeySystem(metric, past, new)
        assert relative(system.right_factors([0, 1], ridge), expected) < (1e-6 if name == "matrix" else 1e-9)
        alone = torch.cat([keys, new[4:]])
        expected_alone = ridge_keys(alone, metric.metric_product(alone), ridge)[len(keys) :]
        assert relative(system.right_factors([4], ridge), expected_alone) < (1e-6 if name == "matrix" else 1e-9)


def test_the_state_has_a_constant_size_and_goes_on_where_it_was():
    metric, keys = metrics()["moment"], random_keys(200, WIDTH, 3)
    steps = steps_of(keys, [2] * 100)
    carried, sizes = [], []
    for step in steps:
        past = CarriedKeys.after([*carried, step], 3, WIDTH, metric, lambda keys_UF: 0.4)
        carried = [Delta(stream_state=past.state(3))]
        sizes.append(carried[0].num_bytes)
    assert len(set(sizes[7:])) == 1 and max(sizes) == 8 * (WIDTH**2 + 1)
    at_once = CarriedKeys.after(steps, 3, WIDTH, metric, lambda keys_UF: 0.4)
    assert torch.equal(past.factor.factor_FF, at_once.factor.factor_FF)


def test_up_to_half_the_width_keys_stay_as_they_are():
    metric = metrics()["moment"]
    half, more = (steps_of(random_keys(n, WIDTH, 4), [1] * n) for n in (WIDTH // 2, WIDTH // 2 + 1))
    kept = CarriedKeys.after(half, 3, WIDTH, metric, lambda keys_UF: 0.4)
    assert kept.factor is None and torch.equal(kept.keys_FP.T, random_keys(WIDTH // 2, WIDTH, 4))
    assert CarriedKeys.after(more, 3, WIDTH, metric, lambda keys_UF: 0.4).factor is not None


def test_systems_without_a_factor_keep_their_keys():
    no_projector = MatrixProjector(torch.diag(torch.linspace(0, 1, WIDTH)))
    steps = steps_of(random_keys(40, WIDTH, 5), [40])
    for metric, ridge in ((no_projector, 0.4), (SecondMoment(None), 0.0)):
        past = CarriedKeys.after(steps, 3, WIDTH, metric, lambda keys_UF, ridge=ridge: ridge)
        assert past.factor is None and past.keys_FP.shape == (WIDTH, 40)


def test_keys_that_were_never_added_cannot_be_removed():
    factor = KeyFactor.start(SecondMoment(None), 0.1, WIDTH).add(random_keys(2, WIDTH))
    with pytest.raises(EditingError, match="never added"):
        factor.remove(random_keys(2, WIDTH, 9))


@pytest.mark.parametrize("free", [0, 10**9], ids=["full", "free"])
def test_a_factor_lives_on_the_device_of_its_keys_where_it_fits(free, monkeypatch):
    """The numbers are those of the CPU, where a copy stays: the state of the stream is stored from there."""
    monkeypatch.setattr(memory, "free_cuda_bytes", lambda device: free)
    keys = random_keys(12, WIDTH, 6)
    decomposed = []
    updated = key_factor._updated
    monkeypatch.setattr(key_factor, "_updated", lambda *args: decomposed.append(args[0].device) or updated(*args))

    def states(move):
        first = KeyFactor.start(SecondMoment(None), 0.3, WIDTH).add(move(keys[:5]))
        second = first.add(move(keys[5:])).remove(move(keys[:2])).with_ridge(SecondMoment(None), 0.7)
        return second, second.products(move(keys)), first

    expected = states(torch.clone)
    with pretended_device():
        factor, products, first = states(Remote)
        assert products.device == DEVICE and factor.factor_FF.device.type == "cpu"
        copies = [one.device for one in key_factor._copies.values()]
        assert copies == ([DEVICE] if free else []), "of the last step, not of the first one, which a history may keep"
        assert decomposed[2:] == [DEVICE if free else torch.device("cpu")] * 2
        assert relative(factor.factor_FF, expected[0].factor_FF) < 1e-13
        assert relative(products.cpu(), expected[1]) < 1e-13
    del factor, first
    assert not len(key_factor._copies), "it goes with the stream"
