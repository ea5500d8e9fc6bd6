"""Decoding settings of single questions, through the model class."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from lm_runs import build, case, instance
from ordinary_tasks import run_tasks, write_tasks
from paths import RECORDS

import lm_eval_editing_autoload
from edit_hooks.answers import ContextReport, FailedAnswer, GeneratedText, answer_from_json, answer_to_json
from edit_hooks.contract.tiny_models import build_tokenizer, save_tiny
from edit_hooks.decoding import Decoding, Sampling
from edit_hooks.inference.generation.continuations import generated_text
from edit_hooks.inference.items import GenerateItem
from edit_hooks.lm.model import EditedHFLM
from edit_hooks.utils.errors import EditingError

PROMPT = "Port Elna is the capital of"
TASK = {"until": ["e"], "max_gen_toks": 6}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("tiny"), "llama"))


@pytest.fixture(scope="module")
def lm(model_path: str) -> EditedHFLM:
    return build(model_path)


def generate(
    lm: EditedHFLM, *settings: Decoding | None, model: str = "edited", task: Any = TASK, prompt: str = PROMPT
) -> list[GeneratedText]:
    """Answers to one prompt under different settings of the question."""
    requests = []
    for decoding in settings:
        asked = {"model": model, "decoding": None if decoding is None else decoding.to_json()}
        requests.append(instance({**case(), "asked": asked}, prompt, dict(task), "generate_until"))
    return [answer.final for answer in lm.generate_until(requests)]


def test_a_question_without_settings_has_those_of_its_task(lm: EditedHFLM) -> None:
    plain, same = generate(lm, None, Decoding())
    assert plain == same and len(plain.token_ids or ()) <= 6


def test_an_answer_as_long_as_a_text_is_not_stopped_earlier(lm: EditedHFLM) -> None:
    """AR-MATCH: as many tokens as the gold answer has behind the prompt."""
    for gold in (" Dravonia", " the old town of Dravonia by the sea"):
        tokens = len(lm.tokenizer(PROMPT + gold)["input_ids"]) - len(lm.tokenizer(PROMPT)["input_ids"])
        (exact,) = generate(lm, Decoding(length_of=gold))
        assert len(exact.token_ids or ()) == tokens and exact.stop == "length"


def test_the_text_that_fixes_the_length_can_count_by_itself(lm: EditedHFLM) -> None:
    """GRACE's released evaluation: the gold answer's tokens without prompt and space before it."""
    gold, prompt = "f Dravonia", PROMPT[:-1]  # in the prompt's context, " of" is one token
    settings = [Decoding(length_of=gold, length_of_alone=alone) for alone in (True, False)]
    alone, joined = generate(lm, *settings, prompt=prompt)
    assert list(alone.target_ids or ()) == lm.tokenizer(gold, add_special_tokens=False)["input_ids"]
    assert len(alone.token_ids or ()) == len(alone.target_ids or ())
    assert joined.target_ids is not None and joined.target_ids != alone.target_ids
    assert list(joined.target_ids) == lm.tokenizer(" of Dravonia", add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("engine", ["fast", "reference"])
def test_a_teacher_forced_answer_is_the_argmax_of_the_scored_text(model_path: str, engine: str) -> None:
    lm = build(model_path, engine=engine)
    gold = " the old town of Dravonia by the sea"
    free, forced = generate(lm, Decoding(length_of=gold), Decoding(length_of=gold, teacher_forced=True))
    (scored,) = lm.loglikelihood([instance({**case(), "asked": {"model": "edited"}}, PROMPT, gold)])
    assert forced.token_ids == scored.final.token_argmax and forced.target_ids == scored.final.token_ids
    assert free.token_ids is not None and forced.token_ids is not None
    assert free.token_ids[0] == forced.token_ids[0] and free.token_ids != forced.token_ids
    assert forced.stop == "length" and forced.raw == lm.tokenizer.decode(list(forced.token_ids))


def test_prompt_and_answer_together_have_a_length_and_are_one_text(tiny_path: Any) -> None:
    """This tokenizer, like Llama-2's, drops the space at the beginning of a text; after the prompt it is kept."""
    lm = build(str(tiny_path("llama", "metaspace_bos")))
    prompt = lm.tokenizer(PROMPT)["input_ids"]  # with BOS, which counts
    draws = [Sampling(seed=seed, temperature=4.0) for seed in range(40)]
    wholes = generate(lm, *(Decoding(until=(), ignore_end=True, max_total_tokens=14, sampling=draw) for draw in draws))
    length = 14 - len(prompt)
    alone = generate(lm, *(Decoding(until=(), ignore_end=True, max_new_tokens=length, sampling=draw) for draw in draws))
    assert [answer.token_ids for answer in wholes] == [answer.token_ids for answer in alone]
    assert {(len(answer.token_ids or ()), answer.stop) for answer in wholes} == {(length, "length")}
    for answer in wholes:
        text = lm.tokenizer.decode([*prompt, *(answer.token_ids or ())], skip_special_tokens=True)
        assert PROMPT + answer.raw == text
    assert any(whole.raw == f" {answer.raw}" for whole, answer in zip(wholes, alone, strict=True))


def test_a_space_before_the_answer_is_kept_under_every_tokenizer() -> None:
    for kind, word in (("metaspace_bos", "\u2581the"), ("unigram_bos", "\u2581the"), ("byte_bpe", "\u0120the")):
        tokenizer = build_tokenizer(kind)
        context = tuple(tokenizer("Port Elna is in")["input_ids"])
        item = GenerateItem(context, (), 1, with_prompt=True)
        token = tokenizer.convert_tokens_to_ids(word)
        assert token not in (None, tokenizer.unk_token_id), kind
        assert generated_text(tokenizer, [token], item, "length").raw == " the", kind


def test_a_prompt_that_fills_the_total_length_is_unscored(lm: EditedHFLM) -> None:
    (answer,) = generate(lm, Decoding(max_total_tokens=3))
    assert isinstance(answer, FailedAnswer) and "has no room in 3 tokens" in answer.reason


def test_a_task_s_length_does_not_count_where_a_question_has_its_own(model_path: str) -> None:
    """Neither does the budget for thoughts: texts of a fixed length have none, whatever they contain."""
    lm = build(model_path, think_end_token="#", max_thought_tokens=4000)
    settings = (Decoding(length_of=" Dravonia"), Decoding(max_total_tokens=20, until=(), ignore_end=True))
    exact, whole = generate(lm, *settings, task={"until": [], "max_gen_toks": lm.max_length})
    assert exact.target_ids is not None and len(exact.token_ids or ()) == len(exact.target_ids)
    assert len(whole.token_ids or ()) == 20 - len(lm.tokenizer(PROMPT)["input_ids"])
    assert (whole.unfinished, whole.thought) == (exact.unfinished, exact.thought) == (False, None)
    with pytest.raises(EditingError, match=r"max_gen_toks=3 with max_thought_tokens=4000 leaves no room"):
        generate(lm, Decoding(max_new_tokens=3), task={"max_gen_toks": lm.max_length})
    (fits,) = generate(build(model_path), Decoding(max_new_tokens=3), task={"until": [], "max_gen_toks": lm.max_length})
    assert len(fits.token_ids or ()) == 3


def test_a_text_longer_than_the_model_makes_its_question_unscored(lm: EditedHFLM) -> None:
    settings = (Decoding(length_of=" Dravonia" * lm.max_length), Decoding(length_of=" Dravonia"))
    long, short = generate(lm, *settings)
    assert isinstance(long, FailedAnswer) and f"leaves no room in {lm.max_length} positions" in long.reason
    assert isinstance(short, GeneratedText)


def test_questions_that_lose_their_beginning_are_counted_and_named(
    model_path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """They are scored as in lm-eval; readers of samples know the field from context edits."""
    lm, long = build(model_path, max_length=64), 100 * "x " + PROMPT
    settings = {"until": [], "max_gen_toks": 6}
    scored = lm.loglikelihood([instance(case(), prompt, " Dravonia") for prompt in (long, PROMPT, long)])
    assert [record.message[:64] for record in caplog.records if "max_length" in record.message] == [
        "2 of 3 questions do not fit into max_length=64 with their answer"
    ]
    assert "max_gen_toks" not in caplog.text
    caplog.clear()
    written = lm.generate_until([instance(case(), prompt, settings, "generate_until") for prompt in (long, PROMPT)])
    assert "1 of 2 questions do not fit" in caplog.text and "a smaller max_gen_toks or max_thought" in caplog.text
    stock = build(model_path, max_length=64, mode="none").loglikelihood([instance({}, long, " Dravonia")])
    assert scored[0].final.unedited.logprob == pytest.approx(stock[0][0], abs=1e-4)
    for answers in (scored, written):
        assert [answer.final.context for answer in answers[:2]] == [ContextReport(cut=True), None]
        for answer in answers:
            assert answer_from_json(answer_to_json(answer.final)) == answer.final
    caplog.clear()
    generate(lm, None)
    assert "do not fit" not in caplog.text


def test_answers_of_another_total_length_are_stored_apart(model_path: str, tmp_path: Path) -> None:
    short, long = (Decoding(until=(), ignore_end=True, max_total_tokens=length) for length in (20, 25))
    first = generate(build(model_path, tmp_path), short, model="unedited")
    again = generate(build(model_path, tmp_path), long, short, model="unedited")
    assert again[1:] == first and len(again[0].token_ids or ()) == len(first[0].token_ids or ()) + 5


def test_two_settings_of_one_length_are_an_error() -> None:
    for other in ({"max_new_tokens": 5}, {"length_of": "x"}, {"max_thought_tokens": 5}):
        with pytest.raises(EditingError, match="max_total_tokens fixes the length"):
            Decoding(max_total_tokens=10, **other)
    with pytest.raises(EditingError, match="max_total_tokens is 0"):
        Decoding(max_total_tokens=0)


def test_a_question_has_its_own_length_and_stops(lm: EditedHFLM) -> None:
    free, longer = generate(lm, Decoding(until=()), Decoding(until=(), max_new_tokens=12, ignore_end=True))
    assert len(longer.token_ids or ()) == 12 and (longer.token_ids or ())[:6] == free.token_ids
    (stopped,) = generate(lm, Decoding(until=(free.raw[3],), max_new_tokens=12))
    assert stopped.stop == "stop_string" and free.raw[3] in stopped.raw


def test_draws_are_the_same_in_any_order_and_differ_from_each_other(lm: EditedHFLM, model_path: str) -> None:
    settings = [Decoding(until=(), sampling=Sampling(seed=4, draw=number, top_k=20)) for number in range(7)]
    together = generate(lm, *settings)
    assert len({answer.token_ids for answer in together}) > 3
    assert generate(lm, *settings[::-1])[::-1] == together
    assert [generate(build(model_path, max_batch_tokens=40), one)[0] for one in settings[:2]] == together[:2]
    (other,) = generate(lm, Decoding(until=(), sampling=Sampling(seed=5, top_k=20)))
    assert other.token_ids != together[0].token_ids


def test_draws_of_the_unedited_model_are_stored_under_their_seed(model_path: str, tmp_path: Path) -> None:
    first, second = (Decoding(until=(), sampling=Sampling(seed=seed)) for seed in (1, 2))
    fresh = generate(build(model_path), first, second, model="unedited")
    assert generate(build(model_path, tmp_path), first, model="unedited") == fresh[:1]
    again = build(model_path, tmp_path)  # finds the first, and must not take it for the second
    assert generate(again, first, second, model="unedited") == fresh


def test_sampling_asked_for_by_a_task_is_still_refused(lm: EditedHFLM) -> None:
    with pytest.raises(EditingError, match="editing benchmarks decode greedily"):
        generate(lm, None, task={**TASK, "do_sample": True, "temperature": 0.7})
    sampled = {**TASK, "do_sample": True, "temperature": 0.7, "top_k": 3}  # as a task writes them for stock models
    assert generate(lm, Decoding(sampling=Sampling(temperature=0.7, top_k=3)), task=sampled)


@pytest.mark.parametrize(("editor", "mode"), [("ice", "batch"), ("grace", "sequential")])
@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        (
            PROMPT,
            {"do_sample": True, "temperature": 0.7},
            "ask for sampling; .*lm-eval's own tasks are decoded greedily",
        ),
        (PROMPT, {"repetition_penalty": 1.2}, "ask for repetition_penalty; .*lm-eval's own tasks are decoded greedily"),
        (PROMPT, {"max_gen_toks": 100_000}, "leaves no room"),
        ("\ud83d", {}, "surrogate"),
    ],
)
def test_what_a_stock_task_cannot_ask_is_refused_before_the_edits(
    model_path: str, editor: str, mode: str, prompt: str, settings: dict[str, Any], message: str
) -> None:
    edits = {"edits": "bake", "data": str(RECORDS / "bake_qa.jsonl")}
    lm = build(model_path, editor=editor, editor_args={}, mode=mode, **edits)
    plain = instance({}, PROMPT, {"max_gen_toks": 4}, "generate_until")
    with pytest.raises(EditingError, match=message):
        lm.generate_until([plain, instance({}, prompt, {"max_gen_toks": 4, **settings}, "generate_until")])
    assert lm._model is None and lm._session is None


@pytest.mark.parametrize(("editor", "refused"), [("ice", True), ("ft_m", False)])
def test_generation_settings_of_a_task_are_refused_before_the_likelihoods_of_another(
    model_path: str, tmp_path: Path, editor: str, refused: bool
) -> None:
    """lm-eval asks for the likelihoods of the first task first, and for them the edits are made."""
    lm_eval_editing_autoload.install()
    data = {"data": str(RECORDS / "bake_qa.jsonl")}
    lm = build(model_path, editor=editor, editor_args={}, mode="batch", edits="bake", num_edits=1, **data)
    settings = {"gen_kwargs": "do_sample=true,temperature=0.7", "limit": 1}
    run = functools.partial(run_tasks, lm, write_tasks(tmp_path), ["tiny_choice", "tiny_text"], data, **settings)
    if refused:
        with pytest.raises(EditingError, match=r"ask for sampling; .*lm-eval's own tasks are decoded greedily"):
            run()
        assert lm._model is None and lm._session is None
    else:
        assert len(run()["samples"]["tiny_text"]) == 1


@pytest.mark.parametrize(
    ("decoding", "message"),
    [
        ({"length_of_alone": True}, "need length_of"),
        ({"length_of": "x", "teacher_forced": True, "sampling": {}}, "drop sampling"),
        ({"max_tokens": 3}, "Did you mean 'max_new_tokens'"),
        ({"sampling": {"top_p": 2.0}}, "top_p is 2.0"),
    ],
)
def test_settings_that_are_not_accepted_are_errors(lm: EditedHFLM, decoding: dict[str, Any], message: str) -> None:
    doc = {**case(), "asked": {"model": "edited", "decoding": decoding}}
    with pytest.raises(EditingError, match=message):
        lm.generate_until([instance(doc, PROMPT, dict(TASK), "generate_until")])


def test_an_unknown_model_to_ask_is_an_error(lm: EditedHFLM) -> None:
    doc = {**case(), "asked": {"model": "both models"}}
    with pytest.raises(EditingError, match="edited, unedited, both are accepted"):
        lm.generate_until([instance(doc, PROMPT, dict(TASK), "generate_until")])
