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
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.storage.files import require_file
from edit_hooks.utils.storage.json_io import read_rows

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
    by_record = [_texts_of(record) for _, record in rows]
    texts = [text for of_record in by_record for text in of_record]
    spelled = " or ".join(f"{question!r} and {answer!r}" for question, answer in FIELDS)
    if not texts:
        raise EditingError(
            f"{file} holds {len(rows)} records and no locality question in them; a record needs the texts {spelled}, "
            "as in MEND's zsre_mend_train.json. Or give 'loc_prompts' as a list of texts."
        )
    if without := by_record.count([]):
        log.warning("%s: %d of %d records have no %s and are left out.", file, without, len(rows), spelled)
    return tuple(texts)


def _texts_of(record: object) -> list[str]:
    """Questions of a record, each with its answer; none without two texts, or two equal lists of them."""
    if not isinstance(record, Mapping):
        return []
    for names in FIELDS:
        questions, answers = (value if isinstance(value := record.get(name), list) else [value] for name in names)
        pairs = list(zip(questions, answers, strict=False)) if len(questions) == len(answers) else []
        if pairs and all(isinstance(text, str) and text.strip() for pair in pairs for text in pair):
            return [text for pair in pairs if _is_encodable(text := " ".join(part.strip() for part in pair))]
    return []


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True
