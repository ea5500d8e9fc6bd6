"""Options of a run besides editor settings, mode and sizes that change its edits or its answers.

An option at its default is left out, so that runs from before it existed keep their identity. Where a run recorded the
content of what an option names (a saved edit, a tokenizer, the edits of a stream), its digest is used in place of the
name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.hashing import key_of
from lm_eval_tasks.common.model_parts import model_parts
from lm_eval_tasks.common.portable import portable

DIGEST_DIGITS = 12

# Options of `edited_hf` that change edits, each with its default; those that have a column of their own are not listed.
EDIT_OPTIONS: dict[str, Any] = {
    "load_edit": None,
    "icl_args": None,
    "edit_context": "bare",
    "answer": "auto",
    "guard": "report",
    "guard_norm_ratio": 1.0,
    "guard_loss_increase": 3.0,
}
# Options that change answers of the unedited model as well; all but the first are those of lm-eval's class.
ANSWER_OPTIONS = (
    "max_thought_tokens",
    "think_end_token",
    "enable_thinking",
    "chat_template_args",
    "tokenizer",
    "add_bos_token",
    "prefix_token_id",
    "max_length",
    "rope_scaling",
)
# Arguments of stock classes that choose the weights; of an edited run their hash is known.
WEIGHT_OPTIONS = ("revision", "subfolder", "delta")
# Arguments of stock classes that can be folders of this machine with one last name and different weights.
PLACES = ("pretrained", "model", "peft", "delta", "tokenizer")
# Arguments of `edited_hf` that tasks read from their metadata, where lm-eval puts all of them unless it gets a manager.
READ_BY_TASKS = ("data", "data_revision", "bad_records", "subset", "subset_seed")
READ_IN_STREAMS = ("mode", "checkpoints", "immediate", "retention")
PLACE_DIGESTS = "place_digests"  # in submitted files, whose folders are cut

_WHOLE = re.compile(r"[+-]?\d+")


def model_arguments(arguments: object) -> dict[str, Any]:
    """The ``model_args`` of a result file, which lm-eval saves as a text or a mapping."""
    if isinstance(arguments, Mapping):
        return dict(arguments)
    pairs = (pair.partition("=") for pair in str(arguments or "").split(",") if pair.strip())
    return {name.strip(): value.strip() for name, _, value in pairs}


def check_task_settings(arguments: object, metadata: Mapping[str, Any] | None, tasks: Iterable[Any]) -> None:
    """Refuse a task manager of the caller whose editing tasks read other data than the model, or in another mode.

    Args:
        arguments: ``model_args`` of ``simple_evaluate``.
        metadata: that of its ``task_manager``.
        tasks: the tasks of the run; others than those of :class:`HarnessTask` read no such settings.

    Raises:
        EditingError: before weights are read.
    """
    from lm_eval_tasks.common.harness import HarnessTask  # imports torch, which readers of results need not

    if not any(isinstance(task, HarnessTask) for task in tasks):
        return
    given, known = model_arguments(arguments), metadata or {}
    read = (*READ_BY_TASKS, *(READ_IN_STREAMS if given.get("mode") == "sequential" else ()))
    names = [name for name in given if name in read or name.endswith("_set")]
    if "pretrained" in given and "data" not in {*given, *known}:
        names.append("pretrained")  # decides between the embedded sample and the published data
    for name in names:
        if name not in known or (name in READ_BY_TASKS and str(known[name]) != str(given[name])):
            has = f"have {name}={known[name]}" if name in known else f"do not know {name}"
            raise EditingError(
                f"the model has {name}={given[name]}, and the tasks of this task_manager {has}: they would ask about "
                "other data, or in another mode, than the model edits. Make the manager with "
                "TaskManager(metadata=<model_args as a mapping>), or leave task_manager out."
            )


def unused_generation_settings(given: object, tasks: Sequence[Any]) -> str | None:
    """A sentence about ``--gen_kwargs`` that questions of editing tasks do not follow; ``None`` if there are none.

    Tasks that only score are no reason where another task of the run follows the settings.
    """
    unused = [task for task in tasks if not getattr(task, "follows_generation_kwargs", True)]
    if len(unused) < len(tasks):
        unused = [task for task in unused if task.decodings]
    if not unused:
        return None
    names = ", ".join(str(task.config.task) for task in unused)
    note = f"--gen_kwargs has {given!r}, which changes nothing there: no question of {names} follows it."
    if any(task.benchmark.resolved_settings(task.config.metadata).get("generate") is False for task in unused):
        note += " Tasks with a setting 'generate' have such questions with --metadata '{\"generate\": true}'."
    return note


def edit_options(editing: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a run's edits that are not at their default; none of the unedited model.

    Args:
        editing: ``edited_hf`` of a result file.
    """
    if editing.get("mode") == "none":
        return {}
    given = {name: editing[name] for name in EDIT_OPTIONS if editing.get(name) not in (None, {})}
    found = {name: value for name, value in given.items() if value != EDIT_OPTIONS[name]}
    if "load_edit" in found and (checksum := (editing.get("loaded_edit") or {}).get("checksum")):
        found["load_edit"] = str(checksum)[:DIGEST_DIGITS]
    return found


def answer_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a run's answers that were given, also those of the unedited model.

    Args:
        config: ``config`` of a result file.
    """
    editing = config.get("edited_hf")
    arguments = model_arguments(config.get("model_args"))
    if editing is not None:
        arguments["max_thought_tokens"] = editing.get("max_thought_tokens")
    names = ANSWER_OPTIONS if editing is not None else (*ANSWER_OPTIONS, *WEIGHT_OPTIONS)
    found = {name: value for name in names if (value := _parsed(arguments.get(name))) not in (None, "", {})}
    if "tokenizer" in found and (digest := model_parts(editing or {}).get("tokenizer")):
        found["tokenizer"] = digest
    if editing is None:
        found |= place_digests(config)
    return found


def place_digests(config: Mapping[str, Any]) -> dict[str, str]:
    """Argument -> digest of its path, of a stock model's arguments that are absolute paths.

    Nothing is recorded of a stock model's weights, so folders of one last name are different models.
    """
    if config.get("edited_hf") is not None:
        return {}
    arguments = model_arguments(config.get("model_args"))
    paths = {name: str(arguments[name]) for name in PLACES if name in arguments}
    known = {name: key_of(path)[:DIGEST_DIGITS] for name, path in paths.items() if portable(path) != path}
    return known | dict(config.get(PLACE_DIGESTS) or {})


def content_of_edits(editing: Mapping[str, Any]) -> str | None:
    """Digest of the edits of a batch or stream, where a file of the user has them; ``None`` if not recorded."""
    data = str(editing.get("edits_data") or "")
    is_published = data.partition(":")[0] in ("mini", "hub") or "=" in data
    return None if data and is_published else editing.get("edits_digest")


def options_text(options: Mapping[str, Any]) -> str:
    """Options as one text, as in ``edit_context=qa; answer=patch``; without commas, which separate values of --only."""
    return "; ".join(f"{name}={_text(value)}" for name, value in portable(dict(options)).items())


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)


def _parsed(value: Any) -> Any:
    """A value as lm-eval parses it; it saves arguments as they were given, as texts or parsed."""
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false", "none"):
        return {"true": True, "false": False, "none": None}[value.lower()]
    return int(value) if _WHOLE.fullmatch(value) else value
