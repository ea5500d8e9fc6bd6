"""The first-token divergence on neutral prompts that every edit reports."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_runs import build, run
from task_runs import metrics_of

from edit_hooks import EditRequest, edited, load_editor
from edit_hooks.contract.tiny_models import REQUESTS, save_tiny
from edit_hooks.deltas.delta import Delta
from edit_hooks.inference.effects import neutral_prompts
from edit_hooks.inference.effects.neutral_prompts import NEUTRAL_PROMPTS, NeutralPrompts
from edit_hooks.utils.errors import EditingError
from lm_eval_tasks.common.scoring.aggregation import edit_summary
from lm_eval_tasks.report.printing.anomalies import find_anomalies

FT = {"layers": [1], "num_steps": 10, "lr": 0.1}
TINY_STEP = {"layers": [1], "num_steps": 1, "lr": 1e-30}
STREAM = {"mode": "sequential", "edits": "bake", "num_edits": 3, "edit_batch_size": 1}
REQUEST = EditRequest(**REQUESTS[0])


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("tiny"), "llama"))


@pytest.fixture
def neutral(tiny_model, tiny_tokenizer) -> NeutralPrompts:
    return NeutralPrompts(tiny_model("llama"), tiny_tokenizer("byte_bpe_bos"))


def edit_with(neutral: NeutralPrompts, tiny_tokenizer: Any, editor: str, settings: dict[str, Any]) -> Delta:
    return load_editor(editor, settings).edit(neutral.model, tiny_tokenizer("byte_bpe_bos"), [REQUEST])[0]


# ------------------------------------------------------------------ the number


def test_it_is_the_mean_of_the_divergences_by_hand(neutral, monkeypatch) -> None:
    # KL((1/2, 1/2) || (1/4, 3/4)) = 1/2 ln 2 + 1/2 ln(2/3) = 1/2 ln(4/3); the second prompt is unchanged.
    neutral._unedited_PV = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    after = torch.tensor([[0.25, 0.75], [0.9, 0.1]]).log()
    monkeypatch.setattr(neutral, "_log_probs", lambda deltas: [after])
    assert neutral.divergence(None) == pytest.approx(math.log(4 / 3) / 4)
    after[1, 0] = float("nan")
    assert math.isnan(neutral.divergence(None))


@pytest.mark.parametrize(("editor", "settings"), [("ft_m", FT), ("r_rome", {"num_steps": 6}), ("grace", {})])
def test_it_is_that_of_plain_forward_passes(neutral, tiny_tokenizer, editor, settings) -> None:
    """Dense edits, per-row adapters and hooks against the patched model."""
    tokenizer = tiny_tokenizer("byte_bpe_bos")
    delta = edit_with(neutral, tiny_tokenizer, editor, settings)

    def log_probs() -> list[torch.Tensor]:
        batches = [torch.tensor([tokenizer(prompt)["input_ids"]]) for prompt in NEUTRAL_PROMPTS]
        with torch.no_grad():
            return [neutral.model(ids).logits[0, -1].log_softmax(0) for ids in batches]

    before = log_probs()
    if delta.hook_edit is None:
        with edited(neutral.model, delta):
            after = log_probs()
        expected = sum(float((p.exp() * (p - q)).sum()) for p, q in zip(before, after, strict=True)) / len(before)
        assert expected > 0.001
    else:
        expected = 0.0  # no prompt is near a key of the codebook
    assert neutral.divergence(delta) == pytest.approx(expected, abs=1e-6)


def test_without_an_effect_it_is_exactly_0(neutral, tiny_tokenizer) -> None:
    assert neutral.divergence(None) == 0.0
    low_rank = edit_with(neutral, tiny_tokenizer, "r_rome", {"num_steps": 2})
    for factor in low_rank.factors.values():
        factor.left.zero_()
    assert neutral.divergence(low_rank) == 0.0
    assert neutral.divergence(edit_with(neutral, tiny_tokenizer, "ft_m", TINY_STEP)) == 0.0


def test_edits_that_are_measured_together_have_the_numbers_of_each(neutral, tiny_tokenizer) -> None:
    """Dense edits, per-row adapters, hooks and none: each under its own, in one call."""
    made = [edit_with(neutral, tiny_tokenizer, editor, settings) for editor, settings in (("ft_m", FT), ("grace", {}))]
    made += [edit_with(neutral, tiny_tokenizer, "r_rome", {"num_steps": steps}) for steps in (2, 6)]
    found = neutral.divergences([None, *made])
    assert found == pytest.approx([neutral.divergence(delta) for delta in (None, *made)], rel=1e-4, abs=1e-7)
    assert len({round(number, 4) for number in found if number > 1e-6}) >= 2


def test_many_edits_are_measured_a_few_at_a_time(neutral, tiny_tokenizer, monkeypatch) -> None:
    """An editor called with thousands of requests would hold thousands of distributions over the vocabulary."""
    made = [edit_with(neutral, tiny_tokenizer, "r_rome", {"num_steps": steps}) for steps in (2, 4)]
    sizes: list[int] = []
    log_probs = neutral._log_probs
    monkeypatch.setattr(neutral, "_log_probs", lambda deltas: sizes.append(len(deltas)) or log_probs(deltas))
    monkeypatch.setattr(neutral_prompts, "EDITS_AT_ONCE", 2)
    found = neutral.divergences([None, *made])
    assert sizes == [2, 1]
    assert found == pytest.approx([neutral.divergence(delta) for delta in (None, *made)], rel=1e-4, abs=1e-7)
    assert found[2] > 1e-6


# ------------------------------------------------------------------ results


def divergences(results: dict[str, Any]) -> list[float]:
    return [sample["edit"]["first_token_kl"] for sample in results["samples"]["bake_es"] if sample["edit"]]


def summary(results: dict[str, Any]) -> dict[str, Any]:
    return json.loads(metrics_of(results, "bake_es")["edit"])


def test_independent_edits_report_it_once_and_keep_it_in_the_store(model_path, tmp_path, monkeypatch) -> None:
    passes: list[Delta | None] = []
    forward = NeutralPrompts._log_probs

    def count(self: NeutralPrompts, deltas: Any) -> Any:
        passes.extend(deltas)
        return forward(self, deltas)

    monkeypatch.setattr(NeutralPrompts, "_log_probs", count)
    first = run(build(model_path, tmp_path, editor="ft_m", editor_args=FT), ["bake_es"], limit=2)
    found = divergences(first)
    assert len(found) == 2 and min(found) > 0 and len(passes) == 3  # and the unedited model
    assert summary(first)["first_token_kl"] == pytest.approx(sum(found) / 2, rel=0.01)
    again = run(build(model_path, tmp_path, editor="ft_m", editor_args=FT), ["bake_es"], limit=2)
    assert divergences(again) == found and len(passes) == 3


def test_a_stream_reports_it_after_every_step(model_path) -> None:
    results = run(build(model_path, editor="ft_m", editor_args=FT, **STREAM, data=data()), ["bake_es"])
    steps = [step["first_token_kl"] for step in results["config"]["edited_hf"]["steps"]]
    assert len(set(steps)) == 3 and divergences(results) == steps
    assert summary(results)["first_token_kl"] == pytest.approx(steps[-1], rel=0.01)
    null = run(build(model_path, editor="ft_m", editor_args=TINY_STEP, **STREAM, data=data()), ["bake_es"])
    assert set(divergences(null)) == {0.0}


def test_it_can_be_switched_off(model_path, tmp_path, monkeypatch) -> None:
    """No pass of the prompts, in no mode; an edit that the store has gets it in a later run with it."""
    passes: list[Delta | None] = []
    forward = NeutralPrompts._log_probs
    monkeypatch.setattr(
        NeutralPrompts, "_log_probs", lambda self, deltas: passes.extend(deltas) or forward(self, deltas)
    )
    options = {"editor": "ft_m", "editor_args": FT}
    off = run(build(model_path, tmp_path, **options, measure_edits=False), ["bake_es"], limit=1)
    assert "first_token_kl" not in off["samples"]["bake_es"][0]["edit"] and "first_token_kl" not in summary(off)
    stream = run(build(model_path, **options, **STREAM, data=data(), measure_edits=False), ["bake_es"], limit=1)
    assert not any("first_token_kl" in step for step in stream["config"]["edited_hf"]["steps"]) and not passes
    (found,) = divergences(run(build(model_path, tmp_path, **options), ["bake_es"], limit=1))
    assert found > 0 and len(passes) == 2  # the stored edit and the unedited model
    again = run(build(model_path, tmp_path, **options, measure_edits=False), ["bake_es"], limit=1)
    assert "first_token_kl" not in summary(again) and len(passes) == 2
    with pytest.raises(EditingError, match="measure_edits='no'; accepted: true, false"):
        build(model_path, measure_edits="no")


def test_edits_of_contexts_have_none(model_path) -> None:
    results = run(build(model_path, editor="ice", editor_args={}), ["bake_es"], limit=1)
    assert "first_token_kl" not in results["samples"]["bake_es"][0]["edit"]
    assert "first_token_kl" not in summary(results)


def data() -> str:
    from paths import RECORDS

    return str(Path(RECORDS) / "bake_qa.jsonl")


# ------------------------------------------------------------------ the anomaly


@pytest.mark.parametrize(("divergence", "named"), [(0.9, []), (1.1, ["damage"])])
@pytest.mark.parametrize("mode", ["sequential", "single"])
def test_a_large_divergence_is_an_anomaly(mode: str, divergence: float, named: list[str]) -> None:
    """Below the bound at which the model is called wrecked, see `test_wrecked.py`."""
    run_facts = {"mode": mode, "editor": "x", "editor_writes": ["weights"]}
    row: dict[str, Any] = {}
    if mode == "sequential":
        run_facts["steps"] = [{"first_token_kl": 2.0}, {"first_token_kl": divergence}]  # the last one counts
    else:
        row = {"edit,none": edit_summary([{"first_token_kl": divergence}, {"first_token_kl": divergence}])}
    results = {"config": {"edited_hf": run_facts}, "results": {"bake_es": row}, "configs": {}}
    assert [anomaly["kind"] for anomaly in find_anomalies(results)] == named
