"""Exact fingerprints of a model's weights and of our own code, for cache keys and result stamps."""

from __future__ import annotations

import hashlib
import json

import torch
from torch import nn

CHUNK = 2**24


_INTEGER_VIEW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


_MIX = 65521  # largest prime below 2^16


def tensor_checksum(tensor: torch.Tensor) -> tuple[int, int]:
    """Two 64-bit checksums of a tensor's bytes, one of them sensitive to positions.

    Integer sums wrap around and do not depend on the order of summation, so every device and thread count agrees.
    """
    flat = tensor.detach().contiguous().view(-1)
    bits = flat.view(_INTEGER_VIEW[flat.element_size()])
    plain = mixed = 0
    for start in range(0, len(bits), CHUNK):
        part = bits[start : start + CHUNK].to(torch.int64)
        weights = (torch.arange(start, start + len(part), device=part.device) % _MIX) + 1
        plain = (plain + int(part.sum())) % 2**64
        mixed = (mixed + int((part * weights).sum())) % 2**64
    return plain, mixed


@torch.no_grad()
def model_fingerprint(model: nn.Module) -> str:
    """SHA-256 (hex) over names, shapes, dtypes and checksums of all parameters and persistent buffers."""
    digest = hashlib.sha256()
    seen: set[int] = set()
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        if tensor.is_meta:
            digest.update(json.dumps([name, list(tensor.shape), str(tensor.dtype), "offloaded"]).encode())
            continue
        if tensor.data_ptr() in seen:
            continue
        seen.add(tensor.data_ptr())
        digest.update(json.dumps([name, list(tensor.shape), str(tensor.dtype), tensor_checksum(tensor)]).encode())
    return digest.hexdigest()
