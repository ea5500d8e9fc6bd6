"""Snapshots of everything an edit might leave behind, compared bit by bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from edit_hooks.modeling.fingerprint.guard import HOOK_DICTIONARIES, tokenizer_state
from edit_hooks.modeling.fingerprint.tensor_hash import tensor_digest

# Filled lazily by torch or transformers themselves the first time a model runs.
_LAZY_ATTRIBUTES = {"_modules", "_parameters", "_buffers"}
_PLAIN = (bool, int, float, str, type(None))


def snapshot(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> dict[str, Any]:
    """Flat dict of everything that must be as before after a scope: name of the thing -> its value or digest.

    Parameters are recorded by identity too: an optimizer or a tied head holds the object, not the name.
    """
    state: dict[str, Any] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        state[f"parameter {name}"] = (tensor_digest(parameter), id(parameter), parameter.data_ptr())
        state[f"requires_grad {name}"] = parameter.requires_grad
        state[f"grad {name}"] = None if parameter.grad is None else tensor_digest(parameter.grad)
        state[f"hooks on the gradient of {name}"] = len(getattr(parameter, "_backward_hooks", None) or ())
    for name, buffer in model.named_buffers(remove_duplicate=False):
        state[f"buffer {name}"] = tensor_digest(buffer)
    for name, module in model.named_modules():
        state[f"class {name}"] = type(module).__qualname__
        state[f"training {name}"] = module.training
        state[f"attributes {name}"] = tuple(sorted(set(vars(module)) - _LAZY_ATTRIBUTES))
        state.update({f"value of {name}.{attribute}": value for attribute, value in _plain_values(module)})
        state[f"children {name}"] = tuple((child, id(value)) for child, value in module.named_children())
        for hooks in HOOK_DICTIONARIES:
            state[f"{hooks} {name}"] = len(getattr(module, hooks, ()))
    state["config"] = model.config.to_dict()
    state["attention implementation"] = model.config._attn_implementation
    state["generation config"] = model.generation_config.to_dict() if model.generation_config is not None else None
    state["grad mode"] = torch.is_grad_enabled()
    state["default dtype"] = torch.get_default_dtype()
    state["random state of torch"] = [tensor_digest(part) for part in random_states()]
    state["random state of Python"] = hash(random.getstate())
    state["random state of numpy"] = repr(
        [part.tobytes() if isinstance(part, numpy.ndarray) else part for part in numpy.random.get_state()]
    )
    for hooks, registered in _global_hooks():
        state[f"hooks of all modules, {hooks}"] = len(registered)
    if tokenizer is not None:
        state.update(tokenizer_state(tokenizer))
    return state


def random_states() -> list[torch.Tensor]:
    """The states of torch's global generators: that of the CPU, and those of the GPUs if this process uses them."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])]


def _plain_values(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The numbers and names that a module keeps as attributes: a dropout's probability, a norm's epsilon."""
    for attribute, value in vars(module).items():
        members = value if isinstance(value, (list, tuple)) else (value,)
        if attribute != "training" and all(isinstance(member, _PLAIN) for member in members):
            yield attribute, tuple(value) if isinstance(value, list) else value


def _global_hooks() -> Iterator[tuple[str, dict[int, Any]]]:
    """The hooks that torch runs for every module of the process, by kind."""
    for name, value in vars(nn.modules.module).items():
        if name.startswith("_global_") and isinstance(value, dict):
            yield name, value
