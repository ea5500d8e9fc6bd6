"""`lm-edit results`: the table of several runs, exit codes, and messages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import printed_lines, run_verb
from result_files import change, judged_run, scripted_results, write_run


def cells(lines: list[str]) -> list[list[str]]:
    """The cells of a Markdown table, without the notes below it."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]


def test_show_compares_runs(tmp_path: Path, capsys: Any) -> None:
    write_run(tmp_path / "none", mode="none", editor=None, editor_config=None)
    failed = scripted_results(errors=(("0", "no edit"), ("1", "no edit")))
    write_run(tmp_path / "memit", results=failed, editor="memit", mode="sequential", num_edits=48)
    write_run(tmp_path / "stock", stock=True)
    assert run_verb(["results", "show", *(str(tmp_path / name) for name in ("none", "memit", "stock"))]) == 0
    lines = printed_lines(capsys)
    assert "All runs: model org/tiny; data bake_qa.jsonl; edits: sequential, 48 edits." in lines
    header, line, *rows = cells(lines)
    assert header[:2] == ["task", "metric"] and line == ["---"] * 5
    assert set(header[2:]) == {
        "unedited",
        "memit",
        "hf",
    }
    row = dict(zip(header, next(row for row in rows if row[1] == "efficacy_prob"), strict=True))
    assert row["memit"].endswith("(2, 2 failed, 0.250 with them as 0)")
    assert row["unedited"].endswith("(4)") and " to " in row["unedited"]
    assert not [row for row in rows if row[1].endswith(("_or_0", "_n", "_failed", "_zeroed"))]


@pytest.mark.parametrize("more", [["--metrics", "efficacy_prob", "efficacy_match"], ["--edits"]])
def test_show_transposes_its_tables(more: list[str], tmp_path: Path, capsys: Any) -> None:
    """A row per run; the cells are those of the other layout."""
    for editor in ("memit", "ft_m"):
        results = scripted_results()
        results["results"]["bake_es"]["edit,none"] = json.dumps({"edits": 4})
        write_run(tmp_path / editor, results=results, editor=editor)
    assert run_verb(["results", "show", str(tmp_path), *more]) == 0
    header, _, *rows = cells(printed_lines(capsys))
    assert run_verb(["results", "show", str(tmp_path), *more, "--transpose"]) == 0
    names, _, *runs = cells(printed_lines(capsys))
    assert names == ["run", *(f"{task}: {name}" for task, name, *_ in rows)]
    assert [run[0] for run in runs] == header[2:] and len(runs) == 2
    assert [run[1:] for run in runs] == [[row[number] for row in rows] for number in (2, 3)]


def test_show_selects_metrics_and_explains_unknown_ones(tmp_path: Path, capsys: Any) -> None:
    write_run(tmp_path)
    assert run_verb(["results", "show", str(tmp_path), "--metrics", "efficacy_match", "efficacy_prob"]) == 0
    assert [row[1] for row in cells(printed_lines(capsys))[2:]] == ["efficacy_match", "efficacy_prob"]
    assert run_verb(["results", "show", str(tmp_path), "--metrics", "efficacy_prop"]) == 2
    assert "no run has a metric named 'efficacy_prop'. Did you mean 'efficacy_prob'" in capsys.readouterr().err


def test_show_tells_runs_apart_by_what_differs(tmp_path: Path, capsys: Any) -> None:
    for seed in (0, 1):
        write_run(tmp_path / str(seed), seed=seed)
    assert run_verb(["results", "show", str(tmp_path)]) == 0
    header = cells(printed_lines(capsys))[0][2:]
    assert header == ["r_rome (seed 0)", "r_rome (seed 1)"]


def test_show_names_editors_as_the_plan_does(tmp_path: Path, capsys: Any) -> None:
    write_run(tmp_path / "a", editor="my_editor", editor_label="mine")
    write_run(tmp_path / "b", editor="r_rome", editor_label="mine")
    write_run(tmp_path / "c", editor="ft_m", editor_label="small steps")
    assert run_verb(["results", "show", str(tmp_path)]) == 0
    mine = ["mine (my_editor)", "mine (r_rome)"]
    assert cells(printed_lines(capsys))[0][2:4] == mine
    assert run_verb(["results", "show", str(tmp_path / "c")]) == 0
    assert cells(printed_lines(capsys))[0][2:] == ["small steps"]


def test_only_finds_editors_and_models_by_their_names_in_the_plan_too(tmp_path: Path, capsys: Any) -> None:
    write_run(tmp_path / "a", editor="my_editor", editor_label="mine", model_label="small")
    write_run(tmp_path / "b", editor="ft_m")
    shown = {}
    for condition in ("editor=mine", "editor=my_editor", "model=small", "editor_label=", "editor=ft_m", "editor="):
        assert run_verb(["results", "show", str(tmp_path), "--only", condition]) == (2 if condition == "editor=" else 0)
        shown[condition] = [line for line in printed_lines(capsys) if line.startswith("|")]
    assert shown["editor=mine"] == shown["editor=my_editor"] == shown["model=small"] != shown["editor=ft_m"]
    assert shown["editor_label="] == shown["editor=ft_m"]
    assert run_verb(["results", "show", str(tmp_path), "--only", "model=smal"]) == 2
    assert "Did you mean 'small'?" in capsys.readouterr().err


def test_show_compares_the_edits_of_runs(tmp_path: Path, capsys: Any) -> None:
    """Tasks with the same edits share their rows; a run without edits, and one without a number, has empty cells."""
    summaries = {
        "memit": {"edits": 4, "failed": 0, "seconds_per_edit": 2.5, "peak_memory_gib": 41.2},
        "ft_m": {"edits": 4, "failed": 0, "seconds_per_edit": 0.5},
    }
    write_run(tmp_path / "none", mode="none", editor=None, editor_config=None)
    for editor, summary in summaries.items():
        for task in ("bake_es", "bake_gs"):
            results = scripted_results(task)
            results["results"][task]["edit,none"] = json.dumps(summary)
            write_run(tmp_path / editor / task, task, results=results, editor=editor)
    paths = [str(tmp_path / name) for name in ("memit", "ft_m")]
    assert run_verb(["results", "show", *paths, "--edits"]) == 0
    assert cells(printed_lines(capsys)) == [
        ["task", "edits", "memit", "ft_m"],
        ["---"] * 4,
        ["bake_es, bake_gs", "edits", "4", "4"],
        ["bake_es, bake_gs", "failed", "0", "0"],
        ["bake_es, bake_gs", "seconds_per_edit", "2.5", "0.5"],
        ["bake_es, bake_gs", "peak_memory_gib", "41.2", ""],
    ]
    change(next((tmp_path / "none").rglob("*.json")), lambda it: it["results"]["bake_es"].update({"edit,none": "{}"}))
    assert run_verb(["results", "show", str(tmp_path / "none"), *paths, "--edits"]) == 0
    rows = cells(printed_lines(capsys))
    assert rows[0][2] == "unedited" and {row[2] for row in rows[2:]} == {""}
    assert run_verb(["results", "show", str(tmp_path / "none"), "--edits"]) == 2
    assert "these runs have no edits" in capsys.readouterr().err
    assert run_verb(["results", "show", *paths, "--edits", "--metrics", "efficacy_prob"]) == 2


def test_show_refuses_contradictory_results_of_one_run(tmp_path: Path, capsys: Any) -> None:
    write_run(tmp_path / "a")
    change(write_run(tmp_path / "b"), lambda content: content["versions"].update(bake_es=99))
    for more in ([], ["--edits"]):
        assert run_verb(["results", "show", str(tmp_path), *more]) == 2
        assert "with different task_version" in capsys.readouterr().err


def test_show_refuses_them_for_chosen_metrics_too(tmp_path: Path, capsys: Any) -> None:
    judged_run(tmp_path / "a", "gpt-4o", 1, (1.0, 1.0, 1.0, 1.0))
    judged_run(tmp_path / "b", "tiny", 2, (0.0, 0.0, 0.0, 0.0))
    assert run_verb(["results", "show", str(tmp_path), "--metrics", "efficacy_wild_judge"]) == 2
    assert "with different judge" in capsys.readouterr().err


def test_show_names_rows_whose_runs_cannot_be_compared(tmp_path: Path, capsys: Any) -> None:
    paths = {name: write_run(tmp_path / name, editor=f"editor_{name}") for name in "abc"}
    change(paths["c"], lambda content: content["versions"].update(bake_es="<9>"))
    assert run_verb(["results", "show", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "Not comparable" not in capsys.readouterr().out
    assert run_verb(["results", "show", str(tmp_path), "--metrics", "efficacy_prob", "efficacy_match"]) == 0
    (note,) = [line for line in printed_lines(capsys) if "Not comparable" in line]
    assert note.startswith("Not comparable (bake_es, efficacy_prob; bake_es, efficacy_match): another task version.")
    assert "editor_c: \\<9\\>" in note and "editor_b: 1.1" in note


def test_check_prints_problems_and_sets_the_exit_code(tmp_path: Path, capsys: Any) -> None:
    path = write_run(tmp_path)
    assert run_verb(["results", "check", str(tmp_path)]) == 0
    assert printed_lines(capsys) == ["1 result files, 0 problems"]
    change(path, lambda content: content["results"]["bake_es"].update({"efficacy_prob,none": 2.0}))
    assert run_verb(["results", "check", str(tmp_path)]) == 1
    lines = printed_lines(capsys)
    assert any("efficacy_prob: 2.0 is no share." in line for line in lines) and lines[-1].endswith("problems")


def test_hostile_names_reach_the_terminal_escaped(tmp_path: Path, capsys: Any) -> None:
    results = scripted_results()
    results["results"]["bake_es"]["a|b\x1b[2J\nc,none"] = 0.5
    write_run(tmp_path, results=results)
    assert run_verb(["results", "show", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed and "a\\|b\\x1b\\[2J c" in printed


def test_merge_export_and_submit_print_their_files(tmp_path: Path, capsys: Any) -> None:
    runs = write_run(tmp_path / "runs").parents[1]
    assert run_verb(["results", "merge", str(runs), "--out", str(tmp_path / "merged")]) == 0
    assert len(printed_lines(capsys)) == 2
    assert run_verb(["results", "export", str(runs), "--to", "csv", "--out", str(tmp_path / "csv")]) == 0
    assert [Path(line).name for line in printed_lines(capsys)] == ["results.csv", "cases.csv"]
    assert run_verb(["results", "submit", str(runs), "--repository", str(tmp_path / "repository")]) == 0
    assert "PULL_REQUEST.md" in printed_lines(capsys)[-1]
    assert run_verb(["results", "check", str(tmp_path / "repository")]) == 0


def test_a_merged_file_has_the_anomalies_and_comparisons_of_all_its_files(tmp_path: Path) -> None:
    facts = {
        "bake_es": {"anomalies": [{"kind": "damage", "text": "bake_es: ..."}]},
        "bake_gs": {
            "anomalies": [],
            "unedited_comparison": {"tasks": ["bake_gs"], "not_compared": {"x": "no metric"}},
        },
    }

    def older(content: dict[str, Any]) -> None:
        """With a second task, whose result is the newest; that of bake_es is not."""
        for part in ("results", "configs", "versions", "n-samples", "higher_is_better"):
            content[part]["bake_ls"] = content[part]["bake_es"]
        texts = ("bake_es: of an older result", "bake_ls: ...")
        content["anomalies"] = [{"kind": "damage", "text": text} for text in texts]
        content["unedited_comparison"] = {"tasks": ["bake_es", "bake_ls"], "not_compared": {"bake_es: m": "old"}}

    change(write_run(tmp_path / "runs", date="2026-11-21T09-00-00.000001"), older)
    for number, (task, found) in enumerate(facts.items()):
        path = write_run(tmp_path / "runs", task, date=f"2026-11-21T1{number}-00-00.000001")
        path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | found), encoding="utf-8")
    assert run_verb(["results", "merge", str(tmp_path / "runs"), "--out", str(tmp_path / "merged")]) == 0
    (merged,) = (tmp_path / "merged").rglob("results_*.json")
    content = json.loads(merged.read_text(encoding="utf-8"))
    assert set(content["results"]) == {*facts, "bake_ls"}
    assert [one["text"] for one in content["anomalies"]] == ["bake_ls: ...", "bake_es: ..."]
    compared = content["unedited_comparison"]
    assert sorted(compared["tasks"]) == ["bake_gs", "bake_ls"] and compared["not_compared"] == {"x": "no metric"}


def test_reading_results_imports_no_torch() -> None:
    code = "import sys; import lm_edit.results; import lm_edit.results.exports.targets, lm_edit.results.checking.check"
    code += (
        "; from lm_edit.cli.evaluating.leaderboard import editor_kind; assert editor_kind('wise').writes == ('hooks',)"
    )
    code += "; sys.exit(bool({'torch', 'transformers', 'inspect_ai'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
