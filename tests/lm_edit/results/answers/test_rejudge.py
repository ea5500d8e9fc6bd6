"""Verdicts and scores of saved answers, and the rows of the table, on plain values."""

from __future__ import annotations

import pytest

from edit_hooks.utils.errors import EditingError
from judges.base import Item, Verdict
from judges.string_judge import StringJudge
from lm_edit.results.answers.rejudge import judge_answers, score_answers, table_rows, verdict_rows
from lm_edit.results.answers.sample_files import SampleFile
from lm_edit.results.answers.samples import SavedAnswer

SOURCE = SampleFile("out/samples_task.jsonl", "task", "0123", "rome__single")

ANSWERS = [
    SavedAnswer(SOURCE, 0, "", False, Item("q0", "Rome", "Rome")),
    SavedAnswer(SOURCE, 0, "", True, Item("q0", "Rome", "Rome")),  # known before the edit
    SavedAnswer(SOURCE, 1, "", False, Item("q1", "Oslo", "Bergen, Oslo")),
    SavedAnswer(SOURCE, 1, "", True, Item("q1", "Oslo", "Kyoto")),
    SavedAnswer(SOURCE, 2, "", False, Item("q2", "Lima", ""), "edit failed"),
    SavedAnswer(SOURCE, 2, "", True, Item("q2", "Lima", "Kyoto")),
    SavedAnswer(SOURCE, 0, "10", False, Item("q0", "Rome", "Milan")),
]


def test_failed_answers_are_unscored_and_do_not_lower_coverage() -> None:
    verdicts, report = judge_answers(StringJudge("contains"), ANSWERS)
    assert [verdict.label for verdict in verdicts[:5]] == ["correct", "correct", "correct", "incorrect", None]
    assert verdicts[4].unscored_reason == "edit failed" and report.reasons == {"edit failed": 1}
    assert report.num_items == 6 and report.coverage == 1.0


def test_rows_have_all_cases_and_the_published_subset_at_every_stage() -> None:
    verdicts = judge_answers(StringJudge("contains"), ANSWERS).verdicts
    rows = list(table_rows(ANSWERS, {"contains": verdicts}, {"ones": [1.0] * len(ANSWERS)}))
    assert rows == [
        # two of the three are scored; exact match is 1/2
        ["rome__single", "task", "all", "3", "1.000", "2/3", "0.500", "1.000"],
        ["rome__single", "task", "initially wrong", "3", "1.000", "1/2", "0.000", "1.000"],
        ["rome__single", "task@10", "all", "1", "0.000", "1/1", "0.000", "1.000"],
        ["rome__single", "task@10", "initially wrong", "1", "-", "0/0", "-", "-"],
    ]


def test_runs_are_rows_of_their_own_with_their_own_population() -> None:
    other = SampleFile("in/samples_task.jsonl", "task", "4567", "memit__single")
    second = [answer._replace(source=other) for answer in ANSWERS[:1]]
    second.append(ANSWERS[1]._replace(source=other, item=Item("q0", "Rome", "Kyoto")))  # this run did not know it
    third = [answer._replace(source=SampleFile("mine.jsonl", "mine")) for answer in ANSWERS[2:3]]
    answers = [*ANSWERS[:2], *second, *third]
    verdicts = judge_answers(StringJudge("em"), answers).verdicts
    assert [row[:6] for row in table_rows(answers, {"em": verdicts}, {})] == [
        ["rome__single", "task", "all", "1", "1.000", "1/1"],
        ["rome__single", "task", "initially wrong", "1", "-", "0/0"],
        ["memit__single", "task", "all", "1", "1.000", "1/1"],
        ["memit__single", "task", "initially wrong", "1", "1.000", "1/1"],
        ["mine.jsonl", "mine", "all", "1", "0.000", "1/1"],
    ]


def test_results_of_one_name_and_task_are_told_apart_by_their_files() -> None:
    answers = [ANSWERS[0], ANSWERS[0]._replace(source=SOURCE._replace(path="in/samples_task.jsonl"))]
    assert [row[0] for row in table_rows(answers, {}, {})] == ["out/samples_task.jsonl", "in/samples_task.jsonl"]


def test_verdict_rows_keep_place_answer_and_reply() -> None:
    verdict = Verdict(label="correct", judge="j", raw_reply="A", prompt_hash="ab")
    (row,) = verdict_rows(ANSWERS[:1], {"j": [verdict]})
    assert row == {
        **{"file": "out/samples_task.jsonl", "run": "0123", "run_name": "rome__single", "task": "task"},
        **{"case": 0, "stage": "", "helper": False},
        **{"question": "q0", "gold": "Rome", "answer": "Rome"},
        "judges": {"j": {"verdict": "correct", "reason": None, "reply": "A", "prompt_hash": "ab"}},
    }


def test_scores_skip_failed_answers() -> None:
    scores = score_answers("match_ratio", ANSWERS[:5])
    assert scores[0] == 1.0 and scores[4] is None
    with pytest.raises(EditingError, match=r"score 'match_ratoi' is unknown\. Did you mean 'match_ratio'"):
        score_answers("match_ratoi", ANSWERS)
