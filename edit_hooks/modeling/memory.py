"""Sizes of models and activations, and free memory of their device."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

MEMINFO = Path("/proc/meminfo")  # of Linux


def weight_bytes(model: nn.Module) -> int:
    """Size of the parameters, tied ones once."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def bytes_per_token(model: Any) -> int:
    """Approximate size of the activations of all blocks that one token keeps for a backward pass."""
    config = model.config.get_text_config()
    width = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    element = model.get_input_embeddings().weight.element_size()
    return config.num_hidden_layers * (16 * config.hidden_size + 4 * width) * element


def forward_bytes_per_token(model: Any) -> int:
    """Approximate size of what one token takes in a forward pass: its keys and values, and one block's activations."""
    return cache_bytes_per_token(model) + bytes_per_token(model) // model.config.get_text_config().num_hidden_layers


def cache_bytes_per_token(model: Any) -> int:
    """Approximate size of the keys and values of all blocks of one token; 131 kB for Llama 3 8B in 16 bits."""
    config = model.config.get_text_config()
    num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    element = model.get_input_embeddings().weight.element_size()
    return int(config.num_hidden_layers * 2 * num_heads * width * element)


def free_bytes(device: torch.device) -> int | None:
    """Free memory of a GPU, or memory available to new processes; ``None`` where the system does not report it."""
    if device.type == "cuda":
        return free_cuda_bytes(device)
    available = re.search(r"MemAvailable:\s*(\d+) kB", MEMINFO.read_text()) if MEMINFO.is_file() else None
    return int(available[1]) * 1024 if available else None


def free_cuda_bytes(device: torch.device) -> int:
    """Free memory of a GPU, with what PyTorch's allocator holds of it and does not use."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused
