"""Export to the schemas of Every Eval Ever (https://github.com/evaleval/every_eval_ever).

One record per run and benchmark, at ``data/<benchmark>/<developer>/<model>/<uuid>.json`` as in its repository. An
edited model is filed under the name of its run: under the base model's name, its scores would count as those of the
base. Beside it, ``<uuid>_samples.jsonl`` has the cases of its shares of successes, for runs with samples.
"""

from __future__ import annotations

import hashlib
import math
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from edit_hooks.utils.storage.files import write_atomically
from edit_hooks.utils.storage.hashing import key_of
from edit_hooks.utils.storage.json_io import json_text
from lm_edit.results.exports.every_eval_instances import Instances
from lm_edit.results.exports.options import ExportOptions, ExportResult
from lm_edit.results.files.runs import ResultFile
from lm_edit.results.files.task_facts import TaskFacts
from lm_edit.results.filters import filter_rows
from lm_edit.results.tables import Source, current_results, load_results
from lm_eval_tasks.common.scoring.columns import ALL_CASES
from lm_eval_tasks.report.run_facts import UNEDITED, slug

SCHEMA_VERSION = "0.3.0"
DIGITS = 8  # of the hash of a judge, protocol or data in the id of a result
# Columns, beside those that are always in the id, in which two results of one run, task and metric differ.
DISTINCTIONS = ("task_version", "data_hash", "protocol")
DIFFERENCE = "difference"  # a stage
# Attributes of a result that the schema has no field for; its `additional_details` are texts.
DETAILS = ("stage", "filter", "protocol", "population", "judge", "role", "chance", "n", "excluded", "failed", "or_0")


def export_every_eval_ever(paths: Source, out: Path, options: ExportOptions) -> ExportResult:
    """Write one record per run and benchmark; results without a finite value, for which JSON has none, are left out."""
    places = {(str(file.path), task): file for file, task in current_results(paths)}
    exported = ExportResult()
    instances = Instances()
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in filter_rows(load_results(paths), options.only).to_dict("records"):
        if not math.isfinite(row["value"]):
            exported.leave_out("unscored" if math.isnan(row["value"]) else "infinite")
            continue
        groups.setdefault((row["run"], row["benchmark"]), []).append(row)
    for rows in groups.values():
        file = places[rows[-1]["file"], rows[-1]["task"]]
        ids = _result_ids(rows)
        record = _record(rows, ids, file, options, places)
        developer, name = record["model_info"]["id"].split("/")
        path = out / "data" / slug(rows[0]["benchmark"]) / developer / name / f"{_uuid(rows)}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f"{path.stem}_samples.jsonl")
        of_run = {"evaluation_id": record["evaluation_id"], "model_id": record["model_info"]["id"]}
        lines = [json_text(one, allow_nan=False) for one in _cases(rows, ids, places, instances, of_run, exported)]
        if lines:
            content = ("\n".join(lines) + "\n").encode()
            write_atomically(beside, content.decode())
            record["detailed_evaluation_results"] = {
                "format": "jsonl",
                "file_path": beside.relative_to(out).as_posix(),
                "hash_algorithm": "sha256",
                "checksum": hashlib.sha256(content).hexdigest(),
                "total_rows": len(lines),
            }
        write_atomically(path, json_text(record, indent=2, allow_nan=False) + "\n")
        exported.files += [path, *([beside] if lines else [])]
    return exported


def _cases(
    rows: list[dict[str, Any]],
    ids: Sequence[str],
    places: Mapping[tuple[str, str], ResultFile],
    instances: Instances,
    of_run: Mapping[str, str],
    exported: ExportResult,
) -> Iterator[dict[str, Any]]:
    """The records of the cases of a record's results; for other values than shares, none is correct or wrong."""
    for row, result_id in zip(rows, ids, strict=True):
        file = places[row["file"], row["task"]]
        if not row["is_rate"]:
            exported.leave_out("cases of a value that is no share of successes: none is correct or wrong")
        elif file.sample_file(row["task"]) is None:
            exported.leave_out("cases of a result without samples")
        else:
            yield from instances.records(file, row, result_id, of_run)


def _result_ids(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """An id for each result of a record, by which the records of its cases name it; no two are equal.

    Results of one run that differ in version, data or protocol have these in their ids.
    """
    alike: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        alike[_result_id(row)].append(row)
    ids = []
    for row in rows:
        same = alike[_result_id(row)]
        differing = [name for name in DISTINCTIONS if len({one[name] for one in same}) > 1]
        ids.append("/".join((_result_id(row), *(f"{name}={key_of(row[name])[:DIGITS]}" for name in differing))))
    return ids


def _result_id(row: Mapping[str, Any]) -> str:
    name = f"{row['metric']}@{row['stage']}" if row["stage"] else row["metric"]
    population = "" if row["population"] in ("", ALL_CASES) else row["population"]
    judge = f"judge={key_of(row['judge'])[:DIGITS]}" if row["judge"] else ""
    return "/".join((row["run"], row["task"], name, row["filter"], *filter(None, (population, judge))))


def _record(
    rows: list[dict[str, Any]],
    ids: Sequence[str],
    file: ResultFile,
    options: ExportOptions,
    places: Mapping[tuple[str, str], ResultFile],
) -> dict[str, Any]:
    retrieved = str(time.time())
    first, info = rows[0], _model_info(rows[0], file, options)
    return {
        "schema_version": SCHEMA_VERSION,
        "evaluation_id": f"{first['benchmark']}/{info['id'].replace('/', '_')}/{retrieved}",
        "evaluation_timestamp": str(file.content.get("date", "")),
        "retrieved_timestamp": retrieved,
        "source_metadata": {
            "source_name": "lm-eval-editing",
            "source_type": "evaluation_run",
            "source_organization_name": options.organization,
            "evaluator_relationship": "other",
        },
        "eval_library": {
            "name": "lm_eval",
            "version": str(file.content.get("lm_eval_version") or "unknown"),
            "additional_details": _texts((file.content["config"].get("edited_hf") or {}).get("versions") or {}),
        },
        "model_info": info,
        "evaluation_results": [
            _result(row, result_id, TaskFacts(places[row["file"], row["task"]], row["task"]))
            for row, result_id in zip(rows, ids, strict=True)
        ],
    }


def _model_info(row: Mapping[str, Any], file: ResultFile, options: ExportOptions) -> dict[str, Any]:
    developer, _, name = row["model"].rpartition("/")
    developer = developer or options.developer or ""
    edited = row["editor"] != UNEDITED and file.content["config"].get("edited_hf") is not None
    names = (
        "editor", "mode", "settings", "settings_origin", "num_edits", "edit_batch_size", "icl", "edit_options",
        "answer_options", "model_hash", "model_parts", "seed", "run",
    )  # fmt: skip
    details = {"base_model": row["model"], **{name: row[name] for name in names}, "editor_config": row["editor_config"]}
    return {
        "name": row["run_name"] if edited else row["model"],
        "id": f"{slug(developer) or 'unknown'}/{row['run_name'] if edited else slug(name)}",
        **({"developer": developer} if developer else {}),
        "inference_engine": {
            "name": "transformers",
            "version": str(file.content.get("transformers_version") or "unknown"),
        },
        "additional_details": {
            "deployment_type": "self_deployed",
            "model_availability": "unknown",
            **_texts(details),
        },
    }


def _result(row: Mapping[str, Any], result_id: str, about: TaskFacts) -> dict[str, Any]:
    name = f"{row['metric']}@{row['stage']}" if row["stage"] else row["metric"]
    lowest = -1 if row["stage"] == DIFFERENCE else 0  # edited minus unedited
    low, high = (lowest, 1) if row["is_rate"] else ("-Infinity", "Infinity")
    uncertainty: dict[str, dict[str, Any]] = {}
    if math.isfinite(row["stderr"]):
        uncertainty = {"uncertainty": {"standard_error": {"value": row["stderr"], "method": "analytic"}}}
        if not math.isnan(row["n"]):
            uncertainty["uncertainty"]["num_samples"] = int(row["n"])
    return {
        "evaluation_result_id": result_id,
        "evaluation_name": row["task"],
        "source_data": _source(row, about),
        "metric_config": {
            "evaluation_description": f"{row['metric']} of task {row['task']}, version {row['task_version']}",
            "metric_id": row["metric"],
            "metric_name": name,
            **({"metric_unit": "proportion"} if row["is_rate"] else {}),
            "lower_is_better": row["higher_is_better"] is False,
            "score_type": "continuous",
            "min_score": low,
            "max_score": high,
            "additional_details": _texts({key: row[key] for key in DETAILS}),
        },
        "score_details": {"score": row["value"], **uncertainty},
        "generation_config": {"additional_details": _texts(_generation(about))},
    }


def _generation(about: TaskFacts) -> Mapping[str, Any]:
    """Generation settings; with several decodings of a task, each under its number."""
    settings = about.generation_settings
    return settings[0] if len(settings) == 1 else {f"decoding_{number}": one for number, one in enumerate(settings)}


def _source(row: Mapping[str, Any], about: TaskFacts) -> dict[str, Any]:
    details = _texts({"data": row["data"], "revision": row["data_revision"], "sha256": row["data_hash"]})
    hub_id = about.source.get("hub_id") if about.source else about.config.get("dataset_path")
    common = {"dataset_name": row["benchmark"], "additional_details": details}
    if not isinstance(hub_id, str):
        return {**common, "source_type": "other"}
    number = {} if math.isnan(row["n"]) else {"samples_number": int(row["n"])}
    return {**common, "source_type": "hf_dataset", "hf_repo": hub_id, **number}


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    """The values as texts, without those that are missing."""
    known = {
        name: value
        for name, value in values.items()
        if value not in (None, "", {}, []) and not (isinstance(value, float) and math.isnan(value))
    }
    return {str(name): value if isinstance(value, str) else json_text(value) for name, value in known.items()}


def _uuid(rows: list[dict[str, Any]]) -> uuid.UUID:
    """A UUID of version 4 from the run, its benchmark and its date: exporting again gives the same name."""
    content = "|".join(rows[0][name] for name in ("run", "benchmark", "date"))
    return uuid.UUID(bytes=hashlib.sha256(content.encode()).digest()[:16], version=4)
