"""The results of a row at several dates, and what made the older ones stale."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from result_files import change, scripted_results, write_run

from edit_hooks import EditingError
from lm_edit.cli.main import main
from lm_edit.results.history import history


def write(folder: Path, day: int, value: float, **changes: Any) -> Path:
    results = scripted_results()
    results["results"]["bake_es"]["efficacy_prob,none"] = value
    start = 1.79e9 + 86_400 * day
    return write_run(folder / str(day), results=results, start=start, date=f"2026-11-2{day}T10-00-00.000001", **changes)


def cells(*paths: Path, **options: Any) -> list[list[str]]:
    return [[row[4], row[6]] for row in history([str(path) for path in paths], ["efficacy_prob"], **options).rows[1:]]


def test_every_date_has_its_number_and_what_changed_after_it(tmp_path):
    write(tmp_path, 1, 0.5)
    write(tmp_path, 2, 0.75, versions={"lm-eval-editing": "0.2.0"})
    config = {"layers": [5], "num_steps": 40, "lr": 0.1}
    revised = write(tmp_path, 3, 0.25, versions={"lm-eval-editing": "0.2.0"}, editor_config=config)
    change(revised, lambda content: content["versions"].update(bake_es=9.0))
    write(tmp_path, 4, 0.25, versions={"lm-eval-editing": "0.2.0"}, editor_config=config)
    change(tmp_path / "4" / revised.relative_to(tmp_path / "3").parent / "results_2026-11-24T10-00-00.000001.json",
           lambda content: content["versions"].update(bake_es=9.0))  # fmt: skip
    assert cells(tmp_path) == [
        ["0.500", "version of lm-eval-editing 0.1.0 to 0.2.0"],
        ["0.750 (+0.250)", "task version 1.1 to 9.0; setting num_steps 20 to 40; now setting lr"],
        ["0.250 (-0.500)", "a run of the same settings and versions"],
        ["0.250 (+0.000)", "newest"],
    ]


def test_other_editors_seeds_and_copies_are_no_history(tmp_path, capsys):
    first = write(tmp_path, 1, 0.5)
    write(tmp_path, 2, 0.75, editor="memit")
    write(tmp_path, 3, 0.75, seed=1)
    shutil.copytree(first.parent, tmp_path / "copy" / first.parent.name)
    with pytest.raises(EditingError, match="each of one date"):
        history([str(tmp_path)])
    write(tmp_path, 4, 1.0)
    assert main(["results", "history", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "| bake_es | efficacy_prob | r_rome" in out and "2 further rows have one date only." in out
    with pytest.raises(EditingError, match=r"no run has a metric named 'efficacy_prop'.*efficacy_prob"):
        history([str(tmp_path)], ["efficacy_prop"])


def test_facts_that_a_file_has_not_recorded_are_no_change(tmp_path):
    write(tmp_path, 1, 0.5, versions={})
    write(tmp_path, 2, 0.5, versions={"lm-eval-editing": "0.2.0"}, model_identity={})
    assert cells(tmp_path)[0][1] == "a run of the same settings and versions"
