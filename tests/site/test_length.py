"""A page of the site is read in one sitting. Generated text and the reference do not count."""

from __future__ import annotations

import pytest
from paths import ROOT

MAX_WORDS = 1500
DOCS = ROOT / "docs"
READ = sorted(
    str(path.relative_to(ROOT))
    for path in [*DOCS.rglob("*.md"), ROOT / "CONTRIBUTING.md"]
    if not {"reference", "templates"} & set(path.parts)
)


@pytest.mark.parametrize("page", READ)
def test_a_page_is_short(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    words = [word for word in text.split() if word.strip("|-:")]
    assert len(words) <= MAX_WORDS, f"{len(words)} words; move a topic to a page of its own"
