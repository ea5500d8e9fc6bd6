"""Templates: the slot ``{}`` for a name, and literal braces.

Of ``n`` opening braces with as many closing ones right after them, one pair is dropped: ``{{}}`` is the text ``{}``,
and ``{{{}}}`` is ``{{}}``. A single pair is a slot. All other braces are plain text, as in ``{"a": 1}``.
"""

from __future__ import annotations

import re

from edit_hooks.utils.errors import EditingError

SLOT = "{}"
ESCAPE_HINT = "literal braces are written {{}}"
_BRACES = re.compile(r"(\{+)(\}+)")


def split_slots(template: str) -> list[str]:
    """Split a template at its slots, and undo the escapes of literal braces."""
    parts, end = [""], 0
    for match in _BRACES.finditer(template):
        depth, middle = min(len(match[1]), len(match[2])), match.start(2)
        parts[-1] += template[end : middle - depth]
        if depth == 1:
            parts.append("")
        else:
            parts[-1] += "{" * (depth - 1) + "}" * (depth - 1)
        end = middle + depth
    parts[-1] += template[end:]
    return parts


def escape_braces(text: str) -> str:
    """A text as a template without a slot; the inverse of :func:`split_slots`."""
    return _BRACES.sub(lambda match: match[1] + SLOT + match[2], text)


def fill_slots(template: str, name: str) -> str:
    """A template with a name in its slots."""
    return name.join(split_slots(template))


def split_template(template: str) -> tuple[str, str]:
    """Split a context template into the text before and after its slot.

    Raises:
        EditingError: unless there is exactly one ``{}``.
    """
    parts = split_slots(template)
    if len(parts) != 2:
        raise EditingError(
            f"context template {template!r} has {len(parts) - 1} slots; exactly one {{}} is needed ({ESCAPE_HINT})."
        )
    return parts[0], parts[1]
