"""Saved edits: made once, kept in a folder, and used by later runs (``load_edit=``) and exports.

A saved edit knows the fingerprint of the model it was made for and the requests it writes. It is refused on any other
model, and so are steps of a stream that do not begin at the unedited model or do not follow one another.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from edit_hooks.deltas.apply import UNEDITED_STATE, AppliedDeltas
from edit_hooks.deltas.delta import Delta
from edit_hooks.deltas.export import CONFIG_NAME, read_peft
from edit_hooks.request import EditRequest, RequestGroup
from edit_hooks.utils.errors import EditingError

log = logging.getLogger(__name__)


INDEX_NAME = "edits.json"


def load_edit(path: str | Path, model: nn.Module, fingerprint: str) -> Delta:
    """A saved edit for ``model``: a delta file, a folder with exactly one, or a LoRA adapter folder.

    Args:
        fingerprint: of the model's weights, as :func:`edit_hooks.modeling.fingerprint.model_fingerprint` gives it.

    Raises:
        EditingError: for anything else, and for edits of another base model.
    """
    path = Path(path).expanduser()
    is_adapter = (path / CONFIG_NAME).is_file()
    delta = read_peft(path, model) if is_adapter else Delta.load(_delta_file(path))
    check_base(delta, fingerprint, str(path))
    AppliedDeltas(model).check(delta)
    return delta


def read_deltas(paths: Sequence[str | Path], fingerprint: str) -> list[Delta]:
    """Delta files in order, to be summed.

    Raises:
        EditingError: for files that are no saved edits, edits of another model, and steps of a stream out of order.
    """
    deltas = []
    for path in paths:
        delta = Delta.load(_delta_file(Path(path).expanduser()))
        check_base(delta, fingerprint, str(path), alone=False)
        deltas.append(delta)
    _check_chain([part for delta in deltas for part in _parts(delta.meta)], "the edits given")
    return deltas


def check_base(delta: Delta, fingerprint: str, source: str, alone: bool = True) -> None:
    """Refuse an edit that was made for other weights; one that does not say for which is taken with a warning.

    Args:
        alone: the edit is used by itself, so steps of a stream in it must begin at the unedited model.
    """
    parts = list(_parts(delta.meta))
    bases = {_base_of(part) for part in parts}
    for base in bases - {None, fingerprint}:
        raise EditingError(
            f"{source} was made for another model: fingerprint {str(base)[:16]}..., this model has "
            f"{fingerprint[:16]}.... Load the model it was made for, in the same dtype."
        )
    if None in bases:
        log.warning("%s does not say which model it was made for; only its shapes are checked.", source)
    if alone:
        _check_chain(parts, source)


def requests_of(delta: Delta) -> dict[str, EditRequest] | None:
    """The requests a saved edit writes, by key; ``None`` when it does not say."""
    records = [part.get("requests") for part in _parts(delta.meta)]
    if any(record is None for record in records):
        return None
    requests = [EditRequest.from_dict(record) for part in records for record in part or ()]
    return {request.key: request for request in requests}


def editor_of(delta: Delta) -> str | None:
    """Name of the editor that made a saved edit, if it says."""
    names = {part.get("editor") for part in _parts(delta.meta)}
    return " + ".join(sorted(filter(None, names))) or None


def save_edits(
    folder: str | Path, edits: Sequence[tuple[RequestGroup, Delta]], metadata: Mapping[str, Any]
) -> list[Path]:
    """Write one delta file per group of requests, and an index of them.

    Args:
        metadata: of every edit: ``model`` (fingerprint), ``editor``, ``config``, ...
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise EditingError(f"{folder} exists and is not empty; name a new folder.")
    folder.mkdir(parents=True, exist_ok=True)
    width = len(str(len(edits)))
    paths, index = [], []
    for number, (group, delta) in enumerate(edits):
        delta.meta |= {**metadata, "requests": [request.to_dict() for request in group]}
        path = folder / f"edit-{number:0{width}d}.safetensors"
        delta.save(path)
        diagnostics = {name: value for name, value in delta.diagnostics.items() if name != "losses"}
        index.append({"file": path.name, "requests": delta.meta["requests"], "diagnostics": diagnostics})
        paths.append(path)
    text = json.dumps({**metadata, "edits": index}, indent=2, ensure_ascii=False)
    (folder / INDEX_NAME).write_text(text + "\n", encoding="utf-8")
    return paths


def _delta_file(path: Path) -> Path:
    """The delta file meant by a path."""
    if not path.is_dir():
        return path
    files = sorted(path.glob("*.safetensors"))
    if (path / "config.json").is_file():
        raise EditingError(f"{path} is a whole model, not an edit; evaluate it with pretrained={path}.")
    if len(files) != 1:
        raise EditingError(
            f"{path} holds {len(files)} saved edits; name one of the files, or add them up with "
            f"lm-edit export {path}/*.safetensors --format peft --out <folder>."
        )
    return files[0]


def _parts(meta: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The metadata of every edit in a sum."""
    if "parts" not in meta:
        yield meta
        return
    inherited = {name: value for name, value in meta.items() if name != "parts"}
    for part in meta["parts"]:
        for inner in _parts(part):
            yield {**inherited, **inner}


def _base_of(meta: Mapping[str, Any]) -> str | None:
    return meta.get("model") or (meta.get("description") or {}).get("model")


def _check_chain(parts: Sequence[Mapping[str, Any]], source: str) -> None:
    """Steps of a stream must begin at the unedited model and each begin where the one before ended."""
    state: Any = UNEDITED_STATE
    for number, part in enumerate(parts):
        before = (part.get("description") or {}).get("state_before") or part.get("state_before")
        if before is None:
            continue
        if before != state:
            raise EditingError(
                f"{source}: edit {number} is a step of a stream that was written on other weights than those before "
                "it leave. Give all steps of the stream from the first one, in order."
            )
        state = part.get("state_after")
