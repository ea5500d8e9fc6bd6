"""Second moments ahead of edits: collect, report and list them.

An edit looks up its second moments by their full description: identity of model and tokenizer, module, text, token
budget, length limit, precision. So an editor finds the second moments that were collected here with its own settings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from edit_hooks.base.model_support import require_support
from edit_hooks.base.registry import load_editor
from edit_hooks.base.wrapping.wrapper import PostProcessingEditor
from edit_hooks.lm.model import EditedHFLM
from edit_hooks.locate.editor import LocateThenEditEditor
from edit_hooks.locate.moments.corpora import SELF, check_source
from edit_hooks.locate.moments.moment_documents import check_length
from edit_hooks.locate.moments.null_space import DEFAULT_ENERGY, Projector, null_space_of
from edit_hooks.locate.moments.second_moments import MomentSettings, second_moments
from edit_hooks.modeling.architectures import check_layers, input_device
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.storage.files import cache_root, require_folder
from edit_hooks.utils.storage.hashing import key_of
from edit_hooks.utils.storage.json_io import read_json
from edit_hooks.utils.storage.outputs import check_writable_folder

log = get_logger(__name__)

# Editor settings that determine which second moments the editor looks up.
MOMENT_SETTINGS = ("layers", "second_moments", "moment_tokens", "moment_length", "moment_dtype", "seed")


@dataclass(frozen=True)
class LayerReport:
    """The second moment of one layer.

    Attributes:
        report: tokens, width, trace, eigenvalues, condition number, warnings; see
            :mod:`edit_hooks.locate.moments.second_moments`.
        projector: the null-space projector, if a threshold or an energy is set.
        is_new: whether it was collected in this call; otherwise it was loaded.
    """

    layer: int
    report: dict[str, Any]
    projector: Projector | None
    is_new: bool

    @property
    def warnings(self) -> list[str]:
        """Warnings about the matrix and its projector."""
        return self.report["warnings"] if self.projector is None else self.projector.warnings


class NullSpaceLimit(NamedTuple):
    """The rule that selects the null space: an eigenvalue threshold or a share of the trace; at most one is set."""

    threshold: float | None
    energy: float | None


class StoredProjector(NamedTuple):
    """A stored null-space projector.

    Attributes:
        rule: the threshold or energy behind it, as text.
        rank: dimension of the null space. width: that of the keys.
    """

    rule: str
    rank: int
    width: int


@dataclass(frozen=True)
class StoredMoment:
    """A stored second moment and the projectors computed from it."""

    path: Path
    description: dict[str, Any]
    report: dict[str, Any]
    num_bytes: int
    projectors: list[StoredProjector]


def prepare_stats(
    model_options: Mapping[str, object],
    *,
    editor: str | None = None,
    settings: Mapping[str, Any] | None = None,
    threshold: float | None = None,
    energy: float | None = None,
    folder: Path | None = None,
    quiet: bool = False,
) -> list[LayerReport]:
    """Load or collect second moments, and projectors if a threshold or an energy is set.

    Args:
        model_options: options of :class:`EditedHFLM`.
        editor: collect for this editor: its configuration for the model completes ``settings``.
        settings: of :data:`MOMENT_SETTINGS`, with an editor any of its settings. Without an editor ``layers`` is
            required.
        threshold, energy: of the projector, see :func:`~edit_hooks.locate.moments.null_space.null_space_of`. By default
        those     of the editor, if it projects.
        folder: of the matrices; ``<cache>/stats`` by default.

    Raises:
        EditingError: for an editor that uses no second moments, missing layers, text that cannot be read, and a model
            whose weights cannot be edited.
    """
    settings = dict(settings or {})
    limit = NullSpaceLimit(threshold, energy)
    locate_editor = _load_locate_editor(editor, settings) if editor else None
    if locate_editor is None and not settings.get("layers"):
        raise EditingError("no layers are named; use --layers 4 5 6, or --editor memit for the layers it would edit.")
    if threshold is not None and energy is not None:
        raise EditingError("the null space is defined by a threshold or by an energy, not by both; drop one of them.")
    root = check_writable_folder(folder or cache_root() / "stats")
    lm = EditedHFLM(**model_options, mode="none")
    if locate_editor is not None:
        settings, limit = _settings_of(locate_editor, lm, limit)
    check_layers(settings["layers"], lm.outline)
    check_length(lm.outline, settings.get("moment_length"))
    stored_keys = {manifest.stem for manifest in root.rglob("*.json")}
    moment_settings = MomentSettings(
        settings.get("second_moments") or SELF,
        num_tokens=settings.get("moment_tokens"),
        max_length=settings.get("moment_length"),
        seed=settings.get("seed") or 0,
        dtype=settings.get("moment_dtype") or "float32",
    )
    check_source(moment_settings.source)  # while no weight is loaded
    require_support(lm.model)
    moments = second_moments(lm.model, lm.tokenizer, settings["layers"], moment_settings, folder=root, quiet=quiet)
    reports = []
    for layer, moment in moments.items():
        projector = None
        if limit != NullSpaceLimit(None, None):
            share = DEFAULT_ENERGY if limit.energy is None else limit.energy
            projector = null_space_of(moment, limit.threshold, share, input_device(lm.model))
        key = key_of(moment.report["description"])  # manifests are named after it
        if not any(root.rglob(f"{key}.json")):
            raise EditingError(
                f"the second moment of layer {layer} cannot be written to {root}; free some space there."
            )
        is_new = key not in stored_keys
        reports.append(LayerReport(layer, moment.report, projector, is_new))
    return reports


def list_stored_moments(folder: Path | None = None) -> list[StoredMoment]:
    """All stored second moments, sorted by model, text and layer; unreadable files are logged and skipped."""
    root = require_folder(folder or cache_root() / "stats", "folder of matrices")
    projectors = _list_projectors(root)
    moments = []
    for manifest in root.rglob("*.json"):
        try:
            record = read_json(manifest, finite=False)
            description, report = record["description"], record["report"]
            if key_of(description) != manifest.stem:
                raise EditingError("it does not describe this file")
        except (ValueError, KeyError, TypeError) as error:
            log.warning("%s cannot be read (%r); an edit that needs it collects it again.", manifest, error)
            continue
        matrix = manifest.with_suffix(".safetensors")
        if matrix.exists():
            of_moment = projectors.get(key_of(description), [])
            moments.append(StoredMoment(matrix, description, report, matrix.stat().st_size, of_moment))
    return sorted(moments, key=_sort_key)


def corpus_label(corpus: Mapping[str, Any]) -> str:
    """A short name for the text behind a second moment.

    Args:
        corpus: the entry ``corpus`` of its description.
    """
    if corpus["kind"] == "texts":
        return f"{corpus['documents']} texts {corpus['sha256'][:8]}"
    if corpus["kind"] == "hub":
        config = f"/{corpus['config']}" if corpus["config"] else ""
        drawn = f", {corpus['documents']} drawn" if "documents" in corpus else ""
        return f"{corpus['dataset']}{config}@{corpus['revision'][:8]}{drawn} seed {corpus['seed']}"
    return f"{corpus['kind']} seed {corpus['seed']}"


def _sort_key(moment: StoredMoment) -> tuple[str, str, int]:
    description = moment.description
    return key_of(description["model"]), corpus_label(description["corpus"]), description["layer"]


def _list_projectors(root: Path) -> dict[str, list[StoredProjector]]:
    """Stored projectors by the key of their second moment."""
    projectors: dict[str, list[StoredProjector]] = {}
    for path in sorted(root.rglob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                header = file.metadata() or {}
                if "projector" not in header:  # a second moment
                    continue
                key, numbers = json.loads(header["key"]), json.loads(header["projector"])
                width, columns = file.get_slice("basis").get_shape()
            if key_of(key) != path.stem:
                raise EditingError("it does not describe this file")
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s cannot be read (%s); an edit that needs it computes it again.", path, error)
            continue
        rule = f"energy {key['energy']:g}" if key["threshold"] is None else f"threshold {key['threshold']:g}"
        rank = width - columns if numbers["is_complement"] else columns
        projectors.setdefault(key_of(key["projector of"]), []).append(StoredProjector(rule, rank, width))
    return projectors


def _load_locate_editor(name: str, settings: Mapping[str, Any]) -> LocateThenEditEditor[Any]:
    """Load the editor that looks up second moments: the named one, or the base of a post-processing editor."""
    editor = load_editor(name, settings)
    base = editor.base if isinstance(editor, PostProcessingEditor) else editor
    if not isinstance(base, LocateThenEditEditor):
        raise EditingError(f"editor {name!r} uses no second moments; use --layers and --source without an editor.")
    return base


def _settings_of(
    editor: LocateThenEditEditor[Any], lm: EditedHFLM, limit: NullSpaceLimit
) -> tuple[dict[str, Any], NullSpaceLimit]:
    """The moment settings of an editor, and its null-space rule unless one is set."""
    config = editor.default_config(lm.outline)
    settings = {name: getattr(config, name) for name in MOMENT_SETTINGS}
    if settings["second_moments"] is None:
        raise EditingError(
            f"editor {editor.name!r} uses no second moments in its configuration for this model. Name the text with "
            "--source, and configure the edit alike: editor_args=second_moments:self."
        )
    if limit == NullSpaceLimit(None, None) and hasattr(config, "nullspace_threshold"):
        limit = NullSpaceLimit(config.nullspace_threshold, config.nullspace_energy)
    return settings, limit
