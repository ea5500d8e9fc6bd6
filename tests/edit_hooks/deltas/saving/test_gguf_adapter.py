"""LoRA adapters in the GGUF format, read back with the package gguf and the layouts of transformers' reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from pytest import CaptureFixture
from random_deltas import random_delta

from edit_hooks import Delta, EditingError
from edit_hooks.contract.tiny_models import build_model, save_tiny
from edit_hooks.deltas.delta import Factor
from edit_hooks.deltas.saving import gguf_adapter
from edit_hooks.deltas.saving.export import export_peft, read_peft
from edit_hooks.deltas.saving.gguf_adapter import ARCHITECTURES, export_gguf
from edit_hooks.modeling.architectures import architecture_of, is_transposed, map_shape, num_layers
from edit_hooks.modeling.linear_maps import is_linear_map
from lm_edit.cli.main import main
from lm_edit.edits import EditExport

gguf = pytest.importorskip("gguf", reason="the package gguf writes the format (extra: demo)")


def edit_of_all_maps(model: Any) -> Delta:
    """Random updates of every map of one block, of ranks 1 and 2."""
    block, factors = model.get_submodule(architecture_of(model).block_name(1)), {}
    for name, module in block.named_modules(prefix=architecture_of(model).block_name(1)):
        if is_linear_map(module):
            generator = torch.Generator().manual_seed(len(factors))
            left, right = (torch.randn(width, 1 + len(factors) % 2, generator=generator) for width in map_shape(module))
            factors[name] = Factor(left, right, is_transposed(module))
    return Delta(factors=factors)


def updates_in(folder: Path, model: Any) -> tuple[dict[str, numpy.ndarray], Any]:
    """By module, alpha / r * B A in the layout of the model, undone as transformers does when it reads a file."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    reader = gguf.GGUFReader(folder / "adapter.gguf")
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    architecture = reader.get_field("general.architecture").contents()
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    known = gguf.get_tensor_name_map(arch, num_layers(model))
    modules = {known.get_name(name): name for name, _ in model.named_modules() if name and known.get_name(name)}
    alpha, found = reader.get_field("adapter.lora.alpha").contents(), {}
    process = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
    for name in [name.removesuffix(".lora_a") for name in tensors if name.endswith(".lora_a")]:
        a_KF, b_DK = tensors[f"{name}.lora_a"], tensors[f"{name}.lora_b"]
        update_DF = alpha / b_DK.shape[1] * b_DK @ a_KF
        found[modules[name.removesuffix(".weight")]] = process.process(update_DF, name=name).weights
    return found, reader


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_an_adapter_holds_the_update_of_every_map(model_type: str, tmp_path: Path) -> None:
    model = build_model(model_type)
    delta = edit_of_all_maps(model)
    found, reader = updates_in(export_gguf(delta, model.config, tmp_path / "out"), model)
    assert found.keys() == delta.factors.keys()
    for name, (left, right, transposed) in delta.factors.items():
        update = found[name].T if transposed else found[name]
        numpy.testing.assert_allclose(update, left @ right.T, rtol=1e-5, atol=1e-6)
    assert reader.get_field("general.type").contents() == "adapter"
    assert reader.get_field("adapter.type").contents() == "lora"
    assert {tensor.tensor_type for tensor in reader.tensors} == {gguf.GGMLQuantizationType.F32}


def test_what_the_format_has_no_place_for_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model("llama")
    head = Delta(factors={"lm_head": Factor(torch.ones(map_shape(model.lm_head)[0], 1), torch.ones(32, 1), False)})
    with pytest.raises(EditingError, match="lm_head is no map of a block"):
        export_gguf(head, model.config, tmp_path / "head")
    granite = build_model("granite")
    with pytest.raises(EditingError, match=r"'granite'.*Accepted: gemma2, .*--format peft"):
        export_gguf(edit_of_all_maps(granite), granite.config, tmp_path / "granite")
    dense = Delta(dense={"model.layers.1.mlp.down_proj.weight": torch.ones(32, 64)})
    with pytest.raises(EditingError, match="not low-rank"):
        export_gguf(dense, model.config, tmp_path / "dense")
    monkeypatch.setattr(gguf_adapter, "_write", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export_gguf(edit_of_all_maps(model), model.config, tmp_path / "cut")
    assert list(tmp_path.iterdir()) == []


def test_an_adapter_below_the_edit_belongs_into_the_base_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    exported = EditExport(tmp_path, "edit.safetensors", True, ())
    monkeypatch.setattr("lm_edit.edits.export_edits", lambda *_: exported)
    words = ["edit.safetensors", "--pretrained", "base", "--model-args", "peft=lora", "--out", str(tmp_path)]
    assert main(["export", *words, "--format", "gguf"]) == 0
    assert "the base model of llama-server needs lora merged into it" in capsys.readouterr().out


def test_the_command_writes_what_peft_would_hold(tmp_path: Path, capsys: CaptureFixture[str]) -> None:
    folder, model = save_tiny(tmp_path, "llama"), build_model("llama")
    delta = random_delta(model, seed=0)
    delta.save(tmp_path / "edit.safetensors")
    words = [str(tmp_path / "edit.safetensors"), "--pretrained", str(folder), "--device", "cpu"]
    assert main(["export", *words, "--format", "gguf", "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert f"llama-server -m '<base model>.gguf' --lora {tmp_path / 'out' / 'adapter.gguf'}" in printed
    assert f"load_edit={tmp_path / 'edit.safetensors'}" in printed and "vllm" not in printed
    found, _ = updates_in(tmp_path / "out", model)
    for name, (left, right, _) in read_peft(export_peft(delta, tmp_path / "peft"), model).factors.items():
        numpy.testing.assert_allclose(found[name], left @ right.T, rtol=1e-5, atol=1e-6)
