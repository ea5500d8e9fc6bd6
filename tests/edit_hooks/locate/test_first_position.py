"""Edits whose fact token is the first token of the sequence: made behind a template's text, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from editor_settings import settings_of

import edit_hooks.locate.value_editor
from edit_hooks import Delta, EditingError, EditRequest, load_editor
from edit_hooks.contract.tiny_models import build_model, build_tokenizer
from edit_hooks.locate.values import evk_align
from edit_hooks.prompt_context import qa_context
from edit_hooks.utils.errors import UnusableRequestError

FACT = {"target_new": "Rome", "target_true": "Paris", "relation_id": "P131"}
FIRST = EditRequest(prompt="{} is located in", subject="The", case_id="first", **FACT)  # one token
INSIDE = EditRequest(prompt="The harbour of {} is located in", subject="Port Amelin", case_id="inside", **FACT)
TEMPLATES = ["{}", "The band released. {}", "You can see. {}"]
STAND_INS = [TEMPLATES[1], *TEMPLATES[1:]]
EDITORS = ["r_rome", "memit", "alphaedit", "pmet", "bird", "rect"]


@pytest.fixture(scope="module")
def tiny() -> Any:
    """A tokenizer without a start token."""
    return build_model("gpt2", dtype=torch.float64), build_tokenizer("byte_bpe")


def settings(editor: str, **more: Any) -> dict[str, Any]:
    """Quick settings; those of a locate-then-edit editor inside an editor that wraps one."""
    found = settings_of(editor)
    inner = {"fact_token": "subject_last", "num_steps": 3, "context_templates": TEMPLATES, **more}
    if "base_settings" in found:
        return {**found, "base_settings": {**found["base_settings"], **inner}}
    return {**found, **inner}


def edit(tiny: Any, editor: str, *requests: EditRequest, **more: Any) -> list[Delta]:
    return load_editor(editor, settings(editor, **more)).edit(*tiny, list(requests))


def assert_same(ours: Delta, theirs: Delta) -> None:
    assert ours.weights().keys() == theirs.weights().keys() != set()
    for name, update in ours.weights().items():
        assert torch.equal(update, theirs.weights()[name])


def distance(ours: Delta, theirs: Delta) -> float:
    """Largest relative distance of the updates; sums depend in their last bits on the rows of a batch."""
    first, second = ours.weights(), theirs.weights()
    return max(float((first[name] - second[name]).norm() / second[name].norm()) for name in second)


@pytest.mark.parametrize("editor", EDITORS)
def test_a_template_with_text_stands_in_for_the_bare_prompt(tiny, editor, monkeypatch):
    ours, inside = edit(tiny, editor, FIRST, INSIDE)
    released, inside_too = edit(tiny, editor, FIRST, INSIDE, first_position="released")
    assert distance(inside, inside_too) < 1e-9 < 1e-3 < distance(ours, released)
    monkeypatch.setattr(edit_hooks.locate.value_editor, "check_templates", lambda templates: None)
    expected, other = edit(tiny, editor, FIRST, INSIDE, context_templates=STAND_INS, first_position="released")
    assert distance(ours, expected) < 1e-9 < 1e-3 < distance(inside, other)


def test_evk_align_perturbs_the_stand_in(tiny, monkeypatch):
    draw, texts = evk_align.draw_instances, []
    monkeypatch.setattr(evk_align, "draw_instances", lambda *given: texts.append(given[1].text) or draw(*given))
    edit(tiny, "rome", FIRST, INSIDE, evk_align=True, evk_sigma=0.5)
    assert sorted(texts) == ["The band released. The is located in", INSIDE.text]


@pytest.mark.parametrize("templates", [["{}"], "bare", ["{}", "{} and so on"]])
def test_without_a_template_with_text_the_request_is_refused(tiny, templates):
    editor = load_editor("r_rome", settings("r_rome", context_templates=templates))
    reasons = editor.find_unusable(tiny[1], [FIRST, INSIDE], None)  # no model is needed
    assert list(reasons) == [FIRST.key]
    with pytest.raises(UnusableRequestError, match=r"case first: .* Put words before the subject, or .*sampled_21"):
        editor.edit(*tiny, [FIRST, INSIDE])
    assert len(editor.edit(*tiny, [INSIDE])) == 1


def test_editors_that_wrap_another_refuse_it(tiny):
    with pytest.raises(UnusableRequestError, match="case first"):
        edit(tiny, "rect", FIRST, context_templates=["{}"])


@pytest.mark.parametrize(
    "request_", [INSIDE, FIRST.in_context(qa_context()), EditRequest(prompt="Give The", subject="The", **FACT)]
)
def test_with_text_before_the_fact_token_nothing_changes(tiny, request_):
    settings_ = {"context_templates": ["{}"]}
    assert_same(
        edit(tiny, "rome", request_, **settings_)[0],
        edit(tiny, "rome", request_, **settings_, first_position="released")[0],
    )


@pytest.mark.parametrize("editor", ["r_rome", "memit"])
def test_with_a_start_token_nothing_changes(editor):
    tiny = build_model("llama", dtype=torch.float64), build_tokenizer("byte_bpe_bos")
    assert_same(edit(tiny, editor, FIRST)[0], edit(tiny, editor, FIRST, first_position="released")[0])


def test_a_prompt_of_one_token_is_edited_at_its_last_token(tiny):
    one = EditRequest(prompt="The", subject="The", **FACT)
    with pytest.raises(UnusableRequestError, match="first token of the sequence"):
        edit(tiny, "rome", one, fact_token="last", context_templates=["{}"])
    (delta,) = edit(tiny, "rome", one, fact_token="last")
    assert "behind the context templates only" in " ".join(delta.warnings)


def test_the_choice_is_recorded_and_named(tiny):
    (ours,), (released,) = (edit(tiny, "rome", FIRST, **more) for more in ({}, {"first_position": "released"}))
    assert ours.meta["config"]["first_position"] == "stand_in"
    assert "not in the bare prompt" in " ".join(ours.warnings)
    assert "can wreck the model" in " ".join(released.warnings)
    with pytest.raises(EditingError, match="first_position"):
        load_editor("rome", {"first_position": "keep"})
