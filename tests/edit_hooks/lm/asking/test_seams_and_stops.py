"""Stop strings that are special tokens, and prompts that merge into their targets, against lm-eval's own class."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lm_runs import build, case, instance

from edit_hooks.answers import FailedAnswer
from edit_hooks.contract.tiny_models import build_model, build_tokenizer, save_tiny

PROMPT = "The mother tongue of Elena is"
STOP = "<|im_end|>"


@pytest.fixture(scope="module")
def chat_model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose third greedy token after the prompt is a special token that does not end texts."""
    model, tokenizer = build_model("llama"), build_tokenizer("byte_bpe_bos")
    tokenizer.add_special_tokens({"additional_special_tokens": [STOP]})
    ids = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    free = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False, pad_token_id=0)
    with torch.no_grad():
        weight = model.get_output_embeddings().weight
        weight[tokenizer.convert_tokens_to_ids(STOP)] = 1.01 * weight[free[0, -1]]
    folder = tmp_path_factory.mktemp("chat")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("engine", ["fast", "reference"])
def test_a_special_token_is_a_stop_string(chat_model_path: str, engine: str) -> None:
    """As in lm-eval, the text before it is the answer; without it in ``until`` the answer goes on."""
    lm = build(chat_model_path, mode="none", editor_args=None, engine=engine)
    for until, stop, length in (([STOP], "stop_string", 3), (["zzz"], "length", 8)):
        settings = {"until": until, "max_gen_toks": 8}
        (ours,) = lm.generate_until([instance(case(), PROMPT, dict(settings), "generate_until")])
        (stock,) = lm.generate_until([instance({}, PROMPT, dict(settings), "generate_until")])
        assert (ours.final.stop, len(ours.final.token_ids)) == (stop, length)
        assert ours.final.text == stock and STOP not in stock and stock


@pytest.mark.parametrize("engine", ["fast", "reference"])
def test_a_prompt_without_a_token_of_its_own_is_unscored(tmp_path: Path, engine: str) -> None:
    """No BOS, and "T" + "he" is one token; the other questions of the run are answered."""
    lm = build(str(save_tiny(tmp_path, "gpt2")), mode="none", editor_args=None, engine=engine)
    target = "he mother tongue of Elena is"
    merged, other = lm.loglikelihood([instance(case(), "T", target), instance(case(), "The", " mother")])
    assert isinstance(merged.final, FailedAnswer)
    assert "prompt 'T' has no token of its own" in merged.final.reason
    assert other.final.logprob < 0
