"""Artifacts of MEND's training: a hyper-network (:mod:`edit_hooks.base.trained_artifact`).

The manifest's editor settings hold for every edit made with the network.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edit_hooks.base.trained_artifact import ArtifactKind
from edit_hooks.gradient.hypernetwork import HyperNetwork, NetworkSettings

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
        training_digests: :func:`~edit_hooks.base.trained_artifact.edit_digest` of every training edit.
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
