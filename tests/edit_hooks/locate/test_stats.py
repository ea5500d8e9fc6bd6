"""Second moments: the numbers of the releases, the sources they come from, and files that are never mistaken."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from golden_data import GOLDEN_MODELS, golden_covariance, golden_json
from tiny import EDIT_LAYER, SENTENCES, build_model, build_tokenizer

from edit_hooks import EditingError, EditRequest, load_editor
from edit_hooks.locate.null_space import null_space_of
from edit_hooks.locate.second_moments import TokenBudget, second_moments
from edit_hooks.locate.solve import SecondMoment

TEXTS = list(SENTENCES)


@pytest.fixture(scope="module")
def tiny():
    return build_model("llama"), build_tokenizer("byte_bpe_bos")


@pytest.mark.parametrize("model_name", GOLDEN_MODELS)
def test_the_forty_sentences_give_the_covariance_of_the_goldens(model_name, golden_model):
    model, tokenizer = golden_model(model_name)
    moments = second_moments(model, tokenizer, [0, 1], golden_json("common")["sentences"], quiet=True)
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
    moments = second_moments(model, tokenizer, [1], TEXTS, budget=TokenBudget(max_length=9), quiet=True)
    torch.testing.assert_close(moments[1].matrix_FF.double(), stacked.T @ stacked / len(stacked), rtol=1e-4, atol=1e-6)
    assert moments[1].report["num_tokens"] == len(stacked)


def test_files_folders_and_lists_of_the_same_texts_agree(tiny, tmp_path):
    model, tokenizer = tiny
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("\n\n".join(TEXTS[:10]), encoding="utf-8")
    lines = [json.dumps({"text": text}) for text in TEXTS[10:]]
    (tmp_path / "texts" / "b.jsonl").write_text("\n".join(lines), encoding="utf-8")
    from_list = second_moments(model, tokenizer, [1], TEXTS, quiet=True)[1].matrix_FF
    from_folder = second_moments(model, tokenizer, [1], tmp_path / "texts", folder=tmp_path, quiet=True)[1].matrix_FF
    assert torch.equal(from_list, from_folder)


def test_a_second_call_reads_the_file_and_new_layers_are_added(tiny, tmp_path, monkeypatch):
    model, tokenizer = tiny
    first = second_moments(model, tokenizer, [1], "self", folder=tmp_path, quiet=True)
    both = second_moments(model, tokenizer, [0, 1], "self", folder=tmp_path, quiet=True)
    assert torch.equal(both[1].matrix_FF, first[1].matrix_FF)
    monkeypatch.setattr("edit_hooks.locate.second_moments._collect", lambda *_: pytest.fail("collected again"))
    again = second_moments(model, tokenizer, [0, 1], "self", folder=tmp_path, quiet=True)
    for layer in (0, 1):
        assert torch.equal(again[layer].matrix_FF, both[layer].matrix_FF)
        assert again[layer].report == both[layer].report
    assert not list(tmp_path.rglob("*.tmp"))


def test_whatever_alters_the_matrix_makes_another_file(tiny, tmp_path):
    model, tokenizer = tiny
    seen: list[torch.Tensor] = []
    for settings in (
        {},
        {"seed": 1},
        {"budget": TokenBudget(num_tokens=300)},
        {"budget": TokenBudget(max_length=16)},
    ):
        matrix = second_moments(model, tokenizer, [1], "self", folder=tmp_path, quiet=True, **settings)[1].matrix_FF
        assert not any(torch.equal(matrix, other) for other in seen)
        seen.append(matrix)
    other = build_model("llama", seed=3)
    assert not torch.equal(
        second_moments(other, tokenizer, [1], "self", folder=tmp_path, quiet=True)[1].matrix_FF, seen[0]
    )
    assert len(list(tmp_path.rglob("*.json"))) == 5


def test_sampling_repeats_and_leaves_the_generator_alone(tiny, tmp_path):
    model, tokenizer = tiny
    torch.manual_seed(5)
    state = torch.get_rng_state()
    budget = TokenBudget(num_tokens=200, max_length=20)
    runs = [
        second_moments(model, tokenizer, [1], "self", budget=budget, folder=tmp_path / name, quiet=True)[1]
        for name in ("a", "b")
    ]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(runs[0].matrix_FF, runs[1].matrix_FF)
    assert runs[0].report["num_tokens"] == 200


def test_damaged_and_foreign_files_are_made_again(tiny, tmp_path, caplog):
    model, tokenizer = tiny
    first = second_moments(model, tokenizer, [1], "self", folder=tmp_path, quiet=True)[1].matrix_FF
    (tensors,) = tmp_path.rglob("*.safetensors")
    (manifest,) = tmp_path.rglob("*.json")
    tensors.write_bytes(tensors.read_bytes()[:100])
    with caplog.at_level(logging.WARNING):
        assert torch.equal(
            second_moments(model, tokenizer, [1], "self", folder=tmp_path, quiet=True)[1].matrix_FF, first
        )
    assert str(tensors) in caplog.text
    record = json.loads(manifest.read_text())
    record["description"]["layer"] = 2
    manifest.write_text(json.dumps(record))
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert torch.equal(
            second_moments(model, tokenizer, [1], "self", folder=tmp_path, quiet=True)[1].matrix_FF, first
        )
    assert "something else" in caplog.text


def test_the_report_says_how_good_the_matrix_is(tiny, caplog):
    model, tokenizer = tiny
    with caplog.at_level(logging.INFO):
        report = second_moments(model, tokenizer, [1], TEXTS[:2], quiet=True)[1].report
    assert report["condition"] is None or report["condition"] > 1e3  # two sentences cannot fill 64 dimensions
    assert "fewer than twice" in caplog.text
    report = second_moments(model, tokenizer, [1], TEXTS * 3, quiet=True)[1].report
    values = torch.linalg.eigvalsh(second_moments(model, tokenizer, [1], TEXTS, quiet=True)[1].matrix_FF.double())
    assert report["largest_eigenvalue"] == pytest.approx(float(values[-1]), rel=1e-4)
    assert report["trace"] == pytest.approx(float(values.sum()), rel=1e-4)


def test_power_iteration_agrees_with_the_eigenvalues(monkeypatch):
    from edit_hooks.locate import second_moments as stats

    generator = torch.Generator().manual_seed(0)
    basis, _ = torch.linalg.qr(torch.randn(40, 40, generator=generator, dtype=torch.float64))
    matrix = basis @ torch.diag(torch.logspace(-3, 1, 40, dtype=torch.float64)) @ basis.T
    exact = stats._condition(matrix)
    monkeypatch.setattr(stats, "EXACT_CONDITION_UP_TO", 1)
    rough = stats._condition(matrix)
    for name in ("largest_eigenvalue", "smallest_eigenvalue"):
        assert rough[name] == pytest.approx(exact[name], rel=1e-3)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere.txt", "neither a file"),
        ("selff", "neither a file"),
        ([" "], "holds none"),
    ],
)
def test_bad_sources_are_explained(tiny, source, message):
    with pytest.raises(EditingError, match=message):
        second_moments(*tiny, [1], source, quiet=True)


def test_unreachable_corpora_name_the_ways_out(tiny, monkeypatch):
    import huggingface_hub

    def refuse(*_args, **_kwargs):
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", refuse)
    with pytest.raises(EditingError, match=r"wikimedia/wikipedia.*second_moments='self'"):
        second_moments(*tiny, [1], "wikimedia/wikipedia/20231101.en", quiet=True)


REQUEST = EditRequest(prompt="{} is located in", subject="Port Amelin", target_new="Rome")
QUICK = {"layers": [EDIT_LAYER], "num_steps": 3, "context_templates": ["{}"]}


def test_editors_take_every_kind_of_source(tiny, tmp_path, monkeypatch):
    """A list of texts, a text file, self, and a matrix give edits; the same matrix gives the same edit."""
    monkeypatch.setenv("LM_EDIT_CACHE", str(tmp_path / "cache"))
    model, tokenizer = tiny
    path = tmp_path / "texts.txt"
    path.write_text("\n\n".join(TEXTS), encoding="utf-8")
    matrix = {EDIT_LAYER: second_moments(model, tokenizer, [EDIT_LAYER], TEXTS, quiet=True)[EDIT_LAYER].matrix_FF}
    updates = []
    for source in (TEXTS, str(path), matrix, "self", None):
        editor = load_editor("memit", {**QUICK, "second_moments": source})
        (delta,) = editor.edit(model, tokenizer, [REQUEST])
        json.dumps(delta.meta)
        updates.append(next(iter(delta.weights().values())))
    assert torch.equal(updates[0], updates[1]) and torch.equal(updates[0], updates[2])
    assert not torch.equal(updates[0], updates[3]) and not torch.equal(updates[0], updates[4])


def test_the_content_of_a_file_belongs_to_the_configuration(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("LM_EDIT_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "texts.txt"
    digests = []
    for texts in (TEXTS, TEXTS[:10]):
        path.write_text("\n\n".join(texts), encoding="utf-8")
        editor = load_editor("memit", {**QUICK, "second_moments": str(path)})
        digests.append(editor.default_config(tiny[0]).to_dict()["moment_digest"])
    assert digests[0] != digests[1] and None not in digests


def test_statistics_are_those_of_the_model_before_a_stream(tiny, tmp_path, monkeypatch):
    """An editor reads them once, when it first sees the model, not again on edited weights."""
    from edit_hooks import edited

    monkeypatch.setenv("LM_EDIT_CACHE", str(tmp_path / "cache"))
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


def test_projectors_are_kept_beside_the_matrix(tiny, tmp_path, monkeypatch):
    model, tokenizer = tiny
    moment = second_moments(model, tokenizer, [1], "self", folder=tmp_path, quiet=True)[1]
    first = null_space_of(moment, None, 0.3)
    calls = []
    eigh = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: calls.append(1) or eigh(matrix))
    again = null_space_of(moment, None, 0.3)
    assert not calls and torch.equal(first.basis_FR, again.basis_FR)
    assert (first.is_complement, first.threshold, first.trace) == (again.is_complement, again.threshold, again.trace)
    null_space_of(moment, 0.5)
    assert len(calls) == 1  # another threshold is another projector


def test_the_energy_bounds_the_null_space():
    generator = torch.Generator().manual_seed(0)
    basis, _ = torch.linalg.qr(torch.randn(30, 30, generator=generator, dtype=torch.float64))
    values = torch.logspace(-4, 1, 30, dtype=torch.float64)
    moment = SecondMoment(basis @ torch.diag(values) @ basis.T)
    for energy in (0.01, 0.1, 0.5):
        rank = null_space_of(moment, None, energy).rank
        assert values[:rank].sum() <= energy * values.sum() < values[: rank + 1].sum()


def test_projectors_that_decide_nothing_or_everything_are_named(tiny, caplog):
    model, tokenizer = tiny
    with pytest.raises(EditingError, match=r"nothing can be written"):
        load_editor("alphaedit", {**QUICK, "second_moments": TEXTS, "nullspace_threshold": 1e-12}).edit(
            model, tokenizer, [REQUEST]
        )
    with caplog.at_level(logging.WARNING):
        load_editor("alphaedit", {**QUICK, "second_moments": TEXTS, "nullspace_threshold": 1e6}).edit(
            model, tokenizer, [REQUEST]
        )
    assert "protects almost nothing" in caplog.text
    with pytest.raises(EditingError, match="null space of real keys"):
        load_editor("alphaedit", {"second_moments": None})
