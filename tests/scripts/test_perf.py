"""The speed measurements run, here on tiny models."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
from paths import ROOT

from edit_hooks.contract.tiny_models import build_model, build_tokenizer


@pytest.fixture
def load_script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "perf"))
    yield importlib.import_module
    for name in ("engine",):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("path", ["fast", "reference"])
def test_the_engine_is_measured(load_script: Callable[[str], ModuleType], path: str) -> None:
    engine = load_script("engine")
    args = argparse.Namespace(edits_from="bake")
    setup = engine.Setup(build_model("llama"), build_tokenizer("byte_bpe_bos"), args)
    engine.check_vocabulary(setup)
    assert engine.seconds_per_edit(setup, path, edits=1, steps=2, num_templates=6) > 0
    assert engine.seconds_per_case(setup, path, edits=1, steps=2) > 0
    assert setup.weight_bytes > 0


def test_the_fast_path_needs_fewer_operations(load_script: Callable[[str], ModuleType]) -> None:
    engine = load_script("engine")
    args = argparse.Namespace(edits_from="bake")
    setup = engine.Setup(build_model("llama"), build_tokenizer("byte_bpe_bos"), args)
    fast, reference = (engine.operations_per_edit(setup, path, edits=1, steps=20) for path in ("fast", "reference"))
    assert fast < reference


@pytest.mark.parametrize("editor", ["ft_m", "lora", "mend"])
def test_gradient_editors_need_fewer_operations(load_script: Callable[[str], ModuleType], editor: str) -> None:
    engine = load_script("engine")
    args = argparse.Namespace(edits_from="bake")
    setup = engine.Setup(build_model("llama"), build_tokenizer("byte_bpe_bos"), args)
    fast, plain = (engine.operations_per_edit(setup, path, 2, 5, editor) for path in ("fast", "reference"))
    assert fast < plain
    assert engine.seconds_per_edit(setup, "fast", 2, 2, editor) > 0
