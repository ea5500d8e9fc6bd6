"""Ctrl-C at any line of an edit or an answer leaves nothing behind: weights, hooks, flags, modes, generators, files."""

from __future__ import annotations

import random

import pytest
import torch
from editor_settings import settings_of
from interrupts import complete_state, executed_lines, interrupt_at
from random_deltas import codebook, dense_delta, random_delta, rewrite_name
from state import assert_same_state

from edit_hooks import Delta, EditRequest, edited, load_editor
from edit_hooks.base.registry import editor_names
from edit_hooks.contract.tiny_models import NATURAL_TOKENIZER, REQUESTS, build_model, build_tokenizer
from edit_hooks.deltas.row_edits import RowEdits
from edit_hooks.inference.items import Limits, ScoreItem
from edit_hooks.inference.scoring import score
from edit_hooks.modeling.forward.kv_cache import CACHE
from edit_hooks.modeling.forward.prefix_attention import cached_prefix
from edit_hooks.modeling.forward.prefix_cache import compute_prefix_cache
from edit_hooks.modeling.forward.sampling import greedy_continuation, sample_texts
from edit_hooks.modeling.hooks import forward_replaced, frozen, hooks, on_input, on_output, stop_after

IDS = torch.tensor([[5, 9, 17, 23]])


def run_edited(model, tokenizer, folder):
    """Weights, hooks and both together, with a pass inside."""
    first = Delta(dense=dense_delta(model, layer=0).dense, hook_edit=codebook(model))
    with edited(model, first), edited(model, random_delta(model), prompt_lengths=[4]):
        model(IDS)


def run_rows(model, tokenizer, folder):
    edits = RowEdits(model, [random_delta(model), None, Delta(hook_edit=codebook(model))])
    with torch.no_grad():
        with edits.prefill(torch.ones(3, 4, dtype=torch.long), torch.tensor([4, 4, 4])):
            cache = model(IDS.expand(3, 4), use_cache=True)[CACHE]
        with edits.step():
            model(IDS[:, :1].expand(3, 1), use_cache=True, **{CACHE: cache})


def run_hooks(model, tokenizer, folder):
    block = model.get_submodule("model.layers.0")
    rewrite = model.get_submodule(rewrite_name(model))
    with frozen(model), hooks(on_input(rewrite, lambda x: None), on_output(rewrite, lambda y: 2 * y)):
        with forward_replaced(rewrite, rewrite.forward), stop_after(block):
            model(IDS)
        with frozen(model):
            model(IDS)


def run_input_hook(model, tokenizer, folder):
    with hooks(on_input(model.get_submodule(rewrite_name(model)), lambda x: None)):
        pass


def run_prefix(model, tokenizer, folder):
    layers = compute_prefix_cache(model, [[5, 9, 17]]).layers
    with torch.no_grad(), cached_prefix(model, layers) as cache:
        position = torch.tensor([[3, 4]])
        model(IDS[:, :2], attention_mask=torch.ones(1, 5), position_ids=position, use_cache=True, **{CACHE: cache})


def run_sampling(model, tokenizer, folder):
    sample_texts(model, tokenizer, 1, 4, seed=0)
    greedy_continuation(model, [5, 9], 2)


def run_files(model, tokenizer, folder):
    random_delta(model).save(folder / "edit.safetensors")


ACTIONS = {
    run_edited: ("deltas/apply.py", "deltas/hook_edit.py"),
    run_rows: ("deltas/row_edits.py", "deltas/row_adapters.py"),
    run_hooks: ("modeling/hooks.py",),
    run_input_hook: ("modeling/hooks.py",),
    run_prefix: ("modeling/forward/prefix_attention.py",),
    run_sampling: ("modeling/forward/sampling.py", "modeling/grad_mode.py"),
    run_files: ("utils/storage/files.py",),
}


def check_lines(action, folder, files, pick=lambda line: True):
    """Interrupt an action at the picked lines of some files; compare everything after each."""
    model, tokenizer = build_model("llama"), build_tokenizer(NATURAL_TOKENIZER["llama"])
    model.train()
    next(model.parameters()).requires_grad_(False)

    def act():
        action(model, tokenizer, folder)

    act()  # imports, and what torch fills lazily
    before = complete_state(model, tokenizer)
    lines = [line for line in executed_lines(act, *files) if pick(line)]
    assert lines
    for line in lines:
        interrupt_at(line, act)
        assert_same_state(before, complete_state(model, tokenizer))
        assert {path.name for path in folder.iterdir()} <= {"edit.safetensors"}, line


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.__name__)
def test_an_interrupt_at_any_line_of_a_scope_is_undone(action, tmp_path):
    """At every line of the modules of scopes, the first time that it runs."""
    check_lines(action, tmp_path, ACTIONS[action], lambda line: line.occurrence == 1)


def test_an_interrupt_while_a_scope_is_undone_does_not_stop_the_undoing(tmp_path):
    """At every execution of every line of the scopes' common code."""
    check_lines(run_edited, tmp_path, ["utils/scopes.py"])


@pytest.mark.slow
@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.__name__)
def test_an_interrupt_at_any_later_run_of_a_line_is_undone(action, tmp_path):
    check_lines(action, tmp_path, [*ACTIONS[action], "utils/scopes.py"], lambda line: 1 < line.occurrence < 20)


def editing(name, model, tokenizer):
    """Edit and answer with one editor, which all calls share; returns the checksum of the edit."""
    editor = load_editor(name, {**settings_of(name), **SHORT.get(name, {})})
    item = ScoreItem((5, 9, 17), (23,))

    def act():
        (delta,) = editor.edit(model, tokenizer, [EditRequest(**REQUESTS[0])])
        on_model = delta.without_contexts
        score(model, [(item, on_model)], Limits(), lambda count: None)
        return delta.checksum()

    return act


SHORT = {name: {"num_steps": 2} for name in ("rome", "ft_m", "grace", "wise", "melo", "lora", "kn")}


def check_editor(name, num_lines):
    """Interrupt an edit and its answer at some lines of the package; the editor is as good as new after each."""
    model, tokenizer = build_model("llama"), build_tokenizer(NATURAL_TOKENIZER["llama"])
    act = editing(name, model, tokenizer)
    expected = act()
    before = complete_state(model, tokenizer)
    lines = executed_lines(act)
    for line in random.Random(name).sample(lines, num_lines):
        interrupt_at(line, act)
        assert_same_state(before, complete_state(model, tokenizer))
    assert act() == expected


@pytest.mark.parametrize("name", ["rome", "ft_m", "grace", "wise", "melo", "lora"])
def test_an_interrupted_edit_leaves_model_and_editor_as_they_were(name):
    check_editor(name, 5)


@pytest.mark.slow
@pytest.mark.parametrize("name", editor_names())
def test_every_editor_can_be_interrupted_anywhere(name):
    check_editor(name, 60)
