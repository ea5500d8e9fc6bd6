"""Artifacts of MEND's training: round trip, damaged files."""

from __future__ import annotations

import json

import pytest
import torch
from damage import flipped
from safetensors import safe_open
from safetensors.torch import save_file

from edit_hooks import EditingError
from edit_hooks.base.artifacts.trained_artifact import MANIFEST_NAME, edit_digest
from edit_hooks.contract.tiny_models import EDIT_LAYER
from edit_hooks.editors.mend import MENDConfig, edited_shapes
from edit_hooks.gradient.artifact import (
    WEIGHTS_NAME,
    artifact_digest,
    load_network,
    read_manifest,
    read_training_digests,
    save_network,
)
from edit_hooks.gradient.hypernetwork import HyperNetwork
from edit_hooks.modeling.fingerprint.identity import model_identity
from edit_hooks.training.mend.config import ARTIFACT_SETTINGS


@pytest.fixture
def artifact(tiny_model, tiny_tokenizer, tmp_path):
    """The artifact of a network with random weights and statistics for the tiny Llama."""
    model = tiny_model("llama")
    config = MENDConfig(layers=[EDIT_LAYER], rank=4, edit_lr=1e-2)
    network = HyperNetwork(edited_shapes(model, config), config.network_settings())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in network.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(torch.rand(tensor.shape, generator=generator))
            else:
                tensor.fill_(5)
    settings = config.to_dict()
    manifest = {
        "model": model_identity(model, tiny_tokenizer("byte_bpe_bos")).to_dict(),
        "model_name": "tiny",
        "editor": {name: settings[name] for name in ARTIFACT_SETTINGS},
        "training": {"artifact": None, "artifact_digest": None, "lr": 1e-3},
    }
    save_network(network, manifest, tmp_path / "mend", {edit_digest("A", "b"), edit_digest("C", "d")})
    return network, tmp_path / "mend"


def rewrite_header(file, change):
    """Write the artifact again with another header."""
    with safe_open(file, framework="pt") as opened:
        header = opened.metadata()
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    save_file(tensors, file, change(header))


def test_an_artifact_survives_the_round_trip(artifact):
    network, folder = artifact
    again, manifest = load_network(folder)
    assert manifest == json.loads((folder / MANIFEST_NAME).read_text()) == read_manifest(folder / WEIGHTS_NAME)
    assert again.settings == network.settings and again.shapes == network.shapes
    for name, tensor in network.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert read_training_digests(folder) == {edit_digest(" A ", "b"), edit_digest("C", "d")}
    assert artifact_digest(folder) == artifact_digest(folder / WEIGHTS_NAME)


def test_the_digest_is_that_of_the_content(artifact, tmp_path):
    """Two trainings to the same network are one artifact, whatever their folders, steps and losses."""
    network, folder = artifact
    manifest, edits = read_manifest(folder), read_training_digests(folder)
    for number in range(8):
        run = {"model_name": f"/home/{number}/model", "losses": [number], "training": {"num_steps": number}}
        save_network(network, {**manifest, **run}, tmp_path / str(number), edits)
        assert artifact_digest(tmp_path / str(number)) == artifact_digest(folder)
    save_network(network, {**manifest, "editor": {**manifest["editor"], "sign": "plus"}}, tmp_path / "sign", edits)
    save_network(network, manifest, tmp_path / "edits", edits | {1})
    network.step_sizes.data += 1
    save_network(network, manifest, tmp_path / "steps", edits)
    digests = {artifact_digest(tmp_path / name) for name in ("mend", "sign", "edits", "steps")}
    assert len(digests) == 4


def test_files_that_are_no_artifacts_are_refused(artifact, tmp_path):
    _, folder = artifact
    with pytest.raises(EditingError, match="no trained hyper-network at"):
        read_manifest(tmp_path)
    (tmp_path / WEIGHTS_NAME).write_bytes(b"half a file")
    with pytest.raises(EditingError, match="cannot read the hyper-network"):
        read_manifest(tmp_path)
    rewrite_header(folder / WEIGHTS_NAME, lambda header: {**header, "format": "something else"})
    with pytest.raises(EditingError, match="'something else'"):
        load_network(folder)


def test_a_damaged_artifact_is_refused(artifact):
    _, folder = artifact
    path = folder / WEIGHTS_NAME
    content, (_, manifest) = path.read_bytes(), load_network(folder)
    refused = 0
    for damaged in flipped(content, every=len(content) // 60):
        path.write_bytes(damaged)
        try:
            assert load_network(folder)[1] == manifest
        except EditingError as error:
            refused += str(path) in str(error)
    assert refused > 50
