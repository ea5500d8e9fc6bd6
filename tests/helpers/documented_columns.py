"""Columns in the text of a page: by their name, or by a pattern as `ifr_1_*`."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase


def is_documented(column: str, page: str) -> bool:
    """Whether the page has the column, or a pattern of it that begins with three characters or more, in backticks."""
    listed = set(re.findall(r"`([^`\s]+)`", page))
    return column in listed or any(fnmatchcase(column, entry) for entry in listed if "*" in entry[3:])
