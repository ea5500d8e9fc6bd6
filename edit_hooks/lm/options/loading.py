"""Checks of lm-eval's own model options, which it would reject late, with an assertion, or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from edit_hooks.lm.options.quantization import QUANTIZATION_OPTIONS
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.settings.options import switch
from edit_hooks.utils.storage.files import user_path

SWITCHES = ("trust_remote_code", "parallelize", "use_fast_tokenizer", "add_bos_token", "truncation", "logits_cache")
# option -> least value
WHOLE_NUMBERS = {"max_length": 1, "prefix_token_id": 0, "max_batch_size": 1}
BACKENDS = ("default", "causal", "seq2seq")


# Options without a flag of lm-edit that decide which weights are loaded, and what prompts are tokenized to.
LOADING = ("peft", "delta", "subfolder", "gguf_file", "tokenizer", "trust_remote_code", "parallelize", "add_bos_token")


def loading_words(options: Mapping[str, Any]) -> list[str]:
    """Options of ``lm-edit`` that load the same weights, besides ``--pretrained``.

    Args:
        options: keyword arguments of lm-eval's Hugging Face class.
    """
    given = {name: options[name] for name in ("revision", "dtype") if options.get(name) is not None}
    words = [word for name, value in given.items() for word in (f"--{name}", str(value).removeprefix("torch."))]
    others = {name: options.get(name) for name in (*LOADING, *QUANTIZATION_OPTIONS)}
    spelled = [f"{name}={value}" for name, value in others.items() if isinstance(value, (str, bool, int, float))]
    return [*words, "--model-args", ",".join(spelled)] if spelled else words


def check_model_options(pretrained: object, options: Mapping[str, Any]) -> None:
    """Check options before anything is read.

    Args:
        pretrained: hub id, folder, or a model.
        options: keyword arguments of lm-eval's Hugging Face class; ``None`` is its default.

    Raises:
        EditingError: for a checkpoint that cannot exist, a device that is not there, and values of another type.
    """
    options = {name: value for name, value in options.items() if value is not None}
    _check_pretrained(pretrained, f"{options['subfolder']}/" if options.get("subfolder") else "")
    if "device" in options:
        _check_device(options["device"])
    for name in ("dtype", "softmax_dtype", "mixed_precision_dtype"):
        if name in options and not (name == "dtype" and options[name] == "auto"):
            _check_dtype(name, options[name])
    for name in SWITCHES:
        if name in options:
            switch({name: options[name]}, name, False)
    for name, least in WHOLE_NUMBERS.items():
        value = options.get(name, least)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise EditingError(f"{name}={value!r}; a whole number >= {least} is needed.")
    size = options.get("batch_size", 1)
    if not (str(size).isdecimal() and int(size) > 0) and str(size).partition(":")[0] != "auto":
        raise EditingError(f"batch_size={size!r}; a whole number >= 1, auto or auto:N is needed.")
    if options.get("backend", "default") not in BACKENDS:
        raise EditingError(f"backend={options['backend']!r} is unknown. Accepted: {', '.join(BACKENDS)}.")


def _check_pretrained(pretrained: object, subfolder: str) -> None:
    if isinstance(pretrained, torch.nn.Module):
        return
    if not isinstance(pretrained, str) or not pretrained.strip():
        raise EditingError(f"pretrained={pretrained!r} names no model; give a hub id or the folder of a saved model.")
    path = user_path(pretrained, "model")
    if path.is_file() or (pretrained.startswith(("/", ".", "~")) and not path.is_dir()):
        kind = "a file" if path.is_file() else "not there"
        raise EditingError(f"pretrained={pretrained} is {kind}; give a hub id or the folder of a saved model.")
    folder = path / subfolder
    if Path(folder, "adapter_config.json").is_file() and not Path(folder, "config.json").is_file():
        raise EditingError(
            f"pretrained={pretrained} is an adapter; give the model that it was made for, and peft={pretrained} among "
            "the model arguments (--model-args of lm-edit)."
        )
    if path.is_dir() and not Path(folder, "config.json").is_file():
        file = next((file.name for file in sorted(folder.glob("*.gguf"))), None)
        remedy = (
            f"for its GGUF file name the file: pretrained={folder / file}."
            if file
            else "give the folder of a saved model."
        )
        raise EditingError(f"pretrained={pretrained} holds no {subfolder}config.json; {remedy}")


def _check_dtype(name: str, dtype: object) -> None:
    parsed = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(parsed, torch.dtype) or not parsed.is_floating_point:
        raise EditingError(f"{name}={dtype!r} is no precision of weights. Accepted: auto, float32, bfloat16, float16.")


def _check_device(device: Any) -> None:
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        raise EditingError(f"device={device!r} is no device. Accepted: cpu, cuda, cuda:0, ...") from None
    if parsed.type == "mps":
        raise EditingError(
            f"device={device} cannot be used: edits and their effects are computed in float64, which Metal does not "
            "have. Use device=cpu, or for the unedited model on lm-eval's own tasks --model hf."
        )
    # lm_eval passes cuda:0 by default, and its class uses the CPU where there is no GPU.
    if parsed.type == "cuda" and max(count := torch.cuda.device_count(), 1) <= (parsed.index or 0):
        raise EditingError(f"device={device} does not exist; torch sees {count} GPUs here. Use device=cpu or drop it.")
