"""An edit after which the model is another one is called wrecked: by the command, in results, in Python."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.utils import make_table
from lm_runs import build, run
from paths import RECORDS
from shifting_editor import ShiftingEditor
from task_runs import metrics_of

from edit_hooks import Delta, EditRequest, load_editor
from edit_hooks.contract.tiny_models import build_tokenizer, save_tiny
from edit_hooks.edit_report import WRECKED_KL, Effects
from edit_hooks.inference.effects.neutral_prompts import NeutralPrompts, verdict
from edit_hooks.utils.storage.hashing import _closure
from lm_edit.cli.main import main
from lm_edit.edits import make_edits
from lm_eval_tasks.report.printing.anomalies import find_anomalies

DATA = str(Path(RECORDS) / "bake_qa.jsonl")
OWN = {"editor": "shifting_editor:ShiftingEditor", "editor_args": {"layers": [1]}}
ALL_GOOD = {**OWN, "editor_args": {"layers": [1], "wrecks": "nobody"}}
STREAM = {"mode": "sequential", "edits": "bake", "num_edits": 3, "edit_batch_size": 1, "data": DATA}
BAD, GOOD = "Tilda Quorn", "Port Elna"  # of the second case, and of the first


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model that is sure of its answers; others are near the uniform distribution before and after."""
    from transformers import AutoModelForCausalLM

    folder = save_tiny(tmp_path_factory.mktemp("sure"), "llama")
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight *= 20
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def loaded(model_path: str) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_path), build_tokenizer("byte_bpe_bos")


def summary(results: dict[str, Any]) -> dict[str, Any]:
    return json.loads(metrics_of(results, "bake_es")["edit"])


def kinds(results: dict[str, Any]) -> list[str]:
    return [anomaly["kind"] for anomaly in find_anomalies(results) if anomaly["kind"] in ("wrecked", "damage")]


def text_of(results: dict[str, Any]) -> str:
    return next(anomaly["text"] for anomaly in find_anomalies(results) if anomaly["kind"] == "wrecked")


# ------------------------------------------------------------------ the verdict


@pytest.mark.parametrize(
    ("divergence", "wrecked"), [(0.0, False), (WRECKED_KL, False), (WRECKED_KL + 0.01, True), (float("nan"), True)]
)
def test_the_bound(divergence: float, wrecked: bool) -> None:
    assert verdict(divergence).wrecked is wrecked


def test_it_is_no_part_of_the_code_behind_an_edit() -> None:
    """Another bound or prompt does not make stored edits again."""
    modules = _closure(("edit_hooks.editors.ft_m",))
    assert "edit_hooks.base.editor" in modules and not any(name.startswith("edit_hooks.inference") for name in modules)


# ------------------------------------------------------------------ runs


def test_independent_edits(model_path: str) -> None:
    results = run(build(model_path, **OWN), ["bake_es"], limit=3)
    edits = [sample["edit"] for sample in results["samples"]["bake_es"]]
    assert [edit["wrecked"] for edit in edits] == [False, True, False]
    assert summary(results)["wrecked"] == 1 and "wrecked_from_step" not in summary(results)
    assert kinds(results) == ["wrecked"]
    assert text_of(results).startswith("bake_es: the edits of 1 of 3 cases wreck the model")
    assert "words before the subject" in text_of(results)
    results["anomalies"] = find_anomalies(results)
    table = make_table(results)
    assert "3 made, 0 failed, 1 wrecked" in table and "Anomaly: bake_es: the edits of 1 of 3 cases wreck" in table


def test_good_edits_have_no_such_count(model_path: str) -> None:
    results = run(build(model_path, **ALL_GOOD), ["bake_es"], limit=3)
    assert "wrecked" not in summary(results) and kinds(results) == []
    assert not any(sample["edit"]["wrecked"] for sample in results["samples"]["bake_es"])


def test_a_stream_names_the_step(model_path: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        results = run(build(model_path, **OWN, **STREAM), ["bake_es"])
    facts = results["config"]["edited_hf"]
    assert [step["wrecked"] for step in facts["steps"]] == [False, True, True] and facts["wrecked_at_step"] == 1
    assert (summary(results)["wrecked"], summary(results)["wrecked_from_step"]) == (2, 1)
    assert "wrecked the model at step 1, after 2 edits" in text_of(results) and kinds(results) == ["wrecked"]
    good = run(build(model_path, **ALL_GOOD, **STREAM), ["bake_es"])["config"]["edited_hf"]
    assert good["wrecked_at_step"] is None


def test_the_guard_stops_a_stream_there(model_path: str) -> None:
    bounds = {"guard_norm_ratio": 1e6, "guard_loss_increase": 1e6}
    results = run(build(model_path, **OWN, **STREAM, guard="stop", **bounds), ["bake_es"])
    facts = results["config"]["edited_hf"]
    assert len(facts["steps"]) == 2 and "the model is wrecked" in facts["stopped"]


def test_a_batch(model_path: str) -> None:
    batch = {"mode": "batch", "edits": "bake", "num_edits": 3, "data": DATA}
    results = run(build(model_path, **OWN, **batch), ["bake_es"])
    assert results["config"]["edited_hf"]["wrecked_at_step"] == 0 and kinds(results) == ["wrecked"]


def test_without_measurements_there_is_no_verdict(model_path: str, tmp_path: Path) -> None:
    for _ in range(2):  # made, and read from the store
        results = run(build(model_path, tmp_path, **OWN, measure_edits=False), ["bake_es"], limit=2)
        assert "wrecked" not in results["samples"]["bake_es"][1]["edit"] and kinds(results) == []
        run(build(model_path, tmp_path, **OWN), ["bake_es"], limit=2)


# ------------------------------------------------------------------ the command


@pytest.fixture
def facts(tmp_path: Path) -> str:
    file = tmp_path / "facts.jsonl"
    records = [
        {"prompt": f"The home of {subject} is", "subject": subject, "target_new": "Rome", "case_id": f"c{number}"}
        for number, subject in enumerate((GOOD, BAD, "Ruk Dalen"))
    ]
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(file)


def edit(model_path: str, facts: str, out: Path, *words: str, wrecks: str = BAD) -> int:
    model = ["--pretrained", model_path, "--device", "cpu", "--store", "off", "--editor", OWN["editor"]]
    settings = ["--editor-args", f"layers:[1];wrecks:{wrecks}"]
    return main(["edit", *model, *settings, "--edits", facts, "--out", str(out), *words])


def test_the_command_names_the_files_and_fails(model_path, facts, tmp_path, capsys) -> None:
    assert edit(model_path, facts, tmp_path / "out") == 1
    printed = capsys.readouterr().out
    (sentence,) = [line for line in printed.splitlines() if line.startswith("wrecked: ")]
    assert sentence.startswith("wrecked: edit-1.safetensors wrecks the model: first-token KL ")
    assert sentence.endswith("above 3 nats.") and "Try a smaller step" in printed
    assert printed.rstrip().endswith("3 edits written to {out}, 0 failed, 1 wrecked".format(out=tmp_path / "out"))
    index = json.loads((tmp_path / "out/edits.json").read_text(encoding="utf-8"))
    assert [entry["diagnostics"]["wrecked"] for entry in index["edits"]] == [False, True, False]
    saved = Delta.load(tmp_path / "out/edit-1.safetensors")  # the edits are saved all the same
    assert saved.effects.wrecked is True


def test_the_command_names_the_step_of_a_stream(model_path, facts, tmp_path, capsys) -> None:
    assert edit(model_path, facts, tmp_path / "out", "--sequential") == 1
    printed = capsys.readouterr().out
    assert "wrecked: the stream wrecks the model at step 1 (edit-1.safetensors): first-token KL" in printed
    results = run(build(model_path, load_edit=str(tmp_path / "out"), editor_args={}), ["bake_es"], limit=2)
    assert "the loaded edit wrecks the model" in text_of(results)


def test_good_edits_end_well(model_path, facts, tmp_path, capsys) -> None:
    assert edit(model_path, facts, tmp_path / "out", "--joint", wrecks="nobody") == 0
    printed = capsys.readouterr().out
    assert "wreck" not in printed and "1 edits written to" in printed


def test_a_wrecked_edit_is_exported_with_a_warning(model_path, facts, tmp_path, capsys, caplog) -> None:
    options = {"pretrained": model_path, "device": "cpu", "store": "off", **OWN}
    (_, bad, _) = make_edits(tmp_path / "edits", facts, model_options=options).edits
    words = ["--pretrained", model_path, "--device", "cpu", "--format", "merged", "--out", str(tmp_path / "merged")]
    assert main(["export", str(bad.file), *words]) == 0
    assert "edit-1.safetensors wrecks the model" in capsys.readouterr().out


# ------------------------------------------------------------------ Python


REQUESTS = [EditRequest(prompt="The home of {} is", subject=subject, target_new="Rome") for subject in (GOOD, BAD)]


def test_an_edit_from_python_has_the_verdict_and_a_warning(loaded, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        good, bad = ShiftingEditor(OWN["editor_args"]).edit(*loaded, REQUESTS)
    assert (good.effects.wrecked, bad.effects.wrecked) == (False, True)
    assert bad.effects.first_token_kl == pytest.approx(NeutralPrompts(*loaded).divergence(bad))
    assert any("the edit wrecks the model" in text for text in bad.warnings)
    assert good.warnings == [] and "the edit wrecks the model" in caplog.text


def test_the_measurement_can_be_left_out(loaded) -> None:
    _, bad = ShiftingEditor(OWN["editor_args"]).edit(*loaded, REQUESTS, measure=False)
    assert bad.effects == Effects() and bad.warnings == []


def test_contexts_have_none_and_wrappers_have_one(loaded, monkeypatch) -> None:
    (context,) = load_editor("ice").edit(*loaded, REQUESTS[:1])
    assert context.effects == Effects()
    passes: list[Any] = []
    divergences = NeutralPrompts.divergences
    monkeypatch.setattr(
        NeutralPrompts, "divergences", lambda self, deltas: passes.extend(deltas) or divergences(self, deltas)
    )
    base = {"base": "ft_m", "base_settings": {"layers": [1], "num_steps": 1}}
    (delta,) = load_editor("rect", base).edit(*loaded, REQUESTS[:1])
    assert delta.effects.wrecked is not None and passes == [delta]  # of the delta that is returned
