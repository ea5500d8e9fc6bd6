"""Exports, each checked with the receiving side's own code where it is installed."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from paths import TESTS
from result_files import change, judged_run, scripted_results, write_run

from edit_hooks.answers import StateSimilarity
from edit_hooks.utils.errors import EditingError
from lm_edit import load_cases, load_results
from lm_edit.results.exports.options import ExportOptions
from lm_edit.results.exports.targets import TARGETS, export_results

OPTIONS = ExportOptions(organization="us", developer="them")
HOSTILE = "=cmd|'/C calc'!A0</script><script>alert(1)</script>\x1b[2J"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs: one with failed cases and hostile texts, one of the unedited model."""
    root = tmp_path_factory.mktemp("runs")
    write_run(root / "a", results=scripted_results(errors=(("0", HOSTILE), ("1", "no edit"))))
    texts = write_run(root / "b", "qaedit_wild_reliability", mode="none", editor=None, editor_config=None)
    assert texts.is_file()
    return root


def test_the_command_offers_every_target() -> None:
    from lm_edit.cli.evaluating.results import TARGET_NAMES

    assert set(TARGET_NAMES) == set(TARGETS)


def test_a_data_set_is_read_by_datasets(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    exported = export_results("dataset", folder, tmp_path / "out", OPTIONS)
    assert [path.name for path in exported.files] == ["results.parquet", "cases.parquet", "README.md"]
    read = {}
    for name, table in (("results", load_results(folder)), ("cases", load_cases(folder, require_samples=False))):
        cache = str(tmp_path / "cache")
        read[name] = datasets.load_dataset(str(tmp_path / "out"), name, split="train", cache_dir=cache)
        assert read[name].column_names == list(table) and read[name].num_rows == len(table) > 0
        assert all(list(read[name][column]) == list(table[column]) for column in ("run", "task", "metric"))
        values = [math.nan if value is None else value for value in read[name]["value"]]
        assert values == pytest.approx(list(table["value"]), nan_ok=True)
    assert {text for text in read["cases"]["reason"] if text} == {f"edit failed: {why}" for why in (HOSTILE, "no edit")}
    assert {"layers": [5], "num_steps": 20} in [json.loads(text or "{}") for text in read["results"]["editor_config"]]


def test_csv_holds_the_tables(folder: Path, tmp_path: Path) -> None:
    exported = export_results("csv", folder, tmp_path / "out", OPTIONS)
    assert [path.name for path in exported.files] == ["results.csv", "cases.csv"]
    with exported.files[0].open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    results = load_results(folder)
    assert [row["metric"] for row in rows] == list(results["metric"])
    for row, value in zip(rows, results["value"], strict=True):
        assert (math.nan if row["value"] == "" else float(row["value"])) == pytest.approx(value, nan_ok=True)
    with exported.files[1].open(encoding="utf-8", newline="") as file:
        cells = [cell for row in csv.reader(file) for cell in row]
    assert not [cell for cell in cells if cell.startswith(("=", "@", "+"))]


def test_formulas_are_disarmed(tmp_path: Path) -> None:
    path = write_run(tmp_path, model_args={"pretrained": "=1+1"})
    (exported, _) = export_results("csv", path, tmp_path / "out", OPTIONS).files
    assert ",'=1+1," in exported.read_text(encoding="utf-8")


def test_inspect_reads_its_logs(folder: Path, tmp_path: Path) -> None:
    inspect_log = pytest.importorskip("inspect_ai.log", reason="needs the extra inspect")
    exported = export_results("inspect", folder, tmp_path / "out", OPTIONS)
    logs = {log.eval.task: log for log in (inspect_log.read_eval_log(str(path)) for path in exported.files)}
    assert len(inspect_log.list_eval_logs(str(tmp_path / "out"))) == len(logs) == 2
    assert {log.eval.model.rpartition("/")[2] for log in logs.values()} == {"r_rome", "unedited"}, (
        "one model per editor"
    )
    log = logs["bake_es"]
    row = next(row for row in load_results(folder).to_dict("records") if row["metric"] == "efficacy_prob")
    (score,) = [score for score in log.results.scores if score.name == "efficacy_prob,none"]
    assert score.metrics["value"].value == row["value"]
    assert (score.metadata["n"], score.metadata["failed"], score.metadata["or_0"]) == (2, 2, row["or_0"])
    assert (log.status, len(log.samples), log.eval.metadata["editor"]) == ("success", 4, "r_rome")
    cases = load_cases(folder)
    for sample, (_, case) in zip(log.samples, cases[cases["metric"] == "efficacy_prob"].iterrows(), strict=True):
        if math.isnan(case["value"]):
            assert "efficacy_prob,none" not in sample.scores and sample.metadata["unscored"]["efficacy_prob,none"]
        else:
            assert sample.scores["efficacy_prob,none"].value == case["value"]
    assert log.samples[0].messages[1].content.startswith("(no answer: ")
    assert log.samples[2].messages[1].content.startswith("log P('")
    generated = logs["qaedit_wild_reliability"].samples[0]
    assert generated.messages[1].content == " Port Elna" and generated.input.startswith("Edit: ")
    assert "[unedited model]" in generated.messages[-1].content


def test_inspect_shows_compared_states(tmp_path: Path) -> None:
    """Answers of EVK-Bench are cosines: neither texts nor log-probabilities."""
    inspect_log = pytest.importorskip("inspect_ai.log", reason="needs the extra inspect")
    results = scripted_results("counterfact_evk_ts")
    for sample in results["samples"]["counterfact_evk_ts"]:
        sample["resps"] = [[replace(answers[0], final=StateSimilarity(cosine=0.8125))] for answers in sample["resps"]]
    path = write_run(tmp_path / "run", "counterfact_evk_ts", results=results)
    exported = export_results("inspect", path, tmp_path / "out", OPTIONS)
    (log,) = (inspect_log.read_eval_log(str(file)) for file in exported.files)
    assert log.samples[0].messages[1].content == "edited and unedited model: cosine=0.8125"


def first_answer(context: str, unedited: bool) -> str:
    return " Orsa Lind."


def record_of(exported: Any, benchmark: str) -> dict[str, Any]:
    (path,) = [path for path in exported.files if path.parts[-4] == benchmark and path.suffix == ".json"]
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def test_every_eval_ever_records(folder: Path, tmp_path: Path) -> None:
    exported = export_results("every-eval-ever", folder, tmp_path / "out", OPTIONS)
    schema = json.loads((TESTS / "data/every_eval_ever-0.3.0.json").read_text(encoding="utf-8"))
    for path in [path for path in exported.files if path.suffix == ".json"]:
        jsonschema.Draft7Validator(schema).validate(json.loads(path.read_text(encoding="utf-8")))
    record = record_of(exported, "bake")
    assert record["model_info"]["id"].startswith("org/r_rome__single__"), "not filed as the base model"
    assert record["model_info"]["additional_details"]["base_model"] == "org/tiny"
    result = next(one for one in record["evaluation_results"] if one["metric_config"]["metric_name"] == "efficacy_prob")
    row = next(row for row in load_results(folder).to_dict("records") if row["metric"] == "efficacy_prob")
    assert result["score_details"]["score"] == row["value"]
    assert result["score_details"]["uncertainty"]["num_samples"] == 2
    assert result["metric_config"]["additional_details"]["failed"] == "2.0"
    assert (result["metric_config"]["min_score"], result["metric_config"]["max_score"]) == (0, 1)
    unedited = record_of(exported, "qaedit")
    assert unedited["model_info"]["id"] == "org/tiny" == unedited["model_info"]["name"]


# The fields of instance_level_eval_0.2.2 that single questions have, stated by hand.
TEXT = {"type": "string"}
INSTANCE_FIELDS = {
    "schema_version": TEXT,
    "evaluation_id": TEXT,
    "model_id": TEXT,
    "evaluation_name": TEXT,
    "evaluation_result_id": TEXT,
    "sample_id": TEXT,
    "sample_hash": TEXT,
    "interaction_type": {"const": "single_turn"},
    "input": {
        "type": "object",
        "required": ["raw", "reference"],
        "properties": {"raw": TEXT, "reference": {"type": "array", "items": TEXT}},
    },
    "output": {"type": "object", "required": ["raw"], "properties": {"raw": {"type": "array", "items": TEXT}}},
    "answer_attribution": {"type": "array"},
    "evaluation": {
        "type": "object",
        "required": ["score", "is_correct"],
        "properties": {"score": {"type": "number"}, "is_correct": {"type": "boolean"}},
    },
    "metadata": {"type": "object", "additionalProperties": TEXT},
}
INSTANCE = {
    "type": "object",
    "additionalProperties": False,
    "required": sorted({*INSTANCE_FIELDS} - {"evaluation_result_id", "sample_hash", "metadata"}),
    "properties": INSTANCE_FIELDS,
}


def test_every_eval_ever_instances(folder: Path, tmp_path: Path) -> None:
    """Two of four cases failed: their shares have two records each, which are the scores of the cases."""
    exported = export_results("every-eval-ever", folder, tmp_path / "out", OPTIONS)
    (beside,) = [path for path in exported.files if path.suffix == ".jsonl" and path.parts[-4] == "bake"]
    record = record_of(exported, "bake")
    lines = beside.read_text(encoding="utf-8").split("\n")[:-1]
    instances = [json.loads(line) for line in lines]
    for one in instances:
        jsonschema.Draft7Validator(INSTANCE).validate(one)
    about = record["detailed_evaluation_results"]
    assert about["file_path"] == beside.relative_to(tmp_path / "out").as_posix()
    assert (about["checksum"], about["total_rows"]) == (hashlib.sha256(beside.read_bytes()).hexdigest(), len(lines))
    assert {one["evaluation_id"] for one in instances} == {record["evaluation_id"]}
    assert {one["model_id"] for one in instances} == {record["model_info"]["id"]}
    results = {one["evaluation_result_id"]: one for one in record["evaluation_results"]}
    of_es = [one for one in instances if one["metadata"]["metric"] == "efficacy_prob"]
    score = results[of_es[0]["evaluation_result_id"]]["score_details"]["score"]
    assert len(of_es) == 2 and sum(one["evaluation"]["score"] for one in of_es) / 2 == score
    assert all(one["evaluation"]["is_correct"] is (one["evaluation"]["score"] == 1) for one in instances)
    assert of_es[0]["output"]["raw"][0].startswith("log P(")
    assert {*results} >= {one["evaluation_result_id"] for one in instances}
    assert any("no share of successes" in reason for reason in exported.left_out)


def test_unscored_results_are_left_out_and_counted(tmp_path: Path) -> None:
    errors = tuple((str(number), "no edit") for number in range(4))
    path = write_run(tmp_path, results=scripted_results(errors=errors))
    exported = export_results("every-eval-ever", path, tmp_path / "out", OPTIONS)
    assert exported.files == [] and exported.left_out == {"unscored": len(load_results(path))}


def test_every_eval_ever_own_validator(folder: Path, tmp_path: Path) -> None:
    validator = shutil.which("every_eval_ever")
    if validator is None:
        pytest.skip("every_eval_ever (Python 3.12) is not installed")
    files = export_results("every-eval-ever", folder, tmp_path / "out", OPTIONS).files
    done = subprocess.run([validator, "validate", *map(str, files)], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "0 warning-only, 0 failed" in done.stdout, done.stdout


def to_hub(content: dict[str, Any]) -> None:
    source = content["configs"]["bake_es"]["metadata"]["data_source"]
    source |= {"data": "hub", "hub_id": "jym7/BAKE", "commit": "c" * 40}


def test_hugging_face_reads_its_entries(tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    path = write_run(tmp_path / "a")
    change(path, to_hub)
    options = ExportOptions(source_url="https://example.org/results")
    (file,) = export_results("hf", path, tmp_path / "out", options).files
    assert file.parent.name == ".eval_results" and file.name == "bake.yaml"
    entries = hub.parse_eval_result_entries(yaml.safe_load(file.read_text(encoding="utf-8")))
    rows = load_results(path).to_dict("records")
    assert [entry.value for entry in entries] == [row["value"] for row in rows]
    first = entries[0]
    assert (first.dataset_id, first.task_id) == ("jym7/BAKE", f"bake_es/{rows[0]['metric']}")
    assert (first.dataset_revision, first.source_url) == ("c" * 40, "https://example.org/results")
    assert first.notes.startswith("editor r_rome; mode single; settings ") and "n 4" in first.notes


def test_hugging_face_keeps_runs_of_one_name_and_filters_of_one_metric_apart(tmp_path: Path) -> None:
    paths = [
        write_run(tmp_path / name, model_identity={"weights": part * 32}) for name, part in (("a", "ab"), ("b", "cd"))
    ]

    def with_second_filter(content: dict[str, Any]) -> None:
        to_hub(content)
        content["results"]["bake_es"] |= {"efficacy_prob,strict": 0.25, "efficacy_prob_n,strict": 4}
        content["config"]["limit"] = 4

    for path in paths:
        change(path, with_second_filter)
    assert load_results(paths)["run_name"].nunique() == 1 and load_results(paths)["run"].nunique() == 2
    files = export_results("hf", paths, tmp_path / "out", OPTIONS).files
    assert len({file.parent.parent.name for file in files}) == len(files) == 2
    for file in files:
        entries = yaml.safe_load(file.read_text(encoding="utf-8"))
        tasks = [entry["dataset"]["task_id"] for entry in entries]
        assert {"bake_es/efficacy_prob,none", "bake_es/efficacy_prob,strict", "bake_es/efficacy_argmax"} <= set(tasks)
        assert len(set(tasks)) == len(tasks) and all("limit 4" in entry["notes"] for entry in entries)


def test_embedded_samples_are_no_dataset_of_the_hub(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(EditingError, match=r"no result is on a dataset of the hub.*data=hub"):
        export_results("hf", folder, tmp_path / "out", OPTIONS)


def test_bad_targets_and_folders(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(EditingError, match=r"unknown target 'inspct'\. Did you mean 'inspect'\?"):
        export_results("inspct", folder, tmp_path / "out", OPTIONS)
    (tmp_path / "file").write_text("x")
    with pytest.raises(EditingError, match="not empty"):
        export_results("csv", folder, tmp_path, OPTIONS)


def test_verdicts_of_two_judges_are_two_results(tmp_path: Path) -> None:
    judged_run(tmp_path / "runs", "J1", 0, (1.0, 1.0, 0.0, 0.0))
    judged_run(tmp_path / "runs", "J2", 1, (0.0, 1.0, 1.0, 1.0))
    exported = export_results("every-eval-ever", tmp_path / "runs", tmp_path / "out", OPTIONS)
    (record,) = [json.loads(path.read_text(encoding="utf-8")) for path in exported.files if path.suffix == ".json"]
    scores = {one["evaluation_result_id"]: one["score_details"]["score"] for one in record["evaluation_results"]}
    assert len(scores) == len(record["evaluation_results"])
    assert sorted(value for name, value in scores.items() if "/judge=" in name) == [0.5, 0.75]
    (path,) = [path for path in exported.files if path.suffix == ".jsonl"]
    cases = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    keys = [(case["evaluation_result_id"], case["sample_id"]) for case in cases]
    assert len(set(keys)) == len(keys)


def test_two_protocols_of_one_run_are_two_results_with_their_own_cases(tmp_path: Path) -> None:
    """A chat template is not part of the run; in the second file one of four answers is right."""
    for number, results in enumerate((None, scripted_results("qaedit_wild_reliability", texts=first_answer))):
        path = write_run(
            tmp_path / "runs" / str(number), "qaedit_wild_reliability", results=results, start=1.79e9 + number,
            date=f"2026-11-2{number}T10-00-00.000001",
        )  # fmt: skip
        change(path, lambda content, sha=f"1234{number}": content.update(chat_template_sha=sha))
    assert load_results(tmp_path / "runs")["run"].nunique() == 1
    exported = export_results("every-eval-ever", tmp_path / "runs", tmp_path / "out", OPTIONS)
    record = record_of(exported, "qaedit")
    results_by_id = {one["evaluation_result_id"]: one for one in record["evaluation_results"]}
    assert len(results_by_id) == len(record["evaluation_results"])
    assert all(re.search(r"/protocol=[0-9a-f]{8}$", name) for name in results_by_id)
    (path,) = [path for path in exported.files if path.suffix == ".jsonl"]
    cases: dict[str, list[float]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        case = json.loads(line)
        cases.setdefault(case["evaluation_result_id"], []).append(case["evaluation"]["score"])
    of_em = {name: scores for name, scores in cases.items() if "/efficacy_wild_em/" in name}
    assert sorted(map(len, of_em.values())) == [4, 4]
    for name, scores in of_em.items():
        assert sum(scores) / 4 == results_by_id[name]["score_details"]["score"]
    assert sorted(of_em.values()) == [[0, 0, 0, 0], [1, 0, 0, 0]]


def test_ids_of_every_eval_ever_name_what_differs_only(folder: Path, tmp_path: Path) -> None:
    record = record_of(export_results("every-eval-ever", folder, tmp_path / "out", OPTIONS), "bake")
    assert not any("protocol=" in one["evaluation_result_id"] for one in record["evaluation_results"])


@pytest.mark.parametrize("differing", ["judge", "protocol"])
def test_hugging_face_has_one_value_per_task(differing: str, tmp_path: Path) -> None:
    """The dataset defines the ids of tasks, so two results of one cannot have ids of their own."""

    def published(content: dict[str, Any]) -> None:
        source = content["configs"]["qaedit_wild_reliability"]["metadata"]["data_source"]
        source |= {"data": "hub", "hub_id": "org/QAEdit", "commit": "c" * 40}

    paths = []
    for number, judge in enumerate(("J1", "J2" if differing == "judge" else "J1")):
        paths.append(judged_run(tmp_path / str(number), judge, number, (1.0, 1.0, 0.0, number)))
        change(paths[-1], published)
    if differing == "protocol":
        change(paths[1], lambda content: content.update(chat_template_sha="12345"))
    with pytest.raises(EditingError) as raised:
        export_results("hf", paths, tmp_path / "both", OPTIONS)
    message = str(raised.value)
    assert f"with different {differing}: in {paths[0]} and in {paths[1]}" in message
    assert "two results of qaedit_wild_reliability/" in message and not (tmp_path / "both").exists()
    for number, path in enumerate(paths):
        (file,) = export_results("hf", path, tmp_path / f"out{number}", OPTIONS).files
        entries = yaml.safe_load(file.read_text(encoding="utf-8"))
        tasks = [entry["dataset"]["task_id"] for entry in entries]
        assert len(set(tasks)) == len(tasks) and "qaedit_wild_reliability/efficacy_wild_judge" in tasks


def test_a_difference_of_shares_may_be_negative(tmp_path: Path) -> None:
    results = scripted_results("bake_es")
    results["results"]["bake_es"] |= {"efficacy_prob@unedited,none": 0.75, "efficacy_prob@difference,none": -0.25}
    write_run(tmp_path / "runs", results=results)
    exported = export_results("every-eval-ever", tmp_path / "runs", tmp_path / "out", OPTIONS)
    record = json.loads(next(path for path in exported.files if path.suffix == ".json").read_text(encoding="utf-8"))
    configs = {one["metric_config"]["metric_name"]: one["metric_config"] for one in record["evaluation_results"]}
    limits = {
        name: (one["min_score"], one["max_score"]) for name, one in configs.items() if name.startswith("efficacy_prob")
    }
    assert limits == {"efficacy_prob": (0, 1), "efficacy_prob@unedited": (0, 1), "efficacy_prob@difference": (-1, 1)}
