"""Texts of QAEdit that differ in case and outer marks alone."""

from __future__ import annotations

# White space, marks, quotes and emphasis around a text: curly quotes, guillemets and full-width marks by their number.
MARKS = " \t.,:;?!\"'`*_()[]\u201c\u201d\u2018\u2019\u00ab\u00bb\uff1f\uff01\u3002"


def same_text(text: str) -> str:
    """A key that is equal for texts that differ in case, white space and outer punctuation alone."""
    return " ".join(text.casefold().split()).strip(MARKS)
