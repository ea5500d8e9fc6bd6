"""Shared by the tests of the tasks."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_commit_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """`simple_evaluate` starts git after every run, which no test here is about."""
    monkeypatch.setattr("lm_eval.evaluator.get_git_commit_hash", lambda: None)
