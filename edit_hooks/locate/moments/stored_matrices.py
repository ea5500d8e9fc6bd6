"""Files of statistics: matrices beside a manifest that describes how they were collected.

A file is used only for exactly its description and with a fitting checksum; anything else is logged and collected
again. Processes that need the same statistics wait for the one that collects them.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from edit_hooks.modeling.fingerprint.tensor_hash import tensor_digest
from edit_hooks.modeling.tensors import write_tensors
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.storage.files import write_atomically, write_to_cache
from edit_hooks.utils.storage.hashing import key_of
from edit_hooks.utils.storage.json_io import read_json
from edit_hooks.utils.storage.locks import locked

log = get_logger(__name__)

LOCKS = "locks"


class StoredMatrices(NamedTuple):
    """Matrices by name, and the report on their collection."""

    matrices: dict[str, torch.Tensor]
    report: dict[str, Any]


def save_matrices(
    root: Path, description: Mapping[str, Any], report: Mapping[str, Any], matrices: Mapping[str, torch.Tensor]
) -> None:
    """Write the matrices, then the manifest; readers ignore matrices without their manifest."""
    tensors, manifest = _paths(root, description)
    record = {"description": description, "report": report, "checksum": _checksum(report, matrices)}
    write_to_cache(tensors, lambda: write_tensors(tensors, dict(matrices), {}), root)
    write_to_cache(manifest, lambda: write_atomically(manifest, json.dumps(record, indent=2) + "\n"), root)


def load_matrices(root: Path, description: Mapping[str, Any], what: str) -> StoredMatrices | None:
    """Read matrices; ``None`` if there are none.

    Damaged files and files with another description are ignored with a warning.

    Args:
        what: the kind of statistics, for the warning.
    """
    tensors, manifest = _paths(root, description)
    if not os.path.lexists(manifest):
        return None
    try:
        record = read_json(manifest, finite=False)
        if record["description"] != description:
            raise EditingError("it was collected for something else")
        matrices = load_file(tensors)
        if record["checksum"] != _checksum(record["report"], matrices):
            raise EditingError("its checksum differs")
    except Exception as error:  # any damage: report it and collect again
        log.warning("cannot use the %s in %s (%s); it is collected again.", what, tensors, error)
        return None
    return StoredMatrices(matrices, record["report"])


def collected_once(root: Path | None, key: object, what: str) -> contextlib.AbstractContextManager[object]:
    """Wait for another process that collects the same; no-op without a folder.

    Args:
        key: JSON-able, the same in both processes.
    """
    if root is None:
        return contextlib.nullcontext()
    waiting = f"{what}: waiting for another process that collects them from the same text, in {root}."
    return locked(root / LOCKS / f"{key_of(key)}.lock", waiting, root)


def _paths(root: Path, description: Mapping[str, Any]) -> tuple[Path, Path]:
    """Files of the matrices and of their manifest."""
    stem = root / key_of(description)[:2] / key_of(description)
    return stem.with_suffix(".safetensors"), stem.with_suffix(".json")


def _checksum(report: Mapping[str, Any], matrices: Mapping[str, torch.Tensor]) -> str:
    parts: list[Any] = [report]
    for _, matrix in sorted(matrices.items()):
        parts += [list(matrix.shape), str(matrix.dtype), tensor_digest(matrix)]
    return key_of(parts)
