"""Decoding settings of questions, and ``generation_kwargs`` of lm-eval."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, replace
from typing import Any

from edit_hooks.decoding import Decoding
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.text.scripts import sentence_ends, warn_of_english_rule, writes_spaces
from lm_eval_tasks.common.asking.probes import PLACEHOLDER

logger = get_logger("lm_eval.editing_tasks")

GOLD = "the gold answer"  # in place of the text that fixes the length of an answer
PERIOD = "."  # the stop string that has counterparts in other scripts
NOT_STATED = ("seed", "draw")  # of sampling: the seed is a setting, the draw a number of the request


def generation_arguments(
    kwargs: Mapping[str, Any] | None, decoding: Decoding | None, until: Sequence[str] | None = None
) -> dict[str, Any]:
    """The task's ``generation_kwargs`` with a question's own settings.

    Args:
        until: stop strings in place of the task's.

    `edited_hf` reads the settings themselves, from the document. The model classes of lm-eval read these; seeds,
    lengths in tokens of another text and budgets for thoughts have no name there.
    """
    arguments = deepcopy(dict(kwargs or {}))
    if until is not None:
        arguments["until"] = list(until)
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


def after_prompt(decoding: Decoding | None, separator: str) -> Decoding | None:
    """The settings with the text that fixes the length as it continues a prompt, unless it counts by itself."""
    if decoding is None or decoding.length_of is None or decoding.length_of_alone:
        return decoding
    return replace(decoding, length_of=separator + decoding.length_of)


def stops_of_scripts(stops: Sequence[str], question: str, gold: str) -> list[str]:
    """The stop strings of a task with the counterparts of its period in the scripts of a question and its answer.

    English text has none, and neither have protocols without a period.
    """
    if PERIOD not in stops:
        return list(stops)
    last_letter = next((character for character in reversed(question) if character.isalpha()), "")
    if last_letter and writes_spaces(last_letter) is False and not sentence_ends((last_letter, gold)):
        remedy = "No mark ends a sentence there: answers end at a line break. Other ends: --gen_kwargs until=..."
        warn_of_english_rule(logger, "the stop rule of free answers", [question], remedy)
    return [*stops, *(mark for mark in sentence_ends((last_letter, gold)) if mark not in stops)]


def further_stops(docs: Iterable[Mapping[str, Any]], stops: Sequence[str]) -> list[str]:
    """The stop strings that :func:`stops_of_scripts` adds to those of a task, for any question that follows them."""
    asked = (probe for doc in docs for probe in doc["probes"] if probe["generate"] and _follows_task(probe))
    found = [stop for probe in asked for stop in stops_of_scripts(stops, probe["question"], probe["gold"])]
    return sorted(set(found) - set(stops))


def stop_strings(decoding: Decoding | None, of_task: Sequence[str]) -> list[str]:
    """The strings at which the answer to a question is cut: none if a text fixes its length."""
    if decoding is None:
        return list(of_task)
    if decoding.length_of is not None:
        return []
    return list(of_task if decoding.until is None else decoding.until)


def follow_task(docs: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a generated question takes settings from its task, helpers included."""
    return any(_follows_task(probe) for doc in docs for probe in doc["probes"] if probe["generate"])


def own_decodings(docs: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The decoding settings of the generated questions, each once; empty if one follows its task's.

    Helpers, which ask the unedited model alone, do not count: they select cases.
    """
    found: dict[str, dict[str, Any]] = {}
    for doc in docs:
        for probe in doc["probes"]:
            asked = probe["ask_generation"] or probe["ask"]
            if not probe["generate"] or probe["kind"] == PLACEHOLDER or asked == "unedited":
                continue
            if _follows_task(probe):
                return []
            stated = _stated(Decoding.from_json(probe["decoding"]))
            found.setdefault(json.dumps(stated), stated)
    return list(found.values())


def _follows_task(probe: Mapping[str, Any]) -> bool:
    """Whether length or end of an answer is left to the task."""
    decoding = probe["decoding"]
    if probe["kind"] == PLACEHOLDER or decoding is None:
        return decoding is None and probe["kind"] != PLACEHOLDER
    has_length = decoding["max_new_tokens"] is not None or decoding["max_total_tokens"] is not None
    return decoding["length_of"] is None and not (has_length and decoding["until"] is not None)


def _stated(decoding: Decoding) -> dict[str, Any]:
    """The settings that are not at their default, and whether tokens are drawn."""
    texts: dict[str, Any] = {"do_sample": decoding.sampling is not None}
    texts |= {} if decoding.until is None else {"until": list(decoding.until)}
    texts |= {} if decoding.length_of is None else {"length_of": GOLD}
    sampling = asdict(decoding.sampling) if decoding.sampling is not None else {}
    given = {name: value for name, value in {**asdict(decoding), **sampling}.items() if value not in (None, False)}
    return {name: value for name, value in (given | texts).items() if name not in (*NOT_STATED, "sampling")}


def refuse_generation_kwargs(
    task: str, given: Mapping[str, Any], decodings: Sequence[Mapping[str, Any]], settings: Iterable[str]
) -> None:
    """Refuse ``--gen_kwargs`` for a task whose questions have their own decoding.

    Answers of the gold answer's length are no reason: they belong to groups with tasks that follow the settings.

    Args:
        decodings: of :func:`own_decodings`.
        settings: names of the benchmark's settings.

    Raises:
        EditingError: if a decoding has values in place of the given ones.
    """
    if all("length_of" in one for one in decodings):
        return
    own = " and ".join(generation_text(one) for one in decodings)
    raise EditingError(
        f"{task}: --gen_kwargs has {_pairs(given)}, which no question of this task follows: its protocol is {own}. "
        f"Drop --gen_kwargs, or run the other tasks apart. Settings of the benchmark, for --metadata: "
        f"{', '.join(settings)}."
    )


def generation_text(settings: Mapping[str, Any]) -> str:
    """Settings of a generation as one text, as in ``generation(max_new_tokens=64, until=['.'])``."""
    return f"generation({_pairs(settings)})"


def _pairs(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in sorted(settings.items()))
