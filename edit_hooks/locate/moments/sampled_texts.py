"""Files of the text that was sampled from a model, so that further blocks need no second sampling of it.

On a CPU, sampling takes most of the time in which second moments are collected. The text depends on the model, the
seed, the number of tokens and the length limit, and not on the blocks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from edit_hooks.modeling.fingerprint.tensor_hash import tensor_digest
from edit_hooks.modeling.tensors import read_tensors, write_tensors
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.storage.files import write_to_cache
from edit_hooks.utils.storage.hashing import key_of

log = get_logger(__name__)
FORMAT = "lm-eval-editing/sampled-text/1"
FOLDER = "texts"


def text_file(root: Path, description: Mapping[str, Any]) -> Path:
    """The file of the documents that ``description`` determines."""
    return root / FOLDER / f"{key_of({'format': FORMAT, **description})}.safetensors"


def read_text_file(path: Path) -> list[list[int]] | None:
    """Token ids of the documents; ``None`` without a file, and with a warning for a damaged one."""
    if not os.path.lexists(path):
        return None
    try:
        header, tensors = read_tensors(path, "file of sampled text")
        ids_N, length_D = tensors["ids"], tensors["lengths"]
        if header.get("checksum") != _checksum(ids_N, length_D):
            raise EditingError("its checksum differs")
        return [ids.tolist() for ids in ids_N.split(length_D.tolist())]
    except Exception as error:  # any damage: report it and sample again
        log.warning("cannot use the sampled text in %s (%s); it is sampled again.", path, error)
        return None


def keep_documents(path: Path, documents: Iterator[list[int]]) -> Iterator[list[int]]:
    """Yield the documents, and write them when the last one is done."""
    kept: list[list[int]] = []
    for document in documents:
        kept.append(document)
        yield document
    if kept:
        write_text_file(path, kept)


def write_text_file(path: Path, documents: Sequence[Sequence[int]]) -> None:
    """Write the documents; a disk that does not take them is logged."""
    ids_N = torch.tensor([token for document in documents for token in document], dtype=torch.int32)
    length_D = torch.tensor([len(document) for document in documents])
    header = {"format": FORMAT, "checksum": _checksum(ids_N, length_D)}
    write_to_cache(path, lambda: write_tensors(path, {"ids": ids_N, "lengths": length_D}, header))


def _checksum(ids_N: torch.Tensor, length_D: torch.Tensor) -> str:
    return key_of([tensor_digest(ids_N), tensor_digest(length_D)])
