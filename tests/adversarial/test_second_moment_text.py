"""The text behind second moments: enough of it by default, the releases' text under a name, and honest messages."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from command_line import printed_lines
from hub_corpus import HubCorpus, serve_corpus
from paths import ROOT, TESTS

from edit_hooks import EditingError, EditRequest, load_editor
from edit_hooks.base.registry import editor_class
from edit_hooks.base.shipped import find_shipped, shipped_files
from edit_hooks.contract.tiny_models import REQUESTS, SENTENCES, build_model, build_tokenizer
from edit_hooks.locate.moments import corpora, moment_documents
from edit_hooks.locate.moments.second_moments import MomentSettings, second_moments
from edit_hooks.locate.moments.solve import SecondMoment
from edit_hooks.utils.storage.hashing import key_of
from lm_edit.cli.main import main

WIDTH = 64
RELEASED = yaml.safe_load((TESTS / "data/released_settings.yaml").read_text(encoding="utf-8"))
SETTINGS = {"layers": [0, 1], "num_steps": 2, "context_templates": ["{}"]}
WIKIPEDIA = ("load", "wikimedia/wikipedia", "20231101.en", "train", "b04c8d1ceb2f5cd4588862100d08de323dccfbaa", False)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LM_EDIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def wikipedia(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubCorpus:
    return serve_corpus(tmp_path / "hub", monkeypatch)


def edit(editor: str = "memit", **settings: Any) -> Any:
    loaded = load_editor(editor, {**SETTINGS, **settings})
    return loaded.edit(build_model("llama"), build_tokenizer("byte_bpe_bos"), [EditRequest(**REQUESTS[0])])[0]


def collect(source: Any, folder: Path | None = None, **settings: Any) -> SecondMoment:
    model, tokenizer = build_model("llama"), build_tokenizer("byte_bpe_bos")
    return second_moments(model, tokenizer, [1], MomentSettings(source, **settings), folder=folder, quiet=True)[1]


def moment_warnings(delta: Any) -> list[str]:
    return [text for text in delta.warnings if "per dimension of the keys" in text]


# --- amount of text --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("editor", ["memit", "emmet", "pmet"])
def test_sampled_text_has_16_tokens_per_dimension_of_the_keys(editor: str) -> None:
    settings = {"layers": [1]} if editor == "emmet" else {}
    delta = edit(editor, **settings)
    assert {layer["moment_tokens"] for layer in delta.diagnostics["layers"]} == {16 * WIDTH}
    assert not moment_warnings(delta)


def test_fewer_than_8_tokens_per_dimension_are_named_in_the_diagnostics() -> None:
    few, enough = edit(moment_tokens=8 * WIDTH - 1), edit(moment_tokens=8 * WIDTH)
    assert len(moment_warnings(few)) == 2  # one per layer
    assert "comes from 511 tokens, 8.0 per dimension" in moment_warnings(few)[0]
    assert "moment_tokens=1024 is 16 per dimension" in moment_warnings(few)[0]
    assert not moment_warnings(enough)


def test_a_matrix_stored_without_the_warning_gives_it_today(tmp_path: Path) -> None:
    """Files of earlier versions were stored when fewer than 2 tokens per dimension gave the warning."""
    collect("self", tmp_path, num_tokens=4 * WIDTH)
    (manifest,) = tmp_path.rglob("*.json")
    record = json.loads(manifest.read_text())
    assert record["report"]["warnings"]
    del record["checksum"]
    record["report"]["warnings"] = []
    manifest.write_text(json.dumps(record))
    assert "4.0 per dimension" in collect("self", tmp_path, num_tokens=4 * WIDTH).report["warnings"][0]


def test_matrices_of_text_drawn_by_an_earlier_version_are_not_taken_for_todays(tmp_path: Path) -> None:
    today = collect("self", tmp_path, num_tokens=700)
    for path in list(tmp_path.rglob("*.*")):
        if path.suffix != ".json":
            continue
        record = json.loads(path.read_text())
        del record["description"]["corpus"]["sampler"], record["checksum"]
        stem = tmp_path / key_of(record["description"])[:2] / key_of(record["description"])
        stem.parent.mkdir(exist_ok=True)
        stem.with_suffix(".json").write_text(json.dumps(record))
        path.with_suffix(".safetensors").rename(stem.with_suffix(".safetensors"))
        path.unlink()
    again = collect("self", tmp_path, num_tokens=700)
    assert torch.equal(again.matrix_FF, today.matrix_FF)
    assert len(list(tmp_path.rglob("*.json"))) == 2


def test_sampled_batches_leave_little_text_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 17,000 tokens, the second batch of 128 texts of 128 tokens would have been thrown away."""
    monkeypatch.setattr(moment_documents, "SAMPLED_ROWS", 8)
    shapes = []
    sample = moment_documents.sample_documents

    def record(model: Any, tokenizer: Any, num_rows: int, length: int, *rest: Any) -> Any:
        shapes.append((num_rows, length))
        return sample(model, tokenizer, num_rows, length, *rest)

    monkeypatch.setattr(moment_documents, "sample_documents", record)
    assert collect("self", num_tokens=1030, max_length=100).report["num_tokens"] == 1030
    assert shapes == [(6, 100)]  # two batches of 600


# --- shipped settings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["gpt2-medium", "gpt2-large", "gpt2-xl", "gpt-j-6b", "gpt-neox-20b"])
def test_rome_has_a_covariance_where_its_file_names_romes_release(model: str) -> None:
    """r_rome shares the other settings, and EasyEdit's R-ROME has none."""
    (content,) = [content for name, content in shipped_files("rome") if name == model]
    outline = SimpleNamespace(**content["matches"])
    assert "release" in content["source"] and content["config"]["second_moments"] == "self"
    r_rome = find_shipped(editor_class("r_rome").config_folders, outline)
    assert r_rome.settings == {name: value for name, value in content["config"].items() if name != "second_moments"}


def test_every_file_with_other_second_moments_than_its_release_names_the_preset() -> None:
    """The default text is our own; a file that names a release says how to get the release's."""
    count = 0
    for editor in ("rome", "memit", "alphaedit", "evk_edit", "emmet", "pmet", "bird"):
        released = RELEASED.get(editor, {})
        for name, values in released.items():
            if name == "all" or {**released["all"], **values}.get("second_moments") != "wikipedia":
                continue
            text = (ROOT / "edit_hooks/configs" / editor / f"{name}.yaml").read_text(encoding="utf-8")
            assert "second_moments: published" in text, f"{editor}/{name}"
            count += 1
    assert count > 20


def test_the_demos_files_leave_the_amount_of_text_to_the_default() -> None:
    for editor in ("memit", "alphaedit", "evk_edit", "emmet", "pmet"):
        (config,) = [content["config"] for name, content in shipped_files(editor) if name == "gemma-3-270m"]
        assert "moment_tokens" not in config


# --- work ------------------------------------------------------------------------------------------------------------


def test_blocks_above_the_highest_needed_one_are_not_run() -> None:
    model, tokenizer = build_model("llama"), build_tokenizer("byte_bpe_bos")
    calls: list[str] = []
    watched = ("model.layers.0", "model.layers.1.mlp.down_proj", "model.layers.1", "model.layers.2", "model.norm")
    for name in watched:
        model.get_submodule(name).register_forward_hook(lambda *_args, name=name: calls.append(name))
    second_moments(model, tokenizer, [0, 1], MomentSettings(list(SENTENCES)), quiet=True)
    assert set(calls) == {"model.layers.0", "model.layers.1.mlp.down_proj"}


@pytest.mark.parametrize("source", ["self", list(SENTENCES)])
def test_a_long_collection_names_its_expected_time_once(
    source: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        collect(source, num_tokens=600)
    assert "about" not in caplog.text  # a short one says nothing
    monkeypatch.setattr(moment_documents, "MEASURED_SECONDS", 0.0)
    monkeypatch.setattr(moment_documents, "LONG_SECONDS", 0.0)
    with caplog.at_level(logging.WARNING):
        collect(source, num_tokens=600, seed=1)
    (line,) = [record.getMessage() for record in caplog.records if "about" in record.getMessage()]
    assert "collected from 600 tokens: about 1 min (" in line and "tokens/s" in line and "lm-edit stats" in line


# --- published -------------------------------------------------------------------------------------------------------


def test_published_reads_whole_wikipedia_articles_at_a_pinned_revision(wikipedia: HubCorpus, tmp_path: Path) -> None:
    moment = collect("published", tmp_path)
    assert wikipedia.calls == [WIKIPEDIA]  # no revision is looked up: what is stored is found without a network
    plain = collect(list(SENTENCES), max_length=128)
    torch.testing.assert_close(moment.matrix_FF, plain.matrix_FF, rtol=1e-4, atol=1e-6)
    assert moment.report["num_documents"] == len(SENTENCES)
    context = build_model("llama").config.max_position_embeddings
    assert moment.report["description"]["max_length"] == context != moment_documents.MAX_LENGTH
    assert moment.report["description"]["num_tokens"] is None
    collect("published", tmp_path, seed=1)  # the edits' seed has no part in it
    assert wikipedia.calls == [WIKIPEDIA]


def test_published_draws_its_articles_from_the_whole_dump(
    wikipedia: HubCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert corpora.PUBLISHED_DATASET.num_documents == 100_000
    monkeypatch.setattr(corpora, "PUBLISHED_DATASET", corpora.PUBLISHED_DATASET._replace(num_documents=5))
    drawn = list(corpora.open_corpus("published", 3).documents())
    assert drawn == list(corpora.open_corpus("published", 0).documents())
    assert len(set(drawn)) == 5 and set(drawn) < set(SENTENCES) and drawn != list(SENTENCES[:5])
    assert collect("published", tmp_path).report["num_documents"] == 5
    assert collect("published", tmp_path, num_tokens=30).report["num_tokens"] == 30


def test_statistics_prepared_by_lm_edit_stats_serve_an_edit_without_a_network(
    wikipedia: HubCorpus, tiny_path: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--pretrained", str(tiny_path("llama")), "--device", "cpu", "--layers", "0", "1"]
    assert main(["stats", *options, "--source", "published"]) == 0
    assert printed_lines(capsys)[1].endswith("collected")

    def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr("datasets.load_dataset", refuse)
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", refuse)
    delta = edit(second_moments="published")
    assert delta.diagnostics["layers"][0]["moment_corpus"]["dataset"] == "wikimedia/wikipedia"
    assert main(["stats", "--show"]) == 0
    assert "wikimedia/wikipedia/20231101.en@b04c8d1c, 100000 drawn seed 0" in capsys.readouterr().out


def test_published_without_a_network_names_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr("datasets.load_dataset", refuse)
    with pytest.raises(EditingError, match=r"no route.*12 GB.*lm-edit stats --source published.*second_moments=self"):
        edit(second_moments="published")
