"""SERAC through ``edited_hf``: the counterfactual model answers in scope, the base model everything else."""

from __future__ import annotations

import pytest
from lm_runs import assert_same_answers, build, case, instance
from serac_runs import save_untrained
from transformers import AutoModelForCausalLM, AutoTokenizer

from edit_hooks.answers import ContextReport
from edit_hooks.contract.tiny_models import save_tiny

PROMPT, FAR = "Port Elna is the capital of", "She wrote the novel in"
GENERATION = {"until": ["."], "max_gen_toks": 6, "do_sample": False}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("tiny"), "llama", max_position_embeddings=512))


@pytest.fixture(scope="module")
def artifacts(model_path, tmp_path_factory):
    """Scope -> folder of untrained models for the tiny model."""
    base, tokenizer = AutoModelForCausalLM.from_pretrained(model_path), AutoTokenizer.from_pretrained(model_path)
    folders = {scope: tmp_path_factory.mktemp("serac") / scope for scope in ("wide", "narrow")}
    for scope, folder in folders.items():
        save_untrained(folder, base.eval(), tokenizer, scope, max_position_embeddings=512)
    return folders


@pytest.fixture(scope="module")
def counterfactual_path(tmp_path_factory):
    """The counterfactual model of the artifacts as a model of its own."""
    return str(save_tiny(tmp_path_factory.mktemp("small"), "llama", max_position_embeddings=512, seed=7))


def serac(model_path, folder, **options):
    return build(model_path, **{"editor": "serac", "editor_args": {"artifact": str(folder)}, **options})


def ask(lm, prompt, kind="loglikelihood", doc=None):
    argument = " Peru" if kind == "loglikelihood" else dict(GENERATION)
    (answer,) = getattr(lm, kind)([instance(doc or case(unedited=False), prompt, argument, kind)])
    return answer.final


@pytest.mark.parametrize("engine", ["fast", "reference"])
def test_in_scope_the_counterfactual_model_reads_the_fact_and_the_question(
    model_path, artifacts, counterfactual_path, engine
):
    lm = serac(model_path, artifacts["wide"], engine=engine)
    alone = build(counterfactual_path, mode="none", engine=engine)
    longer = f"{PROMPT} Dravonia {FAR}"
    ours, expected = ask(lm, FAR), ask(alone, longer)
    assert ours.token_logprobs == pytest.approx(expected.token_logprobs, abs=1e-5)
    assert ours.context == ContextReport(facts=1)
    ours, expected = ask(lm, FAR, "generate_until"), ask(alone, longer, "generate_until")
    assert ours.token_ids == expected.token_ids and ours.raw == expected.raw


@pytest.mark.parametrize("engine", ["fast", "reference"])
def test_out_of_scope_the_answer_is_the_base_models_bit_for_bit(model_path, artifacts, engine):
    lm, plain = serac(model_path, artifacts["narrow"], engine=engine), build(model_path, mode="none", engine=engine)
    assert ask(lm, PROMPT).context.facts == 1 and ask(lm, FAR).context.facts == 0
    assert ask(lm, PROMPT).token_logprobs != ask(plain, PROMPT).token_logprobs
    assert ask(lm, FAR).token_logprobs == ask(plain, FAR).token_logprobs
    assert ask(lm, FAR, "generate_until").token_ids == ask(plain, FAR, "generate_until").token_ids


def test_a_batch_of_both_kinds_answers_as_each_question_alone(model_path, artifacts):
    lm = serac(model_path, artifacts["narrow"])
    prompts = [PROMPT, FAR, "The train to Velm was", PROMPT]
    for kind in ("loglikelihood", "generate_until"):
        argument = " Peru" if kind == "loglikelihood" else GENERATION
        batch = getattr(lm, kind)([instance(case(), prompt, argument, kind) for prompt in prompts])
        assert_same_answers(batch, [ask(lm, prompt, kind, case()) for prompt in prompts])
        assert [answer.final.context.facts for answer in batch] == [1, 0, 0, 1]
        assert all(answer.final.unedited is not None for answer in batch)
