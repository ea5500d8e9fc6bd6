"""A chain of facts, some of which a case edits, and the multi-hop question about its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lm_eval_tasks.common.records.cases import Case


@dataclass(frozen=True, kw_only=True)
class ChainFact:
    """One fact of a chain.

    Attributes:
        question, cloze: the fact as a question and as a beginning of a sentence.
        answers: its object, then aliases.
        relation_id: Wikidata id of the relation; empty if the record has none.
        relation: its label, such as "country of citizenship"; empty if the record has none.
        edited: one of the case's edits has this cloze prompt.
    """

    question: str
    cloze: str
    answers: Sequence[str]
    relation_id: str
    edited: bool
    relation: str = ""


@dataclass(frozen=True, kw_only=True)
class MultiHopCase(Case):
    """Edits and a multi-hop question whose answer follows from them.

    Attributes:
        wordings: the question in several wordings.
        answers: its answer after the edits, then aliases.
        old_answers: its answer before the edits, then aliases and, in MQuAKE-T, further accepted answers.
        hops, old_hops: the chain of facts after and before the edits.
    """

    wordings: Sequence[str]
    answers: Sequence[str]
    old_answers: Sequence[str]
    hops: Sequence[ChainFact]
    old_hops: Sequence[ChainFact]
