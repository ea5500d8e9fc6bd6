"""Quantization of ``edited_hf``: its options, and a refusal before the weights are loaded."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Mapping
from typing import Any

from transformers import BitsAndBytesConfig
from transformers.utils.quantization_config import QuantizationConfigMixin

from edit_hooks.base.editor import Editor
from edit_hooks.utils.errors import EditingError

# Arguments of BitsAndBytesConfig. from_pretrained takes the configuration only, since transformers 5.
QUANTIZATION_OPTIONS = (
    "bnb_4bit_compute_dtype",
    "bnb_4bit_quant_type",
    "bnb_4bit_use_double_quant",
    "dequantize",
    "llm_int8_skip_modules",
    "llm_int8_threshold",
    "load_in_4bit",
    "load_in_8bit",
)


def take_quantization(options: dict[str, Any]) -> QuantizationConfigMixin | None:
    """Remove the options of quantization and the checkpoint's configuration; return the one to load with.

    ``None`` for weights that are not quantized. With ``dequantize`` they are plain after loading.

    Args:
        options: ``llm_int8_skip_modules`` is a list, or names separated by semicolons.

    Raises:
        EditingError: for options that have no meaning or no valid value, and where bitsandbytes is missing.
    """
    given = {name: options.pop(name) for name in QUANTIZATION_OPTIONS if name in options}
    stored = options.pop("quantization_config", None)
    if given.pop("dequantize", False):
        return _dequantized(stored, given)
    if not given.get("load_in_4bit") and not given.get("load_in_8bit"):
        if unused := sorted(given.keys() - {"load_in_4bit", "load_in_8bit"}):
            raise EditingError(f"{unused[0]} has no meaning without load_in_4bit=True or load_in_8bit=True; drop it.")
        return stored
    if stored is not None:
        raise EditingError("the checkpoint is quantized already; drop load_in_4bit and load_in_8bit.")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise EditingError(
            "load_in_4bit and load_in_8bit need bitsandbytes, which is not installed. Run: pip install "
            '"lm-eval-editing[quantized]"'
        )
    if isinstance(skipped := given.get("llm_int8_skip_modules"), str):
        given["llm_int8_skip_modules"] = skipped.split(";")
    kind = given.get("bnb_4bit_quant_type", "fp4")
    if kind not in ("fp4", "nf4"):
        raise EditingError(f"bnb_4bit_quant_type={kind!r} is not known. Accepted: nf4, fp4.")
    try:
        return BitsAndBytesConfig(**given)
    except (AttributeError, TypeError, ValueError) as error:
        raise EditingError(f"the options of quantization are not valid: {error}") from None


def _dequantized(stored: Any, others: Mapping[str, Any]) -> QuantizationConfigMixin:
    """The configuration of a checkpoint that loads it with plain weights."""
    if others:
        raise EditingError(f"dequantize=True and {', '.join(others)}: the weights are quantized or plain; give one.")
    if stored is None:
        raise EditingError("dequantize=True, but this checkpoint's weights are not quantized; drop it.")
    if not hasattr(stored, "dequantize"):
        method = getattr(stored.quant_method, "value", stored.quant_method)
        raise EditingError(
            f"dequantize=True: transformers cannot load a checkpoint of {method} with plain weights. It can for FP8, "
            "MXFP4 and compressed-tensors. Without the option, edits act beside the weights if gradients pass through."
        )
    config: QuantizationConfigMixin = copy.copy(stored)
    config.dequantize = True
    return config


def check_quantization(editor: Editor[Any], config: object, options: Mapping[str, Any]) -> None:
    """Refuse an editor that cannot edit quantized weights where all weights will be quantized.

    A quick look at the configuration, before the weights are loaded. Where modules are left out of the quantization,
    :meth:`Editor.check_model` decides after loading.

    Args:
        config: of the model. options: those that :func:`take_quantization` removes.

    Raises:
        EditingError: the editor needs plain weights.
    """
    stored = getattr(config, "quantization_config", None)
    is_wanted = options.get("load_in_4bit") or options.get("load_in_8bit")
    if editor.edits_quantized or (stored is None and not is_wanted) or options.get("dequantize"):
        return
    settings = dict(options) if stored is None else stored if isinstance(stored, dict) else vars(stored)
    if settings.get("llm_int8_skip_modules") or settings.get("modules_to_not_convert"):
        return
    raise EditingError(
        f"editor {editor.name!r} changes the weights themselves, and those of this model are quantized; their codes "
        "cannot be trained. Use an editor whose update acts beside the weight (r_rome, memit, lora, ...), or load the "
        "model with plain weights (dtype=bfloat16; of an FP8, MXFP4 or compressed-tensors checkpoint dequantize=True)."
    )
