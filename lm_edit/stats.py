"""Second moments ahead of time: collect what a later edit will ask for, say how good it is, list what is kept.

An edit looks its second moments up under their complete description (model, module, text, token budget, length cap,
precision, tokenizer). What is collected here with an editor's own settings is therefore found by that editor.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from edit_hooks.base.registry import load_editor
from edit_hooks.base.wrapper import PostProcessingEditor
from edit_hooks.lm.model import EditedHFLM
from edit_hooks.locate.corpora import SELF
from edit_hooks.locate.editor import LocateThenEditEditor
from edit_hooks.locate.null_space import DEFAULT_ENERGY, Projector, null_space_of
from edit_hooks.locate.second_moments import MomentSettings, second_moments
from edit_hooks.locate.solve import SecondMoment
from edit_hooks.modeling.architectures import check_layers, input_device
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.files import cache_root

log = logging.getLogger(__name__)


# Settings of an editor that decide which second moments it looks up.
MOMENT_SETTINGS = ("layers", "second_moments", "moment_tokens", "moment_length", "moment_dtype", "seed")


@dataclass(frozen=True)
class LayerReport:
    """What is known about one layer's second moment.

    Attributes:
        report: tokens, width, trace, eigenvalues, condition number, warnings; see
            :mod:`edit_hooks.locate.second_moments`.
        projector: the null-space projector, where one was asked for.
        is_new: collected in this call, not read.
    """

    layer: int
    report: dict[str, Any]
    projector: Projector | None
    is_new: bool

    @property
    def warnings(self) -> list[str]:
        """What users should be told about this matrix and its projector."""
        return self.report["warnings"] if self.projector is None else self.projector.warnings


@dataclass(frozen=True)
class Stored:
    """A kept second moment, and (threshold or energy, rank, width) of the projectors made from it."""

    path: Path
    description: dict[str, Any]
    report: dict[str, Any]
    num_bytes: int
    projectors: list[tuple[str, int, int]] = field(default_factory=list)


def prepare_stats(
    model_options: Mapping[str, Any],
    *,
    editor: str | None = None,
    settings: Mapping[str, Any] | None = None,
    threshold: float | None = None,
    energy: float | None = None,
    folder: Path | None = None,
    quiet: bool = False,
) -> list[LayerReport]:
    """Collect (or find) second moments, and projectors where a threshold or an energy is given.

    Args:
        model_options: options of :class:`EditedHFLM`.
        editor: look up what this editor would: its configuration for the model fills in what ``settings`` leave out.
        settings: of :data:`MOMENT_SETTINGS`; with an editor any of its settings. Without one ``layers`` is needed.
        threshold, energy: of the projector, see :func:`~edit_hooks.locate.null_space.null_space_of`; an editor
            that projects brings its own.

    Raises:
        EditingError: for an editor that uses no second moments, missing layers, and text that cannot be read.
    """
    given = dict(settings or {})
    chosen = _editor(editor, given) if editor else None
    if chosen is None and not given.get("layers"):
        raise EditingError("say which layers: --layers 4 5 6, or --editor memit for the layers that editor would edit.")
    if threshold is not None and energy is not None:
        raise EditingError("the null space is given by a threshold or by an energy, not by both.")
    lm = EditedHFLM(**model_options, mode="none")
    model, tokenizer = lm.model, lm.tokenizer
    if chosen is not None:
        config: Any = chosen.default_config(model)
        given = {name: getattr(config, name) for name in MOMENT_SETTINGS}
        if threshold is None and energy is None and hasattr(config, "nullspace_threshold"):
            threshold, energy = config.nullspace_threshold, config.nullspace_energy
        if given["second_moments"] is None:
            raise EditingError(
                f"editor {editor!r} uses no second moments as it is configured for this model; say which with "
                "--source, and give the edit the same: editor_args=second_moments:self."
            )
    check_layers(given["layers"], model)
    root = folder or cache_root() / "stats"
    before = set(root.rglob("*.json"))
    moment_settings = MomentSettings(
        given.get("second_moments") or SELF,
        num_tokens=given.get("moment_tokens"),
        max_length=given.get("moment_length") or MomentSettings.max_length,
        seed=given.get("seed") or 0,
        dtype=given.get("moment_dtype") or "float32",
    )
    moments = second_moments(model, tokenizer, given["layers"], moment_settings, folder=root, quiet=quiet)
    new = {json.loads(path.read_text(encoding="utf-8"))["description"]["layer"] for path in _since(root, before)}
    return [
        LayerReport(layer, moment.report, _projector(moment, threshold, energy, input_device(model)), layer in new)
        for layer, moment in moments.items()
    ]


def stored_stats(folder: Path | None = None) -> list[Stored]:
    """Everything that is kept, by model, text and layer; files that cannot be read are named in the log."""
    root = folder or cache_root() / "stats"
    projectors: dict[str, list[tuple[str, int, int]]] = {}
    for path in sorted(root.rglob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                header = file.metadata() or {}
                if "projector" not in header:
                    continue
                key, numbers = json.loads(header["key"]), json.loads(header["projector"])
                width, columns = file.get_slice("basis").get_shape()
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            log.warning("%s cannot be read (%s); an edit that needs it makes it again.", path, error)
            continue
        named = f"energy {key['energy']:g}" if key["threshold"] is None else f"threshold {key['threshold']:g}"
        rank = width - columns if numbers["is_complement"] else columns
        projectors.setdefault(json.dumps(key["projector of"], sort_keys=True), []).append((named, rank, width))
    found = []
    for manifest in root.rglob("*.json"):
        try:
            record = json.loads(manifest.read_text(encoding="utf-8"))
            description, report = record["description"], record["report"]
        except (OSError, ValueError, KeyError) as error:
            log.warning("%s cannot be read (%r); an edit that needs it collects it again.", manifest, error)
            continue
        matrix = manifest.with_suffix(".safetensors")
        if matrix.exists():
            kept = projectors.get(json.dumps(description, sort_keys=True), [])
            found.append(Stored(matrix, description, report, matrix.stat().st_size, kept))
    return sorted(found, key=lambda entry: (entry.description["model"], corpus_name(entry), entry.description["layer"]))


def corpus_name(entry: Stored) -> str:
    """The text behind a matrix in a few words."""
    corpus = entry.description["corpus"]
    if corpus["kind"] == "texts":
        return f"{corpus['documents']} texts {corpus['sha256'][:8]}"
    if corpus["kind"] == "hub":
        config = f"/{corpus['config']}" if corpus["config"] else ""
        return f"{corpus['dataset']}{config}@{corpus['revision'][:8]} seed {corpus['seed']}"
    return f"{corpus['kind']} seed {corpus['seed']}"


def _editor(name: str, settings: Mapping[str, Any]) -> LocateThenEditEditor[Any]:
    """The editor whose second moments are meant: itself, or the one it post-processes."""
    editor = load_editor(name, settings)
    base = editor.base if isinstance(editor, PostProcessingEditor) else editor
    if not isinstance(base, LocateThenEditEditor):
        raise EditingError(f"editor {name!r} uses no second moments; name layers and text without an editor.")
    return base


def _projector(
    moment: SecondMoment, threshold: float | None, energy: float | None, device: torch.device
) -> Projector | None:
    if threshold is None and energy is None:
        return None
    return null_space_of(moment, threshold, DEFAULT_ENERGY if energy is None else energy, device)


def _since(root: Path, before: set[Path]) -> list[Path]:
    return [path for path in root.rglob("*.json") if path not in before]
