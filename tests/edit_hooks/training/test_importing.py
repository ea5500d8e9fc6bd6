"""Imported weights: a trained network under the release's names is the same network; what does not fit is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from mend_runs import SETTINGS, trainer
from safetensors.torch import save_file
from serac_runs import save_encoder

from edit_hooks import EditingError, load_editor
from edit_hooks.contract.subject import EDIT_REQUESTS
from edit_hooks.contract.tiny_models import build_model, build_tokenizer, save_tiny
from edit_hooks.gradient.artifact import BLOCK_NAMES, artifact_digest, load_network
from edit_hooks.gradient.hypernetwork import HyperNetwork
from edit_hooks.training.importing import import_artifact

OF_EDITOR = {"layers": SETTINGS["layers"]}


@pytest.fixture(scope="module")
def loaded():
    return build_model("llama"), build_tokenizer("byte_bpe_bos")


@pytest.fixture(scope="module")
def trained(loaded, tmp_path_factory) -> Path:
    """An artifact of two steps."""
    folder = tmp_path_factory.mktemp("trained")
    trainer(*loaded, folder, num_steps=2, validate_every=1, patience=2).run()
    return folder


def released_names(network: HyperNetwork) -> dict[str, torch.Tensor]:
    """The tensors of a network as MEND's release names them."""
    tensors = {"mend.edit_lrs": network.step_sizes.detach().clone()}
    for width_out, width_in in dict.fromkeys(network.shapes.values()):
        factors, prefix = network.network_of((width_out, width_in)), f"mend.({width_in}, {width_out})"
        for number, block in enumerate(factors.blocks):
            for theirs, ours in BLOCK_NAMES.items():
                tensors[f"{prefix}.mlp.layers.{number}.{theirs}"] = getattr(block, ours).detach().clone()
        for name, buffer in (("mean", factors.mean), ("s", factors.squares)):
            tensors[f"{prefix}.u_{name}"], tensors[f"{prefix}.v_{name}"] = buffer.split([width_in, width_out])
        tensors[f"{prefix}.k"] = factors.count.float()[None]
        tensors[f"{prefix}.u_std"] = torch.full((width_in,), torch.nan)  # of the release's buffers, not read
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def save(network: HyperNetwork, path: Path, **changed: torch.Tensor | None) -> Path:
    tensors = {**released_names(network), **changed}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)
    return path


def test_a_trained_network_comes_back_the_same(loaded, trained, tmp_path):
    network, _ = load_network(trained)
    file = save(network, tmp_path / "released.safetensors")
    folder = import_artifact("mend", *loaded, file, tmp_path / "imported", OF_EDITOR)
    again, manifest = load_network(folder)
    assert again.settings.rank == network.settings.rank and len(again.state_dict()) == len(network.state_dict())
    for name, tensor in network.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert manifest["editor"]["rank"] == SETTINGS["rank"] and manifest["editor"]["num_hidden"] == 1
    assert manifest["imported"]["weights"] == "released.safetensors" and len(manifest["imported"]["sha256"]) == 64
    (ours,), (theirs,) = (
        load_editor("mend", {"artifact": str(one)}).edit(*loaded, EDIT_REQUESTS[:1]) for one in (folder, trained)
    )
    for name, update in ours.weights().items():
        assert torch.equal(update, theirs.weights()[name])
    (tmp_path / "elsewhere").mkdir()
    other = save(network, tmp_path / "elsewhere" / "other name.safetensors")
    moved = import_artifact("mend", *loaded, other, tmp_path / "again", OF_EDITOR)
    assert artifact_digest(moved) == artifact_digest(folder)


def test_a_network_that_does_not_fit_is_refused(loaded, trained, tmp_path):
    network, _ = load_network(trained)
    shape = network.shapes[next(name for name in network.shapes if "gate" in name)]
    prefix = f"mend.({shape[1]}, {shape[0]})"
    rows = released_names(network)[f"{prefix}.mlp.layers.0.mode_scale.weight"]
    cases = {
        "missing": ({f"{prefix}.mlp.layers.1.bias": None}, OF_EDITOR, "has no tensor for .*layers.1.bias"),
        "matrices": ({f"{prefix}.mlp.layers.0.mode_scale.weight": rows[:1]}, OF_EDITOR, "mode_scale.weight is torch"),
        "statistics": ({f"{prefix}.k": None}, OF_EDITOR, r"has no tensor for .*\.k"),
        "nan": ({f"{prefix}.v_s": torch.full((shape[0],), torch.nan)}, OF_EDITOR, "holds NaN"),
        "steps": ({"mend.edit_lrs": torch.ones(1)}, OF_EDITOR, "edit_lrs"),
        "roles": ({}, {**OF_EDITOR, "modules": ["query_value"]}, r"shapes \(in, out\) .* and none for .*'modules'"),
    }
    for name, (changed, settings, message) in cases.items():
        file = save(network, tmp_path / f"{name}.safetensors", **changed)
        with pytest.raises(EditingError, match=message):
            import_artifact("mend", *loaded, file, tmp_path / name, settings)
        assert not (tmp_path / name).exists()
    without = save(network, tmp_path / "plain.safetensors", **{f"{prefix}.k": None})
    plain = import_artifact("mend", *loaded, without, tmp_path / "plain", {**OF_EDITOR, "normalize": False})
    assert load_network(plain)[0].settings.normalize is False


@pytest.mark.parametrize(("editor", "message"), [("rome", "needs no training"), ("mendd", "Did you mean 'mend'")])
def test_only_editors_that_are_trained_import(editor, message, loaded, trained, tmp_path):
    file = save(load_network(trained)[0], tmp_path / "released.safetensors")
    with pytest.raises(EditingError, match=message):
        import_artifact(editor, *loaded, file, tmp_path / "out")


def test_serac_takes_folders_with_safetensors_only(loaded, tmp_path):
    """Pickled weights are never opened."""
    weights = tmp_path / "weights"
    save_encoder(weights / "classifier")
    with pytest.raises(EditingError, match=r"there is no folder .*counterfactual"):
        import_artifact("serac", *loaded, weights, tmp_path / "out")
    counterfactual = save_tiny(tmp_path / "small", "llama", seed=7)
    (weights / "counterfactual").symlink_to(counterfactual, target_is_directory=True)
    folder = import_artifact("serac", *loaded, weights, tmp_path / "out", {"scope_texts": "released"})
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["editor"] == {
        "classifier": "imported",
        "pooling": "cls",
        "scope_texts": "released",
        "counterfactual": "imported",
        "counterfactual_blocks": None,
    }
    (delta,) = load_editor("serac", {"artifact": str(folder)}).edit(*loaded, EDIT_REQUESTS[:1])
    assert delta.contexts[0].memory is not None and delta.contexts[0].memory.artifact == str(folder)
    (weights / "classifier" / "model.safetensors").rename(weights / "classifier" / "pytorch_model.bin")
    with pytest.raises(EditingError, match="no safetensors file"):
        import_artifact("serac", *loaded, weights, tmp_path / "other")
