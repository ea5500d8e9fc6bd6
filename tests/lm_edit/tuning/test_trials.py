"""Scores of a candidate against plain forwards on patched weights, and resumption."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tuning_cases import CASES, QUICK, tune

from edit_hooks import EditingError, edited, load_editor
from edit_hooks.contract.tiny_models import EDIT_LAYER, SENTENCES, build_model, build_tokenizer
from edit_hooks.store.store import Store
from lm_edit.tuning.trials import FactScore, Trial, TrialRunner
from lm_eval_tasks.common.records.cases import Question

FT = {"layers": [EDIT_LAYER], "num_steps": 4}


@pytest.fixture(scope="module")
def tiny():
    return build_model("llama", dtype=torch.float64), build_tokenizer("byte_bpe_bos")


@torch.no_grad()
def plain(model, tokenizer, prompt, answer):
    """(per-token probability, argmaxes, ids) of an answer from one forward."""
    prompt_ids = tokenizer(prompt)["input_ids"]
    ids = tokenizer(f"{prompt} {answer}")["input_ids"]
    assert ids[: len(prompt_ids)] == prompt_ids
    logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    target = ids[len(prompt_ids) :]
    rows = logprobs[len(prompt_ids) - 1 : -1]
    total = sum(float(row[token]) for row, token in zip(rows, target, strict=True))
    return math.exp(total / len(target)), rows.argmax(1).tolist(), target


def expected(model, tokenizer, case, delta):
    def ask(question, neighbor=False):
        before = plain(model, tokenizer, question.prompt, question.wanted)
        with edited(model, delta):
            wanted = plain(model, tokenizer, question.prompt, question.wanted)
            if question.other is not None:
                other = plain(model, tokenizer, question.prompt, question.other)
                return float(wanted[0] > other[0]), wanted[0] - other[0]
        against = before[1] if neighbor else wanted[2]
        share = sum(a == b for a, b in zip(wanted[1], against, strict=True)) / len(against)
        return share, min(0.0, wanted[0] - before[0]) if neighbor else wanted[0]

    request = case.request
    kinds = [
        [ask(Question(request.text, request.target_new, request.target_true))],
        [ask(question) for question in case.paraphrases],
        [ask(question, neighbor=True) for question in case.neighbors],
    ]
    means = [sum(right for right, _ in asked) / len(asked) if asked else None for asked in kinds]
    leads = [lead for asked in kinds for _, lead in asked]
    return (*means, sum(leads) / len(leads))


@pytest.mark.parametrize("editor", ["r_rome", "memit", "ft_m"])
def test_scores_are_those_of_plain_forwards_on_patched_weights(tiny, editor):
    settings = QUICK if editor != "ft_m" else {"layers": [EDIT_LAYER], "num_steps": 4, "lr": 0.01}
    settings = {**settings, **({"second_moments": None} if editor == "memit" else {})}
    (trial,) = tune(tiny, editor, [settings], CASES)
    deltas = load_editor(editor, settings).edit(*tiny, [case.request for case in CASES])
    for case, delta in zip(CASES, deltas, strict=True):
        found = trial.facts[case.request.key]
        want = expected(*tiny, case, delta)
        assert (found.efficacy, found.paraphrase, found.neighborhood) == pytest.approx(want[:3])
        assert found.margin == pytest.approx(want[3], abs=1e-8)
    assert trial.facts[CASES[1].request.key].paraphrase is None


def test_the_score_is_the_harmonic_mean_of_what_there_is():
    trial = Trial({}, {"a": FactScore(1.0, None, 0.5, 0.1), "b": FactScore(1.0, None, 1.0, 0.3)})
    assert trial.score == pytest.approx(2 / (1 / 1.0 + 1 / 0.75)) and trial.mean("margin") == pytest.approx(0.2)
    assert Trial({}, {"a": FactScore(0.0, 1.0, 1.0, 0.0)}).score == 0.0
    assert Trial({}, {"a": FactScore(1.0, 1.0, 1.0, 0.0)}, error="x").score == 0.0
    assert Trial({}).score == 0.0


def test_stability_enters_the_score_and_efficacy_counts_from_the_unedited_model():
    facts = {"a": FactScore(1.0, 0.5, 1.0, 0.0, 0.25, before=0.0), "b": FactScore(0.0, 0.5, 1.0, 0.0, 0.75, before=0.0)}
    trial = Trial({}, facts)
    assert trial.gain == 0.5 and trial.score == pytest.approx(4 / (1 / 0.5 + 1 / 0.5 + 1 / 1.0 + 1 / 0.5))
    better = {name: replace(fact, before=0.25) for name, fact in facts.items()}
    assert Trial({}, better).gain == pytest.approx((0.5 - 0.25) / 0.75)
    assert Trial({}, better).score == pytest.approx(4 / (1 / 0.5 + 1 / 0.5 + 1 / 1.0 + 3))
    nothing = Trial({}, {"a": FactScore(0.5, 1.0, 1.0, 0.0, 1.0, before=0.5)})
    assert nothing.score == 0.0 and nothing.rank < Trial({}, {"a": FactScore(1.0, 0.0, 0.0, -1.0, 0.0, 0.5)}).rank
    assert Trial({}, {name: replace(fact, before=0.75) for name, fact in facts.items()}).gain == 0.0


def test_the_unedited_model_scores_0_and_ranks_below_every_edit_that_takes(tiny):
    runner = TrialRunner(*tiny, "ft_m", None)
    before = runner.unedited(CASES)
    assert (before.gain, before.score, before.mean("stability")) == (0.0, 0.0, 1.0)
    assert before.mean("efficacy") == before.mean("before") < 1
    nothing, destructive = tune(tiny, "ft_m", [{**FT, "lr": 1e-12}, {**FT, "lr": 0.5}], CASES)[::-1]
    assert nothing.settings["lr"] == 1e-12 and nothing.score == 0.0 and nothing.mean("stability") > 0.999
    assert destructive.gain > 0 and destructive.rank > before.rank
    assert destructive.mean("stability") < nothing.mean("stability")


def test_a_killed_search_goes_on(tiny, tmp_path, monkeypatch):
    store = Store(tmp_path)
    trials = [{**QUICK, "lr": lr} for lr in (0.1, 0.5)]
    first = tune(tiny, "r_rome", trials, CASES[:2], store=store)
    assert store.size()["trials"][0] == 4 and "deltas" not in store.size()
    made = []
    edit = type(load_editor("r_rome")).edit
    monkeypatch.setattr(
        "edit_hooks.base.editor.Editor.edit", lambda *args, **kw: made.append(len(args[3])) or edit(*args, **kw)
    )
    again = tune(tiny, "r_rome", trials, CASES[:2], store=store)
    assert not made and again == first
    more = tune(tiny, "r_rome", trials, CASES, store=store)
    assert made == [1, 1] and len(more[0].facts) == 3


def test_candidates_an_editor_cannot_use_are_kept_with_the_reason(tiny):
    settings = {**QUICK, "second_moments": list(SENTENCES)}
    trials = [{**settings, "nullspace_threshold": 1e-12}, {**settings, "nullspace_energy": 0.5}]
    good, bad = tune(tiny, "alphaedit", trials, CASES[:2])
    assert good.error is None and len(good.facts) == 2
    assert "nothing can be written" in bad.error and bad.score == 0.0


def test_facts_that_fail_count_as_failures(tiny, monkeypatch):
    monkeypatch.setattr(
        "edit_hooks.deltas.delta.Delta.check_finite", lambda self: (_ for _ in ()).throw(EditingError("inf"))
    )
    (trial,) = tune(tiny, "r_rome", [QUICK], CASES[:1])
    (fact,) = trial.facts.values()
    assert (fact.efficacy, fact.neighborhood, fact.reason) == (0.0, None, "inf")
