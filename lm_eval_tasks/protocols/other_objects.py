"""Objects of other records: answers of the right type that are wrong for a case."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edit_hooks.request import EditRequest
from judges.squad import squad_normalize
from lm_eval_tasks.common.records.cases import Case

SEED = 0

# Sources of other objects from the narrowest to the widest; each case uses the first that has enough of them.
RELATION, TEMPLATE, FIRST_WORD, DIGITS, ALL_RECORDS = "relation", "template", "first word", "digits", "all records"


@dataclass(frozen=True)
class OtherObjects:
    """Objects of other records, drawn for one case.

    Attributes:
        objects: as many as required, or none if the data have fewer; they differ from each other and from the case's
            own objects after normalization.
        source: the records they come from: those of the same relation, with the same prompt apart from the subject; in
            questions, those with the same first word and, as the new object, with digits or without, or only the
            latter; or all.
    """

    objects: tuple[str, ...] = ()
    source: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The draw for a document."""
        return {"objects": list(self.objects), "drawn_from": self.source, "seed": SEED}


def draw_other_objects(
    cases: Sequence[Case], count: int, *, questions: bool = False, seed: int = SEED
) -> list[OtherObjects]:
    """Draw objects of other records for every case.

    The draw depends on the seed, the case's edit and the objects of its source, not on other draws.

    Args:
        count: objects per case.
        questions: the prompts are questions, whose first word (who, when) indicates the type of the answer, and so do
            digits in it.
    """
    pools: dict[tuple[str, str], dict[str, str]] = {}  # source -> normalized object -> its first spelling
    for case in cases:
        for own in _own_objects(case.request):
            for key in _sources(case.request, own, questions):
                pools.setdefault(key, {}).setdefault(_normal(own), own)
    names = {key: sorted(pool) for key, pool in pools.items()}
    drawn = []
    for case in cases:
        own_names = {_normal(text) for text in _own_objects(case.request)}
        sources = _sources(case.request, case.request.target_new, questions)
        source = next((key for key in sources if len(pools[key]) - len(own_names & pools[key].keys()) >= count), None)
        if source is None:
            drawn.append(OtherObjects())
            continue
        chosen = _choose(names[source], own_names, count, f"{seed} {case.request.key}")
        drawn.append(OtherObjects(tuple(pools[source][name] for name in chosen), source[0]))
    return drawn


def _choose(names: Sequence[str], excluded: set[str], count: int, seed: str) -> list[str]:
    """``count`` names without the excluded ones; SHA-256 draws, so that no version of Python changes them."""
    chosen: list[str] = []
    for number in itertools.count():
        if len(chosen) == count:
            break
        digest = hashlib.sha256(f"{seed} {number}".encode()).hexdigest()
        name = names[int(digest, 16) % len(names)]
        if name not in excluded and name not in chosen:
            chosen.append(name)
    return chosen


def _sources(request: EditRequest, text: str, questions: bool) -> list[tuple[str, str]]:
    """Keys of the pools in which an object of a request is, the narrowest first."""
    keys = []
    if request.relation_id is not None:
        keys.append((RELATION, request.relation_id))
    if request.subject_span is not None:
        start, end = request.subject_span
        keys.append((TEMPLATE, f"{request.text[:start]}{{}}{request.text[end:]}"))
    if questions:
        digits = str(any(letter.isdigit() for letter in text))
        keys += [(FIRST_WORD, f"{squad_normalize(request.text).partition(' ')[0]} {digits}"), (DIGITS, digits)]
    return [*keys, (ALL_RECORDS, "")]


def _own_objects(request: EditRequest) -> list[str]:
    return [text for text in (request.target_new, request.target_true) if text is not None]


def _normal(text: str) -> str:
    """The form in which objects are compared; signs alone have no normalized form. Other rules move the draws."""
    return squad_normalize(text) or text
