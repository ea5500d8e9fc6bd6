"""Two models edited in two threads at once give the edits of one after the other; global generators stay untouched."""

from __future__ import annotations

import random
import threading

import numpy
import pytest
import torch
from editor_settings import settings_of
from interrupts import complete_state
from state import assert_same_state

from edit_hooks import EditRequest, load_editor
from edit_hooks.base.registry import editor_names
from edit_hooks.contract.tiny_models import NATURAL_TOKENIZER, REQUESTS, build_model, build_tokenizer

FAMILIES = ("llama", "gpt2")
REQUEST_LIST = [EditRequest(**record) for record in REQUESTS[:2]]

# One of each machinery: cached suffix and prefix, hooks, replaced forwards, memories, dropout, integrals.
MACHINERIES = ("rome", "pmet", "bird", "ft_m", "grace", "wise", "melo", "lora", "kn")
SHORT = {**{name: {"num_steps": 2} for name in MACHINERIES}, "lora": {"num_steps": 3, "dropout": 0.5}}


def edits_of(name, model, tokenizer):
    """Checksums of a fresh editor's edits; sampled settings included where the editor has any."""
    editor = load_editor(name, {**settings_of(name), **SHORT.get(name, {})})
    return [delta.checksum() for delta in editor.edit(model, tokenizer, REQUEST_LIST)]


def check_threads(names, num_rounds):
    loaded = [(build_model(family), build_tokenizer(NATURAL_TOKENIZER[family])) for family in FAMILIES]
    expected = [{name: edits_of(name, *pair) for name in names} for pair in loaded]
    before = [complete_state(*pair) for pair in loaded]
    wrong: list[str] = []
    start = threading.Barrier(len(loaded))

    def work(index):
        try:
            for turn in range(num_rounds):
                start.wait(timeout=60)
                for name in names if turn % 2 == 0 else reversed(names):
                    if edits_of(name, *loaded[index]) != expected[index][name]:
                        wrong.append(f"{name} on {FAMILIES[index]}, round {turn}")
        except BaseException as error:
            wrong.append(repr(error))
            start.abort()
            raise

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(loaded))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong
    for pair, state in zip(loaded, before, strict=True):
        assert_same_state(state, complete_state(*pair))


def test_two_threads_give_the_edits_of_one_after_the_other():
    check_threads(MACHINERIES, 1)


@pytest.mark.slow
def test_all_editors_in_two_threads():
    check_threads(editor_names(), 4)


def check_generators(name):
    """An edit neither draws from the generators of torch, random and numpy, nor depends on them."""
    model, tokenizer = build_model("llama"), build_tokenizer(NATURAL_TOKENIZER["llama"])
    settings = {**settings_of(name), **SHORT.get(name, {})}
    seen = []
    for seed in (1, 2):
        random.seed(seed), numpy.random.seed(seed), torch.manual_seed(seed)
        before = complete_state(model, tokenizer)
        seen.append(load_editor(name, settings).edit(model, tokenizer, REQUEST_LIST[:1])[0].checksum())
        assert_same_state(before, complete_state(model, tokenizer))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("name", [*MACHINERIES, "ike", "mend"])
def test_editing_uses_no_global_generator(name):
    check_generators(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", editor_names())
def test_no_editor_uses_a_global_generator(name):
    check_generators(name)
