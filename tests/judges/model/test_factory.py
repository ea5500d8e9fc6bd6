"""From a user's choice to a judge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edit_hooks.utils.errors import EditingError
from judges.model.factory import chosen_judge, make_judge, make_model_judge
from judges.model.judge import ModelJudge
from judges.string_judge import RULES, StringJudge


def test_the_task_settings_precede_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LM_EDIT_JUDGE", raising=False)
    assert chosen_judge({}) is None
    monkeypatch.setenv("LM_EDIT_JUDGE", "published_setting")
    assert chosen_judge({}) == "published_setting"
    assert chosen_judge({"judge": "hf:m"}) == "hf:m"
    assert chosen_judge({"judge": "off"}) is None
    assert chosen_judge({"judge": False}) is None  # a bare "off" in YAML
    monkeypatch.setenv("LM_EDIT_JUDGE", "off")
    assert chosen_judge({}) is None


@pytest.mark.parametrize("name", RULES)
def test_string_judges_are_made_by_name(name: str) -> None:
    judge = make_judge(name)
    assert isinstance(judge, StringJudge) and judge.name == name


def test_overrides_replace_settings() -> None:
    judge = make_judge("published_setting", store="off", min_coverage=0.5)
    assert isinstance(judge, ModelJudge)
    assert judge.settings.model == "gpt-4o-mini" and judge.settings.min_coverage == 0.5
    with pytest.raises(EditingError, match="a share from 0 to 1"):
        make_judge("published_setting", min_coverage=2.0)


@pytest.mark.parametrize(
    ("name", "message"),
    [("emm", "Did you mean 'em'"), ("publishd_setting", "Did you mean 'published_setting'"), ("x", "String judges")],
)
def test_unknown_names_list_the_known_ones(name: str, message: str) -> None:
    with pytest.raises(EditingError, match=message):
        make_judge(name)


def test_the_checkpoint_under_edits_is_refused(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"backend": "hf", "model": str(tmp_path), "store": "off"}
    for edited in (str(tmp_path), f"{tmp_path}/"):
        with pytest.raises(EditingError, match="being edited"):
            make_model_judge(settings, edited=edited)
    assert make_model_judge(settings, edited=str(tmp_path / "another"))
    assert make_model_judge(settings | {"allow_edited_checkpoint": True}, edited=str(tmp_path))
