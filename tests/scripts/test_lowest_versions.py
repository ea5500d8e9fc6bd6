"""The constraints of scripts/lowest_versions.py."""

from __future__ import annotations

import sys

import pytest

if sys.version_info < (3, 11):
    pytest.skip("tomllib is part of Python from 3.11 on", allow_module_level=True)

from lowest_versions import lowest_versions, tool_versions

PROJECT = """
[project]
dependencies = ["one>=1.2,<2", "two", "three-and-more>=5"]
[project.optional-dependencies]
demo = ["four[extra]>=4", "five>=0.16.2"]
test = ["tool>=9", "one", "own[demo]"]
"""


def test_lower_bounds_become_exact_versions() -> None:
    assert lowest_versions(PROJECT) == {"one": "1.2", "three-and-more": "5", "five": "0.16.2"}


def test_tools_have_the_versions_of_every_other_run() -> None:
    """Linters and type checkers of another version find other things, which says nothing of a lower bound."""
    constraints = """# comment
one==1.9
tool==9.5 ; python_version >= "3.11"
tool-helper==3
"""
    assert tool_versions(PROJECT, constraints) == ['tool==9.5 ; python_version >= "3.11"']
