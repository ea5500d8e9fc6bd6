"""Second moments and projectors of other projects' layouts: read, checked against the model, and used by editors."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from command_line import run_verb
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from edit_hooks import EditRequest, load_editor
from edit_hooks.locate.moments.null_space import null_space_of
from edit_hooks.locate.moments.second_moments import MomentSettings, second_moments
from edit_hooks.utils.errors import EditingError
from lm_edit.imports.matrices import import_matrices, read_matrices
from lm_edit.imports.npz_file import read_key_sum

NOUNS, VERBS = ("school", "keeper", "market", "story", "garden", "bridge"), ("stood", "began", "slept", "ended")
TEXTS = [f"The {noun} of the village {verb} near the old river in 19{len(noun)}." for noun in NOUNS for verb in VERBS]
REQUEST = EditRequest(prompt="{} is in", subject="Velm", target_new="Karsk")


@pytest.fixture(scope="module")
def subject(tiny_model: Any, tiny_tokenizer: Any) -> Any:
    """A tiny model, its tokenizer, and the second moments of its keys over some text."""
    model, tokenizer = tiny_model("gpt2"), tiny_tokenizer("byte_bpe")
    return model, tokenizer, second_moments(model, tokenizer, [0, 1], MomentSettings(TEXTS), quiet=True)


def write_npz(path: Path, moment: Any, count: int = 500, **changes: Any) -> Path:
    """A file of ROME's runningstats: a CombinedStat with one SecondMoment."""
    arrays = {
        "mom2.constructor": "util.runningstats.SecondMoment()",
        "mom2.count": count,
        "mom2.mom2": (moment * count).numpy(),
        "sample_size": numpy.array(float("nan")),  # as its null
    }
    arrays = {name: value for name, value in {**arrays, **changes}.items() if value is not None}
    numpy.savez(path, **arrays)
    return path


def npz_of(subject: Any, folder: Path, layer: int) -> Path:
    name = f"transformer.h.{layer}.mlp.c_proj_float32_mom2_100000.npz"
    return write_npz(folder / name, subject[2][layer].matrix_FF)


def test_statistics_of_rome_are_means_over_their_tokens(subject: Any, tmp_path: Path) -> None:
    files = [npz_of(subject, tmp_path, layer) for layer in (1, 0)]
    out = tmp_path / "moments.safetensors"
    kind, checks = import_matrices([str(file) for file in files], *subject[:2], out)
    assert kind == "second_moments" and [check.layer for check in checks] == [0, 1]
    assert all(check.num_tokens == 500 and (check.correlation or 0) > 0.5 for check in checks)
    written = load_file(out)
    for layer in (0, 1):
        torch.testing.assert_close(written[f"layer{layer}"], subject[2][layer].matrix_FF)


def test_an_imported_matrix_makes_the_edit_of_the_matrix_itself(subject: Any, tmp_path: Path) -> None:
    model, tokenizer, moments = subject
    out = tmp_path / "moments.safetensors"
    import_matrices([str(npz_of(subject, tmp_path, 1))], model, tokenizer, out)
    config = {"layers": [1], "num_steps": 3, "context_templates": ["{}"]}
    edits = [
        load_editor("memit", {**config, "second_moments": source}).edit(model, tokenizer, [REQUEST])[0].weights()
        for source in (str(out), {1: moments[1].matrix_FF})
    ]
    for name, update in edits[0].items():
        torch.testing.assert_close(update, edits[1][name], rtol=1e-3, atol=1e-5)


def test_projectors_of_alphaedit_are_one_tensor_for_all_layers(subject: Any, tmp_path: Path) -> None:
    model, tokenizer, moments = subject
    eye = torch.eye(len(moments[0].matrix_FF), dtype=torch.float64)
    stacked = torch.stack([null_space_of(moments[layer], None, 0.05).metric_product(eye) for layer in (0, 1)]).float()
    path, out = tmp_path / "null_space_project.pt", tmp_path / "p.safetensors"
    torch.save(stacked, path)
    with pytest.raises(EditingError, match=r"2 of 2 matrices have no layer .* give --layers"):
        import_matrices([str(path)], model, tokenizer, out)
    kind, checks = import_matrices([str(path)], model, tokenizer, out, layers=[0, 1])
    assert kind == "projectors"
    assert all((check.energy or 1) < 0.5 * (check.rank_share or 0) for check in checks)
    torch.testing.assert_close(load_file(out)["layer1"], stacked[1])
    editor = load_editor(
        "alphaedit", {"layers": [1], "num_steps": 2, "context_templates": ["{}"], "projectors": str(out)}
    )
    assert editor.edit(model, tokenizer, [REQUEST])[0].diagnostics["constraint"] == "null_space"


@pytest.mark.parametrize("kind", ["second_moments", "projectors"])
def test_a_matrix_of_another_model_is_refused_unless_it_is_wanted(kind: Any, subject: Any, tmp_path: Path) -> None:
    """The same spectrum in other directions, as a model of the same size has."""
    model, tokenizer, moments = subject
    width = len(moments[1].matrix_FF)
    turn = torch.linalg.qr(torch.randn(width, width, generator=torch.Generator().manual_seed(1)))[0]
    matrix = moments[1].matrix_FF
    if kind == "projectors":
        matrix = null_space_of(moments[1], None, 0.05).metric_product(torch.eye(width, dtype=torch.float64)).float()
    path, out = tmp_path / "x.pt", tmp_path / "out.safetensors"
    turned = turn @ matrix @ turn.T
    torch.save((turned + turned.T) / 2, path)
    with pytest.raises(EditingError, match="--any-spectrum"):
        import_matrices([str(path)], model, tokenizer, out, layers=[1])
    assert not out.exists()
    assert import_matrices([str(path)], model, tokenizer, out, layers=[1], any_spectrum=True)[0] == kind


@pytest.mark.parametrize(
    ("matrix", "kind", "problem"),
    [
        (torch.eye(3), None, r"shape \[3, 3\]; keys of this model have width"),
        ("not symmetric", None, "not symmetric"),
        ("not finite", None, "not finite"),
        ("negative", "second_moments", "negative entries on its diagonal"),
        ("moment", "projectors", "is no projector"),
    ],
)
def test_what_is_no_such_matrix_is_named(matrix: Any, kind: Any, problem: str, subject: Any, tmp_path: Path) -> None:
    moment = subject[2][1].matrix_FF
    changed = {
        "not symmetric": moment + torch.triu(torch.ones_like(moment), 1),
        "not finite": moment * float("nan"),
        "negative": -moment,
        "moment": moment,
    }
    path = tmp_path / "x.pt"
    torch.save(matrix if torch.is_tensor(matrix) else changed[matrix], path)
    with pytest.raises(EditingError, match=problem):
        import_matrices([str(path)], *subject[:2], tmp_path / "out.safetensors", layers=[1], kind=kind)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"mom2.count": None}, r"has no mom2\.count\.npy, as the statistics of ROME"),
        ({"mom2.count": 0}, "over 0 tokens"),
        ({"mom2.count": 2.5}, r"over 2\.5 tokens"),
        ({"mom2.mom2": numpy.ones((2, 3))}, r"shape \[2, 3\]"),
        ({"mom2.mom2": numpy.array([["a"]])}, "holds <U1"),
        ({"mom2.mom2": numpy.array([[print]], dtype=object)}, "holds object"),
    ],
)
def test_odd_statistics_are_named(changes: Any, problem: str, tmp_path: Path) -> None:
    with pytest.raises(EditingError, match=problem):
        read_key_sum(write_npz(tmp_path / "x.npz", torch.eye(2), **changes))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damaged_statistics_are_matrices_or_errors(tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(write_npz(tmp_path / "x.npz", torch.eye(3)).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.npz"
    path.write_bytes(bytes(content[: data.draw(st.sampled_from([None, len(content) // 2]))]))
    try:
        read = read_key_sum(path)
    except EditingError:
        return
    assert read.mean_FF.dim() == 2 and read.num_tokens > 0


def test_a_header_that_states_more_than_there_is_reads_nothing(tmp_path: Path) -> None:
    """A million rows in a file of a few hundred bytes."""
    source, path = write_npz(tmp_path / "x.npz", torch.eye(3)), tmp_path / "large.npz"
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(path, "w") as new:
        for info in old.infolist():
            new.writestr(info.filename, old.read(info).replace(b"(3, 3), }    ", b"(1000000, 3)}"))
    with pytest.raises(EditingError, match=r"its shape \[1000000, 3\] needs more"):
        read_key_sum(path)


def test_layers_stand_in_the_names_of_modules(subject: Any, tmp_path: Path) -> None:
    names = ("model.layers.7.mlp.down_proj_float32_mom2_100000", "transformer.h.13.mlp.c_proj_x", "cov", "h.1.h.2")
    files = [write_npz(tmp_path / f"{name}.npz", torch.eye(2)) for name in names]
    assert [next(read_matrices(file)).layer for file in files] == [7, 13, None, None]
    twice = [str(write_npz(tmp_path / f"{name}.h.1.npz", subject[2][1].matrix_FF)) for name in "ab"]
    with pytest.raises(EditingError, match="a layer has two matrices"):
        import_matrices(twice, *subject[:2], tmp_path / "out.safetensors")


def test_a_file_on_the_hub_is_read_at_its_revision(subject: Any, tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    model, tokenizer, _ = subject
    out = tmp_path / "second_moments.safetensors"
    import_matrices([str(npz_of(subject, tmp_path, 1))], model, tokenizer, out)
    asked = []

    def download(repository: str, name: str, *, revision: str) -> str:
        asked.append((repository, name, revision))
        return str(tmp_path / name)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    settings = {"layers": [1], "num_steps": 2, "context_templates": ["{}"]}
    commit = "0" * 40
    config = load_editor("memit", {**settings, "second_moments": f"hf:owner/name@{commit}"}).default_config(model)
    local = load_editor("memit", {**settings, "second_moments": str(out)}).default_config(model)
    assert config.moment_digest == local.moment_digest is not None
    assert set(asked) == {("owner/name", "second_moments.safetensors", commit)} and not caplog.records
    (delta,) = load_editor("memit", {**settings, "second_moments": "hf:owner/name@main"}).edit(
        model, tokenizer, [REQUEST]
    )
    assert delta.diagnostics["constraint"] == "second_moment" and "'main' of owner/name can change" in caplog.text
    with pytest.raises(EditingError, match="hf:owner/name@revision is needed"):
        load_editor("memit", {**settings, "second_moments": "hf:owner/name"}).default_config(model)


def test_the_command_prints_what_was_measured(subject: Any, tiny_path: Any, tmp_path: Path, capsys: Any) -> None:
    file, out = npz_of(subject, tmp_path, 1), tmp_path / "out.safetensors"
    model = ["--pretrained", str(tiny_path("gpt2", "byte_bpe")), "--device", "cpu"]
    assert run_verb(["stats", "import", str(file), *model, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "correlation" in printed and f"editor_args=second_moments:{out}" in printed
    assert run_verb(["stats", "import", str(file), *model, "--out", str(out)]) == 2  # the file exists
    assert "exists" in capsys.readouterr().err
