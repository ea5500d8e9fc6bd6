"""Settings of MEND's training."""

from __future__ import annotations

import pytest
from paths import ROOT

from edit_hooks import EditingError
from edit_hooks.editors.mend import MEND
from edit_hooks.editors.serac import SERAC
from edit_hooks.training.mend.config import TrainingConfig
from edit_hooks.training.serac.config import SERACTrainingConfig
from edit_hooks.training.settings import resolve_settings
from edit_hooks.utils.storage.yaml_io import read_yaml


def test_unknown_training_settings_are_named(tiny_model):
    with pytest.raises(EditingError, match=r"acumulate.*Did you mean 'accumulate'"):
        resolve_settings(TrainingConfig, MEND, tiny_model("llama"), {"acumulate": 2})
    with pytest.raises(EditingError, match="num_steps"):
        TrainingConfig(num_steps=0)


def test_a_shipped_file_has_settings_of_the_training(tiny_model):
    """EasyEdit trains 20,000 iterations on Qwen2.5, 100,000 on the others."""

    def num_steps(**settings):
        return resolve_settings(TrainingConfig, MEND, tiny_model("llama"), settings).num_steps

    assert (num_steps(), num_steps(shipped="llama-2-7b"), num_steps(shipped="qwen2.5-7b")) == (10000, 10000, 2000)
    assert num_steps(shipped="qwen2.5-7b", num_steps=7) == 7


def test_an_unknown_setting_in_the_section_of_a_shipped_file_names_the_file(tiny_model, tmp_path, monkeypatch):
    text = "matches: {model_type: llama}\nsource: none\nconfig: {}\ntraining: {num_step: 5}\n"
    (tmp_path / "tiny.yaml").write_text(text)
    monkeypatch.setattr(MEND, "config_folders", (str(tmp_path),))
    with pytest.raises(EditingError, match=r"(?s)'num_step'.*Did you mean 'num_steps'.*Shipped settings: .*tiny\.yaml"):
        resolve_settings(TrainingConfig, MEND, tiny_model("llama"), {})


def test_patience_below_the_distance_of_validations_is_refused(tiny_model):
    """Such a run once stopped before its first validation, without an artifact, and ended well."""
    settings = {"num_steps": 30, "validate_every": 20, "patience": 10}
    for config_class, editor_class in ((TrainingConfig, MEND), (SERACTrainingConfig, SERAC)):
        with pytest.raises(EditingError, match=r"'patience' \(10\) and 'validate_every' \(20\).*raise 'patience'"):
            resolve_settings(config_class, editor_class, tiny_model("llama"), settings)
        assert config_class(**{**settings, "patience": 20}).patience == 20


def test_the_recipe_for_the_demo_model_is_valid():
    settings = read_yaml(ROOT / "scripts" / "mend-demo.yaml")
    config = TrainingConfig.from_mapping(settings)
    assert config.layers == [15, 16, 17] and config.num_steps * config.accumulate <= 1000  # minutes on a CPU
