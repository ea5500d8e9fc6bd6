"""Subsets and published sets through the model class and the tasks: both see the same cases in the same order."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lm_runs import build, run
from paths import RECORDS
from record_files import published_data
from task_runs import metrics_of

from edit_hooks.utils.errors import EditingError
from lm_edit.cli.command import data_settings
from lm_edit.cli.main import build_parser, main
from lm_eval_tasks.common.records.benchmark import all_benchmarks, load_edit_requests
from lm_eval_tasks.common.settings import model_parameters
from lm_eval_tasks.qaedit.benchmark import QAEDIT

DATA = str(RECORDS / "bake_qa.jsonl")
SUBSET = {"subset": 3, "subset_seed": 5}
ROWS = ["2", "1", "0"]  # sha256sum of "5:0" to "5:3" in ascending order: rows 2, 1, 0, 3


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LM_EDIT_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def test_the_order_of_the_rows_is_that_of_their_digests() -> None:
    assert sorted("0123", key=lambda row: hashlib.sha256(f"5:{row}".encode()).hexdigest()) == [*ROWS, "3"]


def test_a_stream_makes_the_edits_of_the_subset_in_the_order_of_the_tasks(tiny_path: Callable[..., Path]) -> None:
    options = {"mode": "sequential", "edits": "bake", "editor": "ft_l", "editor_args": {"num_steps": 1}, "data": DATA}
    lm = build(str(tiny_path("gpt2")), **options, **SUBSET)
    assert [request.case_id for group in lm.plan.groups for request in group] == ROWS
    results = run(lm, ["bake_es"], settings={"generate": False, "mode": "sequential", **SUBSET})
    samples = sorted(results["samples"]["bake_es"], key=lambda sample: sample["doc_id"])
    assert [sample["doc"]["edit_requests"][0]["case_id"] for sample in samples] == ROWS
    row = metrics_of(results, "bake_es")
    assert (row["efficacy_prob_n"], row["unscored"]) == (3, 0)
    source = results["configs"]["bake_es"]["metadata"]["data_source"]
    assert {"records": 3, "subset": 3, "subset_seed": 5, "subset_of": 4}.items() <= source.items()
    with pytest.raises(EditingError, match="num_edits=4, but bake has 3 edited cases"):
        build(str(tiny_path("gpt2")), **options, **SUBSET, num_edits=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"subset": 9}, r"subset=9, but BAKE-Q&J \(data=.*\) has 4 records"),
        ({"subset": "x"}, "subset .* is 'x'"),
        ({"bad_records": "skp"}, "Did you mean 'skip'"),
        ({"subset_sed": 3}, "unknown option of edited_hf 'subset_sed'. Did you mean 'subset_seed'"),
        ({"bake_set": "full"}, "unknown setting 'bake_set'"),
        ({"qaedit_st": "full"}, "unknown option of edited_hf 'qaedit_st'"),
        ({"qaedits_set": "full"}, "unknown setting 'qaedits_set'. Did you mean 'qaedit_set'"),
    ],
)
def test_mistakes_are_errors_before_loading(
    options: dict[str, Any], message: str, tiny_path: Callable[..., Path]
) -> None:
    with pytest.raises(EditingError, match=message):
        build(str(tiny_path("gpt2")), mode="batch", edits="bake", editor="memit", data=DATA, **options)


# ------------------------------------------------------------------ published sets


def test_a_set_is_chosen_by_data_or_by_the_setting_of_its_benchmark(
    offline: None, tiny_path: Callable[..., Path]
) -> None:
    named = r"QAEdit_inter_1k\.json is not in the cache"
    for settings in (
        {"data": "hub:inter_1k"},
        {"qaedit_set": "inter_1k"},
        {"qaedit_set": "inter_1k", "data": "hub"},
        {"qaedit_set": "inter_1k", "data": "hub:inter_1k"},
        {"qaedit_set": "inter_1k", "pretrained": "some/model"},
    ):
        with pytest.raises(EditingError, match=named):
            QAEDIT.load(settings)
    with pytest.raises(EditingError, match=r"QAEdit\.json of the Hugging Face dataset WenDingY/QAEdit"):
        QAEDIT.load({"qaedit_set": "full"})
    options = {"mode": "sequential", "edits": "qaedit", "editor": "memit", "qaedit_set": "inter_1k"}
    with pytest.raises(EditingError, match=named):
        build(str(tiny_path("gpt2")), **options)
    with pytest.raises(EditingError, match="qaedit_set=inter_1k means data=hub:inter_1k, but data=mini is given"):
        build(str(tiny_path("gpt2")), **options, data="mini")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"qaedit_set": "inter_2k"},
            r"'inter_2k' is unknown. Did you mean 'inter_1k'.*Accepted: full, inter_1k",
        ),
        ({"qaedit_set": 3}, "Accepted: full, inter_1k"),
        ({"qaedit_set": "full", "data": "hub:inter_1k"}, "means data=hub, but data=hub:inter_1k is given"),
        ({"qaedit_set": "full", "data": "/some/file.json"}, "means data=hub, but data=/some/file.json is given"),
    ],
)
def test_wrong_sets_are_errors(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(EditingError, match=message):
        QAEDIT.load(settings)


def test_every_benchmark_with_sets_has_a_setting_for_them_and_no_other() -> None:
    """Tasks of another benchmark in the same run accept the key, too."""
    benchmarks = {benchmark.name: benchmark for benchmark in all_benchmarks().values()}
    for name, benchmark in benchmarks.items():
        names = [setting.name for setting in benchmark.declared_settings]
        assert (f"{name}_set" in names) == bool(benchmark.source.sets)
    benchmarks["bake"].check_settings({"qaedit_set": "inter_1k"})
    assert not {name for name in model_parameters() if name.endswith("_set")}, "a set is never an option of the model"


@pytest.mark.realdata
def test_the_published_set_through_its_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LM_EDIT_CACHE", str(tmp_path))
    pinned = QAEDIT.source.sets["inter_1k"]
    content = (published_data() / "qaedit" / "QAEdit_inter_1k.json").read_bytes()
    assert not isinstance(pinned, Path)
    cached = tmp_path / "downloads" / hashlib.sha256(content).hexdigest()[:16] / "QAEdit_inter_1k.json"
    cached.parent.mkdir(parents=True)
    cached.write_bytes(content)
    settings = {"qaedit_set": "inter_1k", "subset": 100, "subset_seed": 0}
    loaded = QAEDIT.load(settings)
    assert (loaded.source["data"], loaded.source["records"], loaded.source["subset_of"]) == ("hub:inter_1k", 100, 1000)
    rows = sorted(range(1000), key=lambda row: hashlib.sha256(f"0:{row}".encode()).hexdigest())[:100]
    published = json.loads(content)
    assert [case.request.target_new for case in loaded.records] == [published[row]["target"].strip() for row in rows]
    assert [edit.key for (edit,) in load_edit_requests("qaedit", settings).cases] == [
        case.request.key for case in loaded.records
    ]


# ------------------------------------------------------------------ verbs

CHOSEN = ["--edits", "bake", "--data", DATA, "--subset", "3", "--subset-seed", "5"]
REST = {
    "edit": ["--editor", "ft_m", "--out", "new"],
    "tune": ["--editor", "ft_m", "--num-edits", "3"],
    "trace": [],
    "train": ["mend", "--out", "new"],
}


def test_verbs_take_the_same_subset(tiny_path: Callable[..., Path], tmp_path: Path) -> None:
    wanted = ROWS
    model = ["--pretrained", str(tiny_path("gpt2")), "--device", "cpu", "--store", "off"]
    settings = ["--editor", "ft_m", "--editor-args", "layers:[1];num_steps:1", "--out", str(tmp_path / "edits")]
    assert main(["edit", *model, *settings, *CHOSEN]) == 0
    written = json.loads((tmp_path / "edits" / "edits.json").read_text(encoding="utf-8"))["edits"]
    assert [edit["requests"][0]["case_id"] for edit in written] == wanted
    for verb in ("tune", "trace", "train"):
        args = build_parser().parse_args([verb, *REST[verb], *CHOSEN])
        assert data_settings(args) == {"data": DATA, **SUBSET}
        assert data_settings(build_parser().parse_args([verb, *REST[verb], *CHOSEN[:4], "--subset", "all"])) == {
            "data": DATA
        }


@pytest.mark.parametrize("verb", REST)
def test_a_file_of_requests_has_no_subset(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, *REST[verb], "--edits", "requests.jsonl", "--subset-seed", "1"]) == 2
    assert "for the records of a benchmark, but --edits requests.jsonl is a file" in capsys.readouterr().err
