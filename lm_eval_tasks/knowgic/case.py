"""A case of KnowGIC: an edit, the chains from its subject to its original object, and facts around them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lm_eval_tasks.common.records.cases import Case


class Hop(NamedTuple):
    """One step of a chain, or one fact of the broader context.

    Attributes:
        question: it asks for the answer.
        answer: the object of the fact.
        statement: the fact without its object, which would continue it.
        subject: the subject of the fact.
        relation: the words between subject and object.
    """

    question: str
    answer: str
    statement: str
    subject: str
    relation: str


Chain = tuple[Hop, ...]


@dataclass(frozen=True, kw_only=True)
class ChainCase(Case):
    """An edit, the chains from its subject to its original object, and facts around them.

    Attributes:
        chains: each starts at the edited subject, and its last answer is the original object.
        context: facts whose subject is not the edited one, as often as the file lists them.
    """

    chains: Sequence[Chain]
    context: Sequence[Hop]


def distinct(hops: Iterator[Hop] | Sequence[Hop]) -> list[Hop]:
    """The facts without repetitions: one for each pair of question and answer."""
    return list({(hop.question, hop.answer): hop for hop in hops}.values())
