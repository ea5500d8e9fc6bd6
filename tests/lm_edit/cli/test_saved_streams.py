"""Saved streams of editors whose steps no adapter can hold: the folder loads, and exports name it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import printed_lines, write_requests
from lm_runs import instance

from edit_hooks.base.registry import editor_class
from edit_hooks.contract.tiny_models import REQUESTS
from edit_hooks.lm.model import EditedHFLM
from lm_edit.cli.main import main
from lm_eval_tasks.report.run_options import edit_options

NUM_EDITS = 3
HOOKS = ("grace", "wise", "melo", "defer")


@pytest.fixture
def save(tiny_path, tmp_path):
    """Save a stream; returns its folder and the options of a run that makes it."""

    def save_stream(editor: str) -> tuple[Path, dict[str, object]]:
        settings = tmp_path / "settings.yaml"
        settings.write_text(json.dumps(dict(editor_class(editor).contract_settings)), encoding="utf-8")
        edits, folder = write_requests(tmp_path / "requests.jsonl"), tmp_path / "stream"
        options = {"pretrained": str(tiny_path("llama")), "device": "cpu", "store": "off"}
        made = {"editor": editor, "editor_args": str(settings), "edits": str(edits), "num_edits": str(NUM_EDITS)}
        words = [part for name, value in {**options, **made}.items() for part in (f"--{name.replace('_', '-')}", value)]
        assert main(["edit", *words, "--sequential", "--out", str(folder)]) == 0
        return folder, options | made | {"num_edits": NUM_EDITS, "mode": "sequential"}

    return save_stream


def answers(lm: EditedHFLM) -> list[float]:
    """Log-likelihoods of all targets and of an unrelated one, after all edits."""
    docs = [{"edit_requests": [request]} for request in REQUESTS[:NUM_EDITS]]
    prompts = [request["prompt"].format(request["subject"]) for request in REQUESTS[:NUM_EDITS]]
    asked = [instance(doc, prompt, " Velm") for doc in docs for prompt in [*prompts, "The trumpet player moved"]]
    return [answer.final.logprob for answer in lm.loglikelihood(asked, disable_tqdm=True)]


@pytest.mark.parametrize(
    "editor", ["grace", "ft_m", *(pytest.param(name, marks=pytest.mark.slow) for name in HOOKS if name != "grace")]
)
def test_the_folder_of_a_stream_is_the_stream(save, editor, capsys, caplog):
    """Neither the folder nor its files could be loaded, and no export holds the steps of hook editors."""
    folder, run = save(editor)
    assert len(list(folder.glob("*.safetensors"))) == NUM_EDITS
    (evaluate,) = (line for line in printed_lines(capsys) if line.startswith("evaluate: "))
    assert evaluate.split()[5].endswith(f",load_edit={folder}")
    base = {name: run[name] for name in ("pretrained", "device", "store")}
    loaded = EditedHFLM(**base, load_edit=str(folder))
    expected, unedited = answers(EditedHFLM(**run)), answers(EditedHFLM(**base, mode="none"))
    assert answers(loaded) == pytest.approx(expected, abs=1e-4)
    assert expected != pytest.approx(unedited, abs=1e-3)
    stamp = loaded.get_model_info()["edited_hf"]
    assert stamp["loaded_edit"]["editor"] == editor
    first = EditedHFLM(**base, load_edit=str(folder / "edit-0.safetensors"))
    digests = [edit_options(lm.get_model_info()["edited_hf"])["load_edit"] for lm in (loaded, first)]
    assert answers(first) != pytest.approx(expected, abs=1e-4) and len(set(digests)) == 2
    assert "are added" not in caplog.text


def test_a_run_is_known_by_every_file_of_its_stream(save, tmp_path):
    """Streams that differ in their last step only."""
    folder, run = save("grace")
    base = {name: run[name] for name in ("pretrained", "device", "store")}
    whole = EditedHFLM(**base, load_edit=str(folder))
    index = json.loads((folder / "edits.json").read_text(encoding="utf-8"))
    index["edits"].pop()
    (folder / "edits.json").write_text(json.dumps(index), encoding="utf-8")
    (folder / f"edit-{NUM_EDITS - 1}.safetensors").unlink()
    shorter = EditedHFLM(**base, load_edit=str(folder))
    stamps = [lm.get_model_info()["edited_hf"] for lm in (whole, shorter) if lm.session]
    assert stamps[0]["load_edit"] == stamps[1]["load_edit"]
    assert edit_options(stamps[0]) != edit_options(stamps[1])


def test_exports_of_a_stream_name_its_folder(save, tmp_path, capsys):
    """A checkpoint of dense edits recommended an adapter of them, which the next command refuses."""
    folder, run = save("ft_m")
    model = ["--pretrained", str(run["pretrained"]), "--device", "cpu"]
    for number, sources in enumerate(([str(folder)], sorted(map(str, folder.glob("*.safetensors"))))):
        capsys.readouterr()
        assert main(["export", *sources, *model, "--format", "merged", "--out", str(tmp_path / f"m{number}")]) == 0
        assert f"load_edit={folder} --tasks" in printed_lines(capsys)[-1]
    assert main(["export", str(folder), *model, "--format", "peft", "--out", str(tmp_path / "adapter")]) == 2
    assert "load_edit=" in capsys.readouterr().err
