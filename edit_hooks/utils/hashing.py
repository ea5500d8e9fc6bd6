"""TODO: say what is here."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path


@functools.cache
def code_fingerprint() -> str:
    """SHA-256 (hex) over the source of this package: an edit made by other code is another edit."""
    digest = hashlib.sha256()
    folder = Path(__file__).parents[1]
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def key_of(content: object) -> str:
    """SHA-256 (hex) of a JSON-able content; the same content gives the same key."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
