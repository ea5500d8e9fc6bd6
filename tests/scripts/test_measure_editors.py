"""The measurement of all editors: runs resume, needless seeds are left out, tables say what was measured."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import lm_eval
import pytest
import yaml
from lm_eval.tasks import TaskManager
from model_shapes import MODELS, model_like
from paths import ROOT

from edit_hooks.base.registry import EDITORS, load_editor


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    yield importlib.import_module("measure_editors")
    for name in ("measure_editors", "editors_table", "_measurements"):
        sys.modules.pop(name, None)


@pytest.fixture
def table(measure: ModuleType) -> ModuleType:
    return importlib.import_module("editors_table")


def arguments(out: Path, **changes: Any) -> argparse.Namespace:
    values = {"out": out, "limit": None, "jobs": 1, "parts": ["single"], "seeds": [0, 1, 2], **changes}
    return argparse.Namespace(**values)


def write_result(
    measure: ModuleType, out: Path, row: Any, part: str, seed: int, value: float | None = 0.0, **changes: Any
) -> None:
    """A result file in which every case of a part has the same score."""
    columns = measure.COLUMNS[part]
    scores = {task: {metric: [value] * 4, "nll": [0.5] * 4} for _, task, metric in columns}
    run = {
        "editor_config": {"lr": 1.0},
        "warnings": {},
        "weights": "abc",
        "versions": {"torch": "2"},
        "code_fingerprint": "c",
    }
    record = {"version": measure.VERSION, "row": row.name, "part": part, "seed": seed, "settings": dict(row.settings)}
    record |= {"limit": None, "scores": scores, "failed": {}, "runs": [run], "cpu_seconds": 1800.0, "commit": "f00"}
    measure.Job(row, part, seed).path(out).write_text(json.dumps({**record, **changes}))


def index_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Index the tasks of this repository only; all of lm-eval's take long."""
    evaluate = lm_eval.simple_evaluate

    def evaluate_quickly(metadata: dict[str, Any], **options: Any) -> Any:
        metadata = {"data": "mini", **options["model_args"], **metadata}  # as lm-eval builds it
        manager = TaskManager(include_path=str(ROOT / "lm_eval_tasks"), include_defaults=False, metadata=metadata)
        return evaluate(task_manager=manager, **options)

    monkeypatch.setattr(lm_eval, "simple_evaluate", evaluate_quickly)


def test_every_editor_has_a_row_or_a_reason(measure: ModuleType) -> None:
    plan = yaml.safe_load(measure.PLAN.read_text(encoding="utf-8"))
    measured = {editor for group in plan["groups"].values() for editor in group["rows"]}
    assert measured | plan["left_out"].keys() == set(EDITORS)
    assert not measured & plan["left_out"].keys() and all(plan["left_out"].values())


def test_every_row_is_accepted_and_published_rows_name_their_settings(measure: ModuleType) -> None:
    for row in measure.load_rows(measure.PLAN, {}):
        if not row.is_unedited:
            load_editor(row.editor, row.settings)
            assert ("shipped" in row.settings) == (row.group == "published"), row.name


def test_a_part_is_run_and_its_scores_are_kept_by_case(
    measure: ModuleType, tiny_path: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {"pretrained": str(tiny_path("llama")), "device": "cpu", "data": "mini", "store": "off"}
    monkeypatch.setattr(measure.Job, "options", property(lambda job: {"editor": job.row.editor, **model}))
    index_quickly(monkeypatch)
    job = measure.Job(measure.Row("tuned", "ice", {}), "single", 0)
    measure.execute(job, arguments(tmp_path, limit=2))
    result = json.loads(job.path(tmp_path, 2).read_text())
    assert result["limit"] == 2 and len(result["scores"]["bake_es"]["efficacy_prob"]) == 2
    assert {"bake_es", "bake_gs", "bake_ls", "bake_rq", "bake_rj", "qaedit_wild_reliability"} == set(result["scores"])
    assert all(score in (None, 0.0, 1.0) for score in result["scores"]["bake_rj"]["reverse_judgment_prob"])
    assert "efficacy_gen_em" not in result["scores"]["bake_es"]  # likelihoods only
    assert result["runs"][0]["editor_config"]["num_facts"] == 1 and len(result["runs"][0]["weights"]) == 64
    assert measure.Finished.read(tmp_path, limit=2).new["tuned/ice", "single", 0]["device"]["type"] == "cpu"
    assert list(tmp_path.glob("*.part")) == []


def test_runs_on_a_gpu_are_counted_apart(measure: ModuleType, table: ModuleType, tmp_path: Path) -> None:
    """Their processor time says nothing about the cost on a CPU."""
    row = measure.Row("tuned", "rome", {})
    devices = ({"type": "cpu", "name": None, "count": 1}, {"type": "cuda", "name": "NVIDIA A", "count": 1})
    for seed, device in enumerate(devices):
        write_result(measure, tmp_path, row, "single", seed, device=device)
    write_result(measure, tmp_path, row, "single", 2)  # a line of before devices were recorded
    text = table.render([row], {"tuned": "T"}, measure.Finished.read(tmp_path, tmp_path / "kept.jsonl"))
    assert text.endswith(
        "Of the 3 runs behind these tables, 2 were made on a CPU and took 1.0 hours of processor time; "
        "1 on a GPU (NVIDIA A)."
    )


def test_edits_that_an_editor_cannot_use_have_a_reason_and_no_scores(
    measure: ModuleType, tiny_path: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BIRD needs relations, which QAEdit's records do not name; its scores on BAKE are kept."""
    model = {"pretrained": str(tiny_path("llama")), "device": "cpu", "data": "mini", "store": "off"}
    settings = {"num_steps": 1, "layers": [1], "context_templates": ["{}"]}
    options = property(lambda job: {"editor": job.row.editor, "editor_args": settings, **model})
    monkeypatch.setattr(measure.Job, "options", options)
    index_quickly(monkeypatch)
    row = measure.Row("tuned", "bird", {})
    measure.execute(measure.Job(row, "single", 0), arguments(tmp_path, limit=2))
    result = json.loads(measure.Job(row, "single", 0).path(tmp_path, 2).read_text())
    assert len(result["scores"]["bake_es"]["efficacy_prob"]) == 2 and len(result["runs"]) == 1
    assert result["scores"]["qaedit_wild_reliability"] == {"efficacy_wild_em": []}
    assert "relation_id" in result["failed"]["qaedit_wild_reliability"]
    (record,) = measure.Finished.read(tmp_path, tmp_path / "kept.jsonl", limit=2).new.values()
    assert record["scores"]["WILD EM"] == []


def test_a_part_without_usable_edits_is_kept_with_its_reason(
    measure: ModuleType, table: ModuleType, tmp_path: Path
) -> None:
    """BIRD on CounterFact: the run is finished, and its cells and seeds have a hyphen."""
    row = measure.Row("tuned", "bird", {})
    columns = measure.COLUMNS["stream200"]
    record = {"version": measure.VERSION, "row": row.name, "part": "stream200", "seed": 0, "settings": {}}
    record |= {"scores": {task: {metric: []} for _, task, metric in columns}, "limit": None, "runs": []}
    record |= {"failed": {task: "no 'relation_id'" for _, task, _ in columns}, "cpu_seconds": 1.0, "commit": None}
    measure.Job(row, "stream200", 0).path(tmp_path).write_text(json.dumps(record))
    kept = tmp_path / "kept.jsonl"
    finished = measure.Finished.read(tmp_path, kept)
    finished.keep([row], kept)
    again = measure.Finished.read(None, kept).get(row, "stream200", 0)
    assert again["reason"] == "no 'relation_id'"
    assert all(scores == [] for scores in again["scores"].values())
    part = table.summarize([row], finished)[0]["parts"]["stream200"]
    assert part == {"seeds": "-", "cells": {heading: None for heading, *_ in columns}}  # no mean, so of no seed


def test_the_streams_have_steps_for_joint_editors_only(measure: ModuleType) -> None:
    def stream(editor: str, part: str) -> tuple[Any, ...]:
        options, tasks, _ = next(measure.Job(measure.Row("tuned", editor, {}), part, 1).evaluations())
        assert options["editor_args"]["seed"] == 1 and options["mode"] == "sequential" and not options["immediate"]
        return options["edits"], options["num_edits"], options["edit_batch_size"], len(tasks)

    assert stream("memit", "stream48") == ("bake", 48, 8, 5)
    assert stream("rome", "stream48") == ("bake", 48, 1, 5)
    assert stream("memit", "stream200") == ("counterfact_flat", 200, 20, 3)
    unedited = measure.Job(measure.Row("", "unedited", {}), "stream200", 0)
    assert unedited.num_cases == 200 and measure.Job(unedited.row, "single", 0).num_cases is None
    options, tasks, _ = next(unedited.evaluations())
    assert (options, tasks) == ({"mode": "none", "data": "hub"}, measure.COUNTERFACT)


def test_finished_runs_and_needless_seeds_are_not_run(measure: ModuleType, tmp_path: Path) -> None:
    draws, same = measure.Row("tuned", "rome", {}), measure.Row("tuned", "grace", {})
    rows = [measure.Row("", "unedited", {}), draws, same]

    def names(seed: int, parts: list[str]) -> list[str]:
        finished = measure.Finished.read(tmp_path, tmp_path / "kept.jsonl")
        return [f"{job.row.editor} {job.part}" for job in measure.missing_jobs(rows, parts, seed, finished)]

    assert names(0, ["single", "stream48"]) == [
        "unedited single", "rome single", "grace single", "rome stream48", "grace stream48"
    ]  # fmt: skip
    assert names(1, ["single", "seconds"]) == ["rome single", "grace single"]  # nothing to repeat for the others
    assert names(0, ["seconds"]) == ["rome seconds", "grace seconds"]
    assert names(0, ["stream200"]) == ["unedited stream200", "rome stream200", "grace stream200"]
    for row, drawn in ((draws, True), (same, False)):
        trial = {"version": measure.VERSION, "row": row.name, "part": "trial", "seed": 0, "settings": {}, "limit": None}
        path = measure.Job(row, "trial", 0).path(tmp_path)
        path.write_text(json.dumps({**trial, "draws": {"single": drawn, "stream": False}}))
        write_result(measure, tmp_path, row, "single", 0)
    assert names(0, ["single"]) == ["unedited single"]
    assert names(1, ["single", "stream48"]) == ["rome single"]
    path = measure.Job(draws, "single", 0).path(tmp_path)
    old = path.read_text()
    path.write_text(old.replace(f'"version": {measure.VERSION}', '"version": 0'))
    assert names(0, ["single"]) == ["unedited single", "rome single"]  # of another version
    path.write_text(old.replace('"settings": {}', '"settings": {"lr": 2.0}'))
    assert names(0, ["single"]) == ["unedited single", "rome single"]  # of other settings


def test_kept_runs_are_continued_elsewhere(measure: ModuleType, table: ModuleType, tmp_path: Path) -> None:
    """Lines of an earlier machine stay, those of this one are added, and both are in the table."""
    rows = [measure.Row("", "unedited", {}), measure.Row("tuned", "rome", {}), measure.Row("tuned", "grace", {})]
    kept, here, there = tmp_path / "kept.jsonl", tmp_path / "here", tmp_path / "there"
    for folder, row, value in ((there, rows[2], 1.0), (here, rows[1], 0.5)):
        folder.mkdir()
        write_result(measure, folder, row, "single", 0, value)
        measure.Finished.read(folder, kept).keep(rows, kept)
    lines = [json.loads(line) for line in kept.read_text().splitlines()]
    assert [(line["row"], line["scores"]["ES"]) for line in lines] == [
        ("tuned/rome", [0.5] * 4), ("tuned/grace", [1.0] * 4)
    ]  # fmt: skip
    finished = measure.Finished.read(tmp_path / "empty", kept)
    assert [job.row.name for job in measure.missing_jobs(rows, ["single"], 0, finished)] == ["unedited"]
    assert {row["editor"] for row in table.summarize(rows, finished)} == {"rome", "grace"}


@pytest.mark.parametrize(("editor", "settings", "drawn"), [("ft_m", {"layers": [1]}, False), ("lora", {}, True)])
def test_a_trial_shows_whether_an_editor_draws(
    editor: str,
    settings: dict[str, Any],
    drawn: bool,
    measure: ModuleType,
    table: ModuleType,
    tiny_path: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FT-M draws nothing, LoRA its starting weights; only the latter needs further seeds."""
    model = {"pretrained": str(tiny_path("llama")), "device": "cpu", "data": "mini", "store": "off"}
    monkeypatch.setattr(measure.Job, "options", property(lambda job: {"editor": job.row.editor, **model}))
    monkeypatch.setattr(measure, "BAKE", ["bake_es"])
    index_quickly(monkeypatch)
    row = measure.Row("tuned", editor, {"num_steps": 1, **settings})
    measure.execute(measure.Job(row, "trial", 0), arguments(tmp_path))
    write_result(measure, tmp_path, row, "single", 0)
    finished = measure.Finished.read(tmp_path, tmp_path / "kept.jsonl")
    assert finished.get(row, "trial", 0)["draws"] == {"single": drawn, "stream": drawn}
    missing = [job.part for job in measure.missing_jobs([row], ["trial", "single", "stream48"], 1, finished)]
    assert missing == (["single", "stream48"] if drawn else [])
    assert table.summarize([row], finished)[0]["parts"]["single"]["seeds"] == ("1" if drawn else "any")


def test_a_cell_is_a_mean_of_case_means_with_an_interval_of_the_cases(
    measure: ModuleType, table: ModuleType, tmp_path: Path
) -> None:
    row = measure.Row("tuned", "rome", {"lr": 1.0})
    for seed, values in ((0, [1.0, 1.0, 0.0, None]), (1, [1.0, 0.0, 0.0, None]), (2, [1.0, None, 0.0, None])):
        scores = {task: {metric: values} for _, task, metric in measure.COLUMNS["stream200"]}
        write_result(measure, tmp_path, row, "stream200", seed, scores=scores)
    finished = measure.Finished.read(tmp_path, tmp_path / "kept.jsonl")
    summary = table.summarize([row], finished)[0]["parts"]["stream200"]
    cell = summary["cells"]["ES"]
    assert cell["mean"] == 0.5  # case means 1, 0.5, 0
    assert (cell["cases"], cell["without_score"]) == (3, 1)
    assert summary["seeds"] == "3"
    text = table.render([row], {"tuned": "T"}, finished)
    assert text.endswith("The 3 runs behind these tables took 1.5 hours of processor time.")
    # Wilson, by hand: n = 3, p = 1/2, z^2 = 3.8415: half width sqrt(3.8415 / 12 + 3.8415^2 / 36) / (1 + 3.8415 / 3)
    assert (cell["low"], cell["high"]) == (0.1253, 0.8747)


def test_a_seed_without_any_usable_edit_does_not_hide_the_others(
    measure: ModuleType, table: ModuleType, tmp_path: Path
) -> None:
    """BIRD can use no edit of QAEdit: later runs say so before any case is asked, and have no scores."""
    row = measure.Row("tuned", "bird", {})
    for seed, values in ((0, [1.0, 0.0]), (1, []), (2, [1.0, 1.0])):
        scores = {task: {metric: values} for _, task, metric in measure.COLUMNS["stream200"]}
        write_result(measure, tmp_path, row, "stream200", seed, scores=scores)
    finished = measure.Finished.read(tmp_path, tmp_path / "kept.jsonl")
    cell = table.summarize([row], finished)[0]["parts"]["stream200"]["cells"]["ES"]
    assert (cell["mean"], cell["cases"], cell["without_score"]) == (0.75, 2, 0)


def test_rows_are_compared_case_by_case(
    measure: ModuleType, table: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten cases, means over two seeds, in a stream whose last cases have no score; exact p-values by hand."""
    monkeypatch.setattr(table, "NUM_STREAMED", 8)
    rows = [
        measure.Row("", "unedited", {}),
        measure.Row("published", "rome", {"x": 1}),
        measure.Row("tuned", "rome", {}),
    ]
    for row, part, seeds in ((rows[0], "single", [0]), (rows[1], "stream48", [0]), (rows[2], "stream48", [0, 1])):
        for seed in seeds:
            write_result(measure, tmp_path, row, part, seed)
            path = measure.Job(row, part, seed).path(tmp_path)
            record = json.loads(path.read_text())
            unscored = [None, None] if part == "stream48" else [0.0, 0.0]
            values = {"": [0.0] * 8, "published": [0.0] * 7 + [1.0], "tuned": [1.0] * 7 + [float(seed)]}[row.group]
            for metrics in record["scores"].values():
                metrics.update(dict.fromkeys(metrics, values + unscored))
            path.write_text(json.dumps(record))
    found = {
        (one.heading, one.first, one.second): one
        for one in table.pairs(rows, measure.Finished.read(tmp_path, tmp_path / "none"))
    }
    against = found["ES", "tuned/rome", "unedited"]
    assert (against.gained, against.lost, against.test.num_cases) == (8, 0, 8)
    # Published: one of eight, McNemar p = 1. Tuned: seven ones and a half, all signs equal, p = 2 / 2^8, times two.
    assert against.test.p == pytest.approx(2 * 2 / 256) and against.test.difference == pytest.approx(7.5 / 8)
    assert found["ES", "published/rome", "unedited"].test.p == 1
    both = found["ES", "published/rome", "tuned/rome"]
    assert (both.gained, both.lost) == (1, 7) and both.test.p > found["ES", "tuned/rome", "unedited"].test.p


def test_the_interval_of_a_perfect_score_is_not_empty(table: ModuleType) -> None:
    low, high = table.wilson(1.0, 64)
    assert (round(low, 3), high) == (0.943, 1.0)
    assert table.wilson(0.0, 64) == pytest.approx((0.0, 1 - low))


def test_a_limited_run_is_no_measurement(
    measure: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row, kept = measure.Row("tuned", "rome", {}), tmp_path / "kept.jsonl"
    write_result(measure, tmp_path, row, "single", 0, limit=2)
    finished = measure.Finished.read(tmp_path, kept)
    assert finished.get(row, "single", 0) is None and finished.keep([row], kept) == 0
    assert measure.Finished.read(tmp_path, kept, limit=2).get(row, "single", 0) is not None
    job = measure.Job(row, "single", 0)
    assert job.path(tmp_path, 2) != job.path(tmp_path)  # trying the command does not replace a measurement
    monkeypatch.setattr(sys, "argv", ["measure_editors.py", "--out", str(tmp_path), "--limit", "2", "--keep"])
    with pytest.raises(SystemExit):
        measure.main()
    assert "leave out --limit" in capsys.readouterr().err


def test_kept_lines_are_replaced_by_the_same_run_with_todays_settings_only(measure: ModuleType, tmp_path: Path) -> None:
    kept, out = tmp_path / "kept.jsonl", tmp_path / "out"
    out.mkdir()
    now, before = (measure.Row("tuned", "rome", {"lr": lr}) for lr in (2, 1))
    other = measure.Row("tuned", "lora", {})
    for row in (now, other):
        write_result(measure, out, row, "single", 0, commit="new")
        measure.Finished.read(out, kept).keep([now, other], kept)
    write_result(measure, out, before, "single", 0, commit="old")  # of the time before the settings changed
    finished = measure.Finished.read(out, kept)
    assert finished.get(now, "single", 0)["commit"] == "new"
    assert finished.keep([now], kept) == 2  # also with a plan that lacks the other row
    assert [json.loads(line)["commit"] for line in kept.read_text().splitlines()] == ["new", "new"]
    write_result(measure, out, now, "single", 0, commit="newest")
    measure.Finished.read(out, kept).keep([now], kept)
    assert [json.loads(line)["commit"] for line in kept.read_text().splitlines()] == ["newest", "new"]


def test_tables_have_a_hyphen_for_what_was_not_measured(measure: ModuleType, table: ModuleType, tmp_path: Path) -> None:
    rows = [measure.Row("", "unedited", {}), measure.Row("tuned", "ice", {}), measure.Row("tuned", "rome", {})]
    for row, value in zip(rows, (0.0, 1.0, None), strict=True):
        write_result(measure, tmp_path, row, "single", 0, value)
    finished = measure.Finished.read(tmp_path, tmp_path / "kept.jsonl")
    lines = table.render(rows, {"tuned": "settings for this model"}, finished).splitlines()
    assert [line for line in lines if line and not line.startswith("|")] == [
        "Single edits, each on the unedited model; settings for this model:",
        "The 3 runs behind these tables took 1.5 hours of processor time.",
    ]
    assert [line.split(" | ")[0] for line in lines if line.startswith("| `")] == ["| `unedited`", "| `rome`", "| `ice`"]
    rome = next(line for line in lines if "`rome`" in line)
    assert rome == "| `rome` | weights | - | - | - | - | - | - | - | - |"
    assert "1.00 (0.51-1.00)" in next(line for line in lines if "`ice`" in line)
    assert next(line for line in lines if "`unedited`" in line).endswith("| any |")


def test_the_unedited_model_has_the_same_cases_in_the_table_of_a_stream(
    measure: ModuleType, table: ModuleType, tmp_path: Path
) -> None:
    """It is measured once, on the whole samples; a stream's cases are the first ones."""
    rows = [measure.Row("", "unedited", {}), measure.Row("tuned", "rome", {})]
    scores = {task: {metric: [0.0] * 48 + [1.0] * 16} for _, task, metric in measure.COLUMNS["single"]}
    write_result(measure, tmp_path, rows[0], "single", 0, scores=scores)
    write_result(measure, tmp_path, rows[1], "stream48", 0)
    lines = table.render(rows, {"tuned": "chosen"}, measure.Finished.read(tmp_path, tmp_path / "kept.jsonl"))
    (unedited,) = (line for line in lines.splitlines() if "`unedited`" in line)
    assert unedited == "| `unedited` | nothing |" + " 0.00 (0.00-0.07) |" * 6 + " any |"


def test_a_cell_says_over_how_many_cases_it_is_where_an_editor_refused_some(
    measure: ModuleType, table: ModuleType, tmp_path: Path
) -> None:
    """A case that has no score on the unedited model either is excluded by a filter, not refused."""
    rows = [measure.Row("", "unedited", {}), measure.Row("tuned", "rome", {}), measure.Row("tuned", "memit", {})]
    for row, values in zip(rows, ([0.0, 0.0, 0.0, None], [1.0, None, 1.0, None], [1.0, 1.0, 1.0, None]), strict=True):
        scores = {task: {metric: values} for _, task, metric in measure.COLUMNS["stream200"]}
        write_result(measure, tmp_path, row, "stream200", 0, scores=scores)
    finished = measure.Finished.read(tmp_path, tmp_path / "kept.jsonl")
    lines = table.render(rows, {"tuned": "T"}, finished).splitlines()
    cells = {line.split("`")[1]: line.split(" | ")[2] for line in lines if line.startswith("| `")}
    assert cells["rome"].endswith("), 2 of 3")
    assert " of " not in cells["memit"] + cells["unedited"]


# Settings that name a rule; a run records the texts that it gave.
SAMPLED = ("context_templates", "calibration")
# Settings that are newer than kept runs and cannot have changed them -> why.
NEWER = {
    "append_eos": "no end token after targets, as before",
    "shuffle": "False: in the order of the requests, as before",
    "stream": "the released stream, as before",
    "trained": "the MLP output projection, as before",
    "aligned": "without error feedback, as before",
    "clean_paraphrases": "concerns pools of CounterFact's records; the pool of these runs is built in",
    "first_position": "the demo model's tokenizer begins every prompt with a start token",
    "initial_adapters": "None: drawn, as before",
    "initial_predictor": "None: drawn, as before",
    "initial_values": "None: drawn, as before",
    "evk_noise": "None: drawn, as before",
}


def as_recorded(expected: Any, record: Any) -> Any:
    """The expected settings without those of :data:`NEWER` that a record lacks, also inside of base settings."""
    if not isinstance(expected, dict):
        return expected
    known = record if isinstance(record, dict) else {}
    return {
        name: as_recorded(value, known.get(name))
        for name, value in expected.items()
        if name in known or name not in NEWER
    }


def chosen(config: Any, like: Any) -> Any:
    """The settings that have a value in ``like`` and were not sampled; those of a base editor likewise."""
    if not isinstance(like, dict):
        return config
    return {name: chosen(config[name], one) for name, one in like.items() if one is not None and name not in SAMPLED}


def test_kept_runs_had_the_settings_that_the_editors_have_now(measure: ModuleType) -> None:
    """A changed default or shipped file makes a row of the table be measured again."""
    model = model_like(MODELS["gemma-3-270m"])
    finished = measure.Finished.read(None)
    checked = 0
    for row in measure.load_rows(measure.PLAN, {}):
        for part in measure.COLUMNS:
            for record in finished.of(row, part).values():
                if row.is_unedited or "reason" in record:
                    continue
                editor = load_editor(row.editor, {**row.settings, "seed": record["seed"]})
                expected = json.loads(json.dumps(editor.default_config(model).to_dict()))
                expected = as_recorded(expected, record["editor_config"])
                assert chosen(record["editor_config"], expected) == chosen(expected, expected), (row.name, part)
                checked += 1
    assert checked or not finished.kept


def test_every_table_shows_the_unedited_model(table: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert table.main([]) == 0
    printed = capsys.readouterr().out
    rows = re.findall(r"^\| `(\w+)` \|", printed, flags=re.MULTILINE)
    assert set(rows) <= {"unedited", *EDITORS} and rows.count("unedited") == printed.count("\n|---") > 0
