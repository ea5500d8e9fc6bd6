"""Settings by name: the editor's own, those of the editor that it post-processes, and of a context on top."""

from __future__ import annotations

from lm_eval_tasks.report.editor_settings import find_setting, without_setting

RECT = {"keep": 0.4, "seed": 1, "base_settings": {"evk_align": True, "lr": 0.5, "seed": 1}}
RECT_WITH_IKE = {"seed": 1, "base_settings": RECT, "context_settings": {"num_facts": 3, "seed": 1}}


def test_a_setting_is_found_in_the_editor_or_in_those_inside() -> None:
    for config in (RECT, RECT_WITH_IKE):
        assert [find_setting(config, name) for name in ("evk_align", "keep", "lr")] == [True, 0.4, 0.5]
    assert find_setting(RECT_WITH_IKE, "num_facts") == 3
    assert find_setting({"lr": 0.1, "base_settings": {"lr": 0.5}}, "lr") == 0.1  # the outer editor counts
    assert find_setting({"evk_align": False, "base_settings": {"evk_align": True}}, "evk_align") is False
    assert find_setting({"base_settings": {"evk_align": False}}, "evk_align") is False


def test_a_setting_that_no_editor_has() -> None:
    for config in ({}, None, "rect", RECT, {"base_settings": None}, {"moments": {"alpha": 1.0}}):
        assert find_setting(config, "alpha") is None


def test_a_setting_is_left_out_of_all_editors_and_nothing_else_changes() -> None:
    assert without_setting(RECT_WITH_IKE, "seed") == {
        "base_settings": {"keep": 0.4, "base_settings": {"evk_align": True, "lr": 0.5}},
        "context_settings": {"num_facts": 3},
    }
    assert without_setting(RECT, "alpha") == RECT and RECT["seed"] == 1
    assert without_setting({"moments": {"seed": 3}}, "seed") == {"moments": {"seed": 3}}  # no editor's settings
