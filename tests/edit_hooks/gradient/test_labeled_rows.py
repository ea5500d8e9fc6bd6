"""Labeled rows: where labels are, and logits that equal those of plain forward passes."""

from __future__ import annotations

import pytest
import torch

from edit_hooks import EditingError
from edit_hooks.contract.tiny_models import ALL_MODEL_TYPES, NATURAL_TOKENIZER, NUM_LAYERS, build_tokenizer
from edit_hooks.gradient.labeled_rows import (
    LabeledRow,
    batch_rows,
    cache_lower_blocks,
    label_logits,
    label_nll,
    mean_over_rows,
    target_row,
)
from edit_hooks.modeling.tokens import split_continuation

PROMPT, TARGET = "The capital of Ostravia is", " Velm or Karsk"


def test_each_target_token_is_predicted_from_the_token_before_it(tiny_tokenizer):
    tokenizer = tiny_tokenizer("byte_bpe_bos")
    context, target = split_continuation(tokenizer, PROMPT, TARGET)
    row = target_row(tokenizer, PROMPT, TARGET)
    assert len(target) > 1 and row.ids == [*context, *target[:-1]]
    assert row.labels == [(len(context) - 1 + index, token) for index, token in enumerate(target)]
    with_end = target_row(tokenizer, PROMPT, TARGET, append_eos=True)
    assert with_end.ids == [*context, *target]
    assert with_end.labels == [*row.labels, (len(context) - 1 + len(target), tokenizer.eos_token_id)]


def test_the_released_end_is_a_space_and_the_end_of_text():
    """Both are labels, but for an end of text that is the padding token; fed to the last token if that is read."""
    tokenizer = build_tokenizer("byte_bpe_bos")
    context, target = split_continuation(tokenizer, PROMPT, f"{TARGET} ")
    assert len(target) == len(split_continuation(tokenizer, PROMPT, TARGET)[1]) + 1
    labels = [(len(context) - 1 + index, token) for index, token in enumerate([*target, tokenizer.eos_token_id])]
    other = tokenizer.convert_ids_to_tokens(7)
    for pad, kept in ((other, labels), (tokenizer.eos_token, labels[:-1]), (None, labels[:-1])):
        tokenizer.pad_token = pad
        assert target_row(tokenizer, PROMPT, TARGET, append_eos="released") == LabeledRow([*context, *target], kept)
        whole = target_row(tokenizer, PROMPT, TARGET, append_eos="released", feed_last=True)
        assert whole == LabeledRow([*context, *target, tokenizer.eos_token_id], kept)


def test_the_last_prompt_token_can_predict_all_target_tokens(tiny_tokenizer):
    tokenizer = tiny_tokenizer("byte_bpe_bos")
    context, target = split_continuation(tokenizer, PROMPT, TARGET)
    row = target_row(tokenizer, PROMPT, TARGET, objective="last_token")
    assert row == LabeledRow(context, [(len(context) - 1, token) for token in target])


def test_rows_without_labels_are_refused(tiny_tokenizer):
    tokenizer = tiny_tokenizer("byte_bpe")
    with pytest.raises(EditingError, match="no token before the target"):
        target_row(tokenizer, "", TARGET)
    tokenizer.eos_token, eos = None, tokenizer.eos_token
    try:
        with pytest.raises(EditingError, match="no end-of-text token"):
            target_row(tokenizer, PROMPT, TARGET, append_eos=True)
    finally:
        tokenizer.eos_token = eos


@pytest.mark.parametrize("first_block", [0, 1, NUM_LAYERS - 1])
@pytest.mark.parametrize("model_type", ALL_MODEL_TYPES)
def test_logits_equal_those_of_a_plain_forward_pass(model_type, first_block, tiny_model, tiny_tokenizer):
    """Padded or alone, with or without a cache of the lower blocks; a row without labels takes part too."""
    model, tokenizer = tiny_model(model_type), tiny_tokenizer(NATURAL_TOKENIZER[model_type])
    unlabeled = LabeledRow(target_row(tokenizer, "The train", " was late").ids, [])
    rows = [target_row(tokenizer, PROMPT, TARGET), unlabeled, target_row(tokenizer, "He speaks", " English")]
    batch = batch_rows(model, rows)
    with torch.no_grad():
        cache_lower_blocks(model, batch, first_block)
        logits_LV, nll_L = label_logits(model, batch), label_nll(model, batch)
        expected = []
        for row in rows:
            logits_TV = model(torch.tensor([row.ids])).logits[0].float()
            expected += [logits_TV[column] for column, _ in row.labels]
    torch.testing.assert_close(logits_LV, torch.stack(expected), atol=1e-4, rtol=1e-4)
    tokens = torch.tensor([token for row in rows for _, token in row.labels])
    nll = -torch.stack(expected).log_softmax(1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(nll_L, nll, atol=1e-4, rtol=1e-4)


def test_each_block_runs_once(tiny_model, tiny_tokenizer):
    """The lower blocks to fill the cache, the others for the logits."""
    model, tokenizer = tiny_model("llama"), tiny_tokenizer("byte_bpe_bos")
    batch = batch_rows(model, [target_row(tokenizer, PROMPT, TARGET)])
    calls = []
    handles = [
        model.model.layers[index].mlp.register_forward_hook(lambda *_, index=index: calls.append(index))
        for index in range(NUM_LAYERS)
    ]
    try:
        cache_lower_blocks(model, batch, 1)
        assert calls == [0]
        label_logits(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    assert calls == list(range(NUM_LAYERS))


def test_the_mean_over_rows_weights_rows_equally(tiny_model, tiny_tokenizer):
    model, tokenizer = tiny_model("llama"), tiny_tokenizer("byte_bpe_bos")
    long, short = target_row(tokenizer, PROMPT, TARGET), target_row(tokenizer, "He speaks", " of")
    batch = batch_rows(model, [long, short])
    assert len(long.labels) != len(short.labels)
    values_L = torch.tensor([1.0] * len(long.labels) + [5.0] * len(short.labels))
    assert float(mean_over_rows(values_L, batch)) == pytest.approx(3.0)
