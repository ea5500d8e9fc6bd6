"""``lm-edit stats``: collection, report, list, and errors."""

from __future__ import annotations

import pytest
import torch
from command_line import printed_lines, run_verb, split_cells
from hub_corpus import REVISION, serve_corpus
from safetensors.torch import load_file

from edit_hooks import EditRequest, load_editor
from edit_hooks.contract.tiny_models import REQUESTS, SENTENCES, build_model, build_tokenizer
from edit_hooks.locate.moments.second_moments import MomentSettings, second_moments
from lm_edit.cli.main import main
from lm_edit.stats import StoredProjector, list_stored_moments


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LM_EDIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def run(tiny_path, capsys):
    """Run the verb on the tiny model; returns the printed lines."""

    def run_verb(*options: str) -> list[str]:
        assert main(["stats", "--pretrained", str(tiny_path("llama")), "--device", "cpu", *options]) == 0
        return printed_lines(capsys)

    return run_verb


def test_an_edit_finds_the_second_moments_collected_for_its_editor(run, monkeypatch):
    options = ["--editor", "alphaedit", "--editor-args", "layers:[0,1];moment_tokens:400"]
    lines = run(*options)
    assert split_cells(lines[0])[:4] == ["layer", "tokens", "width", "tokens/width"]
    assert [split_cells(line)[:3] for line in lines[1:3]] == [["0", "400", "64"], ["1", "400", "64"]]
    assert all(line.endswith("collected") and "%" in line for line in lines[1:3])
    assert all(line.endswith("from the store") for line in run(*options)[1:3])
    monkeypatch.setattr("edit_hooks.locate.moments.second_moments._collect", lambda *_: pytest.fail("collected again"))
    monkeypatch.setattr(torch.linalg, "eigh", lambda *_: pytest.fail("projector computed again"))
    settings = {"layers": [0, 1], "moment_tokens": 400, "num_steps": 2, "context_templates": ["{}"]}
    editor = load_editor("alphaedit", {**settings, "seed": 0, "engine": "fast"})
    (delta,) = editor.edit(build_model("llama"), build_tokenizer("byte_bpe_bos"), [EditRequest(**REQUESTS[0])])
    assert delta.diagnostics["layers"][0]["null_space_share"] > 0


def test_options_select_layers_text_and_precision(run, tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("\n\n".join(SENTENCES), encoding="utf-8")
    text = ["--layers", "1", "--source", str(path), "--tokens", "90", "--max-length", "12"]
    folder = ["--folder", str(tmp_path / "stats")]
    lines = run(*text, *folder, "--threshold", "0.05", "--moment-dtype", "float64")
    assert split_cells(lines[1])[:2] == ["1", "90"]
    assert any("per dimension of the keys (width 64)" in line for line in lines if line.startswith("warning: layer 1"))
    (stored,) = list_stored_moments(tmp_path / "stats")
    assert stored.description["dtype"] == "float64" and stored.description["max_length"] == 12
    settings = MomentSettings(str(path), num_tokens=90, max_length=12, dtype="float64")
    moment = second_moments(build_model("llama"), build_tokenizer("byte_bpe_bos"), [1], settings, quiet=True)[1]
    assert moment.matrix_FF.dtype == torch.float64
    rank = int((torch.linalg.eigvalsh(moment.matrix_FF) < 0.05).sum())
    assert stored.projectors == [StoredProjector("threshold 0.05", rank, 64)] and 0 < rank < 64
    assert f"{rank} of 64 ({rank / 64:.1%})" in lines[1]


def test_stored_second_moments_are_listed(run, cache):
    assert run("--show")[-1].startswith("0 second moments")
    run("--tokens", "300", "--layers", "1", "0")
    run("--tokens", "300", "--layers", "1", "--seed", "3", "--energy", "0.2")
    lines = run("--show")
    assert lines[-1] == f"3 second moments in {cache / 'stats'}"
    rows = [split_cells(line) for line in lines[1:4]]
    assert [row[1:4] for row in rows] == [
        ["0", "self seed 0, cut at 128", "300"],
        ["1", "self seed 0, cut at 128", "300"],
        ["1", "self seed 3, cut at 128", "300"],
    ]
    assert rows[0][-1] == rows[1][-1] == "-" and rows[2][-1].startswith("energy 0.2: ")
    assert "llama" in rows[0][0]
    next(iter(cache.rglob("*.json"))).write_text("{")
    assert run("--show")[-1].startswith("2 second moments")


def test_a_hub_corpus_is_streamed_at_a_pinned_revision_in_a_random_order(run, tmp_path, monkeypatch):
    corpus = serve_corpus(tmp_path / "hub", monkeypatch)
    options = ["--layers", "1", "--source", "owner/corpus/2023.en@main", "--tokens", "150", "--max-length", "20"]
    lines = run(*options)
    assert split_cells(lines[1])[:2] == ["1", "150"] and lines[1].endswith("collected")
    assert corpus.calls == [
        ("info", "owner/corpus", "main"),
        ("load", "owner/corpus", "2023.en", "train", REVISION, True),
    ]
    assert run(*options)[1].endswith("from the store")
    assert [call[0] for call in corpus.calls] == ["info", "load", "info"]
    assert run(*options, "--seed", "1")[1].endswith("collected")
    first, second = list_stored_moments()
    matrices = [next(iter(load_file(moment.path).values())) for moment in (first, second)]
    assert not torch.equal(*matrices)  # another order, so other texts within the budget
    identity = first.description["corpus"]
    assert (identity["kind"], identity["revision"], identity["config"]) == ("hub", REVISION, "2023.en")
    assert "owner/corpus/2023.en@01234567 seed 0" in run("--show")[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--layers 4 5 6, or --editor memit"),
        (["--editor", "ft_m"], "uses no second moments"),
        (["--editor", "rome"], "no second moments in its configuration"),
        (["--editor", "memitt"], "Did you mean 'memit'"),
        (["--layers", "7"], "blocks 0 to 2"),
        (["--layers", "1", "--threshold", "1", "--energy", "0.1"], "not by both"),
        (["--layers", "1", "--source", "nowhere.txt"], "no file or folder"),
        (["--layers", "1", "--editor-args", "lr:1"], "add --editor"),
        (["--layers", "1", "--tokens", "0"], "positive"),
    ],
)
def test_mistakes_are_explained(tiny_path, capsys, arguments, message):
    assert run_verb(["stats", "--pretrained", str(tiny_path("llama")), "--device", "cpu", *arguments]) == 2
    assert message in capsys.readouterr().err
