"""What a run says about itself is true: the banner and the record of the data."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import write_requests
from lm_runs import FAST, run
from paths import RECORDS
from scripted import ScriptedLM
from task_runs import metrics_of
from task_runs import run as run_scripted

from edit_hooks.lm.model import EditedHFLM

OWN_DATA = str(RECORDS / "bake_qa.jsonl")


@pytest.fixture
def demo(
    monkeypatch: pytest.MonkeyPatch, tiny_path: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> Callable[..., EditedHFLM]:
    """The class as in a demo, on a tiny model in the place of the embedded one."""
    monkeypatch.setattr("edit_hooks.lm.model.demo_model_path", lambda dtype: tiny_path("llama"))
    caplog.set_level(logging.INFO, logger="lm_eval.edited_hf")
    return lambda **options: EditedHFLM(editor_args=dict(FAST), store="off", device="cpu", **options)


def test_the_demo_banner_names_the_data_in_force(
    demo: Callable[..., EditedHFLM], caplog: pytest.LogCaptureFixture
) -> None:
    demo()
    assert "embedded model is used, and the embedded sample wherever no data are given" in caplog.text
    caplog.clear()
    demo(data=OWN_DATA)
    assert "embedded model is used" in caplog.text and f"data={OWN_DATA}" in caplog.text
    banner = [record.getMessage() for record in caplog.records if "lm-edit tune" not in record.getMessage()]
    assert not any("mini" in line or "embedded sample" in line for line in banner)


def test_a_stream_names_the_data_of_its_edits(
    demo: Callable[..., EditedHFLM], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    demo(mode="sequential", edits="bake", num_edits=1)
    assert "mode sequential; edits=bake, data=mini." in caplog.text
    caplog.clear()
    demo(mode="sequential", edits="bake", num_edits=1, data=OWN_DATA)
    assert f"mode sequential; edits=bake, data={OWN_DATA}." in caplog.text
    caplog.clear()
    requests = write_requests(tmp_path / "edits.jsonl")  # a file of edits is not data of a benchmark
    assert demo(mode="sequential", edits=str(requests)).edits_data is None
    assert f"mode sequential; edits={requests}." in caplog.text


def test_results_record_the_data_that_was_read(demo: Callable[..., EditedHFLM]) -> None:
    """`data` in --metadata reaches the tasks alone: the model's record must not state its own default for theirs."""
    lm = demo()
    results = run(lm, ["bake_es"], limit=1)  # the helper passes the data as --metadata does
    metadata = results["configs"]["bake_es"]["metadata"]
    assert metadata["data"] == metadata["data_source"]["data"] == OWN_DATA
    record = lm.get_model_info()["edited_hf"]
    assert record["data"] is None and record["edits_data"] is None
    stream = demo(mode="sequential", edits="bake", num_edits=1)
    results = run(stream, ["bake_es"], limit=1)
    record = stream.get_model_info()["edited_hf"]
    assert record["edits_data"] == "mini"  # other data than the task's, and it shows
    source = record["edits_source"]
    assert source["data"] == "mini" and len(source["sha256"]) == 64 and len(record["edits_digest"]) == 64
    assert results["results"]["bake_es"]["unscored,none"] == 1


def test_one_population_for_all_columns_by_selecting_rows() -> None:
    """The READMEs' way to the population of a published table: `--samples` with the rows, and the plain columns."""
    rows = {"qaedit_wild_reliability": [0, 2], "qaedit_syn_reliability": [0, 2]}
    for task, chosen in rows.items():
        found = metrics_of(run_scripted(task, ScriptedLM(), samples={task: chosen}), task)
        plain = "efficacy_wild_em" if "wild" in task else "efficacy_match"
        assert found[f"{plain}_n"] == len(chosen)
