"""Hook edits: combining steps, kinds of installed packages, and kinds that a file cannot choose."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from fake_package import install_package
from lm_runs import build, run
from own_hook_editor import Steer, SteerHooks
from random_deltas import codebook, rewrite_name
from state import assert_same_state
from transformers import DynamicCache

from edit_hooks import Delta, EditingError, EditRequest, edited
from edit_hooks.contract.state import snapshot
from edit_hooks.contract.tiny_models import save_tiny
from edit_hooks.deltas import hook_edit as hook_edit_module
from edit_hooks.deltas.hook_edit import ENTRY_POINTS, HOOK_KINDS, HookEdit, HookKind, kind_class, register_kinds
from edit_hooks.deltas.row_edits import RowEdits
from edit_hooks.modeling.architectures import decoder_of
from edit_hooks.modeling.forward.kv_cache import CACHE, CACHE_NAMES

IDS = torch.tensor([[5, 6, 7, 8]])
PLUGIN = """
from edit_hooks.deltas.hook_edit import HookEdit, HookKind

class AddVector(HookKind):
    mixes_rows = True

    @classmethod
    def combine(cls, steps):
        return HookEdit("add_vector", {"vector": sum(step.tensors["vector"] for step in steps)}, steps[-1].settings)

    def transform_output(self, index, x, output):
        output = output.clone()
        rows = self.rows_of_edit(index, len(output), output.device)
        output[rows] += self.edits[index].tensors["vector"]
        return output
"""


@pytest.fixture(autouse=True)
def fresh_registry():
    """Entry points are read once per process."""
    hook_edit_module._registered_kinds.cache_clear()
    yield
    hook_edit_module._registered_kinds.cache_clear()


@pytest.fixture
def add_vector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An installed package with a hook kind of its own."""
    kinds = {ENTRY_POINTS: {"add_vector": "add_vector_plugin:AddVector", "no_kind": "add_vector_plugin:HookEdit"}}
    install_package(tmp_path / "site", monkeypatch, "add_vector_plugin", PLUGIN, kinds)
    yield tmp_path
    sys.modules.pop("add_vector_plugin", None)


def vector_edit(model, value: float) -> HookEdit:
    return HookEdit(
        "add_vector", {"vector": torch.full((model.config.hidden_size,), value)}, {"module": rewrite_name(model)}
    )


@pytest.mark.parametrize("target", HOOK_KINDS.values())
def test_every_built_in_kind_exists(target):
    assert issubclass(kind_class(next(kind for kind, path in HOOK_KINDS.items() if path == target)), HookKind)


def test_steps_at_different_modules_are_not_combined():
    with pytest.raises(EditingError, match="cannot be put together"):
        HookEdit.combine([HookEdit("codebook", {}, {"module": "a"}), HookEdit("codebook", {}, {"module": "b"})])
    with pytest.raises(EditingError, match="cannot be put together"):
        HookEdit.combine([HookEdit("codebook", {}, {"module": "a"}), HookEdit("side_memory", {}, {"module": "a"})])


def test_steps_without_hooks_are_skipped():
    edit = HookEdit("codebook", {}, {"module": "a"})
    assert HookEdit.combine([]) is None and HookEdit.combine([None, None]) is None
    assert HookEdit.combine([None, edit, None]) is edit


def test_a_kind_of_an_installed_package_works_like_a_built_in_one(add_vector, tiny_model):
    model = tiny_model("llama")
    before = snapshot(model)
    one, two = Delta(hook_edit=vector_edit(model, 1.0)), Delta(hook_edit=vector_edit(model, 2.0))
    one.save(add_vector / "one.safetensors")
    again = Delta.load(add_vector / "one.safetensors")
    with torch.no_grad():
        plain = model(IDS).logits
        with edited(model, again):
            inside = model(IDS).logits
        with edited(model, one, two):
            both = model(IDS).logits
        with RowEdits(model, [two, None, again]).prefill(torch.ones(3, 4), torch.tensor([4])):
            rows = model(IDS.expand(3, -1)).logits
    assert not torch.allclose(inside, plain) and not torch.allclose(both, inside)
    torch.testing.assert_close(rows[1:], torch.cat([plain, inside]), atol=1e-5, rtol=1e-5)
    assert_same_state(before, snapshot(model))


def test_a_kind_whose_package_is_missing_is_refused(tiny_model):
    model = tiny_model("llama")
    with pytest.raises(EditingError, match=r"unknown kind 'add_vector'; known: adapter_database, .*install that"):
        edited(model, Delta(hook_edit=vector_edit(model, 1.0))).__enter__()


def test_an_entry_point_that_is_no_kind_is_refused(add_vector):
    with pytest.raises(EditingError, match="not a subclass"):
        kind_class("no_kind")


def test_a_package_cannot_replace_a_built_in_kind(tmp_path, monkeypatch):
    install_package(tmp_path, monkeypatch, "impostor", "", {ENTRY_POINTS: {"codebook": "impostor:Hooks"}})
    assert kind_class("codebook").__module__ == "edit_hooks.memory.codebook"
    with pytest.raises(EditingError, match=r"impostor:Hooks registers the hook kind 'codebook'.*uninstall"):
        kind_class("other")


@pytest.mark.parametrize("kind", ["unwanted_module:AddVector", "unwanted_module"])
def test_a_saved_edit_cannot_import_a_module(kind, tmp_path, monkeypatch, tiny_model):
    """A file names its kind; a module path as a name is an unknown kind, and the module is not imported."""
    model = tiny_model("llama")
    install_package(tmp_path / "site", monkeypatch, "unwanted_module", PLUGIN, {})
    delta = Delta(hook_edit=HookEdit(kind, {"keys": torch.ones(1)}, {"module": rewrite_name(model)}))
    delta.save(tmp_path / "edit")
    with pytest.raises(EditingError, match="unknown kind"):
        Delta.load(tmp_path / "edit")
    with pytest.raises(EditingError, match="unknown kind"):
        edited(model, delta).__enter__()
    with pytest.raises(EditingError, match="unknown kind"):
        RowEdits(model, [delta])
    with pytest.raises(EditingError, match="unknown kind"):
        HookEdit.combine([delta.hook_edit, delta.hook_edit])
    assert "unwanted_module" not in sys.modules


def test_hooks_outside_a_described_pass_are_refused(tiny_model):
    model = tiny_model("llama")
    kind = kind_class("codebook")(model, [codebook(model)])
    with kind.attached(), pytest.raises(EditingError, match="outside RowEdits"):
        model(IDS)


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_a_filled_cache_means_a_decoding_step_under_either_name_of_it(name, tiny_model):
    cache = DynamicCache()
    decoder_of(tiny_model("llama"))(IDS, use_cache=True, **{CACHE: cache})
    call = hook_edit_module._context_of_call
    assert not call((), {"input_ids": IDS[:, :1], name: cache}, None).prefill
    assert call((), {"input_ids": IDS, name: DynamicCache()}, None).prefill
    assert call((), {"input_ids": IDS, name: None}, None).prefill


def test_another_attention_mask_is_refused(tiny_model):
    model = tiny_model("llama")
    mask = torch.ones(1, 1, 4, 4)
    with edited(model, Delta(hook_edit=codebook(model))), pytest.raises(EditingError, match="two-dimensional"):
        model(IDS, attention_mask=mask)


def test_an_editor_brings_its_kind_without_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Through ``editor=module:Class``; a saved edit alone needs the entry point, and the error names it."""
    monkeypatch.setattr(hook_edit_module, "_kinds_of_editors", {})
    path = str(save_tiny(tmp_path, "gpt2"))
    lm = build(path, editor="own_hook_editor:Steer", editor_args={"layers": [1]})
    results = run(lm, ["bake_es"], limit=2)["results"]["bake_es"]
    assert results["efficacy_prob,none"] == 1.0
    (delta,) = Steer({"layers": [1]}).edit(
        lm.model, lm.tokenizer, [EditRequest(prompt="The band plays in", target_new="Rome")]
    )
    delta.save(tmp_path / "edit.safetensors")
    with edited(lm.model, Delta.load(tmp_path / "edit.safetensors")):
        pass
    monkeypatch.setattr(hook_edit_module, "_kinds_of_editors", {})
    with pytest.raises(EditingError, match=rf"unknown kind 'steer'.* as entry points {ENTRY_POINTS}"):
        Delta.load(tmp_path / "edit.safetensors").hook_edit.check(lm.model)


def test_the_kinds_of_editors_have_names_of_their_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hook_edit_module, "_kinds_of_editors", {})
    register_kinds({"steer": SteerHooks})
    register_kinds({"steer": SteerHooks})
    other = type("Other", (SteerHooks,), {})
    for name, message in (("steer", "which is own_hook_editor:SteerHooks"), ("codebook", "which is edit_hooks.memory")):
        with pytest.raises(EditingError, match=message):
            register_kinds({name: other})
    with pytest.raises(EditingError, match="a subclass of HookKind is needed"):
        register_kinds({"text": "own_hook_editor:SteerHooks"})
