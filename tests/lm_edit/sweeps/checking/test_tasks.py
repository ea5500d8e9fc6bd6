"""Tasks by name: those of lm-eval are found in the folder of their name, without its index of all."""

from __future__ import annotations

import pytest
from lm_eval.tasks._index import Entry, Kind

from edit_hooks import EditingError
from lm_edit.sweeps.checking import tasks
from lm_edit.sweeps.checking.tasks import benchmarks_of, leaf_tasks


def test_tasks_of_lm_eval_are_found_without_the_index_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_all_tasks", lambda: pytest.fail("all tasks are indexed"))
    for name in ("ifeval", "arc_challenge", "truthfulqa_mc2", "gsm8k", "bake_rq"):
        assert leaf_tasks(name) == (name,)
    assert benchmarks_of("arc_easy") == []
    assert len(leaf_tasks("mmlu_stem_tasks")) == 19 and "mmlu_anatomy" in leaf_tasks("mmlu")  # tags of one folder


def test_others_are_looked_up_among_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a tag in whose folder most of its tasks are."""
    own = tasks._own_tasks()
    both = Entry(name="mgsm_direct", kind=Kind.TAG, yaml_path=None, tags={"bake_rq", "bake_es"})
    monkeypatch.setattr(tasks, "_all_tasks", lambda: {**own, "elsewhere": own["bake_es"], "mgsm_direct": both})
    assert leaf_tasks("elsewhere") == ("elsewhere",) and leaf_tasks("mgsm_direct") == ("bake_es", "bake_rq")
    for name in ("arc_challange", "../arc", "bake_ess"):
        with pytest.raises(EditingError, match=f"there is no task '{name}'"):
            leaf_tasks(name)
