"""Decoding settings of a question as ``generation_kwargs`` of lm-eval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

from edit_hooks.decoding import Decoding


def generation_arguments(kwargs: Mapping[str, Any] | None, decoding: Decoding | None) -> dict[str, Any]:
    """The task's ``generation_kwargs`` with a question's own settings.

    `edited_hf` reads the settings themselves, from the document. The model classes of lm-eval read these; seeds,
    lengths in tokens of another text and budgets for thoughts have no name there.
    """
    arguments = deepcopy(dict(kwargs or {}))
    if decoding is None:
        return arguments
    if decoding.max_new_tokens is not None:
        arguments["max_gen_toks"] = decoding.max_new_tokens
    if decoding.until is not None:
        arguments["until"] = list(decoding.until)
    if (sampling := decoding.sampling) is not None:
        arguments |= {"do_sample": True, "temperature": sampling.temperature}
        arguments |= {"top_k": sampling.top_k} if sampling.top_k is not None else {}
        arguments |= {"top_p": sampling.top_p} if sampling.top_p is not None else {}
    return arguments


def after_prompt(decoding: Decoding | None, delimiter: str) -> Decoding | None:
    """The settings with the text that fixes the length as it continues a prompt, unless it counts by itself."""
    if decoding is None or decoding.length_of is None or decoding.length_of_alone:
        return decoding
    return replace(decoding, length_of=delimiter + decoding.length_of)


def stop_strings(decoding: Decoding | None, of_task: Sequence[str]) -> list[str]:
    """The strings at which the answer to a question is cut: none if a text fixes its length."""
    if decoding is None:
        return list(of_task)
    if decoding.length_of is not None:
        return []
    return list(of_task if decoding.until is None else decoding.until)
