"""Second moments: the numbers of the releases, and files that are never mistaken for one another."""

from __future__ import annotations

import functools
import json
import logging
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from golden_data import GOLDEN_MODELS, golden_covariance, golden_json
from hub_corpus import serve_corpus

from edit_hooks import EditingError, load_editor
from edit_hooks.contract.tiny_models import SENTENCES, build_model, build_tokenizer
from edit_hooks.locate.moments import second_moments as module
from edit_hooks.locate.moments.sampled_texts import FOLDER
from edit_hooks.locate.moments.second_moments import MomentSettings, second_moments
from edit_hooks.locate.moments.solve import SecondMoment
from edit_hooks.locate.moments.stored_matrices import LOCKS
from edit_hooks.modeling.tensors import read_tensors, write_tensors
from edit_hooks.utils.storage.locks import locked

TEXTS = list(SENTENCES)


@functools.cache
def tiny():
    return build_model("llama"), build_tokenizer("byte_bpe_bos")


def collect(source: Any, folder=None, layers=(1,), model=None, **settings: Any) -> dict[int, SecondMoment]:
    """Second moments of the tiny model."""
    own, tokenizer = tiny()
    moment_settings = MomentSettings(source, **settings)
    return second_moments(model or own, tokenizer, layers, moment_settings, folder=folder, quiet=True)


@pytest.mark.parametrize("model_name", GOLDEN_MODELS)
def test_the_golden_sentences_give_the_golden_covariance(model_name, golden_model):
    model, tokenizer = golden_model(model_name)
    moments = second_moments(model, tokenizer, [0, 1], MomentSettings(golden_json("common")["sentences"]), quiet=True)
    for layer in (0, 1):
        reference = golden_covariance(model_name, layer)
        error = float((moments[layer].matrix_FF - reference).norm() / reference.norm())
        assert error < 1e-6
        assert moments[layer].report["num_tokens"] == 741


@pytest.mark.parametrize("model_type", ["gpt2", "gemma3_text"])
def test_the_mean_is_over_real_tokens_only(model_type):
    """Against keys read one unpadded text at a time."""
    model = build_model(model_type)
    tokenizer = build_tokenizer("unigram_bos")
    keys = []
    name = {"gpt2": "transformer.h.1.mlp.c_proj", "gemma3_text": "model.layers.1.mlp.down_proj"}[model_type]
    handle = model.get_submodule(name).register_forward_pre_hook(lambda _m, args: keys.append(args[0][0].double()))
    with torch.no_grad():
        for text in TEXTS:
            model(torch.tensor([tokenizer(text)["input_ids"][:9]]))
    handle.remove()
    stacked = torch.cat(keys)
    moments = second_moments(model, tokenizer, [1], MomentSettings(TEXTS, max_length=9), quiet=True)
    torch.testing.assert_close(moments[1].matrix_FF.double(), stacked.T @ stacked / len(stacked), rtol=1e-4, atol=1e-6)
    assert moments[1].report["num_tokens"] == len(stacked)


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_documents_end_with_the_models_context(model_type, tmp_path):
    """By default at 256 tokens, but GPT-2 has no position past its last, and rotary models were not trained there."""
    (tmp_path / "long.txt").write_text(" ".join(TEXTS), encoding="utf-8")
    source = str(tmp_path / "long.txt")
    assert len(tiny()[1](" ".join(TEXTS))["input_ids"]) > 256
    for positions, length in ((128, 128), (256, 256), (512, 256)):
        model = build_model(model_type, max_position_embeddings=positions)
        (moment,) = collect(source, tmp_path / "stats", model=model).values()
        assert moment.report["num_tokens"] == moment.report["description"]["max_length"] == length
        (same,) = collect(source, tmp_path / "stats", model=model, max_length=length).values()
        assert torch.equal(same.matrix_FF, moment.matrix_FF)
        with pytest.raises(EditingError, match=rf"after {positions + 1} tokens.*has {positions} positions"):
            collect(source, tmp_path / "stats", model=model, max_length=positions + 1)


def test_documents_past_the_context_are_refused_before_the_weights_are_loaded():
    with torch.device("meta"):
        outline = build_model("llama")
    for source in (TEXTS, "self", "published"):
        editor = load_editor("memit", {"layers": [1], "second_moments": source, "moment_length": 129})
        with pytest.raises(EditingError, match="has 128 positions"):
            editor.check_settings(outline)
        load_editor("memit", {"layers": [1], "second_moments": source, "moment_length": 128}).check_settings(outline)


def test_a_list_and_a_folder_of_the_same_texts_give_the_same_matrix(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("\n\n".join(TEXTS[:10]), encoding="utf-8")
    lines = [json.dumps({"text": text}) for text in TEXTS[10:]]
    (texts / "b.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert torch.equal(collect(TEXTS)[1].matrix_FF, collect(texts, tmp_path)[1].matrix_FF)


def test_a_second_call_loads_the_file_and_new_layers_are_added(tmp_path, monkeypatch):
    first = collect("self", tmp_path)
    both = collect("self", tmp_path, layers=[0, 1])
    assert torch.equal(both[1].matrix_FF, first[1].matrix_FF)
    monkeypatch.setattr(module, "_collect", lambda *_: pytest.fail("collected again"))
    again = collect("self", tmp_path, layers=[0, 1])
    for layer in (0, 1):
        assert torch.equal(again[layer].matrix_FF, both[layer].matrix_FF)
        assert again[layer].report == both[layer].report
    assert not list(tmp_path.rglob("*.tmp"))


def test_the_text_is_sampled_once_for_all_layers_and_precisions(tmp_path, monkeypatch):
    apart = collect("self", tmp_path / "apart", layers=[0])[0]
    collect("self", tmp_path / "both")
    monkeypatch.setattr(module, "read_documents", lambda *_: pytest.fail("sampled again"))
    later = collect("self", tmp_path / "both", layers=[0])[0]
    assert torch.equal(later.matrix_FF, apart.matrix_FF)
    assert {**later.report, "seconds": 0, "folder": 0} == {**apart.report, "seconds": 0, "folder": 0}
    assert collect("self", tmp_path / "both", dtype="bfloat16")[1].matrix_FF.dtype == torch.bfloat16
    with pytest.raises(pytest.fail.Exception, match="sampled again"):
        collect("self", tmp_path / "both", layers=[0], seed=1)


@pytest.mark.parametrize("meanwhile", ["other block", "same block"])
def test_who_waits_for_another_process_does_not_sample(meanwhile, tmp_path, monkeypatch, caplog):
    """The lock of the one that samples is held here; what it wrote is used, and its blocks are not read again."""
    apart = collect("self", tmp_path / "apart", layers=[0])[0]
    collect("self", tmp_path / "first", layers=[0 if meanwhile == "same block" else 1])
    (lock,) = (tmp_path / "first" / LOCKS).iterdir()
    monkeypatch.setattr(module, "read_documents", lambda *_: pytest.fail("sampled again"))
    if meanwhile == "same block":
        monkeypatch.setattr(module, "_collect", lambda *_: pytest.fail("collected again"))
    with ThreadPoolExecutor(1) as pool, caplog.at_level(logging.WARNING):
        with locked(tmp_path / "second" / LOCKS / lock.name):
            moments = pool.submit(collect, "self", tmp_path / "second", layers=[0])
            while "waiting for another process" not in caplog.text and not moments.done():
                time.sleep(0.01)
            assert not moments.done()
            shutil.copytree(tmp_path / "first", tmp_path / "second", dirs_exist_ok=True)
        assert torch.equal(moments.result(60)[0].matrix_FF, apart.matrix_FF)


def test_who_finds_half_of_the_matrices_waits_for_the_rest(tmp_path, monkeypatch, caplog):
    """A corpus that is read takes hours, and the process that reads it saves one matrix after another."""
    expected = collect(TEXTS, tmp_path / "first", layers=[0, 1])
    (lock,) = (tmp_path / "first" / LOCKS).iterdir()
    collect(TEXTS, tmp_path / "second", layers=[0])
    monkeypatch.setattr(module, "_collect", lambda *_: pytest.fail("collected again"))
    with ThreadPoolExecutor(1) as pool, caplog.at_level(logging.WARNING):
        with locked(tmp_path / "second" / LOCKS / lock.name):
            moments = pool.submit(collect, TEXTS, tmp_path / "second", layers=[0, 1])
            while "waiting for another process" not in caplog.text and not moments.done():
                time.sleep(0.01)
            assert not moments.done()
            shutil.copytree(tmp_path / "first", tmp_path / "second", dirs_exist_ok=True)
        assert torch.equal(moments.result(60)[1].matrix_FF, expected[1].matrix_FF)


def test_the_lock_of_a_text_is_not_that_of_another(tmp_path, caplog):
    collect("self", tmp_path, layers=[0])
    (lock,) = (tmp_path / LOCKS).iterdir()
    with locked(lock), caplog.at_level(logging.WARNING):
        collect("self", tmp_path, layers=[0])  # stored: nothing to wait for
        collect("self", tmp_path, layers=[0], seed=1)
        collect(TEXTS, tmp_path, layers=[0])
    assert "waiting" not in caplog.text


@pytest.mark.parametrize("damage", ["cut", "swapped"])
def test_a_damaged_text_is_sampled_again(damage, tmp_path, caplog):
    first = collect("self", tmp_path, layers=[0])[0]
    (text,) = (tmp_path / FOLDER).iterdir()
    if damage == "cut":
        text.write_bytes(text.read_bytes()[:200])
    else:
        header, tensors = read_tensors(text, "text")
        write_tensors(text, tensors | {"ids": tensors["ids"].flip(0)}, header)
    with caplog.at_level(logging.WARNING):
        both = collect("self", tmp_path, layers=[0, 1])
    assert f"cannot use the sampled text in {text}" in caplog.text
    assert torch.equal(both[0].matrix_FF, first.matrix_FF)
    assert torch.equal(both[1].matrix_FF, collect("self", tmp_path / "other")[1].matrix_FF)
    caplog.clear()
    collect("self", tmp_path, layers=[0], dtype="bfloat16")
    assert "sampled text" not in caplog.text  # it was written again


def test_everything_that_alters_the_matrix_gives_another_file(tmp_path):
    changes = ({}, {"seed": 1}, {"num_tokens": 300}, {"max_length": 16}, {"model": build_model("llama", seed=3)})
    matrices = [collect("self", tmp_path, **change)[1].matrix_FF for change in changes]
    assert not any(torch.equal(a, b) for number, a in enumerate(matrices) for b in matrices[:number])
    assert len(list(tmp_path.rglob("*.json"))) == len(matrices)


def test_sampling_repeats_and_leaves_the_global_generator_alone(tmp_path):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, second = (collect("self", tmp_path / name, num_tokens=200, max_length=20)[1] for name in ("a", "b"))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.matrix_FF, second.matrix_FF)
    assert first.report["num_tokens"] == 200


def test_damaged_and_foreign_files_are_replaced(tmp_path, caplog):
    first = collect("self", tmp_path)[1].matrix_FF
    (tensors,) = (path for path in tmp_path.rglob("*.safetensors") if path.parent.name != FOLDER)
    (manifest,) = tmp_path.rglob("*.json")
    tensors.write_bytes(tensors.read_bytes()[:100])
    with caplog.at_level(logging.WARNING):
        assert torch.equal(collect("self", tmp_path)[1].matrix_FF, first)
    assert str(tensors) in caplog.text
    record = json.loads(manifest.read_text())
    record["description"]["layer"] = 2
    manifest.write_text(json.dumps(record))
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert torch.equal(collect("self", tmp_path)[1].matrix_FF, first)
    assert "something else" in caplog.text


def test_the_report_describes_the_condition_of_the_matrix(caplog):
    with caplog.at_level(logging.INFO):
        report = collect(TEXTS[:2])[1].report
    assert report["condition"] is None or report["condition"] > 1e3  # two sentences cannot fill 64 dimensions
    assert "per dimension of the keys" in caplog.text
    report = collect(TEXTS * 3)[1].report
    values = torch.linalg.eigvalsh(collect(TEXTS)[1].matrix_FF.double())
    assert report["largest_eigenvalue"] == pytest.approx(float(values[-1]), rel=1e-4)
    assert report["trace"] == pytest.approx(float(values.sum()), rel=1e-4)


def test_power_iteration_agrees_with_the_eigenvalues(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    basis, _ = torch.linalg.qr(torch.randn(40, 40, generator=generator, dtype=torch.float64))
    matrix = basis @ torch.diag(torch.logspace(-3, 1, 40, dtype=torch.float64)) @ basis.T
    exact = module._condition(matrix)
    monkeypatch.setattr(module, "EXACT_CONDITION_UP_TO", 1)
    approximate = module._condition(matrix)
    for name in ("largest_eigenvalue", "smallest_eigenvalue"):
        assert approximate[name] == pytest.approx(exact[name], rel=1e-3)


def test_the_dtype_setting_is_the_precision_of_the_stored_matrix():
    wide = collect(TEXTS, dtype="float64")[1].matrix_FF
    narrow = collect(TEXTS)[1].matrix_FF
    assert torch.equal(wide.float(), narrow) and not torch.equal(wide, narrow.double())


# --- hub corpora -----------------------------------------------------------------------------------------------------


def test_a_small_hub_corpus_is_read_completely(tmp_path, monkeypatch):
    serve_corpus(tmp_path / "hub", monkeypatch)
    moment = collect("owner/corpus", tmp_path / "stats", num_tokens=100_000, dtype="float64")[1]
    plain = collect(TEXTS, dtype="float64")[1]
    torch.testing.assert_close(moment.matrix_FF, plain.matrix_FF, rtol=1e-5, atol=1e-7)  # keys are float32
    assert any("of the 100000 tokens asked for" in text for text in moment.report["warnings"])


def test_hub_corpora_without_texts_or_with_lost_connections_are_explained(tmp_path, monkeypatch):
    corpus = serve_corpus(tmp_path / "hub", monkeypatch)
    corpus.shard.write_text(json.dumps({"body": "x"}) + "\n")
    with pytest.raises(EditingError, match=r"no field 'text'"):
        collect("owner/corpus", tmp_path / "stats")

    def refuse(*_args, **_kwargs):
        raise ConnectionError("the line broke")

    monkeypatch.setattr("datasets.load_dataset", refuse)
    with pytest.raises(EditingError, match=r"cannot read the corpus 'owner/corpus'.*the line broke.*'self'"):
        collect("owner/corpus", tmp_path / "stats")
