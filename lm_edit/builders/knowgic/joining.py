"""One knowledge graph of several, such as those grown from the same seeds by asking two models.

ThinkEdit's data (arXiv:2506.01386, section 6) has facts of two models; how these were joined is not stated. Here the
joined graph has the facts and edits of all graphs, and where they disagree, the order of the graphs decides:

- An entity or a relation has the name of the first graph that has it. Names of two graphs are the same if they are
  equal as the scores compare them, or if one is another name (alias) of the other; two names of one graph never become
  one.
- A fact that no graph may have beside another is left out, as the growth of a graph discards it: a second link from one
  entity to another, and a second object of an edited relation. Edited facts stay, then those of earlier graphs.
- A fact has the wording of the first graph that has it, with which it was validated there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.files import sha256_of, user_path
from edit_hooks.utils.storage.json_io import read_json
from judges.match import is_short, normalize
from lm_edit.builders.facts import Fact
from lm_edit.builders.knowgic.graph import Edit, GraphOrigin, KnowledgeGraph, Relation, parse_graph
from lm_edit.builders.knowgic.growth import SECOND_LINK, SECOND_OBJECT


class GraphFile(NamedTuple):
    """A graph to join.

    Attributes:
        name: of its file; the path where two files have one name.
        sha256: of the file.
        writer: the model whose knowledge it holds, as its provenance has it; ``None`` without any.
    """

    name: str
    sha256: str
    writer: Any
    graph: KnowledgeGraph

    @property
    def title(self) -> str:
        """Name and model, for people."""
        model = self.writer.get("model") if isinstance(self.writer, Mapping) else None
        return f"{self.name} ({model})" if isinstance(model, str) else self.name

    def describe(self) -> dict[str, Any]:
        """Entry of :class:`GraphOrigin`."""
        writer = {} if self.writer is None else {"writer": self.writer}
        return {"name": self.name, "sha256": self.sha256, **writer}


class OmittedFact(NamedTuple):
    """A fact of a graph that the joined one has not, under the names of the joined one, and the reason."""

    graph: str
    fact: Fact
    reason: str


class RenamedEntry(NamedTuple):
    """A name of a graph, and the one that entity or relation has in the joined graph."""

    graph: str
    name: str
    joined_name: str


@dataclass
class JoinedGraph:
    """The joined graph, and what became of the names, wordings and facts of the others.

    Attributes:
        reworded: (graph, relation) where a later graph has another wording of the relation; facts that no earlier
            graph has keep it.
    """

    graph: KnowledgeGraph
    files: Sequence[GraphFile]
    left_out: list[OmittedFact] = field(default_factory=list)
    renamed: list[RenamedEntry] = field(default_factory=list)
    reworded: list[tuple[str, str]] = field(default_factory=list)

    def held_by(self, file: GraphFile) -> list[Fact]:
        """The facts of the joined graph that a graph has."""
        return [fact for fact, names in self.origin.holders.items() if file.name in names]

    @property
    def origin(self) -> GraphOrigin:
        """That of the facts."""
        assert self.graph.origin is not None
        return self.graph.origin

    def content(self) -> dict[str, Any]:
        """The content of a file of the joined graph."""
        provenance = {
            **self.origin.describe(self.graph.facts),
            "left_out": [{**one._asdict(), "fact": list(one.fact)} for one in self.left_out],
            "renamed": [one._asdict() for one in self.renamed],
        }
        return {**self.graph.to_json(), "provenance": provenance}


def read_graphs(paths: Sequence[str]) -> list[GraphFile]:
    """Read graphs with their writers.

    Raises:
        EditingError: as :func:`lm_edit.builders.knowgic.graph.read_graph`, and for a graph that is given twice.
    """
    places = [user_path(path, "knowledge graph") for path in paths]
    names = [place.name for place in places]
    files: list[GraphFile] = []
    for path, place in zip(paths, places, strict=True):
        record = read_json(path, "knowledge graph")
        graph = parse_graph(record, str(path))
        name = place.name if names.count(place.name) == 1 else str(path)
        file = GraphFile(name, sha256_of(place), _writer(record), graph)
        if same := next((one for one in files if one.sha256 == file.sha256), None):
            raise EditingError(f"{path} has the content of {same.name}; give each graph once.")
        files.append(file)
    return files


def _writer(record: Any) -> Any:
    provenance = record.get("provenance")
    return provenance.get("writer") if isinstance(provenance, Mapping) else None


def join_graphs(files: Sequence[GraphFile]) -> JoinedGraph:
    """Join graphs by the rules of this module.

    Raises:
        EditingError: for edits that exclude each other, and for a joined graph that
            :func:`lm_edit.builders.knowgic.graph.parse_graph` refuses.
    """
    entities, names_of_relations = _Names(), _Names()
    parts = [_rename(file.graph, entities, names_of_relations) for file in files]
    edited = _edited_facts(files, parts)
    links = {(fact.subject, fact.object): fact for fact in edited.values()}
    wordings: dict[Fact, Relation] = {}
    relations: dict[str, Relation] = {}
    aliases: dict[str, list[str]] = {}
    holders: dict[Fact, list[str]] = {}
    left_out: list[OmittedFact] = []
    reworded: list[tuple[str, str]] = []
    for file, part in zip(files, parts, strict=True):
        for name, wording in part.relations.items():
            if relations.setdefault(name, wording) != wording:
                reworded.append((file.name, name))
        for entity, names in part.aliases.items():
            others = aliases.setdefault(entity, [])
            others += [name for name in dict.fromkeys(names) if name not in (entity, *others)]
        for fact, wording in part.wordings.items():
            if edited.get(fact[:2], fact) != fact:
                left_out.append(OmittedFact(file.name, fact, SECOND_OBJECT))
            elif links.setdefault((fact.subject, fact.object), fact) != fact:
                left_out.append(OmittedFact(file.name, fact, SECOND_LINK))
            else:
                wordings.setdefault(fact, wording)
                holders.setdefault(fact, []).append(file.name)
    own = {fact: wording for fact, wording in wordings.items() if wording != relations[fact.relation]}
    edits = list(dict.fromkeys(edit for part in parts for edit in part.edits))
    graph = KnowledgeGraph(relations, list(wordings), edits, aliases, own)
    checked = parse_graph(graph.to_json(), " + ".join(file.name for file in files))
    origin = GraphOrigin([file.describe() for file in files], holders)
    renamed = [RenamedEntry(file.name, *pair) for file, part in zip(files, parts, strict=True) for pair in part.renamed]
    return JoinedGraph(replace(checked, origin=origin), files, left_out, renamed, reworded)


class _Part(NamedTuple):
    """A graph under the names of the joined one.

    Attributes:
        wordings: of all facts.
        renamed: (name, other name in the joined graph).
    """

    relations: Mapping[str, Relation]
    wordings: Mapping[Fact, Relation]
    edits: Sequence[Edit]
    aliases: Mapping[str, Sequence[str]]
    renamed: Sequence[tuple[str, str]]


def _rename(graph: KnowledgeGraph, entities: _Names, relations: _Names) -> _Part:
    """A further graph under the names of those before, to which its own are added."""
    ends = [name for fact in graph.facts for name in (fact.subject, fact.object)]
    named = [*ends, *(edit.target_new for edit in graph.edits), *graph.aliases]
    entity = entities.add(list(dict.fromkeys(named)), graph.aliases)
    relation = relations.add(list(graph.relations), {})

    def rename(fact: Fact) -> Fact:
        return Fact(entity[fact.subject], relation[fact.relation], entity[fact.object])

    aliases = {}
    for name, names in graph.aliases.items():
        own = () if _key(name) == _key(entity[name]) else (name,)
        aliases[entity[name]] = [*own, *names]
    return _Part(
        relations={relation[name]: wording for name, wording in graph.relations.items()},
        wordings={rename(fact): graph.wording(fact) for fact in graph.facts},
        edits=[Edit(rename(edit.fact), entity[edit.target_new]) for edit in graph.edits],
        aliases=aliases,
        renamed=[pair for names in (entity, relation) for pair in names.items() if pair[0] != pair[1]],
    )


def _edited_facts(files: Sequence[GraphFile], parts: Sequence[_Part]) -> dict[tuple[str, ...], Fact]:
    """The edited facts by subject and relation.

    Raises:
        EditingError: for two that no graph may have at once.
    """
    by_relation: dict[tuple[str, ...], tuple[Fact, str]] = {}
    by_link: dict[tuple[str, str], tuple[Fact, str]] = {}
    for file, part in zip(files, parts, strict=True):
        for fact, _ in part.edits:
            other, name = by_relation.setdefault(fact[:2], (fact, file.name))
            if other != fact:
                raise EditingError(
                    f"{file.name} edits {' | '.join(fact)}, and {name} {' | '.join(other)}; an edited relation has one "
                    "original object. Correct one of them, or drop its edit."
                )
            other, name = by_link.setdefault((fact.subject, fact.object), (fact, file.name))
            if other != fact:
                raise EditingError(
                    f"{file.name} edits {' | '.join(fact)}, and {name} {' | '.join(other)}; one relation may link two "
                    "entities. Give it one name in all graphs, or drop one of the edits."
                )
    return {place: fact for place, (fact, _) in by_relation.items()}


def _key(name: str) -> str:
    """What equal names have in common, as the scores compare them."""
    return normalize(name) or name


def _key_of_other(name: str) -> str:
    """The same of other names, of which short ones count in their own case only ("IT" is no name of "It")."""
    return normalize(name, keep_case=is_short(name)) or name


class _Names:
    """The names of entities, or of relations, in the joined graph."""

    def __init__(self) -> None:
        # Each holds name -> name in the joined graph: as it is, without case, by _key, by _key_of_other; other names.
        self._exact: dict[str, str] = {}
        self._any_case: dict[str, str] = {}
        self._equal: dict[str, str] = {}
        self._named: dict[str, str] = {}
        self._others: dict[str, str] = {}

    def add(self, names: Sequence[str], aliases: Mapping[str, Sequence[str]]) -> dict[str, str]:
        """Add the names of a further graph; return name -> name in the joined graph, different ones for all.

        The best match comes first: the same name, also in another case, an equal one, another name.
        """
        lookups: Sequence[Callable[[str], str | None]] = (
            self._exact.get,
            lambda name: self._any_case.get(name.casefold()),
            lambda name: self._equal.get(_key(name)),
            lambda name: self._find_other(name, aliases.get(name, ())),
        )
        joined: dict[str, str] = {}
        taken: set[str] = set()
        for lookup in lookups:
            for name in names:
                found = lookup(name) if name not in joined else None
                if found is not None and found not in taken:
                    joined[name] = found
                    taken.add(found)
        joined |= {name: name for name in names if name not in joined}
        for name in names:
            self._exact.setdefault(joined[name], joined[name])
            self._any_case.setdefault(joined[name].casefold(), joined[name])
            self._equal.setdefault(_key(joined[name]), joined[name])
            self._named.setdefault(_key_of_other(joined[name]), joined[name])
            for other in aliases.get(name, ()):
                self._others.setdefault(_key_of_other(other), joined[name])
        return joined

    def _find_other(self, name: str, aliases: Sequence[str]) -> str | None:
        """The entity of which a name is another name, or which has one of its other names."""
        found = [self._others.get(_key_of_other(name))]
        found += [place.get(_key_of_other(alias)) for alias in aliases for place in (self._named, self._others)]
        return next((one for one in found if one is not None), None)
