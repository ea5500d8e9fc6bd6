"""RLS, reverse locality, by hand: which questions a case gets, and what counts as kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from record_files import write_jsonl
from scripted import ScriptedLM, StreamLM
from task_runs import build, from_nlls, metrics_of, run

from lm_eval_tasks.bake.benchmark import BAKE_QJ
from lm_eval_tasks.bake.reverse_locality import MAX_QUESTIONS, choose_questions
from lm_eval_tasks.common.fillable import LEFT_OUT

# subject, new object, old object, and the subject that the new object has before the edit; None: as the first relation
FACTS = [
    ("Oslo", "France", "Norway", "Paris"),
    ("Rome", "Japan", "Italy", "Tokyo"),
    ("Cairo", "Norway", "Egypt", "Oslo"),  # its right answer is the first case's subject
    ("Lima", "France", "Peru", "Paris"),  # about the first case's new object
    ("Oslo", "Kenya", "Norway", "Nairobi"),  # another edit of the first case's subject
]


def record(number: int, fact: tuple[str, str, str, str], relation: str | None = "capital") -> dict[str, Any]:
    subject, new, old, original = fact
    rewrite = {"prompt": "{} is the capital of", "subject": subject, "relation_id": relation}
    rewrite |= {"target_new": {"str": new}, "target_true": {"str": old}}
    answers = {"target_new": {"str": subject}, "target_true": {"str": original}}
    return {
        "case_id": number,
        "requested_rewrite": {key: value for key, value in rewrite.items() if value is not None},
        "paraphrase_prompts": [],
        "neighborhood_prompts": [],
        "reverse_qa": {"prompt": f"The capital of {new} is", **answers},
        "reverse_judge": {
            "prompt": f"Whether {subject}?",
            "target_new": {"str": "yes"},
            "target_true": {"str": "no"},
        },
    }


def write(folder: Path, records: list[dict[str, Any]]) -> str:
    return str(write_jsonl(folder / "BAKE_qa.jsonl", records))


@pytest.fixture
def facts(tmp_path: Path) -> str:
    """The facts above, and one of another relation, one without a relation and one alone in its relation."""
    records = [record(number, fact) for number, fact in enumerate(FACTS)]
    other = ("Bern", "Chile", "Swiss", "Santiago")
    records += [record(5, other, "language"), record(6, ("Kyiv", "Ghana", "Ukraine", "Accra"), None)]
    return write(tmp_path, records)


def locality_of(task: Any, case: int) -> list[tuple[str, tuple[str, ...]]]:
    probes = task.test_docs()[case]["probes"]
    return [(probe["prompt"], tuple(probe["targets"])) for probe in probes if probe["kind"] == "reverse_locality"]


def test_questions_about_other_objects_of_the_relation(facts: str) -> None:
    task = build("bake_rq", data=facts)
    assert locality_of(task, 0) == [("The capital of Japan is", ("Tokyo", "Oslo"))]
    found = dict(locality_of(task, 1))
    # the two records about France have one question; which three of the candidates are asked is drawn
    assert set(found) == {"The capital of France is", "The capital of Norway is", "The capital of Kenya is"}
    assert found["The capital of France is"] == ("Paris", "Rome")
    assert locality_of(task, 5) == locality_of(task, 6) == []  # alone in its relation, and without one
    asked = {probe["ask"] for doc in task.test_docs() for probe in doc["probes"] if probe["kind"] == "reverse_locality"}
    assert asked == {"edited"}  # nothing is compared with the unedited model


def test_the_draw_is_of_three_and_depends_on_no_order(tmp_path: Path) -> None:
    records = [record(number, (f"City{number}", f"Land{number}", "x", f"Town{number}")) for number in range(9)]
    cases = BAKE_QJ.load({"data": write(tmp_path, records)}).records
    chosen = [choose_questions(case, cases) for case in cases]
    assert all(len(questions) == MAX_QUESTIONS == 3 for questions in chosen)
    assert chosen == [choose_questions(case, cases[::-1]) for case in cases]
    assert len({question.prompt for questions in chosen for question in questions}) > 5  # not the same three for all


def test_reverse_locality_by_hand(facts: str) -> None:
    table = {
        ("The capital of Japan is", "Tokyo"): (1.0, 9.0),
        ("The capital of Japan is", "Oslo"): (1.5, 0.0),  # kept: the unedited model does not matter
        ("The capital of France is", "Paris"): (1.0, 1.0),
        ("The capital of France is", "Rome"): (0.5, 9.0),  # lost
        ("The capital of Norway is", "Oslo"): (1.0, 1.0),
        ("The capital of Norway is", "Rome"): (1.0, 9.0),  # a tie: lost
        ("The capital of Kenya is", "Nairobi"): (1.0, 1.0),
        ("The capital of Kenya is", "Rome"): (3.0, 9.0),  # kept
    }
    results = run("bake_rq", ScriptedLM(from_nlls(table)), {"data": facts})
    samples = results["samples"]["bake_rq"]
    assert samples[0]["reverse_locality_prob"] == 1.0
    assert samples[1]["reverse_locality_prob"] == pytest.approx(1 / 3)
    reason = "the record has no reverse questions about another object of its relation"
    assert [sample["unscored_reason"].get("reverse_locality_prob") for sample in samples[5:]] == [reason, reason]
    found = metrics_of(results, "bake_rq")
    assert (found["reverse_locality_prob_n"], found["reverse_locality_prob_failed"]) == (5, 2)
    assert found["reverse_qa_prob@all_n"] == 7


def test_an_unscored_question_leaves_the_case_unscored(facts: str) -> None:
    nan = float("nan")
    table = {("The capital of Kenya is", "Nairobi"): (nan, nan)}
    sample = run("bake_rq", ScriptedLM(from_nlls(table)), {"data": facts})["samples"]["bake_rq"][1]
    assert sample["reverse_locality_prob"] is None and sample["reverse_qa_prob@all"] is not None


@pytest.mark.parametrize(
    ("settings", "num_targets"),
    [({}, 2), ({"mode": "none"}, 2), ({"mode": "batch"}, 3), ({"mode": "sequential"}, 3), ({"load_edit": "x"}, 3)],
)
def test_answers_that_another_edit_of_the_run_makes_right(
    facts: str, settings: dict[str, Any], num_targets: int
) -> None:
    ((_, targets),) = locality_of(build("bake_rq", data=facts, **settings), 0)
    assert targets == ("Tokyo", "Oslo", "Rome")[:num_targets]


def test_in_a_batch_the_new_answer_counts_as_right(facts: str) -> None:
    table = {
        ("The capital of Japan is", "Tokyo"): (4.0, 0.0),
        ("The capital of Japan is", "Oslo"): (2.0, 9.0),
        ("The capital of Japan is", "Rome"): (1.0, 9.0),  # what the edit of the other record wants
    }
    for mode, expected in (("single", 0.0), ("batch", 1.0)):
        results = run("bake_rq", ScriptedLM(from_nlls(table)), {"data": facts, "mode": mode})
        assert results["samples"]["bake_rq"][0]["reverse_locality_prob"] == expected


def test_streams_report_it_at_every_stage(facts: str) -> None:
    """A right answer prefers the first target, so the stages differ as the script's marks do."""
    lm = StreamLM({"0": "01", "1": ".1"}, checkpoints={1: 0, 2: 1})
    settings = {"data": facts, "mode": "sequential", "checkpoints": "1;2"}
    found = metrics_of(run("bake_rq", lm, settings), "bake_rq")
    assert (found["reverse_locality_prob@1"], found["reverse_locality_prob@2"]) == (0.0, 1.0)


def test_data_without_relations_have_no_such_column() -> None:
    task = build("bake_rq")  # each of the invented records has a relation of its own
    assert "reverse_locality_prob" not in [metric["metric"] for metric in task.config.metric_list]
    assert task.config.metadata["data_source"][LEFT_OUT] == ["reverse_locality_prob"]
