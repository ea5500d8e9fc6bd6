"""Generated answers from sample files of editing tasks, of other tasks, and from plain rows."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from result_files import write_run
from saved_results import save_samples
from scripted import ScriptedLM, StockLM, StreamLM
from task_runs import metrics_of, run
from wild_answers import WILD_TASK, wild_texts

from edit_hooks.answers import EditedAnswer, FailedAnswer, GeneratedText
from edit_hooks.utils.errors import EditingError
from judges.base import Item
from judges.string_judge import StringJudge
from lm_edit.results.answers.rejudge import judge_answers, table_rows
from lm_edit.results.answers.samples import read_saved_answers, read_saved_response
from lm_eval_tasks.common.asking.answers import NEEDS_EDITED_HF, UNFINISHED


def test_saved_samples_hold_the_answers_that_were_scored(tmp_path: Path) -> None:
    results = run(WILD_TASK, ScriptedLM(texts=wild_texts, errors={"1": "no such layer"}))
    answers = read_saved_answers([save_samples(results, tmp_path, WILD_TASK)])
    own = [answer for answer in answers if not answer.is_helper]
    assert [answer.item.answer for answer in own] == ["Orsa Lind", "", "A bracket", "In 1911"]
    assert own[1].failure == "edit failed: no such layer" and {answer.source.task for answer in own} == {WILD_TASK}
    assert [answer.item.answer for answer in answers if answer.is_helper] == ["1911"] * 4
    assert own[0].item[:2] == ("Who designed the Fenwick aqueduct?", "Orsa Lind")


def test_streams_have_an_answer_per_stage_and_one_helper_answer(tmp_path: Path) -> None:
    settings = {"mode": "sequential", "checkpoints": "1;3"}
    results = run(WILD_TASK, StreamLM({"0": "110", "1": ".11"}, {1: 0, 3: 2}), settings)
    answers = read_saved_answers([save_samples(results, tmp_path, WILD_TASK)])
    places = [(answer.case, answer.stage, answer.is_helper) for answer in answers if answer.case in (0, 2)]
    stages = [(0, stage, False) for stage in ("", "immediate", "1", "3")]
    assert places == [*stages, (0, "", True), (2, "", False), (2, "", True)]
    assert [answer.failure for answer in answers if answer.case == 2] == ["not among this run's edits"] * 2


def test_cases_outside_a_stream_have_an_answer_where_the_run_scored_them(tmp_path: Path) -> None:
    settings = {"mode": "sequential", "score_unedited_cases": True, "population": "wrong_em"}
    results = run(WILD_TASK, StreamLM({"0": "1"}, known=("3",)), settings)
    answers = read_saved_answers([str(write_run(tmp_path, WILD_TASK, results=results).parent)])
    assert {answer.failure for answer in answers} == {None} and len(answers) == 2 * 4 + 1
    verdicts = judge_answers(StringJudge("em"), answers).verdicts
    rows = {row[1:3]: row[4:6] for row in map(tuple, table_rows(answers, {"em": verdicts}, {}))}
    found = metrics_of(results, WILD_TASK)
    assert (found["efficacy_wild_em"], found["efficacy_wild_em_n"]) == (0.5, 4)
    assert (found["efficacy_wild_em@wrong_em"], found["efficacy_wild_em@wrong_em_n"]) == (pytest.approx(1 / 3), 3)
    assert rows[WILD_TASK, "all"] == ("0.500", "4/4") and rows[WILD_TASK, "initially wrong"] == ("0.333", "3/3")


def test_only_the_helper_of_a_population_chooses_cases(tmp_path: Path) -> None:
    """MQuAKE asks the unedited model for the facts before the edit: nothing to judge, and no population."""
    task = "mquake_instance_wise"
    results = run(task, ScriptedLM())
    kinds = [probe["kind"] for sample in results["samples"][task] for probe in sample["doc"]["probes"]]
    assert {"hop", "old_hop"} <= set(kinds)
    answers = read_saved_answers([save_samples(results, tmp_path, task)])
    assert len(answers) == kinds.count("hop") and not any(answer.is_helper for answer in answers)


def test_answers_of_the_gold_length_are_not_cut(tmp_path: Path) -> None:
    """The run does not stop them at a period either, and of a model class without such answers it scores none."""
    task = "qaedit_grid_qa_inst_ar_gold"
    results = run(task, StreamLM({"1": "1"}), {"mode": "sequential"})
    assert metrics_of(results, task)["efficacy_qa_ar_em"] == 1.0
    answers = read_saved_answers([save_samples(results, tmp_path / "edited", task)])
    assert [answer.item for answer in answers if answer.failure is None and not answer.is_helper] == [
        Item("In which city was the painter Jo Marsh born?", "St. Brannock", "St. Brannock")
    ] * 2  # at the end and right after the edit
    stock = run(task, StockLM(), {"population": "all"})
    answers = read_saved_answers([save_samples(stock, tmp_path / "stock", task)])
    assert {answer.failure for answer in answers} == {NEEDS_EDITED_HF.format(missing="answers of a given length")}


class ThinkingLM(ScriptedLM):
    """The edited model does not end its thought about the aqueduct, nor the unedited one that about the stanza."""

    def _generation(self, args: tuple, unedited: bool) -> GeneratedText:
        if ("stanza" if unedited else "aqueduct") in args[0]:
            return GeneratedText(raw="", thought="Let me see", unfinished=True)
        return super()._generation(args, unedited)


def test_unfinished_thoughts_are_no_wrong_answers(tmp_path: Path) -> None:
    """Neither as answers, nor as those that choose the cases which the unedited model gets wrong."""
    results = run(WILD_TASK, ThinkingLM(texts=wild_texts))
    answers = read_saved_answers([save_samples(results, tmp_path, WILD_TASK)])
    verdicts = {"em": judge_answers(StringJudge("em"), answers).verdicts}
    unfinished = [(answer.case, answer.is_helper) for answer in answers if answer.failure == UNFINISHED]
    assert unfinished == [(0, False), (2, True)] and [verdict.label for verdict in verdicts["em"]].count(None) == 2
    found = metrics_of(results, WILD_TASK)
    rows = {row[2]: row[4:6] for row in table_rows(answers, verdicts, {})}
    assert rows["all"] == [f"{found['efficacy_wild_em']:.3f}", "3/4"] and found["efficacy_wild_em_n"] == 3
    in_run = found["efficacy_wild_em@wrong_em"], found["efficacy_wild_em@wrong_em_n"]
    assert rows["initially wrong"] == [f"{in_run[0]:.3f}", f"{in_run[1]}/2"]


def test_a_case_without_questions_is_counted_as_unscored(tmp_path: Path) -> None:
    """Case 2 has no paraphrase; its document asks the edit prompt, which no metric reads."""
    answers = read_saved_answers([save_samples(run("bake_gs", ScriptedLM()), tmp_path, "bake_gs")])
    reasons = {answer.case: answer.failure for answer in answers}
    assert reasons == {0: None, 1: None, 2: "the record has no judged probes", 3: None}


def test_texts_of_fluency_tasks_are_not_judged(tmp_path: Path) -> None:
    task = "counterfact_fluency"
    path = save_samples(run(task, ScriptedLM()), tmp_path, task)
    with pytest.raises(EditingError, match="texts of fluency tasks have no gold answer"):
        read_saved_answers([path])


def test_cases_with_unusable_texts_keep_their_reason(tmp_path: Path) -> None:
    path = Path(save_samples(run(WILD_TASK, ScriptedLM(texts=wild_texts)), tmp_path, WILD_TASK))
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rows[1]["doc"]["unusable"] = "half a pair"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    answers = read_saved_answers([str(path)])
    assert {answer.case for answer in answers if answer.failure == "half a pair"} == {rows[1]["doc_id"]}


def test_answers_of_locality_tasks_are_read_on_request(tmp_path: Path) -> None:
    task = "qaedit_wild_locality"
    path = save_samples(run(task, ScriptedLM()), tmp_path, task)
    with pytest.raises(EditingError, match="--locality judges them"):
        read_saved_answers([path])
    answers = read_saved_answers([path], locality=True)
    assert [answer.item.answer for answer in answers if not answer.is_helper] == ["Port Elna"] * 4


def save_run(folder: Path, date: str, answer: str, **identity: Any) -> Path:
    """Write the sample of an ordinary task beside a result file of its run, whose identity the options are."""
    results = {
        "results": {"sums": {"alias": "sums"}},
        "configs": {"sums": {"task": "sums", "generation_kwargs": {"until": ["\n"]}}},
        "versions": {"sums": 1},
        "config": {"model": "hf", "model_args": {"pretrained": "some/model"}, **identity},
        "n-samples": {"sums": {"original": 1, "effective": 1}},
        "date": datetime.fromisoformat(date[:10]).timestamp(),
    }
    sample = {
        "doc_id": 0,
        "doc": {"question": "Two and two?"},
        "target": "4",
        "arguments": {"gen_args_0": {"arg_0": "Q: Two and two?\nA:", "arg_1": {"until": ["\n"]}}},
        "resps": [[answer]],
        "filtered_resps": [answer],
        "filter": "none",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"results_{date}.json").write_text(json.dumps(results))
    path = folder / f"samples_sums_{date}.jsonl"
    path.write_text(json.dumps(sample) + "\n")
    return path


def test_answers_name_their_run_and_of_its_repetitions_the_newest_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = save_run(tmp_path / "b", "2026-11-20T10-00-00.5", "old")
    new = save_run(tmp_path / "a", "2026-11-21T10-00-00.5", "new")
    save_run(tmp_path / "c", "2026-11-19T10-00-00.5", "of half the cases", limit=1)
    answers = read_saved_answers([str(tmp_path), str(new)])
    assert [answer.item.answer for answer in answers] == ["new", "of half the cases"]
    first, second = (answer.source for answer in answers)
    assert first.path == str(new) and first.task == "sums" and first.run_name == "hf__some-model"
    assert len(first.run) == 12 and first.run != second.run
    assert f"{old}: left out; {new} has this task of the same run" in caplog.text


def test_samples_beside_an_unreadable_result_file_have_no_known_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for date in ("2026-11-20T10-00-00.5", "2026-11-21T10-00-00.5"):
        save_run(tmp_path, date, date)
        (tmp_path / f"results_{date}.json").write_text("{")
    answers = read_saved_answers([str(tmp_path)])
    assert len(answers) == 2 and {answer.source.run for answer in answers} == {""}
    assert caplog.text.count("its run is unknown") == 2


def test_folders_of_a_sweep_that_hold_no_results_are_left_out(tmp_path: Path) -> None:
    run_folder = tmp_path / "run"
    kept = save_run(run_folder / "results", "2026-11-20T10-00-00.5", "kept")
    for number, name in enumerate(("attempt", "results.damaged-1")):
        save_run(run_folder / name / "model", f"2026-11-2{number + 1}T10-00-00.5", name)
    (run_folder / "run.json").write_text("{}")
    assert [answer.source.path for answer in read_saved_answers([str(tmp_path)])] == [str(kept)]
    explicit = read_saved_answers([str(run_folder / "attempt")])
    assert [answer.item.answer for answer in explicit] == ["attempt"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"question": "q", "gold": "g"}', "line 1.*neither a sample of lm-eval nor a row"),
        ('{"question": "q", "gold": [], "answer": "a"}', "neither a sample of lm-eval nor a row"),
        ('{"question": "q", "gold": ["g", 1], "answer": "a"}', "neither a sample of lm-eval nor a row"),
        ("[1]", "an object is needed"),
        ('{"doc_id": 0, "resps": [], "doc": {}}', "not a sample as lm-eval saves it"),
        ('{"doc_id": 0, "resps": [], "doc": {"probes": [{"king": "x"}]}}', "not a sample as lm-eval saves it"),
        ("{", "not valid JSON"),
    ],
)
def test_files_that_cannot_be_judged(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "samples_x.jsonl"
    path.write_text(content)
    with pytest.raises(EditingError, match=message):
        read_saved_answers([str(path)])


def test_missing_files_and_folders_without_samples_are_errors(tmp_path: Path) -> None:
    with pytest.raises(EditingError, match="there is no file or folder"):
        read_saved_answers([str(tmp_path / "absent")])
    with pytest.raises(EditingError, match=r"no samples_\*\.jsonl.*--log_samples"):
        read_saved_answers([str(tmp_path)])


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        ("plain text", "plain text"),
        (str(EditedAnswer(final=FailedAnswer("no layer"))), EditedAnswer(final=FailedAnswer("no layer"))),
        ("{not a mapping}", "{not a mapping}"),
        ("{'other': 1}", "{'other': 1}"),
        (json.dumps({"format": "another/1"}), '{"format": "another/1"}'),
        ("{__import__('os').getcwd(): 1, 'text': 2}", "{__import__('os').getcwd(): 1, 'text': 2}"),
    ],
)
def test_saved_responses_are_typed_answers_or_plain_texts(saved: str, expected: Any) -> None:
    assert read_saved_response(saved) == expected
