"""Hidden states of prompts and of their perturbed versions, for maps of an embedding space: ``lm-edit embed``.

The instances are those of EVK-Bench (:mod:`lm_eval_tasks.protocols.stability`): same noise, same state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from edit_hooks.assets.demo_name import DEMO_NAME
from edit_hooks.deltas.apply import AppliedDeltas, require_no_context
from edit_hooks.deltas.delta import Delta
from edit_hooks.deltas.saving.saved import editor_of, read_deltas, saved_files
from edit_hooks.inference.batching import limits_for
from edit_hooks.inference.effects.states import states_under
from edit_hooks.inference.items import StateItem
from edit_hooks.lm.model import EditedHFLM
from edit_hooks.modeling.hooks import frozen
from edit_hooks.modeling.tensors import write_tensors
from edit_hooks.state_reading import StateReading
from edit_hooks.utils.errors import EditingError, UnusableRequestError
from edit_hooks.utils.storage.files import sha256_of, write_atomically
from edit_hooks.utils.storage.json_io import json_text
from lm_eval_tasks.common.records.benchmark import find_benchmark
from lm_eval_tasks.common.records.cases import NEIGHBORHOOD, Case
from lm_eval_tasks.common.settings import Settings
from lm_eval_tasks.protocols.stability import EVK_NOISE_SEED, EVK_STATE, perturbed_prompts, sigma_of
from lm_eval_tasks.report.portable import portable

FORMAT = "lm-eval-editing/embeddings/1"
EDIT = "edit"  # kind of the edit prompts as they are


class VectorFiles(NamedTuple):
    """A written file of vectors, its description, and how many prompts of each kind it has."""

    vectors: Path
    description: Path
    counts: Mapping[str, int]
    skipped: Mapping[str, int]


def write_embeddings(
    out: Path,
    prompts: str,
    settings: Settings,
    *,
    num_prompts: int,
    edits: Sequence[str | Path] = (),
    model_options: Mapping[str, object],
) -> VectorFiles:
    """Write the hidden states of a benchmark's prompts under the unedited and an edited model.

    ``out`` gets the tensor ``unedited`` [N, d], and ``edited`` [N, d] with ``edits``, in float32. A JSON file of the
    same name describes the N rows.

    Args:
        prompts: a benchmark; its edit prompts, their perturbed versions and its neighborhood prompts are embedded.
        settings: those of the benchmark's records and of :data:`lm_eval_tasks.protocols.stability.EVK_SETTINGS`.
        num_prompts: number of its first cases.
        edits: saved edits, and folders of streams, applied in this order.
        model_options: options of :class:`EditedHFLM`.

    Raises:
        EditingError: for unknown benchmarks, edits of another model, and edits that are text before the prompt.
    """
    files = [file for path in edits for file in saved_files(path)]
    benchmark = find_benchmark(prompts)
    benchmark.check_settings(settings)
    loaded = benchmark.load(settings)
    lm = EditedHFLM(**model_options, mode="none")
    rows, items, skipped = _rows(lm, loaded.records[:num_prompts], settings)
    deltas = read_deltas(files, lm.model, lm.identity)
    for delta in deltas:
        require_no_context(delta)
    tensors = {"unedited": _vectors(lm, items, [])}
    if deltas:
        tensors["edited"] = _vectors(lm, items, deltas)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_tensors(out, tensors, {"format": FORMAT})
    sigma, relative = sigma_of(settings)
    description = {
        "format": FORMAT,
        "vectors": out.name,
        "sha256": sha256_of(out),
        "model": DEMO_NAME if lm.is_demo else portable(str(lm.pretrained)),
        "model_key": lm.identity.key,
        "width": tensors["unedited"].shape[1],
        "state": EVK_STATE.read(settings),
        "sigma": sigma,
        "relative": relative,
        "seed": EVK_NOISE_SEED.read(settings),
        "benchmark": benchmark.name,
        "data_source": loaded.source,
        "edits": [
            {"file": str(path), "checksum": delta.checksum(), "editor": editor_of(delta)}
            for path, delta in zip(files, deltas, strict=True)
        ],
        "skipped": skipped,
        "rows": rows,
    }
    beside = description_path(out)
    write_atomically(beside, json_text(description, indent=1) + "\n")
    return VectorFiles(out, beside, Counter(row["kind"] for row in rows), skipped)


def description_path(vectors: Path) -> Path:
    """The JSON file beside a file of vectors."""
    return vectors.with_suffix(".json")


def _rows(
    lm: EditedHFLM, cases: Sequence[Case], settings: Settings
) -> tuple[list[dict[str, Any]], list[StateItem], dict[str, int]]:
    """The prompts as JSON and as items, and reasons of those that are left out with their numbers."""
    rows: list[dict[str, Any]] = []
    items: list[StateItem] = []
    skipped: Counter[str] = Counter()
    for case in cases:
        texts = [(EDIT, case.request.text), *((NEIGHBORHOOD, one.prompt) for one in case.neighbors)]
        readings = [(kind, StateReading(prompt=text, state=EVK_STATE.read(settings))) for kind, text in texts]
        instances = perturbed_prompts(case, settings)
        readings += [(f"evk_{probe.kind}", probe.states) for probe in instances if probe.states is not None]
        if not instances:
            skipped["the prompt lacks its subject, so it is not perturbed"] += 1
        for kind, reading in readings:
            try:
                items.append(lm.items.state_item(reading.prompt, reading))
            except UnusableRequestError as error:
                skipped[str(error)] += 1
            else:
                rows.append({"kind": kind, "case_id": case.request.case_id, "prompt": reading.prompt})
    if not rows:
        raise EditingError(f"no prompt can be embedded: {next(iter(skipped), 'the benchmark has no cases')}.")
    return rows, items, dict(skipped)


def _vectors(lm: EditedHFLM, items: Sequence[StateItem], deltas: Sequence[Delta]) -> torch.Tensor:
    """States [N, d] with these edits in the model, float32 on the CPU."""
    with frozen(lm.model), AppliedDeltas(lm.model) as applied:
        for delta in deltas:
            applied.add(delta)
        jobs = [(item, applied.runtime_part) for item in items]
        return torch.stack(states_under(lm.model, jobs, limits_for(lm.model))).float()
