"""UnKEBench and AKEW: their layouts, and the scores of long texts by hand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paths import RECORDS
from record_files import invented_records, write_jsonl
from scripted import ScriptedLM
from task_runs import build, metrics_of, run

from edit_hooks.base.registry import editor_class
from edit_hooks.contract.subject import contract_settings
from edit_hooks.lm.model import EditedHFLM
from edit_hooks.utils.errors import EditingError
from lm_eval_tasks.unstructured.benchmark import AKEW, UNKE_BENCH
from lm_eval_tasks.unstructured.texts import bleu, char_bleu, rouge_l

FILES = {"unke_bench": "unke_bench.jsonl", "akew": "akew.jsonl"}


def load(benchmark: Any) -> Any:
    return benchmark.load({"data": str(RECORDS / FILES[benchmark.name])})


def test_a_record_of_unke_is_a_text_with_questions() -> None:
    loaded = load(UNKE_BENCH)
    first = loaded.records[0]
    assert first.request.prompt == "What is Mira Solano known for?" and first.request.subject is None
    assert first.request.target_new.startswith("Mira Solano is an engineer") and len(first.request.target_new) > 300
    assert first.paraphrases[0].wanted == first.request.target_new
    assert [question.wanted for question in first.sub_questions][:2] == ["Velm", "1974"]
    assert [loaded.source[f"without_{name}"] for name in ("subject", "paraphrases", "sub_questions")] == [4, 1, 1]


def test_records_of_akew_are_texts_about_facts() -> None:
    first, second, third, fourth = load(AKEW).records
    assert first.request.subject == "Mira Solano" and len(first.paraphrases) == 1 and len(first.sub_questions) == 4
    assert second.request.prompt == "What happened to the Salt Canal?"  # the first of a list of edits
    assert third.request.prompt == "Pell bridge was designed by" and len(third.sub_questions) == 5  # of six
    assert third.sub_questions[0].prompt == "The first pier of Pell bridge stands on"
    assert third.paraphrases[0].prompt.startswith("A storm came.")
    assert fourth.request.subject is None and not fourth.sub_questions


@pytest.mark.parametrize(
    ("benchmark", "path", "value", "problem"),
    [
        (UNKE_BENCH, "answer", "", "'answer' is empty"),
        (UNKE_BENCH, "sub_answer", ["one"], "1 answers for 4 of 'sub_question'"),
        (AKEW, "requested_rewrite", [], "a non-empty list of objects is needed"),
        (AKEW, "requested_rewrite", "x", "a non-empty list of objects is needed"),
        (AKEW, "requested_rewrite.fact_new_uns", None, "fact_new_uns"),
    ],
)
def test_schema_errors_name_the_field(benchmark: Any, path: str, value: Any, problem: str, tmp_path: Path) -> None:
    record = json.loads(json.dumps(invented_records(FILES[benchmark.name])[0]))
    *outer, name = path.split(".")
    (record[outer[0]] if outer else record)[name] = value
    with pytest.raises(EditingError, match=problem):
        benchmark.load({"data": str(write_jsonl(tmp_path / "x.jsonl", [record]))})


def test_scores_of_a_text_by_hand() -> None:
    """Longest common subsequence: "the cat on the mat", 5 words of 7 and of 6."""
    precision, recall, f1 = rouge_l("The cat slept quietly on the mat.", "the cat sat on the mat")
    assert (precision, recall) == (5 / 7, 5 / 6) and f1 == pytest.approx(2 * 5 / (7 + 6))
    assert rouge_l("", "the cat") == (0, 0, 0)
    assert bleu("the cat sat on the mat", "the cat sat on the mat") == pytest.approx(1)
    assert bleu("the cat sat on the mat", "a dog ran") < 0.1
    # n-grams of characters: 3/4, 2/3, 1/2 and a 4-gram that does not agree
    assert char_bleu("abcd", "abcx") == pytest.approx(0, abs=1e-70) and char_bleu("", "abc") == 0
    # 6 characters, 5 of them right: 5/6, 4/5, 3/4, 2/3
    assert char_bleu("abcdez", "abcdey") == pytest.approx((5 / 6 * 4 / 5 * 3 / 4 * 2 / 3) ** 0.25)


def test_recall_alone_rewards_a_text_that_never_stops() -> None:
    gold = "Pell bridge is a bridge of stone"
    _, recall, f1 = rouge_l(f"{gold} and so on {'and more ' * 40}", gold)
    assert recall == 1 and f1 < 0.2


@pytest.mark.parametrize("task", ["unke_bench_original", "akew_original"])
def test_answers_go_on_to_their_own_end(task: str) -> None:
    """A period is no stop, and a text that is the target scores 1."""
    golds = {doc["probes"][0]["prompt"]: doc["probes"][0]["gold"] for doc in build(task).test_docs()}
    lm = ScriptedLM(texts=lambda context, unedited: f" {golds[context]}")
    found = metrics_of(run(task, lm), task)
    assert all(found[f"efficacy_text_{name}"] == pytest.approx(1) for name in ("rouge_l", "bleu", "char_bleu"))
    decodings = [probe["decoding"] for doc in build(task).test_docs() for probe in doc["probes"]]
    assert all((decoding["max_new_tokens"], decoding["until"]) == (512, []) for decoding in decodings)


def test_sub_questions_are_means_over_a_record() -> None:
    """Of the first record's four answers one is right, of the others' none."""
    lm = ScriptedLM(
        texts=lambda context, unedited: " She is from Velm, I think." if "Solano come" in context else " No."
    )
    found = metrics_of(run("unke_bench_sub_questions", lm), "unke_bench_sub_questions")
    assert (
        found["sub_question_text_contains"] == pytest.approx(1 / 4 / 3) and found["sub_question_text_contains_n"] == 3
    )
    assert found["sub_question_text_rouge_l_recall"] == pytest.approx(1 / 4 / 3)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_mutated_records_are_cases_or_errors(tmp_path: Path, data: st.DataObject) -> None:
    benchmark = data.draw(st.sampled_from([UNKE_BENCH, AKEW]))
    record = json.loads(json.dumps(data.draw(st.sampled_from(invented_records(FILES[benchmark.name])))))
    place = record
    if benchmark is AKEW and isinstance(record["requested_rewrite"], dict) and data.draw(st.booleans()):
        place = record["requested_rewrite"]
    values = st.one_of(st.none(), st.text(max_size=8), st.integers(), st.just(["a"]), st.just({}), st.just([{}]))
    place[data.draw(st.sampled_from(sorted(place)))] = data.draw(values)
    try:
        (case,) = benchmark.load({"data": str(write_jsonl(tmp_path / "x.jsonl", [record]))}).records
    except EditingError:
        return
    assert case.request.target_new and all(question.wanted for question in case.sub_questions)


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=40), st.text(max_size=40))
def test_scores_are_shares(text: str, gold: str) -> None:
    for value in (*rouge_l(text, gold), bleu(text, gold), char_bleu(text, gold)):
        assert 0 <= value <= 1 + 1e-9


@pytest.mark.parametrize("editor", ["unke", "any_edit"])
def test_editors_of_long_answers_run_a_case(editor: str, tiny_path: Any, tmp_path: Path) -> None:
    """The edit of a text, its free answer and the windows of the edit, through the harness."""
    model = shutil.copytree(tiny_path("llama", "byte_bpe_bos"), tmp_path / "model")  # with room for 512 tokens
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 640}), encoding="utf-8")
    record = {**invented_records("unke_bench.jsonl")[0], "answer": "She builds bridges of wood in Velm and Karsk."}
    settings = {**contract_settings(editor_class(editor)), "num_steps": 4}
    lm = EditedHFLM(pretrained=str(model), editor=editor, editor_args=settings, store="off", device="cpu")
    task = "unke_bench_original"
    results = run(task, lm, {"data": str(write_jsonl(tmp_path / "one.jsonl", [record]))}, bootstrap_iters=0)
    found = metrics_of(results, task)
    assert found["efficacy_text_rouge_l_n"] == 1 and 0 <= found["efficacy_text_rouge_l"] <= 1
