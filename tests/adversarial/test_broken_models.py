"""A model whose logits are not finite: every answer is unscored with that reason, whatever asks and however."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_runs import answers, build, run
from ordinary_tasks import run_tasks, write_tasks
from paths import RECORDS
from saved_results import evaluate_here
from transformers import AutoModelForCausalLM, AutoTokenizer

import lm_eval_editing_autoload
from edit_hooks.answers import GeneratedText, is_broken
from edit_hooks.contract.tiny_models import save_tiny
from edit_hooks.deltas.delta import Delta, Factor
from edit_hooks.deltas.hook_edit import HookEdit
from edit_hooks.editors.rome import ROME
from edit_hooks.modeling.architectures import architecture_of, is_transposed, map_shape
from lm_edit.results.checking.check import check_results
from lm_edit.results.tables import load_cases, load_results
from lm_eval_tasks.common.asking.answers import NOT_FINITE
from lm_eval_tasks.common.scoring.columns import is_number, read_columns

lm_eval_editing_autoload.install()  # as the .pth file does in an installed environment

TASKS = ["bake_rq", "bake_es", "qaedit_wild"]
ORDINARY = ["tiny_group", "tiny_text", "tiny_perplexity", "tiny_macro"]
LARGE = 3e38  # in float32 finite, and twice as much is not


@pytest.fixture(scope="module")
def model_paths(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("tiny")
    return {family: str(save_tiny(folder / family, family)) for family in ("llama", "gpt2")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"))


def breaking_edit(model_path: str, kind: str) -> Delta:
    """An edit of finite numbers under which no logit is finite."""
    model = AutoModelForCausalLM.from_pretrained(model_path)
    name = architecture_of(model).rewrite_name(1)
    width_out, width_in = map_shape(module := model.get_submodule(name))
    if kind == "low-rank":  # the product overflows
        left, right = torch.full((width_out, 1), 1e20), torch.full((width_in, 1), 1e20)
        return Delta(factors={name: Factor(left, right, is_transposed(module))})
    if kind == "hooks":  # a value for every prompt
        tensors = {
            "keys": torch.zeros(1, width_in),
            "values": torch.full((1, width_out), LARGE),
            "radii": torch.tensor([1e10]),
            "index": torch.tensor([0]),
        }
        settings = {
            "module": name,
            "replacement": "replace_all",
            "query": "prefill",
            "num_before": 0,
            "num_edits": 1,
            "labels": [[1]],
        }
        return Delta(hook_edit=HookEdit("codebook", tensors, settings))
    size = 30_000.0 if kind == "half precision" else LARGE
    return Delta(dense={f"{name}.weight": torch.full_like(module.weight, size).detach()})


def loaded(model_path: str, folder: Path, kind: str, **options: Any) -> Any:
    """The model class with a breaking edit from a file."""
    breaking_edit(model_path, kind).save(folder / "edit.safetensors")
    return build(model_path, load_edit=str(folder / "edit.safetensors"), editor_args=None, **options)


KINDS = [
    ("llama", "low-rank", {}),
    ("llama", "low-rank", {"answer": "patch"}),
    ("llama", "low-rank", {"engine": "reference"}),
    ("llama", "dense", {}),
    ("gpt2", "hooks", {}),
    ("gpt2", "hooks", {"engine": "reference"}),
    ("llama", "half precision", {"dtype": "float16"}),
]


@pytest.mark.parametrize(("family", "kind", "options"), KINDS)
def test_no_column_of_the_edited_model_has_a_value(model_paths, tmp_path, family, kind, options):
    lm = loaded(model_paths[family], tmp_path, kind, **options)
    results = run(lm, ["bake_rq", "bake_es"], limit=2)
    generated = [answer.final for answer in answers(results) if isinstance(answer.final, GeneratedText)]
    assert len(generated) > 3 and all(not text.is_finite for text in generated)
    for task, row in results["results"].items():
        scored = {
            column
            for column in read_columns({key: value for key, value in row.items() if "," in key})
            if is_number(column.value) and not column.metric.endswith("_unedited")
        }
        assert not scored, (task, scored)
        assert "logits are not finite" in row["unscored_reason,none"] and row["unscored,none"] == 2
    unedited = [
        row["reverse_qa_logprob_new_unedited,none"]
        for row in results["results"].values()
        if "reverse_qa_prob,none" in row
    ]
    assert all(map(is_number, unedited)) and unedited


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_hidden_states_of_a_broken_model_are_unscored(model_paths, tmp_path, family):
    lm = loaded(model_paths[family], tmp_path, "low-rank")
    results = run(lm, ["counterfact_evk_es"], data="counterfact.jsonl", limit=2)
    row = results["results"]["counterfact_evk_es"]
    assert row["evk_es_all,none"] is None and "not finite" in row["unscored_reason,none"]


# -- lm-eval's own tasks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "kind"), [("llama", "dense"), ("gpt2", "hooks")])
def test_ordinary_tasks_under_a_breaking_edit_are_unscored(model_paths, folder, tmp_path, family, kind):
    """In the weights lm-eval's own class answers, under hooks this package's engine."""
    lm = loaded(model_paths[family], tmp_path, kind, compare_unedited=True)
    results = run_tasks(lm, folder, ORDINARY, {})
    for task in ("tiny_choice", "tiny_other_choice", "tiny_text", "tiny_perplexity", "tiny_macro"):
        row, samples = results["results"][task], results["samples"][task]
        assert json.loads(row["unscored_reason,none"]) == {NOT_FINITE: row["unscored,none"]}
        assert row["unscored,none"] == 5 == results["n-samples"][task]["effective"]
        metrics = [key for key in row if key.endswith("_n,none")]
        assert metrics and all(row[key] == 0 and row[key.replace("_n,", ",")] is None for key in metrics)
        assert not any("@" in key for key in row), "there is no difference of a value and none"
        assert all(NOT_FINITE in sample["unscored_reason"].values() for sample in samples)
        assert all(sample[metric] is None for sample in samples for metric in sample["metrics"])
    assert results["unedited_comparison"]["not_compared"]
    assert "acc,none" not in results["results"]["tiny_group"]


@pytest.fixture(scope="module")
def partly_broken(model_paths, tmp_path_factory) -> str:
    """A model that no prompt about Lake Odra leaves whole."""
    model = AutoModelForCausalLM.from_pretrained(model_paths["llama"])
    tokenizer = AutoTokenizer.from_pretrained(model_paths["llama"])
    others = ["Port Elna is the capital of", "The king of Ostravia was", "They walked to", "Velm is known for"]
    names = ["Dravonia", "Ostravia", "Velmaria", "Orlan", "Karsk", "market", "Velmar", "Karska", "bread", "ships"]
    known = {token for text in [*others, *(f"of {name}" for name in names)] for token in tokenizer(text).input_ids}
    token = next(token for token in tokenizer("Lake Odra lies in").input_ids if token not in known)
    model.get_input_embeddings().weight.data[token] = torch.nan
    path = tmp_path_factory.mktemp("partly")
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def test_only_the_documents_without_an_answer_are_left_out(model_paths, partly_broken, folder, caplog):
    broken = run_tasks(build(partly_broken, mode="none"), folder, ["tiny_other_choice"], {})
    whole = run_tasks(build(model_paths["llama"], mode="none"), folder, ["tiny_other_choice"], {})
    row, samples = broken["results"]["tiny_other_choice"], broken["samples"]["tiny_other_choice"]
    assert (row["unscored,none"], row["acc_n,none"], row["acc_failed,none"]) == (1, 4, 1)
    scored = [
        sample["acc"] for sample in whole["samples"]["tiny_other_choice"] if sample["doc"]["q"] != "Lake Odra lies in"
    ]
    assert row["acc,none"] == sum(scored) / 4
    (unscored,) = [sample for sample in samples if "unscored_reason" in sample]
    assert unscored["doc"]["q"] == "Lake Odra lies in" and unscored["unscored_reason"] == {"acc": NOT_FINITE}
    assert "2 of 12 answers to tasks without edits are missing" in caplog.text
    assert "unscored_reason,none" not in whole["results"]["tiny_other_choice"]


def test_of_a_batch_of_generations_the_broken_ones_are_found(partly_broken, folder):
    results = run_tasks(build(partly_broken, mode="none", batch_size=5), folder, ["tiny_text"], {}, num_fewshot=0)
    texts = [sample["resps"][0][0] for sample in results["samples"]["tiny_text"]]
    assert [is_broken(text) for text in texts] == [False, True, False, False, False]
    assert results["results"]["tiny_text"]["exact_match_n,none"] == 4


def test_saved_results_with_unscored_documents_are_read(partly_broken, folder, tmp_path):
    tasks = ["tiny_other_choice", "tiny_text"]
    evaluate_here(tmp_path, f"pretrained={partly_broken},mode=none,store=off", tasks, RECORDS / "bake_qa.jsonl", folder)
    assert check_results([tmp_path]).problems == []
    rows = load_results([tmp_path]).set_index("metric")
    assert rows.loc["acc", ["n", "failed", "coverage", "unscored"]].tolist() == [4, 1, 0.8, 1]
    cases = load_cases([tmp_path])
    missing = cases[cases["reason"] == NOT_FINITE]
    assert missing["doc_id"].tolist()[0] == 1 and missing["value"].isna().all() and missing["due"].all()


def test_a_comparison_is_over_the_documents_that_both_models_answered(partly_broken, folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(partly_broken)
    name = f"{architecture_of(model).rewrite_name(1)}.weight"
    Delta(dense={name: torch.randn_like(model.get_parameter(name))}).save(tmp_path / "edit.safetensors")
    arguments = f"pretrained={partly_broken},load_edit={tmp_path / 'edit.safetensors'},compare_unedited=true,store=off"
    evaluate_here(tmp_path / "run", arguments, ["tiny_other_choice"], RECORDS / "bake_qa.jsonl", folder)
    assert check_results([tmp_path / "run"]).problems == []
    rows = load_results([tmp_path / "run"]).set_index("stage")
    assert rows["n"].to_dict() == {"": 4, "unedited": 4, "difference": 4}
    assert rows["value"]["difference"] == rows["value"][""] - rows["value"]["unedited"]


# -- edits that are not finite ----------------------------------------------------------------------------------------


def test_a_step_of_a_stream_that_is_not_finite_leaves_the_others(model_paths, monkeypatch):
    """Its case has no edit, with that reason, and the stream goes on."""
    original = ROME.compute

    def spoilt(self, job):
        deltas = original(self, job)
        if job.requests[0].case_id == "1":
            for factor in deltas[0].factors.values():
                factor.left.fill_(float("nan"))
        return deltas

    monkeypatch.setattr(ROME, "compute", spoilt)
    lm = build(model_paths["llama"], mode="sequential", edits="bake", num_edits=3, data=str(RECORDS / "bake_qa.jsonl"))
    results = run(lm, ["bake_es"], limit=3)
    reasons = [sample["unscored_reason"] for sample in results["samples"]["bake_es"]]
    assert ["not finite" in str(reason) for reason in reasons] == [False, True, False]
    steps = lm.get_model_info()["edited_hf"]["steps"]
    assert [step["num_edits"] for step in steps] == [1, 1, 2] and all(step["finite"] for step in steps)
