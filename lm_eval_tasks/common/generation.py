"""Decoding settings of a question as ``generation_kwargs`` of lm-eval."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
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
