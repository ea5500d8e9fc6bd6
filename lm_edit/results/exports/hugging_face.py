"""Export to Hugging Face's ``.eval_results`` YAML (https://huggingface.co/docs/hub/eval-results).

The files belong into the repository of the evaluated model. For an edited model that is the repository of the edited
weights (``lm-edit apply``), not that of its base, whose page would show the scores as its own.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.files import write_atomically
from lm_edit.results.exports.options import ExportOptions, ExportResult
from lm_edit.results.files.task_facts import TaskFacts
from lm_edit.results.filters import filter_rows
from lm_edit.results.tables import Source, current_results, load_results

FOLDER = ".eval_results"
# Columns in which two results of one run, task and metric differ.
DISTINCTIONS = ("task_version", "data_revision", "data_hash", "population", "judge", "protocol", "filter")


def export_hugging_face(paths: Source, out: Path, options: ExportOptions) -> ExportResult:
    """Write ``<name of the run>/.eval_results/<benchmark>.yaml``, with one entry per metric.

    Where several runs have one name, as with another ``--limit``, their folders end in the id of the run. ``task_id``
    is ``<task>/<metric>``, with the filter where a run has several of a metric; ``notes`` has editor, mode, settings,
    options and counts. Only results on published data are exported: the embedded samples and files of users have no
    dataset on the hub. A model page and a leaderboard of the hub have one value per dataset and ``task_id``, which the
    dataset defines, so two results with one are refused.

    Raises:
        EditingError: if nothing can be exported; for two results of a run under one ``task_id``, as with two judges;
            and for a huggingface_hub without this format.
    """
    try:
        from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml
    except ImportError:
        raise EditingError(
            "this huggingface_hub has no evaluation results; update it: pip install -U huggingface_hub."
        ) from None
    datasets = {(str(file.path), task): _dataset(TaskFacts(file, task)) for file, task in current_results(paths)}
    exported = ExportResult()
    entries: dict[tuple[str, str], list[Any]] = defaultdict(list)
    owners: dict[tuple[str, str, str], dict[str, Any]] = {}
    results = filter_rows(load_results(paths), options.only)
    runs_of = results.groupby("run_name")["run"].nunique()
    filters_of = results.groupby(["run", "task", "metric"])["filter"].nunique()
    for row in results.to_dict("records"):
        dataset = datasets[row["file"], row["task"]]
        if dataset is None or not math.isfinite(row["value"]):
            without = "unscored" if math.isnan(row["value"]) else "infinite"
            exported.leave_out(without if dataset else "not on a dataset of the hub")
            continue
        name = row["run_name"] if runs_of[row["run_name"]] == 1 else f"{row['run_name']}__{row['run']}"
        pipeline = f",{row['filter']}" if filters_of[row["run"], row["task"], row["metric"]] > 1 else ""
        stage = f"@{row['stage']}" if row["stage"] else ""
        task_id = f"{row['task']}/{row['metric']}{stage}{pipeline}"
        if (first := owners.setdefault((name, dataset, task_id), row)) is not row:
            raise _two_results(task_id, first, row)
        entries[name, row["benchmark"]].append(
            EvalResultEntry(
                dataset_id=dataset,
                task_id=task_id,
                value=row["value"],
                dataset_revision=row["data_revision"] or None,
                date=row["date"] or None,
                source_url=options.source_url,
                source_name="lm-eval-editing" if options.source_url else None,
                notes=_notes(row),
            )
        )
    if not entries:
        raise EditingError(
            "no result is on a dataset of the hub: embedded samples and files have none there. Evaluate with data=hub."
        )
    for (run, benchmark), listed in entries.items():
        path = out / run / FOLDER / f"{benchmark}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(eval_result_entries_to_yaml(listed), sort_keys=False, allow_unicode=True)
        write_atomically(path, text)
        exported.files.append(path)
    return exported


def _two_results(task_id: str, first: Mapping[str, Any], other: Mapping[str, Any]) -> EditingError:
    differing = [name for name in DISTINCTIONS if first[name] != other[name]]
    return EditingError(
        f"run {first['run_name']} has two results of {task_id}, with different {' and '.join(differing)}: in "
        f"{first['file']} and in {other['file']}. The hub has one value per model and task; export the file of one of "
        "them, without the other."
    )


def _dataset(about: TaskFacts) -> str | None:
    """Hub id of the dataset that a task read; ``None`` if it read something else."""
    if about.source:
        return about.source.get("hub_id")
    path = about.config.get("dataset_path")
    return path if isinstance(path, str) and path.count("/") == 1 and not path.startswith((".", "/")) else None


def _notes(row: dict[str, Any]) -> str:
    parts = [
        f"editor {row['editor']}",
        row["mode"] and f"mode {row['mode']}",
        row["settings"] and f"settings {row['settings']}",
    ]
    parts += [f"{row['num_edits']:g} edits"] if not math.isnan(row["num_edits"]) else []
    parts += [f"groups of {row['group_size']:g}"] if not math.isnan(row["group_size"]) else []
    parts += [row["edit_options"], row["answer_options"]]
    parts += [f"limit {row['limit']:g}"] if not math.isnan(row["limit"]) else []
    parts += [f"samples {row['samples']}"] if row["samples"] else []
    parts += [f"{name} {row[name]:g}" for name in ("n", "stderr", "excluded", "failed") if not math.isnan(row[name])]
    parts += [f"population {row['population']}"] if row["population"] != "all" else []
    return "; ".join(part for part in (*parts, row["judge"], row["protocol"]) if part)
