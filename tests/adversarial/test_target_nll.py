"""The likelihood of an edit's target that every edit reports, measured on the edited model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lm_runs import build, run
from paths import RECORDS

from edit_hooks import EditRequest, edited, load_editor
from edit_hooks.contract.tiny_models import REQUESTS, save_tiny
from edit_hooks.edit_report import Effects
from edit_hooks.inference.effects.edit_effects import EditEffects, with_nlls
from edit_hooks.modeling.forward.kv_cache import CACHE
from lm_eval_tasks.report.printing.anomalies import find_anomalies

FT = {"layers": [1], "num_steps": 10, "lr": 0.1}
MEMIT = {
    "layers": [0, 1],
    "num_steps": 15,
    "lr": 0.5,
    "clamp_factor": 8,
    "second_moments": ["A plain sentence.", "Another one, of more words."],
}
STREAM = {"mode": "sequential", "edits": "bake", "num_edits": 3}
FIRST, SECOND = (EditRequest(**fields) for fields in REQUESTS[:2])
IN_CONTEXT = EditRequest(**REQUESTS[0], context={"before": "Question: ", "after": "\nAnswer:", "separator": " "})


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("tiny"), "llama"))


@pytest.fixture
def effects(tiny_model, tiny_tokenizer) -> EditEffects:
    return EditEffects(tiny_model("llama"), tiny_tokenizer("byte_bpe_bos"))


def plain_nll(effects: EditEffects, request: EditRequest) -> float:
    """By the model as it is, which reads the prompt and then the target, as a memory of prompts expects."""
    ids = effects.tokenizer(request.text + request.continuation)["input_ids"]
    start = len(effects.tokenizer(request.text)["input_ids"])
    with torch.no_grad():
        prompt = effects.model(torch.tensor([ids[:start]]), use_cache=True)
        logits_TV = prompt.logits[0, -1:]
        if start < len(ids) - 1:
            target = effects.model(torch.tensor([ids[start:-1]]), **{CACHE: prompt[CACHE]})
            logits_TV = torch.cat([logits_TV, target.logits[0]])
    return float(torch.nn.functional.cross_entropy(logits_TV, torch.tensor(ids[start:])))


@pytest.mark.parametrize("request_", [FIRST, IN_CONTEXT], ids=["bare", "context"])
@pytest.mark.parametrize(("editor", "settings"), [("ft_m", FT), ("r_rome", {"num_steps": 6}), ("grace", {})])
def test_it_is_that_of_plain_forward_passes(effects, editor: str, settings: Any, request_: EditRequest) -> None:
    """Dense edits, per-row adapters and hooks; in the context of the edit."""
    (delta,) = load_editor(editor, settings).edit(effects.model, effects.tokenizer, [request_])
    found = effects.of_independent([(delta, [request_])])[0]
    assert found.target_nll_before == pytest.approx(plain_nll(effects, request_), abs=1e-5)
    with edited(effects.model, delta):
        expected = plain_nll(effects, request_)
    assert found.target_nll_after == pytest.approx(expected, abs=1e-5)
    assert abs(expected - found.target_nll_before) > 0.05


def test_several_requests_have_a_mean_and_none_has_no_number(effects) -> None:
    (both,) = load_editor("ft_m", FT).edit(effects.model, effects.tokenizer, [FIRST, SECOND], joint=True)
    found = effects.of_independent([(both, [FIRST, SECOND])])[0]
    single = effects.of_independent([(both, [request]) for request in (FIRST, SECOND)])
    for name in ("target_nll_before", "target_nll_after"):
        assert getattr(found, name) == pytest.approx(sum(getattr(one, name) for one in single) / 2, rel=1e-5)
    assert with_nlls(Effects(), [], {}, {}) == Effects()
    assert list(effects.of_independent([(both, [])])[0].to_json()) == ["first_token_kl", "wrecked"]


# ------------------------------------------------------------------ results


def reported(results: dict[str, Any]) -> list[tuple[float, float]]:
    found = [sample["edit"] for sample in results["samples"]["bake_es"] if sample["edit"]]
    return [(edit["target_nll_before"], edit["target_nll_after"]) for edit in found]


def test_a_run_reports_it_and_keeps_it_in_the_store(model_path, tmp_path, monkeypatch) -> None:
    options = {"editor": "ft_m", "editor_args": FT}
    found = reported(run(build(model_path, tmp_path, **options), ["bake_es"], limit=2))
    assert len(found) == 2 and all(after < before for before, after in found)
    off = run(build(model_path, tmp_path, **options, measure_edits=False), ["bake_es"], limit=2)
    assert not any("target_nll_after" in sample["edit"] for sample in off["samples"]["bake_es"])
    monkeypatch.setattr(EditEffects, "target_nlls", lambda *arguments: pytest.fail("measured again"))
    assert reported(run(build(model_path, tmp_path, **options), ["bake_es"], limit=2)) == found


@pytest.mark.parametrize(("editor", "settings"), [("ft_m", FT), ("grace", {})])
def test_a_step_of_a_stream_is_measured_between_its_neighbors(model_path, editor: str, settings: Any) -> None:
    """Before a step means after the steps before it."""
    options = {"editor": editor, "editor_args": settings, "data": str(Path(RECORDS) / "bake_qa.jsonl")}
    lm = build(model_path, **options, **STREAM, edit_batch_size=1)
    found = reported(run(lm, ["bake_es"]))
    requests = [group[0] for group in lm.plan.groups]
    effects, deltas = EditEffects(lm.model, lm.tokenizer), []
    for request, (before, after) in zip(requests, found, strict=True):
        with edited(lm.model, *deltas):
            assert before == pytest.approx(plain_nll(effects, request), abs=1e-4)
            (delta,) = lm.editor.edit(lm.model, lm.tokenizer, [request], history=deltas)
        deltas.append(delta)
        with edited(lm.model, *deltas):
            assert after == pytest.approx(plain_nll(effects, request), abs=1e-4)


@pytest.mark.parametrize("mode", [{}, {**STREAM, "edit_batch_size": 3}], ids=["single", "stream"])
def test_an_edit_that_writes_nothing_is_an_anomaly(model_path, mode: Any) -> None:
    """The optimization of MEMIT succeeds; with this weight on the other keys nothing of it is written."""
    settings = MEMIT | {"moment_weight": 1e9}
    lm = build(model_path, editor="memit", editor_args=settings, data=str(Path(RECORDS) / "bake_qa.jsonl"), **mode)
    results = run(lm, ["bake_es"])
    for sample in results["samples"]["bake_es"]:
        if edit := sample["edit"]:
            assert edit["final_nll"] < 0.99 * edit["initial_nll"]
            assert edit["target_nll_after"] == pytest.approx(edit["target_nll_before"], rel=1e-3)
    kinds = [anomaly["kind"] for anomaly in find_anomalies(results)]
    assert "target_nll" in kinds
