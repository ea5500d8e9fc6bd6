"""Make and save edits, and export saved edits: ``lm-edit edit`` and ``lm-edit export``.

The model class of evaluations makes the edits, so a saved edit equals the edit of an evaluation run. Edits that are in
the store are loaded from it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tqdm import tqdm

from edit_hooks.assets.demo_name import DEMO_NAME
from edit_hooks.deltas.apply import AppliedDeltas
from edit_hooks.deltas.delta import Delta
from edit_hooks.deltas.saving.export import export_merged, export_peft
from edit_hooks.deltas.saving.gguf_adapter import export_gguf, gguf_architecture
from edit_hooks.deltas.saving.saved import check_base, read_deltas, save_edits, saved_files, step_start, stream_folder
from edit_hooks.deltas.saving.truncation import adapter_name, editor_of, rank_of_edit, truncated
from edit_hooks.edit_report import EditReport
from edit_hooks.inference.effects.edit_effects import EditEffects
from edit_hooks.lm.editing.independent import FailedEdit
from edit_hooks.lm.model import EditedHFLM
from edit_hooks.lm.options.edit_sources import load_edited_cases
from edit_hooks.modeling.weights import has_quantized_weights
from edit_hooks.request import EditRequest, RequestGroup, require_subjects
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.outputs import check_output_folder

Grouping = Literal["independent", "joint", "sequential"]

FORMATS = ("peft", "gguf", "merged")
ADAPTERS = ("peft", "gguf")


class SavedEdit(NamedTuple):
    """A written file: its requests, facts about the edit, and the formats to which it can be exported.

    ``writes``: parts that the edit changes, as in :attr:`edit_hooks.deltas.delta.Delta.writes`.
    """

    file: Path
    requests: RequestGroup
    report: EditReport
    formats: tuple[str, ...]
    writes: tuple[str, ...] = ("weights",)


class EditExport(NamedTuple):
    """An exported edit.

    Attributes:
        folder: of the adapter or the checkpoint.
        loadable: the same edit for ``load_edit``; ``None`` where there is none yet.
        is_low_rank: whether an adapter can hold it.
        wrecked: names of files whose edits wreck the model, as measured when they were made.
        adapter: of an adapter: what a server needs to know.
        sum_nlls: of edits that were made apart: mean negative log-likelihood of their own targets, each edit alone and
            all together, in nats per token.
    """

    folder: Path
    loadable: str | Path | None
    is_low_rank: bool = True
    wrecked: tuple[str, ...] = ()
    adapter: AdapterFacts | None = None
    sum_nlls: tuple[float, float] | None = None


class AdapterFacts(NamedTuple):
    """An exported adapter.

    Attributes:
        name: under which to serve it; that of its content.
        rank: of all its maps.
        truncation: ``None`` for the whole edit.
    """

    name: str
    rank: int
    truncation: Truncation | None = None


class Truncation(NamedTuple):
    """What a smaller rank has changed.

    Attributes:
        rank: before.
        left_out: the largest share of an update's norm that was left out, over its maps.
        target_nlls: mean over the edits' own targets, of the whole edit and of the truncated one, in nats per token;
            ``None`` without a request.
        first_token_kls: divergence on neutral prompts from the unedited model, of both.
    """

    rank: int
    left_out: float
    target_nlls: tuple[float, float] | None
    first_token_kls: tuple[float, float]


class SavedEdits(NamedTuple):
    """Written edits in their order, and by case the reasons of edits that could not be made."""

    edits: list[SavedEdit]
    failed: dict[str, str]

    @property
    def wrecked(self) -> list[SavedEdit]:
        """The edits that wreck the model; of a stream, the steps after which it is wrecked."""
        return [edit for edit in self.edits if edit.report.effects.wrecked]


def make_edits(
    out: str | Path,
    edits: str,
    *,
    grouping: Grouping = "independent",
    num_edits: int | None = None,
    edit_batch_size: int | None = None,
    model_options: Mapping[str, object],
) -> SavedEdits:
    """Make edits and save them in a new folder.

    Args:
        edits: a benchmark, or a file of edit requests.
        grouping: ``independent`` (one file per request, each for the unedited model), ``joint`` (one file that writes
            all) or ``sequential`` (one file per step of a stream, to be applied together and in order).
        edit_batch_size: requests per step, for ``sequential``.
        model_options: options of :class:`EditedHFLM`: ``pretrained``, ``editor``, ``editor_args``, ``dtype``, and those
            of the benchmark's records, ``data``, ``subset``, ...

    Raises:
        EditingError: for a folder with files in it, and for options and requests that cannot be used.
    """
    out = check_output_folder(out)
    plan_options: dict[str, object] = {}
    if grouping != "independent":
        mode = "batch" if grouping == "joint" else "sequential"
        plan_options |= {"mode": mode, "edits": edits, "num_edits": num_edits}
    if grouping == "sequential":
        plan_options["edit_batch_size"] = edit_batch_size
    if num_edits is not None and num_edits < 1:
        raise EditingError(f"num_edits={num_edits}; at least one edit is needed.")
    lm = EditedHFLM(**model_options, **plan_options)
    settings = lm.options.data_settings(lm.is_demo)
    groups = lm.plan.groups or tuple(
        tuple(request.in_context(lm.edit_context) for request in case)
        for case in load_edited_cases(edits, settings, num_edits)
    )
    if lm.editor.needs_subject:
        require_subjects([request for group in groups for request in group], lm.editor.name)
    failed: dict[str, str] = {}
    written_edits: list[tuple[RequestGroup, EditReport, tuple[str, ...], tuple[str, ...]]] = []

    is_quantized = has_quantized_weights(lm.model)

    def finished() -> Iterator[tuple[RequestGroup, Delta]]:
        for group, edit in zip(groups, lm.session.edits(groups), strict=False):  # a stopped stream has fewer steps
            unusable = {**lm.plan.unusable, **edit.unusable} if isinstance(edit, Delta) else {}
            for request in group:
                if reason := edit.reason if isinstance(edit, FailedEdit) else unusable.get(request.key):
                    failed[str(request.case_id or request.text)] = reason
            written = tuple(request for request in group if request.key not in unusable)
            if isinstance(edit, Delta) and written:
                formats = _formats_of(edit, is_quantized=is_quantized)
                written_edits.append((written, edit.report(), formats, tuple(edit.writes)))
                yield written, edit

    config = lm.session.result_metadata()["editor_config"]
    metadata = {**_describe_model(lm), "editor": lm.options.editor, "config": config}
    files = save_edits(out, finished(), metadata, most=len(groups))
    if stopped := lm.session.result_metadata().get("stopped"):
        failed["stream"] = stopped
    saved = [SavedEdit(file, *edit) for file, edit in zip(files, written_edits, strict=True)]
    return SavedEdits(saved, failed)


def export_edits(
    paths: Sequence[str | Path],
    out: str | Path,
    file_format: str,
    model_options: Mapping[str, object],
    rank: int | None = None,
) -> EditExport:
    """Write the sum of saved edits as a LoRA adapter or as the checkpoint of the edited model.

    Args:
        paths: delta files, and folders of streams.
        file_format: ``peft`` or ``gguf`` (adapters), or ``merged`` (checkpoint).
        rank: of an adapter, at most; what is left out is measured.

    Raises:
        EditingError: for an unknown format, edits of another model, steps of a stream out of order, and dense edits as
            an adapter.
    """
    if file_format not in FORMATS:
        raise EditingError(f"format {file_format!r} is unknown. Accepted: {', '.join(FORMATS)}.")
    if rank is not None and file_format not in ADAPTERS:
        raise EditingError(f"--rank {rank} is for an adapter (--format peft); a checkpoint holds the whole edit.")
    out = check_output_folder(out)
    files = [file for path in paths for file in saved_files(path)]  # refused before a model is loaded
    lm = EditedHFLM(**model_options, mode="none")
    if file_format == "gguf":
        gguf_architecture(lm.config)
    base = _describe_model(lm)
    deltas = read_deltas(paths, lm.model, lm.identity)
    wrecked = tuple(file.name for file, one in zip(files, deltas, strict=True) if one.effects.wrecked)
    delta = deltas[0] if len(deltas) == 1 else Delta.summed(deltas)
    delta.meta = {**base, **delta.meta}
    check_base(delta, lm.model, lm.identity, "the edit")
    AppliedDeltas(lm.model).check(delta)
    sum_nlls = _nlls_in_sum(lm, deltas, delta)
    loadable = paths[0] if len(paths) == 1 else stream_folder(paths)
    if file_format in ADAPTERS:
        truncation = None
        if rank is not None and delta.is_low_rank and delta.factors and rank_of_edit(delta) > rank:
            requests = [EditRequest.from_dict(one) for part in deltas for one in part.meta.get("requests", ())]
            delta, truncation = _truncate(lm, delta, rank, requests)
        if file_format == "gguf":
            folder, used = export_gguf(delta, lm.config, out), None if truncation else loadable
        else:
            revision = None if (given := model_options.get("revision")) is None else str(given)
            base_model = None if lm.is_demo else str(lm.pretrained)
            folder, used = export_peft(delta, out, base_model=base_model, revision=revision), out
        facts = AdapterFacts(adapter_name(editor_of(delta.meta), delta.checksum()), rank_of_edit(delta), truncation)
        return EditExport(folder, used, True, wrecked, facts, sum_nlls)
    folder = export_merged(lm.model, lm.tokenizer, delta, out)
    return EditExport(folder, loadable, delta.is_low_rank, wrecked, sum_nlls=sum_nlls)


def _nlls_in_sum(lm: EditedHFLM, deltas: Sequence[Delta], total: Delta) -> tuple[float, float] | None:
    """:attr:`EditExport.sum_nlls`; ``None`` for one edit, steps of a stream, and edits without requests.

    The numbers of each edit alone are those from when it was made, if it was measured then.
    """
    parts = [[EditRequest.from_dict(one) for one in part.meta.get("requests", ())] for part in deltas]
    if len(deltas) == 1 or not any(parts) or any(step_start(part.meta) for part in deltas):
        return None
    requests = [request for part in parts for request in part]
    made = [_nlls_when_made(part) for part in deltas]
    missing = sum(len(part) for part, nlls in zip(parts, made, strict=True) if nlls is None)
    effects = EditEffects(lm.model, lm.tokenizer)
    with tqdm(total=len(requests) + missing, desc="Scoring the targets of the edits", unit="target") as bar:
        alone = [
            list(effects.target_nlls(part, delta, progress=bar.update)[0].values()) if nlls is None else nlls
            for part, delta, nlls in zip(parts, deltas, made, strict=True)
        ]
        (together,) = effects.target_nlls(requests, total, progress=bar.update)
    return statistics.fmean(chain.from_iterable(alone)), statistics.fmean(together[one.key] for one in requests)


def _nlls_when_made(delta: Delta) -> list[float] | None:
    """Negative log-likelihoods of an edit's targets as its report has them; ``None`` if they were not measured."""
    effects = delta.effects
    if effects.target_nll_after is None:
        return None
    return [after for _, after in effects.target_nlls] or [effects.target_nll_after]


def _truncate(lm: EditedHFLM, delta: Delta, rank: int, requests: Sequence[EditRequest]) -> tuple[Delta, Truncation]:
    """The edit with a smaller rank, and what that has changed: both are measured on their own targets and elsewhere."""
    smaller, left_out = truncated(delta, rank)
    effects = EditEffects(lm.model, lm.tokenizer)
    means = None
    if requests:
        whole, cut = effects.target_nlls(requests, delta, smaller)
        means = statistics.fmean(whole.values()), statistics.fmean(cut.values())
    divergences = effects.divergence(delta), effects.divergence(smaller)
    return smaller, Truncation(rank_of_edit(delta), max(left_out.values()), means, divergences)


def _formats_of(delta: Delta, *, is_quantized: bool) -> tuple[str, ...]:
    """The formats that can hold an edit of any family; none for hooks and contexts, none merged if quantized."""
    if delta.runtime_part is not None or not delta.parameter_names:
        return ()
    can_hold = {"peft": delta.is_low_rank, "merged": not is_quantized}
    return tuple(name for name, holds in can_hold.items() if holds)


def _describe_model(lm: EditedHFLM) -> dict[str, Any]:
    """Metadata of a saved edit about its model."""
    return {
        "model": lm.identity.to_dict(),
        "model_name": DEMO_NAME if lm.is_demo else str(lm.pretrained),
        "model_type": lm.config.model_type,
        "dtype": str(lm.model.dtype),
    }
