"""The commands for figure 5 of EVK, as they are on the page of CounterFact, on a tiny model and few records."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from editor_settings import settings_of
from lm_runs import build
from paths import RECORDS, ROOT
from safetensors.torch import load_file

from edit_hooks.base.editor import Editor
from lm_edit.cli.main import main
from lm_edit.figures.evk import evk_map

PAGE = (ROOT / "docs/benchmarks/counterfact-evk.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## A map of hidden states")[2].partition("\n## ")[0]
(BLOCK,) = re.findall(r"```bash\n(.*?)```", SECTION, flags=re.DOTALL)
EDIT, EMBED, FIGURE = (shlex.split(line)[1:] for line in BLOCK.strip().split("\n"))
# Two steps, the second one smaller, as the last of 2,010 edits in steps of 100.
NUM_EDITS, STEP = 4, 3


@pytest.fixture
def small(tiny_path: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """A command with the tiny model and few records."""
    monkeypatch.chdir(tmp_path)
    path, data = str(tiny_path("llama")), str(RECORDS / "counterfact.jsonl")
    replaced = {"meta-llama/Meta-Llama-3-8B": path, "hub:multi": data, "2010": str(NUM_EDITS), "100": str(STEP)}

    def shrink(command: list[str], *more: str) -> list[str]:
        assert any(word in replaced for word in command)
        return [*(replaced.get(word, word) for word in command), "--device", "cpu", *more]

    return shrink


def settings_file(folder: Path) -> str:
    path = folder / "settings.yaml"
    path.write_text(json.dumps(settings_of("evk_edit"), ensure_ascii=False), encoding="utf-8")
    return str(path)


def test_the_commands_write_the_map(
    small: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evk_map, "reduce_dimensions", lambda vectors: vectors[:, :2])  # without umap-learn
    drawn: list[Any] = []
    draw = evk_map.draw
    monkeypatch.setattr(evk_map, "draw", lambda *inputs: drawn.append(draw(*inputs)) or drawn[-1])
    assert main(small(EDIT, "--editor-args", settings_file(tmp_path), "--store", "off")) == 0
    assert len(list(Path("evk_stream").glob("*.safetensors"))) == 2
    assert main(small(EMBED)) == 0
    described = json.loads(Path("evk_map.json").read_text(encoding="utf-8"))
    kinds = [row["kind"] for row in described["rows"]]
    assert [kinds.count(kind) for kind in ("edit", "evk_subject", "evk_relation", "evk_all")] == [NUM_EDITS] * 4
    assert kinds.count("neighborhood") > NUM_EDITS and described["sigma"] == 0.3
    assert [edit["editor"] for edit in described["edits"]] == ["evk_edit"] * 2
    vectors = load_file("evk_map.safetensors")
    assert not torch.equal(vectors["edited"], vectors["unedited"])
    assert main(FIGURE) == 0
    assert Path("evk_map.svg").stat().st_size > 0
    (chart,) = drawn
    assert [panel.title for panel in chart.panels] == ["unedited model", "edited model"]
    edited = "evk_edit (evk_stream/edit-0.safetensors), evk_edit (evk_stream/edit-1.safetensors)"
    assert f"Edited by: {edited}." in chart.caption


def test_the_stream_of_a_run_is_saved_from_the_store(
    small: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_path: Callable[..., Path]
) -> None:
    """With the options that the section names."""
    (options,) = re.findall(r"`(mode=sequential[^`]*)`", SECTION)
    run = dict(option.split("=") for option in options.split(","))
    assert run.pop("num_edits") == "2010" and run.pop("edit_batch_size") == "100"
    run |= {"editor": "evk_edit", "editor_args": settings_file(tmp_path), "data": str(RECORDS / "counterfact.jsonl")}
    lm = build(str(tiny_path("llama")), tmp_path, **run, num_edits=NUM_EDITS, edit_batch_size=STEP)
    assert len(list(lm.session.edits(lm.plan.groups))) == 2

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("an edit was made again")

    monkeypatch.setattr(Editor, "edit", refused)
    more = ("--editor-args", settings_file(tmp_path), "--store", str(tmp_path / "store"))
    assert main(small(EDIT, *more)) == 0
    assert len(list(Path("evk_stream").glob("*.safetensors"))) == 2
