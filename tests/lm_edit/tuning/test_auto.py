"""``editor_args=auto``: settings for a model that nothing is tuned for."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from edit_hooks.lm.model import EditedHFLM
from edit_hooks.lm.options import auto as option
from edit_hooks.prompt_context import PromptContext
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.yaml_io import read_yaml
from lm_edit.tuning import auto, trials
from lm_edit.tuning.auto import candidate_layers, look
from lm_edit.tuning.cases import in_context, load_cases
from lm_edit.tuning.trials import TrialRunner
from lm_eval_tasks.common.records.cases import KINDS


@pytest.fixture(scope="module")
def few() -> Any:
    """Three facts and two candidates: the search itself has tests of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto, "NUM_FACTS", 3)
        patch.setattr(auto, "NUM_TRACED", 2)
        patch.setattr(auto, "NUM_CANDIDATES", 2)
        yield


def options(folder: Path, store: Path | str, **more: Any) -> dict[str, Any]:
    return {
        "pretrained": str(folder),
        "device": "cpu",
        "editor": "ft_m",
        "editor_args": "auto",
        "data": "mini",
        "store": str(store),
        **more,
    }


def test_settings_are_found_once_and_used(few, tiny_path, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    lm = EditedHFLM(**options(tiny_path("llama"), tmp_path / "store"))
    (path,) = (tmp_path / "store").rglob("*.yaml")
    assert lm.options.editor_args == read_yaml(path) and "layers" in read_yaml(path)
    text = path.read_text(encoding="utf-8")
    assert "facts of bake (data=mini:held_out)" in text and str(tiny_path("llama")) in text
    assert "largest effects of MLPs at the subject" in caplog.text and "chosen: layers:" in caplog.text
    assert lm._settings_file == str(path)

    def refused(*_args: Any, **_kwargs: Any) -> None:
        raise AssertionError("the settings are in the store")

    monkeypatch.setattr(auto, "search", refused)
    again = EditedHFLM(**options(tiny_path("llama"), tmp_path / "store"))
    assert again.options.editor_args == lm.options.editor_args


def test_settings_are_searched_in_the_context_of_the_edits(few, tiny_path, tmp_path, monkeypatch):
    """In a chat, each fact is edited and asked in the template; what was found for bare prompts is not used."""
    seen, plain_search = [], auto.search

    def search(*args: Any, **kwargs: Any) -> Any:
        seen.append(args[5])
        return plain_search(*args, **kwargs)

    monkeypatch.setattr(auto, "search", search)
    folder = shutil.copytree(tiny_path("llama"), tmp_path / "instruct")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for m in messages %}<|{{ m.role }}|> {{ m.content }}\n{% endfor %}<|assistant|>"
    tokenizer.save_pretrained(folder)
    for context in ("bare", "chat"):
        EditedHFLM(**options(folder, tmp_path / "store", edit_context=context))
    bare, chat = seen
    assert len(list((tmp_path / "store").rglob("*.yaml"))) == 2
    for plain, asked in zip(bare, chat, strict=True):
        assert asked.request.text == f"<|user|> {plain.request.text}\n<|assistant|>" and asked.request.seam == " "
        for kind in KINDS:
            prompts = [f"<|user|> {question.prompt}\n<|assistant|>" for question in plain.questions(kind)]
            assert [question.prompt for question in asked.questions(kind)] == prompts
    with pytest.raises(EditingError, match="no chat template"):
        EditedHFLM(**options(tiny_path("llama"), tmp_path / "store", edit_context="chat"))


def test_answers_of_a_chat_follow_its_header_without_a_space(tiny_model, tiny_tokenizer):
    model, tokenizer = tiny_model("llama"), tiny_tokenizer("byte_bpe")
    context = PromptContext("<|user|> ", "\n<|assistant|>\n", "")
    (case,) = in_context(load_cases("bake", auto.FACTS)[:1], context)
    scored = []

    def score(model: Any, jobs: Any, limits: Any, progress: Any) -> Any:
        scored.extend(item for item, _ in jobs)
        return plain_score(model, jobs, limits, progress)

    plain_score = trials.score
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trials, "score", score)
        TrialRunner(model, tokenizer, "ft_m", None).unedited([case])
    first = scored[0]
    assert tokenizer.decode(first.context).endswith("<|assistant|>\n")
    assert tokenizer.decode(first.continuation) == case.request.target_new


def test_there_is_nothing_to_find_for_editors_of_prompts(tiny_path, tmp_path):
    lm = EditedHFLM(**options(tiny_path("llama"), tmp_path / "store", editor="ike"))
    assert not lm.options.editor_args and not list((tmp_path / "store").rglob("*.yaml"))


def test_without_the_package_that_finds_settings_there_is_a_sentence(monkeypatch, tiny_path, tmp_path):
    monkeypatch.setattr(option, "registered", lambda group: {})
    with pytest.raises(EditingError, match="editor_args=auto needs the package lm_edit"):
        EditedHFLM(**options(tiny_path("llama"), tmp_path))


def test_a_block_with_a_large_output_is_no_candidate(tiny_model, tiny_tokenizer, monkeypatch):
    """As the first blocks of many models, whose output at some tokens is hundreds of times that of the others."""
    model, tokenizer = tiny_model("llama", num_hidden_layers=6), tiny_tokenizer("byte_bpe")
    cases = load_cases("bake", auto.FACTS)[:2]
    model.model.layers[2].mlp.down_proj.weight.data *= 1000
    evidence = look(model, tokenizer, "rome", cases)
    assert evidence.sinks == [2] and all(2 not in layers for layers in evidence.layers) and len(evidence.norms) == 6
    assert len(evidence.effects) == 6 and 2 <= len(evidence.layers) <= 3


EFFECTS = [0.1, 0.5, 0.2, 0.0, 0.3, 0.4, 0.0, 0.1]


@pytest.mark.parametrize(
    ("blocks", "own", "expected"),
    [
        (range(8), [3], [[1], [5], [3]]),  # the second is more than two blocks away
        (range(8), [1], [[1], [5]]),
        ([0, 2, 3, 4, 5, 6, 7], [3], [[5], [2], [3]]),  # a sink is left out
        (range(8), [3, 4], [[1, 2], [4, 5], [3, 4]]),
        ([0, 1, 2, 3, 5, 6, 7], [3, 4], [[1, 2], [5, 6]]),  # no run holds the fourth
        (range(8), [0, 1, 2, 3, 4], []),  # most of the blocks: nothing to choose
    ],
)
def test_candidates_are_runs_of_as_many_blocks_as_the_editor_edits(blocks, own, expected):
    assert candidate_layers(EFFECTS, list(blocks), own, len(EFFECTS)) == expected
