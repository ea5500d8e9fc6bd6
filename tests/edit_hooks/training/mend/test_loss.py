"""MEND's training loss, against plain forward passes of the edited model."""

from __future__ import annotations

import pytest
import torch
from mend_runs import DATA, trainer

from edit_hooks import EditingError, EditRequest, edited, load_editor
from edit_hooks.contract.tiny_models import NATURAL_TOKENIZER
from edit_hooks.gradient.artifact import load_network
from edit_hooks.modeling.hooks import frozen
from edit_hooks.modeling.tokens import split_continuation
from edit_hooks.training.edit_data import EditExample, NumberedExample


def test_the_terms_are_those_of_the_edited_weights(tiny_model, tiny_tokenizer, tmp_path):
    """The hooks of training and the delta of editing are the same update."""
    model, tokenizer = tiny_model("llama"), tiny_tokenizer("byte_bpe_bos")
    trainer(model, tokenizer, tmp_path, num_steps=2, validate_every=1, edit_lr=0.1).run()
    loss = trainer(model, tokenizer, tmp_path, edit_lr=0.1).loss
    loss.network, _ = load_network(tmp_path)
    example = DATA.validation[0]
    with torch.no_grad():
        ((total, terms),) = loss([[NumberedExample(example, 3)]], observe=False)
    request = EditRequest(prompt=example.prompt, target_new=example.target)
    (delta,) = load_editor("mend", {"artifact": str(tmp_path)}).edit(model, tokenizer, [request])

    def logprobs(prompt, target):
        context, tokens = split_continuation(tokenizer, prompt, f" {target}")
        with torch.no_grad():
            return len(context), tokens, model(torch.tensor([context + tokens])).logits[0, :-1].log_softmax(-1)

    _, _, unedited = logprobs(*example.locality[0])
    with edited(model, delta):
        start, tokens, paraphrase = logprobs(loss.questions.edit_prompt(example, 3), example.target)
        _, _, after = logprobs(*example.locality[0])
    nll = float(-paraphrase[start - 1 :][torch.arange(len(tokens)), torch.tensor(tokens)].mean())
    kl = float((unedited.exp() * (unedited - after)).sum(-1).mean())
    assert kl > 0.01
    assert terms["edit"] == pytest.approx(nll, abs=1e-4) and terms["locality"] == pytest.approx(kl, abs=1e-4)
    assert float(total) == pytest.approx(loss.config.c_edit * nll + loss.config.c_loc * kl, abs=1e-4)


def test_an_edit_without_locality_texts_borrows_another_edits_prompt(tiny_model, tiny_tokenizer, tmp_path):
    model, tokenizer = tiny_model("llama"), tiny_tokenizer("byte_bpe_bos")
    loss = trainer(model, tokenizer, tmp_path).loss
    bare = EditExample(prompt="The capital of Velm is", target="Rome")
    loss.questions.train = [bare, bare, EditExample(prompt="He speaks", target="English")]
    texts = {tokenizer.decode(loss._locality_row(bare, number).ids) for number in range(5)}
    assert len(texts) == 1 and "He speaks" in texts.pop()
    loss.questions.train = [bare]
    with pytest.raises(EditingError, match="no locality texts"):
        loss._locality_row(bare, 0)


def test_the_unedited_loss_is_that_of_the_tokens_that_training_scores(tiny_model, tiny_tokenizer, tmp_path):
    """Step 0 left out the end-of-text token of append_eos, so it compared with other losses than the later steps'."""
    model, tokenizer = tiny_model("llama"), tiny_tokenizer("byte_bpe_bos")
    example, number = DATA.validation[0], 3
    for append_eos in (False, True):
        loss = trainer(model, tokenizer, tmp_path, append_eos=append_eos).loss
        context, tokens = split_continuation(
            tokenizer, loss.questions.edit_prompt(example, number), f" {example.target}"
        )
        tokens = [*tokens, *([tokenizer.eos_token_id] if append_eos else [])]
        with torch.no_grad():
            logprobs = model(torch.tensor([context + tokens])).logits[0, len(context) - 1 : -1].log_softmax(-1)
        nll = -float(logprobs[range(len(tokens)), tokens].mean())
        terms = loss.unedited([NumberedExample(example, number)])
        assert terms == pytest.approx({"loss": loss.config.c_edit * nll, "edit": nll, "locality": 0.0}, abs=1e-5)


@pytest.mark.parametrize("model_type", ["gpt2", "gemma3_text"])
def test_batches_that_share_passes_keep_their_losses_and_gradients(model_type, tiny_model, tiny_tokenizer, tmp_path):
    """As in one call per batch: terms, statistics and the gradients of the network, float64."""
    model, tokenizer = tiny_model(model_type, dtype=torch.float64), tiny_tokenizer(NATURAL_TOKENIZER[model_type])
    numbered = [NumberedExample(example, number) for number, example in enumerate(DATA.train[:5])]
    batches = [numbered[:2], numbered[2:3], numbered[3:]]
    outcomes = []
    for calls in ([batches], [[batch] for batch in batches]):
        loss = trainer(model, tokenizer, tmp_path, edit_lr=0.1).loss
        with frozen(model):
            terms = [term for call in calls for term in loss(call, observe=True)]
            sum(term.loss for term in terms).backward()
        gradients = {name: parameter.grad for name, parameter in loss.network.named_parameters()}
        outcomes.append((terms, gradients, dict(loss.network.named_buffers())))
    (together, gradients, buffers), (alone, expected_gradients, expected_buffers) = outcomes
    assert [term.metrics for term in together] == [pytest.approx(term.metrics, abs=1e-10) for term in alone]
    assert any(gradient.abs().max() > 1e-3 for gradient in gradients.values())
    torch.testing.assert_close(gradients, expected_gradients, atol=1e-10, rtol=1e-8)
    torch.testing.assert_close(buffers, expected_buffers, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize(("separator", "space"), [(None, ""), (" ", " ")])
def test_chinese_edits_are_trained_in_the_text_that_is_edited(separator, space, tiny_model, tiny_tokenizer, tmp_path):
    """Edit, paraphrase and locality text, also a borrowed one, have the separator of their edit."""
    tokenizer = tiny_tokenizer("byte_bpe_bos")
    loss = trainer(tiny_model("llama"), tokenizer, tmp_path, edit_loss="paraphrase").loss
    edit = EditExample(
        prompt="挪威的首都是",
        target="利马",
        paraphrases=("挪威首都是",),
        locality=(("秘鲁的首都是", "基多"),),
        separator=separator,
    )
    other = EditExample(prompt="智利的首都是", target="罗马", separator=separator)
    loss.questions.train = [edit, other]
    rows = [loss._paraphrase_row(edit, 0), loss._locality_row(edit, 0), loss._locality_row(other, 0)]
    texts = [tokenizer.decode([*row.ids, row.labels[-1][1]], skip_special_tokens=True) for row in rows]
    assert texts == [f"挪威首都是{space}利马", f"秘鲁的首都是{space}基多", f"挪威的首都是{space}利马"]
    assert edit.statement == f"挪威的首都是{space}利马"
