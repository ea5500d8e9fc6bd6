"""Judges inside tasks: `qaedit_wild` with and without one, through lm-eval's own evaluator."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from judge_server import KEY, JudgeServer, ServerFault, serve
from lm_eval.api.filter import Filter
from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_filter
from lm_eval.utils import make_table
from scripted import RankedLM, ScriptedLM, StockLM, StreamLM
from task_runs import build, metrics_of, run, run_on_two_ranks
from wild_answers import WILD_ANSWERS, WILD_TASK, wild_texts

from edit_hooks.answers import FailedAnswer, GeneratedText
from edit_hooks.utils.errors import EditingError
from judges.base import CORRECT, INCORRECT, CoverageError, Item, Verdict
from lm_eval_tasks.common.task import judge_filter

GROUP = "qaedit_wild"


def lenient(item: Item, attempt: int) -> str:
    """Right when the gold answer is contained; a bracket is right, too."""
    return "A" if item.gold.lower() in item.answer.lower() or item.answer == "A bracket" else "B"


def evaluate(settings: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The WILD task with the scripted answers."""
    return run(WILD_TASK, ScriptedLM(texts=wild_texts), settings, **options)


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with serve(lenient) as found:
        yield found


def chosen(server: JudgeServer, folder: Path, **more: Any) -> dict[str, Any]:
    given = {"backend": "openai", "model": "scripted", "base_url": server.url, "store": str(folder), **more}
    return {"judge": given}


def test_judge_and_exact_match_side_by_side_from_one_generation(server: JudgeServer, tmp_path: Path) -> None:
    lm = ScriptedLM(texts=wild_texts)
    results = run(WILD_TASK, lm, chosen(server, tmp_path))
    em, judge = metrics_of(results, WILD_TASK), metrics_of(results, WILD_TASK, "judge")
    assert em["efficacy_wild_em"] == 0.25 and em["efficacy_wild_contains"] == 0.5
    assert judge["efficacy_wild_judge"] == 0.75 and judge["efficacy_wild_judge_n"] == 4
    # the unedited model answers the tram question rightly: the population leaves that case out
    assert judge["efficacy_wild_judge@wrong_em"] == pytest.approx(2 / 3)
    assert judge["efficacy_wild_judge@wrong_em_excluded"] == 1
    assert len(lm.seen) == 2 * 4  # own question and helper, once each: judging generates nothing
    assert sum(server.requests.values()) == 4  # the helper is compared as a string
    table = make_table(results)
    rows = [line for line in table.splitlines() if "efficacy_wild_" in line]
    assert any("|none " in row and "efficacy_wild_em " in row for row in rows)
    assert any("|judge " in row and "efficacy_wild_judge " in row for row in rows)


def test_samples_show_why_an_answer_was_graded_as_it_was(server: JudgeServer, tmp_path: Path) -> None:
    samples = evaluate(chosen(server, tmp_path) | {"population": "wrong_judge"})["samples"][WILD_TASK]
    (sample,) = [sample for sample in samples if sample["filter"] == "judge" and sample["doc_id"] == 3]
    assert sample["resps"][0][0].final.raw == " In 1911\nQ:"
    own, helper = sample["judge"]
    assert own["answer"] == "In 1911" and own["verdict"] == "correct" and own["reply"] == "A" and own["reason"] is None
    assert helper["answer"] == "1911"
    assert [str(reading) for reading in sample["filtered_resps"]] == ["correct", "correct"]
    json.dumps(sample["judge"])


def test_results_name_the_judge(server: JudgeServer, tmp_path: Path) -> None:
    results = evaluate(chosen(server, tmp_path))
    described = results["configs"][WILD_TASK]["metadata"]["judge"]
    assert (described["model"], described["prompt"], described["base_url"]) == (
        "scripted",
        "correctness_v1",
        server.url,
    )
    summary = json.loads(metrics_of(results, WILD_TASK, "judge")["judge"])
    assert (
        summary["correct"] == 3
        and summary["incorrect"] == 1
        and summary["prompt_hash"] == described["prompt_hash"][:12]
    )
    assert summary["judge"] == "scripted (correctness_v1)"
    json.dumps(results["configs"])


def test_the_raw_question_is_judged_not_the_templated_prompt(server: JudgeServer, tmp_path: Path) -> None:
    evaluate(chosen(server, tmp_path))
    assert {item.question for item in server.requests} == set(WILD_ANSWERS)


def test_a_second_run_pays_nothing(server: JudgeServer, tmp_path: Path) -> None:
    first = evaluate(chosen(server, tmp_path))
    paid = sum(server.replies.values())
    second = evaluate(chosen(server, tmp_path))
    assert sum(server.replies.values()) == paid
    assert first["results"] == second["results"]


def test_without_a_judge_exact_match_and_one_hint(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LM_EDIT_JUDGE", raising=False)
    judge_filter._log_hint.cache_clear()
    with caplog.at_level(logging.WARNING):
        results = run(GROUP, ScriptedLM(texts=wild_texts))
        run(GROUP, ScriptedLM(texts=wild_texts))
    hints = [record.message for record in caplog.records if "No judge configured" in record.message]
    assert len(hints) == 1 and "--metadata judge=published_setting" in hints[0] and "\n" not in hints[0]
    assert metrics_of(results, WILD_TASK)["efficacy_wild_em"] == 0.25
    assert not any("judge" in key for key in results["results"][WILD_TASK])
    assert not any(sample["filter"] == "judge" for sample in results["samples"][WILD_TASK])


def test_the_environment_chooses_and_metadata_wins(
    server: JudgeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = chosen(server, tmp_path)["judge"]
    monkeypatch.setenv("LM_EDIT_JUDGE", json.dumps(given))
    assert build(WILD_TASK).judge.settings.model == "scripted"
    assert build(WILD_TASK, judge="off").judge is None
    assert build(WILD_TASK, judge={**given, "model": "other"}).judge.settings.model == "other"
    monkeypatch.setenv("LM_EDIT_JUDGE", f"openai:third@{server.url}")
    assert build(WILD_TASK).judge.name == "third (correctness_v1)"
    path = tmp_path / "judge.yaml"
    path.write_text(f"backend: openai\nmodel: fourth\nbase_url: {server.url}\n", encoding="utf-8")
    assert build(WILD_TASK, judge=str(path)).judge.name == "fourth (correctness_v1)"


def test_tasks_without_judged_metrics_ask_no_judge(server: JudgeServer, tmp_path: Path) -> None:
    results = run("qaedit_wild_locality", ScriptedLM(texts=wild_texts), chosen(server, tmp_path))
    assert not server.requests and not any("judge" in key for key in results["results"]["qaedit_wild_locality"])


def test_failed_edits_stay_unscored_and_are_not_judged(server: JudgeServer, tmp_path: Path) -> None:
    lm = ScriptedLM(texts=wild_texts, errors={"0": "no such layer", "1": "no such layer"})
    found = metrics_of(run(WILD_TASK, lm, chosen(server, tmp_path)), WILD_TASK, "judge")
    assert (found["efficacy_wild_judge_n"], found["unscored"]) == (2, 2)
    assert json.loads(found["unscored_reason"]) == {"edit failed: no such layer": 2}


def test_answers_without_anything_to_judge_them_by_get_a_reason(server: JudgeServer, tmp_path: Path) -> None:
    asked = {"kind": "efficacy", "question": "q", "gold": "Rome", "model": "edited"}
    docs = [
        {"asked": asked},
        {"asked": asked | {"gold": " "}},
        {"asked": asked | {"kind": "placeholder"}},
        {"asked": asked, "unusable": "half a pair"},
    ]
    answers = judge_filter.ModelJudgeFilter(chosen(server, tmp_path)["judge"]).apply(
        [GeneratedText(raw="Rome")] * 4, docs
    )
    assert str(answers[0]) == "correct" and sum(server.requests.values()) == 1
    assert answers[1:] == [
        FailedAnswer("the question has no gold answer", is_failure=False),
        FailedAnswer("the record has no judged probes", is_failure=False),
        FailedAnswer("half a pair", is_failure=False),
    ]


class UnfinishedAtTheEndLM(StreamLM):
    """The final model does not end its thought about case 0."""

    def _answer(self, request: Instance, answer: Any) -> Any:
        found = super()._answer(request, answer)
        if request.doc["case_id"] != "0":
            return found
        return replace(found, final=replace(found.final, raw="", unfinished=True))


def test_a_thought_without_an_end_on_the_final_model_keeps_earlier_verdicts(
    server: JudgeServer, tmp_path: Path
) -> None:
    lm = UnfinishedAtTheEndLM({"0": "10", "3": ".0"}, {1: 0}, retention=True)
    settings = {"mode": "sequential", "checkpoints": 1, "retention": True, "population": "all"}
    results = run(WILD_TASK, lm, settings | chosen(server, tmp_path))
    for metric, pipeline in (("efficacy_wild_em", "none"), ("efficacy_wild_judge", "judge")):
        found = metrics_of(results, WILD_TASK, pipeline)
        assert (found[metric], found[f"{metric}_n"], found[f"{metric}_failed"]) == (0.0, 1, 1)
        assert (found[f"{metric}@immediate"], found[f"{metric}@immediate_n"]) == (0.5, 2)
        assert (found[f"{metric}@1"], found[f"{metric}@1_n"]) == (1.0, 1)
        assert json.loads(found[f"{metric}@retention"])["matrix"] == [[1.0], [0.0, 0.0]]


def test_other_model_classes_are_judged_without_the_published_subset(server: JudgeServer, tmp_path: Path) -> None:
    found = metrics_of(run(WILD_TASK, StockLM(texts=wild_texts), chosen(server, tmp_path)), WILD_TASK, "judge")
    assert found["efficacy_wild_judge"] == 0.75
    assert found["efficacy_wild_judge@wrong_em_n"] == 0


def test_a_judge_that_cannot_be_used_is_an_error_before_the_model_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(EditingError, match="OPENAI_API_KEY"):
        build(WILD_TASK, judge="published_setting")
    with serve() as server:
        url = server.url
    with pytest.raises(EditingError, match="no server answers"):
        build(WILD_TASK, judge=f"openai:any@{url}")
    with pytest.raises(EditingError, match="being edited"):
        build(WILD_TASK, judge="hf:some/model", pretrained="some/model", data="mini")


def test_low_coverage_is_loud_and_keeps_the_answers(tmp_path: Path) -> None:
    def half(item: Item, attempt: int) -> str:
        return "I would rather not say" if "tram" in item.question else lenient(item, attempt)

    with serve(half) as server:
        with pytest.raises(CoverageError, match=r"scored 3 of 4 answers \(75.0%\)") as caught:
            evaluate(chosen(server, tmp_path))
        (kept,) = (tmp_path / "pending").glob("*.jsonl")
        assert str(kept) in str(caught.value) and "no verdict (1)" in str(caught.value)
        assert {json.loads(line)["question"] for line in kept.read_text().splitlines()} == set(WILD_ANSWERS)
        found = metrics_of(evaluate(chosen(server, tmp_path, min_coverage=0.7)), WILD_TASK, "judge")
        assert (found["efficacy_wild_judge_n"], found["unscored"]) == (3, 1)
        assert not kept.exists()


def test_low_coverage_of_one_of_several_processes_names_its_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "3")
    with (
        serve(lambda item, attempt: "hm" if "tram" in item.question else "A") as server,
        pytest.raises(CoverageError, match=r"scored 3 of 4 answers of process 3 of 8, which checks its own share"),
    ):
        evaluate(chosen(server, tmp_path))


def test_a_run_that_ends_at_once_keeps_the_answers(tmp_path: Path) -> None:
    message = r"no credit left.*The answers are saved; judge them with: lm-edit judge .*\.jsonl"
    with serve(lambda item, attempt: ServerFault(402)) as server, pytest.raises(EditingError, match=message):
        evaluate(chosen(server, tmp_path))
    assert list((tmp_path / "pending").glob("*.jsonl"))


def test_predict_only_asks_no_judge(server: JudgeServer, tmp_path: Path) -> None:
    results = evaluate(chosen(server, tmp_path), predict_only=True)
    assert len(results["samples"][WILD_TASK]) == 4 and not server.requests


def test_a_dry_run_asks_nothing_and_fails_nothing(
    server: JudgeServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        found = metrics_of(evaluate(chosen(server, tmp_path, dry_run=True)), WILD_TASK, "judge")
    assert found["efficacy_wild_judge_n"] == 0 and not server.requests and not server.authorizations
    assert any("4 answers, 4 distinct, 0 in the store: 4 calls" in record.message for record in caplog.records)


def test_two_ranks_judge_their_own_documents(server: JudgeServer, tmp_path: Path) -> None:
    results = run_on_two_ranks(WILD_TASK, RankedLM, chosen(server, tmp_path), texts=wild_texts)
    assert metrics_of(results, WILD_TASK, "judge")["efficacy_wild_judge"] == 0.75
    assert set(server.replies.values()) == {1}


def test_keys_never_appear_in_logs_results_or_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    def leaky(item: Item, attempt: int) -> str | ServerFault:
        body = json.dumps({"error": {"message": f"bad key {KEY}", "code": KEY}}).encode()
        return ServerFault(400, body=body) if "tram" in item.question else f"A: correct\n{KEY}\nA"

    monkeypatch.setenv("MY_JUDGE_KEY", KEY)
    with serve(leaky) as server, caplog.at_level(logging.DEBUG):
        settings = chosen(server, tmp_path, api_key_env="MY_JUDGE_KEY", min_coverage=0.5)
        results = evaluate(settings)
        with pytest.raises(CoverageError) as caught:
            run(
                WILD_TASK,
                ScriptedLM(texts=wild_texts),
                chosen(server, tmp_path, api_key_env="MY_JUDGE_KEY", min_coverage=1.0),
            )
        assert server.authorizations == {f"Bearer {KEY}"}  # it was used
    printed = capfd.readouterr()
    everything = [caplog.text, str(caught.value), json.dumps(results, default=str), printed.out, printed.err]
    everything += [path.read_bytes().decode("latin-1") for path in tmp_path.rglob("*") if path.is_file()]
    assert len(everything) > 5 and not any(KEY in text for text in everything)
    assert "[API key]" in "".join(everything)


# ------------------------------------------------------------------ a judge of a task's own


@register_filter("judge_by_length")
class LengthJudge(Filter):
    """A judge as the README describes it: answers up to ``limit`` characters are correct."""

    judges = True

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def apply(self, resps: Sequence[Any], docs: Sequence[Mapping[str, Any]]) -> list[Any]:
        return [
            Verdict(label=CORRECT if len(answer.text.strip()) <= self.limit else INCORRECT, answer=answer.text)
            if isinstance(answer, GeneratedText)
            else answer
            for answer in resps
        ]


@register_filter("described_judge_by_length")
class DescribedLengthJudge(LengthJudge):
    def describe(self) -> dict[str, object]:
        return {"name": "length", "limit": self.limit, "version": 2}


def config_with(step: dict[str, Any], **settings: Any) -> dict[str, Any]:
    steps = [{"function": "natural_stop"}, step]
    metrics = [{"metric": "efficacy_wild_judge", "from": "judge"}]
    return {"metadata": settings, "metric_list": metrics, "filter_list": [{"name": "judge", "filter": steps}]}


def test_a_filter_in_the_pipeline_judge_describes_itself(server: JudgeServer, tmp_path: Path) -> None:
    plain, described = (
        config_with({"function": name, "limit": 3}) for name in ("judge_by_length", "described_judge_by_length")
    )
    assert judge_filter.add_judge(plain) is judge_filter.add_judge(described) is None
    assert plain["metadata"] == {}  # the steps of the pipeline name it
    assert described["metadata"] == {"own_judges": {"judge": {"name": "length", "limit": 3, "version": 2}}}
    given = chosen(server, tmp_path)["judge"]
    model = config_with({"function": "model_judge", "judge": given})
    judge_filter.add_judge(model)
    assert model["metadata"]["own_judges"]["judge"]["base_url"] == server.url


def test_a_judge_of_the_yaml_replaces_the_configured_one(
    server: JudgeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = judge_filter.add_judge

    def add_to_own(config: dict[str, Any]) -> Any:
        config["filter_list"] = [
            *config["filter_list"],
            *config_with({"function": "described_judge_by_length", "limit": 7})["filter_list"],
        ]
        return add(config)

    monkeypatch.setattr("lm_eval_tasks.common.task.task.add_judge", add_to_own)
    results = evaluate(chosen(server, tmp_path))
    assert metrics_of(results, WILD_TASK, "judge")["efficacy_wild_judge_n"] == 4 and not server.requests
    assert results["configs"][WILD_TASK]["metadata"]["own_judges"] == {
        "judge": {"name": "length", "limit": 7, "version": 2}
    }
