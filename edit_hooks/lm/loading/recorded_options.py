"""The options of a run as its results record them: by what they mean, not by the way in which they were given.

Two commands that start the same run record the same options: paths are absolute, a default that depends on other
options is filled in, and options of lm-eval's class are left out where they are at their default.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lm_eval.models.utils import resolve_max_length

from edit_hooks.lm.options.editing import EditingOptions

if TYPE_CHECKING:
    from edit_hooks.lm.loading.hflm import LateLoadingHFLM

# Options of lm-eval's class that change answers. Others are in the recorded identity of the model: a tokenizer, its
# start token (`add_bos_token`), positions (`rope_scaling`).
ANSWER_OPTIONS = ("think_end_token", "enable_thinking", "chat_template_args", "prefix_token_id", "max_length")


def recorded_options(options: EditingOptions) -> dict[str, Any]:
    """The options of editing; the resolved settings of the editor replace ``editor_args`` in results."""
    found = {name: value for name, value in dataclasses.asdict(options).items() if name != "editor_args"}
    if options.mode == "sequential":
        found["edit_batch_size"] = options.edit_batch_size or 1
    return absolute_places(found)


def recorded_model(lm: LateLoadingHFLM) -> dict[str, Any]:
    """Where the model was read, as ``pretrained`` and ``peft``, and the options of its class that change answers.

    lm-eval records the arguments of a command, and none where the model is given as an object.
    """
    pretrained = getattr(lm.pretrained, "name_or_path", lm.pretrained)
    return absolute_places({"pretrained": pretrained, "peft": lm.peft}) | {"answer_options": _answer_options(lm)}


def _answer_options(lm: LateLoadingHFLM) -> dict[str, Any]:
    """The options among :data:`ANSWER_OPTIONS` that are not at their default."""
    tokenizer = lm.tokenizer
    template = {name: value for name, value in lm.chat_template_args.items() if name != "enable_thinking"}
    default_prefix = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    default_length = resolve_max_length(lm.config, tokenizer, default=lm._DEFAULT_MAX_LENGTH)
    found = {
        "think_end_token": lm.think_end_token,
        "enable_thinking": lm.chat_template_args.get("enable_thinking"),
        "chat_template_args": template or None,
        "prefix_token_id": lm.prefix_token_id if lm.prefix_token_id != default_prefix else None,
        "max_length": lm.max_length if lm.max_length != default_length else None,
    }
    return {name: found[name] for name in ANSWER_OPTIONS if found[name] is not None}


def absolute_places(value: Any) -> Any:
    """The value with absolute paths in place of relative ones that lead to a file or folder now.

    A name without a separator stays: readers compare the last names of absolute paths.
    """
    if isinstance(value, Mapping):
        return {name: absolute_places(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [absolute_places(entry) for entry in value]
    if isinstance(value, str) and os.sep in value:
        path = os.path.expanduser(value)
        return os.path.abspath(path) if os.path.exists(path) else value
    return value
