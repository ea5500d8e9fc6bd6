"""In-context editing through ``edited_hf``: alone, in streams and chats, and combined with another editor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from context_edits import FACT, ICE, WORDS, context_edits
from lm_runs import BAKE, answers, assert_same_answers, build, case, instance, run
from paths import RECORDS
from state import assert_same_state_but_seeds

from edit_hooks import Delta, EditingError, EditRequest
from edit_hooks.answers import ContextReport, FailedAnswer, GeneratedText, ScoredContinuation
from edit_hooks.contract.state import snapshot
from edit_hooks.contract.tiny_models import save_tiny
from edit_hooks.deltas.context_edit import ContextEdit
from lm_eval_tasks.common.asking.answers import read_answer


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    """A tiny model with enough positions for two dozen demonstrations."""
    return str(save_tiny(tmp_path_factory.mktemp("tiny"), "llama", max_position_embeddings=2048))


def test_answers_equal_those_of_the_unedited_model_to_the_longer_prompt(model_path):
    """Scores and greedy text."""
    lm, plain = build(model_path, editor="ice", editor_args={}), build(model_path, mode="none")
    prompt = "Port Elna is the capital of"
    settings = {"until": ["."], "max_gen_toks": 6, "do_sample": False}
    short = [instance(case(unedited=False), prompt, " Dravonia")]
    longer = [instance(case(unedited=False), FACT + "Prompt: " + prompt, " Dravonia")]
    (answer,), (expected,) = lm.loglikelihood(short), plain.loglikelihood(longer)
    assert answer.final.token_logprobs == pytest.approx(expected.final.token_logprobs, abs=1e-5)
    assert answer.final.context == ContextReport(facts=1)
    short = [instance(case(unedited=False), prompt, settings, "generate_until")]
    longer = [instance(case(unedited=False), FACT + "Prompt: " + prompt, dict(settings), "generate_until")]
    assert lm.generate_until(short)[0].final.token_ids == plain.generate_until(longer)[0].final.token_ids


def test_below_the_similarity_threshold_the_unedited_model_answers(model_path):
    lm, plain = build(model_path, editor="ice", editor_args={"min_similarity": 0.5}), build(model_path, mode="none")
    near, far = "Port Elna is the capital of", "She wrote the novel in"
    (inside,) = lm.loglikelihood([instance(case(), near, " Peru")])
    (outside,) = lm.loglikelihood([instance(case(), far, " Peru")])
    assert inside.final.context.facts == 1 and outside.final.context.facts == 0
    (unedited,) = plain.loglikelihood([instance(case(), far, " Peru")])
    assert outside.final.token_logprobs == pytest.approx(unedited.final.token_logprobs, abs=1e-6)
    assert inside.final.logprob != pytest.approx(inside.final.unedited.logprob, abs=1e-6)


def test_the_unedited_answer_has_no_context(model_path):
    lm, plain = build(model_path, editor="ice", editor_args={}), build(model_path, mode="none")
    (answer,) = lm.loglikelihood([instance(case(), "Port Elna is the capital of", " Dravonia")])
    (bare,) = plain.loglikelihood([instance(case(unedited=False), "Port Elna is the capital of", " Dravonia")])
    assert answer.final.unedited.logprob == pytest.approx(bare.final.logprob, abs=1e-5)
    assert answer.final.logprob != pytest.approx(bare.final.logprob, abs=1e-3)


def test_demonstrations_that_do_not_fit_are_left_out_from_the_start(model_path):
    lm = build(model_path, editor="ike", editor_args=WORDS, max_length=400)
    (answer,) = lm.loglikelihood([instance(case(unedited=False), "Port Elna is the capital of", " Dravonia")])
    report = answer.final.context
    assert 0 < report.demonstrations < 33 and report.left_out == 33 - report.demonstrations and not report.cut
    (delta,) = context_edits("ike", **WORDS)
    item = lm.items.score_item("Port Elna is the capital of", " Dravonia").item
    placed = lm.prompt_edits.with_context(item, delta).item
    text = lm.tokenizer.decode(placed.context, skip_special_tokens=True)
    shown = delta.contexts[0].demonstrations[-report.demonstrations :]
    assert text == "\n\n".join(shown) + f"\n\n{FACT}Prompt: Port Elna is the capital of"
    assert len(placed.context) <= 400
    tight = build(model_path, editor="ike", editor_args=WORDS, max_length=12)
    (answer,) = tight.loglikelihood([instance(case(unedited=False), "Port Elna is the capital of", " Dravonia")])
    assert answer.final.context.demonstrations == 0 and answer.final.context.cut


def test_a_prompt_that_loses_its_fact_is_a_failed_answer_and_counted(model_path, caplog):
    """The fact stands first, so it is cut off first; the answer would be the unedited model's."""
    lm = build(model_path, editor="ike", editor_args=WORDS, max_length=400)
    fits = instance(case(), "Port Elna is the capital of", " Dravonia")
    (whole,) = lm.loglikelihood([fits])
    assert "of 1 prompts under edits, 1 have fewer demonstrations" in caplog.text and "and 0 are cut" in caplog.text
    assert not whole.final.context.fact_cut and isinstance(read_answer(whole), ScoredContinuation)
    caplog.clear()
    too_long = instance(case(), "It is so. " * 80 + "Port Elna is the capital of", " Dravonia")
    answers = lm.loglikelihood([fits, too_long])
    assert [answer.final.context.fact_cut for answer in answers] == [False, True]
    assert "of 2 prompts under edits, 2 have fewer" in caplog.text and "1 are cut" in caplog.text
    assert "1 of these lost an edited fact" in caplog.text
    read = read_answer(answers[1])
    assert isinstance(read, FailedAnswer) and read.is_failure and "an edited fact in it was cut away" in read.reason
    assert read.unedited == answers[1].final.unedited is not None  # the unedited model was asked the bare question


@pytest.mark.parametrize("kind", ["loglikelihood", "generate_until"])
def test_what_is_cut_may_stand_before_the_fact(model_path, kind):
    """In a chat the text of the system stands there, so a cut prompt can hold the whole fact."""
    history = [{"role": "system", "content": "Be brief. " * 20}, {"role": "user", "content": "Who rules Port Elna?"}]
    argument = " Peru" if kind == "loglikelihood" else {"until": ["."], "max_gen_toks": 1, "do_sample": False}
    found = []
    for max_length in (20, 100):
        lm = build(model_path, editor="ice", editor_args={}, max_length=max_length)
        lm.tokenizer.chat_template = CHAT
        (answer,) = getattr(lm, kind)([instance(case(unedited=False), lm.apply_chat_template(history), argument, kind)])
        found.append((answer.final.context.cut, answer.final.context.fact_cut))
    assert found == [(True, True), (True, False)]


def test_results_count_the_prompts_that_lost_their_fact(model_path):
    """The column `edit` counts prompts, `_failed` cases; a prompt that lost BOS alone is cut, but has its fact."""
    results = run(build(model_path, editor="ice", editor_args={}, max_length=45), ["bake_es"], limit=3)
    scores, rows = results["results"]["bake_es"], results["samples"]["bake_es"]
    contexts = [answer.final.context for row in rows for (answer,) in row["resps"]]
    expected = sum(context.fact_cut for context in contexts), sum(context.cut for context in contexts), 0
    edit = json.loads(scores["edit,none"])
    assert (edit["facts_cut"], edit["prompts_cut"], edit["failed"]) == expected and expected[0] > 0
    assert scores["efficacy_prob_failed,none"] > 0 and "cut away" in scores["unscored_reason,none"]


CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</{{ m['role'] }}>{% endfor %}<assistant>"


def test_in_a_chat_the_text_starts_the_last_user_turn(model_path):
    lm = build(model_path, editor="ice", editor_args={})
    lm.tokenizer.chat_template = CHAT
    history = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who rules Port Elna?"}]
    prompt = lm.apply_chat_template(history)
    expected = f"<system>Be brief.</system><user>{FACT}Prompt: Who rules Port Elna?</user><assistant>"
    assert lm.prompt_edits.before_question(ICE.before(), prompt) == expected
    assert lm.prompt_edits.question_of(prompt) == "Who rules Port Elna?"
    with pytest.raises(EditingError, match="not made by this model's chat template"):
        lm.prompt_edits.before_question(ICE.before(), "Who rules Port Elna?")


def test_the_harness_applies_chat_templates_with_contexts(model_path):
    lm = build(model_path, editor="ice", editor_args={})
    lm.tokenizer.chat_template = CHAT
    results = run(lm, ["bake_rq"], limit=1, apply_chat_template=True)
    assert all(answer.final.context.facts == 1 for answer in answers(results))


@pytest.mark.parametrize(
    "options", [{"editor": "ike", "editor_args": WORDS}, {"editor": "r_rome", "icl": True}], ids=["ike", "icl"]
)
def test_questions_with_a_chat_of_their_own_are_refused_before_the_weights_are_loaded(model_path, options):
    """The fact would stand before the chat, which begins with a BOS token of its own."""
    lm = build(model_path, **{"editor_args": None, **options})
    settings = {"wild_context": "chat_template_released"}
    with pytest.raises(EditingError, match="wild_context=chat_template_released writes each question as a chat"):
        run(lm, ["qaedit_wild_reliability"], data="qaedit.jsonl", settings=settings, limit=1)
    assert lm._model is None
    plain = build(model_path, editor="r_rome")
    results = run(plain, ["qaedit_wild_reliability"], data="qaedit.jsonl", settings=settings, limit=1)
    assert all(isinstance(answer.final, GeneratedText) for answer in answers(results))


def test_a_model_object_serves_an_evaluation_without_a_chat_after_one_with(model_path):
    lm = build(model_path, editor="ice", editor_args={})
    lm.tokenizer.chat_template = CHAT
    names = []
    for in_chat in (True, False):
        results = run(lm, ["bake_rq"], limit=1, apply_chat_template=in_chat)
        assert all(answer.final.context.facts == 1 for answer in answers(results))
        names.append(results["config"]["edited_hf"]["question_context"])
    assert names == ["chat", "task"]


@pytest.mark.parametrize("engine", ["fast", "reference"])
def test_benchmarks_run_and_report_the_contexts(model_path, engine):
    results = run(build(model_path, editor="ice", editor_args={}, engine=engine), BAKE, limit=1)
    assert all(answer.final.context.facts == 1 and answer.edit.editor == "ice" for answer in answers(results))
    assert results["results"]["bake_es"]["unscored,none"] == 0


def test_the_context_of_a_reverse_question_does_not_hold_its_answer(model_path):
    """The fact is stated forward. The published protocol states the reverse answer verbatim and is not offered."""
    lm = build(model_path, editor="ike", editor_args=WORDS)
    for line in (RECORDS / "bake_qa.jsonl").read_text().splitlines():
        record = json.loads(line)
        rewrite, reverse = record["requested_rewrite"], record["reverse_qa"]
        request = EditRequest(
            prompt=rewrite["prompt"], subject=rewrite["subject"], target_new=rewrite["target_new"]["str"]
        )
        (delta,) = context_edits("ike", request, **WORDS)
        placed = lm.prompt_edits.with_context(lm.items.score_item(reverse["prompt"], " x").item, delta).item
        text = lm.tokenizer.decode(placed.context, skip_special_tokens=True)
        assert f"{reverse['prompt']} {reverse['target_new']['str']}" not in text
        assert text.endswith(f"New Fact: {request.text} {request.target_new}\nPrompt: {reverse['prompt']}")


@pytest.mark.parametrize("tokenizer", ["byte_bpe_bos", "metaspace_bos", "unigram_bos"])
def test_the_scored_tokens_are_those_of_the_answer_for_every_tokenizer(tmp_path, tokenizer):
    """The continuation is cut from one encoding of the whole prompt: no BOS in it, no lost first token."""
    lm = build(str(save_tiny(tmp_path, "llama", tokenizer, max_position_embeddings=512)), editor="ice", editor_args={})
    item = lm.items.score_item("Port Elna is the capital of", " Dravonia").item
    placed = lm.prompt_edits.with_context(item, Delta(contexts=(ICE,))).item
    assert placed.continuation == item.continuation
    assert lm.tokenizer.decode(placed.continuation).strip() == "Dravonia"


def test_streams_and_batches_state_the_most_similar_fact(model_path):
    options = {"edits": "bake", "data": str(RECORDS / "bake_qa.jsonl"), "editor": "ice", "editor_args": {}}
    stream = run(build(model_path, mode="sequential", **options), ["bake_es"])
    batch = run(build(model_path, mode="batch", **options), ["bake_es"])
    single = run(build(model_path, editor="ice", editor_args={}), ["bake_es"])
    assert_same_answers(answers(stream), answers(batch))
    chosen = [answer.final.context for answer in answers(stream)]
    assert [context.best_fact for context in chosen] == [number // 3 for number in range(len(chosen))] and chosen
    assert all(0 < context.similarity <= 1 and context.scope_score is None for context in chosen)
    # Each edit prompt is most similar to its own fact, so the answers are those of single edits.
    assert_same_answers(answers(stream), answers(single))


def test_ordinary_tasks_in_a_stream_have_the_context_too(model_path):
    options = {"edits": "bake", "data": str(RECORDS / "bake_qa.jsonl"), "editor": "ice", "editor_args": {}}
    lm, plain = build(model_path, mode="sequential", num_edits=1, **options), build(model_path, mode="none")
    (request,) = lm.plan.groups[0]
    text = Delta(contexts=(ContextEdit(request.text, request.target_new),)).contexts[0].before()
    (scored,) = lm.loglikelihood([instance({}, "Lake", " Omber")])
    (expected,) = plain.loglikelihood([instance({}, f"{text}Lake", " Omber")])
    assert scored[0] == pytest.approx(expected[0], abs=1e-4) and scored[1] == expected[1]
    settings = {"until": ["a"], "max_gen_toks": 5}
    (written,) = lm.generate_until([instance({}, "Lake", dict(settings), "generate_until")])
    (expected,) = plain.generate_until([instance({}, f"{text}Lake", dict(settings), "generate_until")])
    assert written == expected
    rolling = [instance({}, "Lake Omber lies far away.", None, "loglikelihood_rolling")]
    rolling[0].arguments = ("Lake Omber lies far away.",)
    assert lm.loglikelihood_rolling(rolling) == pytest.approx(plain.loglikelihood_rolling(rolling), abs=1e-4)


def test_saved_contexts_are_loaded_and_used(model_path, tmp_path):
    path = tmp_path / "context.safetensors"
    context_edits("ice")[0].save(path)
    lm = build(model_path, load_edit=str(path), editor_args=None)
    (answer,) = lm.loglikelihood([instance(case(unedited=False), "Port Elna is the capital of", " Dravonia")])
    fresh = build(model_path, editor="ice", editor_args={})
    (expected,) = fresh.loglikelihood([instance(case(unedited=False), "Port Elna is the capital of", " Dravonia")])
    assert answer.final.logprob == pytest.approx(expected.final.logprob, abs=1e-6)
    assert lm.get_model_info()["edited_hf"]["editor_writes"] == ["context"]


# -- combined with another editor ------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["fast", "reference"])
def test_icl_answers_as_the_edited_model_to_the_longer_prompt(model_path, engine):
    prompt, doc = "Port Elna is the capital of", case(unedited=False)
    options = {"editor": "r_rome", "engine": engine}
    both = build(model_path, icl="fact", **options)
    (answer,) = both.loglikelihood([instance(doc, prompt, " Dravonia")])
    (alone,) = build(model_path, **options).loglikelihood([instance(doc, f"{FACT}Prompt: {prompt}", " Dravonia")])
    assert answer.final.token_logprobs == pytest.approx(alone.final.token_logprobs, abs=1e-4)
    assert answer.edit.editor == "r_rome+ice"
    assert answer.edit.diagnostics["final_loss"] == alone.edit.diagnostics["final_loss"]
    metadata = both.get_model_info()["edited_hf"]
    assert metadata["editor"] == "r_rome+ice" and metadata["editor_writes"] == ["weights", "context"]
    assert metadata["icl"] == "fact"


def test_icl_and_its_controls_show_their_part_of_the_context(model_path):
    shown = {}
    for icl in (True, "fact", "demonstrations"):
        lm = build(model_path, icl=icl, icl_args=WORDS, editor="r_rome")
        (answer,) = lm.loglikelihood([instance(case(unedited=False), "Port Elna is the capital of", " Dravonia")])
        report = answer.final.context
        shown[icl] = (report.facts, report.demonstrations + report.left_out)
    assert shown == {True: (1, 33), "fact": (1, 0), "demonstrations": (0, 32)}


def test_icl_in_a_stream_does_not_change_the_weights(model_path):
    options = {"mode": "sequential", "edits": "bake", "data": str(RECORDS / "bake_qa.jsonl"), "num_edits": 2}
    lm = build(model_path, icl="fact", **options)
    before = snapshot(lm.model, lm.tokenizer)
    assert all(answer.final.context.facts == 1 for answer in answers(run(lm, ["bake_es"], limit=2)))
    torch.manual_seed(0)
    plain = build(model_path, **options)
    run(plain, ["bake_es"], limit=2)
    for ours, theirs in zip(lm.session.stream.deltas, plain.session.stream.deltas, strict=True):
        for name, update in ours.weights().items():
            torch.testing.assert_close(update, theirs.weights()[name])
    after = snapshot(lm.model, lm.tokenizer)
    assert_same_state_but_seeds(before, after)  # the harness seeds


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"icl": "maybe"}, "icl='maybe'"),
        ({"icl": True, "editor": "ice", "editor_args": None}, "a context already"),
        ({"icl": True, "mode": "none"}, "makes no edit"),
        ({"icl_args": {"seed": 1}}, "no meaning without icl"),
        ({"icl": True, "icl_args": {"embeder": "words"}}, "Did you mean 'embedder'"),
    ],
)
def test_wrong_combinations_are_refused(model_path, options, message):
    with pytest.raises(EditingError, match=message):
        build(model_path, **options)


def test_contexts_and_edits_are_stored_and_reused(model_path, tmp_path, monkeypatch):
    first = answers(run(build(model_path, tmp_path, icl="fact"), ["bake_es"], limit=2))
    monkeypatch.setattr("edit_hooks.editors.rome.ROME.compute", lambda *a: pytest.fail("made again"))
    assert_same_answers(first, answers(run(build(model_path, tmp_path, icl="fact"), ["bake_es"], limit=2)))
    assert not list(Path(tmp_path).rglob("*.pkl"))
