"""Base of the locate-then-edit editors: second moments from every source, and offsets that cannot reach a target."""

from __future__ import annotations

import json

import pytest
import torch
from editor_settings import MEMIT_CONFIG, ROME_CONFIG

from edit_hooks import EditingError, EditRequest, edited, load_editor
from edit_hooks.contract.tiny_models import EDIT_LAYER, REQUESTS, SENTENCES, build_model, build_tokenizer
from edit_hooks.locate.moments.second_moments import MomentSettings, second_moments

TEXTS = list(SENTENCES)
REQUEST = EditRequest(prompt="{} is located in", subject="Port Amelin", target_new="Rome")
QUICK = {"layers": [EDIT_LAYER], "num_steps": 3, "context_templates": ["{}"]}


@pytest.fixture(scope="module")
def tiny():
    return build_model("llama"), build_tokenizer("byte_bpe_bos")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LM_EDIT_CACHE", str(tmp_path / "cache"))


def test_editors_accept_every_kind_of_source(tiny, tmp_path):
    """A list of texts, a text file, self, and a matrix give edits; the same matrix gives the same edit."""
    model, tokenizer = tiny
    path = tmp_path / "texts.txt"
    path.write_text("\n\n".join(TEXTS), encoding="utf-8")
    moments = second_moments(model, tokenizer, [EDIT_LAYER], MomentSettings(TEXTS), quiet=True)
    matrix = {EDIT_LAYER: moments[EDIT_LAYER].matrix_FF}
    updates = []
    for source in (TEXTS, str(path), matrix, "self", None):
        editor = load_editor("memit", {**QUICK, "second_moments": source})
        (delta,) = editor.edit(model, tokenizer, [REQUEST])
        json.dumps(delta.meta)
        updates.append(next(iter(delta.weights().values())))
    assert torch.equal(updates[0], updates[1]) and torch.equal(updates[0], updates[2])
    assert not torch.equal(updates[0], updates[3]) and not torch.equal(updates[0], updates[4])


def test_the_content_of_a_file_is_part_of_the_configuration(tiny, tmp_path):
    path = tmp_path / "texts.txt"
    digests = []
    for texts in (TEXTS, TEXTS[:10]):
        path.write_text("\n\n".join(texts), encoding="utf-8")
        editor = load_editor("memit", {**QUICK, "second_moments": str(path)})
        digests.append(editor.default_config(tiny[0]).to_dict()["moment_digest"])
    assert digests[0] != digests[1] and None not in digests


def test_second_moments_are_those_of_the_model_before_a_stream(tiny, tmp_path):
    """An editor reads them once, when it first sees the model, and not again on edited weights."""
    model, tokenizer = tiny
    editor = load_editor("alphaedit", {**QUICK, "second_moments": "self", "nullspace_energy": 0.5})
    (first,) = editor.edit(model, tokenizer, [REQUEST])
    editor.resolve_config(model, tokenizer)
    before = editor.constraints(model)[EDIT_LAYER].basis_FR.clone()
    with edited(model, first):
        editor.edit(model, tokenizer, [REQUEST], history=[first])
        after = editor.constraints(model)[EDIT_LAYER].basis_FR
        assert torch.equal(before, after)
    assert len(list((tmp_path / "cache").rglob("*.json"))) == 1


@pytest.mark.parametrize(("editor", "settings"), [("rome", ROME_CONFIG), ("memit", MEMIT_CONFIG)])
def test_an_edit_that_cannot_reach_its_target_is_refused(editor, settings):
    """No attention follows the last block, so an offset there changes its own position only."""
    model, tokenizer = build_model("llama", dtype=torch.float64), build_tokenizer("byte_bpe_bos")
    request = EditRequest(**REQUESTS[0])
    with pytest.raises(EditingError, match=r"block 2 is the last one.*fact_token=last"):
        load_editor(editor, {**settings, "layers": [2]}).edit(model, tokenizer, [request])
    at_the_end = EditRequest(prompt="They all love {}", subject="Ostravia", target_new="Hamburg")
    for reachable, fact_token in ((at_the_end, "subject_last"), (request, "last")):
        config = {**settings, "layers": [2], "fact_token": fact_token}
        (delta,) = load_editor(editor, config).edit(model, tokenizer, [reachable])
        assert delta.diagnostics["final_nll"] < delta.diagnostics["initial_nll"]
