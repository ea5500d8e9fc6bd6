"""Artifacts of MEND's training: a hyper-network, its manifest and digests of its training edits in one file.

The header of the safetensors file holds the manifest as JSON; ``manifest.json`` is a readable copy. The manifest's
editor settings hold for every edit made with the network.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from edit_hooks.gradient.hypernetwork import HyperNetwork, NetworkSettings
from edit_hooks.modeling.tensor_hash import tensor_digest
from edit_hooks.modeling.tensors import write_tensors
from edit_hooks.utils.errors import EditingError, first_line
from edit_hooks.utils.files import sha256_of, user_path, write_atomically
from edit_hooks.utils.hashing import key_of
from edit_hooks.utils.json_io import parse_json

FORMAT = "lm-eval-editing/mend/1"
WEIGHTS_NAME, MANIFEST_NAME = "hypernetwork.safetensors", "manifest.json"
TRAINED_ON = "trained_on"  # the tensor that holds the digests of the training edits

# Settings of release 0.1.0 -> current names.
RENAMED_SETTINGS = {"normalise": "normalize", "artefact": "artifact", "artefact_digest": "artifact_digest"}


def edit_digest(prompt: str, target: str) -> int:
    """63 bits of the SHA-256 of an edit's two texts, by which an artifact records its training edits."""
    text = json.dumps([prompt.strip(), target.strip()], ensure_ascii=False)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def save_network(
    network: HyperNetwork, manifest: Mapping[str, Any], folder: Path, training_digests: Collection[int] = ()
) -> None:
    """Write the artifact: a safetensors file with weights and manifest, and a readable copy of the manifest.

    Args:
        manifest: base model, edited matrices, data, steps, losses (JSON-able). The network's settings are added.
        training_digests: :func:`edit_digest` of every training edit.
    """
    folder.mkdir(parents=True, exist_ok=True)
    full = {**manifest, "format": FORMAT, "network": asdict(network.settings), "shapes": network.shapes}
    text = json.dumps(full, indent=1)
    tensors = network.state_dict() | {TRAINED_ON: torch.tensor(sorted(training_digests), dtype=torch.int64)}
    header = {"format": FORMAT, "manifest": text, "checksum": _checksum(text, tensors)}
    write_tensors(folder / WEIGHTS_NAME, tensors, header)
    write_atomically(folder / MANIFEST_NAME, text + "\n")


def artifact_file(path: str | Path) -> Path:
    """The weights file of an artifact, which may be named by its folder or by that file."""
    file = user_path(path, "trained hyper-network")
    if file.is_dir():
        file = file / WEIGHTS_NAME
    if not file.is_file():
        raise EditingError(f"no trained hyper-network at {path}; give a folder written by lm-edit train-mend.")
    return file


def artifact_digest(path: str | Path) -> str:
    """SHA-256 (hex) of an artifact's weights file, which holds the manifest too."""
    return sha256_of(artifact_file(path))


def read_manifest(path: str | Path) -> dict[str, Any]:
    """The manifest of an artifact, settings of earlier releases under their current names.

    Raises:
        EditingError: there is no artifact at ``path``, or the file is damaged or of another kind.
    """
    file = artifact_file(path)
    try:
        with safe_open(file, framework="pt") as tensors:
            header = tensors.metadata() or {}
    except Exception as error:
        raise EditingError(f"cannot read the hyper-network in {file}: {first_line(error)}.") from error
    if header.get("format") != FORMAT:
        raise EditingError(f"{file} is no trained hyper-network (format {header.get('format')!r}, want {FORMAT!r}).")
    manifest = parse_json(header.get("manifest", ""), f"manifest of {file}", finite=False)
    try:
        for section in {"editor", "training", "network"} & set(manifest):
            manifest[section] = with_current_settings(manifest[section])
    except (TypeError, AttributeError) as error:
        raise EditingError(f"the hyper-network in {file} is damaged: {error!r}") from error
    return manifest


def with_current_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings from a file of any release, under their current names."""
    return {RENAMED_SETTINGS.get(name, name): value for name, value in settings.items()}


def load_network(path: str | Path) -> tuple[HyperNetwork, dict[str, Any]]:
    """A trained hyper-network and its manifest.

    Raises:
        EditingError: see :func:`read_manifest`.
    """
    manifest = read_manifest(path)
    with safe_open(artifact_file(path), framework="pt") as file:
        header = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    # Artifacts of release 0.1.0 have no checksum.
    if "checksum" in header and header["checksum"] != _checksum(header["manifest"], tensors):
        raise EditingError(f"the hyper-network in {artifact_file(path)} is damaged (checksum differs); train it again.")
    shapes = {name: (int(d), int(f)) for name, (d, f) in manifest["shapes"].items()}
    network = HyperNetwork(shapes, NetworkSettings(**manifest["network"]))
    network.load_state_dict({name: tensor for name, tensor in tensors.items() if name != TRAINED_ON})
    return network, manifest


def read_training_digests(path: str | Path) -> frozenset[int]:
    """:func:`edit_digest` of every edit that an artifact was trained on."""
    with safe_open(artifact_file(path), framework="pt") as file:
        return frozenset(file.get_tensor(TRAINED_ON).tolist() if TRAINED_ON in file.keys() else ())  # noqa: SIM118


def _checksum(manifest: str, tensors: Mapping[str, torch.Tensor]) -> str:
    return key_of([manifest, {name: [list(t.shape), str(t.dtype), tensor_digest(t)] for name, t in tensors.items()}])
