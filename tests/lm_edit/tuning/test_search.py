"""Search over settings: rounds, halving, early ends, and facts that nothing can be learned from."""

from __future__ import annotations

import pytest
import torch
from tuning_cases import CASES, start_at, tune

from edit_hooks import EditingError, EditRequest
from edit_hooks.contract.tiny_models import build_model, build_tokenizer
from lm_edit.tuning import search
from lm_edit.tuning.steps import StepSetting, find_step
from lm_edit.tuning.trials import FactScore
from lm_eval_tasks.common.records.cases import Case


@pytest.fixture(scope="module")
def tiny():
    return build_model("llama", dtype=torch.float64), build_tokenizer("byte_bpe_bos")


def test_rounds_halve_candidates_and_double_facts():
    assert search.plan_rounds(8, 16, True) == [(8, 0, 4), (4, 4, 8), (2, 8, 16)]
    assert search.plan_rounds(8, 16, False) == [(8, 0, 16)] and search.plan_rounds(2, 16, True) == [(2, 0, 16)]
    assert search.plan_rounds(5, 3, True) == [(5, 0, 2), (3, 2, 3)] and search.plan_rounds(4, 1, True) == [(4, 0, 1)]


def test_the_better_half_goes_on_and_the_best_comes_first(tiny, monkeypatch):
    seen: dict[int, list[int]] = {}

    def run(_self, trial, cases):
        lr = trial.settings["lr"]
        seen.setdefault(lr, []).append(len(cases))
        if lr == 3:
            trial.error = "cannot"
        for case in cases:
            trial.facts[case.request.key] = FactScore(1.0, 1.0, 1 - lr / 10, 0.0)

    monkeypatch.setattr("lm_edit.tuning.trials.TrialRunner.run", run)
    cases = [
        Case(EditRequest(prompt=f"{{}} {n}", subject="A", target_new="b"), [], CASES[0].neighbors) for n in range(8)
    ]
    found = tune(tiny, "r_rome", [{"lr": lr} for lr in (5, 3, 1, 2)], cases)
    assert seen == {5: [2], 3: [2], 1: [2, 2, 4], 2: [2, 2]}
    assert [trial.settings["lr"] for trial in found] == [1, 2, 5, 3]
    seen.clear()
    tune(tiny, "r_rome", [{"lr": lr} for lr in (5, 1, 2)], cases, halving=False)
    assert seen == {5: [8], 1: [8], 2: [8]}


def test_a_search_ends_when_nothing_takes_or_nothing_can_be_better(tiny, monkeypatch):
    seen: dict[int, int] = {}
    score = {1: FactScore(0.0, 1.0, 1.0, 0.0)}

    def run(_self, trial, cases):
        lr = trial.settings["lr"]
        seen[lr] = seen.get(lr, 0) + len(cases)
        for case in cases:
            trial.facts[case.request.key] = score.get(lr, score[1])

    monkeypatch.setattr("lm_edit.tuning.trials.TrialRunner.run", run)
    cases = [
        Case(EditRequest(prompt=f"{{}} {n}", subject="A", target_new="b"), [], CASES[0].neighbors) for n in range(8)
    ]
    candidates = [{"lr": lr} for lr in (1, 2, 3, 4)]
    tune(tiny, "r_rome", candidates, cases)
    assert seen == {1: 2, 2: 2, 3: 2, 4: 2}
    seen.clear()
    score |= {3: FactScore(1.0, 1.0, 1.0, 0.0, 1.0), 2: FactScore(1.0, 1.0, 0.9, 0.0, 1.0)}
    assert tune(tiny, "r_rome", candidates, cases)[0].settings == {"lr": 3}
    assert seen == {1: 2, 2: 2, 3: 8, 4: 2}


def test_a_step_that_is_a_thousand_times_too_small_is_found(tiny, monkeypatch):
    said: list[str] = []
    settings = {"num_steps": 4}
    start_at(5e-6, monkeypatch)
    found = search.search(*tiny, "ft_m", settings, {}, CASES, quiet=True, announce=said.append)
    assert found.found and found.step.size in (5e-3, 5e-2) and found.trials[0].gain > 0.5
    assert "lr" not in found.first and found.trials[0].settings["lr"] >= 1e-3
    made = sum(len(trial.facts) for trial in [*found.trials, *found.step.trials])
    assert said[0].startswith("at most ") and made <= int(said[0].split()[2])
    assert "s per edit with its questions: at most" in said[1] and len(said) == 2


@pytest.mark.parametrize(("num", "kept"), [(1, ["found"]), (2, ["shipped", "found"])])
def test_few_candidates_have_the_one_with_the_step_found(tiny, monkeypatch, num, kept):
    """One candidate was the settings as shipped, which the walk had just shown to do nothing."""
    start_at(5e-6, monkeypatch)
    found = search.search(*tiny, "ft_m", {"num_steps": 4}, {}, CASES, num=num, quiet=True)
    steps = {"shipped": None, "found": found.step.size}
    assert {trial.settings.get("lr") for trial in found.trials} == {steps[name] for name in kept}
    assert found.found and found.trials[0].settings["lr"] == found.step.size


def test_a_step_that_is_the_shipped_one_keeps_no_further_candidate(tiny, monkeypatch):
    """The second place was that of the first candidate at another depth, whatever the seed."""

    def run(_self, trial, cases):
        shipped = trial.settings.get("lr", 0.0005) == 0.0005
        for case in cases:
            trial.facts[case.request.key] = FactScore(1.0 if shipped else 0.5, 1.0, 1.0, 0.5, stability=0.95)

    monkeypatch.setattr("lm_edit.tuning.trials.TrialRunner.run", run)
    drawn = set()
    for seed in range(6):
        found = search.search(*tiny, "ft_m", {}, {}, CASES, num=2, seed=seed, quiet=True)
        assert found.step.size == 0.0005
        first, second = sorted(found.trials, key=lambda trial: trial.settings != found.first)
        assert first.settings == found.first
        drawn.add(str(second.settings))
    assert len(drawn) > 1


@pytest.mark.parametrize("margins", [(-0.3, -0.2), (-0.2, -0.3)])
def test_a_step_below_one_that_ruins_the_model_is_found(tiny, monkeypatch, margins):
    """Where the tenfold step had the larger margin of the two ruined models, no smaller one was tried."""

    def run(_self, trial, cases):
        lr = trial.settings["lr"]
        ruined = FactScore(0.0, 0.0, 0.0, margins[lr > 0.5], stability=1e-4)
        for case in cases:
            trial.facts[case.request.key] = FactScore(1.0, 1.0, 1.0, 0.5, stability=0.95) if lr < 0.1 else ruined

    monkeypatch.setattr("lm_edit.tuning.trials.TrialRunner.run", run)
    runner = search.TrialRunner(*tiny, "ft_m", None)
    found = find_step(runner, StepSetting("lr", 0.5, lambda size: {"lr": size}), CASES[:2])
    assert (list(found.tried), found.size) == ([0.5, 5.0, 0.05, 0.005], 0.05)


def test_an_editor_that_nothing_makes_take_ends_soon(tiny):
    found = search.search(*tiny, "broken_editors:Effect", {"num_steps": 2}, {}, CASES, quiet=True)
    assert not found.found and found.step.size is None
    assert len(found.step.tried) <= 3 and found.trials == sorted(found.step.trials, key=lambda t: t.rank, reverse=True)


def test_the_first_of_the_given_layers_is_walked_and_given_steps_are_not(tiny):
    vary = {"layers": [[2], [0]]}
    found = search.search(*tiny, "ft_m", {"num_steps": 2}, vary, CASES[:1], quiet=True)
    assert {tuple(trial.settings["layers"]) for trial in found.step.trials} == {(2,)}
    assert search.search(*tiny, "ft_m", {"num_steps": 2}, {**vary, "lr": [0.1]}, CASES[:1], quiet=True).step is None


def test_facts_that_are_known_already_are_left_out_and_counted(tiny):
    known, unknown = CASES[0], CASES[2]
    wanted = EditRequest(prompt="{} is located in", subject="Port Amelin", target_new="Brenholt", target_true="Rome")
    runner = search.TrialRunner(*tiny, "ft_m", None)
    if runner.unedited([known]).facts[known.request.key].before < 1:  # of the two orders one is known
        known = Case(wanted, known.paraphrases, known.neighbors)
    found = search.search(*tiny, "ft_m", {"num_steps": 1}, {"lr": [0.1]}, [known, unknown], quiet=True)
    assert found.known == [known] and set(found.unedited.facts) == {unknown.request.key}
    with pytest.raises(EditingError, match="gives the new answer to all 1 facts already"):
        search.search(*tiny, "ft_m", {}, {}, [known], quiet=True)


def test_efficacy_alone_and_editors_without_settings_to_search_are_refused(tiny):
    with pytest.raises(EditingError, match="overwrite all"):
        search.search(*tiny, "r_rome", {}, {}, [Case(CASES[0].request, [], [])], quiet=True)
    with pytest.raises(EditingError, match="needs the field 'subject'"):
        plain_case = Case(EditRequest(prompt="a b", target_new="c"), [], CASES[0].neighbors)
        search.search(*tiny, "r_rome", {}, {}, [plain_case], quiet=True)
    with pytest.raises(EditingError, match="changes prompts, not the model"):
        search.search(*tiny, "ice", {}, {}, CASES, quiet=True)


def test_a_line_names_the_settings_that_no_candidate_varies(tiny):
    """An editor of another package may call its step anything."""
    lines = [list(search._not_searched("kn", tiny[0], {}, vary, 3)) for vary in ({}, {"threshold": [0.1, 0.2]})]
    assert lines[0] == [
        "not searched: threshold, sharing, erase, write; --vary 'threshold=VALUE;VALUE' searches one of them"
    ]
    assert lines[1][0].startswith("not searched: sharing, erase, write;")
    assert not list(search._not_searched("rome", tiny[0], {}, {"layers": [[1]]}, 3))
