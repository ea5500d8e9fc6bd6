"""Exact fingerprints of model weights, for cache keys and result metadata."""

from __future__ import annotations

import hashlib
import json

import torch
from torch import nn

CHUNK_ENTRIES = 2**24  # entries widened to int64 at once: 128 MiB


_INTEGER_VIEW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes per entry


_POSITION_MODULUS = 65521  # largest prime below 2^16


def tensor_checksum(tensor: torch.Tensor) -> tuple[int, int]:
    """Two 64-bit checksums of a tensor's bytes: a plain and a position-weighted sum.

    Integer sums wrap around and do not depend on the order of summation, so every device and thread count agrees.
    """
    flat = tensor.detach().contiguous().view(-1)
    bits = flat.view(_INTEGER_VIEW[flat.element_size()])
    plain_sum = weighted_sum = 0
    for start in range(0, len(bits), CHUNK_ENTRIES):
        chunk = bits[start : start + CHUNK_ENTRIES].to(torch.int64)
        weights = (torch.arange(start, start + len(chunk), device=chunk.device) % _POSITION_MODULUS) + 1
        plain_sum = (plain_sum + int(chunk.sum())) % 2**64
        weighted_sum = (weighted_sum + int((chunk * weights).sum())) % 2**64
    return plain_sum, weighted_sum


def bit_sum(tensor: torch.Tensor) -> int:
    """Sum of a tensor's entries as integers: a quick check whether any of them has changed."""
    flat = tensor.detach().contiguous().view(-1)
    return int(flat.view(_INTEGER_VIEW[flat.element_size()]).sum(dtype=torch.int64))


@torch.no_grad()
def model_fingerprint(model: nn.Module) -> str:
    """SHA-256 (hex) of all parameters and persistent buffers.

    It covers names, shapes, dtypes and checksums.

    Tied weights count once; weights on the meta device (offloaded) count by name, shape and dtype only.
    """
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
