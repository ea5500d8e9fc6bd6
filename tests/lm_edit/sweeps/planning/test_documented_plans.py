"""The guides to sweeps list the keys, rules and files that the code has."""

from __future__ import annotations

import re

import pytest
from paths import ROOT

from lm_edit.sweeps.execution import runs
from lm_edit.sweeps.planning import grid, plan

TEXT = "".join((ROOT / f"docs/guides/{name}.md").read_text(encoding="utf-8") for name in ("sweeps", "sweeps-cluster"))


@pytest.mark.parametrize(
    "names", [plan.KEYS, plan.EDITOR_KEYS, plan.BENCHMARK_KEYS, plan.RESOURCE_KEYS, plan.LM_EVAL_KEYS]
)
def test_every_key_is_documented(names: tuple[str, ...]) -> None:
    assert set(names) <= set(re.findall(r"`(\w+)", TEXT))


def test_rules_and_files_are_documented() -> None:
    assert all(f"| `{rule}` |" in TEXT for rule in grid.RULES)
    for name in (runs.SETTINGS, runs.LOG, f"{runs.ATTEMPT}/", f"{runs.RESULTS}/", runs.FAILED):
        assert f"| `{name}` |" in TEXT
