"""Tasks under lm-eval's options: stock models, broken answers, limits, templates, several ranks, judges."""

from __future__ import annotations

import contextlib
import json
import logging
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import yaml
from lm_eval.api.filter import Filter
from lm_eval.api.registry import filter_registry
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table
from scripted import RankedLM, ScriptedLM, StockLM, StreamLM
from task_runs import FOLDER, build, data_of, from_nlls, metrics_of, run, run_on_two_ranks

from edit_hooks.answers import GeneratedText
from edit_hooks.utils.errors import EditingError
from judges.base import Verdict
from lm_eval_tasks.common.asking.answers import NOT_FINITE
from lm_eval_tasks.report.run_options import unused_generation_settings

# ------------------------------------------------------------------ stock models, broken answers


def test_stock_models_score_what_their_answers_hold() -> None:
    found = metrics_of(run("bake_es", StockLM()), "bake_es")
    assert (found["efficacy_argmax_n"], found["efficacy_gen_em_n"]) == (4, 4)
    assert (found["efficacy_prob"], found["efficacy_prob_n"], found["efficacy_match_n"], found["unscored"]) == (
        None,
        0,
        0,
        4,
    )
    assert "--model edited_hf" in found["unscored_reason"] and "mode=none" in found["unscored_reason"]
    found = metrics_of(run("qaedit_wild_reliability", StockLM()), "qaedit_wild_reliability")
    assert (found["efficacy_wild_em_n"], found["efficacy_wild_em@wrong_em_n"]) == (4, 0)


@pytest.mark.parametrize(("broken", "reason"), [(float("nan"), NOT_FINITE), (float("-inf"), "log-probability is -inf")])
def test_broken_log_probabilities_are_counted_not_zero(broken: float, reason: str) -> None:
    def likelihoods(context: str, continuation: str, unedited: bool) -> tuple[float, list[int]]:
        return (broken if "Port Elna" in context else -1.0), list(range(len(continuation.split())))

    found = metrics_of(run("bake_es", ScriptedLM(likelihoods)), "bake_es")
    assert (found["efficacy_argmax"], found["efficacy_argmax_n"], found["unscored"]) == (1.0, 3, 1)
    assert json.loads(found["unscored_reason"]) == {reason: 1}


def test_a_task_in_which_nothing_is_scored_still_prints() -> None:
    results = run("bake_es", ScriptedLM(errors=dict.fromkeys("0123", "boom")))
    found = metrics_of(results, "bake_es")
    assert (found["efficacy_prob"], found["efficacy_prob_n"], found["efficacy_prob_stderr"]) == (None, 0, "N/A")
    assert json.loads(found["unscored_reason"]) == {"edit failed: boom": 4}
    assert "efficacy_prob" in make_table(results)


# ------------------------------------------------------------------ lm-eval's options


def test_standard_errors_are_printed() -> None:
    """lm-eval knows the error of its own mean only; ours must replace its N/A under the same key."""
    results = run("bake_es", ScriptedLM(from_nlls({("Port Elna is the capital of", "Dravonia"): (1.0, 1.0)})))
    assert metrics_of(results, "bake_es")["efficacy_prob_stderr"] == pytest.approx(0.25)  # values 1, 0, 0, 0
    row = next(line for line in make_table(results).splitlines() if "|efficacy_prob " in line)
    value, sign, error = (cell.strip() for cell in row.strip("|").split("|")[-3:])
    assert (float(value), sign, error) == (0.25, "±", "0.2500")


def test_limit_and_samples_select_edits() -> None:
    assert [sample["doc"]["case_id"] for sample in run("bake_ls", limit=2)["samples"]["bake_ls"]] == ["0", "1"]
    found = run("bake_ls", samples={"bake_ls": [1, 3]})
    assert [sample["doc"]["case_id"] for sample in found["samples"]["bake_ls"]] == ["1", "3"]
    assert len(run("bake_ls", limit=0.5)["samples"]["bake_ls"]) == 2


def test_the_order_of_samples_changes_no_label() -> None:
    """lm-eval asks in the order of the data and takes ``doc_id`` from the list."""
    saved = run("bake_ls", samples={"bake_ls": [3, 1, 3]})["samples"]["bake_ls"]
    assert [(sample["doc_id"], sample["doc"]["case_id"]) for sample in saved] == [(1, "1"), (3, "3")]


def test_predict_only_keeps_the_answers() -> None:
    results = run("bake_rq", predict_only=True)
    assert set(results["results"]["bake_rq"]) == {"name", "alias", "sample_len", "bypass,none", "bypass_stderr,none"}
    assert results["samples"]["bake_rq"][0]["resps"][0][0].edit.key == "0"


def test_write_out_shows_a_prompt(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="lm_eval"):
        run("bake_rq", write_out=True, num_fewshot=0)
    assert "The capital of Dravonia is" in caplog.text


def test_a_yaml_that_names_no_benchmark_is_an_error(tmp_path: Path) -> None:
    text = f"include: {FOLDER / 'bake' / 'bake_es.yaml'}\ntask: wrong\ncustom_dataset: !function json.loads\n"
    (tmp_path / "wrong.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(EditingError, match=r"wrong: custom_dataset is <function loads.*a Benchmark is needed"):
        TaskManager(include_path=tmp_path, include_defaults=False, metadata={"data": data_of("bake")}).load(["wrong"])


def test_demonstrations_are_refused_not_ignored(tmp_path: Path) -> None:
    (tmp_path / "few.yaml").write_text(
        f"include: {FOLDER / 'bake' / 'bake_es.yaml'}\ntask: few\nnum_fewshot: 2\n", encoding="utf-8"
    )
    with pytest.raises(EditingError, match="num_fewshot=2"):
        TaskManager(include_path=tmp_path, include_defaults=False, metadata={"data": data_of("bake")}).load(["few"])


def test_a_placeholder_request_is_never_scored() -> None:
    """A case without probes needs one request for lm-eval's sake; no metric may read its answer."""
    lm = ScriptedLM(from_nlls({}))
    results = run("bake_gs", lm, samples={"bake_gs": [2]})
    assert [request.request_type for request in lm.seen] == ["loglikelihood", "generate_until"]
    assert lm.seen[0].doc["asked"]["kind"] == "placeholder"
    found = metrics_of(results, "bake_gs")
    assert (found["paraphrase_prob_n"], found["paraphrase_gen_em_n"], found["unscored"]) == (0, 0, 1)


def test_log_samples_off_and_no_bootstrap() -> None:
    results = run("bake_es", log_samples=False, bootstrap_iters=0)
    assert metrics_of(results, "bake_es")["efficacy_prob_n"] == 4


def test_resps_keep_the_raw_text_and_filtered_resps_the_cut_one() -> None:
    sample = run("bake_rq")["samples"]["bake_rq"][0]
    assert sample["resps"][-1][0].final.raw == " Port Elna. Then"
    assert str(sample["filtered_resps"][-1]) == " Port Elna"


def test_plain_contexts_and_continuations() -> None:
    lm = ScriptedLM()
    run("bake_rq", lm, limit=1)
    likelihoods = [request.args for request in lm.seen if request.request_type == "loglikelihood"]
    assert likelihoods == [("The capital of Dravonia is", " Port Elna"), ("The capital of Dravonia is", " Veldt")]
    (generation,) = (request.args for request in lm.seen if request.request_type == "generate_until")
    assert generation == (
        "The capital of Dravonia is",
        {"until": [".", "\n"], "max_gen_toks": 50, "do_sample": False},
    )


def test_chat_template_and_system_instruction_wrap_every_probe() -> None:
    lm = ScriptedLM()
    run("bake_gs", lm, limit=1, apply_chat_template=True, system_instruction="Be brief.")
    contexts = {request.args[0] for request in lm.seen}
    start = "<system>Be brief.</system><user>"
    assert contexts == {
        f"{start}Port Elna, the seat of the government of</user><assistant>",
        f"{start}Port Elna serves as capital city of</user><assistant>",
    }
    # nothing joins the assistant header and the answer, as in lm-eval's own multiple-choice tasks
    targets = {request.args[1] for request in lm.seen if request.request_type == "loglikelihood"}
    assert targets == {"Dravonia", "Ostmark"}
    lm = ScriptedLM()
    run("bake_gs", lm, limit=1, system_instruction="Be brief.")
    assert all(request.args[0].startswith("Be brief.") and "Port Elna" in request.args[0] for request in lm.seen)


def test_gen_kwargs_change_stop_rule_and_truncation_together() -> None:
    lm = ScriptedLM(texts=lambda context, unedited: " Port Elna; then. More")
    results = run("bake_rq", lm, gen_kwargs="until=;")
    assert metrics_of(results, "bake_rq")["reverse_qa_gen_em"] == 0.25
    assert results["configs"]["bake_rq"]["generation_kwargs"]["until"] == ";"


@pytest.mark.parametrize(
    ("task", "own"),
    [
        ("knowgic", r"generation\(do_sample=True, max_new_tokens=64, temperature=0.7, until=.*knowgic_max_tokens"),
        ("counterfact_fluency", r"generation\(do_sample=True, ignore_end=True, max_total_tokens=100"),
        ("mquake_multi_hop_cot", r"generation\(do_sample=False, max_new_tokens=200"),
    ],
)
def test_gen_kwargs_that_no_question_follows_are_refused_before_any_question(task: str, own: str) -> None:
    lm = ScriptedLM()
    with pytest.raises(EditingError, match=rf"{task}: --gen_kwargs has max_gen_toks=50, .*{own}"):
        run(task, lm, gen_kwargs="max_gen_toks=50")
    assert not lm.seen


def test_the_generation_settings_of_a_finished_run_are_not_refused() -> None:
    """Where questions have their own decodings a user may give none; a run can have recorded those of its helpers."""
    task = build("mquake_multi_hop_cot")
    task.restore_generation_kwargs(task.config.generation_kwargs)
    assert "generation_kwargs" not in task.dump_config()
    task.restore_generation_kwargs({"until": ["x"], "max_gen_toks": 3})
    assert task.dump_config()["generation_kwargs"] == {"until": ["x"], "max_gen_toks": 3}


def test_gen_kwargs_do_not_change_the_record_of_a_task_that_only_scores(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        results = run("qaedit_syn_reliability", gen_kwargs="max_gen_toks=12")
        run("knowgic_prob", gen_kwargs="max_gen_toks=12")
    warnings = [record.getMessage() for record in caplog.records if "--gen_kwargs" in record.getMessage()]
    assert [text.split(":")[1].split(".")[0] for text in warnings] == [
        f" no question of {task} follows it" for task in ("qaedit_syn_reliability", "knowgic_prob")
    ]
    assert ["'generate'" in text for text in warnings] == [False, True]  # the setting of knowgic
    assert results["configs"]["qaedit_syn_reliability"]["generation_kwargs"]["max_gen_toks"] == 50
    tasks = [build("knowgic_prob"), build("bake_s")]
    assert unused_generation_settings("max_gen_toks=12", tasks)
    assert unused_generation_settings("max_gen_toks=12", [*tasks, build("bake_rq")]) is None
    assert unused_generation_settings("max_gen_toks=12", [*tasks, object()]) is None  # lm-eval's own


def test_gen_kwargs_that_only_some_tasks_follow_are_named_once() -> None:
    own = build("qaedit_grid_qa_inst_tf")  # generates answers of the gold answer's length
    note = unused_generation_settings("max_gen_toks=12", [build("qaedit_wild_reliability"), own])
    assert note == (
        "--gen_kwargs has 'max_gen_toks=12', which changes nothing there: no question of qaedit_grid_qa_inst_tf "
        "follows it."
    )


def test_gen_kwargs_for_helpers_of_answers_of_gold_length_are_recorded_beside_these() -> None:
    """So that populations are those of WILD in the same run; without a population nothing is to be set."""
    task, wrong = "qaedit_syn_ar_locality", {"population": "wrong_em"}
    plain, given = (run(task, settings=wrong, gen_kwargs=one)["configs"][task] for one in ("", "max_gen_toks=12"))
    assert plain["decodings"] == given["decodings"] and given["decodings"][0]["length_of"] == "the gold answer"
    assert "generation_kwargs" not in plain and given["generation_kwargs"]["max_gen_toks"] == 12
    assert "generation_kwargs" not in run(task, gen_kwargs="max_gen_toks=12")["configs"][task]


def test_totals_have_no_direction() -> None:
    directions = build("knowgic").higher_is_better()
    totals = [name for name in directions if name.startswith(("ifr_chains", "ckp_questions")) or "_active_" in name]
    assert len(totals) > 10 and {directions[name] for name in totals} == {None}
    assert directions["ckp_sampled"] is True and directions["ifr_sampled"] is False


def test_switching_generation_off_drops_its_columns_and_requests() -> None:
    lm = ScriptedLM()
    found = metrics_of(run("bake_ls", lm, {"generate": False}), "bake_ls")
    assert not any("gen" in name for name in found)
    assert {request.request_type for request in lm.seen} == {"loglikelihood"}


def test_the_request_cache_of_lm_eval_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    task = build("bake_es")
    with caplog.at_level(logging.WARNING):
        task.build_all_requests(limit=1, cache_requests=True)
    assert "--cache_requests is ignored" in caplog.text
    assert len(task.instances) == 3


def test_results_say_where_the_data_came_from() -> None:
    metadata = run("qaedit_wild_reliability")["configs"]["qaedit_wild_reliability"]["metadata"]
    assert metadata["data_source"]["file"] == "qaedit.jsonl"
    assert metadata["data_source"]["records"] == 4
    assert len(metadata["data_source"]["sha256"]) == 64
    config = run("bake_es")["configs"]["bake_es"]
    functions = ("custom_dataset", "process_docs", "process_results")
    assert [config[key] for key in functions] == ["bake", "efficacy_doc", "score_efficacy"]


@pytest.mark.parametrize("task", ["bake_rq", "qaedit_wild_reliability"])
def test_without_any_setting_the_embedded_sample_is_read(task: str) -> None:
    built = TaskManager(include_path=FOLDER, include_defaults=False).load([task])["tasks"][task]
    assert built.config.metadata["data"] == built.config.metadata["data_source"]["data"] == "mini"
    assert len(built.test_docs()) >= 5


@pytest.mark.parametrize("task", ["bake_gs", "bake_ls", "qaedit_wild_reliability", "bake_s"])
def test_two_ranks_give_the_results_of_one(task: str) -> None:
    """One rank has no failing case, the other has; both must hand in the same columns."""
    script: dict[str, Any] = {"errors": {"1": "no such layer"}}
    alone = metrics_of(run(task, ScriptedLM(**script)), task)
    together = run_on_two_ranks(task, RankedLM, **script)
    assert metrics_of(together, task) == alone
    assert len(together["samples"][task]) == 4


# ------------------------------------------------------------------ judges


class ScriptedJudge(Filter):
    """Calls an answer correct if it holds the gold text's first word; has no opinion on empty answers."""

    questions: list[str]
    asked: list[str]

    def apply(self, resps: list[Any], docs: list[dict[str, Any]]) -> list[Any]:
        type(self).questions = [doc["asked"]["question"] for doc in docs]
        pairs = zip(resps, docs, strict=True)
        type(self).asked = [doc["asked"]["question"] for answer, doc in pairs if isinstance(answer, GeneratedText)]
        return [self.judge(answer, doc["asked"]) for answer, doc in zip(resps, docs, strict=True)]

    @staticmethod
    def judge(answer: Any, asked: dict[str, Any]) -> Any:
        if not isinstance(answer, GeneratedText):
            return answer
        if not answer.text.strip():
            return Verdict(unscored_reason="nothing to judge", judge="scripted", answer=answer.text)
        right = asked["gold"].split()[0] in answer.text
        return Verdict(label="correct" if right else "incorrect", judge="scripted", answer=answer.text)


@pytest.fixture
def judge_filter() -> Any:
    """`scripted_judge` in lm-eval's registry for one test."""
    filter_registry.register("scripted_judge", target=ScriptedJudge)
    yield ScriptedJudge
    with contextlib.suppress(AttributeError, KeyError):
        filter_registry._objs.pop("scripted_judge")


def judged_task(tmp_path: Path, base: str, **settings: Any) -> TaskManager:
    """A task with a second pipeline, the way a user would add a judge."""
    folder = FOLDER / base.split("_")[0]
    pipelines = [
        {"name": "none", "filter": [{"function": "natural_stop"}]},
        {"name": "judge", "filter": [{"function": "natural_stop"}, {"function": "scripted_judge"}]},
    ]
    text = yaml.safe_dump({"include": str(folder / f"{base}.yaml"), "task": "judged", "filter_list": pipelines})
    (tmp_path / "judged.yaml").write_text(text, encoding="utf-8")
    return TaskManager(include_path=tmp_path, include_defaults=False, metadata={"data": data_of(base)} | settings)


def test_a_judge_filter_adds_its_own_column(tmp_path: Path, judge_filter: Any) -> None:
    def texts(context: str, unedited: bool) -> str:
        return {"aqueduct": " It was Orsa Lind", "tram": "\n"}.get(
            next((word for word in ("aqueduct", "tram") if word in context), ""), " something else"
        )

    results = lm_eval.simple_evaluate(
        model=ScriptedLM(texts=texts),
        tasks=["judged"],
        task_manager=judged_task(tmp_path, "qaedit_wild_reliability"),
    )
    matched, judged = metrics_of(results, "judged"), metrics_of(results, "judged", "judge")
    assert matched["efficacy_wild_em"] == 0.0 and "efficacy_wild_judge" not in matched
    assert judged["efficacy_wild_judge"] == pytest.approx(1 / 3) and "efficacy_wild_em" not in judged
    assert (judged["efficacy_wild_judge_n"], judged["unscored"]) == (3, 1)
    assert json.loads(judged["unscored_reason"]) == {"judge: nothing to judge": 1}
    assert "Who designed the Fenwick aqueduct?" in judge_filter.questions  # the bare question, not the prompt


def test_failed_edits_stay_in_the_judge_column(tmp_path: Path, judge_filter: Any) -> None:
    """Their answers are no verdicts, and their case is one of the judged pipeline all the same."""
    results = lm_eval.simple_evaluate(
        model=ScriptedLM(texts=lambda context, unedited: " Orsa Lind", errors={"1": "no such layer"}),
        tasks=["judged"],
        task_manager=judged_task(tmp_path, "qaedit_wild_reliability"),
    )
    judged = metrics_of(results, "judged", "judge")
    assert (judged["efficacy_wild_judge"], judged["efficacy_wild_judge_n"]) == (pytest.approx(1 / 3), 3)
    assert json.loads(judged["unscored_reason"]) == {"edit failed: no such layer": 1}
    assert not any(name.startswith("efficacy_wild_em") for name in judged)


def test_a_judge_decides_at_every_stage_of_a_stream(tmp_path: Path, judge_filter: Any) -> None:
    settings = {"mode": "sequential", "checkpoints": 1, "retention": True}
    results = lm_eval.simple_evaluate(
        model=StreamLM({"0": "10", "3": ".1"}, {1: 0}, retention=True),
        tasks=["judged"],
        task_manager=judged_task(tmp_path, "qaedit_wild_reliability", **settings),
    )
    matched, judged = metrics_of(results, "judged"), metrics_of(results, "judged", "judge")
    for found, metric in ((matched, "efficacy_wild_em"), (judged, "efficacy_wild_judge")):
        assert (found[metric], found[f"{metric}@immediate"], found[f"{metric}@1"]) == (0.5, 1.0, 1.0)
        assert (found[f"{metric}_n"], found[f"{metric}@immediate_n"], found[f"{metric}@1_n"]) == (2, 2, 1)
        assert json.loads(found[f"{metric}@retention"])["matrix"] == [[1.0], [0.0, 1.0]]
        assert json.loads(found["unscored_reason"]) == {"not among this run's edits": 2}
        assert json.loads(found["edit"])["edits"] == 2
    assert not any("painter" in question for question in judge_filter.asked)  # outside the stream: not judged


def test_verdicts_without_a_judge_column_are_an_error(tmp_path: Path, judge_filter: Any) -> None:
    with pytest.raises(EditingError, match="no metric of this task has 'from: judge'"):
        lm_eval.simple_evaluate(
            model=ScriptedLM(), tasks=["judged"], task_manager=judged_task(tmp_path, "qaedit_wild_locality")
        )
