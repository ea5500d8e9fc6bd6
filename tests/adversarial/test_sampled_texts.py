"""Fluency and consistency on real generations: lengths, seeds, batches, stores, and the unedited anchor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lm_runs import build, run
from paths import RECORDS
from record_files import published_data, write_jsonl

from edit_hooks.contract.tiny_models import save_tiny
from edit_hooks.lm.model import EditedHFLM
from edit_hooks.utils.storage.json_io import read_rows

TASKS = ["counterfact_fluency", "counterfact_consistency"]
FILE = "counterfact.jsonl"


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> EditedHFLM:
    return build(str(save_tiny(tmp_path_factory.mktemp("tiny"), "llama")))


@pytest.fixture(scope="module")
def unedited_lm(tmp_path_factory: pytest.TempPathFactory) -> EditedHFLM:
    folder = tmp_path_factory.mktemp("tiny")
    return build(str(save_tiny(folder, "llama")), folder, mode="none", editor_args=None)


def first_generations(results: dict[str, Any], task: str) -> list[Any]:
    return [answer[0].final for sample in results["samples"][task] for answer in sample["resps"]]


@pytest.fixture(scope="module")
def results(lm: EditedHFLM) -> dict[str, Any]:
    return run(lm, TASKS, FILE, limit=2)


def test_texts_have_100_tokens_with_their_prompt_and_both_tasks_score_the_same(
    lm: EditedHFLM, results: dict[str, Any]
) -> None:
    texts = first_generations(results, TASKS[0])
    assert len(texts) == 3 and texts == first_generations(results, TASKS[1])
    prompts = [probe["prompt"] for sample in results["samples"][TASKS[0]] for probe in sample["doc"]["probes"]]
    for prompt, text in zip(prompts, texts, strict=True):
        for one in (text, text.unedited):
            assert len(lm.tokenizer(prompt)["input_ids"]) + len(one.token_ids) == 100
            assert one.stop == "length" and one.stops == ()


def test_a_case_alone_has_the_value_it_has_among_others(lm: EditedHFLM, results: dict[str, Any]) -> None:
    alone = run(lm, TASKS[:1], FILE, samples={TASKS[0]: [1]})["samples"][TASKS[0]][0]
    among = results["samples"][TASKS[0]][1]
    assert alone["fluency_entropy"] == among["fluency_entropy"] is not None
    assert alone["fluency_entropy_unedited"] == among["fluency_entropy_unedited"]


def test_both_models_sample_each_occurrence_of_a_prompt(
    lm: EditedHFLM, results: dict[str, Any], tmp_path: Path
) -> None:
    """Published records repeat generation prompts, and the release samples every entry."""
    record = read_rows(RECORDS / FILE)[0][1]
    first, second = record["generation_prompts"]
    repeated = {**record, "generation_prompts": [first, second, first, first]}
    path = write_jsonl(tmp_path / FILE, [repeated])
    texts = first_generations(run(lm, TASKS[:1], str(path)), TASKS[0])
    assert texts[:2] == first_generations(results, TASKS[0])[:2]  # the first occurrences
    for several in ([texts[0], texts[2], texts[3]], [text.unedited for text in (texts[0], texts[2], texts[3])]):
        assert len({text.raw for text in several}) == 3


def test_another_seed_draws_other_texts(lm: EditedHFLM, results: dict[str, Any]) -> None:
    other = run(lm, TASKS[:1], FILE, {"generation_seed": 1}, limit=2)
    assert first_generations(other, TASKS[0]) != first_generations(results, TASKS[0])


def test_an_unedited_model_changes_nothing(unedited_lm: EditedHFLM) -> None:
    found = run(unedited_lm, TASKS, FILE)["results"]
    fluency, consistency = (found[task] for task in TASKS)
    assert fluency["fluency_entropy_change,none"] == 0.0
    assert fluency["fluency_entropy,none"] == fluency["fluency_entropy_unedited,none"] > 0
    assert fluency["fluency_entropy_n,none"] == 4 and fluency["fluency_entropy_failed,none"] == 1
    assert consistency["consistency_own_idf_change,none"] == 0.0


@pytest.mark.realdata
def test_published_records_run(unedited_lm: EditedHFLM, tmp_path: Path) -> None:
    records = read_rows(published_data() / "counterfact" / "counterfact-edit.json")[:3]
    path = write_jsonl(tmp_path / "records.jsonl", [record for _, record in records])
    results = run(unedited_lm, ["counterfact_syn", "counterfact_wild", "counterfact_flat_s"], str(path))
    assert len(results["results"]) >= 7
    for task, samples in results["samples"].items():
        assert len(samples) == 3 and all(sample["unscored"] == 0 for sample in samples), task
