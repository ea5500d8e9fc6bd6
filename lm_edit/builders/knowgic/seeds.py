"""The file from which a knowledge graph grows: triplets to edit, further facts of people, wordings, other names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edit_hooks.utils.errors import EditingError, unknown_keys_error
from edit_hooks.utils.storage.json_io import read_json
from edit_hooks.utils.text.slots import fill_slots
from judges.match import alias_match, has_answer, normalize
from lm_edit.builders.facts import Fact, read_facts
from lm_edit.builders.knowgic.graph import Edit, Relation, read_entity_names, read_relations
from lm_edit.builders.replies import MAX_NAME, is_usable
from lm_eval_tasks.common.records.fields import Fields

KEYS = ("seeds", "facts", "relations", "aliases", "provenance")


class Spelling:
    """The first spelling of every name; names are the same if they are equal as the scores compare them.

    Args:
        aliases: entity -> other names, which become the entity.
    """

    def __init__(self, aliases: Mapping[str, Sequence[str]] | None = None) -> None:
        self._first: dict[str, str] = {}
        for entity, names in (aliases or {}).items():
            for name in (entity, *names):
                self._first.setdefault(normalize(name) or name, entity)

    def __call__(self, name: str) -> str:
        return self._first.setdefault(normalize(name) or name, name)


@dataclass(frozen=True, kw_only=True)
class Seeds:
    """What people give.

    Attributes:
        edits: the seed triplets with their new objects.
        facts: triplets that people add; they are validated as all others.
        relations: wordings by people, by name; the other relations get theirs from the writer.
        aliases: entity -> other names.
    """

    edits: Sequence[Edit]
    facts: Sequence[Fact]
    relations: Mapping[str, Relation]
    aliases: Mapping[str, Sequence[str]]

    @property
    def triplets(self) -> list[Fact]:
        """Seed triplets and further facts."""
        return [*(edit.fact for edit in self.edits), *self.facts]

    def object_names(self, fact: Fact) -> tuple[str, ...]:
        """The object and its other names."""
        return (fact.object, *self.aliases.get(fact.object, ()))


def read_seeds(path: str | Path) -> Seeds:
    """Read ``seeds`` (subject, relation, object, new object), and ``facts``, ``relations`` and ``aliases`` if any.

    Raises:
        EditingError: for unreadable JSON, and as :func:`parse_seeds`.
    """
    return parse_seeds(read_json(path, "file of seeds"), str(path))


def parse_seeds(record: object, where: str) -> Seeds:
    """Check and convert the content of a file of seeds; ``provenance`` is for people.

    Raises:
        EditingError: for another layout, a name that no question can hold, a given question that has the object, and
            triplets that cannot be in one graph: repeated ones, two between the same entities, or a second object of
            an edited relation.
    """
    if not isinstance(record, Mapping):
        raise EditingError(
            f'{where} is no object; one with "seeds": [[subject, relation, object, new object]] is needed.'
        )
    if unknown := set(record) - set(KEYS):
        raise unknown_keys_error(f"key in {where}:", map(str, unknown), KEYS)
    fields = Fields(record, where)
    aliases = {entity: [name for name in names if name] for entity, names in read_entity_names(fields).items()}
    relations = read_relations(fields) if record.get("relations") else {}
    entity, relation = Spelling(aliases), Spelling(dict.fromkeys(relations, ()))
    edits = [
        Edit(Fact(entity(row[0]), relation(row[1]), entity(row[2])), entity(row[3]))
        for row in _rows(fields, "seeds", 4, "[subject, relation, object, new object]")
    ]
    facts = [
        Fact(entity(fact.subject), relation(fact.relation), entity(fact.object))
        for fact in (read_facts(fields, "facts") if record.get("facts") else ())
    ]
    seeds = Seeds(edits=edits, facts=facts, relations=relations, aliases=aliases)
    _check(fields, seeds)
    return seeds


def _rows(fields: Fields, name: str, length: int, layout: str) -> Iterator[list[str]]:
    rows = fields.optional(name)
    if not isinstance(rows, list) or not rows:
        raise fields.error(name, f"must be a list with entries {layout}")
    for number, row in enumerate(rows):
        texts = [part.strip() for part in row if isinstance(part, str)] if isinstance(row, list) else []
        if len(texts) != length or len(row) != length or not all(texts):
            raise fields.error(f"{name}[{number}]", f"is {row!r}; {length} texts are needed: {layout}")
        yield texts


def _check(fields: Fields, seeds: Seeds) -> None:
    edited: dict[tuple[str, str], Fact] = {}
    linked: dict[tuple[str, str], Fact] = {}
    places = [*((f"seeds[{n}]", edit.fact) for n, edit in enumerate(seeds.edits))]
    places += [(f"facts[{n}]", fact) for n, fact in enumerate(seeds.facts)]
    for place, fact in places:
        if unusable := [part for part in fact if not is_usable(part)]:
            raise fields.error(
                place, f"has {unusable[0]!r}; one line of at most {MAX_NAME} characters without brackets is needed"
            )
        if alias_match(fact.subject, seeds.object_names(fact)):
            raise fields.error(place, f"has the object in its subject {fact.subject!r}, so every answer would hold it")
        wording = seeds.relations.get(fact.relation)
        question = fill_slots(wording.question, fact.subject) if wording is not None else ""
        if has_answer(question, seeds.object_names(fact)):
            raise fields.error(
                place, f"has the object in its question {question!r}; give the relation another question, or drop it"
            )
        if (fact.subject, fact.object) in linked:
            raise fields.error(place, f"links {fact.subject!r} to {fact.object!r} a second time; keep one fact")
        linked[fact.subject, fact.object] = fact
        if fact[:2] in edited:
            raise fields.error(
                place, f"gives {fact.subject!r}, {fact.relation!r} a second object; that of an edit is the only one"
            )
        if place.startswith("seeds"):
            edited[fact[:2]] = fact
    for number, edit in enumerate(seeds.edits):
        if edit.target_new == edit.fact.object:
            raise fields.error(f"seeds[{number}]", f"changes {edit.fact.object!r} to itself; another object is needed")
