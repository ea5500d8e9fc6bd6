"""Low-rank updates with fewer ranks, and the ranks that serving engines accept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from edit_hooks.deltas.delta import Delta, Factor
from edit_hooks.utils.errors import EditingError

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values of --max-lora-rank (vllm/config/lora.py, 0.14 to 0.27)
VLLM_DEFAULT = 16


def rank_of_edit(delta: Delta) -> int:
    """The rank of an adapter that holds the edit: the largest of its maps, at most the smaller side of each."""
    return max(min(factor.left.shape[1], len(factor.left), len(factor.right)) for factor in delta.factors.values())


@torch.no_grad()
def truncated(delta: Delta, rank: int) -> tuple[Delta, dict[str, float]]:
    """The edit with at most ``rank`` ranks per map, nearest in the Frobenius norm (Eckart and Young).

    Returns:
        The edit, and by map the norm of what is left out, as a share of the update's.

    Raises:
        EditingError: the edit is not low-rank.
    """
    if not delta.is_low_rank:
        raise EditingError("only a sum of low-rank updates can be truncated; this edit has dense ones.")
    factors, errors = {}, {}
    for name, factor in delta.factors.items():
        factors[name], errors[name] = _truncated_factor(factor, rank)
    return replace(delta, factors=factors), errors


def _truncated_factor(factor: Factor, rank: int) -> tuple[Factor, float]:
    """The singular values of left @ right.T are those of the small product of the two triangular factors."""
    if min(factor.left.shape[1], len(factor.left), len(factor.right)) <= rank:
        return factor, 0.0
    left_Q, left_R = torch.linalg.qr(factor.left.double())
    right_Q, right_R = torch.linalg.qr(factor.right.double())
    u_KK, values_K, v_KK = torch.linalg.svd(left_R @ right_R.T, full_matrices=False)
    left = (left_Q @ u_KK[:, :rank]) * values_K[:rank]
    right = right_Q @ v_KK[:rank].T
    rest, whole = values_K[rank:].norm(), values_K.norm()
    kept = Factor(left.to(factor.left.dtype), right.to(factor.right.dtype), factor.transposed)
    return kept, float(rest / whole) if whole else 0.0


def adapter_name(editor: str | None, checksum: str) -> str:
    """The name under which an engine serves an edit: the same content has the same name, and no other has it."""
    return f"{editor or 'edit'}-{checksum[:12]}"


def vllm_words(rank: int) -> str:
    """What a rank means for vLLM, as a clause that names the option."""
    if rank > VLLM_RANKS[-1]:
        return f"rank {rank}: vLLM serves adapters up to rank {VLLM_RANKS[-1]}; export with --rank {VLLM_RANKS[-1]}"
    needed = next(allowed for allowed in VLLM_RANKS if allowed >= rank)
    if needed <= VLLM_DEFAULT:
        return f"rank {rank}: within vLLM's default limit of {VLLM_DEFAULT}"
    return f"rank {rank}: vLLM needs --max-lora-rank {needed}, its default is {VLLM_DEFAULT}"


def editor_of(meta: Mapping[str, Any]) -> str | None:
    """The editor of an edit, if all its parts are of one."""
    editors = {meta.get("editor"), *(part.get("editor") for part in meta.get("parts", ()))} - {None}
    return str(editors.pop()) if len(editors) == 1 else None
