"""Judge models in this process: batches, memory, loading and release, and the model under edits."""

from __future__ import annotations

import gc
import itertools
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from judge_server import labels_of
from reader_model import CHAT_TEMPLATE, save_chain
from scripted import ScriptedLM
from task_runs import metrics_of, run
from transformers import AutoModelForCausalLM, AutoTokenizer

from edit_hooks.contract.tiny_models import build_model, build_tokenizer, save_tiny
from edit_hooks.utils.errors import EditingError
from judges.backends.base import Reply
from judges.backends.hf import HFBackend, shares_weights
from judges.base import CORRECT, INCORRECT, Item
from judges.model.factory import make_model_judge
from judges.parse import TRUNCATED_REPLY
from judges.settings import read_settings

ITEMS = [
    Item("Is it so?", "yes", "yes!"),
    Item("Is it so?", "yes", "no?"),
    Item("Who was it in the end?", "Ada", "Ada!"),
]


def settings_of(reader: Path, prompt: str, **more: Any) -> dict[str, Any]:
    return {"backend": "hf", "model": str(reader), "prompt": prompt, "store": "off", "device": "cpu", **more}


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_verdicts_of_a_local_model(reader: Path, prompt: str, batch_size: int) -> None:
    judged = make_model_judge(settings_of(reader, prompt, batch_size=batch_size)).judge(ITEMS)
    assert labels_of(judged.verdicts) == [CORRECT, INCORRECT, CORRECT]
    assert [verdict.raw_reply for verdict in judged.verdicts] == ["A", "B", "A"]
    assert judged.report.num_calls == 3 and judged.report.reply_tokens == 6


def test_the_model_is_loaded_on_use_and_released(reader: Path, prompt: str) -> None:
    judge = make_model_judge(settings_of(reader, prompt))
    backend = judge.backend
    assert isinstance(backend, HFBackend)
    backend.check()
    judge.plan(ITEMS)
    assert not backend.loaded
    backend._load()
    assert backend._model is not None
    reference = weakref.ref(backend._model)
    judge.judge(ITEMS)
    gc.collect()
    assert not backend.loaded and reference() is None


def test_a_model_that_is_kept_is_loaded_once(reader: Path, prompt: str) -> None:
    judge = make_model_judge(settings_of(reader, prompt))
    backend = judge.backend
    assert isinstance(backend, HFBackend)
    backend.keep_loaded = True
    judge.judge(ITEMS[:1])
    model = backend._model
    judge.judge(ITEMS)
    assert model is not None and backend._model is model
    backend.release()
    assert not backend.loaded


def test_stored_replies_need_no_model(reader: Path, prompt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = make_model_judge(settings_of(reader, prompt))
    expected = labels_of(judge.judge(ITEMS).verdicts)
    monkeypatch.setattr(HFBackend, "_load", lambda self: pytest.fail("all replies are stored"))
    assert labels_of(judge.judge(ITEMS).verdicts) == expected


def test_the_model_is_released_after_a_failure(reader: Path, prompt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = make_model_judge(settings_of(reader, prompt))
    monkeypatch.setattr(HFBackend, "_generate", lambda self, prompts: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        judge.judge(ITEMS)
    assert isinstance(judge.backend, HFBackend) and not judge.backend.loaded


def test_a_batch_that_does_not_fit_is_halved(reader: Path, prompt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generate, sizes = HFBackend._generate, list[int]()

    def generate_single_prompts(self: HFBackend, prompts: list[str]) -> list[Reply]:
        sizes.append(len(prompts))
        if len(prompts) > 1:
            raise torch.OutOfMemoryError
        return generate(self, prompts)

    monkeypatch.setattr(HFBackend, "_generate", generate_single_prompts)
    judged = make_model_judge(settings_of(reader, prompt)).judge(ITEMS)
    assert labels_of(judged.verdicts) == [CORRECT, INCORRECT, CORRECT] and sizes == [3, 1, 2, 1, 1]

    def run_out_of_memory(self: HFBackend, prompts: list[str]) -> list[Reply]:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(HFBackend, "_generate", run_out_of_memory)
    with pytest.raises(EditingError, match="single prompt does not fit"):
        make_model_judge(settings_of(reader, prompt)).judge(ITEMS)


def test_logits_that_are_not_finite_are_no_reply(reader: Path, prompt: str) -> None:
    """As of a model that overflows in half precision; the other answers of the batch have their verdicts."""
    judge = make_model_judge(settings_of(reader, prompt, batch_size=3))
    backend = judge.backend
    assert isinstance(backend, HFBackend)
    backend.keep_loaded = True
    backend._load()
    assert backend._model is not None and backend._tokenizer is not None
    token = backend._tokenizer("?", add_special_tokens=False).input_ids[-1]
    backend._model.get_input_embeddings().weight.data[token] = torch.nan
    items = [
        Item("Is it so", "yes", "yes!"),
        Item("Is it so, then", "yes", "no?"),
        Item("Who was it in the end", "Ada", "Ada!"),
    ]
    judged = judge.judge(items)
    assert labels_of(judged.verdicts) == [CORRECT, None, CORRECT]
    assert judged.verdicts[1].unscored_reason == (
        "the logits of the judge are not finite (NaN or infinity); use another dtype"
    )


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_an_answer_beyond_the_positions_is_unscored(family: str, tmp_path: Path, prompt: str) -> None:
    """Learned positions, as of GPT-2, end in an IndexError beyond their number."""
    folder = save_tiny(tmp_path / family, family, "byte_bpe_bos")
    items = [Item("q", "g", "no!"), Item("q", "g", "word " * 200), Item("q", "g", "yes!")]
    judged = make_model_judge(settings_of(folder, prompt, max_reply_tokens=9)).judge(items)
    assert [verdict.raw_reply is None for verdict in judged.verdicts] == [False, True, False]
    reason = "the judge's prompt and 9 reply tokens do not fit into its positions"
    assert judged.verdicts[1].unscored_reason == reason and judged.report.num_calls == 2


def test_a_prompt_may_fill_the_positions_up_to_the_reply(prompt: str) -> None:
    model, tokenizer = build_model("gpt2"), build_tokenizer("byte_bpe_bos")
    assert model.config.max_position_embeddings == 128
    model.generation_config.eos_token_id = None  # replies have all of their tokens
    backend = HFBackend(read_settings(settings_of(Path("unused"), prompt, max_reply_tokens=8)), model, tokenizer)
    texts = ["!" * number for number in range(1, 200)]
    fitting = [text for text in texts if len(tokenizer(text).input_ids) <= 120]
    assert 0 < len(fitting) < len(texts)
    outcomes = backend.complete([[{"role": "user", "content": text}] for text in texts], lambda *_: None).outcomes
    assert [isinstance(outcome, Reply) for outcome in outcomes] == [text in fitting for text in texts]
    assert {outcome.reply_tokens for outcome in outcomes if isinstance(outcome, Reply)} == {8}


def test_a_model_without_a_limit_reads_every_prompt(prompt: str) -> None:
    model, tokenizer = build_model("llama"), build_tokenizer("byte_bpe_bos")
    model.config.max_position_embeddings = -1
    backend = HFBackend(read_settings(settings_of(Path("unused"), prompt)), model, tokenizer)
    (outcome,) = backend.complete([[{"role": "user", "content": "word " * 200}]], lambda *_: None).outcomes
    assert isinstance(outcome, Reply)


def test_a_judge_that_shares_weights_with_the_edited_model_is_refused(reader: Path, prompt: str) -> None:
    model, tokenizer = build_model("llama"), build_tokenizer("byte_bpe_bos")
    settings = read_settings(settings_of(reader, prompt))
    tied = build_model("llama", seed=2)
    tied.get_input_embeddings().weight = model.get_input_embeddings().weight
    for edited in (model, tied):
        with pytest.raises(EditingError, match="shares weights"):
            HFBackend(settings, model, tokenizer, edited=edited)
    other = build_model("llama", seed=1)
    assert not shares_weights(model, other)
    assert HFBackend(settings, model, tokenizer, edited=other).loaded


def test_a_model_of_the_caller_is_not_released(reader: Path, prompt: str) -> None:
    settings = read_settings(settings_of(reader, prompt))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(reader), AutoTokenizer.from_pretrained(reader)
    backend = HFBackend(settings, model, tokenizer)
    (outcome,) = backend.complete([[{"role": "user", "content": "so!"}]], lambda index, reply: None).outcomes
    assert isinstance(outcome, Reply) and outcome.text == "A" and backend.loaded
    with pytest.raises(EditingError, match="pass both or neither"):
        HFBackend(settings, model)


def test_a_thought_that_the_chat_template_opens_gives_no_verdict(tmp_path: Path, prompt: str) -> None:
    tokenizer = build_tokenizer("byte_bpe_bos")
    ids = {mark: tokenizer(mark, add_special_tokens=False).input_ids[-1] for mark in ("B", "\n")}
    folder = save_chain(tmp_path / "thinker", {ids["\n"]: ids["B"], ids["B"]: int(tokenizer.eos_token_id)})
    (folder / "chat_template.jinja").write_text(f"{CHAT_TEMPLATE}<think>{{{{ '\\n' }}}}", encoding="utf-8")
    (verdict,) = make_model_judge(settings_of(folder, prompt)).judge(ITEMS[:1]).verdicts
    assert (verdict.raw_reply, verdict.label, verdict.unscored_reason) == ("<think>B", None, TRUNCATED_REPLY)


def test_a_special_token_that_ends_the_thought_is_kept(tmp_path: Path, prompt: str) -> None:
    tokenizer = build_tokenizer("byte_bpe_bos")
    ids = {mark: tokenizer(mark, add_special_tokens=False).input_ids[-1] for mark in "!?AB"}
    start, end = int(tokenizer.bos_token_id), int(tokenizer.eos_token_id)
    steps = [ids["!"], ids["B"], start, ids["A"], end]
    folder = save_chain(tmp_path / "thinker", dict(itertools.pairwise(steps)))
    for settings, reply, label in (
        ({}, "BA", None),
        ({"think_end_token": str(tokenizer.bos_token)}, f"B{tokenizer.bos_token}A", CORRECT),
    ):
        (verdict,) = make_model_judge(settings_of(folder, prompt, **settings)).judge(ITEMS[:1]).verdicts
        assert (verdict.raw_reply, verdict.label) == (reply, label)


def test_a_folder_without_a_model_fails_the_check(tmp_path: Path, prompt: str) -> None:
    with pytest.raises(EditingError, match="cannot be loaded"):
        make_model_judge(settings_of(tmp_path, prompt)).backend.check()


def test_wild_tasks_with_a_local_judge(reader: Path, prompt: str, tmp_path: Path) -> None:
    def texts(context: str, unedited: bool) -> str:
        return " Orsa Lind!" if "Fenwick" in context else " what?"

    settings = {"judge": settings_of(reader, prompt, store=str(tmp_path)), "population": "all"}
    task = "qaedit_wild_reliability"
    metrics = metrics_of(run(task, ScriptedLM(texts=texts), settings), task, "judge")
    assert metrics["efficacy_wild_judge"] == 0.25 and metrics["efficacy_wild_judge_n"] == 4
