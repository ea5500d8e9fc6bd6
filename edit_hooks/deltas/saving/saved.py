"""Folders of saved edits, for later runs (``load_edit=``) and exports.

A saved edit contains its requests and the identity of its base model. It is refused on other weights, and loaded with
a warning if another part of the identity differs. Steps of a stream are refused if they do not start at the unedited
model or do not follow one another.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from edit_hooks.deltas.apply import UNEDITED_STATE, AppliedDeltas
from edit_hooks.deltas.delta import Delta
from edit_hooks.deltas.saving.export import CONFIG_NAME, read_peft, shared_meta
from edit_hooks.deltas.schema import of_file
from edit_hooks.modeling.fingerprint.base_model import compare_models
from edit_hooks.modeling.fingerprint.identity import ModelIdentity
from edit_hooks.modeling.tensors import read_header
from edit_hooks.request import EditRequest, RequestGroup
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.storage.files import user_path, without_folders, write_atomically
from edit_hooks.utils.storage.json_io import json_text, read_json
from edit_hooks.utils.storage.outputs import check_output_folder

log = get_logger("lm_eval.edited_hf")

INDEX_NAME = "edits.json"
MAX_NAMED = 3  # missing files in a message
_SAVED = re.compile(r"edit-\d+\.safetensors")  # the files beside it


class LoadedEdit(NamedTuple):
    """A saved edit, and how its model differs from the one it was loaded for.

    Attributes:
        differences: entries of the two identities that differ, and what could not be compared.
    """

    delta: Delta
    differences: list[str]


def load_edit(path: str | Path, model: nn.Module, identity: ModelIdentity) -> LoadedEdit:
    """Load an edit of ``model``: a delta file, a folder of one edit or of a stream, or a LoRA adapter folder.

    The edit of a stream is the sum of its steps.

    Args:
        identity: of the model and its tokenizer.

    Raises:
        EditingError: for other paths, damaged files and edits of other weights.
    """
    delta = read_edit(path, model)
    return LoadedEdit(delta, check_base(delta, model, identity, str(path)))


def read_edit(path: str | Path, outline: nn.Module) -> Delta:
    """As :func:`load_edit`, for a model without weights: only names and shapes are checked."""
    path = user_path(path, "saved edit")
    if (path / CONFIG_NAME).is_file():
        delta = read_peft(path, outline)
    else:
        files = saved_files(path)
        if path.is_dir() and any(_SAVED.fullmatch(file.name) for file in files):
            _warn_of_incomplete([path])
        delta = Delta.load(files[0]) if len(files) == 1 else Delta.summed(map(Delta.load, files))
    with of_file(path):
        AppliedDeltas(outline).check(delta)
    return delta


def read_deltas(paths: Sequence[str | Path], model: nn.Module, identity: ModelIdentity) -> list[Delta]:
    """Load delta files, and folders of streams, in order, to be summed.

    Raises:
        EditingError: for files that are not saved edits, edits of other weights, and steps of a stream out of order.
    """
    deltas = []
    files = [file for path in paths for file in saved_files(path)]
    _warn_of_incomplete({file.parent for file in files if _SAVED.fullmatch(file.name)})
    for file in files:
        delta = Delta.load(file)
        _compare_models(delta, identity, str(file))
        deltas.append(delta)
    _check_chain([delta.meta for delta in deltas], "these edits")
    edits = [edit for delta in deltas for edit in _steps(delta.meta)]
    if len(edits) > 1 and not all(step_start(edit) for edit in edits):
        log.warning(
            "%d edits are added, and not all of them are steps of one stream: each was made and measured without the "
            "others, and the effect of their sum is unknown. Evaluate it, or make them together (lm-edit edit "
            "--sequential, --joint).",
            len(edits),
        )
    return deltas


def saved_files(path: str | Path) -> list[Path]:
    """The delta files of a saved edit: a single one, or the steps of a stream in order.

    Reads headers alone.

    Args:
        path: a delta file, or a folder of :func:`save_edits` with one edit or a whole stream.

    Raises:
        EditingError: for other paths, folders of independent edits and those that lack a step.
    """
    path = user_path(path, "saved edit")
    if not path.is_dir():
        read_header(path, "saved edit")
        return [path]
    if (path / "config.json").is_file():
        raise EditingError(f"{path} is a whole model, not an edit; evaluate it with pretrained={path},mode=none.")
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise EditingError(f"{path} holds no saved edit; name a folder or a file that lm-edit edit has written.")
    _require_listed(path, files)
    metas = [Delta.load_meta(file) for file in files] if len(files) > 1 else []
    if any(step_start(meta) is None for meta in metas):
        raise EditingError(
            f"{path} holds {len(files)} saved edits, each made without the others. Name one of the files, or make the "
            "edits in one stream, whose folder can be named: lm-edit edit --sequential."
        )
    _check_chain(metas, str(path))
    return files


def stream_folder(paths: Sequence[str | Path]) -> Path | None:
    """The folder of a stream whose steps these are, all of them in order; ``None`` for other edits."""
    files = [user_path(path, "saved edit") for path in paths]
    try:
        return files[0].parent if len(files) > 1 and saved_files(files[0].parent) == files else None
    except EditingError:
        return None


def check_base(delta: Delta, model: nn.Module, identity: ModelIdentity, source: str) -> list[str]:
    """Refuse an edit of other weights, and warn about one whose model differs in another part or is not known.

    An edit is an update of weights, so on other weights it has no meaning. With another configuration, tokenizer or
    release of a library it can be measured, but it is not the edit that would be made there.

    Args:
        identity: of the model and its tokenizer.
        source: path or name of the edit, for messages.

    Returns:
        The differences that were logged, for result files.

    Raises:
        EditingError: for edits of other weights, and steps of a stream that do not start at the unedited model.
    """
    found = _compare_models(delta, identity, source)
    _check_chain([delta.meta], source)
    return found


def requests_of(delta: Delta) -> dict[str, EditRequest] | None:
    """The requests of a saved edit by the key of the edit without its context.

    ``None`` if the file does not contain them.
    """
    records = [edit.get("requests") for edit in _summand_metadata(delta.meta)]
    if any(record is None for record in records):
        return None
    requests = [EditRequest.from_dict(request) for record in records for request in record or ()]
    return {request.without_context.key: request for request in requests}


def editor_of(delta: Delta) -> str | None:
    """Name of the editor of a saved edit; ``None`` if the file does not contain it."""
    names = {edit.get("editor") for edit in _summand_metadata(delta.meta)}
    return " + ".join(sorted(filter(None, names))) or None


def save_edits(
    folder: str | Path, edits: Iterable[tuple[RequestGroup, Delta]], metadata: Mapping[str, Any], most: int
) -> list[Path]:
    """Write one delta file per group of requests, and an index, which comes last: without it, files may be missing.

    Args:
        folder: a new or empty folder.
        edits: read one by one.
        most: the largest possible number of edits, which decides how many digits are in the names of files.
        metadata: entries of every edit: ``model`` (parts of its identity), ``editor``, ``config``, ...

    Returns:
        The delta files, in order.

    Raises:
        EditingError: the folder is not empty, or another process has begun to write edits there meanwhile.
        OSError: a file cannot be written; those before it are removed.
    """
    folder = check_output_folder(folder)
    is_new = not folder.exists()
    paths: list[Path] = []
    try:
        _write_edits(folder, edits, metadata, most, paths)
    except BaseException:
        with contextlib.suppress(OSError):  # the error of the block matters, not that of the clean-up
            for path in paths:
                path.unlink(missing_ok=True)
            if is_new and folder.exists():
                folder.rmdir()
        raise
    return paths


def _write_edits(
    folder: Path,
    edits: Iterable[tuple[RequestGroup, Delta]],
    metadata: Mapping[str, Any],
    most: int,
    paths: list[Path],
) -> None:
    """Write the files of :func:`save_edits`; ``paths`` gets those that this process has begun to write."""
    width = len(str(most))
    index = []
    for number, (group, delta) in enumerate(edits):
        path = folder / f"edit-{number:0{width}d}.safetensors"
        if not paths:  # not before there is an edit, which may take hours
            _claim(path)
        paths.append(path)
        delta.meta |= {**metadata, "requests": [request.to_dict() for request in group]}
        # files are passed on: no path of this machine, where digests identify what is behind one
        saved = replace(
            delta,
            meta=shared_meta(delta.meta),
            diagnostics=without_folders(delta.diagnostics),
            warnings=without_folders(delta.warnings),
        )
        saved.save(path)
        facts = saved.report().without_losses().to_json()
        index.append({"file": path.name, "requests": delta.meta["requests"], "diagnostics": facts})
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / INDEX_NAME, json_text({**shared_meta(metadata), "edits": index}, indent=2) + "\n")


def _claim(path: Path) -> None:
    """Create the first file of a folder, which only one process can."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        raise EditingError(
            f"another process has begun to write edits into {path.parent}. Give each an output folder of its own; "
            "finished edits come from the store."
        ) from None


def _warn_of_incomplete(folders: Iterable[Path]) -> None:
    """Log the folders of :func:`save_edits` that lack the index, which it writes last."""
    for folder in sorted(folders):
        if not (folder / INDEX_NAME).is_file():
            log.warning(
                "%s has no %s, which is written after the last edit: its edits may be the first of several, as after a "
                "kill. Make them again in a new folder (finished ones come from the store).",
                folder,
                INDEX_NAME,
            )


def _require_listed(folder: Path, files: Sequence[Path]) -> None:
    """Refuse a folder without some of the files that its index lists, as after an interrupted copy."""
    index = folder / INDEX_NAME
    if not index.is_file():
        return
    try:
        listed = [str(entry["file"]) for entry in read_json(index, "list of saved edits", finite=False)["edits"]]
    except (KeyError, TypeError) as error:
        raise EditingError(f"{index} is damaged: {error!r}; copy the folder again.") from None
    if missing := sorted({*listed} - {file.name for file in files}):
        raise EditingError(
            f"{folder} lacks {', '.join(missing[:MAX_NAMED])}{' ...' * (len(missing) > MAX_NAMED)}, "
            f"{len(missing)} of the {len(listed)} edits in its {INDEX_NAME}. Copy the folder again, or name files."
        )


def _summand_metadata(meta: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Metadata of the edits in a sum, in order; summands inherit the entries of the sum."""
    if "parts" not in meta:
        yield meta
        return
    inherited = {name: value for name, value in meta.items() if name != "parts"}
    for summand in meta["parts"]:
        for edit in _summand_metadata(summand):
            yield {**inherited, **edit}


def _compare_models(delta: Delta, identity: ModelIdentity, source: str) -> list[str]:
    """Differences between the model of an edit and this one; other weights are an error."""
    bases = []
    for edit in _summand_metadata(delta.meta):
        base = edit.get("model") or (edit.get("description") or {}).get("model")
        if base not in bases:
            bases.append(base)
    found: list[str] = []
    for base in bases:
        found += [text for text in compare_models(base, identity, source) if text not in found]
    return found


def _check_chain(edits: Sequence[Mapping[str, Any]], source: str) -> None:
    """Refuse steps of a stream unless the first starts at the unedited model and each other where the last ended."""
    state: object = UNEDITED_STATE
    for number, edit in enumerate(step for meta in edits for step in _steps(meta)):
        state_before = step_start(edit)
        if state_before is None:
            continue
        if state_before != state:
            raise EditingError(
                f"{source}: edit {number} is a step of a stream, and its weights before the step are not those that "
                "the edits before it leave. Give all steps of the stream from the first one, in order, or their folder."
            )
        state = edit.get("state_after")


def _steps(meta: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Metadata of the edits in a sum, in order; a step of a stream is one edit, also if it is itself a sum."""
    if "parts" not in meta or step_start(meta) is not None:
        yield meta
        return
    for summand in meta["parts"]:
        yield from _steps(summand)


def step_start(edit: Mapping[str, Any]) -> object:
    """Fingerprint of the weights before a step of a stream; ``None`` for other edits."""
    return (edit.get("description") or {}).get("state_before") or edit.get("state_before")
