"""Records of KnowGIC from a knowledge graph: chains by search from the edited subject to its original object.

As in ThinkEdit (arXiv:2506.01386, section 5.3): facts are the edges of a directed graph with at most one edge between
two entities, and a chain is a path without repeated entities of at most five steps. Its extraction of facts from a
model's reasoning, corrected by annotators, is not part of this: the facts are given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from edit_hooks.utils.errors import EditingError, unknown_keys_error
from edit_hooks.utils.storage.json_io import read_json
from edit_hooks.utils.text.slots import fill_slots, split_slots
from judges.match import has_answer
from lm_edit.builders.facts import Fact, entry_names, read_facts
from lm_eval_tasks.common.records.fields import Fields
from lm_eval_tasks.knowgic.benchmark import relation_words

MAX_STEPS = 5
CONTEXTS = ("entities", "chains", "graph")  # of build_record
KEYS = ("relations", "facts", "edits", "aliases", "wordings", "provenance")
RELATION_KEYS, WORDING_KEYS = ("prompt", "question"), ("fact", "prompt", "question")


class Relation(NamedTuple):
    """Wording of a relation: a statement that the object completes, and a question; ``{}`` is the subject."""

    prompt: str
    question: str


class Edit(NamedTuple):
    """A fact and its wanted new object."""

    fact: Fact
    target_new: str


class GraphOrigin(NamedTuple):
    """Where the facts of a joined graph come from.

    Attributes:
        graphs: an entry for each of the joined graphs, for people.
        holders: fact -> names of the graphs that have it.
    """

    graphs: Sequence[Mapping[str, Any]]
    holders: Mapping[Fact, Sequence[str]]

    def describe(self, facts: Iterable[Fact]) -> dict[str, Any]:
        """``provenance`` of some of the facts."""
        named = [{"fact": list(fact), "graphs": list(self.holders[fact])} for fact in facts]
        return {"graphs": [dict(graph) for graph in self.graphs], "facts": named}


@dataclass(frozen=True)
class KnowledgeGraph:
    """Facts with their wordings, and the edits to make.

    Attributes:
        relations: by name.
        facts: in the order of the file.
        edits: each of one of the facts.
        aliases: entity -> other names.
        wordings: of facts that have another one than their relation.
        origin: of the facts of several graphs.
    """

    relations: Mapping[str, Relation]
    facts: Sequence[Fact]
    edits: Sequence[Edit]
    aliases: Mapping[str, Sequence[str]]
    wordings: Mapping[Fact, Relation] = field(default_factory=dict)
    origin: GraphOrigin | None = None

    def wording(self, fact: Fact) -> Relation:
        """Statement and question of a fact."""
        return self.wordings.get(fact, self.relations[fact.relation])

    def question(self, fact: Fact) -> str:
        """The question about a fact."""
        return fill_slots(self.wording(fact).question, fact.subject)

    def names(self, entity: str) -> tuple[str, ...]:
        """An entity and its other names."""
        return (entity, *self.aliases.get(entity, ()))

    def given_away(self) -> list[Fact]:
        """The facts whose question has the answer; the paper has none (section 5.1.1), the released files nine."""
        return [fact for fact in self.facts if has_answer(self.question(fact), self.names(fact.object))]

    def to_json(self) -> dict[str, Any]:
        """The content of a file of the graph."""
        wordings = [{"fact": list(fact), **wording._asdict()} for fact, wording in self.wordings.items()]
        return {
            "relations": {name: relation._asdict() for name, relation in self.relations.items()},
            "facts": [list(fact) for fact in self.facts],
            "edits": [[*edit.fact[:2], edit.target_new] for edit in self.edits],
            "aliases": {entity: list(names) for entity, names in self.aliases.items()},
            **({"wordings": wordings} if wordings else {}),
        }


def read_graph(path: str | Path) -> KnowledgeGraph:
    """Read a graph from JSON: ``relations`` (name -> prompt, question), ``facts``, ``edits``.

    Facts are lists of subject, relation and object, edits lists of subject, relation and new object. Optional:
    ``aliases`` (entity -> other names), ``wordings``, objects with ``fact``, ``prompt`` and ``question``, for facts
    with another wording than their relation, and ``provenance``, for people.

    Raises:
        EditingError: for unreadable JSON, and as :func:`parse_graph`.
    """
    return parse_graph(read_json(path, "knowledge graph"), str(path))


def parse_graph(record: object, where: str) -> KnowledgeGraph:
    """Check and convert the content of a file of a graph.

    Raises:
        EditingError: for another layout, unknown keys and relations, a name in two cases, two facts between the same
            entities, and an edit or a wording of a fact that the graph lacks, an edit of one of several objects, to
            the same object, or that stands there twice.
    """
    if not isinstance(record, Mapping):
        raise EditingError(f"{where} is no object; one with relations, facts and edits is needed.")
    fields = Fields(record, where)
    _check_keys(where, record, KEYS)
    relations = read_relations(fields)
    facts = list(read_facts(fields, "facts", relations))
    by_entities: dict[tuple[str, str], Fact] = {}
    for fact in facts:
        other = by_entities.setdefault((fact.subject, fact.object), fact)
        if other is not fact:
            raise fields.error("facts", f"links {fact.subject!r} to {fact.object!r} by two facts; keep one")
    aliases = read_entity_names(fields)
    edits = [_edit(fields, facts, triple, aliases) for triple in read_facts(fields, "edits", relations)]
    _check_names(fields, facts, edits)
    if repeated := next((edit for number, edit in enumerate(edits) if edit in edits[:number]), None):
        raise fields.error("edits", f"changes {' | '.join(repeated.fact)} to {repeated.target_new!r} twice; keep one")
    wordings = dict(_fact_wordings(fields, facts))
    return KnowledgeGraph(relations, facts, edits, aliases, wordings)


def _check_keys(where: str, record: Mapping[str, Any], known: Sequence[str]) -> None:
    if unknown := set(record) - set(known):
        raise unknown_keys_error(f"key in {where}:", map(str, unknown), known)


def _check_names(fields: Fields, facts: Sequence[Fact], edits: Sequence[Edit]) -> None:
    """Refuse one name in two cases: the tasks take them for one entity, and the search for chains for two."""
    first: dict[str, str] = {}
    places = [("facts", name) for fact in facts for name in (fact.subject, fact.object)]
    for place, name in [*places, *(("edits", edit.target_new) for edit in edits)]:
        if (other := first.setdefault(name.casefold(), name)) != name:
            raise fields.error(place, f"has {name!r} and {other!r}, one name in two cases; write one of them")


def read_relations(fields: Fields) -> dict[str, Relation]:
    """The object ``relations`` (name -> prompt, question) of a file.

    Raises:
        EditingError: for another layout, and for a wording without one ``{}`` and words around it.
    """
    return {name: _relation(fields, name) for name in entry_names(fields, "relations")}


def read_entity_names(fields: Fields) -> dict[str, list[str]]:
    """The object ``aliases`` (entity -> other names) of a file; empty if it is absent.

    Raises:
        EditingError: for another layout.
    """
    entries = fields.optional("aliases") or {}
    if not isinstance(entries, Mapping):
        raise fields.error("aliases", "must be an object: entity -> list of other names")
    # The names may hold dots, which would be steps of a path.
    return {
        name: Fields({"aliases": names}, f"{fields.where}, {name!r}").texts("aliases")
        for name, names in entries.items()
    }


def _relation(fields: Fields, name: str) -> Relation:
    # The name may hold dots, which would be steps of a path.
    content = fields.record["relations"][name]
    entry = Fields({"relations": content}, f"{fields.where}, {name!r}")
    if isinstance(content, Mapping):
        _check_keys(f"{fields.where}, relation {name!r}", content, RELATION_KEYS)
    relation = Relation(entry.text("relations.prompt"), entry.text("relations.question"))
    _check_relation(fields, f"relations.{name}", relation)
    return relation


def _check_relation(fields: Fields, place: str, relation: Relation) -> None:
    for key, text in relation._asdict().items():
        if len(split_slots(text)) != 2:
            raise fields.error(f"{place}.{key}", f"is {text!r}; one {{}} for the subject is needed")
        if not relation_words(text):
            raise fields.error(f"{place}.{key}", f"is {text!r}; words around {{}} are needed")


def _fact_wordings(fields: Fields, facts: Sequence[Fact]) -> Iterator[tuple[Fact, Relation]]:
    """The wordings of single facts."""
    for number, entry in enumerate(fields.objects("wordings") if fields.record.get("wordings") else ()):
        _check_keys(f"{fields.where}, wordings[{number}]", entry.record, WORDING_KEYS)
        fact, wording = (
            tuple(entry.texts("fact", required=True)),
            Relation(entry.text("prompt"), entry.text("question")),
        )
        found = next((one for one in facts if one == fact), None)
        if found is None:
            raise fields.error(f"wordings[{number}]", f"is about {list(fact)!r}, which is not a fact of the graph")
        _check_relation(fields, f"wordings[{number}]", wording)
        yield found, wording


def _edit(fields: Fields, facts: Sequence[Fact], triple: Fact, aliases: Mapping[str, Sequence[str]]) -> Edit:
    subject, relation, new = triple
    edited = [fact for fact in facts if fact[:2] == (subject, relation)]
    if len(edited) != 1 or edited[0].object == new:
        raise fields.error(
            "edits",
            f"changes {subject!r}, {relation!r} to {new!r}, of which the graph has {len(edited)} facts with another "
            "object; one is needed",
        )
    true = edited[0].object
    if new.casefold() in {name.casefold() for name in (true, *aliases.get(true, ()))}:
        raise fields.error("edits", f"changes {true!r} to {new!r}, another name of it; another object is needed")
    return Edit(edited[0], new)


def find_chains(facts: Sequence[Fact], edit: Edit, max_steps: int = MAX_STEPS) -> list[list[Fact]]:
    """All paths of at most ``max_steps`` facts from the edited subject to its original object, the shortest first."""
    by_subject: dict[str, list[Fact]] = {}
    for fact in facts:
        by_subject.setdefault(fact.subject, []).append(fact)

    def extend(path: list[Fact], seen: set[str]) -> Iterator[list[Fact]]:
        for fact in by_subject.get(path[-1].object if path else edit.fact.subject, []):
            if fact.object == edit.fact.object:
                yield [*path, fact]
            elif fact.object not in seen and len(path) + 1 < max_steps:
                yield from extend([*path, fact], seen | {fact.object})

    return sorted(extend([], {edit.fact.subject}), key=len)


def build_record(
    graph: KnowledgeGraph, edit: Edit, case_id: int, max_steps: int = MAX_STEPS, context: str = "entities"
) -> dict[str, Any]:
    """The record of an edit, in the layout of one row for every edit.

    It has ``provenance``, the origin of its facts, if the graph is a joined one.

    The broader context never has facts about the edited subject. Definition 4 of the paper covers all other facts of
    the graph. In the released files it has the facts of the edit's chains only, so that no fact is about an entity
    that leads nowhere; whether the graphs behind them had further ones is not known.

    Args:
        context: facts of the broader context, one of :data:`CONTEXTS`: those whose subject is an entity of a chain,
            those of the chains, or all of the graph.
    """
    chains = find_chains(graph.facts, edit, max_steps)
    steps = {fact for chain in chains for fact in chain}
    entities = {fact.subject for fact in steps}
    around = [
        fact
        for fact in graph.facts
        if fact.subject != edit.fact.subject
        and (context == "graph" or (fact in steps if context == "chains" else fact.subject in entities))
    ]
    record: dict[str, Any] = {
        "case_id": case_id,
        "requested_rewrite": [
            {
                "prompt": graph.wording(edit.fact).prompt,
                "target_new": {"str": edit.target_new},
                "target_true": {"str": edit.fact.object},
                "subject": edit.fact.subject,
            }
        ],
        "chains": [_lists(graph, chain) for chain in chains],
        "broader_context": _lists(graph, around),
    }
    if graph.origin is not None:
        used = dict.fromkeys([*(fact for chain in chains for fact in chain), *around])
        record["provenance"] = graph.origin.describe(used)
    return record


def _lists(graph: KnowledgeGraph, facts: Sequence[Fact]) -> dict[str, list[str]]:
    wordings = [graph.wording(fact) for fact in facts]
    return {
        "questions": [
            fill_slots(wording.question, fact.subject) for wording, fact in zip(wordings, facts, strict=True)
        ],
        "answers": [fact.object for fact in facts],
        "prompts": [wording.prompt for wording in wordings],
        "subjects": [fact.subject for fact in facts],
    }
