"""One line names the origin of an editor's settings, and the results hold it."""

from __future__ import annotations

import logging

import pytest
from lm_runs import BAKE, build, run
from model_shapes import MODELS, model_like

from edit_hooks import load_editor
from edit_hooks.base import origin as origins
from edit_hooks.contract.tiny_models import REQUESTS, build_model, build_tokenizer
from edit_hooks.request import EditRequest

QUICK = {"num_steps": 1, "lr": 0.01}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(origins, "_reported", set())
    caplog.set_level(logging.INFO, "lm_eval.edited_hf")


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith("editor ")]


def test_a_run_on_an_unknown_model_has_one_line_with_the_command_that_tunes(tiny_path, caplog) -> None:
    path = str(tiny_path("llama"))
    lm = build(path, editor="ultraedit", editor_args={})
    results = run(lm, BAKE[:1], limit=1, settings={"generate": False})
    (line,) = lines(caplog)
    assert line.startswith(
        "editor ultraedit: no settings are shipped for this llama model of 3 blocks, so the editor's"
    )
    assert "blocks [1, 2] by depth" in line and "updates 0.006 times the norm" in line
    assert line.endswith(
        f"lm-edit tune --pretrained {path} --editor ultraedit --edits bake --out tuned.yaml; then "
        "editor_args=tuned.yaml"
    )
    record = results["config"]["edited_hf"]["settings_origin"]
    assert (record["shipped"], record["given"], record["layers"]) == ([], [], "by depth") and len(
        record["guesses"]
    ) == 1


def test_a_tuned_file_is_named_and_is_no_guess(tiny_path, tmp_path, caplog) -> None:
    tuned = tmp_path / "tuned.yaml"
    tuned.write_text("{layers: [1], lr: 0.5}", encoding="utf-8")
    lm = build(str(tiny_path("llama")), editor="ft_m", editor_args=str(tuned))
    (line,) = lines(caplog)
    assert f"layers, lr from {tuned}" in line and "blocks [1]" in line and "lm-edit tune" not in line
    assert [record.levelno for record in caplog.records if record.getMessage() == line] == [logging.INFO]
    assert lm._origin.to_json()["settings_file"] == str(tuned)


def test_shipped_settings_are_named_by_their_file(caplog) -> None:
    model = model_like(MODELS["gpt2-xl"])
    origin = load_editor("r_rome", {"lr": 0.3}).settings_origin(model)
    text = "editor r_rome: lr as given; settings of r_rome/gpt2-xl.yaml, which match the model's shape; blocks [17]."
    assert str(origin) == text
    assert origin.to_json()["layers"] == "shipped" and not origin.is_guess


def test_both_files_of_a_post_processing_editor_are_named() -> None:
    origin = load_editor("rect", {"base_settings": {"lr": 0.3}}).settings_origin(model_like(MODELS["gpt2-xl"]))
    assert (origin.editor, origin.base, origin.given) == ("rect", "memit", ("lr",))
    assert origin.shipped == ("memit/gpt2-xl.yaml",)


def test_use_without_a_harness_has_the_line_once(caplog) -> None:
    model, tokenizer = build_model("llama"), build_tokenizer("byte_bpe_bos")
    requests = [EditRequest(**REQUESTS[0])]
    for _ in range(2):
        load_editor("ft_m", QUICK).edit(model, tokenizer, requests)
    load_editor("prune", {"base": "r_rome", "base_settings": {"num_steps": 1, "context_templates": ["{}"]}}).edit(
        model, tokenizer, requests
    )
    said = lines(caplog)
    assert sum(line.startswith("editor ft_m: num_steps, lr as given; no settings") for line in said) == 1
    assert sum("no settings are shipped" in line for line in said) == 2  # one of prune, none of its base


def test_contexts_alone_have_no_line(tiny_path, caplog) -> None:
    lm = build(str(tiny_path("llama")), editor="ice", editor_args={})
    assert lines(caplog) == [] and lm._origin is None
    build(str(tiny_path("llama")), editor="ft_m", editor_args=QUICK, icl=True)
    assert [line.split(":")[0] for line in lines(caplog)] == ["editor ft_m"]
