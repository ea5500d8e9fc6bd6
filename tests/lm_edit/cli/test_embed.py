"""``lm-edit embed``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import printed_lines, run_verb
from paths import RECORDS
from random_deltas import dense_delta, random_delta
from safetensors.torch import load_file

from edit_hooks import Delta
from edit_hooks.inference.effects.states import StateComparison, _cosine
from edit_hooks.lm.model import EditedHFLM


@pytest.fixture(scope="module")
def model_path(tiny_path: Any) -> str:
    return str(tiny_path("llama"))


@pytest.fixture
def command(model_path: str, tmp_path: Path) -> list[str]:
    data = ["--data", str(RECORDS / "counterfact.jsonl"), "--num-prompts", "2"]
    model = ["--pretrained", model_path, "--device", "cpu"]
    return ["embed", *model, *data, "--out", str(tmp_path / "vectors.safetensors")]


def test_vectors_and_their_description(command, model_path, tmp_path, capsys) -> None:
    lm = EditedHFLM(pretrained=model_path, device="cpu", mode="none")
    random_delta(lm.model).save(tmp_path / "first.safetensors")
    dense_delta(lm.model).save(tmp_path / "second.safetensors")
    saved = [str(tmp_path / "first.safetensors"), str(tmp_path / "second.safetensors")]
    assert run_verb([*command, "--edit", *saved, "--noise-seed", "5"]) == 0
    assert "2 edit, 5 neighborhood, 2 evk_subject, 2 evk_relation, 2 evk_all written" in printed_lines(capsys)[-1]
    vectors = load_file(tmp_path / "vectors.safetensors")
    described = json.loads((tmp_path / "vectors.json").read_text())
    rows = described["rows"]
    assert set(vectors) == {"unedited", "edited"} and len(rows) == 13
    assert {tuple(tensor.shape) for tensor in vectors.values()} == {(13, described["width"])}
    assert rows[0] == {"kind": "edit", "case_id": "0", "prompt": "Port Elna is the capital of"}
    assert described["model"] == Path(model_path).name  # without folders of this machine
    assert described["sigma"] == 0.3 and described["seed"] == 5 and len(described["edits"]) == 2
    # An edit prompt by an own forward pass; the cosines are those that the benchmark scores.
    ids = torch.tensor([lm.tokenizer(rows[0]["prompt"])["input_ids"]])
    with torch.no_grad():
        expected = lm.model(ids, output_hidden_states=True).hidden_states[-1][0, -1]
    torch.testing.assert_close(vectors["unedited"][0], expected)
    kinds = [row["kind"] for row in rows]
    cosines = _cosine(vectors["unedited"], vectors["edited"])
    assert max(cosines) < 0.9999 and len(set(kinds)) == 5
    assert not torch.equal(vectors["unedited"][kinds.index("evk_all")], vectors["unedited"][0])


def test_the_instances_are_those_of_the_benchmark(command, model_path, tmp_path, monkeypatch) -> None:
    from lm_runs import run

    asked: list[Any] = []
    compare = StateComparison.compare

    def record(self: Any, model: Any, jobs: Any, *rest: Any) -> Any:
        asked.extend(item for item, _ in jobs)
        return compare(self, model, jobs, *rest)

    monkeypatch.setattr(StateComparison, "compare", record)
    lm = EditedHFLM(pretrained=model_path, device="cpu", mode="none", store="off")
    run(lm, ["counterfact_evk_es"], "counterfact.jsonl", limit=2)
    embedded: list[Any] = []
    monkeypatch.setattr(
        "lm_edit.embeddings.states_under",
        lambda model, jobs, limits: [embedded.append(item) or torch.zeros(4) for item, _ in jobs],
    )
    assert run_verb(command) == 0
    assert [item for item in embedded if item.noise is not None] == asked


def test_relative_noise_of_both_models_is_that_of_the_unedited_embeddings(command, model_path, tmp_path) -> None:
    """An edit that makes the embeddings three times as large changes no noise."""
    lm = EditedHFLM(pretrained=model_path, device="cpu", mode="none")
    embeddings = lm.model.get_input_embeddings()
    weight = embeddings.weight.detach()
    name = next(name for name, module in lm.model.named_modules() if module is embeddings)
    Delta(dense={f"{name}.weight": 2 * weight.clone()}, meta={"editor": "hand"}).save(tmp_path / "edit.safetensors")
    found = {}
    for option, value in (("--noise", 0.5 * float(weight.std())), ("--relative-noise", 0.5)):
        edit = ["--edit", str(tmp_path / "edit.safetensors"), "--overwrite"]
        assert run_verb([*command, *edit, option, str(value)]) == 0
        found[option] = load_file(tmp_path / "vectors.safetensors")
    for side in ("unedited", "edited"):
        torch.testing.assert_close(found["--relative-noise"][side], found["--noise"][side], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--out", "vectors.pt"], "does not end in .safetensors"),
        (["--prompts", "counterfakt"], "unknown benchmark 'counterfakt'"),
        (["--edit", "missing.safetensors"], "no such file"),
        (["--state", "99"], "the model has blocks 0 to"),
        (["--noise", "1", "--relative-noise", "1"], "not allowed with"),
    ],
)
def test_wrong_options_are_explained(command, change, message, capsys) -> None:
    assert run_verb([*command, *change]) == 2
    assert message in capsys.readouterr().err


def test_nothing_is_overwritten(command, tmp_path, capsys) -> None:
    (tmp_path / "vectors.json").write_text("{}")
    assert run_verb(command) == 2
    assert "exists" in capsys.readouterr().err
