"""Mirrored edits against the base editor's joint edit of rows that are written out here: the method is ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parity import relative_error

from edit_hooks import EditRequest, edited, load_editor
from edit_hooks.contract.subject import Subject
from edit_hooks.locate.value_editor import MEMIT_CONTRACT_SETTINGS
from edit_hooks.utils.errors import EditingError

LAYERS = [0, 1]
FACTS = [
    EditRequest(prompt="The capital of {} is", subject="Ostravia", target_new="Karsk"),
    EditRequest(prompt="The ship {} sails from", subject="Northern Star", target_new="Hamburg"),
]
ROWS = [
    FACTS[0],
    EditRequest(
        prompt='Fill in the blank: "The capital of ___ is {}." The blank stands for',
        subject="Karsk",
        target_new="Ostravia",
    ),
    EditRequest(prompt="{} is linked to", subject="Karsk", target_new="Ostravia"),
    FACTS[1],
    EditRequest(
        prompt='Fill in the blank: "The ship ___ sails from {}." The blank stands for',
        subject="Hamburg",
        target_new="Northern Star",
    ),
    EditRequest(prompt="{} is linked to", subject="Hamburg", target_new="Northern Star"),
]
OWN: dict[str, Any] = {"layers": LAYERS, "inverse_rows": ["cloze", "link"], "strength": 1.5}


def base_settings(base: str) -> dict[str, Any]:
    return {**MEMIT_CONTRACT_SETTINGS, **({"null_space_threshold": 1e-2} if base == "alphaedit" else {})}


@pytest.mark.parametrize("base", ["memit", "emmet"])
def test_the_update_is_the_joint_edit_of_the_rows_times_the_strength(base: str) -> None:
    subject = Subject("memit", "llama")
    plain = load_editor(base, {**base_settings(base), "layers": LAYERS})
    mirror = load_editor("mirror", {**OWN, "base": base, "base_settings": base_settings(base)})
    single = mirror.edit(subject.model, subject.tokenizer, FACTS, measure=False)
    (together,) = mirror.edit(subject.model, subject.tokenizer, FACTS, joint=True, measure=False)
    for delta, rows in [(single[0], ROWS[:3]), (single[1], ROWS[3:]), (together, ROWS)]:
        (expected,) = plain.edit(subject.model, subject.tokenizer, rows, joint=True, measure=False)
        assert set(delta.weights()) == set(expected.weights()) and len(delta.weights()) == 2
        for name, update in expected.weights().items():
            assert relative_error(delta.weights()[name], 1.5 * update) < 1e-6  # rounding of one product
        ratio = expected.diagnostics["update_norm_ratio"]
        assert delta.diagnostics["update_norm_ratio"] == pytest.approx(1.5 * ratio)
    made = [*single, together]
    assert [(one.diagnostics["num_requests"], one.diagnostics["num_rows"]) for one in made] == [(1, 3), (1, 3), (2, 6)]
    assert [len(delta.meta["requests"]) for delta in made] == [1, 1, 2]
    assert together.meta["requests"] == [fact.to_dict() for fact in FACTS]


def test_a_step_of_a_stream_protects_the_keys_of_all_rows_before() -> None:
    subject = Subject("memit", "llama")
    settings = {**base_settings("memit"), "carry_keys": True}
    plain = load_editor("memit", {**settings, "layers": LAYERS})
    mirror = load_editor("mirror", {**OWN, "strength": 1.0, "base_settings": settings})
    history: dict[str, list[Any]] = {"plain": [], "mirror": []}
    for editor, name, steps in ((plain, "plain", (ROWS[:3], ROWS[3:])), (mirror, "mirror", (FACTS[:1], FACTS[1:]))):
        for step in steps:
            with edited(subject.model, *history[name]):
                condensed = editor.condensed(subject.model, history[name]) if history[name] else []
                history[name] += editor.edit(
                    subject.model, subject.tokenizer, step, joint=True, history=condensed, measure=False
                )
    for expected, found in zip(history["plain"], history["mirror"], strict=True):
        assert all(torch.equal(found.weights()[name], update) for name, update in expected.weights().items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"base": "rome"}, "'rome' cannot be mirrored"),
        ({"base": "ft_m"}, "'ft_m' cannot be mirrored"),
        ({"base": "grace"}, "changes hooks"),
        ({"base": "rect"}, "itself has another editor as its base"),
        ({"base_settings": {"stream": "exact", "layers": [1]}, "strength": 2.0}, "Set strength: 1"),
        ({"strength": 0}, "strength"),
        ({"inverse_rows": ["who"]}, "who"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(EditingError, match=message):
        load_editor("mirror", settings)


def test_an_object_that_is_also_in_the_relation_is_located_where_it_stands_first() -> None:
    """No slot can mark it then, and the prompt names it in full."""
    fact = EditRequest(prompt="Among French writers, {} writes in", subject="Ada Kerr", target_new="French")
    subject = Subject("memit", "llama")
    mirror = load_editor("mirror", {**OWN, "base_settings": base_settings("memit")})
    (delta,) = mirror.edit(subject.model, subject.tokenizer, [fact], measure=False)
    assert delta.factors
