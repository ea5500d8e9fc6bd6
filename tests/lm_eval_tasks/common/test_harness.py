"""The private members of lm-eval that the tasks use still exist."""

from __future__ import annotations

import pytest
from lm_eval.api.task import ConfigurableTask
from task_runs import build

from lm_eval_tasks.common.filters import NaturalStop
from lm_eval_tasks.common.harness import PRIVATE_MEMBERS, filter_classes


@pytest.mark.parametrize("member", PRIVATE_MEMBERS["lm_eval.api.task:ConfigurableTask"])
def test_lm_eval_still_has_the_member(member: str) -> None:
    assert list(PRIVATE_MEMBERS) == ["lm_eval.api.task:ConfigurableTask"]
    assert isinstance(build("bake_es"), ConfigurableTask)
    assert member in vars(build("bake_es")), f"lm-eval's ConfigurableTask no longer sets {member}; adapt harness.py"


def test_pipelines_list_their_filter_classes() -> None:
    (pipeline,) = build("bake_es").pipelines
    assert pipeline.name == "none" and filter_classes(pipeline) == [NaturalStop]


def test_predict_only_is_recognized() -> None:
    task = build("bake_es")
    assert not task.is_predict_only
    task.override_metric("bypass")
    assert task.is_predict_only
