"""Solves on a GPU, here a pretended one: factorized once, and read where the keys are while there is room."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layered_edits import random_keys
from pretended_device import DEVICE, Remote, pretended_device
from torch import nn

from edit_hooks.gradient.curvature.kfac import CurvatureProjection, KFACFactors
from edit_hooks.locate.moments.null_space import MatrixProjector, null_space_of
from edit_hooks.locate.moments.solve import SecondMoment
from edit_hooks.modeling import memory

WIDTH = 12
CPU = torch.device("cpu")


def moment() -> SecondMoment:
    basis = random_keys(60, WIDTH, seed=1)
    return SecondMoment((basis.T @ basis / 60).float())


METRICS: dict[str, Callable[[], Any]] = {
    "float64": lambda: moment().metric_product,
    "float32": lambda: functools.partial(moment().solve, precision="float32"),
    "null space": lambda: null_space_of(moment(), None, 0.3).metric_product,
    "projector": lambda: MatrixProjector(torch.eye(WIDTH) / 2).metric_product,
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[torch.device]]:
    """The devices of factorizations, and of matrices that are copied."""
    seen: dict[str, list[torch.device]] = {}
    for name in ("cholesky_ex", "inv_ex", "eigh"):
        compute = getattr(torch.linalg, name)

        def counted(matrix: torch.Tensor, compute: Any = compute, name: str = name) -> Any:
            seen.setdefault(name, []).append(matrix.device)
            return compute(matrix)

        monkeypatch.setattr(torch.linalg, name, counted)
    return seen


@pytest.mark.parametrize("has_room", [True, False])
@pytest.mark.parametrize("metric", METRICS)
def test_matrices_stay_on_the_device_of_the_keys(metric: str, has_room: bool, calls, monkeypatch) -> None:
    """The same products as on the CPU, for keys of one device after another."""
    monkeypatch.setattr(memory, "free_cuda_bytes", lambda device: 10**9 * has_room)
    monkeypatch.setattr("edit_hooks.locate.moments.solve.has_room", lambda device, num_bytes: has_room)
    keys_EF = random_keys(3, WIDTH, seed=2).float()
    expected = METRICS[metric]()(keys_EF)
    calls.clear()
    with pretended_device():
        product = METRICS[metric]()
        found = [product(Remote(keys_EF)) for _ in range(3)]
        assert all(one.device == DEVICE for one in found)
        for one in found:
            torch.testing.assert_close(one.cpu(), expected, rtol=1e-5, atol=1e-6)
        back = product(keys_EF)
    torch.testing.assert_close(back, expected, rtol=1e-5, atol=1e-6)
    if metric == "float64":
        assert calls["cholesky_ex"] == [DEVICE if has_room else CPU], "once, on the device of the first keys if it fits"
    if metric == "float32":
        assert calls["inv_ex"] == ([DEVICE] if has_room else [DEVICE] * 3) + [CPU]


def test_a_copy_is_made_once_while_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"bytes": 8 * 4 * WIDTH**2}
    monkeypatch.setattr(memory, "free_cuda_bytes", lambda device: free["bytes"])
    placed = memory.PlacedMatrix(torch.eye(WIDTH))
    with pretended_device():
        keys = Remote(torch.ones(WIDTH))
        first = placed.like(keys)
        assert placed.like(keys) is first and first.device == DEVICE
        wider = placed.like(keys.double())
        assert placed.like(keys.double()) is not wider, "as float64 it has no room"
        free["bytes"] -= 1
        assert placed.like(keys) is not placed.like(keys)
    assert placed.like(torch.ones(1)) is placed.matrix


@pytest.mark.parametrize(("copies", "place"), [(5, DEVICE), (4, CPU)])
def test_eigenbases_of_the_curvature_are_computed_where_they_fit(
    copies: int, place: torch.device, calls, monkeypatch
) -> None:
    width_in, width_out = 6, 4
    inputs, gradients = random_keys(20, width_in, seed=3), random_keys(20, width_out, seed=4)
    factors = KFACFactors(inputs.T @ inputs, gradients.T @ gradients, 20)
    linear = nn.Linear(width_in, width_out, bias=False)
    update = torch.randn(width_out, width_in, generator=torch.Generator().manual_seed(0))
    expected = CurvatureProjection(factors, 0.8, linear)(update)
    calls.clear()
    monkeypatch.setattr(memory, "free_cuda_bytes", lambda device: 8 * copies * width_in**2 + 1)
    with pretended_device():
        linear.weight = nn.Parameter(Remote(linear.weight.detach()))
        project = CurvatureProjection(factors, 0.8, linear)
        assert calls["eigh"] == [place, DEVICE], "the smaller one fits in both cases"
        assert project.basis_FF.device == CPU
        torch.testing.assert_close(project(Remote(update)).cpu(), expected)
