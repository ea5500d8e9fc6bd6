"""The schema of results as data: the columns of the tables, with their types and meanings.

The version changes with the columns: its first number when a column goes away or changes its meaning, the second when
one is added.
"""

from __future__ import annotations

from edit_hooks.run_options import RUN_OPTIONS

SCHEMA_VERSION = "1.8"

TEXT, WHOLE, REAL, FLAG, MAPPING, VALUE = "text", "whole number", "number", "true or false", "mapping", "any"

_RUN = {
    "run": (TEXT, "hash of the run's identity (model, editor, settings, data, options), 12 hexadecimal digits"),
    "run_name": (TEXT, "editor, mode, settings, data and model; also lm-eval's name of the run's folder"),
}
_PLACE = {
    "task": (TEXT, "name of the task or group"),
    "metric": (TEXT, "name of the metric without its stage"),
    "stage": (
        TEXT,
        '"" for the final answer; in streams "immediate" or a number of edits; "unedited" and "difference" with '
        "compare_unedited",
    ),
    "filter": (TEXT, "filter pipeline of the answer"),
}
_SCORED_BY = {
    "population": (TEXT, '"all" cases, or those of a published filter, as in "wrong_em"'),
    "judge": (TEXT, 'judge, prompt and its hash, where a judge decides on the value; else ""'),
}
_COUNTS = {
    "n": (REAL, "number of scored cases"),
    "excluded": (REAL, "number of cases that the benchmark's published filter excludes"),
    "failed": (REAL, "number of cases without a value for a reason, which may be that of the record"),
    "zeroed": (REAL, "number of those without a usable answer: the failures that or_0 counts as 0"),
}

RESULT_COLUMNS: dict[str, tuple[str, str]] = {
    **_RUN,
    "file": (TEXT, "path of the result file"),
    "date": (TEXT, "start of the run, ISO 8601 in UTC"),
    "model": (TEXT, "hub id of the model, or the name of its folder; the first one of a model that was read from two"),
    "model_label": (TEXT, 'name of the model in the plan of a sweep, if it is another one; "" without one'),
    "model_hash": (TEXT, 'hash of the weights; "" if the run recorded none'),
    "model_parts": (
        TEXT,
        'digests of what else makes it this model, as in "config=0c45f1a2; tokenizer=9d3e77b0"; "" if not recorded',
    ),
    "editor": (TEXT, '"unedited" for mode=none; the model class for stock models of lm-eval'),
    "editor_label": (TEXT, 'name of the editor in tables, from the plan of a sweep; "" without one'),
    "mode": (TEXT, 'single, batch, sequential, none, ...; "" for stock models'),
    "settings": (TEXT, 'hash of the editor settings but the seed and what it drew (8 digits); "" without an editor'),
    "settings_origin": (TEXT, '"shipped" for the model, "given" by the user, "untuned" (guesses), or "" if unknown'),
    "guesses": (VALUE, "list of the settings that were not tuned for this model"),
    "context_editor": (FLAG, "the editor acts through the prompt"),
    **{
        option.column: (TEXT if option.is_text else REAL, option.column_help)
        for option in RUN_OPTIONS
        if option.column_help
    },
    "edits": (TEXT, 'benchmark and data of the edits of a batch or stream, as in qaedit (hub); "" if not given'),
    "edits_hash": (TEXT, 'digest of these edits, in their order (12 digits); "" without them, or if not recorded'),
    "icl": (TEXT, "in-context baseline added to the questions; no: none"),
    "edit_options": (
        TEXT,
        'options of the edits that are not at their default and have no column, as in "edit_context=qa"; "" if none',
    ),
    "answer_options": (
        TEXT,
        'options that change answers of the unedited model, too, as in "max_length=512"; "" if none was given',
    ),
    "seed": (REAL, "seed of the edits"),
    "limit": (REAL, "lm-eval's --limit"),
    "editor_config": (MAPPING, "the resolved editor settings"),
    "task": _PLACE["task"],
    "benchmark": (TEXT, "folder of the task's YAML file; the name of a group"),
    "task_version": (TEXT, "version of the task"),
    "samples": (TEXT, 'digest of the documents that --samples chose for the task (12 digits); "" for all of them'),
    "data": (TEXT, 'mini, hub, hub:<set> or the name of a file; "" for lm-eval\'s own tasks'),
    "data_revision": (TEXT, "commit of the records, else the revision asked for"),
    "data_hash": (TEXT, "SHA-256 of the records' files; with the subset, where one was chosen"),
    **_SCORED_BY,
    "protocol": (
        TEXT,
        "how the task asks and scores: generation settings (those of the questions where they have their own), "
        "settings of the task, chat template",
    ),
    "metric": _PLACE["metric"],
    "stage": _PLACE["stage"],
    "filter": _PLACE["filter"],
    "role": (TEXT, '"efficacy" for the success of the edits, "unchanged" for locality; else ""'),
    "higher_is_better": (VALUE, "true, false, or missing where the task declares neither"),
    "is_rate": (FLAG, "the value is a mean share of successes over cases"),
    "is_share": (FLAG, "the value is a mean share over cases, also where less or neither is better"),
    "is_total": (FLAG, "the value is a sum over cases, as of counts"),
    "chance": (REAL, "value of a guess"),
    "value": (REAL, "the score; missing if no case was scored"),
    "stderr": (REAL, "standard error of the value"),
    **_COUNTS,
    "or_0": (REAL, "the value if failures count as 0"),
    "coverage": (REAL, "scored cases / (scored + failed cases)"),
    "unscored": (REAL, "number of cases of the task in which some metric is unscored"),
    "unscored_reason": (MAPPING, "reason -> number of cases of the task"),
    "edit": (MAPPING, "summary of the task's edits: edits, failed, seconds_per_edit, peak_memory_gib, ..."),
}

CASE_COLUMNS: dict[str, tuple[str, str]] = {
    "run": _RUN["run"],
    "file": RESULT_COLUMNS["file"],
    "task": _PLACE["task"],
    "doc_id": (WHOLE, "index of the document in its task"),
    "case_id": (TEXT, "id of the record"),
    "category": (TEXT, 'category of the record; "" without one'),
    "edit_key": (
        TEXT,
        'identity of the edit under which the case was answered; cases of a group share it; "" in streams, in batches '
        "of all cases and without an edit",
    ),
    "prompt_hash": (TEXT, 'hash of the first prompt of lm-eval\'s own tasks, few-shot examples included; else ""'),
    "metric": _PLACE["metric"],
    "stage": _PLACE["stage"],
    "filter": _PLACE["filter"],
    **_SCORED_BY,
    "value": (REAL, "the case's score; missing if unscored, excluded, not due, or not a single number"),
    "due": (FLAG, "false at a stage of a stream that a case has no part in: it is edited later, or not in the stream"),
    **_COUNTS,
    "reason": (TEXT, 'why the value, or some component of it, is missing; else ""'),
    "components": (VALUE, "the saved value of metrics that are no mean over cases, as the factors of an edit score"),
}

# The columns of a result that tell it from others of its run.
_OF_METRIC = {
    "run": _RUN["run"],
    **{name: RESULT_COLUMNS[name] for name in ("file", "task", "task_version", "data_hash")},
    **_SCORED_BY,
    **{name: RESULT_COLUMNS[name] for name in ("protocol", "metric", "filter")},
}

RETENTION_COLUMNS: dict[str, tuple[str, str]] = {
    **_OF_METRIC,
    "step": (WHOLE, "step of the stream after which the cases were scored, from 0"),
    "edited_at": (WHOLE, "step that edited the cases"),
    "value": (REAL, "the score of these cases; missing if none was scored"),
}

BREAKDOWN_COLUMNS: dict[str, tuple[str, str]] = {
    **_OF_METRIC,
    "field": (TEXT, "field of the records, as in score_by"),
    "group": (TEXT, "value of the field"),
    "value": (REAL, "the score of the cases with this value; missing if none was scored"),
    "n": (REAL, "number of scored cases"),
}

STEP_COLUMNS: dict[str, tuple[str, str]] = {
    "run": _RUN["run"],
    "file": RESULT_COLUMNS["file"],
    "step": (WHOLE, "step of the stream, from 0"),
    "num_edits": (REAL, "edits made by then"),
    "norm_ratio": (REAL, "norm of all changes of the edited weights, relative to these weights before the stream"),
    "probe_loss": (REAL, "loss per token of a plain sentence, in nats"),
}
