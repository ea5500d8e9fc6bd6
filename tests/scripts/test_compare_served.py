"""The comparison of a server's verdicts with those of this process, on runs of the stock command."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from adapter_server import adapter_server
from paths import ROOT
from real_runs import by_command

TASK = "bake_es"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import compare_served

    return compare_served


def test_both_runs_have_the_same_verdicts(script: ModuleType, tiny_path: Any, tmp_path: Path, capsys: Any) -> None:
    options = f"pretrained={tiny_path('llama')},store=off,data=mini,editor=lora,editor_args=num_steps:1;layers:[1]"
    with adapter_server(str(tiny_path("llama"))) as (server, url):
        by_command(tmp_path / "here", options, TASK, "--limit", "3")
        by_command(tmp_path / "there", f"{options},server={url}", TASK, "--limit", "3")
        assert len(set(server.loaded)) == 3
    number, differing = script.compare(tmp_path / "here", tmp_path / "there")
    assert number >= 6 and not differing and script.report(number, differing) == 0
    assert f"{number} of {number} verdicts are equal (100.00%" in capsys.readouterr().out


def test_differences_are_named_and_fail(script: ModuleType, capsys: Any) -> None:
    one = script.Difference(TASK, "0 case-1", "es,none", 1.0, 0.0)
    assert script.report(400, [one]) == 0 and script.report(100, [one]) == 1 and script.report(0, []) == 1
    assert "document 0 case-1, es,none: 1 here, 0 on the server" in capsys.readouterr().out
