"""Saved edits in folders: loading, base models, steps of a stream, ``load_edit=``."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from exported import TOLERANCE, build, harness_answers, save
from lm_eval.models.huggingface import HFLM
from lm_runs import instance
from random_deltas import random_delta
from state import assert_same_state

from edit_hooks import Delta, EditingError, EditRequest, edited, load_editor
from edit_hooks.contract.state import snapshot
from edit_hooks.contract.tiny_models import REQUESTS, build_tokenizer
from edit_hooks.deltas.saving.export import export_peft, read_peft
from edit_hooks.deltas.saving.saved import load_edit, read_deltas, requests_of, save_edits, saved_files, stream_folder
from edit_hooks.lm.editing.stream import EditStream, Guard
from edit_hooks.lm.model import EditedHFLM
from edit_hooks.lm.options.plan import EditPlan, chunked
from edit_hooks.modeling.fingerprint.identity import ModelIdentity, model_identity

REQUEST = EditRequest(prompt="{} is the capital of", subject="Ostravia", target_new="Velm")


def edited_lm(path, **options):
    return EditedHFLM(pretrained=path, store="off", device="cpu", **options)


def answer_of(lm, subject="Ostravia"):
    """The answer of a case with one edit about ``subject``."""
    request = EditRequest(prompt="{} is the capital of", subject=subject, target_new="Velm")
    doc = {"edit_requests": [request.to_dict()], "ask_unedited": True}
    return lm.loglikelihood([instance(doc, "The capital of Ostravia is", " Velm")])[0]


def identity_of(model) -> ModelIdentity:
    return model_identity(model, build_tokenizer("byte_bpe_bos"))


@pytest.fixture
def saved(tmp_path):
    """A tiny model's folder, one edit of it as delta file and as adapter, and the model."""
    model, tokenizer = build("llama")
    path = save(model, tokenizer, tmp_path / "base")
    stamp = {"model": edited_lm(path, mode="none").identity.to_dict(), "editor": "test"}
    delta = random_delta(model)
    (file,) = save_edits(tmp_path / "edits", [((REQUEST,), delta)], stamp, most=1)
    return path, file, export_peft(delta, tmp_path / "adapter"), model, delta


def test_a_folder_without_its_index_may_lack_edits(saved, caplog):
    _, file, adapter, model, _ = saved
    for source in (file, file.parent, adapter):
        load_edit(source, model, identity_of(model))
    assert "edits.json" not in caplog.text
    (file.parent / "edits.json").unlink()
    load_edit(file, model, identity_of(model))  # a single file may come from anywhere
    assert "edits.json" not in caplog.text
    load_edit(file.parent, model, identity_of(model))
    assert "has no edits.json, which is written after the last edit" in caplog.text


@pytest.mark.parametrize("form", ["file", "folder", "adapter"])
def test_a_loaded_edit_acts_on_every_request(saved, form):
    path, file, adapter, model, delta = saved
    source = {"file": file, "folder": file.parent, "adapter": adapter}[form]
    lm = edited_lm(path, load_edit=str(source))
    before = snapshot(lm.model, lm.tokenizer)
    answer = answer_of(lm)
    (ordinary,) = lm.loglikelihood([instance({}, "The capital of Ostravia is", " Velm")])
    assert_same_state(before, snapshot(lm.model, lm.tokenizer))
    with edited(model, delta):
        (expected, _), *_ = harness_answers(HFLM(pretrained=model, tokenizer=lm.tokenizer))[0]
    assert math.isclose(answer.final.logprob, expected, **TOLERANCE) and math.isclose(
        ordinary[0], expected, **TOLERANCE
    )
    (plain, _), *_ = harness_answers(HFLM(pretrained=model, tokenizer=lm.tokenizer))[0]
    assert math.isclose(answer.final.unedited.logprob, plain, **TOLERANCE) and abs(plain - expected) > 1e-2
    assert answer.edit.editor == "test" and answer.position.edited
    other = answer_of(lm, "Nowhere")
    assert other.final.logprob == answer.final.logprob and other.edit is None and not other.position.edited
    stamp = lm.get_model_info()["edited_hf"]
    assert stamp["mode"] == "loaded" and stamp["editor"] == "test"
    assert stamp["loaded_edit"]["checksum"] and stamp["load_edit"] == str(source)


def test_a_loaded_edit_is_refused_on_another_model(saved, tmp_path):
    other, tokenizer = build("llama", seed=1)
    path = save(other, tokenizer, tmp_path / "other")
    for source in saved[1:3]:
        with pytest.raises(EditingError, match="another model"):
            answer_of(edited_lm(path, load_edit=str(source)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "loaded"}, "needs load_edit="),
        ({"mode": "single", "load_edit": "x"}, "no meaning in mode=single"),
        ({"load_edit": "x", "editor_args": {"lr": 0.1}}, "editor_args has no meaning"),
    ],
)
def test_options_that_contradict_a_loaded_edit_are_refused(saved, options, message):
    with pytest.raises(EditingError, match=message):
        edited_lm(saved[0], **options)


def test_files_that_are_no_edits_are_refused(saved, tmp_path):
    path, file, _, model, _ = saved
    with pytest.raises(EditingError, match="cannot be read"):
        load_edit(tmp_path / "missing.safetensors", model, identity_of(model))
    with pytest.raises(EditingError, match="pretrained="):
        load_edit(path, model, identity_of(model))
    with pytest.raises(EditingError, match="damaged"):
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        (tmp_path / "bad.safetensors").write_bytes(content)
        load_edit(tmp_path / "bad.safetensors", model, identity_of(model))


def test_steps_of_a_stream_belong_together(saved, tmp_path, caplog):
    """All steps from the first one, in order, add up to the stream."""
    model, identity = saved[3], identity_of(saved[3])
    steps = [random_delta(model, seed=seed) for seed in range(3)]
    states = ["unedited", "a", "b", "c"]
    for number, step in enumerate(steps):
        step.meta |= {"description": {"state_before": states[number]}, "state_after": states[number + 1]}
    requests = [(EditRequest(prompt=f"Number {number} is", target_new="Velm"),) for number in range(3)]
    files = save_edits(
        tmp_path / "stream", list(zip(requests, steps, strict=True)), {"model": identity.to_dict()}, most=len(steps)
    )
    total = Delta.summed(read_deltas(files, model, identity))
    for name, update in total.weights().items():
        torch.testing.assert_close(update, sum(step.weights()[name] for step in steps))
    back = read_peft(export_peft(total, tmp_path / "whole"), model)
    assert [part["state_after"] for part in back.meta["parts"]] == ["a", "b", "c"]
    assert "edits.json" not in caplog.text
    (tmp_path / "stream" / "edits.json").unlink()  # as after a kill, before the last steps
    read_deltas(files[:2], model, identity)
    assert caplog.text.count("has no edits.json, which is written after the last edit") == 1
    for wrong in ([files[1]], [files[1], files[0]], [files[0], files[2]]):
        with pytest.raises(EditingError, match="step of a stream"):
            read_deltas(wrong, model, identity)
    for source in (tmp_path / "stream", str(tmp_path / "stream") + "/"):  # the sum of the files, in their order
        loaded = load_edit(source, model, identity).delta
        assert loaded.checksum() == total.checksum() and loaded.meta == total.meta
        assert len(requests_of(loaded)) == 3
    assert saved_files(tmp_path / "stream") == files and stream_folder(files) == tmp_path / "stream"
    assert stream_folder(files[:2]) is stream_folder(files[:1]) is stream_folder(files[::-1]) is None
    assert len(read_deltas([tmp_path / "stream"], model, identity)) == 3


def test_a_folder_that_is_no_whole_stream_is_refused(saved, tmp_path):
    model, identity = saved[3], identity_of(saved[3])
    steps = [random_delta(model, seed=seed) for seed in range(3)]
    states = ["unedited", "a", "b", "c"]
    requests = [(EditRequest(prompt=f"Number {number} is", target_new="Velm"),) for number in range(3)]
    metadata = {"model": identity.to_dict()}
    alone = save_edits(tmp_path / "alone", zip(requests, steps, strict=True), metadata, most=3)
    with pytest.raises(EditingError, match=r"3 saved edits, each made without the others.* lm-edit edit --sequential"):
        load_edit(tmp_path / "alone", model, identity)
    assert stream_folder(alone) is None
    for number, step in enumerate(steps):
        step.meta |= {"description": {"state_before": states[number]}, "state_after": states[number + 1]}
    files = save_edits(tmp_path / "stream", zip(requests, steps, strict=True), metadata, most=3)
    last, middle = files[2].read_bytes(), files[1].read_bytes()
    files[2].unlink()
    for source in (tmp_path / "stream", [tmp_path / "stream"]):  # also where one file is left
        with pytest.raises(EditingError, match=r"lacks edit-2\.safetensors, 1 of the 3 edits in its edits\.json"):
            load_edit(source, model, identity) if isinstance(source, Path) else read_deltas(source, model, identity)
    files[2].write_bytes(last)
    (tmp_path / "stream" / "edits.json").write_text('{"edits": [{}]}', encoding="utf-8")
    with pytest.raises(EditingError, match=r"edits\.json is damaged"):
        load_edit(tmp_path / "stream", model, identity)
    (tmp_path / "stream" / "edits.json").unlink()
    files[1].unlink()
    with pytest.raises(EditingError, match=r"edit 1 is a step of a stream.* or their folder"):
        load_edit(tmp_path / "stream", model, identity)
    files[1].write_bytes(middle[:-1] + bytes([middle[-1] ^ 1]))
    with pytest.raises(EditingError, match="damaged"):
        load_edit(tmp_path / "stream", model, identity)
    (tmp_path / "empty").mkdir()
    with pytest.raises(EditingError, match="holds no saved edit"):
        load_edit(tmp_path / "empty", model, identity)


def test_a_step_of_several_requests_is_one_step(saved, tmp_path):
    """The first case of a stream has two edits, which an editor of single requests writes one after another."""
    model, identity = saved[3], identity_of(saved[3])
    first, second, third, *_ = (EditRequest(**record) for record in REQUESTS)
    plan = EditPlan(chunked([(first, second), (third,)], 1, cumulative=True), cumulative=True)
    editor = load_editor("rome", {"context_templates": ["{}"], "num_steps": 2})
    made = EditStream(model, build_tokenizer("byte_bpe_bos"), editor, plan, None, identity, Guard(), quiet=True)
    made.make()
    assert len(made.deltas[0].meta["parts"]) == 2
    metadata = {"model": identity.to_dict()}
    files = save_edits(tmp_path / "stream", list(zip(plan.groups, made.deltas, strict=True)), metadata, most=2)
    total = Delta.summed(read_deltas(files, model, identity))
    total.meta |= metadata
    total.save(tmp_path / "total.safetensors")
    for source, num_edits in ((files[0], 2), (tmp_path / "total.safetensors", 3)):
        assert len(requests_of(load_edit(source, model, identity).delta)) == num_edits
    with pytest.raises(EditingError, match="edit 0 is a step of a stream"):
        read_deltas(files[1:], model, identity)
