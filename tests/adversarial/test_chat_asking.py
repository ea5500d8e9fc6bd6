"""Chat templates: only the target's own tokens count, and an edit in a chat is made on the text that is asked."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from family_tokenizers import FAMILIES, build_family_tokenizer
from lm_eval.models.huggingface import HFLM
from lm_runs import answers, build, case, instance, run
from transformers import PreTrainedTokenizerFast

from edit_hooks import EditingError, EditRequest
from edit_hooks.answers import EditedAnswer
from edit_hooks.lm.model import EditedHFLM
from edit_hooks.locate.values.rows import rewriting_row
from edit_hooks.modeling.tokens import encode
from edit_hooks.prompt_context import PromptContext, answer_separator

QUESTION, TARGETS = "The capital of Ostravia is", ("Velm", "42", "über", "the red lighthouse")
MESSAGES = [{"role": "user", "content": QUESTION}]
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<turn>{{ m['role'] }}\n{{ m['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>model\n{% endif %}"
)

INSTRUCTION = "{% for m in messages %}[INST] {{ m['content'] }} [/INST]{% endfor %}"

tokenizer_of = functools.cache(build_family_tokenizer)
each_family = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(scope="module")
def chat_model(tiny_model: Any) -> Any:
    """`chat_model("gemma")`: `edited_hf` with the tokenizer of a family; no weight is used."""

    def make(family: str) -> EditedHFLM:
        return EditedHFLM(tiny_model("llama"), tokenizer=tokenizer_of(family), mode="none", store="off", device="cpu")

    return functools.cache(make)


@pytest.fixture(scope="module")
def model_path(tiny_path: Any) -> str:
    return str(tiny_path("llama", "byte_bpe_bos"))


def ids_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """The encoding of a text as the harness makes it, with one BOS."""
    starts = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
    return list(tokenizer(text, add_special_tokens=not starts)["input_ids"])


@each_family
@pytest.mark.parametrize("target", TARGETS)
def test_only_the_tokens_of_the_target_are_counted(chat_model: Any, family: str, target: str) -> None:
    lm = chat_model(family)
    prompt = lm.apply_chat_template(MESSAGES)
    separator = answer_separator(lm.apply_chat_template)
    assert separator == FAMILIES[family].separator
    item = lm.items.score_item(prompt, separator + target).item
    assert [*item.context, *item.continuation] == ids_of(lm.tokenizer, prompt + separator + target)
    scored = lm.tok_decode(list(item.continuation), skip_special_tokens=False)
    assert scored.strip() == target and "\n" not in scored
    assert not set(item.continuation) & set(lm.tokenizer.all_special_ids)
    # White space in a token of its own is the space of the separator, or the piece that Llama-2's rule puts first.
    first = lm.tok_decode([item.continuation[0]])
    assert first.strip() or separator == " " or FAMILIES[family].pieces == "prepend"
    assert list(item.context) == ids_of(lm.tokenizer, prompt)


@each_family
def test_a_rendered_chat_has_one_bos(chat_model: Any, family: str) -> None:
    """Asked by likelihood, asked by generation, and edited: the template's BOS is the only one."""
    lm = chat_model(family)
    prompt = lm.apply_chat_template(MESSAGES)
    scored = lm.items.score_item(prompt, "Velm").item.context
    generated = lm.items.generate_item(prompt, {"max_gen_toks": 4}).item.context
    edited = encode(lm.tokenizer, prompt).ids
    assert list(scored)[:2] == list(generated)[:2] == edited[:2]
    wanted = int(FAMILIES[family].bos is not None and prompt.startswith(str(FAMILIES[family].bos)))
    wanted = max(wanted, int(FAMILIES[family].adds_bos))
    for ids in (scored, generated, edited):
        assert list(ids).count(lm.tokenizer.bos_token_id) == wanted
        assert ids[-1] != lm.tokenizer.eos_token_id


@each_family
@pytest.mark.parametrize("target", TARGETS)
def test_an_edit_in_a_chat_is_made_on_the_tokens_that_are_asked(
    tiny_model: Any, chat_model: Any, family: str, target: str
) -> None:
    options = {"tokenizer": tokenizer_of(family), "store": "off", "device": "cpu"}
    lm = EditedHFLM(tiny_model("llama"), edit_context="chat", editor="rome", **options)
    bare = EditRequest(prompt="The capital of {} is", subject="Ostravia", target_new=target)
    request = bare.in_context(lm.edit_context)
    row = rewriting_row(lm.tokenizer, request, "{}")
    asked = chat_model(family)
    prompt = asked.apply_chat_template(MESSAGES)
    item = asked.items.score_item(prompt, answer_separator(asked.apply_chat_template) + target).item
    assert [*row.ids, row.labels[-1][1]] == [*item.context, *item.continuation]
    assert tuple(token for _, token in row.labels) == item.continuation
    text, (start, end) = request.text, request.subject_span or (0, 0)
    assert text[start:end] == "Ostravia"
    spans = encode(lm.tokenizer, text).offsets
    assert spans[row.position][0] < end <= spans[row.position][1]
    inside = rewriting_row(lm.tokenizer, request, "He said so. {}")
    user = FAMILIES[family].user.partition("QUESTION")[0].strip()
    words = lm.tok_decode(list(inside.ids), skip_special_tokens=False)
    assert words.index(user or "") <= words.index("He said so.") < words.index("Ostravia")


def test_a_line_break_of_the_template_is_not_scored(model_path: str) -> None:
    """The finding: the header's line break was the first target token, which any model gets right."""

    def counts(chat: bool) -> list[int | None]:
        lm = build(model_path, mode="none")
        lm.tokenizer.chat_template = GEMMA
        found = answers(run(lm, ["qaedit_syn_reliability"], "qaedit.jsonl", apply_chat_template=chat, limit=4))
        return [answer.final.num_tokens for answer in found]

    bare, chat = counts(False), counts(True)
    lm = build(model_path, mode="none")
    texts = ["\n" in lm.tok_decode([token]) for token in range(len(lm.tokenizer))]
    assert any(texts)  # this tokenizer has a token for a line break
    assert len(bare) == len(chat) == 4
    # After a space the target may have one token more or less than at the start of a line; the break is none of them.
    assert all(abs(a - b) <= 1 for a, b in zip(bare, chat, strict=True) if a is not None and b is not None)
    lm.tokenizer.chat_template = GEMMA
    found = answers(run(lm, ["qaedit_syn_reliability"], "qaedit.jsonl", apply_chat_template=True, limit=4))
    assert all("\n" not in lm.tok_decode(list(answer.final.token_ids)) for answer in found)


def test_the_name_of_a_template_that_would_not_be_applied_is_refused(model_path: str) -> None:
    """lm-eval's classes record the named template and apply the tokenizer's default."""
    lm = build(model_path, mode="none")
    lm.tokenizer.chat_template = {"default": GEMMA, "other": INSTRUCTION}
    assert lm.chat_template("default") == lm.chat_template(True) == GEMMA
    with pytest.raises(
        EditingError, match="--apply_chat_template other: the tokenizer's template 'default' is applied"
    ):
        lm.chat_template("other")
    lm.tokenizer.chat_template = INSTRUCTION
    assert lm.chat_template(True) == INSTRUCTION


@pytest.mark.parametrize(("template", "separator"), [(GEMMA, ""), (INSTRUCTION, " ")])
def test_tasks_join_the_target_as_the_template_demands(model_path: str, template: str, separator: str) -> None:
    lm = build(model_path, mode="none")
    lm.tokenizer.chat_template = template
    results = run(lm, ["qaedit_syn_reliability"], "qaedit.jsonl", apply_chat_template=True, limit=2)
    for sample in results["samples"]["qaedit_syn_reliability"]:
        prompt, continuation = sample["arguments"][0]
        assert prompt.endswith(("[/INST]", "model\n")) and continuation == separator + continuation.strip()


@pytest.mark.parametrize("editor", ["grace", "ice"])
def test_stock_tasks_keep_the_tokens_of_lm_eval(model_path: str, monkeypatch: pytest.MonkeyPatch, editor: str) -> None:
    """Under hook and context edits as well, also where lm-eval moves white space into the continuation."""
    request = EditRequest(prompt="{} is the capital of", subject="Port Elna", target_new="Dravonia")
    lm = build(model_path, editor=editor, editor_args={} if editor == "ice" else {"layers": [1], "num_steps": 2})
    context, continuation = "Water boils at\n", "zero"
    (delta,) = lm.editor.edit(lm.model, lm.tokenizer, [request])
    seen: list[Any] = []
    monkeypatch.setattr(lm.engine, "score", lambda jobs: [seen.append(jobs) or _nothing(item) for item, _ in jobs])
    lm._stock_edit = delta
    tokens = lm._encode_pair(context, continuation)
    assert "\n" in lm.tok_decode(tokens[1])
    lm._loglikelihood_tokens([((context, continuation), *tokens)])
    ((item, _),) = seen[0]
    before = delta.contexts[0].before() if delta.contexts else ""
    expected = lm._encode_pair(before + context, continuation)
    assert (list(item.context), list(item.continuation)) == tuple(expected)


def _nothing(item: Any) -> Any:
    return item.answer([0.0] * len(item.continuation), item.continuation)


@pytest.mark.parametrize("name", ["bare", "qa"])
def test_the_edit_and_its_question_are_shown(model_path: str, name: str) -> None:
    lm = build(model_path, editor="ft_m", edit_context=name, editor_args={"num_steps": 1, "layers": [1]})
    (answer,) = lm.loglikelihood([instance(case(unedited=False), "Port Elna is the capital of", " Dravonia")])
    text = "Port Elna is the capital of Dravonia"
    edited = text if name == "bare" else f"Please answer the question:\n\nQ: {text[:27]}\nA: Dravonia"
    assert isinstance(answer, EditedAnswer) and answer.edit is not None and answer.edit.texts == (edited,)
    assert EditedAnswer.from_json(answer.to_json()).edit == answer.edit
    info = lm.get_model_info()["edited_hf"]
    assert (info["edit_context"], info["edit_example"]) == (name, edited)
    assert (info["question_context"], info["question_example"]) == ("task", text)


def test_an_edit_in_a_chat_is_shown_stored_and_found_again(tiny_model: Any, tmp_path: Path) -> None:
    """Its key and file contain the context; a saved edit belongs to its case in whatever context it was made."""
    model, tokenizer = tiny_model("llama"), tokenizer_of("gemma")

    def make(**options: Any) -> EditedHFLM:
        return EditedHFLM(model, tokenizer=tokenizer, device="cpu", **{"store": str(tmp_path / "store"), **options})

    settings = {"editor": "ft_m", "editor_args": {"num_steps": 2, "layers": [1], "lr": 0.1}}
    doc = case(unedited=False)
    found = {}
    for name in ("bare", "chat"):
        lm = make(edit_context=name, **settings)
        prompt = lm.apply_chat_template([{"role": "user", "content": "Port Elna is the capital of"}])
        (found[name],) = lm.loglikelihood([instance(doc, prompt, "Dravonia")])
        info = lm.get_model_info()["edited_hf"]
        assert (info["question_context"], info["question_example"]) == ("chat", prompt + "Dravonia")
    assert found["chat"].edit.texts == (prompt + "Dravonia",) and prompt.startswith("<bos><start_of_turn>user")
    assert found["chat"].edit.key != found["bare"].edit.key
    assert found["chat"].final.logprob > found["bare"].final.logprob  # the edit was made where it is asked
    file = tmp_path / "edits.jsonl"
    file.write_text(json.dumps(doc["edit_requests"][0]) + "\n", encoding="utf-8")
    (stream,) = make(edit_context="chat", mode="sequential", edits=str(file), **settings).loglikelihood(
        [instance(doc, prompt, "Dravonia")]
    )
    assert stream.position.edited and stream.final.logprob == pytest.approx(found["chat"].final.logprob, abs=1e-4)
    request = EditRequest.from_dict(doc["edit_requests"][0]).in_context(lm.edit_context)
    (delta,) = lm.editor.edit(lm.model, lm.tokenizer, [request])
    delta.save(tmp_path / "edit.safetensors")
    loaded = make(load_edit=str(tmp_path / "edit.safetensors"))
    (answer,) = loaded.loglikelihood([instance(doc, prompt, "Dravonia")])
    assert answer.position.edited and answer.edit.texts == (prompt + "Dravonia",)
    assert answer.final.logprob == pytest.approx(found["chat"].final.logprob, abs=1e-4)


def test_a_chat_template_is_needed_before_any_weight_is_loaded(
    model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HFLM, "_create_model", lambda *_, **__: pytest.fail("the weights were loaded"))
    with pytest.raises(EditingError, match="the tokenizer has no chat template"):
        build(model_path, edit_context="chat")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"edit_context": "chta"}, "Did you mean 'chat'"),
        ({"edit_context": "qa", "mode": "none"}, "mode=none makes no edit"),
        ({"edit_context": "qa", "load_edit": "x"}, "mode=loaded makes no edit"),
        ({"edit_context": "qa", "editor": "ice"}, "editor=ice states the bare fact"),
    ],
)
def test_an_edit_context_without_meaning_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(EditingError, match=message):
        EditedHFLM(**options)


def test_a_request_with_two_contexts_is_refused() -> None:
    request = EditRequest(prompt="{} is in", subject="Velm", target_new="Ostravia", context={"before": "Q: "})
    assert request.text == "Q: Velm is in" and EditRequest.from_dict(request.to_dict()) == request
    with pytest.raises(EditingError, match="has a context already"):
        request.in_context(PromptContext("A: "))
    with pytest.raises(EditingError, match="Did you mean 'before'"):
        EditRequest.from_dict({"prompt": "a", "target_new": "b", "context": {"befor": "Q: "}})
