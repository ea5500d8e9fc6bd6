"""``lm-edit leaderboard`` on files as lm_eval writes them."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

pytest.importorskip("statsmodels", reason="the statistics are in the extra leaderboard")
pytest.importorskip("scikit_posthocs", reason="the statistics are in the extra leaderboard")

from result_files import write_run

from lm_edit.cli.evaluating.leaderboard import editor_kind
from lm_edit.cli.main import main
from lm_edit.leaderboard.site import make_site

FILES = ["index.html", "leaderboard.csv", "leaderboard.md", "leaderboard.tex"]


def build(*arguments: object) -> int:
    return main(["leaderboard", *map(str, arguments), "--resamples", "99"])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "one")
    write_run(folder / "two", editor="memit", editor_config={"layers": [4, 5]})
    return folder


def test_files_of_two_editors(runs, tmp_path, capsys):
    assert build(runs, "-o", tmp_path / "site") == 0
    assert sorted(path.name for path in (tmp_path / "site").iterdir()) == FILES
    assert re.search(r"2 rows, \d+ columns; open .*index.html in a browser", capsys.readouterr().out)
    text = (tmp_path / "site" / "leaderboard.md").read_text(encoding="utf-8")
    # The invented records have four cases, and the scripted model answers alike under both editors: a tie.
    assert re.search(r"\| memit \| 0\.\d+ .*\(4/4\) \|", text) and "**" not in text
    assert re.search(r"\| r_rome \| 0\.\d+ .*\(4/4\) \|", text) and "**" not in text
    assert "Coverage differs" not in text and "edit" in (tmp_path / "site" / "index.html").read_text(encoding="utf-8")


def test_several_processes_make_the_same_files(runs, monkeypatch):
    alone = make_site([str(runs)], resamples=99)
    monkeypatch.setattr("lm_edit.leaderboard.site.LARGE_BYTES", 0)
    assert make_site([str(runs)], resamples=99, workers=2) == alone


def test_the_page_has_kinds_of_editors_and_seconds_per_case(tmp_path):
    write_run(tmp_path / "runs")
    (path,) = (tmp_path / "runs").rglob("results_*.json")
    content = json.loads(path.read_text(encoding="utf-8"))
    num_cases = sum(counts["effective"] for counts in content["n-samples"].values())
    path.write_text(json.dumps(content | {"total_evaluation_time_seconds": "6.0"}), encoding="utf-8")
    assert build(tmp_path / "runs", "-o", tmp_path / "site") == 0
    page = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    board = json.loads(re.search(r'id="board">(.*?)</script>', page, re.DOTALL)[1])
    (row,) = board["sections"][0]["rows"]
    assert (row["tier"], row["changes"], row["mode"]) == ("core", ["weights"], "single")
    (column,) = [index for index, one in enumerate(board["columns"]) if one["name"] == "cost seconds per case"]
    assert row["cells"][str(column)]["value"] == pytest.approx(6 / num_cases)
    # The scripted edits use no GPU, so the column of its memory would be empty.
    assert "cost peak GiB" not in [one["name"] for one in board["columns"]]


def test_no_editor_is_imported_by_a_path_of_a_result_file():
    assert editor_kind("edit_hooks.editors.rome:ROME") is None and editor_kind("gone") is None
    assert editor_kind("wise").tier in ("core", "more")


def test_the_columns_shown_first_can_be_chosen(runs, tmp_path, capsys):
    def header(*names: str) -> str:
        words = [word for name in names for word in ("--columns", name)]
        assert build(runs, "-o", tmp_path / "site", *words) == 0
        text = (tmp_path / "site" / "leaderboard.md").read_text(encoding="utf-8")
        return next(line for line in text.splitlines() if line.startswith("| editor |"))

    assert header("bake_es:efficacy_magnitude") == "| editor | bake_es efficacy_magnitude | minutes |"
    # Of a printed table, the columns that the results have.
    assert header("bird_t3") == "| editor | bake_es efficacy_prob | bake_es efficacy_magnitude | minutes |"
    for name, problem in (
        ("bake_es:efficacy_prop", "Did you mean 'bake_es:efficacy_prob'"),
        ("wild_t3", "the results have no such column"),
        ("bird_t33", "Did you mean 'bird_t3'"),
    ):
        assert build(runs, "-o", tmp_path / "other", "--columns", name) == 2
        assert problem in capsys.readouterr().err


def test_equal_inputs_give_equal_bytes_in_any_order(runs, tmp_path):
    assert build(runs / "one", runs / "two", "-o", tmp_path / "a") == 0
    assert build(runs / "two", runs / "one", "-o", tmp_path / "b") == 0
    for name in FILES:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_own_files_are_replaced_and_others_are_not(runs, tmp_path, capsys):
    site = tmp_path / "site"
    assert build(runs, "-o", site, "--title", "first") == 0
    assert build(runs, "-o", site, "--title", "second") == 0
    assert "<title>second</title>" in (site / "index.html").read_text(encoding="utf-8")
    for name in FILES:
        before = {path.name: path.read_bytes() for path in site.iterdir()}
        (site / name).write_bytes(b"the home page of somebody else")
        capsys.readouterr()
        assert build(runs, "-o", site, "--title", "third") == 2
        assert f"{name} exists" in (error := capsys.readouterr().err) and "--overwrite" in error
        assert {path.name: path.read_bytes() for path in site.iterdir()} == before | {
            name: b"the home page of somebody else"
        }
        (site / name).write_bytes(before[name])
    (site / "index.html").write_bytes(b"")
    assert build(runs, "-o", site) == 2 and build(runs, "-o", site, "--overwrite") == 0
    assert (site / "index.html").stat().st_size


def test_runs_without_samples_have_numbers_and_a_note(runs, tmp_path, capsys):
    write_run(tmp_path / "bare", editor="ft_m", samples=False)
    assert build(runs, tmp_path / "bare", "-o", tmp_path / "site") == 0
    assert (
        "no samples, so no tests, no single cases, and intervals from standard errors only" in capsys.readouterr().out
    )
    assert "| ft_m |" in (tmp_path / "site" / "leaderboard.md").read_text(encoding="utf-8")


def test_results_without_any_samples_are_compared_by_their_limit(tmp_path):
    write_run(tmp_path / "one", samples=False)
    write_run(tmp_path / "two", samples=False, editor="memit", editor_config={"layers": [4, 5]})
    assert build(tmp_path, "-o", tmp_path / "site") == 0
    text = (tmp_path / "site" / "leaderboard.md").read_text(encoding="utf-8")
    assert re.search(r"\| memit \| 0\.\d+ \[0\.\d+, [01]\.\d+\] \(4/4\) \|", text)


def test_results_without_any_samples_are_compared_by_the_samples_that_were_asked(tmp_path, capsys):
    for name, samples in (("one", None), ("two", {"bake_es": [0, 1]}), ("three", {"bake_es": [1, 0]})):
        path = write_run(tmp_path / name, samples=False, editor=name, editor_config={"layers": [len(name)]})
        content = json.loads(path.read_text(encoding="utf-8"))
        content["config"]["samples"] = samples
        path.write_text(json.dumps(content), encoding="utf-8")
    assert build(tmp_path / "two", tmp_path / "three", "-o", tmp_path / "site") == 0
    assert build(tmp_path / "one", tmp_path / "two", "-o", tmp_path / "other") == 2
    error = capsys.readouterr().err
    assert re.search(r"the set of cases differs: --samples [0-9a-f]{12} in two__.*; all cases in one__", error)


def test_a_task_without_samples_does_not_hide_the_others(tmp_path, capsys):
    """One run in two files of which one has samples, and the file that `lm-edit results merge` makes of them."""
    parts = [("bake_es", True, "2026-11-21T10-00-00.000001"), ("bake_gs", False, "2026-11-21T11-00-00.000001")]
    for task, samples, date in parts:
        write_run(tmp_path / "parts", task, samples=samples, date=date)
    assert main(["results", "merge", str(tmp_path / "parts"), "--out", str(tmp_path / "merged")]) == 0
    assert build(tmp_path / "merged", "-o", tmp_path / "site") == 0
    assert "no samples of bake_gs, so no tests, no single cases, and intervals from" in capsys.readouterr().out
    with (tmp_path / "site" / "leaderboard.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    methods = {task: {row["interval"] for row in rows if row["task"] == task} for task in ("bake_es", "bake_gs")}
    assert "BCa bootstrap" in methods["bake_es"] and "normal approximation" not in methods["bake_es"]
    assert "normal approximation" in methods["bake_gs"] and "BCa bootstrap" not in methods["bake_gs"]


def test_contradictory_runs_are_refused_and_can_be_chosen(runs, tmp_path, capsys):
    results = write_run(tmp_path / "other", editor="memit", editor_config={"layers": [4, 5]})
    content = json.loads(results.read_text(encoding="utf-8"))
    content["versions"]["bake_es"] = content["configs"]["bake_es"]["metadata"]["version"] = 9.0
    results.write_text(json.dumps(content), encoding="utf-8")
    assert build(runs / "one", results, "-o", tmp_path / "site") == 2
    error = capsys.readouterr().err
    assert "the task version differs" in error and "--only task_version=" in error
    assert not (tmp_path / "site").exists()
    assert build(runs / "one", results, "-o", tmp_path / "site", "--only", "editor=memit") == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "there is no file or folder"),
        (["{runs}", "--only", "editor=rome"], "leaves no result; editor is one of: memit, r_rome"),
    ],
)
def test_user_errors_name_what_is_accepted(runs, tmp_path, capsys, arguments, message):
    assert build(*(argument.format(runs=runs) for argument in arguments), "-o", tmp_path / "site") == 2
    assert message in capsys.readouterr().err


def test_missing_libraries_name_the_extra(runs, tmp_path, capsys, monkeypatch):
    import importlib.util

    find_spec = importlib.util.find_spec
    hidden = {"scikit_posthocs"}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name in hidden else find_spec(name, *rest)
    )
    assert build(runs, "-o", tmp_path / "site") == 2
    assert 'scikit_posthocs: pip install "lm-eval-editing[leaderboard]"' in capsys.readouterr().err


def test_a_served_page_has_an_address_and_no_parts_of_an_earlier_one(runs, tmp_path, capsys, monkeypatch):
    (tmp_path / "site" / "cases").mkdir(parents=True)
    old, foreign = (tmp_path / "site" / "cases" / name for name in (f"{'0' * 20}.txt", "notes.txt"))
    old.write_text(""), foreign.write_text("")

    def stop(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lm_edit.cli.evaluating.leaderboard.time.sleep", stop)
    assert build(runs, "-o", tmp_path / "site", "--serve", "0") == 130
    assert re.search(r"open http://127\.0\.0\.1:[1-9]\d+/ in a browser", capsys.readouterr().out)
    assert foreign.exists() and not old.exists()


def test_a_watched_folder_is_read_when_it_changes(tmp_path, capsys, monkeypatch):
    """No results, one run, the same again, two runs; then Ctrl-C."""
    results, site, seen = tmp_path / "results", tmp_path / "site", []
    results.mkdir()

    def rows() -> list[str]:
        table = (site / "leaderboard.md").read_text() if (site / "leaderboard.md").exists() else ""
        return re.findall(r"^\| (rome|memit|r_rome) \|", table, flags=re.MULTILINE)

    def sleep(seconds: float) -> None:
        seen.append((seconds, rows(), capsys.readouterr().out.count("open ")))
        if len(seen) == 1:
            write_run(results / "one", editor="rome")
        elif len(seen) == 3:
            write_run(results / "two", editor="memit")
        elif len(seen) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr("lm_edit.cli.evaluating.leaderboard.time.sleep", sleep)
    assert build(results, "-o", site, "--watch", "5") == 130
    assert seen == [(5, [], 0), (5, ["rome"], 1), (5, ["rome"], 0), (5, ["memit", "rome"], 1)]
    assert '"reload":5' in (site / "index.html").read_text()
