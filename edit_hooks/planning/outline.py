"""A model without weights: its modules and shapes on the meta device, and the bytes that its weights will take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from edit_hooks.assets.gguf_file import config_source
from edit_hooks.modeling.memory import weight_bytes
from edit_hooks.utils.errors import EditingError, first_line

# Bits per entry of a linear map's weight, scales included: bitsandbytes has a float32 scale per 64 entries, or with
# double quantization 8 bits per 64 entries and a float32 per 64 x 256.
FOUR_BITS, FOUR_BITS_DOUBLE, EIGHT_BITS = 4 + 32 / 64, 4 + 8 / 64 + 32 / (64 * 256), 8.0
BITS_OF_METHOD = {"fp8": 8.0, "fbgemm_fp8": 8.0, "mxfp4": 4 + 8 / 32}  # of checkpoints that state no ``bits``
GROUP = 128  # entries per 16-bit scale and zero point of GPTQ and AWQ, unless the checkpoint states its own


class Outline(NamedTuple):
    """A model without weights.

    Attributes:
        bits: per entry of the linear maps in its blocks, if they are quantized.
    """

    model: PreTrainedModel
    bits: float | None = None

    @property
    def num_bytes(self) -> int:
        """Size of the weights, tied ones once."""
        return weight_bytes(self.model) - round(sum(self._saved().values()))

    def _saved(self) -> dict[str, float]:
        """Bytes that quantization saves, by the name of a linear map; the head stays plain."""
        if self.bits is None:
            return {}
        head = self.model.get_output_embeddings()
        return {
            name: module.weight.numel() * (module.weight.element_size() - self.bits / 8)
            for name, module in self.model.named_modules()
            if isinstance(module, nn.Linear) and module is not head
        }

    def bytes_by_device(self, device_map: Mapping[str, Any]) -> dict[Any, int]:
        """Size of the weights on each device of a map from modules to devices, as ``hf_device_map``."""
        sizes: Counter[Any] = Counter()
        saved = self._saved()
        for name, parameter in self.model.named_parameters():
            size = parameter.numel() * parameter.element_size()
            module, _, leaf = name.rpartition(".")
            size -= round(saved.get(module, 0)) if leaf == "weight" else 0
            sizes[_device_of(name, device_map)] += size
        return dict(sizes)

    def spread(self, num_devices: int) -> dict[Any, int]:
        """Size of the weights on each of several devices, as ``device_map=auto`` fills them: whole blocks, evenly."""
        from accelerate import infer_auto_device_map

        split = list(getattr(self.model, "_no_split_modules", None) or ())
        least = -(-weight_bytes(self.model) // num_devices)
        block = max(weight_bytes(module) for module in [*self._wholes(split), self.model.get_input_embeddings()])
        limits = dict.fromkeys(range(num_devices - 1), least + block) | {num_devices - 1: 2**62}
        return self.bytes_by_device(infer_auto_device_map(self.model, limits, no_split_module_classes=split))

    def _wholes(self, classes: Sequence[str]) -> list[nn.Module]:
        return [module for module in self.model.modules() if type(module).__name__ in classes]


def _device_of(name: str, device_map: Mapping[str, Any]) -> Any:
    places = [key for key in device_map if key == "" or name == key or name.startswith(f"{key}.")]
    if not places:
        raise EditingError(f"the device map places no module around {name!r}; give every module of the model a device.")
    return device_map[max(places, key=len)]


def outline_of(
    config: PretrainedConfig, dtype: str | None = None, bits: float | None = None, **options: Any
) -> Outline:
    """The outline of a configuration.

    Args:
        dtype: precision of the weights; by default that of the checkpoint, else float32.
        bits: per entry of quantized linear maps; by default those of the checkpoint.
        options: for ``AutoModelForCausalLM.from_config``.

    Raises:
        EditingError: transformers has no causal model for it.
    """
    name = str(dtype or getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    precision = getattr(torch, "float32" if name == "auto" else name, None)
    if not isinstance(precision, torch.dtype) or not precision.is_floating_point:
        raise EditingError(f"dtype={dtype!r} is no precision of weights. Accepted: float32, bfloat16, float16.")
    stored = getattr(config, "quantization_config", None)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=precision, **options)
    except (OSError, ValueError) as error:
        raise EditingError(
            f"transformers builds no causal model from this configuration: {first_line(error)}"
        ) from None
    return Outline(model, bits if bits is not None or stored is None else stored_bits(stored))


def read_config(pretrained: str, **options: Any) -> PretrainedConfig:
    """The configuration of a checkpoint.

    Raises:
        EditingError: it cannot be read.
    """
    try:
        return AutoConfig.from_pretrained(**config_source(pretrained), **options)
    except (OSError, ValueError) as error:
        raise EditingError(f"the configuration of {pretrained} cannot be read: {first_line(error)}") from None


def stored_bits(quantization: Any) -> float:
    """Bits per entry of a checkpoint's quantized maps, from its ``quantization_config``.

    Raises:
        EditingError: of a kind that states none.
    """
    stored = quantization if isinstance(quantization, dict) else vars(quantization)
    if stored.get("load_in_4bit") or stored.get("_load_in_4bit"):
        return FOUR_BITS_DOUBLE if stored.get("bnb_4bit_use_double_quant") else FOUR_BITS
    if stored.get("load_in_8bit") or stored.get("_load_in_8bit"):
        return EIGHT_BITS
    method = str(stored.get("quant_method"))
    if method in BITS_OF_METHOD:
        return BITS_OF_METHOD[method]
    bits = stored.get("bits") or stored.get("w_bit")
    if not isinstance(bits, int):
        raise EditingError(f"the checkpoint is quantized by {method!r}, which states no number of bits per weight.")
    size = stored.get("group_size")
    group = size if isinstance(size, int) and size > 0 else GROUP
    return bits + (16 + bits) / group
