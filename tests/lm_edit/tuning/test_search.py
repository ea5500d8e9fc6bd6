"""Search over settings: scores against plain forwards on patched weights, halving, and resumption."""

from __future__ import annotations

import math

import pytest
import torch

from edit_hooks import EditingError, EditRequest, edited, load_editor
from edit_hooks.contract.tiny_models import CONTEXT_TEMPLATES, EDIT_LAYER, SENTENCES, build_model, build_tokenizer
from edit_hooks.store.store import Store
from lm_edit.tuning.search import FactScore, Trial, _plan_rounds, tune
from lm_eval_tasks.common.cases import Case, Question

QUICK = {"layers": [EDIT_LAYER], "num_steps": 4, "context_templates": CONTEXT_TEMPLATES[:2]}
CASES = [
    Case(
        EditRequest(prompt="{} is located in", subject="Port Amelin", target_new="Rome", target_true="Brenholt"),
        [Question("The harbour of Port Amelin lies in", "Rome", "Brenholt"), Question("Amelin is in", "Rome", "Velm")],
        [Question("The village of Brenholt is in", "Velm", "Rome")],
    ),
    Case(
        EditRequest(prompt="The mother tongue of {} is", subject="Elena Marković", target_new="French"),
        [],
        [Question("The official language of the region is", "Spanish"), Question("He speaks", "English")],
    ),
    Case(
        EditRequest(prompt="The capital of {} is", subject="Ostravia", target_new="Hamburg", target_true="Velm"),
        [Question("Ostravia's capital is", "Hamburg", "Velm")],
        [Question("The largest city of Ostravia is", "Karsk", "Hamburg")],
    ),
]


@pytest.fixture(scope="module")
def tiny():
    return build_model("llama", dtype=torch.float64), build_tokenizer("byte_bpe_bos")


# --- one candidate -----------------------------------------------------------------------------------------------


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
    (trial,) = tune(*tiny, editor, [settings], CASES, quiet=True)
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


# --- the search --------------------------------------------------------------------------------------------------


def test_rounds_halve_candidates_and_double_facts():
    assert _plan_rounds(8, 16, True) == [(8, 0, 4), (4, 4, 8), (2, 8, 16)]
    assert _plan_rounds(8, 16, False) == [(8, 0, 16)] and _plan_rounds(2, 16, True) == [(2, 0, 16)]
    assert _plan_rounds(5, 3, True) == [(5, 0, 2), (3, 2, 3)] and _plan_rounds(4, 1, True) == [(4, 0, 1)]


def test_the_better_half_goes_on_and_the_best_comes_first(tiny, monkeypatch):
    seen: dict[int, list[int]] = {}

    def run(_self, trial, cases):
        lr = trial.settings["lr"]
        seen.setdefault(lr, []).append(len(cases))
        if lr == 3:
            trial.error = "cannot"
        for case in cases:
            trial.facts[case.request.key] = FactScore(1.0, 1.0, 1 - lr / 10, 0.0)

    monkeypatch.setattr("lm_edit.tuning.search._TrialRunner.run", run)
    cases = [
        Case(EditRequest(prompt=f"{{}} {n}", subject="A", target_new="b"), [], CASES[0].neighbors) for n in range(8)
    ]
    found = tune(*tiny, "r_rome", [{"lr": lr} for lr in (5, 3, 1, 2)], cases, quiet=True)
    assert seen == {5: [2], 3: [2], 1: [2, 2, 4], 2: [2, 2]}
    assert [trial.settings["lr"] for trial in found] == [1, 2, 5, 3]
    seen.clear()
    tune(*tiny, "r_rome", [{"lr": lr} for lr in (5, 1, 2)], cases, halving=False, quiet=True)
    assert seen == {5: [8], 1: [8], 2: [8]}


def test_a_killed_search_goes_on(tiny, tmp_path, monkeypatch):
    store = Store(tmp_path)
    trials = [{**QUICK, "lr": lr} for lr in (0.1, 0.5)]
    first = tune(*tiny, "r_rome", trials, CASES[:2], store=store, quiet=True)
    assert store.size()["trials"][0] == 4 and "deltas" not in store.size()
    made = []
    edit = type(load_editor("r_rome")).edit
    monkeypatch.setattr(
        "edit_hooks.base.editor.Editor.edit", lambda *args, **kw: made.append(len(args[3])) or edit(*args, **kw)
    )
    again = tune(*tiny, "r_rome", trials, CASES[:2], store=store, quiet=True)
    assert not made and again == first
    more = tune(*tiny, "r_rome", trials, CASES, store=store, quiet=True)
    assert made == [1, 1] and len(more[0].facts) == 3


def test_candidates_an_editor_cannot_use_are_kept_with_the_reason(tiny):
    settings = {**QUICK, "second_moments": list(SENTENCES)}
    trials = [{**settings, "nullspace_threshold": 1e-12}, {**settings, "nullspace_energy": 0.5}]
    good, bad = tune(*tiny, "alphaedit", trials, CASES[:2], quiet=True)
    assert good.error is None and len(good.facts) == 2
    assert "nothing can be written" in bad.error and bad.score == 0.0


def test_facts_that_fail_count_as_failures(tiny, monkeypatch):
    monkeypatch.setattr(
        "edit_hooks.deltas.delta.Delta.check_finite", lambda self: (_ for _ in ()).throw(EditingError("inf"))
    )
    (trial,) = tune(*tiny, "r_rome", [QUICK], CASES[:1], quiet=True)
    (fact,) = trial.facts.values()
    assert (fact.efficacy, fact.neighborhood, fact.reason) == (0.0, None, "inf")


def test_efficacy_alone_is_refused(tiny):
    with pytest.raises(EditingError, match="overwrite all"):
        tune(*tiny, "r_rome", [QUICK], [Case(CASES[0].request, [], [])], quiet=True)
    with pytest.raises(EditingError, match="needs the field 'subject'"):
        plain_case = Case(EditRequest(prompt="a b", target_new="c"), [], CASES[0].neighbors)
        tune(*tiny, "r_rome", [QUICK], [plain_case], quiet=True)
