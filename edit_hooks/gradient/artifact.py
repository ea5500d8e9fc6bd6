"""Artifacts of MEND's training: a hyper-network (:mod:`edit_hooks.base.artifacts.trained_artifact`).

The manifest's editor settings hold for every edit made with the network. A network that was trained elsewhere is read
under the names of MEND's release, from a safetensors file (:func:`read_released_network`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from edit_hooks.base.artifacts.given_tensors import read_given_tensors, tensor_of
from edit_hooks.base.artifacts.trained_artifact import ArtifactKind
from edit_hooks.gradient.hypernetwork import FactorNetwork, HyperNetwork, LowRankBlock, NetworkSettings
from edit_hooks.utils.errors import EditingError

FORMAT = "lm-eval-editing/mend/1"
WEIGHTS_NAME = "hypernetwork.safetensors"
HYPER_NETWORK = ArtifactKind(FORMAT, WEIGHTS_NAME, "hyper-network", "lm-edit train mend")

artifact_digest = HYPER_NETWORK.digest
read_manifest = HYPER_NETWORK.read_manifest
read_training_digests = HYPER_NETWORK.read_training_digests


def save_network(
    network: HyperNetwork, manifest: Mapping[str, Any], folder: Path, training_digests: Collection[int] = ()
) -> None:
    """Write the artifact.

    Args:
        manifest: base model, edited matrices, data, steps, losses (JSON-able). The network's settings are added.
        training_digests: :func:`~edit_hooks.base.artifacts.trained_artifact.edit_digest` of every training edit.
    """
    full = {**manifest, "format": FORMAT, "network": asdict(network.settings), "shapes": network.shapes}
    HYPER_NETWORK.save(folder, network.state_dict(), full, training_digests)


def load_network(path: str | Path) -> tuple[HyperNetwork, dict[str, Any]]:
    """A trained hyper-network and its manifest.

    Raises:
        EditingError: there is no artifact at ``path``, or the file is damaged or of another kind.
    """
    tensors, manifest = HYPER_NETWORK.load(path)
    shapes = {name: (int(d), int(f)) for name, (d, f) in manifest["shapes"].items()}
    network = HyperNetwork(shapes, NetworkSettings(**manifest["network"]), tensors["step_sizes"].dtype)
    network.load_state_dict(tensors)
    return network, manifest


# Tensors of a block in MEND's release -> ours.
BLOCK_NAMES = {"u": "U", "v": "V", "bias": "bias", "mode_scale.weight": "scale", "mode_shift.weight": "shift"}


def read_released_network(
    path: str | Path, shapes: Mapping[str, tuple[int, int]], settings: NetworkSettings
) -> HyperNetwork:
    """A hyper-network from a file with the names of MEND's release.

    By shape of the edited matrices, with ``(f, d)`` for input and output width: ``(f, d).mlp.layers.N.`` and ``u``,
    ``v``, ``bias``, ``mode_scale.weight`` and ``mode_shift.weight`` (a row for each matrix of the shape), and the
    statistics ``u_mean`` [f], ``v_mean`` [d], ``u_s``, ``v_s`` (sums of squared deviations) and ``k`` [1] (tokens);
    ``edit_lrs``, one step size per matrix. A prefix ``mend.`` is left out, other tensors are not read.

    Args:
        shapes: module name -> (d, f), in the order of the step sizes.
        settings: its rank and number of blocks are read from the file.

    Raises:
        EditingError: for an unreadable file, missing tensors, and tensors of other shapes.
    """
    what = "network"
    given = {name.removeprefix("mend."): tensor for name, tensor in read_given_tensors(str(path), what).items()}
    rank, num_blocks = _architecture(given, shapes)
    settings = replace(settings, rank=rank, num_blocks=num_blocks)
    step_sizes = tensor_of(given, "edit_lrs", (len(shapes),), what)
    network = HyperNetwork(shapes, settings, torch.promote_types(step_sizes.dtype, torch.float32))
    with torch.no_grad():
        network.step_sizes.copy_(step_sizes)
        for width_out, width_in in dict.fromkeys(network.shapes.values()):
            factors = network.network_of((width_out, width_in))
            prefix = f"({width_in}, {width_out})"
            for number, block in enumerate(factors.blocks):
                assert isinstance(block, LowRankBlock)
                for theirs, ours in BLOCK_NAMES.items():
                    tensor: torch.Tensor = getattr(block, ours)
                    tensor.copy_(tensor_of(given, f"{prefix}.mlp.layers.{number}.{theirs}", tensor.shape, what))
            if settings.normalize:
                _read_statistics(factors, given, prefix, (width_in, width_out))
    return network


def _architecture(given: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    """Rank and number of blocks of the networks in a file."""
    found = [re.fullmatch(r"(\(\d+, \d+\))\.mlp\.layers\.(\d+)\.v", name) for name in given]
    layers = [(one[1], int(one[2]), len(given[one[0]])) for one in found if one is not None]
    wanted = {f"({width_in}, {width_out})" for width_out, width_in in shapes.values()}
    if missing := wanted - {shape for shape, _, _ in layers}:
        has = ", ".join(sorted({shape for shape, _, _ in layers})) or "none"
        raise EditingError(
            f"the file has networks for matrices of the shapes (in, out) {has}, and none for "
            f"{', '.join(sorted(missing))} of the edited ones. Are 'layers' and 'modules' those of the training, and "
            "the names those of MEND's release?"
        )
    numbers = {number for shape, number, _ in layers if shape in wanted}
    return max(rank for shape, _, rank in layers if shape in wanted), len(numbers)


def _read_statistics(
    factors: FactorNetwork, given: Mapping[str, torch.Tensor], prefix: str, widths: tuple[int, int]
) -> None:
    """Copy the statistics of a shape; those of input and gradient are side by side here."""
    for names, buffer in ((("u_mean", "v_mean"), factors.mean), (("u_s", "v_s"), factors.squares)):
        parts = [
            tensor_of(given, f"{prefix}.{name}", (width,), "network") for name, width in zip(names, widths, strict=True)
        ]
        buffer.copy_(torch.cat(parts))
    factors.count.fill_(int(tensor_of(given, f"{prefix}.k", (1,), "network")))
