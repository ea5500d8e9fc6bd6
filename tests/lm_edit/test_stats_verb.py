"""``lm-edit stats``: second moments ahead of time, the report, the list, corpora of a hub that is never reached."""

from __future__ import annotations

import json
import re

import pytest
import torch
from tiny import EDIT_LAYER, REQUESTS, SENTENCES, build_tokenizer, save_tiny
from transformers import AutoModelForCausalLM

from edit_hooks import EditingError, EditRequest, load_editor
from edit_hooks.locate.second_moments import MomentSettings, second_moments
from lm_edit.cli.main import main
from lm_edit.stats import list_stored_moments, prepare_stats

TEXTS = list(SENTENCES)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("tiny"), "llama"))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LM_EDIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def run(capsys, *arguments, code=0):
    assert main(["stats", *arguments]) == code
    captured = capsys.readouterr()
    return captured.out.strip().split("\n") if code == 0 else captured.err


def cells(line):
    return re.split(r"\s{2,}", line.strip())


def test_an_edit_finds_what_was_collected_for_its_editor(model_path, capsys, monkeypatch):
    settings = "layers:[0,1];moment_tokens:400"
    model = ["--pretrained", model_path, "--device", "cpu"]
    lines = run(capsys, *model, "--editor", "alphaedit", "--editor-args", settings)
    assert cells(lines[0])[:4] == ["layer", "tokens", "width", "tokens/width"]
    assert [cells(line)[:3] for line in lines[1:3]] == [["0", "400", "64"], ["1", "400", "64"]]
    assert all(line.endswith("collected") and "%" in line for line in lines[1:3])
    again = run(capsys, *model, "--editor", "alphaedit", "--editor-args", settings)
    assert all(line.endswith("from the store") for line in again[1:3])
    monkeypatch.setattr("edit_hooks.locate.second_moments._collect", lambda *_: pytest.fail("collected again"))
    monkeypatch.setattr(torch.linalg, "eigh", lambda *_: pytest.fail("projector made again"))
    loaded = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    chosen = {"layers": [0, 1], "moment_tokens": 400, "num_steps": 2, "context_templates": ["{}"]}
    editor = load_editor("alphaedit", {**chosen, "seed": 0, "engine": "fast"})
    (delta,) = editor.edit(loaded, build_tokenizer("byte_bpe_bos"), [EditRequest(**REQUESTS[0])])
    assert delta.diagnostics["layers"][0]["null_space_share"] > 0


def test_layers_text_and_precision_by_hand(model_path, tmp_path, capsys):
    path = tmp_path / "texts.txt"
    path.write_text("\n\n".join(TEXTS), encoding="utf-8")
    chosen = ["--layers", "1", "--source", str(path), "--tokens", "90", "--max-length", "12", "--threshold", "0.05"]
    model = ["--pretrained", model_path, "--device", "cpu"]
    folder = ["--folder", str(tmp_path / "stats")]
    lines = run(capsys, *model, *chosen, *folder, "--moment-dtype", "float64")
    assert cells(lines[1])[:2] == ["1", "90"]
    assert any("fewer than twice the keys' width 64" in line for line in lines if line.startswith("warning: layer 1"))
    (entry,) = list_stored_moments(tmp_path / "stats")
    assert entry.description["dtype"] == "float64" and entry.description["max_length"] == 12
    loaded = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    settings = MomentSettings(str(path), num_tokens=90, max_length=12, dtype="float64")
    moment = second_moments(loaded, build_tokenizer("byte_bpe_bos"), [1], settings, quiet=True)[1]
    assert moment.matrix_FF.dtype == torch.float64
    rank = int((torch.linalg.eigvalsh(moment.matrix_FF) < 0.05).sum())
    assert entry.projectors == [("threshold 0.05", rank, 64)] and 0 < rank < 64
    assert f"{rank} of 64 ({rank / 64:.1%})" in lines[1]


def test_the_precision_is_that_of_the_kept_matrix(model_path):
    loaded = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    tokenizer = build_tokenizer("byte_bpe_bos")
    wide = second_moments(loaded, tokenizer, [1], MomentSettings(TEXTS, dtype="float64"), quiet=True)[1].matrix_FF
    narrow = second_moments(loaded, tokenizer, [1], MomentSettings(TEXTS), quiet=True)[1].matrix_FF
    assert torch.equal(wide.float(), narrow) and not torch.equal(wide, narrow.double())


def test_what_is_kept_is_listed(model_path, tmp_path, capsys, cache):
    assert run(capsys, "--show")[-1].startswith("0 second moments")
    model = ["--pretrained", model_path, "--device", "cpu", "--tokens", "300"]
    run(capsys, *model, "--layers", "1", "0")
    run(capsys, *model, "--layers", "1", "--seed", "3", "--energy", "0.2")
    lines = run(capsys, "--show")
    assert lines[-1] == f"3 second moments in {cache / 'stats'}"
    found = [cells(line) for line in lines[1:4]]
    assert [row[1:4] for row in found] == [
        ["0", "self seed 0, cut at 256", "300"],
        ["1", "self seed 0, cut at 256", "300"],
        ["1", "self seed 3, cut at 256", "300"],
    ]
    assert found[0][-1] == found[1][-1] == "-" and found[2][-1].startswith("energy 0.2: ")
    assert "llama" in found[0][0]
    next(iter(cache.rglob("*.json"))).write_text("{")
    assert run(capsys, "--show")[-1].startswith("2 second moments")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--layers 4 5 6, or --editor memit"),
        (["--editor", "ft_m"], "uses no second moments"),
        (["--editor", "rome"], "no second moments in its configuration"),
        (["--editor", "memitt"], "Did you mean 'memit'"),
        (["--layers", "7"], "blocks 0 to 2"),
        (["--layers", "1", "--threshold", "1", "--energy", "0.1"], "not by both"),
        (["--layers", "1", "--source", "nowhere.txt"], "neither a file"),
        (["--layers", "1", "--editor-args", "lr:1"], "add --editor"),
        (["--layers", "1", "--tokens", "0"], "positive"),
    ],
)
def test_mistakes_are_explained(model_path, capsys, arguments, message):
    error = run(capsys, "--pretrained", model_path, "--device", "cpu", *arguments, code=2)
    assert message in error


def test_wrappers_look_up_what_their_base_does(model_path):
    options = {"pretrained": model_path, "device": "cpu"}
    settings = {"layers": [EDIT_LAYER], "base": "memit"}
    (report,) = prepare_stats(options, editor="rect", settings=settings, quiet=True)
    (again,) = prepare_stats(options, editor="memit", settings={"layers": [EDIT_LAYER]}, quiet=True)
    assert report.is_new and not again.is_new


# --- the hub -----------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A corpus with the layout of a hub repository, and a client that reads it from the disk."""
    import datasets
    import huggingface_hub

    shard = tmp_path / "hub" / "data" / "train-00000.jsonl"
    shard.parent.mkdir(parents=True)
    shard.write_text("\n".join(json.dumps({"id": n, "text": text}) for n, text in enumerate(TEXTS)), encoding="utf-8")
    asked = []

    class Info:
        sha = "0123456789abcdef"

    def info(_self, repository, revision=None):
        asked.append(("info", repository, revision))
        return Info

    real = datasets.load_dataset

    def load(repository, config, *, split, revision, streaming):
        asked.append(("load", repository, config, split, revision, streaming))
        return real("json", data_files=str(shard), split=split, streaming=streaming)

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", info)
    monkeypatch.setattr(datasets, "load_dataset", load)
    return asked, shard


def test_a_hub_corpus_is_streamed_at_a_pinned_revision_in_a_drawn_order(model_path, hub, capsys, cache):
    asked, _ = hub
    model = ["--pretrained", model_path, "--device", "cpu", "--layers", "1"]
    chosen = ["--source", "owner/corpus/2023.en@main", "--tokens", "150", "--max-length", "20"]
    lines = run(capsys, *model, *chosen)
    assert cells(lines[1])[:2] == ["1", "150"] and lines[1].endswith("collected")
    assert asked == [
        ("info", "owner/corpus", "main"),
        ("load", "owner/corpus", "2023.en", "train", "0123456789abcdef", True),
    ]
    assert run(capsys, *model, *chosen)[1].endswith("from the store")
    assert [entry[0] for entry in asked] == ["info", "load", "info"]
    assert run(capsys, *model, *chosen, "--seed", "1")[1].endswith("collected")
    first, second = _matrix(list_stored_moments()[0]), _matrix(list_stored_moments()[1])
    assert not torch.equal(first, second)  # another order, so other texts within the budget
    corpus = list_stored_moments()[0].description["corpus"]
    assert (corpus["kind"], corpus["revision"], corpus["config"]) == ("hub", "0123456789abcdef", "2023.en")
    assert "owner/corpus/2023.en@01234567 seed 0" in run(capsys, "--show")[1]


def _matrix(entry):
    from safetensors.torch import load_file

    return next(iter(load_file(entry.path).values()))


def test_all_of_a_small_hub_corpus_is_the_corpus(model_path, hub):
    loaded = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    tokenizer = build_tokenizer("byte_bpe_bos")
    settings = MomentSettings("owner/corpus", num_tokens=100_000, dtype="float64")
    moment = second_moments(loaded, tokenizer, [1], settings, quiet=True)[1]
    plain = second_moments(loaded, tokenizer, [1], MomentSettings(TEXTS, dtype="float64"), quiet=True)[1]
    torch.testing.assert_close(moment.matrix_FF, plain.matrix_FF, rtol=1e-5, atol=1e-7)  # keys are float32
    assert any("of the 100000 tokens asked for" in text for text in moment.report["warnings"])


def test_hub_corpora_without_texts_or_broken_on_the_way_are_explained(model_path, hub, monkeypatch):
    _, shard = hub
    loaded = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    tokenizer = build_tokenizer("byte_bpe_bos")
    shard.write_text(json.dumps({"body": "x"}) + "\n")
    with pytest.raises(EditingError, match=r"no field 'text'"):
        second_moments(loaded, tokenizer, [1], MomentSettings("owner/corpus"), quiet=True)

    def refuse(*_args, **_kwargs):
        raise ConnectionError("the line broke")

    monkeypatch.setattr("datasets.load_dataset", refuse)
    with pytest.raises(EditingError, match=r"cannot read the corpus 'owner/corpus'.*the line broke.*'self'"):
        second_moments(loaded, tokenizer, [1], MomentSettings("owner/corpus"), quiet=True)
