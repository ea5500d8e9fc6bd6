"""Probes with decoding settings of their own: requests, answers, and the generation settings of stock model classes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from scripted import generated

from edit_hooks.decoding import Decoding, Sampling
from edit_hooks.request import EditRequest
from lm_eval_tasks.common.asking.generation import generation_arguments, generation_text, own_decodings
from lm_eval_tasks.common.asking.probes import CaseAnswers, Probe, case_doc, case_requests
from lm_eval_tasks.common.records.cases import Case

CASE = Case(EditRequest(prompt="Where is {}?", subject="Velm", target_new="Karsk", case_id="0"))
SAMPLED = Decoding(max_new_tokens=100, until=(), ignore_end=True, sampling=Sampling(top_k=5, seed=3))
PROBE = Probe(kind="fluency", prompt="Velm is", targets=["Karsk"], generate=True, decoding=SAMPLED, num_draws=3)


def test_every_draw_is_a_request_of_its_own() -> None:
    doc = case_doc(CASE, [PROBE, Probe(kind="plain", prompt="Velm?", generate=True)], generate=True)
    assert json.loads(json.dumps(doc)) == doc
    requests = list(case_requests(doc))
    assert [(request.number, request.target, request.draw) for request in requests] == [
        (0, "Karsk", 0), (0, None, 0), (0, None, 1), (0, None, 2), (1, None, 0)
    ]  # fmt: skip
    decodings = [request.decoding for request in requests[1:]]
    assert [one and one.sampling and one.sampling.draw for one in decodings] == [0, 1, 2, None]
    assert requests[0].probe == replace(PROBE, question="Velm is", separator=" ")


def test_the_answers_of_all_draws_belong_to_their_probe() -> None:
    doc = case_doc(CASE, [PROBE, Probe(kind="plain", prompt="Velm?", generate=True)], generate=True)
    texts = [generated(text, "length") for text in ("target", "a", "b", "c", "plain")]
    sampled, plain = CaseAnswers(doc, texts).probes
    assert sampled.targets == [texts[0]] and sampled.generations == texts[1:4] and sampled.generation == texts[1]
    assert plain.generations == [texts[4]]


def test_several_draws_need_sampling() -> None:
    with pytest.raises(AssertionError, match="3 draws of a probe without sampling"):
        Probe(kind="x", prompt="Velm is", generate=True, num_draws=3)


def test_each_model_is_named_for_targets_and_generation() -> None:
    probe = Probe(kind="x", prompt="Velm is", ask="both", ask_generation="edited")
    assert (probe.asked_model(generation=False), probe.asked_model(generation=True)) == ("both", "edited")
    assert replace(probe, ask_generation=None).asked_model(generation=True) == "both"


def test_stock_models_get_the_settings_that_have_a_name_there() -> None:
    task = {"until": ["."], "max_gen_toks": 50, "do_sample": False}
    assert generation_arguments(task, None) == task and generation_arguments(task, None) is not task
    assert generation_arguments(task, SAMPLED) == {
        "until": [], "max_gen_toks": 100, "do_sample": True, "temperature": 1.0, "top_k": 5
    }  # fmt: skip
    assert generation_arguments(task, Decoding(sampling=Sampling(top_p=0.9)))["top_p"] == 0.9
    assert task == {"until": ["."], "max_gen_toks": 50, "do_sample": False}


def test_a_task_states_the_decoding_of_its_questions_if_none_follows_its_own() -> None:
    seeded = replace(PROBE, decoding=replace(SAMPLED, sampling=Sampling(top_k=5, seed=4)))
    helper = Probe(kind="wild", prompt="Velm?", generate=True, ask="unedited")
    scored = Probe(kind="plain", prompt="Velm?", targets=["Karsk"])
    own = case_doc(CASE, [PROBE, seeded, helper, scored], generate=True)
    stated = {
        "max_new_tokens": 100, "ignore_end": True, "temperature": 1.0, "top_k": 5, "do_sample": True, "until": []
    }  # fmt: skip
    assert own_decodings([own, case_doc(CASE, [], generate=True)]) == [stated]
    assert generation_text({"until": ["\n"], "max_new_tokens": 5}) == "generation(max_new_tokens=5, until=['\\n'])"
    lengths = [
        Decoding(length_of=text, teacher_forced=forced) for text, forced in [("a", True), ("b", True), ("a", False)]
    ]
    probes = [replace(PROBE, decoding=one, num_draws=1) for one in lengths]
    fixed = {"length_of": "the gold answer", "do_sample": False}
    assert own_decodings([case_doc(CASE, probes, generate=True)]) == [{**fixed, "teacher_forced": True}, fixed]


@pytest.mark.parametrize("decoding", [None, Decoding(max_new_tokens=5), Decoding(until=("x",)), Decoding()])
def test_a_question_that_takes_a_length_or_an_end_from_its_task_follows_it(decoding: Decoding | None) -> None:
    follows = Probe(kind="plain", prompt="Velm?", generate=True, decoding=decoding)
    assert own_decodings([case_doc(CASE, [PROBE, follows], generate=True)]) == []
