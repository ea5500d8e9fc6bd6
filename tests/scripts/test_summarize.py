"""The table of several result files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from paths import ROOT


@pytest.fixture
def summarize(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import summarize

    return summarize


def write_results(
    folder: Path, value: float, metadata: dict[str, Any] | None, name: str = "results_1.json", data: str = "mini"
) -> Path:
    """Write a result file as lm-eval does, below a folder of the model."""
    row = {"alias": "bake_es", "es,none": value, "es_stderr,none": 0.125, "es_n,none": 8, "unscored,none": 0}
    config = {"model": "hf", **({"edited_hf": metadata} if metadata else {})}
    path = folder / "model" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    tasks = {"bake_es": {"metadata": {"version": 1.0, "data_source": {"data": data}}}, "stock": {"metadata": None}}
    path.write_text(json.dumps({"results": {"bake_es": row}, "config": config, "configs": tasks}), encoding="utf-8")
    return path


def test_columns_are_runs_and_rows_are_metrics(
    tmp_path: Path, summarize: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    write_results(tmp_path / "none", 0.0, {"mode": "none", "data": "mini"}, data="own.jsonl")  # given in --metadata
    metadata = {"mode": "sequential", "editor": "memit", "num_edits": 48}
    write_results(tmp_path / "memit", 0.75, metadata)
    file = write_results(tmp_path / "stock", 0.5, None)
    summarize.main([str(tmp_path / "none"), str(tmp_path / "memit"), str(file)])
    assert capsys.readouterr().out.splitlines() == [
        "| task | metric | unedited (own.jsonl) | memit, sequential, 48 edits (mini) | hf (mini) |",
        "|---|---|---|---|---|",
        "| bake_es | es | 0.000 ± 0.125 (8) | 0.750 ± 0.125 (8) | 0.500 ± 0.125 (8) |",
    ]


def test_the_newest_file_of_a_folder_is_used(tmp_path: Path, summarize: ModuleType) -> None:
    new = write_results(tmp_path, 1.0, None, "results_1.json")
    old = write_results(tmp_path, 0.0, None, "results_2.json")
    os.utime(old, (1, 1))
    assert summarize.newest_result(tmp_path) == new


def test_missing_files_and_metrics_are_explained(tmp_path: Path, summarize: ModuleType) -> None:
    with pytest.raises(SystemExit, match=r"no results_\*\.json below"):
        summarize.main([str(tmp_path)])
    write_results(tmp_path, 1.0, None)
    with pytest.raises(SystemExit, match="no file has a metric named gs"):
        summarize.main(["--metrics", "gs", "--", str(tmp_path)])
