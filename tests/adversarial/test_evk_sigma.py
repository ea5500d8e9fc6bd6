"""The noise of EVK-Align: relative to the embeddings, given once, and refused where it perturbs nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import yaml
from editor_settings import ALPHAEDIT_CONFIG, ROME_CONFIG
from paths import ROOT

from edit_hooks import EditingError, EditRequest, load_editor
from edit_hooks.contract.tiny_models import NATURAL_TOKENIZER, REQUESTS, build_model, build_tokenizer
from edit_hooks.editors.evk_edit import EVKEditConfig
from edit_hooks.locate.values.evk_align import embedding_std

EDITS = [EditRequest(**record) for record in REQUESTS]
ALIGN = {**ROME_CONFIG, "num_steps": 4, "evk_align": True, "evk_weight": 2.0}


def weights(model_type: str = "llama", edits: list[EditRequest] = EDITS, model: Any = None, **settings: Any) -> Any:
    tokenizer = build_tokenizer(NATURAL_TOKENIZER[model_type])
    deltas = load_editor("rome", {**ALIGN, **settings}).edit(model or build_model(model_type), tokenizer, edits)
    return [next(iter(delta.weights().values())) for delta in deltas]


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "gemma3_text"])  # Gemma scales its embeddings in the module
def test_the_relative_sigma_is_in_units_of_the_embeddings(model_type: str) -> None:
    model = build_model(model_type)
    with torch.no_grad():
        std = float(model.get_input_embeddings()(torch.arange(model.config.vocab_size)).std())
    assert embedding_std(model) == pytest.approx(std, rel=1e-5)
    relative, absolute = weights(model_type, evk_relative_sigma=0.7), weights(model_type, evk_sigma=0.7 * std)
    for ours, theirs in zip(relative, absolute, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-7)
    default, half = weights(model_type), weights(model_type, evk_relative_sigma=0.5)
    assert all(torch.equal(a, b) for a, b in zip(default, half, strict=True))
    assert not torch.equal(default[0], relative[0])


def test_models_with_embeddings_of_another_size_get_the_same_instances() -> None:
    """Ten times larger embeddings need ten times the noise, which an absolute sigma does not give."""
    plain, scaled = build_model("llama"), build_model("llama")
    with torch.no_grad():
        scaled.get_input_embeddings().weight.mul_(10)
    assert embedding_std(scaled) == pytest.approx(10 * embedding_std(plain), rel=1e-5)


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "gemma3_text"])
@pytest.mark.parametrize("sigma", [{"evk_relative_sigma": 0.01}, {"evk_sigma": 1e-4}, {"evk_relative_sigma": 0}])
def test_instances_that_are_the_edit_prompt_are_refused(model_type: str, sigma: dict[str, float]) -> None:
    with pytest.raises(EditingError, match=r"answered like the edit prompt.*evk_relative_sigma=0\.5"):
        weights(model_type, EDITS[:1], **sigma)
    weights(model_type, EDITS[:1], **sigma, evk_weight=0.0)  # the term is off


@pytest.mark.parametrize("engine", ["fast", "reference"])
def test_the_refusal_measures_the_instances_against_their_own_prompt(engine: str) -> None:
    """Prompts of several lengths in one batch: at the default sigma none is refused, alone or together."""
    together = weights(edits=EDITS, engine=engine)
    alone = [weights(edits=[edit], engine=engine)[0] for edit in EDITS]
    for ours, theirs in zip(together, alone, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)


def test_evk_edit_itself_is_refused_with_no_noise() -> None:
    model, tokenizer = build_model("llama"), build_tokenizer("byte_bpe_bos")
    editor = load_editor("evk_edit", {**ALPHAEDIT_CONFIG, "evk_relative_sigma": 0.001})
    with pytest.raises(EditingError, match="answered like the edit prompt"):
        editor.edit(model, tokenizer, EDITS, joint=True)


def test_both_sigmas_are_refused_and_a_users_sigma_replaces_a_shipped_one_of_the_other_kind() -> None:
    with pytest.raises(EditingError, match=r"'evk_sigma' is 0\.1 and 'evk_relative_sigma' is 0\.5.*Give one"):
        load_editor("rome", {"evk_sigma": 0.1, "evk_relative_sigma": 0.5})
    for shipped, user in (("gpt2-xl", {"evk_relative_sigma": 0.5}), ("gemma-3-270m", {"evk_sigma": 0.3})):
        text = (ROOT / "edit_hooks/configs/evk_edit" / f"{shipped}.yaml").read_text(encoding="utf-8")
        settings = yaml.safe_load(text)["config"]
        config = EVKEditConfig.from_mapping(EVKEditConfig.overridden(settings, user))
        assert {name: getattr(config, name) for name in user} == user
        kept = EVKEditConfig.from_mapping(EVKEditConfig.overridden(settings, {"lr": 0.2}))
        assert {name: getattr(kept, name) for name in settings} == settings
