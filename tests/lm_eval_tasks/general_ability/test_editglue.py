"""EditGLUE: rows, prompts, reading of answers, and scores by hand."""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import lm_eval.tasks
import pytest
import yaml
from lm_eval.tasks import TaskManager
from lm_runs import build, run
from paths import REAL_DATA, RECORDS
from result_files import change, write_run
from task_managers import task_manager
from task_runs import FOLDER, manager, metrics_of

import lm_eval_editing_autoload
from edit_hooks import EditingError
from edit_hooks.answers import LoglikelihoodPair
from edit_hooks.contract.tiny_models import save_tiny
from lm_edit.results.checking.check import check_results
from lm_edit.sweeps.planning.plan import load_plan, shipped_plans
from lm_eval_tasks.general_ability import editglue
from lm_eval_tasks.general_ability.editglue import COLA, MMLU, MRPC, NLI, RTE, RTE_INVERTED, SST2
from lm_eval_tasks.general_ability.rows import RowSource
from lm_eval_tasks.general_ability.scores import matthews, weighted_f1

lm_eval_editing_autoload.install()

BY_NAME = {"sst2": SST2, "mrpc": MRPC, "cola": COLA, "rte": RTE, "nli": NLI, "mmlu": MMLU}
GLUE = REAL_DATA / "glue"


# ------------------------------------------------------------------ scores by hand


def test_weighted_f1_counts_an_answer_without_a_label_as_a_miss() -> None:
    # Right 1: answered 1, 1, none; right 0: answered 0, 1. F1 of 1: precision 2/3, recall 2/3 -> 2/3; of 0: precision
    # 1, recall 1/2 -> 2/3. Weights 3/5 and 2/5.
    assert weighted_f1([(1, 1), (1, 1), (1, -1), (0, 0), (0, 1)]) == pytest.approx(2 / 3)
    # Without the miss, class 1 has precision 2/3 and recall 1: F1 4/5; (2 * 4/5 + 2 * 2/3) / 4 = 11/15.
    assert weighted_f1([(1, 1), (1, 1), (0, 0), (0, 1)]) == pytest.approx(11 / 15)
    assert weighted_f1([(1, -1), (0, -1)]) == 0.0 and weighted_f1([(1, 1), (0, 0)]) == 1.0
    assert weighted_f1([(1, 1), (0, None)]) is None


def test_matthews_by_hand() -> None:
    # TP 2, FN 1, TN 1, FP 1: (2 * 1 - 1 * 1) / sqrt(3 * 3 * 2 * 2) = 1/6.
    assert matthews([(1, 1), (1, 1), (1, 0), (0, 0), (0, 1)]) == pytest.approx(1 / 6)
    assert matthews([(1, 0), (0, 1)]) == -1.0 and matthews([(1, 1), (0, 1)]) == 0.0
    assert matthews([(1, None)]) is None


def test_labels_are_compared_by_their_mean_over_tokens() -> None:
    one, other = LoglikelihoodPair(-3.0, False, 1), LoglikelihoodPair(-4.0, False, 2)
    assert SST2.likeliest([one, other]) == 1  # -3 against -2 per token
    assert SST2.likeliest([one, one]) == 0 and MMLU.likeliest([one] * 4) == -1  # a tie, as released
    assert SST2.likeliest([LoglikelihoodPair(-9e5, False, 1), LoglikelihoodPair(-8e5, False, 1)]) == 0  # both underflow
    assert SST2.likeliest([(-3.0, False), (-2.0, False)]) is None  # a model class without token counts


@pytest.mark.parametrize(
    ("task", "text", "label"),
    [
        (SST2, " Positive.", 1),
        (SST2, " not positive, negative", 1),  # the order of the search
        (SST2, " negative\nSentiment : positive", 1),  # after the last marker
        (SST2, " good", -1),
        (MRPC, " No, yes", 1),
        (COLA, "Not sure", 0),  # contains "no"
        (COLA, "maybe", -1),
        (RTE, " True or False", 0),
        (NLI, " True or False", 1),
        (RTE, "?", -1),
        (MMLU, " B\nWhy", 1),
        (MMLU, " B", -1),  # a line break is needed
        (MMLU, " plasma\n", 0),  # a word that ends in the letter counts, as released
        (MMLU, " (C)\n", -1),
    ],
)
def test_answers_are_read_as_released(task: editglue.LabelTask, text: str, label: int) -> None:
    assert task.read_answer(text) == label


def test_the_inverted_labels_are_those_of_the_release() -> None:
    entailed = {"sentence1": "a", "sentence2": "b", "label": 0}
    assert (RTE.gold(entailed), RTE_INVERTED.gold(entailed), NLI.gold(entailed)) == (1, 0, 1)
    assert NLI.gold({"label": "entailment"}) == 1 and NLI.gold({"label": "not_entailment"}) == 0
    assert RTE.gold({"label": 1}) == 0 == NLI.gold({"label": 1})


def test_prompts_are_those_of_the_release() -> None:
    row = {"sentence": "fine .", "sentence1": "S.", "sentence2": "T.", "question": "Q?", "choices": list("wxyz")}
    assert SST2.prompt(row) == "Review :fine .\nSentiment :"
    assert MRPC.prompt(row) == "Are the sentences paraphrases of each other.\nSentence 1: S.\nSentence 2: T.\nAnswer:"
    assert COLA.prompt(row) == "Is this sentence linguistically acceptable?\nSentence: fine .\nAnswer: "
    assert RTE.prompt(row) == "S.\nquestion: T. True or False?\nanswer:"
    assert NLI.prompt(row) == "S. entails the T. True or False? Answer:"
    assert MMLU.prompt(row) == "Question: Q?\n(A) w\n(B) x\n(C) y\n(D) z\nAnswer:"


# ------------------------------------------------------------------ rows


@pytest.mark.parametrize("name", BY_NAME)
def test_samples_are_balanced(name: str) -> None:
    rows, origin = BY_NAME[name].source.load({"data": "mini"})
    counts = Counter(map(BY_NAME[name].gold, rows))
    assert len(rows) == origin["records"] >= 12 and len(set(counts.values())) == 1
    assert len(counts) == len(BY_NAME[name].labels)


@pytest.mark.realdata
@pytest.mark.skipif(not GLUE.is_dir(), reason=f"needs the rows of the release in {GLUE}")
@pytest.mark.parametrize("name", BY_NAME)
def test_rows_of_the_release_are_found_in_any_order(name: str, tmp_path: Path) -> None:
    with (GLUE / f"{name}.jsonl").open(encoding="utf-8") as file:
        released = [json.loads(line) for line in file]
    task = BY_NAME[name]
    assert task.source.load({"data": str(GLUE)})[0] == task.source.select(released[::-1], "x") == released[10:110]
    assert len(set(Counter(map(task.gold, released[10:110])).values())) == 1


def test_a_row_that_is_missing_or_differs_is_an_error() -> None:
    number = json.loads((FOLDER / "general_ability/data/rows.json").read_text(encoding="utf-8"))["sst2"][0][0]
    with pytest.raises(EditingError, match=f"row {number} of nyu-mll/glue sst2 .validation. is missing"):
        SST2.source.select([], "here")
    with pytest.raises(EditingError, match=f"row {number} .* has another text"):
        SST2.source.select([{"sentence": "something else", "label": 1, "idx": number}], "here")


def test_data_that_is_not_there_names_the_ways_out(tmp_path: Path) -> None:
    for data, reason in ((str(tmp_path), "there is no sst2.jsonl"), ("hub", "cannot be reached")):
        with pytest.raises(EditingError, match=f"{reason}(.|\n)*data=mini"):
            SST2.source.load({"data": data, "pretrained": "x"})


# ------------------------------------------------------------------ data of the benchmark that is edited


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """No hub: its rows are the sample. The revisions that are asked for."""
    asked: list[str] = []
    monkeypatch.setattr(RowSource, "_download", lambda self, revision: asked.append(revision) or [])
    monkeypatch.setattr(RowSource, "select", lambda self, rows, where: self.load({"data": "mini"})[0])
    return asked


def test_the_tasks_of_the_plan_read_their_rows_beside_the_set_of_the_edits(published, caplog) -> None:
    plan = load_plan(shipped_plans()["evk_figure3"])
    (benchmark,) = plan.benchmarks
    options = {"pretrained": plan.models[0].args["pretrained"], **plan.model_args, "edits": benchmark.edits}
    assert options["data"] == "hub:multi"
    loaded = task_manager({**options, "data_revision": "0123abc"}).load(list(benchmark.tasks))["tasks"]
    assert len(loaded) == 7
    for task in loaded.values():
        source = task.config.metadata["data_source"]
        assert (source["data"], source["revision"]) == ("hub", "main") and source["records"] >= 12
    assert set(published) == {"main"}
    assert "data=hub:multi is a set of CounterFact; EditGLUE (sst2) uses data=hub." in caplog.text


def test_a_revision_beside_edits_of_a_benchmark_is_not_that_of_the_rows(published, caplog) -> None:
    options = {"data": "hub", "data_revision": "0123abc"}
    assert SST2.source.load({**options, "edits": "bake"})[1]["revision"] == "main"
    assert "data_revision=0123abc is that of the data of edits=bake; EditGLUE (sst2) reads revision main" in caplog.text
    assert SST2.source.load(options)[1]["revision"] == "0123abc"


def test_a_set_or_file_of_another_benchmark_is_none_of_these_rows(tmp_path, caplog) -> None:
    rows = (RECORDS / "bake_qa.jsonl").read_text(encoding="utf-8")
    for name, reason in {
        "QAEdit_inter_1k.json": "is the file of QAEdit",
        "my_facts.jsonl": "has no row with sentence",
        "mmlu.jsonl": "is the file of another task",
    }.items():
        (tmp_path / name).write_text(rows, encoding="utf-8")
        assert SST2.source.load({"data": str(tmp_path / name)})[1]["data"] == "mini"
        assert f"{name} {reason}; EditGLUE (sst2) uses data=mini." in caplog.text
    assert SST2.source.load({"data": "mini:held_out", "pretrained": "x"})[1]["data"] == "mini"
    with pytest.raises(EditingError, match="data=hub:mutli: no benchmark has a set 'mutli'"):
        SST2.source.load({"data": "hub:mutli"})


def test_own_rows_are_read_under_any_name(tmp_path) -> None:
    number = json.loads((FOLDER / "general_ability/data/rows.json").read_text(encoding="utf-8"))["sst2"][0][0]
    for name in ("sst2.jsonl", "copy.jsonl"):
        (tmp_path / name).write_text(json.dumps({"sentence": "other", "label": 1, "idx": number}), encoding="utf-8")
        with pytest.raises(EditingError, match=f"row {number} of nyu-mll/glue .* has another text"):
            SST2.source.load({"data": str(tmp_path / name)})


def test_rows_that_are_missing_end_a_run_before_the_model_loads(model_path, tmp_path) -> None:
    lm = build(model_path, mode="none", data=str(tmp_path))
    with pytest.raises(EditingError, match=r"there is no sst2[.]jsonl"):
        run(lm, ["editglue_sst2"], settings={"data": str(tmp_path)})
    assert lm._model is None


def test_settings_of_a_benchmark_beside_it_are_no_surprise(caplog) -> None:
    task_manager({"data": "mini", "counterfact_set": "multi", "population": "wrong_em"}).load(["editglue_sst2"])
    assert "belongs to no editing task" not in caplog.text


# ------------------------------------------------------------------ through lm-eval


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("tiny"), "llama"))


@pytest.fixture(scope="module")
def results(model_path) -> dict[str, Any]:
    options = {"mode": "sequential", "edits": "bake", "num_edits": 1, "data": str(RECORDS / "bake_qa.jsonl")}
    settings = {"layers": [1], "num_steps": 10, "lr": 0.5}
    lm = build(model_path, editor="ft_m", editor_args=settings, compare_unedited=True, **options)
    return run(lm, ["editglue"], settings={"data": "mini"}, limit=6)


def test_every_row_is_scored_on_both_models(results) -> None:
    for name in [*BY_NAME, "rte_inverted"]:
        task = f"editglue_{name}"
        found, samples = metrics_of(results, task), results["samples"][task]
        assert found["correct"] + found["incorrect"] + found["invalid"] == len(samples) == 6
        assert found["unscored_reason"] == "{}"
        assert found["f1"] == weighted_f1([sample["f1"] for sample in samples])
        for metric in ("f1", "f1_new", "mcc", "correct", "incorrect", "invalid"):
            assert found[f"{metric}@difference"] == found[metric] - found[f"{metric}@unedited"]
            assert math.isfinite(found[f"{metric}@difference_stderr"])
    assert results["unedited_comparison"]["not_compared"] == {}


def test_counts_of_both_models_are_checked_against_the_samples(results, tmp_path) -> None:
    path = write_run(tmp_path, results=copy.deepcopy(results))
    assert check_results(path).problems == []

    def shift(content: dict[str, Any]) -> None:
        for name in ("correct@unedited", "invalid@difference"):
            content["results"]["editglue_rte"][f"{name},none"] += 1

    change(path, shift)
    problems = [problem.text for problem in check_results(path).problems]
    assert len(problems) == 2 and problems[0].startswith("editglue_rte, correct@unedited: the result is ")
    assert "invalid@difference: the result is " in problems[1]


def test_the_request_cache_of_lm_eval_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    """Its key has neither the data nor the settings, so it would ask the prompts of another data set."""
    task = task_manager({"data": "mini"}).load(["editglue_rte"])["tasks"]["editglue_rte"]
    with caplog.at_level("WARNING"):
        task.build_all_requests(limit=1, cache_requests=True)
    assert "--cache_requests is ignored" in caplog.text and task.instances


def test_inverted_labels_mirror_the_right_ones(results) -> None:
    right, inverted = (metrics_of(results, f"editglue_{name}") for name in ("rte", "rte_inverted"))
    assert (right["correct"], right["incorrect"]) == (inverted["incorrect"], inverted["correct"])
    assert right["mcc"] == pytest.approx(-inverted["mcc"]) or right["invalid"]
    assert not results["higher_is_better"]["editglue_rte_inverted"]["f1"]


def test_groups_exist_and_name_tasks_of_lm_eval() -> None:
    assert {"editglue", "general_ability"} <= set(manager("bake_es").all_groups)
    folders = [Path(lm_eval.tasks.__file__).parent / name for name in ("mmlu", "ifeval", "arc", "truthfulqa", "gsm8k")]
    known = TaskManager(include_path=list(map(str, folders)), include_defaults=False).task_index
    listed = tasks_in("_general_ability.yaml")
    assert len(listed) == 5 and set(listed) <= set(known)
    assert sorted(tasks_in("_editglue.yaml")) == sorted(f"editglue_{name}" for name in [*BY_NAME, "rte_inverted"])


def tasks_in(name: str) -> list[str]:
    return yaml.safe_load((FOLDER / "general_ability" / name).read_text(encoding="utf-8"))["task"]
