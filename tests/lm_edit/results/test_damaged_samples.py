"""Samples that are not as the run left them: every reader refuses them, names the difference and what to do."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from command_line import run_verb
from real_runs import RealRuns, result_file

from edit_hooks.utils.errors import EditingError
from lm_edit import load_cases, load_documents
from lm_edit.results.answers.recompute import wrong_numbers
from lm_edit.results.answers.samples import read_saved_answers
from lm_edit.results.checking.check import check_results
from lm_edit.results.checking.merge import merge_results
from lm_edit.results.checking.repository import submit
from lm_edit.results.exports.options import ExportOptions
from lm_edit.results.exports.targets import export_results
from lm_edit.results.files.runs import read_result_file

TASK = "qaedit_wild_reliability"
OTHER = "qaedit_wild_generalization"
Lines = list[str]


@pytest.fixture
def run(real_runs: RealRuns, tmp_path: Path) -> Path:
    """A copy of the files of one run."""
    shutil.copytree(real_runs.mapping, tmp_path / "run")
    return tmp_path / "run"


def samples(run: Path, task: str = TASK) -> Path:
    (path,) = run.rglob(f"samples_{task}_*.jsonl")
    return path


def rewrite(path: Path, edit: Callable[[Lines], Sequence[str]]) -> None:
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    path.write_text("".join(f"{line}\n" for line in edit(lines)), encoding="utf-8")


def changed_row(**changes: Any) -> Callable[[Lines], Lines]:
    return lambda lines: [json.dumps(json.loads(lines[0]) | changes), *lines[1:]]


def other_prompt(lines: Lines) -> Lines:
    row = json.loads(lines[0])
    row["arguments"]["gen_args_0"]["arg_0"] += " and"
    return [json.dumps(row), *lines[1:]]


def of_another_task(run: Path) -> None:
    shutil.copyfile(samples(run, OTHER), samples(run))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "half gone": (lambda run: rewrite(samples(run), lambda lines: lines[: len(lines) // 2]), "but 3 were asked"),
    "of another task": (of_another_task, "of another task or run"),
    "twice": (
        lambda run: rewrite(samples(run), lambda lines: [*lines, lines[0]]),
        "documents 0 are in the samples",
    ),
    "reordered": (lambda run: rewrite(samples(run), lambda lines: lines[::-1]), "in another order"),
    "other hash": (lambda run: rewrite(samples(run), changed_row(doc_hash="0")), "samples are missing, changed"),
    "other target": (lambda run: rewrite(samples(run), changed_row(target="x")), "the target of document 0 is not the"),
    "other prompt": (lambda run: rewrite(samples(run), other_prompt), "the prompt of document 0 is not the"),
}


def judge(run: Path, _: Path) -> None:
    read_saved_answers([str(run)])


READERS: dict[str, Callable[[Path, Path], object]] = {
    "judge": judge,
    "cases": lambda run, _: load_cases(run),
    "documents": lambda run, _: list(load_documents(run)),
    "recompute": lambda run, _: list(wrong_numbers(read_result_file(result_file(run)), TASK)),
    "merge": merge_results,
    "submit": submit,
    "csv": lambda run, out: export_results("csv", run, out, ExportOptions()),
    "every-eval-ever": lambda run, out: export_results("every-eval-ever", run, out, ExportOptions()),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_every_reader_refuses_what_is_not_of_the_run(damage: str, run: Path, tmp_path: Path) -> None:
    make, words = DAMAGE[damage]
    make(run)
    for name, read in READERS.items():
        with pytest.raises(EditingError) as refusal:
            read(run, tmp_path / f"out_{name}")
        assert words in str(refusal.value), name
        assert name == "submit" or "as lm_eval wrote them" in str(refusal.value), name
    assert any(words in problem.text for problem in check_results(run).problems)


def test_no_answer_of_damaged_samples_is_graded(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite(samples(run), lambda lines: lines[: len(lines) // 2])
    assert run_verb(["judge", str(run), "--judge", "em"]) == 2
    printed = capsys.readouterr()
    assert "1 documents in the samples, but 3 were asked" in printed.err and "answers scored" not in printed.out


def test_samples_of_a_task_that_the_run_does_not_have(run: Path) -> None:
    path = samples(run)
    path.rename(path.with_name(path.name.replace(TASK, "qaedit_syn")))
    with pytest.raises(EditingError, match=r"a task that results_.* does not have"):
        read_saved_answers([str(run)])
    assert any("no task of these results" in problem.text for problem in check_results(run).problems)


def test_samples_without_their_result_file_are_judged_with_a_warning(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing tells whether some are missing; what the rows themselves show is refused."""
    result_file(run).unlink()
    with caplog.at_level(logging.WARNING):
        answers = read_saved_answers([str(samples(run))])
    assert len({answer.case for answer in answers}) == 3 and "unknown whether samples are missing" in caplog.text
    rewrite(samples(run), lambda lines: [*lines, lines[0]])
    with pytest.raises(EditingError, match="more than once"):
        read_saved_answers([str(samples(run))])


def test_samples_beside_a_result_file_of_another_name(run: Path) -> None:
    """As ``--output_path mine.json`` names it."""
    path = result_file(run)
    path.rename(path.with_name(path.name.replace("results_", "mine_")))
    rewrite(samples(run), lambda lines: lines[1:])
    with pytest.raises(EditingError, match="2 documents in the samples, but 3 were asked"):
        read_saved_answers([str(samples(run))])


def test_counts_are_compared_where_no_hash_was_saved(run: Path) -> None:
    path = result_file(run)
    content = json.loads(path.read_text(encoding="utf-8"))
    del content["task_hashes"]
    path.write_text(json.dumps(content), encoding="utf-8")
    assert read_saved_answers([str(samples(run))])
    rewrite(samples(run), lambda lines: lines[1:])
    with pytest.raises(EditingError, match="2 documents in the samples, but 3 were asked"):
        load_cases(run)
