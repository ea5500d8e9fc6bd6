"""Exact streams: the weights of one joint edit in any order and cut, corrections, deletions, compensated wrappers."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
from layered_edits import EDIT_REQUESTS, covariance, largest_difference, load_memit_like, load_wide

from edit_hooks import Delta, EditingError, edited, load_editor
from edit_hooks.contract.tiny_models import EDIT_LAYER
from edit_hooks.deltas.apply import AppliedDeltas

EDITORS = {
    "memit": {},
    "pmet": {"fact_token": "last"},
    "alphaedit": {"nullspace_energy": 0.5, "l2": 0.3},
    "emmet": {"ridge": 0.2, "identity_weight": 0.1},
}
FACTS = EDIT_REQUESTS[:4]
CORRECTION = replace(FACTS[1], target_new=FACTS[2].target_new)


@functools.cache
def editor_of(name, stream="exact", model_type="gpt2"):
    settings = {"layers": [EDIT_LAYER], "num_steps": 3, "stream": stream, **EDITORS[name]}
    return load_memit_like(name, model_type, **settings)


def stream_of(editor, steps, model_type="gpt2", condense=False):
    """The deltas of a stream, each step a list of requests; with the history as a runner condenses it."""
    model, tokenizer = load_wide(model_type)
    deltas, history = [], []
    with AppliedDeltas(model) as applied:
        for step in steps:
            (delta,) = editor.edit(model, tokenizer, step, joint=True, history=history, measure=False)
            applied.add(delta)
            deltas.append(delta)
            history = editor.condensed(model, [*history, delta]) if condense else deltas
    return deltas


@functools.cache
def joint(name, facts=tuple(FACTS), model_type="gpt2"):
    """One joint edit as released."""
    (delta,) = editor_of(name, "released", model_type).edit(*load_wide(model_type), list(facts), joint=True)
    return delta


@pytest.mark.parametrize("name", EDITORS)
def test_a_stream_equals_the_joint_edit(name):
    a, b, c, d = FACTS
    for steps, condense in (([[a], [b], [c], [d]], True), ([[d, b], [a, c]], False)):
        total = Delta.summed(stream_of(editor_of(name), steps, condense=condense))
        assert largest_difference(total, joint(name)) < 1e-12, steps
    released = editor_of(name, "released")
    assert largest_difference(Delta.summed(stream_of(released, [[a, c], [b, d]])), joint(name)) > 1e-3


def test_so_it_does_on_a_model_that_norms_its_mlp_outputs():
    total = Delta.summed(stream_of(editor_of("memit", model_type="gemma3_text"), [[f] for f in FACTS], "gemma3_text"))
    # its norms compute in float32
    assert largest_difference(total, joint("memit", model_type="gemma3_text")) < 1e-5


@pytest.mark.parametrize("name", ["memit", "alphaedit"])
def test_a_correction_is_written_whole_and_equals_the_joint_edit_with_it(name):
    a, b, c, d = FACTS
    for last in ([CORRECTION], [b, d, CORRECTION]):  # alone; beside a new fact and an earlier edit of the same one
        deltas = stream_of(editor_of(name), [[a], [b], [c], last])
        facts = (a, CORRECTION, c, d) if d in last else (a, CORRECTION, c)
        assert largest_difference(Delta.summed(deltas), joint(name, facts)) < 1e-12
    carried = {"layers": [EDIT_LAYER], "carry_keys": True, "num_steps": 3, **EDITORS[name]}
    released = load_memit_like(name, "gpt2", **carried)
    exact = stream_of(editor_of(name), [[b], [CORRECTION]])
    half = stream_of(released, [[b], [CORRECTION]])
    written, short = (deltas[1].diagnostics["layers"][0]["written_share"] for deltas in (exact, half))
    assert written == pytest.approx(exact[0].diagnostics["layers"][0]["written_share"]) and short < 0.5 < written
    assert any("edited again" in text for text in half[1].warnings)
    assert not any("edited again" in text for text in exact[1].warnings)


def from_disk(deltas, folder):
    """The steps as a resumed run reads them."""
    for number, delta in enumerate(deltas):
        delta.save(folder / f"{number}.safetensors")
    return [Delta.load(folder / f"{number}.safetensors") for number in range(len(deltas))]


@pytest.mark.parametrize("how", ["whole", "condensed", "resumed"])
@pytest.mark.parametrize("name", ["memit", "alphaedit"])
def test_a_deleted_fact_was_never_written(name, how, tmp_path):
    model, tokenizer = load_wide("gpt2")
    a, b, c, d = FACTS
    editor = editor_of(name)
    steps = stream_of(editor, [[a, b], [CORRECTION], [c]])
    history = from_disk(steps, tmp_path) if how == "resumed" else steps
    history = history if how == "whole" else editor.condensed(model, history)
    with edited(model, Delta.summed(steps)):
        gone = editor.remove(model, tokenizer, [replace(b, target_new="anything"), c, c], history)
        history = [*steps, gone] if how == "whole" else editor.condensed(model, [*history, gone])
    assert largest_difference(Delta.summed([*steps, gone]), joint(name, (a,))) < 1e-12
    # taking back the step's own update is not the same, and the stream goes on
    assert largest_difference(Delta.summed([steps[0], steps[1]]), joint(name, (a, CORRECTION))) < 1e-12
    with edited(model, Delta.summed([*steps, gone])):
        (again,) = editor.edit(model, tokenizer, [d, c], joint=True, history=history, measure=False)
        with pytest.raises(EditingError, match="none of the 1 facts"):
            editor.remove(model, tokenizer, [b], history)
    assert largest_difference(Delta.summed([*steps, gone, again]), joint(name, (a, d, c))) < 1e-12


def test_what_a_stream_left_survives_the_disk(tmp_path):
    deltas = stream_of(editor_of("memit"), [[fact] for fact in FACTS[:3]])
    loaded = from_disk(deltas, tmp_path)
    model, tokenizer = load_wide("gpt2")
    with edited(model, Delta.summed(deltas)):
        ours, theirs = (
            editor_of("memit").edit(model, tokenizer, FACTS[3:], joint=True, history=history, measure=False)[0]
            for history in (deltas, loaded)
        )
    assert largest_difference(ours, theirs) == 0


# How each wrapper cuts updates, and settings under which it does not.
WRAPPERS = {
    "rect": ("memit", {"keep": 0.3}, {"keep": 1.0}),
    "prune": ("alphaedit", {"function": "linear"}, {"function": "log", "log_base": 1.01, "safe": True}),
}


def wide_settings(base):
    """Updates long enough to be restrained."""
    return {**editor_of(base).overrides, "lr": 5.0, "clamp_factor": 100.0}


@pytest.mark.parametrize("name", WRAPPERS)
def test_aligned_wrappers_owe_only_what_the_last_step_left_out(name):
    """Raw updates equal the joint edit, and a last step that cuts nothing writes all that is owed."""
    model, tokenizer = load_wide("gpt2")
    base, cut, whole = WRAPPERS[name]
    (expected,) = load_editor(base, wide_settings(base) | {"stream": "released"}).edit(
        model, tokenizer, FACTS, joint=True
    )
    config = {"base": base, "base_settings": wide_settings(base)}
    steps = [[fact] for fact in FACTS]
    aligned = load_editor(name, {**config, **cut, "aligned": True})
    deltas = stream_of(aligned, steps, condense=True)
    with edited(model, Delta.summed(deltas[:3])):
        paid, again = (
            editor.edit(model, tokenizer, FACTS[3:], joint=True, history=deltas[:3], measure=False)[0]
            for editor in (load_editor(name, {**config, **whole, "aligned": True}), aligned)
        )
    assert largest_difference(Delta.summed([*deltas[:3], paid]), expected) < 1e-12
    assert largest_difference(again, deltas[3]) < 1e-12  # from whole deltas or from condensed ones
    assert largest_difference(Delta.summed(deltas), expected) > 1e-4
    released = {"base": base, "base_settings": wide_settings(base) | {"stream": "released"}}
    naive = stream_of(load_editor(name, {**released, **cut}), steps)
    assert largest_difference(Delta.summed(deltas), Delta.summed(naive)) > 1e-4


def test_a_restrained_stream_of_an_exact_base_is_the_restrained_joint_edit():
    """Without ``aligned``, PRUNE restrains the sum of all steps."""
    prune = load_editor("prune", {"base": "memit", "base_settings": wide_settings("memit"), "function": "linear"})
    (expected,) = prune.edit(*load_wide("gpt2"), FACTS, joint=True)
    deltas = stream_of(prune, [[fact] for fact in FACTS])
    assert sum(report["num_restrained"] for report in deltas[-1].diagnostics["prune"].values()) > 0
    assert largest_difference(Delta.summed(deltas), expected) < 1e-10


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("memit", {"layers": [0, 1]}, "needs one edited layer"),
        ("memit", {"layers": [1], "second_moments": None, "moment_weight": None}, "the same at every step"),
        ("emmet", {"layers": [1], "ridge_single": False}, "the same at every step"),
    ],
)
def test_settings_that_cannot_be_exact_are_refused(name, settings, message):
    with pytest.raises(EditingError, match=message):
        load_memit_like(name, "llama", stream="exact", **settings).edit(*load_wide("llama"), FACTS[:1])


def test_deletion_and_compensation_need_an_exact_stream():
    model, tokenizer = load_wide("gpt2")
    with pytest.raises(EditingError, match="stream=exact"):
        editor_of("memit", "released").remove(model, tokenizer, FACTS[:1], [joint("memit")])
    with pytest.raises(EditingError, match="aligned=true needs"):
        load_editor("rect", {"aligned": True, "base_settings": {"second_moments": covariance("gpt2")}})
