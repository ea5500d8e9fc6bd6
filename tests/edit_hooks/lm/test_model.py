"""`edited_hf` through lm-eval on tiny models: modes, caches, result metadata, the restored model."""

import importlib
import json
import math
import re
from unittest import mock

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_runs import BAKE, FAST, answers, assert_same_answers, build, case, flat, instance, run, seed_as_lm_eval_does
from paths import RECORDS
from state import assert_same_state_but_seeds

from edit_hooks import EditingError
from edit_hooks.answers import IMMEDIATE, FailedAnswer
from edit_hooks.contract.state import snapshot
from edit_hooks.contract.tiny_models import ALL_MODEL_TYPES, save_tiny
from edit_hooks.inference import batching, decoding
from edit_hooks.lm.editing.stream import Guard
from edit_hooks.lm.model import EditedHFLM


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("tiny"), "llama"))


def test_the_default_device_is_a_gpu_only_where_there_is_one(model_path):
    """lm-eval's class assumes a GPU when simple_evaluate is called from Python without a device."""
    lm = EditedHFLM(pretrained=model_path, store="off", editor_args=dict(FAST))
    assert lm.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert lm.loglikelihood([instance(case(), "Port Elna is the capital of", " Dravonia")])[0].final.num_tokens >= 1


# -- single edits ----------------------------------------------------------------------------------------------------


def test_answers_carry_edit_unedited_answer_and_diagnostics(model_path):
    lm = build(model_path)
    answer, plain = lm.loglikelihood(
        [
            instance(case(), "Port Elna is the capital of", " Dravonia"),
            instance({"question": "an ordinary document"}, "Port Elna is the capital of", " Dravonia"),
        ]
    )
    assert answer.final.num_tokens == len(answer.final.token_ids) == len(answer.final.token_logprobs) >= 1
    assert math.isclose(answer.final.logprob, sum(answer.final.token_logprobs), rel_tol=1e-6)
    assert answer.final.logprob != answer.final.unedited.logprob
    assert answer.edit.diagnostics["final_nll"] < answer.edit.diagnostics["initial_nll"]
    assert answer.edit.editor == "r_rome" and answer.edit.diagnostics["steps"] >= 1
    # lm-eval's class answers the ordinary document on the unedited model.
    assert isinstance(plain, tuple) and math.isclose(plain[0], answer.final.unedited.logprob, abs_tol=1e-4)


def test_stock_answers_are_the_unedited_answers(model_path):
    """Scoring and decoding against lm-eval's, on the unedited model."""
    lm = build(model_path, mode="none")
    contexts = ["Port Elna is the capital of", "The parliament of Port Elna, they say, belongs to", "Lake"]
    docs = [case(context) for context in contexts]
    ours = lm.loglikelihood([instance(doc, c, " Dravonia") for doc, c in zip(docs, contexts, strict=True)])
    stock = lm.loglikelihood([instance({}, context, " Dravonia") for context in contexts])
    for answer, (logprob, greedy) in zip(ours, stock, strict=True):
        assert math.isclose(answer.final.logprob, logprob, rel_tol=1e-5, abs_tol=1e-4)
        assert answer.final.is_greedy == greedy
    settings = {"until": ["."], "max_gen_toks": 8, "do_sample": False}
    ours = lm.generate_until([instance(d, c, settings, "generate_until") for d, c in zip(docs, contexts, strict=True)])
    for answer, context in zip(ours, contexts, strict=True):
        (text,) = lm.generate_until([instance({}, context, dict(settings), "generate_until")])
        assert answer.final.raw.split(".")[0] == text


def test_whole_texts_are_not_scored_for_documents_with_edits(model_path):
    """The sum would be that of a model without the document's edits."""
    whole = Instance("loglikelihood_rolling", case(), ("Port Elna is the capital of Dravonia",), 0, ("test", 0, 1))
    with pytest.raises(EditingError, match=r"edit_requests .* loglikelihood_rolling"):
        build(model_path).loglikelihood_rolling([whole])


def test_adapters_and_patched_weights_agree(model_path):
    """Invariant 2: per-row adapters against edits written into the weights."""
    both = [answers(run(build(model_path, answer=answer), BAKE)) for answer in ("auto", "patch")]
    assert_same_answers(*both)


@pytest.mark.parametrize("model_type", ALL_MODEL_TYPES)
def test_the_fast_engine_agrees_with_the_reference_engine(model_type, tmp_path):
    """Losses, log-probabilities and greedy text, end to end, on every architecture row."""
    path = str(save_tiny(tmp_path, model_type))
    both = [answers(run(build(path, engine=engine), BAKE, limit=2)) for engine in ("fast", "reference")]
    assert_same_answers(*both, tolerance=2e-3)
    for fast, plain in zip(*both, strict=True):
        assert fast.edit.diagnostics["steps"] == plain.edit.diagnostics["steps"]
        assert math.isclose(
            fast.edit.diagnostics["final_loss"], plain.edit.diagnostics["final_loss"], rel_tol=1e-3, abs_tol=1e-4
        )


def test_questions_behind_one_context_agree_with_the_reference_engine(model_path):
    """The fact before the questions of a case runs once."""
    with (
        mock.patch.object(batching, "MIN_SHARED_TOKENS", 8),
        mock.patch.object(batching, "_run_beginning", wraps=batching._run_beginning) as shared,
    ):
        ours = answers(run(build(model_path, editor="ice", editor_args={}), BAKE))
    assert shared.call_count >= 3  # one per case at least
    plain = answers(run(build(model_path, editor="ice", editor_args={}, engine="reference"), BAKE))
    assert_same_answers(ours, plain)


@pytest.mark.parametrize("editor", ["r_rome", "ft_m"])
def test_alone_or_together_in_any_order(model_path, editor):
    """Invariant 3: a case's answers do not depend on the other cases or on the batch size."""
    arguments = FAST if editor == "r_rome" else {"num_steps": 4, "lr": 0.01}
    together = run(build(model_path, editor=editor, editor_args=arguments), ["bake_es"])
    small = run(build(model_path, editor=editor, editor_args=arguments, batch_size=2, max_batch_tokens=40), ["bake_es"])
    assert_same_answers(answers(together), answers(small))
    single = run(build(model_path, editor=editor, editor_args=arguments), ["bake_es"], samples={"bake_es": [2]})
    of_case = [sample for sample in together["samples"]["bake_es"] if sample["doc_id"] == 2]
    assert_same_answers(answers({"samples": {"bake_es": of_case}}), answers(single))


def test_the_model_is_restored_also_after_an_exception(model_path):
    lm = build(model_path, answer="patch")
    seed_as_lm_eval_does()
    before = snapshot(lm.model, lm.tokenizer)
    run(lm, BAKE)
    assert_same_state_but_seeds(before, snapshot(lm.model, lm.tokenizer), "of Python")  # lm-eval draws from it

    def interrupt(*_args):
        raise KeyboardInterrupt

    handle = lm.model.get_output_embeddings().register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        lm.loglikelihood([instance(case(), "Port Elna is the capital of", " Dravonia")])
    handle.remove()
    assert_same_state_but_seeds(before, snapshot(lm.model, lm.tokenizer), "of Python")  # lm-eval draws from it


def test_mode_none_answers_are_the_pre_edit_column(model_path):
    edited, plain = run(build(model_path), ["bake_ls"]), run(build(model_path, mode="none"), ["bake_ls"])
    compared = [number for number, answer in enumerate(answers(edited)) if answer.final.unedited is not None]
    assert len(compared) > 4  # all but the placeholder of a case without neighbors
    before = [answers(edited)[number].final.unedited for number in compared]
    assert_same_answers(before, [answers(plain)[number] for number in compared])
    assert all(answer.edit is None for answer in answers(plain))
    assert plain["results"]["bake_ls"]["neighborhood_agree_tf,none"] == 1.0


def test_a_failed_edit_is_unscored_not_wrong(model_path, monkeypatch):
    from edit_hooks.editors.rome import ROME

    original = ROME.compute

    def spoilt(self, job):
        deltas = original(self, job)
        for request, delta in zip(job.requests, deltas, strict=True):
            if request.case_id == "1":
                for factor in delta.factors.values():
                    factor.left.fill_(float("nan"))
        return deltas

    monkeypatch.setattr(ROME, "compute", spoilt)
    results = run(build(model_path), ["bake_es"])
    failed = [sample for sample in results["samples"]["bake_es"] if sample["doc"]["case_id"] == "1"]
    assert all("not finite" in str(sample["unscored_reason"]) for sample in failed) and failed
    assert results["results"]["bake_es"]["unscored,none"] == len(failed)


# -- the store and lm-eval's caches -----------------------------------------------------------------------------------


def test_stored_edits_are_reused_and_bit_identical(model_path, tmp_path, monkeypatch):
    first = run(build(model_path, tmp_path), BAKE)

    def must_not_run(*_args, **_kwargs):
        raise AssertionError("a stored edit was computed again")

    monkeypatch.setattr("edit_hooks.editors.rome.ROME.compute", must_not_run)
    (tmp_path / "store" / "answers.sqlite").unlink()
    again = run(build(model_path, tmp_path), BAKE)
    assert json.dumps([flat(a) for a in answers(first)]) == json.dumps([flat(a) for a in answers(again)])
    with pytest.raises(AssertionError, match="computed again"):
        run(build(model_path, tmp_path, editor_args={**FAST, "lr": 0.4}), BAKE)


def test_unedited_answers_are_computed_before_any_edit_and_reused(model_path, tmp_path, monkeypatch):
    from edit_hooks.editors.rome import ROME

    calls, original = [], ROME.compute
    monkeypatch.setattr(
        "edit_hooks.inference.scoring.score", _spy("scored", calls, "edit_hooks.inference.scoring", "score")
    )

    def compute(self, *arguments):
        calls.append("edited")
        return original(self, *arguments)

    monkeypatch.setattr(ROME, "compute", compute)
    first = run(build(model_path, tmp_path), ["bake_ls"])
    assert calls[0] == "scored" and calls.index("edited") == 1
    calls.clear()
    again = run(build(model_path, tmp_path), ["bake_ls"])
    assert not calls
    before, after = (
        [flat(answer.final.unedited) for answer in answers(results) if answer.final.unedited is not None]
        for results in (first, again)
    )
    assert len(before) > 4 and before == after


def test_each_model_is_asked_only_what_its_metrics_need(model_path):
    """The helper of the published filter is generated by the unedited model, reverse answers by the edited one."""
    results = run(build(model_path), ["qaedit_wild_generalization"], data="qaedit.jsonl")
    for sample in results["samples"]["qaedit_wild_generalization"]:
        *questions, helper = [responses[0] for responses in sample["resps"]]
        assert all(answer.final.unedited is None for answer in questions)
        assert helper.final.unedited is not None and helper.final.token_ids == helper.final.unedited.token_ids
    results = run(build(model_path), ["bake_rq"])
    for sample in results["samples"]["bake_rq"]:
        *targets, generation = [responses[0] for responses in sample["resps"]]
        assert all(answer.final.unedited is not None for answer in targets) and generation.final.unedited is None


@pytest.mark.parametrize("mode", [{}, {"mode": "sequential", "edits": "bake", "num_edits": 4}])
def test_a_question_to_one_model_is_not_asked_of_the_other(model_path, mode, monkeypatch):
    asked = []
    generate = decoding.generate

    def count(model, tokenizer, items, *arguments):
        asked.append(len(items))
        return generate(model, tokenizer, items, *arguments)

    monkeypatch.setattr(decoding, "generate", count)
    lm = build(model_path, **mode, data=str(RECORDS / "bake_qa.jsonl"))
    for model, passes in (("unedited", 1), ("edited", 1), ("both", 2)):
        asked.clear()
        doc = {**case(), "asked": {"model": model}}
        (answer,) = lm.generate_until([instance(doc, f"Who is {model}?", {"max_gen_toks": 4}, "generate_until")])
        assert [number for number in asked if number] == [1] * passes
        assert (answer.final.unedited is not None) == (model != "edited")


def _spy(word, calls, module, name):
    function = getattr(importlib.import_module(module), name)

    def spied(*arguments, **settings):
        calls.append(word)
        return function(*arguments, **settings)

    return spied


def test_a_damaged_answer_store_is_filled_again(model_path, tmp_path):
    first = run(build(model_path, tmp_path), ["bake_ls"])
    (database,) = tmp_path.rglob("answers.sqlite")
    database.write_bytes(b"this is not a database" * 100)
    assert_same_answers(answers(first), answers(run(build(model_path, tmp_path), ["bake_ls"])))


def test_use_cache_is_refused_and_leaves_nothing(model_path, tmp_path):
    lm = build(model_path)
    with pytest.raises(EditingError, match="--use_cache"):
        run(lm, ["bake_es"], use_cache=str(tmp_path / "cache"))
    assert not list(tmp_path.iterdir())


def test_results_record_the_editing_setup(model_path):
    lm = build(model_path, seed=7)
    lm.load()
    lm.tokenizer.model_max_length = int(1e30)  # that of a tokenizer without a limit; Trackio refuses it
    results = run(lm, ["bake_es"])
    record = lm.get_model_info()["edited_hf"]
    assert record["editor"] == "r_rome" and record["mode"] == "single" and record["seed"] == 7
    assert record["editor_config"]["num_steps"] == FAST["num_steps"]
    assert len(record["model_identity"]["key"]) == 64 and record["versions"]["torch"] == torch.__version__
    assert results["configs"]["bake_es"]["metadata"]["data_source"]["sha256"]
    json.dumps(record)
    longest = lm.get_model_info()["edited_hf"]["model_identity"]["tokenizer"]["model_max_length"]
    assert longest == 1e30 and isinstance(longest, float)


# -- errors before weights are loaded ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"editor": "rom"}, "Did you mean 'rome'"),
        ({"edtor": "rome"}, "Did you mean 'editor'"),
        ({"mode": "sngle"}, "Did you mean 'single'"),
        ({"editor_args": {"lrr": 1}}, "Did you mean 'lr'"),
        ({"editor_args": {"lr": "fast"}}, "'lr' is 'fast'"),
        ({"editor_args": "missing.yaml"}, "missing.yaml cannot be read"),
        ({"seed": -1}, "seed is -1"),
        ({"mode": "sequential"}, "needs edits="),
        ({"edits": "bake"}, "no meaning in mode=single"),
        ({"mode": "sequential", "edits": "bakee"}, "Did you mean 'bake'"),
        ({"mode": "sequential", "edits": "nothing.jsonl"}, "cannot be read"),
        ({"mode": "sequential", "edits": "bake", "checkpoints": "5;x"}, "checkpoints="),
        ({"mode": "batch", "edits": "bake", "data": str(RECORDS / "bake_qa.jsonl")}, "one request at a time"),
    ],
)
def test_user_errors_are_reported_before_any_weight_is_loaded(model_path, options, message, monkeypatch):
    monkeypatch.setattr(
        "lm_eval.models.huggingface.HFLM._create_model", lambda *a, **k: pytest.fail("weights were read")
    )
    with pytest.raises(EditingError, match=message):
        build(model_path, **options)


def test_weights_are_loaded_after_the_data_is_validated(model_path, tmp_path, monkeypatch):
    broken = tmp_path / "broken.jsonl"
    broken.write_text((RECORDS / "bake_qa.jsonl").read_text().splitlines()[0] + "\n{not json\n")
    lm = build(model_path)
    monkeypatch.setattr(
        "lm_eval.models.huggingface.HFLM._create_model", lambda *a, **k: pytest.fail("weights were read")
    )
    with pytest.raises(EditingError, match=r"broken\.jsonl, line 2"):
        run(lm, ["bake_es"], settings={"data": str(broken)})


def test_a_model_without_maps_to_edit_is_refused_but_can_be_scored_unedited(tmp_path):
    path = str(save_tiny(tmp_path, "mamba"))
    with pytest.raises(EditingError, match=r"no decoder blocks.*'mamba'"):
        build(path)
    lm = build(path, mode="none")
    (answer,) = lm.loglikelihood([instance(case(unedited=False), "Port Elna is the capital of", " Dravonia")])
    assert math.isfinite(answer.final.logprob)


# -- batch and sequential ----------------------------------------------------------------------------------------------

STREAM = {"mode": "sequential", "edits": "bake", "data": str(RECORDS / "bake_qa.jsonl")}


def test_a_stream_of_one_edit_is_the_single_edit(model_path):
    """Invariant 4, first half."""
    single = run(build(model_path), BAKE, samples={task: [0] for task in BAKE})
    stream = run(build(model_path, **STREAM, num_edits=1), BAKE, samples={task: [0] for task in BAKE})
    assert_same_answers(answers(single), answers(stream))


def test_one_step_of_all_edits_is_the_batch(model_path):
    """Invariant 4, second half."""
    arguments = {"editor": "ft_m", "editor_args": {"num_steps": 3, "lr": 0.01}}
    size = len((RECORDS / "bake_qa.jsonl").read_text().splitlines())
    batch = run(build(model_path, **arguments, **{**STREAM, "mode": "batch"}), BAKE)
    stream = run(build(model_path, **arguments, **STREAM, edit_batch_size=size), BAKE)
    assert [flat(a) for a in answers(batch)] == [flat(a) for a in answers(stream)]


def test_stream_answers_at_every_stage(model_path):
    lm = build(model_path, **STREAM, checkpoints="1;3", retention=True)
    seed_as_lm_eval_does()
    before = snapshot(lm.model, lm.tokenizer)
    results = run(lm, ["bake_es"])
    assert_same_state_but_seeds(before, snapshot(lm.model, lm.tokenizer), "of Python")  # lm-eval draws from it
    for answer in answers(results):
        position = answer.position
        assert position.edited and answer.edit.step.num_edits == position.step + 1
        assert flat(answer.stages[IMMEDIATE]) == flat(answer.stages[position.step])
        assert flat(answer) == flat(answer.stages[position.num_edits - 1])
        checkpoints = set(answer.stages) & {"1", "3"}
        assert checkpoints == {str(number) for number in (1, 3) if number > position.step}
        if "3" in checkpoints:
            assert flat(answer.stages["3"]) == flat(answer.stages[2])


def test_a_limit_changes_the_questions_and_not_the_edits(model_path):
    all_cases, few = (run(build(model_path, **STREAM), ["bake_es"], limit=limit) for limit in (None, 2))
    first = [sample for sample in all_cases["samples"]["bake_es"] if sample["doc_id"] < 2]
    assert_same_answers(answers({"samples": {"bake_es": first}}), answers(few))


def test_ordinary_tasks_run_on_the_final_weights_of_a_stream(model_path):
    lm = build(model_path, **STREAM)
    (edited,) = lm.loglikelihood([instance({}, "Port Elna is the capital of", " Dravonia")])
    (plain,) = build(model_path, mode="none").loglikelihood([instance({}, "Port Elna is the capital of", " Dravonia")])
    (final,) = lm.loglikelihood([instance(case(unedited=False), "Port Elna is the capital of", " Dravonia")])
    assert edited[0] != plain[0] and math.isclose(edited[0], final.final.logprob, rel_tol=1e-4, abs_tol=1e-4)


def test_cases_outside_the_stream_are_marked(model_path):
    lm = build(model_path, **STREAM, num_edits=1)
    (answer,) = lm.loglikelihood([instance(case("Nowhere", "Atlantis"), "Nowhere is the capital of", " Atlantis")])
    assert answer.position.edited is False and answer.edit is None


def test_the_guard_reports_or_stops(model_path):
    loud = build(model_path, **STREAM, guard_norm_ratio=1e-9)
    run(loud, ["bake_es"])
    steps = loud.session.result_metadata()["steps"]
    assert len(steps) == loud.plan.num_edits and all("moved by" in step["guard"] for step in steps)
    strict = build(model_path, **STREAM, guard="stop", guard_norm_ratio=1e-9)
    results = run(strict, BAKE)
    assert len(strict.session.result_metadata()["steps"]) == 1
    assert "guard stopped" in str(results["samples"]["bake_es"])


def test_the_guard_watches_the_loss_of_a_plain_sentence(model_path):
    """The threshold is the option's: the first edit raises the loss by less than the default threshold allows."""
    destructive = {"editor": "ft_m", "editor_args": {"num_steps": 10, "lr": 0.02}, "guard_norm_ratio": 1e9}
    strict = build(model_path, **STREAM, **destructive, guard="stop", guard_loss_increase=0)
    run(strict, ["bake_es"])
    (step,) = strict.session.result_metadata()["steps"]
    before, after = map(float, re.findall(r"rose from ([\d.]+) to ([\d.]+)", step["guard"])[0])
    assert after == pytest.approx(step["probe_loss"], abs=0.01) and 0 < after - before < Guard().max_loss_increase


def test_groups_are_written_together_on_the_unedited_model(model_path):
    arguments = {"editor": "ft_m", "editor_args": {"num_steps": 3, "lr": 0.01}}
    grouped = {**STREAM, "mode": "batch", "num_edits": 3, "group_size": 2}
    results = run(build(model_path, **arguments, **grouped), ["bake_es"])
    keys = {answer.edit.key for answer in answers(results) if answer.edit is not None}
    assert len(keys) == 2
    outside = [answer.final for answer in answers(results) if isinstance(answer.final, FailedAnswer)]
    assert outside and all("one group" in answer.reason and not answer.is_failure for answer in outside)
    assert set(json.loads(results["results"]["bake_es"]["unscored_reason,none"])) == {"not among this run's edits"}
    assert results["results"]["bake_es"]["efficacy_prob_failed,none"] == 0


def test_cases_outside_of_groups_are_neither_scored_nor_failed(model_path):
    """Groups have no one edited model to ask, so the setting is refused before an edit is made."""
    grouped = {**STREAM, "mode": "batch", "num_edits": 3, "group_size": 2}
    with pytest.raises(EditingError, match=r"score_unedited_cases=true asks the one .* but group_size=2 gives every"):
        run(build(model_path, **grouped), ["bake_es"], settings={**grouped, "score_unedited_cases": True})


def test_a_resumed_stream_is_the_same_stream(model_path, tmp_path, monkeypatch):
    from edit_hooks.editors.rome import ROME

    uninterrupted = run(build(model_path, **STREAM), BAKE)
    original, calls = ROME.compute, []

    def dies_at_the_third(self, *arguments):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(self, *arguments)

    monkeypatch.setattr(ROME, "compute", dies_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        run(build(model_path, tmp_path, **STREAM), BAKE)
    resumed = run(build(model_path, tmp_path, **STREAM), BAKE)
    assert len(calls) == 1 + len((RECORDS / "bake_qa.jsonl").read_text().splitlines())
    assert json.dumps([flat(a) for a in answers(uninterrupted)]) == json.dumps([flat(a) for a in answers(resumed)])


def test_the_published_filter_holds_at_every_stage_of_a_stream(model_path):
    """The unedited model answers the helper once; its answer decides at all stages."""
    lm = build(model_path, mode="sequential", edits="qaedit", num_edits=4, data=str(RECORDS / "qaedit.jsonl"))
    settings = {"mode": "sequential", "num_edits": 4}
    results = run(lm, ["qaedit_wild_reliability"], data="qaedit.jsonl", settings=settings, limit=4)
    row = results["results"]["qaedit_wild_reliability"]
    name = "efficacy_wild_em@wrong_em"
    for stage in ("", "@immediate"):
        counts = [row[f"{name}{stage}_{count},none"] for count in ("n", "excluded", "failed")]
        assert counts[0] + counts[1] == 4 and counts[2] == 0
