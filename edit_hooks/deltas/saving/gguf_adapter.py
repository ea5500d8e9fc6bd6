"""Export of edits as LoRA adapters in the GGUF format, which llama.cpp loads over a model of any quantization.

The file has the tensors ``<name>.lora_a`` [r, F] and ``<name>.lora_b`` [D, r] for every edited map, in float32; the
server adds ``alpha / r * lora_b @ lora_a``, here with alpha = r. Names are those of the package gguf. llama.cpp's
converter reorders the rows of the query and key projections of its architecture ``llama``, and so does this one; other
maps of the families here are stored as they are.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from edit_hooks.deltas.delta import Delta
from edit_hooks.deltas.saving.export import adapter_matrices, new_folder, write_origin
from edit_hooks.modeling.architectures import num_layers, text_config
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.files import replacing
from edit_hooks.utils.storage.outputs import check_output_folder

if TYPE_CHECKING:
    import numpy

ADAPTER_NAME = "adapter.gguf"
# Model type -> architecture of the format. The maps of these families are known to be stored in it as they are.
ARCHITECTURES: Mapping[str, str] = {
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gpt2": "gpt2",
    "llama": "llama",
    "mistral": "llama",
    "olmo2": "olmo2",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}
REORDERED = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}  # in llama; -> their number of heads
_IN_BLOCK = re.compile(r"blk\.\d+\.(?P<map>\w+)\.weight")


def export_gguf(delta: Delta, config: Any, folder: str | Path) -> Path:
    """Write a low-rank edit as a GGUF LoRA adapter.

    Args:
        config: of the edit's base model.

    Returns:
        The folder, with ``adapter.gguf`` and ``edit_origin.json``.

    Raises:
        EditingError: the package gguf is missing, the family or a map has no known place in the format, the edit is not
            low-rank, or the folder is not empty.
    """
    architecture = gguf_architecture(config)
    rank, matrices = adapter_matrices(delta)
    names = _names_in_file(architecture, num_layers(config), list(matrices))
    target = check_output_folder(folder)
    with new_folder(target) as work:
        tensors = {}
        for name, (a_KF, b_DK) in matrices.items():
            tensors[f"{names[name]}.lora_a"] = a_KF.contiguous().numpy()
            tensors[f"{names[name]}.lora_b"] = _rows_as_stored(b_DK, architecture, names[name], config).numpy()
        with replacing(work / ADAPTER_NAME) as temporary:
            _write(temporary, architecture, rank, tensors)
        write_origin(work, delta)
    return target


def gguf_architecture(config: Any) -> str:
    """The architecture of the format for a model's configuration.

    Raises:
        EditingError: the family has none here, or the package gguf is missing.
    """
    architecture = ARCHITECTURES.get(str(config.model_type))
    if architecture is None:
        raise EditingError(
            f"no GGUF adapter for the model type {config.model_type!r}, whose maps may be stored otherwise in that "
            f"format. Accepted: {', '.join(sorted(ARCHITECTURES))}. --format peft works for every family; llama.cpp's "
            "convert_lora_to_gguf.py converts that folder."
        )
    if importlib.util.find_spec("gguf") is None:
        raise EditingError("a GGUF adapter needs the package gguf: pip install gguf.")
    return architecture


def _names_in_file(architecture: str, depth: int, modules: list[str]) -> dict[str, str]:
    """Names of the weights of linear maps in the format.

    Raises:
        EditingError: a map that is not in a block (a head may be the embedding there), or has no name.
    """
    import gguf

    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    known = gguf.get_tensor_name_map(arch, depth)
    names = {module: known.get_name(f"{module}.weight", try_suffixes=(".weight",)) for module in modules}
    if unknown := [module for module, name in names.items() if name is None or not _IN_BLOCK.fullmatch(name)]:
        raise EditingError(
            f"no GGUF adapter: {unknown[0]} is no map of a block that the architecture {architecture!r} of the format "
            "names. Export it with --format peft, or as a checkpoint (--format merged) and convert that."
        )
    return names


def _rows_as_stored(b_DK: torch.Tensor, architecture: str, name: str, config: Any) -> torch.Tensor:
    """The output side of an update in the order of the rows of the stored weight.

    In llama the two halves of each head are interleaved, as its rotary embedding wants them.
    """
    found = _IN_BLOCK.fullmatch(name)
    heads_name = REORDERED.get(found["map"]) if found and architecture == "llama" else None
    if heads_name is None:
        return b_DK.contiguous()
    text = text_config(config)
    heads = getattr(text, heads_name, None) or text.num_attention_heads
    return b_DK.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()


def _write(path: Path, architecture: str, rank: int, tensors: Mapping[str, numpy.ndarray]) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(rank))
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
