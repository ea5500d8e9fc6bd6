"""From requests to files and from files to models others can load: what ``lm-edit edit`` and ``lm-edit export`` do.

The model is loaded and edited by the same class that evaluates, so a saved edit is the edit of an evaluation run, and
comes from the store where that has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from edit_hooks.deltas.apply import AppliedDeltas
from edit_hooks.deltas.delta import Delta
from edit_hooks.deltas.export import export_merged, export_peft
from edit_hooks.deltas.saved import check_base, read_deltas, save_edits
from edit_hooks.lm.edit_sources import load_edits
from edit_hooks.lm.model import EditedHFLM
from edit_hooks.modeling.fingerprint import model_fingerprint
from edit_hooks.request import RequestGroup
from edit_hooks.utils.errors import EditingError

FORMATS = ("peft", "merged")


class MadeEdits(NamedTuple):
    """Written files, and the reasons of edits that could not be made by case."""

    files: list[Path]
    failed: dict[str, str]


def make_edits(
    out: str | Path,
    edits: str,
    *,
    how: str = "independent",
    num_edits: int | None = None,
    edit_batch_size: int | None = None,
    data: str | None = None,
    model_options: Mapping[str, Any],
) -> MadeEdits:
    """Make edits and save them in a new folder.

    Args:
        edits: a benchmark's name or a file of edit requests.
        how: ``independent`` (one file per request, each for the untouched model), ``joint`` (one file that writes all)
            or ``sequential`` (one file per step of a stream; they belong together, in order).
        edit_batch_size: requests per step, for ``sequential``.
        model_options: options of :class:`EditedHFLM`: ``pretrained``, ``editor``, ``editor_args``, ``dtype``, ...
    """
    if Path(out).exists() and any(Path(out).iterdir()):
        raise EditingError(f"{out} exists and is not empty; name a new folder.")
    chosen: dict[str, Any] = {"data": data}
    if how != "independent":
        chosen |= {"mode": "batch" if how == "joint" else "sequential", "edits": edits, "num_edits": num_edits}
    if how == "sequential":
        chosen["edit_batch_size"] = edit_batch_size
    lm = EditedHFLM(**model_options, **chosen)
    settings = {"data": data} if data else {"pretrained": None if lm.is_demo else True}
    groups = lm.plan.groups or tuple((request,) for request in load_edits(edits, settings, num_edits))
    saved: list[tuple[RequestGroup, Delta]] = []
    failed: dict[str, str] = {}
    for group, edit in zip(groups, lm.session.edits(groups), strict=False):  # a stopped stream has fewer steps
        if isinstance(edit, Delta):
            saved.append((group, edit))
        else:
            failed[str(group[0].case_id or group[0].text)] = edit.reason
    facts = lm.session.result_metadata()
    if facts.get("stopped"):
        failed["stream"] = facts["stopped"]
    metadata = {**_base(lm), "editor": lm.options.editor, "config": facts["editor_config"]}
    return MadeEdits(save_edits(out, saved, metadata), failed)


def export_edits(
    paths: Sequence[str | Path], out: str | Path, file_format: str, model_options: Mapping[str, Any]
) -> Path:
    """Write saved edits, added up, as a LoRA adapter (``peft``) or as the edited model's checkpoint (``merged``).

    Raises:
        EditingError: for edits of another model, steps of a stream out of order, and dense edits as an adapter.
    """
    if file_format not in FORMATS:
        raise EditingError(f"format {file_format!r} is not known. Accepted: {', '.join(FORMATS)}.")
    lm = EditedHFLM(**model_options, mode="none")
    base = _base(lm)
    deltas = read_deltas(paths, base["model"])
    delta = deltas[0] if len(deltas) == 1 else Delta.summed(deltas)
    delta.meta = {**base, **delta.meta}
    check_base(delta, base["model"], "the edit")
    AppliedDeltas(lm.model).check(delta)
    if file_format == "merged":
        return export_merged(lm.model, lm.tokenizer, delta, out)
    return export_peft(delta, out, base_model=str(lm.pretrained))


def _base(lm: EditedHFLM) -> dict[str, Any]:
    """What an edit says about the model it is for."""
    return {
        "model": model_fingerprint(lm.model),
        "model_name": str(lm.pretrained),
        "model_type": lm.config.model_type,
        "dtype": str(lm.model.dtype),
    }
