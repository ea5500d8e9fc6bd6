"""Each file of a results folder is opened once, however many numbers and cases follow from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from command_line import run_verb
from result_files import write_run

from lm_edit.figures.inputs import Inputs
from lm_edit.leaderboard.site import make_site
from lm_edit.results.answers.documents import cases_and_documents, load_documents, sample_groups
from lm_edit.results.filters import SAMPLE_FILE, places_of
from lm_edit.results.matrices import load_retention
from lm_edit.results.tables import ResultSet, load_cases, load_results


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Name of a file -> number of times that this process opened it."""
    found: Counter[str] = Counter()
    real = Path.open

    def count(self: Path, *args: Any, **options: Any) -> Any:
        found[str(self)] += 1
        return real(self, *args, **options)

    monkeypatch.setattr(Path, "open", count)
    yield found


def runs(folder: Path) -> list[Path]:
    """Two runs of two tasks with samples."""
    for number, task in enumerate(("bake_es", "bake_gs")):
        date = f"2026-11-21T1{number}-00-00.000001"
        write_run(folder / "a", task, date=date)
        write_run(folder / "b", task, date=date, editor="memit")
    return [path for path in folder.rglob("*") if path.suffix in (".json", ".jsonl")]


def of_files(opened: Counter[str], files: list[Path]) -> dict[str, int]:
    return {path.name: opened[str(path)] for path in files}


READERS: dict[str, Callable[[Path], object]] = {
    "leaderboard": lambda folder: make_site([str(folder)], resamples=9),
    "check": lambda folder: run_verb(["results", "check", str(folder)]),
    "csv": lambda folder: run_verb(["results", "export", str(folder), "--to", "csv", "--out", f"{folder}-out"]),
}


@pytest.mark.parametrize("reader", READERS)
def test_every_file_is_opened_once(reader: str, tmp_path: Path, opened: Counter[str]) -> None:
    if reader == "leaderboard":
        pytest.importorskip("statsmodels", reason="the statistics of the leaderboard are an extra")
        pytest.importorskip("scikit_posthocs", reason="the statistics of the leaderboard are an extra")
    files = runs(tmp_path / "runs")
    opened.clear()
    READERS[reader](tmp_path / "runs")
    assert len(files) == 8 and set(of_files(opened, files).values()) == {1}, of_files(opened, files)


def test_figures_read_result_files_once(tmp_path: Path, opened: Counter[str]) -> None:
    files = runs(tmp_path)
    opened.clear()
    inputs = Inputs([str(tmp_path)])
    assert len(inputs.rows()) and len(inputs.documents()) and inputs.retention() is not None and inputs.run_names()
    assert set(of_files(opened, files).values()) == {1}


def test_what_is_read_at_once_is_what_the_readers_give(tmp_path: Path) -> None:
    runs(tmp_path)
    read = ResultSet.of(str(tmp_path))
    assert ResultSet.of(read) is read
    results = load_results(read)
    assert results.equals(load_results(str(tmp_path))) and results.equals(load_results(read))
    groups = sample_groups(read, places_of(results, SAMPLE_FILE))
    parts = [cases_and_documents(read, group) for group in groups]
    cases = pd.concat([frame for frame, _ in parts], ignore_index=True)
    assert cases.equals(load_cases(str(tmp_path)))
    assert [document for _, own in parts for document in own] == list(load_documents(str(tmp_path)))
    assert load_retention(read).equals(load_retention(str(tmp_path)))
    only = {place for place in places_of(results, SAMPLE_FILE) if place[1] == "bake_es"}
    assert {task for group in sample_groups(read, only) for _, task in group} == {"bake_es"}
