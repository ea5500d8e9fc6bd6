"""A process that keeps models loads each once, unless its files, its options or what is put into it differ."""

from __future__ import annotations

import os

import pytest
from transformers import AutoModelForCausalLM

from edit_hooks.contract.tiny_models import save_tiny
from edit_hooks.lm.loading import checkpoint
from edit_hooks.lm.loading.checkpoint import CompleteLoading, KeptModel


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "KEPT", KeptModel())
    folder = save_tiny(tmp_path, "llama")

    def load(may_be_kept=True, **options):
        return CompleteLoading(AutoModelForCausalLM, may_be_kept).from_pretrained(str(folder), **options)

    load.folder = folder
    return load


def test_an_ordinary_process_keeps_no_model(load):
    assert load() is not load()


def test_the_last_model_is_kept(load):
    checkpoint.KEPT.start()
    first = load()
    assert load() is first
    other = load(dtype="bfloat16")
    assert other is not first and load(dtype="bfloat16") is other
    assert load() is not first, "one model at a time"


def test_changed_files_are_loaded_again(load):
    checkpoint.KEPT.start()
    first = load()
    os.utime(load.folder / "config.json", ns=(0, 0))
    assert load() is not first


def test_a_model_that_is_changed_after_loading_is_not_kept(load):
    checkpoint.KEPT.start()
    adapted = load(may_be_kept=False)
    assert load() is not adapted
