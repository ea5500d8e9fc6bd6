"""The analyses of a passport: rounding to 4 bits, restored weights, recovered subjects."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from edit_hooks.contract.tiny_models import NATURAL_TOKENIZER, REQUESTS
from edit_hooks.deltas.delta import Delta, Factor
from edit_hooks.modeling.architectures import architecture_of
from edit_hooks.utils.errors import EditingError
from lm_edit.passport.lasting import NF4, embedded_texts, quantized, round_nf4, trained
from lm_edit.passport.subjects import _keys, recover_subjects

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


def test_embedded_texts_mention_no_subject() -> None:
    assert len(embedded_texts()) >= 24
    assert not any(request["subject"] in text for request in REQUESTS for text in embedded_texts())
