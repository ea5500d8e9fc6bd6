"""Generated text of the site: every block is made, and shows every editor, option and verb once."""

from __future__ import annotations

import re

import pytest
from blocks import BLOCKS
from generated import filled, marks_of, pages
from paths import ROOT

from edit_hooks.base.registry import CORE, MORE
from edit_hooks.run_options import RUN_OPTIONS
from lm_edit.cli.main import VERBS

TERM = re.compile(r"^(`.*`)\n: ", flags=re.MULTILINE)
PAGES = {path.relative_to(ROOT).as_posix(): path for path in pages()}


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_a_page_is_made(page: str) -> None:
    text = filled(PAGES[page].read_text(encoding="utf-8"), page)
    assert "<!-- generated" not in text
    assert all(len(BLOCKS[name](argument).text) > 40 for name, argument in marks_of(PAGES[page]))


def test_an_unknown_block_is_named() -> None:
    with pytest.raises(ValueError, match=r"docs/a\.md asks for the generated block 'nothing'; known are: .*commands"):
        filled("text\n\n<!-- generated: nothing -->\n", "docs/a.md")


def test_every_option_of_a_run_has_one_entry() -> None:
    named = [name for terms in TERM.findall(BLOCKS["run-options"]("").text) for name in re.findall(r"`(\w+)`", terms)]
    assert named == [option.name for option in RUN_OPTIONS]


def test_every_verb_has_one_section_and_one_line() -> None:
    sections = re.findall(r"^## lm-edit (\S+)$", BLOCKS["commands"]("").text, flags=re.MULTILINE)
    listed = re.findall(r"^- \[`([\w-]+)`\]", BLOCKS["verbs"]("").text, flags=re.MULTILINE)
    assert sections == list(VERBS) and sorted(listed) == sorted(VERBS)


@pytest.mark.parametrize(("tier", "names"), [("core", CORE), ("more", MORE)])
def test_every_editor_has_one_row(tier: str, names: dict[str, str]) -> None:
    assert re.findall(r"^\| `(\w+)` \|", BLOCKS["editors"](tier).text, flags=re.MULTILINE) == list(names)
