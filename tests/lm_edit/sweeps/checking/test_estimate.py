"""Estimates from stored seconds, by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import run_verb

from lm_edit.cli.evaluating import sweep
from lm_edit.sweeps.checking.estimate import Estimator
from lm_edit.sweeps.planning.grid import Run


def save(path: Path, total: float, edits: int, per_edit: float, cases: int, **options: object) -> None:
    args = {"mode": "single", "editor": "rome", **options}
    columns = {"edit,none": json.dumps({"edits": edits, "seconds_per_edit": per_edit})}
    path.mkdir(parents=True)
    content = {
        "results": {"bake_es": columns},
        "configs": {"bake_es": {}},
        "versions": {},
        "config": {"model_args": args, "edited_hf": {"mode": args["mode"], "editor": args["editor"]}},
        "n-samples": {"bake_es": {"original": 64, "effective": cases}},
        "total_evaluation_time_seconds": str(total),
    }
    (path / "results_2026-01-01T00-00-00.000000.json").write_text(json.dumps(content), encoding="utf-8")


def run(limit: float | None, **options: object) -> Run:
    args = {"mode": "single", "editor": "rome", **options}
    return Run("demo", "rome", "bake_es", "single", (), args, ("bake_es",), {}, limit, {}, None, ())


def test_results_whose_arguments_are_a_text_are_read(tmp_path: Path) -> None:
    """As a call of simple_evaluate with a text saves them."""
    save(tmp_path / "one", total=40.0, edits=4, per_edit=5.0, cases=4)
    (path,) = (tmp_path / "one").iterdir()
    content = json.loads(path.read_text(encoding="utf-8"))
    content["config"]["model_args"] = "mode=single,editor=rome"
    path.write_text(json.dumps(content), encoding="utf-8")
    assert Estimator([str(tmp_path)]).seconds(run(8)) == 8 * 5.0 + 8 * 5.0


def test_seconds_are_those_of_edits_and_of_cases(tmp_path: Path) -> None:
    save(tmp_path / "one", total=40.0, edits=4, per_edit=5.0, cases=4)  # (40 - 4 x 5) / 4 = 5 s a case
    estimator = Estimator([str(tmp_path)])
    assert estimator.seconds(run(8)) == 8 * 5.0 + 8 * 5.0
    assert estimator.seconds(run(None)) == 64 * 5.0 + 64 * 5.0  # all cases of the file
    assert estimator.seconds(run(0.25)) == 16 * 5.0 + 16 * 5.0
    assert estimator.seconds(run(100)) == estimator.seconds(run(None))
    stream = run(8, mode="sequential", edits="bake", num_edits=10)
    assert estimator.seconds(stream) == 8 * 5.0 + 10 * 5.0


@pytest.mark.parametrize("mode", ["batch", "sequential"])
def test_a_limit_does_not_cut_the_edits_of_batches_and_streams(mode: str, tmp_path: Path) -> None:
    """Such runs write every case of their source; the limited number of documents was the number of edits."""
    save(tmp_path / "one", total=40.0, edits=4, per_edit=5.0, cases=4)
    estimator = Estimator([str(tmp_path)])
    for limit, cases in ((2, 2), (0.25, 16), (None, 64)):
        assert estimator.seconds(run(limit, mode=mode, edits="bake")) == cases * 5.0 + 64 * 5.0
    for unknown in ("qaedit", "facts.jsonl", "facts.json"):  # no task of that benchmark is in the results
        assert estimator.seconds(run(2, mode=mode, edits=unknown)) is None
        assert estimator.seconds(run(2, mode=mode, edits=unknown, num_edits=3)) == 2 * 5.0 + 3 * 5.0
    assert estimator.seconds(run(2, mode=mode, edits="bake", data="hub")) is None


def test_a_subset_cuts_cases_and_edits(tmp_path: Path) -> None:
    save(tmp_path / "whole", total=40.0, edits=4, per_edit=5.0, cases=4)  # 64 cases
    estimator = Estimator([str(tmp_path)])
    for subset, cases in ((10, 10), ("all", 64), (None, 64), (100, 64)):
        assert estimator.seconds(run(None, subset=subset)) == cases * (5.0 + 5.0)
        stream = run(2, mode="sequential", edits="bake", subset=subset)
        assert estimator.seconds(stream) == 2 * 5.0 + cases * 5.0


def test_the_size_of_a_subset_is_not_that_of_the_whole_data(tmp_path: Path) -> None:
    save(tmp_path / "subset", total=40.0, edits=4, per_edit=5.0, cases=4, subset=64)
    estimator = Estimator([str(tmp_path)])
    assert estimator.seconds(run(None, subset=64)) == 64 * (5.0 + 5.0)
    assert estimator.seconds(run(None)) is None and estimator.seconds(run(None, subset=32)) is None


def test_the_most_similar_runs_count(tmp_path: Path) -> None:
    save(tmp_path / "rome", total=40.0, edits=4, per_edit=5.0, cases=4)
    save(tmp_path / "rome2", total=48.0, edits=4, per_edit=5.0, cases=4)  # 7 s a case; the median of 5 and 7 is 6
    save(tmp_path / "ft_m", total=12.0, edits=4, per_edit=1.0, cases=4, editor="ft_m")  # 2 s a case
    estimator = Estimator([str(tmp_path)])
    assert estimator.seconds(run(10)) == 10 * 6.0 + 10 * 5.0
    assert estimator.seconds(run(10, editor="ft_m")) == 10 * 2.0 + 10 * 1.0
    assert estimator.seconds(run(10, mode="none")) == 10 * 5.0  # of all editors: the median of 5, 7 and 2; no edits
    assert estimator.seconds(run(10, editor="grace")) is None  # its edits were never timed
    assert estimator.seconds(run(10, pretrained="other/model")) is None
    assert estimator.seconds(run(None, data="hub")) is None  # number of cases unknown


def test_edits_from_the_store_cost_nothing(tmp_path: Path) -> None:
    """The stored seconds per edit are more than the run took: its time was that of the cases."""
    save(tmp_path / "one", total=8.0, edits=4, per_edit=5.0, cases=4)
    assert Estimator([str(tmp_path)]).seconds(run(1)) == 8.0 / 4 + 5.0


def test_a_dry_run_prints_the_sum_and_large_edits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "LARGE_EDIT", 4 * 640 * 2048)  # a dense update of the demo model
    save(tmp_path / "earlier", total=40.0, edits=4, per_edit=5.0, cases=4)
    plan = tmp_path / "plan.yaml"
    plan.write_text("editors: [rome, ft_m]\nbenchmarks: [bake_es]\nlimit: 8\n", encoding="utf-8")
    assert run_verb(["sweep", str(plan), "--dry-run", "--estimate-from", str(tmp_path / "earlier")]) == 0
    printed = capsys.readouterr().out
    lines = [line.split() for line in printed.splitlines() if line.startswith("waiting")]
    assert [(line[:3], line[5:]) for line in lines] == [
        (["waiting", "80", "s"], ["shipped", "demo,", "rome,", "bake_es,", "single", "bake_es"]),
        (["waiting", "unknown", lines[1][2]], ["demo,", "ft_m,", "bake_es,", "single", "bake_es"]),
    ]
    assert all("GiB" in line for line in lines)
    assert "2 runs; to do: about 80 s one after another, and 1 of unknown length" in printed
    (disk,) = [line for line in printed.splitlines() if line.startswith("disk: ")]
    assert disk == "disk: demo, ft_m: each edit takes 5.24MB in the store"
    rate = next(line for line in printed.splitlines() if line.startswith("by arithmetic: "))
    assert rate.endswith(" s per edit alone, on this machine; the time of the answers is unknown")
