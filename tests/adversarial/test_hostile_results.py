"""Submissions of strangers: edited numbers, names that are paths, numbers that are none, links, repeated runs."""

from __future__ import annotations

import contextlib
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import run_verb
from mutations import mutate
from result_files import change, scripted_results, write_run

from edit_hooks.utils.errors import EditingError
from lm_edit import load_cases, load_documents, load_results
from lm_edit.results.checking import repository as repository_module
from lm_edit.results.checking.check import check_results
from lm_edit.results.checking.merge import merge_results
from lm_edit.results.checking.repository import FOLDER, submit
from lm_edit.results.show import comparison

LATER = "2026-11-22T10-00-00.000001"


def texts(path: Path) -> list[str]:
    return [problem.text for problem in check_results(path).problems]


def samples_of(path: Path) -> Path:
    (samples,) = path.parent.glob("samples_*.jsonl")
    return samples


def change_samples(path: Path, edit: Callable[[list[dict[str, Any]]], object]) -> None:
    samples = samples_of(path)
    rows = [json.loads(line) for line in samples.read_text(encoding="utf-8").split("\n") if line]
    edit(rows)
    samples.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def set_number(path: Path, task: str, name: str, value: Any) -> None:
    change(path, lambda content: content["results"][task].update({f"{name},none": value}))


# ------------------------------------------------------------------ edited numbers


def test_f1_is_left_alone_and_counts_without_a_count_are_recomputed(tmp_path: Path) -> None:
    """As the tasks editglue_* have them: F1 and MCC of labels, and numbers of right, wrong and unreadable answers."""
    path = write_run(tmp_path)
    added = [{"metric": "f1", "aggregation": "weighted_f1"}, {"metric": "correct", "aggregation": "total"}]
    change(path, lambda content: content["configs"]["bake_es"]["metric_list"].extend(added))
    change_samples(path, lambda rows: [row.update(correct=1) for row in rows])
    set_number(path, "bake_es", "f1", 0.25)
    set_number(path, "bake_es", "correct", 4)
    assert texts(path) == []
    set_number(path, "bake_es", "correct", 3)
    assert texts(path) == ["bake_es, correct: the result is 3, but the value of the samples is 4."]


@pytest.mark.parametrize(
    ("task", "name"),
    [
        ("bake_rq", "reverse_qa_prob@all"),  # a share
        ("bake_rq", "reverse_qa_magnitude@all"),  # a difference of probabilities
        ("bake_rq", "reverse_qa_logprob_new"),
        ("bake_rq", "reverse_qa_prob@all_stderr"),
        ("bake_rq", "reverse_qa_prob_n"),
        ("bake_rq", "reverse_qa_prob_excluded"),
        ("bake_rq", "reverse_qa_prob_or_0"),
        ("bake_s", "edit_score_reverse_prob@all"),  # a harmonic mean of means
        ("knowgic_prob", "ifr_prob"),  # a pooled mean
        ("knowgic_prob", "ifr_prob_stderr"),
        ("knowgic_prob", "ifr_chains_prob"),  # a count
    ],
)
def test_every_number_that_differs_from_the_samples_is_found_and_not_submitted(
    task: str, name: str, tmp_path: Path
) -> None:
    path = write_run(tmp_path / "runs", task)
    assert texts(path) == []
    saved = json.loads(path.read_text(encoding="utf-8"))["results"][task][f"{name},none"]
    set_number(path, task, name, saved + (1 if isinstance(saved, int) else 1e-3))
    assert any(f"{task}, {name}: the result is" in text for text in texts(path)), texts(path)
    with pytest.raises(EditingError, match=rf"cannot be submitted: {task}, "):
        submit(path, tmp_path / "repository")
    assert not list((tmp_path / "repository").rglob("*.json"))


def nan_in_a_sample(rows: list[dict[str, Any]]) -> None:
    rows[0]["efficacy_prob"] = math.nan


def infinite_in_two_samples(rows: list[dict[str, Any]]) -> None:
    rows[0]["efficacy_prob"], rows[1]["efficacy_prob"] = math.inf, -math.inf


def same_mean_from_no_shares(rows: list[dict[str, Any]]) -> None:
    rows[0]["efficacy_prob"], rows[1]["efficacy_prob"] = rows[0]["efficacy_prob"] + 5, rows[1]["efficacy_prob"] - 5


def without_a_column(rows: list[dict[str, Any]]) -> None:
    del rows[0]["efficacy_prob"]
    rows[0]["metrics"].remove("efficacy_prob")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (nan_in_a_sample, "the mean of the samples is nan"),
        (infinite_in_two_samples, "cannot be computed from the samples"),
        (same_mean_from_no_shares, "which is no share"),
        (without_a_column, "cannot be computed from the samples (KeyError"),
    ],
)
def test_samples_do_not_hide_a_number(edit: Any, words: str, tmp_path: Path) -> None:
    path = write_run(tmp_path)
    change_samples(path, edit)
    assert any(words in text for text in texts(path)), texts(path)


def test_a_repeated_document_and_a_missing_hash_are_found(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    change(path, lambda content: content["task_hashes"].clear())
    change_samples(path, lambda rows: rows.append(rows[0]))
    assert any("no hash of them" in text for text in texts(path))
    assert any("documents 0 are in the samples more than once" in text for text in texts(path))


@pytest.mark.parametrize("value", [math.nan, math.inf, -1, 0.5])
def test_counts_are_numbers_of_cases(value: float, tmp_path: Path) -> None:
    path = write_run(tmp_path, samples=False)
    set_number(path, "bake_es", "efficacy_prob_n", value)
    assert any("efficacy_prob: n is" in text for text in texts(path))


def test_numbers_without_samples_are_counted_as_not_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, samples=False)
    assert check_results(tmp_path)[:3] == (1, [], 1) and run_verb(["results", "check", str(tmp_path)]) == 0
    assert "1 tasks have no samples" in capsys.readouterr().out


# ------------------------------------------------------------------ names, dates, other types


@pytest.mark.parametrize("name", ["../../escaped", "/etc/passwd", "a\\b", "a\nb", "x" * 300, ""])
def test_names_of_tasks_are_no_paths(name: str, tmp_path: Path) -> None:
    path = write_run(tmp_path / "runs", samples=False)

    def rename(content: dict[str, Any]) -> None:
        for part in ("results", "configs", "n-samples", "versions"):
            content[part][name] = content[part].pop("bake_es")

    change(path, rename)
    assert any("which is no name of a task" in text for text in texts(path))
    for use in (load_results, lambda place: submit(place, tmp_path / "repository"), lambda p: merge_results(p, "out")):
        with pytest.raises(EditingError, match="no name of a task"):
            use(path)
    assert not list(tmp_path.rglob("*escaped*"))


@pytest.mark.parametrize("date", [1e20, -1e20, math.nan, math.inf, "yesterday", None])
def test_dates_that_are_none_are_empty(date: Any, tmp_path: Path) -> None:
    path = write_run(tmp_path)
    change(path, lambda content: content.update(date=date))
    assert texts(path) == [] and set(load_results(path)["date"]) == {""}


def test_damaged_files_are_problems_and_never_crashes(tmp_path: Path) -> None:
    """Seeded changes of result files and of samples; each is read in every way, or refused in a sentence."""
    results = scripted_results("bake_es")
    path = write_run(tmp_path, results=results)
    samples = samples_of(path)
    content = json.loads(path.read_text(encoding="utf-8"))
    lines = samples.read_text(encoding="utf-8").split("\n")[:-1]
    for seed in range(40):
        rng = random.Random(seed)
        changed = mutate(content, rng) if seed % 2 else content
        rows = lines if seed % 2 else [json.dumps(mutate(json.loads(lines[0]), rng)), *lines[1:]]
        path.write_text(json.dumps(changed), encoding="utf-8")
        samples.write_text("\n".join(rows) + "\n", encoding="utf-8")
        check_results(tmp_path)
        for load in (load_results, load_cases, load_documents, comparison):
            with contextlib.suppress(EditingError):
                list(load(tmp_path))


def test_lines_of_the_check_stay_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """File names with line breaks or escapes must not begin lines of a CI log of their own."""
    folder = tmp_path / "a\n::error::\x1b[31m"
    folder.mkdir()
    (folder / "results_2026.json").write_text("{}")
    assert run_verb(["results", "check", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 2 and "\x1b" not in out


# ------------------------------------------------------------------ repositories


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with one run."""
    submit(write_run(tmp_path / "first"), tmp_path / "repository")
    return tmp_path / "repository"


def test_a_result_that_is_there_is_not_superseded_by_a_newer_file(root: Path, tmp_path: Path) -> None:
    again = write_run(tmp_path / "again", date=LATER, start=1.9e9)
    with pytest.raises(EditingError, match="results are added, never replaced"):
        submit(again, root)
    (first,) = root.rglob("results_*.json")
    (first.parent / again.name).write_bytes(first.read_bytes())
    assert texts(root) == [f"bake_es of this run is in {first.name} already; results are added, never replaced."]
    (first.parent / again.name).unlink()
    submit(write_run(tmp_path / "other", "bake_gs", date=LATER), root)
    assert texts(root) == []


def test_two_files_of_one_run_in_one_submission(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / "a"), write_run(tmp_path / "b", date=LATER)]
    with pytest.raises(EditingError, match="results are added, never replaced"):
        submit(paths, tmp_path / "repository")
    same_name = [write_run(tmp_path / "c"), write_run(tmp_path / "d", "bake_gs")]
    with pytest.raises(EditingError, match="results are added, never replaced"):
        submit(same_name, tmp_path / "repository")


def test_links_and_large_files_are_refused_before_they_are_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (first,) = root.rglob("results_*.json")
    (root / FOLDER / "m").mkdir()
    (root / FOLDER / "m" / "results_x.json").symlink_to("/dev/zero")
    (root / "samples_x.jsonl").symlink_to("/dev/zero")
    assert texts(root) == ["links are not accepted."] * 2
    (root / FOLDER / "m" / "results_x.json").unlink()
    (root / "samples_x.jsonl").unlink()
    monkeypatch.setattr(repository_module, "MAX_FILE_BYTES", first.stat().st_size - 1)
    assert any("more than" in text for text in texts(root))


def test_a_repository_does_not_lead_elsewhere(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "repository", tmp_path / "elsewhere"
    submit(write_run(tmp_path / "first", model_args="pretrained=org/other,editor=r_rome"), root)
    elsewhere.mkdir()
    (root / FOLDER / "org-tiny").symlink_to(elsewhere)
    with pytest.raises(EditingError, match="is a link, so that files would be written elsewhere"):
        submit(write_run(tmp_path / "second"), root)
    assert not list(elsewhere.iterdir())
    (root / FOLDER / "org-tiny").unlink()
    (root / FOLDER).rename(tmp_path / "moved")
    (root / FOLDER).symlink_to(tmp_path / "moved")
    with pytest.raises(EditingError, match="is a link"):
        submit(write_run(tmp_path / "third"), root)
    assert "links are not accepted." in texts(root)


def test_files_too_large_or_of_other_names_are_not_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_run(tmp_path / "runs")
    renamed = path.with_name("mine.json")
    path.rename(renamed)
    with pytest.raises(EditingError, match=r"results_<date>\.json"):
        submit(renamed, tmp_path / "repository")
    renamed.rename(path)
    monkeypatch.setattr(repository_module, "MAX_FILE_BYTES", path.stat().st_size)
    samples = samples_of(path)
    samples.write_text(samples.read_text(encoding="utf-8") + " \n" * path.stat().st_size, encoding="utf-8")
    with pytest.raises(EditingError, match="--without-samples"):
        submit(path, tmp_path / "repository")
    assert submit(path, tmp_path / "repository", samples=False)
