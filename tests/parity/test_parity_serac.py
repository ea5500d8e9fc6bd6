"""SERAC's scores, routing and training loss against EasyEdit's numbers, on models of `serac_runs`."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import torch
from paths import GOLDEN
from serac_runs import build_encoder, encoder_tokenizer

from edit_hooks.contract.tiny_models import build_model, build_tokenizer
from edit_hooks.deltas.context_edit import ContextEdit
from edit_hooks.in_context.embeddings import Embedder
from edit_hooks.in_context.fact_memory import FactMemory
from edit_hooks.in_context.memory_artifact import SavedModels
from edit_hooks.in_context.scope_classifier import ScopeClassifier, fact_text, scope_scores
from edit_hooks.inference.items import Limits, ScoreItem
from edit_hooks.inference.scoring import score
from edit_hooks.modeling.tokens import split_continuation
from edit_hooks.training.edit_data import EditExample, NumberedExample
from edit_hooks.training.serac.config import SERACTrainingConfig
from edit_hooks.training.serac.loss import SERACLoss

RUN: dict[str, Any] = json.loads((GOLDEN / "serac/tiny-gpt2.json").read_text(encoding="utf-8"))
CASES = list(zip(RUN["texts"], RUN["cases"], strict=True))
CONTEXTS = [ContextEdit(prompt, target) for prompt, target in RUN["edits"]]


@cache
def models() -> SavedModels:
    encoder = build_encoder()
    torch.nn.init.constant_(encoder.encoder.layer[-1].output.LayerNorm.weight, RUN["encoder_scale"])
    return SavedModels(ScopeClassifier(encoder, encoder_tokenizer(), "cls", "[SEP]"), build_model("gpt2", seed=7))


@pytest.mark.parametrize(("text", "case"), CASES)
def test_scores_of_whole_texts_as_in_training(text, case):
    classifier = models().classifier
    facts = [fact_text("released", prompt, f"{prompt} {target}", "[SEP]") for prompt, target in RUN["edits"]]
    with torch.no_grad():
        vectors = classifier([*facts, " ".join(text)])
    scores_N = scope_scores(vectors[:-1], vectors[-1:])[0]
    assert scores_N.log().tolist() == pytest.approx(case["log_scores"], abs=1e-5)
    assert int(scores_N.argmax()) == case["best"]


@pytest.mark.parametrize(("text", "case"), CASES)
def test_scores_and_choice_of_a_prompt_as_in_generation(text, case):
    classifier, counterfactual = models()
    memory = FactMemory(Embedder(classifier.one_by_one), counterfactual, "released", "[SEP]")
    scores_N = memory.scores(CONTEXTS, text[0])
    assert scores_N.log().tolist() == pytest.approx(case["prompt_log_scores"], abs=1e-5)
    assert float(scores_N.min()) > 0 and float(scores_N.max()) <= 1
    best = memory.best(CONTEXTS, text[0])
    assert best.in_scope
    fact = CONTEXTS[best.number]
    assert fact == CONTEXTS[case["prompt_best"]]


@pytest.mark.parametrize(("text", "case"), CASES)
def test_the_answer_is_that_of_the_model_that_the_release_chooses(text, case):
    """Its hard choice for whole texts, all of which are in scope here."""
    tokenizer, fact = build_tokenizer("byte_bpe"), CONTEXTS[case["best"]]
    prompt = f"{fact.prompt} {fact.target_new} {text[0]}"
    item = ScoreItem(*map(tuple, split_continuation(tokenizer, prompt, f" {text[1]}")))
    (answer,) = score(models().counterfactual, [(item, None)], Limits(), lambda count: None)
    assert [-value for value in answer.token_logprobs] == pytest.approx(case["hard_nll"], abs=1e-4)


def test_the_loss_of_a_batch():
    """A memory of three edits, a question about each, and one unrelated text."""
    config = SERACTrainingConfig(scope_texts="released", c_edit=0.1, c_loc=1.0)
    unrelated = tuple(RUN["texts"][4])
    batch = [
        NumberedExample(
            EditExample(prompt=p, target=t, paraphrases=(RUN["texts"][number + 1][0],), locality=(unrelated,)), 0
        )
        for number, (p, t) in enumerate(RUN["edits"])
    ]
    loss = SERACLoss(build_model("gpt2"), build_tokenizer("byte_bpe"), models(), config, [])
    with torch.no_grad():
        (terms,) = loss([batch])
    asked = RUN["cases"][1:4]
    nll = sum(case["nll"] * len(case["hard_nll"]) for case in asked) / sum(len(case["hard_nll"]) for case in asked)
    # There also behind the last token, which predicts nothing of the text.
    kl_T = RUN["cases"][4]["kl_positions"][:-1]
    assert terms.metrics["edit"] == pytest.approx(nll, abs=1e-4)
    assert terms.metrics["locality"] == pytest.approx(sum(kl_T) / len(kl_T), abs=1e-4)
    assert float(terms.loss) == pytest.approx(0.1 * nll + sum(kl_T) / len(kl_T), abs=1e-4)
