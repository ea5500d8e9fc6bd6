"""Where the settings of a planned run come from: shipped, given, or untuned."""

from __future__ import annotations

from pathlib import Path

import pytest

from edit_hooks.utils.errors import EditingError
from lm_edit.sweeps.checking.checks import check_plan, origin_of
from lm_edit.sweeps.planning.plan import load_plan


def tuning_of(folder: Path, model: str, editor: str) -> str:
    path = folder / "plan.yaml"
    path.write_text(f"models: {{m: {model}}}\neditors: [{editor}]\nbenchmarks: [bake_es]\n", encoding="utf-8")
    plan = load_plan(path)
    (run,) = check_plan(plan).runs
    return origin_of(plan, run).tuning


@pytest.mark.parametrize(
    ("model", "editor", "tuning"),
    [
        ("{}", "rome", "shipped"),  # the demo model
        ("{}", "mend", "untuned"),
        ("{}", "ike", ""),
        ("{}", "unedited", ""),
        ("{pretrained: not/here, shape: gpt-j-6b}", "rome", "shipped"),
        ("{pretrained: not/here, shape: gpt-j-6b}", "melo", "untuned"),
        ("{pretrained: not/here, shape: gpt-j-6b}", "{editor: kn, editor_args: {layers: [3]}}", "given"),
        ("{pretrained: not/here}", "rome", "unknown"),
    ],
)
def test_origin_of_settings(model: str, editor: str, tuning: str, tmp_path: Path) -> None:
    assert tuning_of(tmp_path, model, editor) == tuning


def test_a_block_that_the_model_lacks_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EditingError, match=r"plan.yaml, line 2: run m, rome.*99"):
        tuning_of(tmp_path, "{}", "{editor: rome, editor_args: {layers: [99]}}")
