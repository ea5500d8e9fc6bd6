"""BAKE end to end: an unedited model's anchors, IKE's released reverse question, samples, groups, broken records."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
from lm_runs import build, case, instance, run
from paths import RECORDS
from record_files import invented_records, write_jsonl
from task_managers import task_manager
from task_runs import metrics_of

from edit_hooks.answers import ContextReport
from edit_hooks.contract.tiny_models import save_tiny
from edit_hooks.editors.ike import IKELeakyPool
from edit_hooks.request import EditRequest
from lm_eval_tasks.bake.benchmark import BAKE_CONCEPT

LIKELIHOODS = {"generate": False}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("tiny"), "llama", max_position_embeddings=2048))


# ------------------------------------------------------------------ no-edit anchors


@pytest.mark.parametrize(
    ("group", "data", "prefix"),
    [("bird_table3", "bake_qa.jsonl", "bake"), ("bake_table5", "bake_concept.json", "bake_concept")],
)
def test_an_unedited_model_is_at_the_anchors(model_path: str, group: str, data: str, prefix: str) -> None:
    results = run(build(model_path, mode="none"), [group], data, LIKELIHOODS)
    locality = metrics_of(results, f"{prefix}_ls")
    assert locality["neighborhood_agree_tf"] == 1.0
    kinds = {"rq": "reverse_qa", "rj": "reverse_judgment"} if prefix == "bake" else {"rj": "reverse_judgment"}
    for task, kind in kinds.items():
        found = metrics_of(results, f"{prefix}_{task}")
        for protocol in ("prob", "argmax", "match"):
            column = f"{kind}_{protocol}"
            assert found[column] in (0.0, None)
            assert found[f"{column}_n"] + found[f"{column}_excluded"] == found[f"{column}@all_n"]
    found = metrics_of(results, f"{prefix}_s")
    assert all(found[f"edit_score_reverse_{name}"] in (0.0, None) for name in ("prob", "prob_agree", "argmax", "match"))
    if prefix == "bake":
        found = metrics_of(results, "bake_rq")
        for target in ("new", "true"):
            assert found[f"reverse_qa_logprob_{target}"] == found[f"reverse_qa_logprob_{target}_unedited"] < 0


# ------------------------------------------------------------------ IKE as released


def test_the_reverse_question_of_released_ike_is_the_plain_model_s_answer_to_the_leaking_prompt(
    model_path: str,
) -> None:
    """Demonstrations, then the reverse fact with its answer as the new fact: no trace of the edited fact."""
    record = invented_records("bake_qa.jsonl")[0]
    settings = {
        "embedder": "words",
        "selection": "sentences",
        "num_demonstrations": 2,
        "pool": str(RECORDS / "bake_qa.jsonl"),
    }
    lm = build(model_path, editor="ike_leaky_pool", editor_args=settings)
    task = "bake_rq_answer_in_prompt"
    results = run(lm, [task], samples={task: [0]})
    (sample,) = results["samples"][task]
    answer = sample["resps"][0][0].final
    assert answer.context == ContextReport(facts=0, demonstrations=2)

    rewrite, reverse = record["requested_rewrite"], record["reverse_qa"]
    request = EditRequest(
        prompt=rewrite["prompt"], subject=rewrite["subject"], target_new=rewrite["target_new"]["str"], case_id="0"
    )
    editor = IKELeakyPool(settings)
    demonstrations = editor.demonstrations(request, editor.default_config(lm.model)).texts
    question, subject = reverse["prompt"], reverse["target_new"]["str"]
    asked = "".join(f"{text}\n\n" for text in demonstrations)
    asked += f"New Fact: {question} {subject}\nPrompt: {question}"
    plain = build(model_path, mode="none")
    (expected,) = plain.loglikelihood([instance(case(unedited=False), asked, f" {subject}")])
    assert answer.token_logprobs == pytest.approx(expected.final.token_logprobs, abs=1e-5)
    matches = [a == b for a, b in zip(expected.final.token_argmax, expected.final.token_ids, strict=True)]
    assert metrics_of(results, task)["reverse_qa_answer_in_prompt_match"] == sum(matches) / len(matches)


# ------------------------------------------------------------------ samples and groups


def tasks_of(group: str, **settings: Any) -> dict[str, Any]:
    """The tasks of a group, as `lm_eval` builds them."""
    manager = task_manager(settings)
    return manager.load([group])["tasks"]


@pytest.mark.parametrize(
    ("group", "sizes"),
    [
        ("bake_table3", {64, 40}),
        ("bake_table5", {24}),
        ("bird_table4", {40}),
    ],
)
def test_groups_of_tables_run_on_the_samples_without_settings(group: str, sizes: set[int]) -> None:
    tasks = tasks_of(group)
    assert {len(task.test_docs()) for task in tasks.values()} == sizes
    assert {task.config.metadata["data_source"]["data"] for task in tasks.values()} == {"mini"}
    needed = {"es", "gs", "ls", "rj", "s"} | ({"rq"} if 64 in sizes else set())
    assert needed <= {name.rpartition("_")[2] for name in tasks}


# ------------------------------------------------------------------ malformed concepts

NUM_VARIANTS = 3_000
VALUES: tuple[Any, ...] = (
    None,
    "",
    "  ",
    0,
    1.5,
    True,
    [],
    ["a"],
    ["a", "b"],
    ["", ""],
    [None],
    [["a"]],
    {},
    {"str": "a"},
    "a {} b",
)


def paths_of(value: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all fields and list entries inside of a record."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path for key, inner in items for path in [(*prefix, key), *paths_of(inner, (*prefix, key))]]


def test_every_variant_of_a_concept_is_read_right_or_refused_with_a_reason(tmp_path: Path) -> None:
    """Thousands of variants of valid records, each with one or two fields replaced or removed."""
    generator = random.Random(0)
    records = invented_records("bake_concept.json")
    variants = []
    for _ in range(NUM_VARIANTS):
        record = copy.deepcopy(generator.choice(records))
        for _ in range(generator.choice((1, 1, 2))):
            *parents, last = generator.choice(paths_of(record))
            inner: Any = record
            for step in parents:
                inner = inner[step]
            if generator.random() < 0.25:
                del inner[last]
            else:
                inner[last] = copy.deepcopy(generator.choice(VALUES))
        variants.append(record)
    path = write_jsonl(tmp_path / "BAKE_concept.jsonl", variants)
    loaded = BAKE_CONCEPT.load({"data": str(path), "bad_records": "skip"})
    skipped = loaded.source["skipped"]
    assert len(loaded.records) + len(skipped) == len(variants)
    assert min(len(loaded.records), len(skipped)) > NUM_VARIANTS / 10
    assert all(len(reason) > 20 for reason in skipped.values())
    for read in loaded.records:
        record = variants[int(read.request.case_id)]
        pairs = zip(record.get("neighborhood_prompts") or [], record.get("neighborhood_targets") or [], strict=True)
        assert [question[:2] for question in read.neighbors] == [
            (prompt.strip(), answer.strip()) for prompt, answer in pairs if prompt.strip()
        ]
        assert read.request.target_new == record["requested_rewrite"]["target_new"]["str"].strip()
