"""Quick edits and readings of an edited model, to be compared between devices and engines."""

from __future__ import annotations

import dataclasses
from typing import Any

from edit_hooks import Delta
from edit_hooks.contract.subject import EDIT_REQUESTS, Subject
from edit_hooks.deltas.apply import AppliedDeltas
from edit_hooks.inference.decoding import generate
from edit_hooks.inference.effects.states import StateComparison
from edit_hooks.inference.items import GenerateItem, Limits, ScoreItem, StateItem, TokenNoise
from edit_hooks.inference.reference import generate_reference, score_reference
from edit_hooks.inference.scoring import score

CONTEXT = (5, 9, 14, 20, 8)
SCORED = [ScoreItem(CONTEXT, (5, 6)), ScoreItem(CONTEXT[:-1], (7,))]
ASKED = [GenerateItem(CONTEXT, (), 6), GenerateItem(CONTEXT[:-2], (), 3)]
STATES = [
    *(StateItem(CONTEXT, state=state, noise=None) for state in ("before_norm", "after_norm", 1)),
    StateItem(CONTEXT, state=1, noise=TokenNoise(positions=(1, 2), sigma=0.1, seed="a")),
]


def quick_settings(subject: Subject) -> dict[str, Any]:
    """Settings with two steps of training and one context, where the editor, or its base, has them."""
    wanted = {"num_steps": 2, "context_templates": ["{}"], "calibration": ["He speaks English, French and Italian."]}
    known = {field.name for field in dataclasses.fields(subject.editor_class.config_class)}
    settings = {name: value for name, value in wanted.items() if name in known}
    if "base_settings" in known:
        of_base = {field.name for field in dataclasses.fields(subject.make().base.config_class)} - known
        few = {name: value for name, value in wanted.items() if name in of_base}
        settings["base_settings"] = {**subject.settings["base_settings"], **few}
    return settings


def edits(subject: Subject, model: Any, more: dict[str, Any]) -> list[Delta]:
    """Two independent edits, and a stream of two steps."""
    editor = subject.make(**quick_settings(subject), **more)
    joint = subject.capabilities.supports_joint
    independent = editor.edit(model, subject.tokenizer, EDIT_REQUESTS[:2])
    history: list[Delta] = []
    with AppliedDeltas(model) as applied:
        for request in EDIT_REQUESTS[:2]:
            history += editor.edit(model, subject.tokenizer, [request], joint=joint, history=history, measure=False)
            applied.add(history[-1])
    return [*independent, *history]


def jobs(items: list[Any], delta: Delta | None) -> list[Any]:
    """Every item under the edit and without one; rows of a batch end at different times."""
    return [(item, one) for item in items for one in (delta, None)]


def readings(model: Any, tokenizer: Any, delta: Delta, engine: str = "fast") -> dict[str, list[Any]]:
    """What the harness reads from an edited model, by kind."""
    under, is_fast = [(item, delta) for item in STATES], engine == "fast"
    states = StateComparison(one_by_one=not is_fast).compare(model, under, Limits(), no_progress)
    scored, asked = jobs(SCORED, delta), jobs(ASKED, delta)
    if is_fast:
        scores = score(model, scored, Limits(), no_progress)
        texts = generate(model, tokenizer, asked, Limits(), no_progress)
    else:
        scores = score_reference(model, scored, no_progress)
        texts = generate_reference(model, tokenizer, asked, no_progress)
    return {"scores": scores, "texts": texts, "states": states}


def no_progress(_count: int) -> None: ...


def flat(value: Any) -> list[Any]:
    """The leaves of nested results."""
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [leaf for part in value for leaf in flat(part)]
    return [value]
