"""Identity and readable name of a run, from its results.

lm-eval names the folder of a run, and its place on the hub, after the argument ``pretrained`` alone, and after random
characters where there is none. Runs of different editors on one model would share that name. :func:`name_run` replaces
it for runs of ``edited_hf`` by editor, mode, settings, data and model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Protocol

from edit_hooks.assets.demo_name import DEMO_NAME
from edit_hooks.run_options import RUN_OPTIONS
from edit_hooks.utils.storage.hashing import key_of
from edit_hooks.utils.text.readable import readable
from lm_eval_tasks.report.editor_settings import as_given
from lm_eval_tasks.report.model_parts import model_parts, parts_text
from lm_eval_tasks.report.portable import by_value, portable
from lm_eval_tasks.report.run_options import (
    DIGEST_DIGITS,
    answer_options,
    content_of_edits,
    edit_options,
    editor_settings,
    given_arguments,
    identity_of_edits,
    model_arguments,
    options_text,
    place_digests,
    seed_of,
)

UNEDITED = "unedited"
UNTUNED = "untuned"
RUN_DIGITS, SETTINGS_DIGITS = 12, 8
NAMED_FIRST = ("editor", "mode", "edits", "num_edits", "edit_batch_size")
MAX_PART = 60  # characters of one part of a name; file systems allow 255 in all

# Options of edits whose columns say all about them, beside those that begin the name of a run.
AT_DEFAULT = {option.name: option.at_default for option in RUN_OPTIONS}
IN_NAMES = [
    option.name
    for option in RUN_OPTIONS
    if option.changes == "edits" and option.column == option.name and option.name not in NAMED_FIRST
]
# Arguments of a stock model class that change no answer.
NOT_IDENTITY = ("device", "batch_size", "max_batch_size", "parallelize", "trust_remote_code")


class Tracker(Protocol):
    """The part of lm-eval's ``EvaluationTracker`` that has the name."""

    general_config_tracker: Any


@dataclass(frozen=True, kw_only=True)
@readable
class RunFacts:
    """Facts that hold for all tasks of a run.

    Attributes:
        run: hash of everything that identifies the run, 12 hexadecimal digits.
        name: editor, mode, settings, data and model in one text that is a valid file name.
        model: readable name. model_hash: hash of the weights; "" if unknown. model_parts: digests of what else makes it
            this model, as in ``config=0c45f1a2; tokenizer=9d3e77b0``; "" if unknown.
        editor: its name; ``unedited`` for ``mode=none``, and the model class for stock models.
        editor_label: name of the editor in tables, from the plan of a sweep; "" without one. model_label: that of the
            model in the plan. Neither is a part of ``run``.
        settings: hash of the resolved settings but the seed and what was drawn with it (context templates), also
            those of a post-processed editor, 8 hexadecimal digits; "" without an editor.
        settings_origin: ``shipped``, ``given``, ``untuned`` (see ``guesses``), or "" if unknown.
        context_editor: the editor acts through the prompt.
        recorded: column -> recorded value of the options whose columns hold it, as ``num_edits``.
        edits: benchmark of a batch's or stream's edits and their data, as in ``qaedit (hub)``; "" for the tasks' own.
        edits_hash: digest of these edits in their order, 12 hexadecimal digits; "" if not recorded.
        edit_options: options of the edits that are not at their default and have no field here, as in
            ``edit_context=qa``; "" without any. answer_options: those of all answers, as in ``max_length=512``.
        data: what the tasks read, as in ``mini``, ``hub`` or a file name; several are joined by ``+``.
    """

    run: str
    name: str
    model: str
    model_hash: str
    model_parts: str
    editor: str
    editor_label: str
    model_label: str
    mode: str
    settings: str
    settings_origin: str
    guesses: tuple[str, ...]
    context_editor: bool
    data: str
    recorded: Mapping[str, Any]
    edits: str
    edits_hash: str
    icl: str
    edit_options: str
    answer_options: str
    seed: int | None
    limit: float | None
    editor_config: Mapping[str, Any]


def run_facts(results: Mapping[str, Any]) -> RunFacts:
    """The facts of a run.

    Args:
        results: of ``simple_evaluate``, or the content of a result file.
    """
    config = results["config"]
    editing = config.get("edited_hf")
    data = "+".join(sorted({data_label(task) for task in results.get("configs", {}).values()} - {""}))
    model, dtype = model_name(config), config.get("model_dtype")
    if editing is None:
        editor, mode, editing = str(config.get("model")), "", {}
        identity = _stock_identity(config)
    else:
        editor, mode = editing.get("editor") or UNEDITED, editing["mode"]
        identity = identity_of_edits(editing) | answer_options(config)
    model_hash = (editing.get("model_identity") or {}).get("weights") or ""
    identity |= {"model": model_hash or model, "dtype": dtype, "limit": config.get("limit")}
    if parts := model_parts(editing):
        identity["model_parts"] = parts
    if chosen := chosen_samples(config):
        identity["samples"] = key_of(chosen)[:DIGEST_DIGITS]
    settings = as_given(editor_settings(editing), portable(editing.get("drawn_settings") or {}))
    seed = seed_of(editing)
    facts = {
        "editor": editor,
        "mode": mode,
        "settings": _hash_of(settings)[:SETTINGS_DIGITS] if settings else "",
        "data": data,
        "model": model,
    }
    origin = editing.get("settings_origin") or {}
    return RunFacts(
        run=_hash_of(identity)[:RUN_DIGITS],
        name=_name(facts, editing, seed),
        editor_label=str(editing.get("editor_label") or ""),
        model_label=str(editing.get("model_label") or ""),
        model_hash=model_hash,
        model_parts=parts_text(parts),
        settings_origin=_origin(origin),
        guesses=tuple(origin.get("guesses") or ())
        + (("layers by depth",) if origin.get("layers") == "by depth" else ()),
        context_editor="context" in (editing.get("editor_writes") or ()),
        recorded={one.column: editing.get(one.name) for one in RUN_OPTIONS if one.column_help},
        edits=_edits(editing),
        edits_hash=str(editing.get("edits_digest") or "")[:DIGEST_DIGITS],
        icl=str(editing.get("icl") or "no"),
        edit_options=options_text(edit_options(editing)),
        answer_options=options_text(answer_options(config)),
        seed=seed,
        limit=config.get("limit"),
        editor_config=editing.get("editor_config") or {},
        **facts,
    )


def name_run(tracker: Tracker, results: Mapping[str, Any]) -> None:
    """Give lm-eval's tracker the name of the run, for the folder, the result file and hub pushes."""
    name = run_facts(results).name
    tracker.general_config_tracker.model_name = name
    tracker.general_config_tracker.model_name_sanitized = name


def model_name(config: Mapping[str, Any]) -> str:
    """Hub id of the model, or the name of its folder."""
    if (config.get("edited_hf") or {}).get("demo"):
        return DEMO_NAME
    editing = config.get("edited_hf")
    named = editing if editing and "pretrained" in editing else model_arguments(config.get("model_args"))
    name = str(named.get("peft") or named.get("pretrained") or named.get("model") or config.get("model"))
    path = PurePath(name)
    return path.name if path.is_absolute() or name.startswith((".", "~")) or len(path.parts) > 2 else name


def is_editing_task(task_config: Mapping[str, Any]) -> bool:
    """Whether a task's config, as results have it, is that of an editing task."""
    return "data_source" in (task_config.get("metadata") or {})


def generation_settings_of_ordinary(tasks: Iterable[Any]) -> list[Mapping[str, Any]]:
    """Settings of the tasks of lm-eval's own, among loaded tasks, that generate."""
    configs = [task.config for task in tasks if getattr(task, "OUTPUT_TYPE", None) == "generate_until"]
    return [
        config.generation_kwargs or {}
        for config in configs
        if not is_editing_task({"metadata": getattr(config, "metadata", None)})
    ]


def ordinary_tasks(tasks: Mapping[str, Any]) -> Iterator[str]:
    """Names of the loaded tasks whose documents bring no edits, as the first document of each shows."""
    for name, task in tasks.items():
        doc = next(iter(task.eval_docs), None)
        if doc is not None and not (isinstance(doc, Mapping) and "edit_requests" in doc):
            yield name


def data_label(task_config: Mapping[str, Any]) -> str:
    """Origin of a task's records: mini, hub, hub:<set> or the name of a file; "" for lm-eval's own tasks."""
    source = (task_config.get("metadata") or {}).get("data_source") or {}
    data = str(source.get("data", ""))
    return data if data.partition(":")[0] in ("mini", "hub", "") else PurePath(data).name


def _hash_of(content: Mapping[str, Any]) -> str:
    """Hash of a mapping, the same on all machines, and for results in memory and in a file (with objects as texts)."""
    return key_of(by_value(portable(json.loads(json.dumps(content, default=str)))))


def _stock_identity(config: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a stock model class on which its answers depend."""
    arguments = given_arguments(config)
    left_out = (*NOT_IDENTITY, *(("dtype",) if config.get("model_dtype") else ()))  # the recorded one counts
    identity: dict[str, Any] = {name: value for name, value in arguments.items() if name not in left_out}
    identity |= {name: [portable(arguments[name]), digest] for name, digest in place_digests(config).items()}
    return identity | {"class": config.get("model")}


def chosen_samples(config: Mapping[str, Any]) -> dict[str, list[str]]:
    """Task -> the documents that ``--samples`` chose, each once, sorted: lm-eval asks them in the order of the data.

    It asks all of them for an empty list.
    """
    chosen = config.get("samples") or {}
    return {task: sorted(set(map(str, documents))) for task, documents in chosen.items() if documents}


def _origin(origin: Mapping[str, Any]) -> str:
    if not origin:
        return ""
    if origin.get("guesses") or origin.get("layers") == "by depth":
        return UNTUNED
    return "given" if origin.get("given") else "shipped"


def _edits(editing: Mapping[str, Any]) -> str:
    if not editing.get("edits"):
        return ""
    data, digest = editing.get("edits_data"), content_of_edits(editing)
    parts = [str(portable(data)) if data else "", digest[:DIGEST_DIGITS] if digest else ""]
    details = " ".join(filter(None, parts))
    return f"{portable(editing['edits'])} ({details})" if details else str(editing["edits"])


def _name(facts: Mapping[str, str], editing: Mapping[str, Any], seed: int | None) -> str:
    model = "gemma-3-270m-demo" if facts["model"] == DEMO_NAME else facts["model"]
    mode = "" if facts["mode"] == "none" else _mode_name(facts["mode"], editing, seed)
    parts = [facts["editor"], mode, facts["settings"], facts["data"], model]
    return "__".join(text for part in parts if (text := slug(part)))


def _mode_name(mode: str, editing: Mapping[str, Any], seed: int | None) -> str:
    """Mode, number of edits, size of steps, and the other options of the edits that are not at their default."""
    size, step = editing.get("num_edits"), editing.get("edit_batch_size")
    name = mode + (f"-{size}" if size else "") + (f"by{step}" if step and step != 1 else "")
    others = {option: editing[option] for option in IN_NAMES if editing.get(option) not in (None, *AT_DEFAULT[option])}
    others |= {"seed": seed} if seed else {}
    others |= portable(edit_options(editing))
    return name + "".join(f"-{option}={value}" for option, value in by_value(others).items())


def slug(text: str) -> str:
    """The text with file-name characters only; lm-eval's hub pushes would make folders of slashes."""
    return re.sub(r"[^A-Za-z0-9._+=-]+", "-", text)[:MAX_PART].strip("-.")
