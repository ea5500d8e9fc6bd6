"""The analyses of a passport: rounding to 4 bits, restored weights, recovered subjects."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from edit_hooks.contract.tiny_models import NATURAL_TOKENIZER, REQUESTS
from edit_hooks.deltas.delta import Delta, Factor
from edit_hooks.modeling.architectures import architecture_of
from edit_hooks.utils.errors import EditingError
from lm_edit.passport import subjects
from lm_edit.passport.asking import EXCLUDED, NOT_REPORTED, TaskColumn, _score, mean_score
from lm_edit.passport.lasting import NF4, embedded_texts, quantized, round_nf4, trained
from lm_edit.passport.parts import ABILITY_COLUMNS, CHAT_COLUMNS, LASTING_COLUMNS, QUESTIONS
from lm_edit.passport.record import Part, _part_json
from lm_edit.passport.subjects import _keys, recover_subjects
from lm_eval_tasks.common.records.benchmark import all_benchmarks
from lm_eval_tasks.folder import TASKS_DIR

NAMES = ["Ostravia", "Velm", "he", "the town", "trumpet player", "English", "number", "speaks"]


@pytest.fixture
def tiny(tiny_model: Any, tiny_tokenizer: Any) -> Any:
    """`tiny("llama")`: a tiny model with its tokenizer."""
    return lambda kind: (tiny_model(kind), tiny_tokenizer(NATURAL_TOKENIZER[kind]))


def test_nf4_by_hand() -> None:
    """Each block has its own scale; a value becomes the nearest level times that."""
    block = torch.zeros(64)
    block[:4] = torch.tensor([2.0, -2.0, 0.1, 0.5])  # by 2: 1, -1, 0.05, 0.25
    rounded = round_nf4(torch.stack([block, 10 * block]))
    expected = torch.tensor([2.0, -2.0, 2 * NF4[8], 2 * NF4[10]])
    assert torch.allclose(rounded[0, :4], expected) and torch.equal(rounded[0, 4:], torch.zeros(60))
    assert torch.allclose(rounded[1], 10 * rounded[0])
    odd = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    assert round_nf4(odd).shape == odd.shape and round_nf4(odd).dtype == odd.dtype
    assert torch.equal(round_nf4(round_nf4(block)), round_nf4(block)), "rounding twice changes nothing"


def test_quantized_weights_come_back_after_an_error(tiny: Any) -> None:
    model, _ = tiny("llama")
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    with pytest.raises(RuntimeError), quantized(model) as details:
        changed = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
        assert details["maps"] == len(changed) > 0 and 0 < details["relative_change_of_weights"] < 0.2
        assert not any("embed" in name or "head" in name or "norm" in name for name in changed)
        raise RuntimeError
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())


def test_steps_that_do_not_move_the_model_are_refused(tiny: Any) -> None:
    model, tokenizer = tiny("llama")
    with (
        pytest.raises(EditingError, match="did not move the model"),
        trained(model, tokenizer, embedded_texts()[:4], 1, 0),
    ):
        pass
    with pytest.raises(EditingError, match="at least 4 are needed"), trained(model, tokenizer, ["two words"], 1, 0):
        pass


def test_a_subject_is_recovered_only_from_an_update_that_points_at_it(tiny: Any) -> None:
    model, tokenizer = tiny("llama")
    module = architecture_of(model).rewrite_name(0)
    keys_CF = _keys(model, tokenizer, NAMES, module)
    key_F = (keys_CF - keys_CF.mean(0))[0]
    left_D1 = torch.ones(model.config.hidden_size, 1)
    pointed = Delta(factors={module: Factor(left_D1, key_F[:, None], False)})
    found = recover_subjects(model, tokenizer, pointed, NAMES[:1], NAMES[1:], seed=0)
    assert found.found == {NAMES[0]: 1.0} and found.details["key_share_of_subjects"] == pytest.approx(1, abs=1e-4)
    assert found.chance == 1 / len(NAMES)
    dense = Delta(dense={f"{module}.weight": pointed.weight(f"{module}.weight")})
    assert recover_subjects(model, tokenizer, dense, NAMES[:1], NAMES[1:], seed=0).found == found.found
    other = (keys_CF - keys_CF.mean(0))[1]
    away = Delta(factors={module: Factor(left_D1, other[:, None], False)})
    assert recover_subjects(model, tokenizer, away, NAMES[:1], NAMES[1:], seed=0).found == {NAMES[0]: 0.0}
    with pytest.raises(EditingError, match="names besides"):
        recover_subjects(model, tokenizer, pointed, NAMES[:1], NAMES[1:3], seed=0)


def test_subjects_are_not_recovered_from_an_update_of_zeros(tiny: Any) -> None:
    """As that of an edit whose loss is below its bound from the start; every candidate has the same share."""
    model, tokenizer = tiny("llama")
    weight = f"{architecture_of(model).rewrite_name(0)}.weight"
    null = Delta(dense={weight: torch.zeros_like(model.get_parameter(weight))})
    with pytest.raises(EditingError, match="updates are zero"):
        recover_subjects(model, tokenizer, null, NAMES[:1], NAMES[1:], seed=0)


def test_a_tie_is_no_recovery(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = tiny("llama")
    module = architecture_of(model).rewrite_name(0)
    keys_CF = _keys(model, tokenizer, NAMES, module)
    monkeypatch.setattr(subjects, "_row_space", lambda *_: torch.zeros(1, keys_CF.shape[1]))
    delta = Delta(factors={module: Factor(torch.ones(model.config.hidden_size, 1), keys_CF[:1].T, False)})
    assert recover_subjects(model, tokenizer, delta, NAMES[:1], NAMES[1:], seed=0).found == {NAMES[0]: 0.0}


def test_the_mean_before_is_over_the_scored_requests() -> None:
    before = {"one": 1.0, "two": 3.0, "lost": math.inf}
    score = mean_score("target_nll", {"one": 0.5, "two": 0.25, "lost": math.nan}, before=before)
    assert (score.n, score.unscored, score.before) == (2, 1, 2.0)
    assert mean_score("target_nll", {"one": 0.5, "lost": 0.25}, before=before).before is None


def test_details_that_are_not_finite_are_strings() -> None:
    """JSON has no infinity."""
    part = Part(name="trained", question="?", unscored="wrecked", details={"divergence": math.inf, "steps": 2})
    assert _part_json(part)["details"] == {"divergence": "inf", "steps": 2}


def test_embedded_texts_mention_no_subject() -> None:
    assert len(embedded_texts()) >= 24
    assert not any(request["subject"] in text for request in REQUESTS for text in embedded_texts())


def _config(path: Path) -> dict[str, Any]:
    """A task's YAML with what it includes."""
    content = yaml.safe_load(path.read_text(encoding="utf-8").replace("!function", ""))
    included = content.pop("include", [])
    for one in [included] if isinstance(included, str) else included:
        content = {**_config(path.parent / one), **content}
    return dict(content)


def test_every_column_is_one_of_its_task() -> None:
    """A misspelled column would look like one that the facts cannot have."""
    of_benchmarks = [list(part.of_benchmark.values()) for part in QUESTIONS.values()]
    listed = [part.columns for part in QUESTIONS.values()] + [one for several in of_benchmarks for one in several]
    columns = {column for one in [*listed, CHAT_COLUMNS, LASTING_COLUMNS, ABILITY_COLUMNS] for column in one}
    files = {path.stem: path for path in TASKS_DIR.glob("*/*.yaml")}
    assert len(columns) > 30
    for column in columns:
        metrics = [entry["metric"] for entry in _config(files[column.task])["metric_list"]]
        assert column.metric in metrics, column
    assert not {name for part in QUESTIONS.values() for name in part.of_benchmark} - all_benchmarks().keys()


def test_reasons_are_those_of_the_column() -> None:
    """A task's reasons concern some of its columns; those without an unscored case have none."""
    row = {"task": "t", "stage": "", "filter": "none", "file": None, "value": 0.5, "n": 2, "failed": 0, "excluded": 1}
    row |= {"stderr": math.nan, "is_share": True, "chance": math.nan, "group_size": math.nan}
    row |= {"unscored_reason": {"not known": 1}}
    case = {"task": "t", "stage": "", "filter": "none", "reason": "not known"}
    rows = [{**row, "metric": "clean"}, {**row, "metric": "lost", "failed": 1}]
    cases = [{**case, "metric": "lost"}, {**case, "metric": "clean", "reason": ""}]
    clean, lost, absent = (_score(TaskColumn("t", name), rows, cases) for name in ("clean", "lost", "absent"))
    assert clean.reasons == {EXCLUDED: 1} and lost.reasons == {"not known": 1, EXCLUDED: 1}
    assert (clean.unscored, lost.unscored) == (1, 2) and absent.value is None and absent.note == NOT_REPORTED
