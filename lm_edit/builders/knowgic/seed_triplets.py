"""Seed triplets for a knowledge graph, drawn from MQuAKE's edits (ThinkEdit, arXiv:2506.01386, section 6.1).

The paper takes ten question templates of MQuAKE and generates two samples for each. A sample is an edit of MQuAKE: the
subject, the original object and the new one, with the question and the statement of its relation. The paper prints the
templates (table 8), not how it drew the samples; the draw is ours.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from edit_hooks.utils.errors import EditingError, near_misses
from judges.match import alias_match, any_exact_match, has_answer, is_short
from lm_edit.builders.facts import Fact
from lm_edit.builders.knowgic.graph import Edit, Relation
from lm_edit.builders.replies import is_usable, template_of
from lm_eval_tasks.knowgic.benchmark import relation_words

if TYPE_CHECKING:
    from edit_hooks.request import EditRequest
    from lm_eval_tasks.mquake.case import MultiHopCase

# The relations whose questions are the ten templates of ThinkEdit's table 8, by Wikidata id.
THINKEDIT_RELATIONS = ("P27", "P40", "P170", "P26", "P641", "P495", "P178", "P937", "P108", "P176")

NO_QUESTION = "no fact of the record's chains has the prompt of the edit, so it has no question"
NO_TEMPLATE = "question or statement does not have the subject exactly once, and words beside it"
UNUSABLE = "a name is too long or has brackets"
HAS_OBJECT = "the object occurs in the subject"
GIVEN_AWAY = "the object occurs in the question"
SAME_OBJECT = "the new object is another name of the original one"
REPEATED = "an earlier edit has its subject and relation"
OTHER_WORDING = "most edits of the relation have another wording"
SECOND_LINK = "another drawn triplet links the two entities"


class SeedCandidate(NamedTuple):
    """An edit that can be a seed.

    Attributes:
        wording: statement and question of the relation, with ``{}`` for the subject.
        aliases: other names of the original object, without short ones.
        source_id: id of the record.
    """

    edit: Edit
    wording: Relation
    aliases: Sequence[str]
    source_id: str


@dataclass
class SeedDraw:
    """The seeds, and what became of the other edits.

    Attributes:
        candidates: the drawn ones, by relation.
        relations: name -> wording.
        available: name of a wanted relation -> number of edits that could be drawn.
        left_out: reason -> number of edits of the wanted relations.
        absent: wanted relations of the paper of which the records have no edit.
    """

    candidates: list[SeedCandidate] = field(default_factory=list)
    relations: dict[str, Relation] = field(default_factory=dict)
    available: dict[str, int] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    absent: list[str] = field(default_factory=list)

    def content(self) -> dict[str, Any]:
        """The file of seeds, without provenance."""
        aliases: dict[str, list[str]] = {}
        for one in self.candidates:
            names = aliases.setdefault(one.edit.fact.object, [])
            names += [name for name in one.aliases if name not in names]
        return {
            "seeds": [[*one.edit.fact, one.edit.target_new] for one in self.candidates],
            "relations": {name: wording._asdict() for name, wording in self.relations.items()},
            "aliases": {entity: names for entity, names in aliases.items() if names},
        }


def draw_seeds(
    cases: Sequence[MultiHopCase], per_relation: int, wanted: Sequence[str] | None = None, seed: int = 0
) -> SeedDraw:
    """Draw edits of every wanted relation; a triplet's place in the draw depends on nothing but itself and the seed.

    Args:
        per_relation: edits of each; all of a relation that has fewer.
        wanted: relations by id or label; by default those of the paper that the records have.

    Raises:
        EditingError: a chosen relation has no edit; by default, if no relation has one.
    """
    labels = _labels(cases)
    drawn = SeedDraw()
    ids = list(dict.fromkeys(_relation_id(name, labels) for name in wanted or ())) or [
        identity for identity in THINKEDIT_RELATIONS if identity in labels
    ]
    if not ids:
        raise EditingError(
            f"the records have no edit of the relations {', '.join(THINKEDIT_RELATIONS)}; name others with "
            f"--relations: {_listed(labels)}."
        )
    drawn.absent = [] if wanted else [identity for identity in THINKEDIT_RELATIONS if identity not in labels]
    found = _candidates(cases, labels, set(ids), drawn.left_out)
    links: set[tuple[str, str]] = set()
    for identity in ids:
        name = labels[identity]
        of_relation = [one for one in found if one.edit.fact.relation == name]
        wording = _most_frequent(of_relation)
        worded = [one for one in of_relation if one.wording == wording]
        drawn.left_out[OTHER_WORDING] += len(of_relation) - len(worded)
        drawn.available[name] = len(worded)
        taken = 0
        for one in sorted(worded, key=lambda one: _place(one.edit.fact, seed)):
            ends = (one.edit.fact.subject, one.edit.fact.object)
            if taken == per_relation:
                break
            if ends in links:
                drawn.left_out[SECOND_LINK] += 1
                continue
            links.add(ends)
            drawn.candidates.append(one)
            taken += 1
        if wording is not None and taken:
            drawn.relations[name] = wording
    drawn.left_out += Counter()  # drops the zeros
    return drawn


def _labels(cases: Sequence[MultiHopCase]) -> dict[str, str]:
    """Relations of the edits: id -> label, or the id itself without a label of its own."""
    edited = {str(request.relation_id) for case in cases for request in case.requests if request.relation_id}
    labels = dict.fromkeys(sorted(edited), "")
    for case in cases:
        for hop in (*case.hops, *case.old_hops):
            if hop.relation and not labels.get(hop.relation_id, hop.relation):
                labels[hop.relation_id] = hop.relation
    names = Counter(labels.values())
    return {identity: label if names[label] == 1 and label else identity for identity, label in labels.items()}


def _relation_id(name: str, labels: Mapping[str, str]) -> str:
    if name in labels:
        return name
    for identity, label in labels.items():
        if label == name:
            return identity
    known = dict.fromkeys([*labels, *labels.values()])
    raise EditingError(f"no edit has the relation {name!r}.{near_misses(name, known)} There are {_listed(labels)}.")


def _listed(labels: Mapping[str, str]) -> str:
    return ", ".join(identity if label == identity else f"{identity} ({label})" for identity, label in labels.items())


def _candidates(
    cases: Sequence[MultiHopCase], labels: Mapping[str, str], wanted: set[str], left_out: Counter[str]
) -> list[SeedCandidate]:
    """The edits of the wanted relations that can be seeds; the others are counted by reason."""
    hops = [hop for case in cases for hop in (*case.old_hops, *case.hops)]
    questions = {hop.cloze: hop.question for hop in reversed(hops)}
    # The original object of a second edit is in no chain of its own record.
    names = {(hop.cloze, hop.answers[0]): hop.answers for hop in reversed(hops)}
    found: dict[tuple[str, str], SeedCandidate] = {}
    for case in cases:
        for request in case.requests:
            if request.relation_id not in wanted:
                continue
            outcome = _candidate(request, labels[request.relation_id], questions, names, str(case.extras["source_id"]))
            if isinstance(outcome, str):
                left_out[outcome] += 1
            elif found.setdefault(outcome.edit.fact[:2], outcome) is not outcome:
                left_out[REPEATED] += 1
    return list(found.values())


def _candidate(
    request: EditRequest,
    relation: str,
    questions: Mapping[str, str],
    names: Mapping[tuple[str, str], Sequence[str]],
    source_id: str,
) -> SeedCandidate | str:
    """The edit as a seed, or the reason why it cannot be one."""
    fact = Fact(str(request.subject), relation, str(request.target_true))
    if (question := questions.get(request.bare_text)) is None:
        return NO_QUESTION
    template = template_of(question, fact.subject)
    if template is None or request.prompt.count("{}") != 1 or not relation_words(request.prompt):
        return NO_TEMPLATE
    if not all(map(is_usable, (*fact, request.target_new))):
        return UNUSABLE
    # Short other names are left out: codes of countries are also common words ("IN", "CAN"), which many a response has.
    others = names.get((request.bare_text, fact.object), [fact.object])[1:]
    accepted = [fact.object, *(name for name in others if not is_short(name))]
    if alias_match(fact.subject, accepted):
        return HAS_OBJECT
    if has_answer(question, accepted):
        return GIVEN_AWAY
    if any_exact_match(request.target_new, accepted):
        return SAME_OBJECT
    return SeedCandidate(Edit(fact, request.target_new), Relation(request.prompt, template), accepted[1:], source_id)


def _most_frequent(candidates: Sequence[SeedCandidate]) -> Relation | None:
    """The wording of most edits; of several, the first one."""
    counts = Counter(one.wording for one in candidates)
    return counts.most_common(1)[0][0] if counts else None


def _place(fact: Fact, seed: int) -> str:
    return hashlib.sha256(json.dumps([seed, fact]).encode()).hexdigest()
