"""A results repository: the files of a pull request, and the check of their place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from result_files import change, write_run
from templates import copy_template

from edit_hooks.utils.errors import EditingError
from lm_edit import load_cases, load_results
from lm_edit.cli.main import main
from lm_edit.results.checking.check import check_results
from lm_edit.results.checking.repository import MARKER, MESSAGE, submit

LOCAL = "/home/someone/models/tiny"


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """A result file with facts about the machine."""
    path = write_run(
        tmp_path / "runs", model_args=f"pretrained={LOCAL},editor=r_rome", edits="/home/someone/edits.json"
    )
    change(path, lambda content: content.update(pretty_env_info="host name and so on", git_hash="abc"))
    return path


def problems(root: Path) -> list[str]:
    return [problem.text for problem in check_results(root).problems]


def test_submitted_files_pass_the_check_and_hold_the_same_results(run_file: Path, tmp_path: Path) -> None:
    root = tmp_path / "repository"
    *written, message = submit(run_file, root)
    facts = load_results(run_file).iloc[0]
    place = root / "results" / "tiny" / f"{facts['run_name']}__{facts['run']}"
    assert {path.parent for path in written} == {place, root} and message.name == MESSAGE
    assert problems(root) == []
    columns = ["run", "run_name", "task", "benchmark", "metric", "value", "stderr", "n", "protocol", "settings"]
    assert load_results(root)[columns].equals(load_results(run_file)[columns])
    submitted, own = (load_cases(place).drop(columns="file") for place in (root, run_file))
    assert submitted.equals(own) and len(own)
    text = message.read_text(encoding="utf-8")
    assert "| bake_es | efficacy_prob |" in text


def test_stock_models_keep_their_identity_without_their_folders(tmp_path: Path) -> None:
    places = ("/home/someone/A/final", "/home/someone/B/final")
    paths = [
        write_run(tmp_path / str(number), stock=True, model_args={"pretrained": place})
        for number, place in enumerate(places)
    ]
    root = tmp_path / "repository"
    written = submit(paths, root)
    assert problems(root) == []
    assert (
        set(load_results(root)["run"]) == set(load_results(paths)["run"]) and load_results(root)["run"].nunique() == 2
    )
    assert not any("/home/someone" in path.read_text(encoding="utf-8") for path in written)


@pytest.mark.parametrize(
    "arguments", [{"pretrained": "org/a", "token": "hf_SECRET"}, "pretrained=org/a,token=hf_SECRET"]
)
def test_no_token_is_submitted(arguments: Any, tmp_path: Path) -> None:
    """Files of other model classes may have one."""
    path = write_run(tmp_path / "run", stock=True, model_args=arguments)
    change(path, lambda content: content["configs"]["bake_es"]["metadata"].update(token="hf_SECRET"))
    assert "SECRET" in path.read_text(encoding="utf-8")
    assert not any("SECRET" in written.read_text(encoding="utf-8") for written in submit(path, tmp_path / "repository"))


def test_nothing_of_the_machine_is_submitted(run_file: Path, tmp_path: Path) -> None:
    for path in submit(run_file, tmp_path / "repository"):
        text = path.read_text(encoding="utf-8")
        assert "/home/someone" not in text and "host name" not in text and str(Path(__file__).parents[4]) not in text


def test_results_are_added_and_never_replaced(run_file: Path, tmp_path: Path) -> None:
    root = tmp_path / "repository"
    submit(run_file, root)
    with pytest.raises(EditingError, match="results are added, never replaced"):
        submit(run_file, root)
    submit(write_run(tmp_path / "more", editor="rome"), root, samples=False)
    assert problems(root) == [] and load_results(root)["run"].nunique() == 2


def test_other_folders_are_refused(run_file: Path, tmp_path: Path) -> None:
    with pytest.raises(EditingError, match="is no results repository"):
        submit(run_file, tmp_path)
    root = tmp_path / "newer"
    root.mkdir()
    (root / MARKER).write_text('{"layout": 2}')
    with pytest.raises(EditingError, match="layout 2 is unknown"):
        submit(run_file, root)


def test_the_check_finds_what_is_not_at_its_place(run_file: Path, tmp_path: Path) -> None:
    root = tmp_path / "repository"
    submit(run_file, root)
    (result,) = root.rglob("results_*.json")
    (result.parent / "notes.txt").write_text("x")
    assert problems(root) == ["neither results nor samples of lm-eval."]
    (result.parent / "notes.txt").unlink()
    (result.parent / "link.jsonl").symlink_to("/etc/passwd")
    assert problems(root) == ["links are not accepted."]
    (result.parent / "link.jsonl").unlink()
    change(result, lambda content: content["config"]["edited_hf"].update(seed=7))
    assert any(
        text.startswith("the folder of this run is results/tiny/r_rome__single-seed=7__") for text in problems(root)
    )


def test_the_check_finds_facts_about_machines_and_results_elsewhere(run_file: Path, tmp_path: Path) -> None:
    root = tmp_path / "repository"
    submit(run_file, root)
    (result,) = root.rglob("results_*.json")
    change(result, lambda content: content.update(pretty_env_info="x"))
    assert problems(root) == ["facts about a machine; prepare the file with lm-edit results submit."]
    content = json.loads(result.read_text(encoding="utf-8"))
    del content["pretty_env_info"]
    result.unlink()
    (root / result.name).write_text(json.dumps(content))
    assert "samples without their result file." in problems(root) and "results belong below results/." in problems(root)


def test_an_unknown_layout_is_a_problem(run_file: Path, tmp_path: Path) -> None:
    root = tmp_path / "repository"
    submit(run_file, root)
    (root / MARKER).write_text("[]")
    assert any("layout None is unknown" in text for text in problems(root))


def test_the_template_is_a_repository_that_its_workflow_accepts(run_file: Path, tmp_path: Path, capsys: Any) -> None:
    root = copy_template("results", tmp_path / "repository", {"never in it": ""})
    workflow = yaml.safe_load((root / ".github/workflows/check.yml").read_text(encoding="utf-8"))
    (check,) = [step["run"] for step in workflow["jobs"]["check"]["steps"] if " check " in step.get("run", "")]
    words = [str(root) if word == "." else word for word in check.split()[1:]]
    assert main(words) == 0 and "0 result files, 0 problems" in capsys.readouterr().out
    submit(run_file, root)
    assert main(words) == 0 and "1 result files, 0 problems" in capsys.readouterr().out
    (saved,) = root.rglob("results_*.json")
    saved.write_text(saved.read_text(encoding="utf-8").replace('"results": {', '"results": {"x": {"a,none": NaN},'))
    assert main(words) == 1
