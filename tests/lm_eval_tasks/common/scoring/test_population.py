"""One population for the columns of all tasks: who decides, in which context, and what is counted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from judge_server import JudgeServer, serve
from scripted import ScriptedLM, StockLM, generated, scored
from task_runs import build, metrics_of, run

from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError
from judges.base import Item
from lm_eval_tasks.common.asking.probes import OWN_CHAT, CaseAnswers
from lm_eval_tasks.common.records.cases import Case
from lm_eval_tasks.common.scoring.measures import Score, evaluate
from lm_eval_tasks.common.scoring.population import restrict
from lm_eval_tasks.protocols import wild

# The unedited model's answers: the tram is right for everyone, the aqueduct for a judge only.
BEFORE = {"aqueduct": " It was Orsa Lind.", "tram": " 1911."}
COLUMNS = {
    "qaedit_syn_reliability": "efficacy_match",
    "qaedit_syn_locality": "neighborhood_agree_tf",
    "qaedit_wild_reliability": "efficacy_wild_em",
    "qaedit_wild_generalization": "paraphrase_wild_contains",
    "qaedit_wild_locality": "neighborhood_wild_both_empty",
}


def texts(context: str, unedited: bool) -> str:
    """The edited model answers every question with the name of the aqueduct's designer."""
    known = next((answer for word, answer in BEFORE.items() if word in context), " nothing.")
    return known if unedited else " Orsa Lind."


@pytest.fixture
def judge(tmp_path: Path) -> Iterator[tuple[JudgeServer, dict[str, Any]]]:
    with serve(lambda item, attempt: "A" if item.gold in item.answer else "B") as server:
        settings = {"backend": "openai", "model": "m", "base_url": server.url, "store": str(tmp_path)}
        yield server, {"judge": settings, "population": "wrong_judge"}


@pytest.mark.parametrize(
    ("context", "asked"),
    [
        ("qa_inst", "Please answer the question:\n\nQ: "),
        ("question_only", "Who designed"),
        ("Frage: {question}\nAntwort:", "Frage: Who designed"),
        ("chat_template_released", "<s>[INST] <<SYS>>"),
    ],
)
@pytest.mark.parametrize(("task", "metric"), list(COLUMNS.items()))
def test_every_task_has_the_same_cases_by_the_context_of_the_run(
    task: str, metric: str, context: str, asked: str
) -> None:
    lm = ScriptedLM(texts=texts)
    found = metrics_of(run(task, lm, {"population": "wrong_em", "wild_context": context}), task)
    counts = [found[f"{metric}@wrong_em_{count}"] for count in ("n", "excluded", "failed")]
    assert counts == [3, 1, 0] and found[f"{metric}_n"] == 4
    helpers = [request.args[0] for request in lm.seen if request.doc["asked"]["model"] == "unedited"]
    assert len(helpers) == 4 and helpers[0].startswith(asked)
    assert "Please answer" not in "".join(helpers) or context == "qa_inst"
    assert "wrong_judge" not in " ".join(found)


def test_a_helper_in_a_chat_of_its_own_is_no_question_for_a_chat_template() -> None:
    settings = {"wild_context": wild.RELEASED_CHAT}
    assert OWN_CHAT not in build("qaedit_syn_reliability", **settings).test_docs()[0]
    assert build("qaedit_syn_reliability", population="wrong_em", **settings).test_docs()[0][OWN_CHAT]


@pytest.mark.parametrize(("task", "metric"), list(COLUMNS.items()))
def test_the_judge_decides_for_every_column(task: str, metric: str, judge: tuple[JudgeServer, dict[str, Any]]) -> None:
    server, settings = judge
    results = run(task, ScriptedLM(texts=texts), settings)
    found = metrics_of(results, task)
    # the judge calls the aqueduct and the tram right: two of four are left
    counts = [found[f"{metric}@wrong_judge_{count}"] for count in ("n", "excluded", "failed")]
    assert counts == [2, 2, 0] and found[f"{metric}_n"] == 4
    asked: set[Item] = set(server.requests)
    assert {item.answer for item in asked} >= {"It was Orsa Lind", "1911"}
    assert results["configs"][task]["metadata"]["judge"]["model"] == "m"
    if task == "qaedit_wild_reliability":
        judged = metrics_of(results, task, "judge")
        # own answers: only the aqueduct's is right, and the population leaves it out
        assert (judged["efficacy_wild_judge"], judged["efficacy_wild_judge@wrong_judge"]) == (0.25, 0.0)
        assert judged["efficacy_wild_judge@wrong_judge_n"] == 2
        assert max(server.replies.values()) == 1  # no verdict is paid for twice


def test_exact_match_decides_for_judged_columns_too(judge: tuple[JudgeServer, dict[str, Any]]) -> None:
    server, settings = judge
    results = run("qaedit_wild_reliability", ScriptedLM(texts=texts), settings | {"population": "wrong_em"})
    judged = metrics_of(results, "qaedit_wild_reliability", "judge")
    assert judged["efficacy_wild_judge@wrong_em"] == pytest.approx(1 / 3)
    assert judged["efficacy_wild_judge@wrong_em_n"] == 3
    assert len(server.requests) == 4  # one per own answer


def test_a_helper_without_a_verdict_leaves_its_case_unscored(tmp_path: Path) -> None:
    with serve(lambda item, attempt: "B" if item.answer != "1911" else "neither") as server:
        judge = {"backend": "openai", "model": "m", "base_url": server.url, "store": str(tmp_path), "min_coverage": 0}
        settings = {"judge": judge, "population": "wrong_judge"}
        found = metrics_of(run("qaedit_syn_reliability", ScriptedLM(texts=texts), settings), "qaedit_syn_reliability")
    counts = [found[f"efficacy_match@wrong_judge_{count}"] for count in ("n", "excluded", "failed")]
    assert counts == [3, 0, 1] and "no verdict" in found["unscored_reason"]


@pytest.mark.parametrize("population", ["wrong_em", "wrong_judge"])
def test_a_case_without_such_questions_is_unscored_for_that_reason(population: str) -> None:
    """It has no helper: nothing about it is asked."""
    case = Case(EditRequest(prompt="Where is {}?", subject="Velm", target_new="Karsk", case_id="0"))
    doc = wild.generalization_doc(case, {"population": population})
    answers = CaseAnswers(doc, [scored(-1.0, [0]), generated(" Karsk.", "length")])
    measure = wild.score_generalization(doc, answers)["paraphrase_wild_em"]
    score = evaluate(restrict(measure, {"population": population}, answers))
    assert score == evaluate(measure) == Score(reason="the record has no rephrased questions")


@pytest.mark.parametrize("task", ["qaedit_syn_reliability", "qaedit_wild_locality"])
def test_a_population_that_needs_a_judge_says_so(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LM_EDIT_JUDGE", raising=False)
    with pytest.raises(EditingError, match=r"population=wrong_judge needs a judge.*or use wrong_em"):
        build(task, population="wrong_judge")


def test_without_a_population_nothing_more_is_asked() -> None:
    lm = ScriptedLM(texts=texts)
    found = metrics_of(run("qaedit_wild_reliability", lm, {"population": "all"}), "qaedit_wild_reliability")
    assert len(lm.seen) == 4 and not [name for name in found if "wrong" in name]


def test_other_model_classes_have_no_population() -> None:
    found = metrics_of(run("qaedit_wild_reliability", StockLM(texts=texts)), "qaedit_wild_reliability")
    assert (found["efficacy_wild_em_n"], found["efficacy_wild_em@wrong_em_n"]) == (4, 0)


def test_an_unknown_population_is_an_error() -> None:
    with pytest.raises(EditingError, match=r"population='wrong' is unknown.*all, wrong_em, wrong_judge"):
        build("qaedit_syn_locality", population="wrong")
