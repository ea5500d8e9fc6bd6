"""Options of a run that change its edits or its answers, compared by what they mean.

Two commands that start the same run have equal options here: one at its default is left out, whether it was given or
not, numbers are equal by value, and where a run recorded the content of what an option names (a saved edit, the edits
of a stream), the digest replaces the name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from edit_hooks.run_options import RUN_OPTIONS
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.hashing import key_of
from lm_eval_tasks.report.editor_settings import without_setting
from lm_eval_tasks.report.portable import by_value, portable

DIGEST_DIGITS = 12

# Options on which edits or answers depend, with the values that mean the default, and what results record of `edits`.
# The resolved settings of the editor have those that change settings.
OPTIONS: dict[str, tuple[Any, ...]] = {
    **{one.name: one.at_default for one in RUN_OPTIONS if one.changes in ("edits", "records") and one.column},
    "edits_data": (None,),
}
# Those that change edits and have no column of their own in tables of results.
EDIT_OPTIONS = {one.name: one.at_default for one in RUN_OPTIONS if one.changes == "edits" and not one.column}
# Editor settings that change no number: how it is computed, and where the other settings were taken from.
NO_SETTINGS = ("engine", "shipped")
# Arguments of lm-eval's classes that change answers. Of an edited run those of
# `edit_hooks.lm.loading.recorded_options` count, which leaves out defaults.
ANSWER_OPTIONS = (
    *(one.name for one in RUN_OPTIONS if one.changes == "answers"),
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
READ_BY_TASKS = tuple(one.name for one in RUN_OPTIONS if one.tasks_read_it == "always")
READ_IN_STREAMS = tuple(one.name for one in RUN_OPTIONS if one.tasks_read_it == "streams")
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
    from lm_eval_tasks.common.task.harness import HarnessTask  # imports torch, which readers of results need not

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


def identity_of_edits(editing: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a run of `edited_hf` on which its edits and answers depend, and the settings of its editor.

    Args:
        editing: ``edited_hf`` of a result file.
    """
    found = _not_at_default(editing, OPTIONS)
    if "subset" in found:  # the order of a subset without a seed is that of seed 0
        found.setdefault("subset_seed", 0)
    found["data"] = editing.get("data") or ("mini" if editing.get("demo") else "hub")
    found["editor_config"] = editor_settings(editing)
    if editing.get("mode") not in ("none", "loaded"):  # these draw nothing
        found["seed"] = seed_of(editing)
    if digest := editing.get("edits_digest"):  # the default of `edits_data` can be read from another commit
        found["edits_digest"] = digest
    return found | edit_options(editing)


def editor_settings(editing: Mapping[str, Any]) -> dict[str, Any]:
    """The resolved settings of a run's editor that change its edits, without the seed; empty without an editor."""
    settings = dict(editing.get("editor_config") or {})
    for name in (*NO_SETTINGS, "seed"):
        settings = without_setting(settings, name)
    return settings


def seed_of(editing: Mapping[str, Any]) -> Any:
    """The seed of a run's edits; one in ``editor_args`` overrules the run's."""
    return (editing.get("editor_config") or {}).get("seed", editing.get("seed"))


def edit_options(editing: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a run's edits that are not at their default; none of the unedited model.

    Args:
        editing: ``edited_hf`` of a result file.
    """
    if editing.get("mode") == "none":
        return {}
    if isinstance(context := editing.get("edit_context"), Mapping):  # files of before: with an example
        editing = {**editing, "edit_context": context.get("name")}
    found = _not_at_default(editing, EDIT_OPTIONS)
    if "load_edit" in found and (checksum := (editing.get("loaded_edit") or {}).get("checksum")):
        found["load_edit"] = str(checksum)[:DIGEST_DIGITS]
    return found


def _not_at_default(editing: Mapping[str, Any], options: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    return {name: editing[name] for name, defaults in options.items() if editing.get(name) not in (None, *defaults)}


def answer_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a run's answers, also those of the unedited model, that are not at their default.

    Nothing is recorded of a stock model class but the arguments that were given.

    Args:
        config: ``config`` of a result file.
    """
    arguments = given_arguments(config)
    if (editing := config.get("edited_hf")) is not None:
        recorded = editing.get("answer_options", arguments)  # files of before have what lm-eval recorded
        found = {**recorded, "max_thought_tokens": editing.get("max_thought_tokens")}
        return {name: found[name] for name in ANSWER_OPTIONS if found.get(name) is not None}
    names = (*ANSWER_OPTIONS, *WEIGHT_OPTIONS)
    return {name: arguments[name] for name in names if name in arguments} | place_digests(config)


def given_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a stock model class with values as lm-eval parses them, without those that mean a default."""
    parsed = {name: _parsed(value) for name, value in model_arguments(config.get("model_args")).items()}
    return {
        name: value for name, value in parsed.items() if value not in (None, "", {}) and not _is_default(name, value)
    }


def _is_default(name: str, value: Any) -> bool:
    return name == "revision" and value == "main"


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
    return "; ".join(f"{name}={_text(value)}" for name, value in by_value(portable(dict(options))).items())


def options_of(text: str) -> dict[str, str]:
    """The options of a text of :func:`options_text`."""
    pairs = (pair.partition("=") for pair in text.split("; ") if "=" in pair)
    return {name: value for name, _, value in pairs}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)


def _parsed(value: Any) -> Any:
    """A value as lm-eval parses it; it saves arguments as they were given, as texts or parsed."""
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false", "none"):
        return {"true": True, "false": False, "none": None}[value.lower()]
    return int(value) if _WHOLE.fullmatch(value) else value
