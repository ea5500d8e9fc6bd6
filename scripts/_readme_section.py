"""Sections of READMEs that scripts render, between two comments."""

from __future__ import annotations


def replace_section(text: str, name: str, section: str) -> str:
    """The text with the section between ``<!-- name: begin -->`` and ``<!-- name: end -->`` replaced."""
    begin, end = (f"<!-- {name}: {edge} -->" for edge in ("begin", "end"))
    before, has_begin, rest = text.partition(begin)
    _, has_end, after = rest.partition(end)
    if not has_begin or not has_end:
        raise SystemExit(f"no {begin} ... {end}")
    return f"{before}{begin}\n{section}\n{end}{after}"
