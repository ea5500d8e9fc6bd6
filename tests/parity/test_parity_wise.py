"""WISE against EasyEdit's numbers: losses, thresholds and side weights of two edits on the same memory.

The release pads on the left without position ids and counts the pads in its distances. That is no part of our editor,
so its batches, as they were fed, go to the training loop directly; everything else (masking, margins, steps, the
running threshold) is ours.
"""

from __future__ import annotations

import numpy
import pytest
import torch
from golden_data import GOLDEN_MODELS, golden_case
from parity import relative_error

from edit_hooks.editors.wise import WISEConfig, train
from edit_hooks.gradient.labeled_rows import LabeledRows


def fed_rows(fed: dict) -> LabeledRows:
    """The release's batch: padded on the left, the target's tokens last, and the unrelated text in the last row."""
    ids_RT = torch.tensor(fed["input_ids"])
    rows, width = ids_RT.shape
    mask_RT = torch.ones_like(ids_RT)
    for row, count in enumerate(fed["num_pads"]):
        mask_RT[row, :count] = 0
    labels = [
        (row, column - 1, int(ids_RT[row, column]))
        for row in range(rows - 1)
        for column in range(width - fed["num_labels"][row], width)
    ]
    row_L, column_L, token_L = (torch.tensor(part) for part in zip(*labels, strict=True))
    return LabeledRows(ids_RT, mask_RT, row_L, column_L, token_L)


@pytest.mark.parametrize("model_name", GOLDEN_MODELS)
def test_two_edits_give_the_side_weights_of_the_release(model_name, golden_model):
    model, _ = golden_model(model_name)
    case, tensors = golden_case("wise", model_name, "seq01")
    settings = case["hparams"]
    assert settings["hidden_act"] == (getattr(model.config, "hidden_act", None) or model.config.activation_function)
    bits = numpy.unpackbits(tensors["mask"].numpy(), count=case["shape"][0] * case["shape"][1])
    mask = torch.from_numpy(bits).bool().view(case["shape"])
    config = WISEConfig(
        layers=[2],
        num_steps=settings["n_iter"],
        lr=settings["edit_lr"],
        alpha=settings["alpha"],
        beta=settings["beta"],
        gamma=settings["gamma"],
        norm_constraint=settings["norm_constraint"],
    )
    name = settings["inner_params"][0].replace("[", ".").replace("]", "").removesuffix(".weight")
    change, distances = torch.zeros(case["shape"]), []
    for number, (fed, losses) in enumerate(zip(case["fed"], case["losses"], strict=True), start=1):
        rows = fed_rows(fed)
        result = train(model, name, rows, torch.ones_like(rows.mask_RT).bool(), change, mask, config)
        for ours, theirs in zip(result.losses, losses, strict=True):
            expected = (theirs["loss"], theirs["ft"], theirs["act"])
            assert (ours["loss"], ours["nll"], ours["margin"]) == pytest.approx(expected, abs=2e-3)
        change = result.change
        distances.append(result.distance_in)
        if f"delta_after_edit{number}" in tensors:
            assert relative_error(change[mask], tensors[f"delta_after_edit{number}"]) < 5e-4
        assert torch.count_nonzero(change[~mask]) == 0
    assert min(distances) == pytest.approx(case["editing_min_act"][0], rel=1e-3)
