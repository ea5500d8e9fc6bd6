"""Unrelated texts (question and answer) on which a side memory should act like the original: ours, or a user's file.

The released runs of WISE read the locality questions of a benchmark's training part, most of them MEND's file of zsRE.
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Mapping
from pathlib import Path

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.files import require_file
from edit_hooks.utils.json_io import read_rows
from edit_hooks.utils.logs import get_logger

log = get_logger(__name__)

# Texts written for this package.
UNRELATED_TEXTS = (
    "how many legs does a spider have eight",
    "what do bees make from nectar honey",
    "which metal is liquid at room temperature mercury",
    "what is the opposite of north south",
    "how many minutes are in an hour sixty",
    "what is frozen water called ice",
    "which season comes after winter spring",
    "what do you call a baby cat a kitten",
    "how many sides does a triangle have three",
    "what gas do plants take in carbon dioxide",
    "which organ pumps blood the heart",
    "what is the color of an emerald green",
)

# Fields of question and answer: MEND's zsRE, and EasyEdit's other benchmarks.
FIELDS = (("loc", "loc_ans"), ("locality_prompt", "locality_ground_truth"))


def draw_texts(path: str | os.PathLike[str], count: int, seed: int) -> list[str]:
    """Draw unrelated texts, question and answer joined by a space, from a benchmark's file of records.

    The same file, count and seed give the same texts. A file with fewer gives all it has.

    Raises:
        EditingError: for a file that is missing, malformed or without such questions.
    """
    file = require_file(path, "file of 'loc_prompts'")
    texts = _read_texts(file, file.stat().st_mtime_ns)
    return list(texts) if len(texts) <= count else random.Random(seed).sample(texts, count)


@functools.lru_cache(maxsize=4)
def _read_texts(file: Path, _modified_ns: int) -> tuple[str, ...]:
    """The texts of a file in its order, cached until its modification time changes."""
    rows = read_rows(file, "file of 'loc_prompts'")
    texts = [text for text in (_text_of(record) for _, record in rows) if text is not None]
    spelled = " or ".join(f"{question!r} and {answer!r}" for question, answer in FIELDS)
    if not texts:
        raise EditingError(
            f"{file} holds {len(rows)} records and no locality question in them; a record needs the texts {spelled}, "
            "as in MEND's zsre_mend_train.json. Or give 'loc_prompts' as a list of texts."
        )
    if len(texts) < len(rows):
        log.warning(
            "%s: %d of %d records have no %s and are left out.", file, len(rows) - len(texts), len(rows), spelled
        )
    return tuple(texts)


def _text_of(record: object) -> str | None:
    """Question and answer of a record; ``None`` without two texts that a tokenizer can encode."""
    if not isinstance(record, Mapping):
        return None
    for fields in FIELDS:
        parts = [record.get(field) for field in fields]
        if all(isinstance(part, str) and part.strip() for part in parts):
            text = " ".join(str(part).strip() for part in parts)
            return text if _is_encodable(text) else None
    return None


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True
