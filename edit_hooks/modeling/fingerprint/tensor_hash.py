"""SHA-256 of tensors and of all weights of a model, and cheap samples of them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from edit_hooks.utils.errors import EditingError

CHUNK_BYTES = 2**23  # hashed by one thread; bounds what is copied from a GPU at once
MAX_THREADS = 16
NUM_SAMPLED = 256  # entries of a tensor in a sample of it


def tensor_digest(tensor: torch.Tensor) -> str:
    """SHA-256 (hex) of a tensor's shape, dtype and bytes; the same on every device."""
    with _threads() as threads:
        return _digest(tensor, threads)


@torch.no_grad()
def weights_digest(model: nn.Module) -> str:
    """SHA-256 (hex) over name, shape, dtype and bytes of every parameter and buffer.

    Non-persistent buffers (the tables of rotary embeddings) and the quantization state of quantized weights are
    included. Tied weights are hashed once, and which names are tied counts.

    Raises:
        EditingError: a weight is on the meta device, so its values are not there.
    """
    digest = hashlib.sha256()
    names: dict[tuple[object, ...], str] = {}  # of tensors that share memory
    with _threads() as threads:
        for name, tensor in sorted(_tensors(model).items()):
            if tensor.is_meta:
                raise EditingError(f"the weight {name} is offloaded, so the model cannot be identified; load it whole.")
            memory = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            first = names.setdefault(memory, name) if tensor.numel() else name
            content = _digest(tensor, threads) if first == name else f"tied to {first}"
            digest.update(json.dumps([name, content]).encode())
    return digest.hexdigest()


@torch.no_grad()
def sampled_digest(model: nn.Module) -> str:
    """SHA-256 (hex) over name and sample of every weight: cheap, and blind to a change that misses the samples."""
    digest = hashlib.sha256()
    for name, tensor in sorted(_tensors(model).items()):
        digest.update(name.encode() + b"\0" + (b"" if tensor.is_meta else sample_of(tensor)))
    return digest.hexdigest()


def sample_of(tensor: torch.Tensor) -> bytes:
    """Entries at equal distances, as bytes: NaN equals itself.

    The distance is odd: a multiple of the row length of a matrix would read one column alone.
    """
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if hasattr(local, "__tensor_flatten__"):  # codes and scales in a class of another package, which has few operations
        return b"".join(sample_of(getattr(local, name)) for name in sorted(local.__tensor_flatten__()[0]))
    flat = local.detach().reshape(-1)
    distance = max(1, len(flat) // NUM_SAMPLED)
    chosen = flat[:: distance - 1 + distance % 2].contiguous()
    return chosen.view(torch.uint8).cpu().numpy().tobytes()


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, all buffers, and what quantized modules add to the state dict."""
    named: dict[str, torch.Tensor] = {**dict(model.named_parameters(remove_duplicate=False))}
    named |= dict(model.named_buffers(remove_duplicate=False))
    return named | {name: value for name, value in model.state_dict(keep_vars=True).items() if torch.is_tensor(value)}


def _digest(tensor: torch.Tensor, threads: ThreadPoolExecutor) -> str:
    """Hash the chunks of a tensor, in parallel if there are several, and then their digests."""
    if hasattr(tensor, "full_tensor"):  # sharded by tensor parallelism
        tensor = tensor.full_tensor()
    if hasattr(tensor, "__tensor_flatten__"):  # codes and scales in a class of another package
        parts = {name: _digest(getattr(tensor, name), threads) for name in sorted(tensor.__tensor_flatten__()[0])}
        return hashlib.sha256(json.dumps([list(tensor.shape), str(tensor.dtype), parts]).encode()).hexdigest()
    content = tensor.detach().contiguous().view(-1).view(torch.uint8)
    digest = hashlib.sha256(json.dumps([list(tensor.shape), str(tensor.dtype)]).encode())
    map_chunks: Callable[..., Iterable[bytes]] = threads.map if len(content) > CHUNK_BYTES else map
    for part in map_chunks(_chunk_digest, _chunks(content)):
        digest.update(part)
    return digest.hexdigest()


def _chunks(content: torch.Tensor) -> Iterator[torch.Tensor]:
    for start in range(0, len(content), CHUNK_BYTES):
        yield content[start : start + CHUNK_BYTES]


def _chunk_digest(chunk: torch.Tensor) -> bytes:
    """Hash bytes; hashlib releases the interpreter's lock, and a CPU tensor is not copied."""
    return hashlib.sha256(chunk.cpu().numpy().data).digest()


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1))
