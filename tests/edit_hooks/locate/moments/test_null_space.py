"""Null-space projectors: their rank, their files, and projectors that keep nearly everything or nothing."""

from __future__ import annotations

import logging

import pytest
import torch

from edit_hooks import EditingError, EditRequest, load_editor
from edit_hooks.contract.tiny_models import EDIT_LAYER, SENTENCES, build_model, build_tokenizer
from edit_hooks.locate.moments.null_space import MatrixProjector, null_space, null_space_of
from edit_hooks.locate.moments.second_moments import MomentSettings, second_moments
from edit_hooks.locate.moments.solve import SecondMoment

REQUEST = EditRequest(prompt="{} is located in", subject="Port Amelin", target_new="Rome")
SETTINGS = {
    "layers": [EDIT_LAYER],
    "num_steps": 3,
    "context_templates": ["{}"],
    "second_moments": list(SENTENCES),
}


@pytest.fixture(scope="module")
def tiny():
    return build_model("llama"), build_tokenizer("byte_bpe_bos")


def orthonormal(width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64))[0]


def test_projectors_are_stored_beside_the_matrix(tiny, tmp_path, monkeypatch):
    model, tokenizer = tiny
    moment = second_moments(model, tokenizer, [1], MomentSettings("self"), folder=tmp_path, quiet=True)[1]
    first = null_space_of(moment, None, 0.3)
    calls = []
    eigh = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: calls.append(1) or eigh(matrix))
    again = null_space_of(moment, None, 0.3)
    assert not calls and torch.equal(first.basis_FR, again.basis_FR)
    assert (first.is_complement, first.threshold, first.trace) == (again.is_complement, again.threshold, again.trace)
    null_space_of(moment, 0.5)
    assert len(calls) == 1  # another threshold is another projector


def test_the_energy_bounds_the_null_space():
    basis = orthonormal(30)
    values = torch.logspace(-4, 1, 30, dtype=torch.float64)
    moment = SecondMoment(basis @ torch.diag(values) @ basis.T)
    for energy in (0.01, 0.1, 0.5):
        rank = null_space_of(moment, None, energy).rank
        assert values[:rank].sum() <= energy * values.sum() < values[: rank + 1].sum()


@pytest.mark.parametrize("rank", [3, 9])
def test_both_bases_give_the_projection(rank):
    """Few and many directions: the basis of the null space and that of its complement, against the dense matrix."""
    vectors = orthonormal(12)
    projector = null_space(torch.arange(12.0, dtype=torch.float64), vectors, threshold=rank - 0.5)
    assert (projector.rank, projector.is_complement, projector.share) == (rank, rank > 6, rank / 12)
    dense = vectors[:, :rank] @ vectors[:, :rank].T
    keys = torch.randn(4, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(projector.metric_product(keys), keys @ dense)
    torch.testing.assert_close(MatrixProjector(dense).metric_product(keys), keys @ dense)


def test_a_matrix_that_is_no_projector_has_a_warning():
    assert MatrixProjector(torch.diag(torch.tensor([1.0, 1.0, 0.0, 0.0]))).warnings == []
    (warning,) = MatrixProjector(torch.diag(torch.tensor([1.0, 0.5, 0.0, 0.0]))).warnings
    assert "no projector" in warning


def test_projectors_that_keep_nothing_or_everything_are_reported(tiny, caplog):
    model, tokenizer = tiny
    with pytest.raises(EditingError, match="nothing can be written"):
        load_editor("alphaedit", {**SETTINGS, "nullspace_threshold": 1e-12}).edit(model, tokenizer, [REQUEST])
    with caplog.at_level(logging.WARNING):
        load_editor("alphaedit", {**SETTINGS, "nullspace_threshold": 1e6}).edit(model, tokenizer, [REQUEST])
    assert "protects almost nothing" in caplog.text
    with pytest.raises(EditingError, match="null space of real keys"):
        load_editor("alphaedit", {"second_moments": None})
