"""Options of lm-eval's class on editing documents: each one is in the table, and does there what the table says."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.models.huggingface import HFLM
from lm_runs import build, case, instance
from paths import RECORDS
from reader_model import save_chain
from transformers import AutoModelForCausalLM, AutoTokenizer

from edit_hooks import EditingError, EditRequest
from edit_hooks.answers import GeneratedText, answer_from_json, answer_to_json
from edit_hooks.contract.tiny_models import build_tokenizer
from edit_hooks.lm.model import EditedHFLM
from edit_hooks.lm.options.editing import check_known_options
from edit_hooks.lm.options.harness import PARENT_OPTIONS
from edit_hooks.locate.values.rows import rewriting_row
from lm_eval_tasks.common.scoring.measures import agree_gen, both_empty, evaluate, generated_match

PROMPT = "Port Elna is the capital of"


@pytest.fixture(scope="module")
def model_path(tiny_path: Any) -> str:
    return str(tiny_path("llama", "byte_bpe_bos"))


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HFLM, "_create_model", lambda *_, **__: pytest.fail("the weights were loaded"))
    monkeypatch.setattr(HFLM, "_create_tokenizer", lambda *_, **__: pytest.fail("the tokenizer was loaded"))


def score(lm: EditedHFLM, context: str = PROMPT, target: str = " Dravonia") -> Any:
    (answer,) = lm.loglikelihood([instance(case(unedited=False), context, target)])
    return answer.final


def test_the_table_has_every_option_of_this_lm_eval() -> None:
    names = set(inspect.signature(HFLM).parameters) - {"kwargs"}
    assert set(PARENT_OPTIONS) == names, f"decide what these options do: {names ^ set(PARENT_OPTIONS)}"


def test_an_option_that_the_table_lacks_is_refused(no_weights: None) -> None:
    class NewerHFLM:
        def __init__(self, pretrained: str, speculative_model: str | None = None, **kwargs: Any) -> None: ...

    check_known_options({"speculative_model": None}, NewerHFLM, [])
    with pytest.raises(EditingError, match="an option that edited_hf does not know"):
        check_known_options({"speculative_model": "x"}, NewerHFLM, [])


REFUSED_VALUES: dict[str, Any] = {
    "backend": "seq2seq",
    "truncation": True,
    "softmax_dtype": "bfloat16",
    "mixed_precision_dtype": "bfloat16",
    "use_fast_tokenizer": False,
    "tp_plan": "auto",
    "autogptq": True,
    "gptqmodel": True,
    "gguf_file": "model.gguf",
}


def test_every_refused_option_is_tried_here() -> None:
    assert set(REFUSED_VALUES) == {name for name, option in PARENT_OPTIONS.items() if option.effect == "refused"}


@pytest.mark.parametrize("name", REFUSED_VALUES)
def test_a_refused_option_is_refused_before_loading(no_weights: None, model_path: str, name: str) -> None:
    with pytest.raises(EditingError, match=f"{name}=.* cannot be used with edits"):
        build(model_path, **{name: REFUSED_VALUES[name]})


def test_harmless_values_of_refused_options_are_accepted(model_path: str) -> None:
    default = inspect.signature(HFLM).parameters
    for name in REFUSED_VALUES:
        assert build(model_path, mode="none", **{name: default[name].default}).options.mode == "none"
    texts = {"softmax_dtype": "float32", "use_fast_tokenizer": "True", "truncation": "False"}
    assert build(model_path, mode="none", **texts).options.mode == "none"


# -- honored options ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adds_bos", [True, False])
def test_add_bos_token_holds_for_edits_and_questions(model_path: str, adds_bos: bool) -> None:
    lm = build(model_path, mode="none", add_bos_token=adds_bos)
    bos = lm.tokenizer.bos_token_id
    request = EditRequest(prompt="{} is the capital of", subject="Port Elna", target_new="Dravonia")
    edited = rewriting_row(lm.tokenizer, request, "{}").ids
    scored = lm.items.score_item(PROMPT, " Dravonia").item.context
    generated = lm.items.generate_item(PROMPT, {"max_gen_toks": 2}).item.context
    assert [ids.count(bos) for ids in (edited, scored, generated)] == [int(adds_bos)] * 3


def test_add_bos_token_is_refused_where_the_tokenizer_ignores_it(tiny_model: Any) -> None:
    """A tokenizer object is used as it is; edits would follow it and questions the option."""
    with pytest.raises(EditingError, match="add_bos_token=False: this tokenizer does not follow it"):
        EditedHFLM(tiny_model("llama"), tokenizer=build_tokenizer("byte_bpe_bos"), add_bos_token=False, device="cpu")


def test_prefix_token_id_is_the_context_of_an_empty_prompt(model_path: str) -> None:
    lm = build(model_path, mode="none", prefix_token_id=7)
    assert lm.items.score_item("", "Velm").item.context == (7,)


def test_max_length_cuts_prompts_at_their_beginning(model_path: str) -> None:
    lm = build(model_path, mode="none", max_length=5)
    item = lm.items.score_item(PROMPT, " Velm").item
    whole = build(model_path, mode="none").items.score_item(PROMPT, " Velm").item
    assert len(item.context) + len(item.continuation) == 6 < len(whole.context)
    assert item.context == whole.context[-len(item.context) :] and item.continuation == whole.continuation


@pytest.mark.parametrize("options", [{"logits_cache": False}, {"batch_size": 4}, {"max_batch_size": 2}])
def test_options_of_batching_change_no_number(model_path: str, options: dict[str, Any]) -> None:
    plain, other = (score(build(model_path, mode="none", **more)) for more in ({}, options))
    assert other.logprob == pytest.approx(plain.logprob, abs=1e-5) and other.token_argmax == plain.token_argmax


def test_softmax_is_float32_on_a_half_precision_model(tiny_path: Callable[..., Path]) -> None:
    path = str(tiny_path("llama", "byte_bpe_bos", torch.bfloat16))
    lm = build(path, mode="none", dtype="bfloat16", softmax_dtype="float32")
    item = lm.items.score_item(PROMPT, " Dravonia").item
    ids = torch.tensor([[*item.context, *item.continuation]])
    with torch.no_grad():
        logprobs = lm.model(ids).logits[0].float().log_softmax(-1)
    start = len(item.context) - 1
    expected = sum(float(logprobs[start + i, token]) for i, token in enumerate(item.continuation))
    assert score(lm).logprob == pytest.approx(expected, abs=2e-2)


def test_subfolder_names_model_and_tokenizer(model_path: str, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(model_path).save_pretrained(tmp_path / "weights")
    AutoTokenizer.from_pretrained(model_path).save_pretrained(tmp_path / "weights")
    inside = score(build(str(tmp_path), mode="none", subfolder="weights"))
    assert inside.logprob == score(build(model_path, mode="none")).logprob


def test_delta_weights_belong_to_the_unedited_model(model_path: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    model.save_pretrained(tmp_path)
    with_delta, plain = (score(build(model_path, mode="none", **more)) for more in ({"delta": str(tmp_path)}, {}))
    assert with_delta.logprob != plain.logprob


def test_template_options_reach_edits_and_questions(tiny_model: Any) -> None:
    tokenizer = build_tokenizer("byte_bpe_bos")  # lm-eval gives it a pad token
    tokenizer.chat_template = (
        "{% for m in messages %}<user>{{ m['content'] }}</user>{% endfor %}"
        "{{ mood }}<think>{{ enable_thinking }}</think>"
    )
    try:
        options = {"chat_template_args": {"mood": "calm"}, "enable_thinking": False, "edit_context": "chat"}
        lm = EditedHFLM(tiny_model("llama"), tokenizer=tokenizer, device="cpu", store="off", **options)
        assert lm.edit_context.after == "</user>calm<think>False</think>"
        assert lm.apply_chat_template([{"role": "user", "content": "x"}]) == lm.edit_context.wrap("x")
    finally:
        tokenizer.chat_template = None


# -- thoughts ----------------------------------------------------------------------------------------------------------

# The model writes "?" and a line break as a thought, "#" as its end, then the answer "A" and the stop string "!".
FINISHED, UNFINISHED = "?\n#A!", "?\nA!"
UNTIL: dict[str, Any] = {"until": ["\n", "!"], "max_gen_toks": 8}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., EditedHFLM]:
    """`thinker(FINISHED, think_end_token="#")`: a model that writes a text after "of", with options."""
    tokenizer = build_tokenizer("byte_bpe_bos")

    @functools.cache
    def saved(text: str) -> str:
        folder = tmp_path_factory.mktemp("thinker")
        tokens = tokenizer(PROMPT, add_special_tokens=False).input_ids[-1:]
        tokens += [tokenizer(character, add_special_tokens=False).input_ids[-1] for character in text]
        assert len(set(tokens)) == len(tokens)
        return str(save_chain(folder, dict(zip(tokens, [*tokens[1:], tokens[1]], strict=True))))

    return lambda text, **options: build(saved(text), **{"mode": "none", **options})


def generated(lm: EditedHFLM, prompt: str = PROMPT) -> GeneratedText:
    (answer,) = lm.generate_until([instance(case(), prompt, UNTIL, "generate_until")])
    assert isinstance(answer.final, GeneratedText)
    return answer.final


def think_end(form: str) -> str | int:
    """The end of thoughts as a text, as a token id, or as the text of an id, which lm-eval accepts as well."""
    token = build_tokenizer("byte_bpe_bos")("#", add_special_tokens=False).input_ids[-1]
    return {"text": "#", "id": token, "digits": str(token), "several tokens": "\n#"}[form]


@pytest.mark.parametrize("engine", ["fast", "reference"])
@pytest.mark.parametrize("form", ["text", "id", "digits", "several tokens"])
def test_the_answer_follows_the_thought(thinker: Callable[..., EditedHFLM], form: str, engine: str) -> None:
    """Stop strings inside the thought do not end it, as they would end an answer."""
    answer = generated(thinker(FINISHED, think_end_token=think_end(form), engine=engine))
    cut = answer.until(UNTIL["until"])
    assert (cut.text, cut.thought, cut.stop, cut.unfinished) == ("A", "?\n#", "stop_string", False)
    assert answer.token_ids is not None and len(answer.token_ids) == 2
    assert cut.unedited is not None and cut.unedited.text == "A"
    assert answer_from_json(answer_to_json(answer)) == answer
    plain = generated(thinker(FINISHED, engine=engine))
    assert (plain.until(UNTIL["until"]).text, plain.thought) == (
        "?",
        None,
    )  # without the option the thought is the answer, as in lm-eval


@pytest.mark.parametrize("engine", ["fast", "reference"])
def test_an_unfinished_thought_is_unscored(thinker: Callable[..., EditedHFLM], engine: str) -> None:
    answer = generated(thinker(UNFINISHED, think_end_token="#", engine=engine))
    assert answer.unfinished and answer.stop == "length" and str(answer.thought).startswith("?\nA!?")
    for unedited in (False, True):
        score = evaluate(lambda unedited=unedited: generated_match(answer, "A", unedited=unedited))
        assert score.value is None and "thought has no end" in str(score.reason)
    for measure in (agree_gen, both_empty):
        assert "thought has no end" in str(evaluate(lambda measure=measure: measure(answer)).reason)


@pytest.mark.parametrize("engine", ["fast", "reference"])
def test_a_thought_has_a_budget_beside_that_of_the_answer(thinker: Callable[..., EditedHFLM], engine: str) -> None:
    """The answer to "of" has a thought of three tokens, then "A!" and so on, of which the task allows one."""

    def answer(budget: int | None, length: int = 1) -> GeneratedText:
        lm = thinker(FINISHED, think_end_token="#", engine=engine, max_thought_tokens=budget)
        request = instance(case(), PROMPT, {**UNTIL, "max_gen_toks": length}, "generate_until")
        (found,) = lm.generate_until([request])
        assert isinstance(found.final, GeneratedText)
        return found.final

    assert answer(None).unfinished  # thought and answer share one token
    assert answer(2).unfinished
    finished = answer(3)
    assert (finished.raw, finished.thought, finished.stop) == ("A", "?\n#", "length")
    assert answer(64, 2).until(UNTIL["until"]).text == "A"
    assert not thinker(FINISHED, think_end_token="#", max_thought_tokens=3).items.generate_item("<think># ", {}).cut


@pytest.mark.parametrize(
    "form", ["text", *(pytest.param(form, marks=pytest.mark.slow) for form in ("id", "several tokens"))]
)
def test_an_edit_without_effect_leaves_thoughts_of_ordinary_tasks_alone(
    thinker: Callable[..., EditedHFLM], form: str
) -> None:
    """lm-eval's class answers without hooks and contexts; there a stop string inside a thought ends the generation."""
    facts = {"mode": "batch", "edits": "bake", "data": str(RECORDS / "bake_qa.jsonl")}
    without_effect = {"editor": "ice", "editor_args": {"min_similarity": 0.999}, "max_thought_tokens": 9, **facts}
    asked: list[tuple[list[str], int]] = [(["\n", "!"], 8), (["!"], 8), (["!"], 3), (["\n#A"], 8), ([], 20)]
    requests = [
        instance({}, prompt, {"until": until, "max_gen_toks": length}, "generate_until")
        for until, length in asked
        for prompt in (PROMPT, "<think># of")
    ]
    requests.append(instance({}, 1500 * "x " + "of", {"max_gen_toks": 8}, "generate_until"))
    for text in (FINISHED, UNFINISHED):
        stock, edited = (
            thinker(text, think_end_token=think_end(form), **options).generate_until(requests)
            for options in ({}, without_effect)
        )
        assert edited == stock


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_thought_tokens": 9}, "give think_end_token as well"),
        ({"max_thought_tokens": 0, "think_end_token": "#"}, "max_thought_tokens"),
    ],
)
def test_a_budget_for_thoughts_without_sense_is_refused(
    thinker: Callable[..., EditedHFLM], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(EditingError, match=message):
        thinker(FINISHED, **options)


def test_a_prompt_that_ends_the_thought_is_answered_at_once(thinker: Callable[..., EditedHFLM]) -> None:
    """Chat templates with enable_thinking=false write an empty thought into the prompt."""
    lm = thinker(FINISHED, think_end_token="#")
    answer = generated(lm, "<think># ")
    assert answer.thought is None and not answer.unfinished
    assert lm.items.generate_item(PROMPT, {"max_gen_toks": 4}).item.think_end is not None


THINKING = (  # as Qwen3's: the last answer has a thought, and the thoughts of those before it are left out
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)
CLOSED = "a <think>no</think> b"


@pytest.mark.parametrize("as_id", [False, True])
@pytest.mark.parametrize(
    ("messages", "ended"),
    [
        ([("user", "The x is"), ("assistant", "The answer is")], True),
        ([("user", "The x is"), ("assistant", "The x is")], True),
        ([("user", "The x is"), ("assistant", "<think>I see")], False),
        ([("user", "think"), ("assistant", "<think>I see</think> It is")], True),
        ([("user", "The x is")], False),
        ([("user", CLOSED)], False),
        ([("user", "q"), ("assistant", CLOSED), ("user", "The x is")], False),
        ([("user", "q"), ("assistant", CLOSED), ("user", "The x is"), ("assistant", "The answer is")], True),
    ],
)
def test_a_chat_that_ends_the_thought_before_the_beginning_of_the_answer(
    tiny_model: Any, messages: list[tuple[str, str]], ended: bool, as_id: bool
) -> None:
    """A `gen_prefix` follows the empty thought; closed thoughts of demonstrations end no thought of the answer."""
    tokenizer = build_tokenizer("byte_bpe_bos")
    tokenizer.add_special_tokens({"additional_special_tokens": ["</think>"]})
    tokenizer.chat_template = THINKING
    end = tokenizer.convert_tokens_to_ids("</think>") if as_id else "</think>"
    lm = EditedHFLM(tiny_model("llama"), tokenizer=tokenizer, device="cpu", store="off", think_end_token=end)
    chat = [{"role": role, "content": text} for role, text in messages]
    prompt = lm.apply_chat_template(chat, add_generation_prompt=messages[-1][0] == "user")
    assert (lm.items.generate_item(prompt, {"max_gen_toks": 4}).item.think_end is None) == ended
    lm.begin_evaluation()  # in a prompt that is no chat of this evaluation only its end is read
    assert lm.items.generate_item(prompt, {"max_gen_toks": 4}).item.think_end is not None
    assert lm.items.generate_item("<think>x</think>\n", {"max_gen_toks": 4}).item.think_end is None


def test_targets_are_not_scored_as_thoughts(thinker: Callable[..., EditedHFLM]) -> None:
    lm = thinker(FINISHED, think_end_token="#", enable_thinking=True)
    with pytest.raises(EditingError, match="would be scored as a thought"):
        score(lm)
    assert lm._model is None
