"""The result of a search as a settings file."""

from __future__ import annotations

from edit_hooks.utils.options import parse_editor_args
from lm_edit.tuning.settings_file import write_settings
from lm_edit.tuning.trials import FactScore, Trial


def test_the_file_holds_the_settings_without_the_seed_and_their_origin(tmp_path):
    path = tmp_path / "best.yaml"
    trial = Trial({"seed": 3, "layers": [1], "lr": 0.25}, {"fact": FactScore(1.0, None, 0.5, 0.1)})
    write_settings(path, trial, editor="rome", model="tiny", facts="1 facts")
    assert parse_editor_args(str(path)) == {"layers": [1], "lr": 0.25}
    comment = "# rome for tiny: best of lm-edit tune on 1 facts, score 0.667. Score it on other facts."
    assert path.read_text().splitlines()[0] == comment
