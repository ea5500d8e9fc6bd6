"""Categories of relations, and the form in which the papers ask about each (section 4.1).

A relation is one-to-one if a subject has at most one object and an object at most one subject, one-to-many if a subject
can have several objects, many-to-one if an object can have several subjects, and many-to-many if both. The reverse
question of the first two has one answer: BAKE-Q&J asks it, and asks for a judgment. That of the other two has several:
BAKE-J asks for a judgment only.

Real relations have exceptions: some countries have two capitals. The papers chose their relations by hand and take the
four classes from Bordes et al. (2013), who count an end of a relation as "many" if it has 1.5 entities or more in the
mean: objects of a subject, or subjects of an object. This is the rule ``mean``; ``any`` allows no exception.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from lm_edit.builders.facts import Fact

RULES = ("mean", "any")
MANY = 1.5  # mean number of entities from which an end is "many" (Bordes et al., 2013)


class End(NamedTuple):
    """One end of a relation: its entities, each with those that it is linked to at the other end.

    Attributes:
        num_entities: number of subjects (objects).
        num_several: those with several objects (subjects).
        mean: objects per subject (subjects per object).
    """

    num_entities: int
    num_several: int
    mean: float

    def leads_to_many(self, rule: str) -> bool:
        """Whether an entity counts as linked to several."""
        return self.num_several > 0 if rule == "any" else self.mean >= MANY

    def __str__(self) -> str:
        share = self.num_several / self.num_entities
        return f"{self.num_several} of {self.num_entities} ({share:.1%}), mean {self.mean:.2f}"


class Category(NamedTuple):
    """A relation's category and the counts that it follows from.

    Attributes:
        name: one-to-one, one-to-many, many-to-one or many-to-many.
        num_facts: distinct ones.
        subjects, objects: the two ends.
    """

    name: str
    num_facts: int
    subjects: End
    objects: End

    @property
    def form(self) -> str:
        """The form of the papers: ``qa`` (BAKE-Q&J) or ``judge`` (BAKE-J)."""
        return "judge" if self.name.startswith("many") else "qa"


def categorize(facts: Iterable[Fact], rule: str = "mean") -> dict[str, Category]:
    """The category of every relation, in the order of their first facts.

    Args:
        facts: repeated ones count once.
        rule: one of :data:`RULES`.
    """
    by_relation: dict[str, dict[Fact, None]] = defaultdict(dict)
    for fact in facts:
        by_relation[fact.relation][fact] = None
    return {name: _category(list(found), rule) for name, found in by_relation.items()}


def _category(facts: list[Fact], rule: str) -> Category:
    subjects, objects = _end(fact.subject for fact in facts), _end(fact.object for fact in facts)
    left = "many" if objects.leads_to_many(rule) else "one"
    right = "many" if subjects.leads_to_many(rule) else "one"
    return Category(f"{left}-to-{right}", len(facts), subjects, objects)


def _end(names: Iterable[str]) -> End:
    """The end with these entities, one name for every fact."""
    counts = Counter(names)
    return End(len(counts), sum(count > 1 for count in counts.values()), counts.total() / len(counts))
