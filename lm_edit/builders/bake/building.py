"""Records of BAKE-Q&J and BAKE-J from facts and templates, constructed as in sections 4.2 and 4.3 of the papers.

An edit changes a fact (s, r, o) to (s, r, o*), where (s*, r, o*) is another fact of the same relation. Its prompt and
its paraphrases are different templates of r, locality prompts state other facts whose object is o, of any relation, and
the reverse questions are templates of the inverse relation about o*. The papers take facts from Wikidata and templates
written by hand (first version) or by a language model (TMLR); here facts are given, and templates are given or written
by a model (:mod:`lm_edit.builders.bake.writing`). They keep an edit if the model gives s* and not s as the answer of
the reverse question, which is tested after this step (:mod:`lm_edit.builders.known_facts`).

The papers leave open: how many locality prompts are drawn (here at most :data:`MAX_NEIGHBORS`, one template each), and
whether a locality prompt may contain its answer (here not), or have the new object as a true answer, too (here not). An
edit to an object that the subject has anyway, or to the subject itself (a relation such as spouse holds both ways), is
no edit, and in Q&J a new object with several subjects has no single reverse answer: such objects are not drawn.
Whether the papers take a relation for Q&J at all depends on its category (:mod:`lm_edit.builders.bake.categories`);
here every relation can be built in both forms.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from edit_hooks.utils.errors import EditingError, near_misses
from edit_hooks.utils.storage.json_io import read_json
from edit_hooks.utils.text.scripts import mention_of
from lm_edit.builders.bake.templates import RelationTemplates, fill, read_relations
from lm_edit.builders.facts import Fact, entry_names, read_facts
from lm_eval_tasks.bake.benchmark import REWRITE
from lm_eval_tasks.common.records.fields import Fields

FORMS = ("qa", "judge")  # BAKE-Q&J and BAKE-J
NUM_PARAPHRASES = 2
MAX_NEIGHBORS = 10
NO_NEW_OBJECT = "no other fact of the relation has an object that can be the new one"
NO_SINGLE_ANSWER = (
    "every object that can be the new one has several subjects, so its reverse question has several answers (--form "
    "judge asks none)"
)
NO_NEIGHBOR = "no other fact with the same object gives a locality prompt"
TRIES = 20  # draws before the fitting facts are listed


@dataclass(frozen=True)
class FactTable:
    """Facts and the wordings of their relations.

    Attributes:
        relations: by name; a Wikidata id as the name is what BIRD's shipped relations are keyed by.
        facts: in the order of the file, each once.
        labels: names in words of relations that have one.
    """

    relations: Mapping[str, RelationTemplates]
    facts: Sequence[Fact]
    labels: Mapping[str, str] = field(default_factory=dict)

    def without_templates(self) -> list[str]:
        """The relations with facts and without any template, in the order of their facts."""
        named = dict.fromkeys(fact.relation for fact in self.facts)
        return [name for name in named if self.relations[name] == RelationTemplates()]

    def with_templates(self, templates: Mapping[str, RelationTemplates]) -> FactTable:
        """The table with further templates; those of relations that it has not are not used.

        Raises:
            EditingError: for a relation that has templates already.
        """
        for name in templates:
            if self.relations.get(name, RelationTemplates()) != RelationTemplates():
                raise EditingError(f"relation {name!r} has templates in two files; keep them in one.")
        return replace(self, relations={name: templates.get(name, old) for name, old in self.relations.items()})

    def lacks(self, form: str, relations: Sequence[str] | None = None) -> dict[str, str]:
        """What the relations of the facts need besides, by name.

        Args:
            form: one of :data:`FORMS`.
            relations: those to edit, all by default; the others need a prompt for locality.
        """
        found = {}
        for name in dict.fromkeys([*(fact.relation for fact in self.facts), *(relations or ())]):
            is_edited = relations is None or name in relations
            if is_edited and (lack := self.relations[name].lacks(form)):
                found[name] = f"{lack}; or name the relations to edit (--relations)"
            elif not self.relations[name].prompts:
                found[name] = "a prompt, for locality"
        return found

    def templates_hash(self, relation: str) -> str:
        """SHA-256 (hex) of the templates of a relation."""
        text = json.dumps(self.relations[relation].to_json(), ensure_ascii=False, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def check_names(self, relations: Sequence[str] | None) -> None:
        """Check that there are relations of these names.

        Raises:
            EditingError: otherwise.
        """
        for name in relations or ():
            if name not in self.relations:
                raise EditingError(f"there is no relation {name!r}.{near_misses(name, self.relations)}")


@dataclass
class BakeRecords:
    """The records, and what became of the other facts.

    Attributes:
        records: in the published schema, with the relation beside.
        left_out: (fact, reason).
    """

    records: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[tuple[Fact, str]] = field(default_factory=list)


def read_fact_table(path: str | Path) -> FactTable:
    """Read ``relations`` (name -> prompts, reverse, judge) and ``facts`` (subject, relation, object) from JSON.

    An entry of ``relations`` may have a ``label``, its name in words, and may be without templates.

    Raises:
        EditingError: for unreadable JSON, another layout, templates without their slots, and repeated facts.
    """
    record = read_json(path, "table of facts")
    if not isinstance(record, Mapping):
        raise EditingError(f"{path} is no object; one with relations and facts is needed.")
    fields = Fields(record, str(path))
    names = entry_names(fields, "relations")
    relations = read_relations(fields, names)
    facts = list(read_facts(fields, "facts", relations))
    seen: set[Fact] = set()
    for fact in facts:
        if fact in seen:
            raise fields.error("facts", f"has {list(fact)!r} twice; keep one")
        seen.add(fact)
    entries = {name: Fields(record["relations"][name], f"{path}, relation {name!r}") for name in names}
    return FactTable(relations, facts, {name: one.text("label") for name, one in entries.items() if one.has("label")})


def build_records(
    table: FactTable,
    form: str,
    *,
    num_paraphrases: int = NUM_PARAPHRASES,
    max_neighbors: int = MAX_NEIGHBORS,
    relations: Sequence[str] | None = None,
    per_relation: int | None = None,
    seed: int = 0,
) -> BakeRecords:
    """One record for every fact that can be edited.

    What is drawn for a fact does not depend on which other facts are edited.

    Args:
        form: one of :data:`FORMS`.
        num_paraphrases, max_neighbors: largest numbers of paraphrases and locality prompts of a record.
        relations: edit facts of these only; those of the others are in locality prompts.
        per_relation: take that many facts of every relation, drawn at random; all by default.

    Raises:
        EditingError: for an unknown relation, and for one without the templates that its facts need.
    """
    by_relation, with_object = defaultdict[str, list[Fact]](list), defaultdict[str, list[Fact]](list)
    for fact in table.facts:
        by_relation[fact.relation].append(fact)
        with_object[fact.object].append(fact)
    table.check_names(relations)
    for name in table.without_templates():
        raise EditingError(
            f"relation {name!r} has no templates: put some into the file, name a file that has them (--templates), or "
            "let a model write them (--writer)."
        )
    for name, lack in table.lacks(form, relations).items():
        raise EditingError(f"relation {name!r} needs {lack}.")
    built, known = BakeRecords(), frozenset(table.facts)
    for relation, facts in by_relation.items():
        if relations is not None and relation not in relations:
            continue
        others = _with_reverse_answer(facts, form)
        objects: dict[str, set[str]] = defaultdict(set)
        for fact in facts:
            objects[fact.subject].add(fact.object)
        for fact in _drawn(facts, per_relation, f"{seed}|{relation}"):
            chance = random.Random("|".join([str(seed), *fact]))
            other = _other_fact(fact, others, objects[fact.subject], chance)
            if other is None:
                is_shared = any(_fits(one, fact, objects[fact.subject]) for one in facts)
                built.left_out.append((fact, NO_SINGLE_ANSWER if is_shared else NO_NEW_OBJECT))
                continue
            prompts = _neighbors(table, fact, other.object, with_object[fact.object], known, chance)
            neighbors = chance.sample(prompts, min(max_neighbors, len(prompts)))
            if not neighbors:
                built.left_out.append((fact, NO_NEIGHBOR))
                continue
            record = _record(table.relations[relation], fact, other, form, num_paraphrases, chance)
            built.records.append({"case_id": len(built.records), **record, "neighborhood_prompts": neighbors})
    return built


def _drawn(facts: Sequence[Fact], number: int | None, seed: str) -> list[Fact]:
    if number is None or number >= len(facts):
        return list(facts)
    chosen = set(random.Random(seed).sample(facts, number))
    return [fact for fact in facts if fact in chosen]


def _with_reverse_answer(facts: Sequence[Fact], form: str) -> list[Fact]:
    """The facts (s*, r, o*) whose object can be the new one; in Q&J only one subject has it."""
    subjects: dict[str, set[str]] = defaultdict(set)
    for fact in facts:
        subjects[fact.object].add(fact.subject)
    return [fact for fact in facts if form != "qa" or len(subjects[fact.object]) == 1]


def _other_fact(fact: Fact, others: Sequence[Fact], objects: Container[str], chance: random.Random) -> Fact | None:
    """A random one of the facts that fit; ``None`` without any."""
    for _ in range(TRIES if others else 0):
        if _fits(other := chance.choice(others), fact, objects):
            return other
    left = [other for other in others if _fits(other, fact, objects)]
    return chance.choice(left) if left else None


def _fits(other: Fact, fact: Fact, objects: Container[str]) -> bool:
    """Whether a fact has another subject, and an object that is neither the edited subject nor one that this has."""
    return fact.subject not in (other.subject, other.object) and other.object not in objects


def _neighbors(
    table: FactTable, edited: Fact, new: str, facts: Iterable[Fact], known: Container[Fact], chance: random.Random
) -> list[str]:
    """Prompts of other subjects with the original object, for which the new object is not true as well."""
    prompts = []
    for fact in facts:
        if fact.subject != edited.subject:
            # Drawn before the next check, so that a fact that fails it leaves the draws of the others as they are.
            prompt = fill(chance.choice(table.relations[fact.relation].prompts), fact.subject)
            if fact._replace(object=new) not in known:
                prompts.append(prompt)
    about = [mention_of(name) for name in (edited.object, edited.subject)]
    return [prompt for prompt in dict.fromkeys(prompts) if not any(name.search(prompt) for name in about)]


def _record(
    wording: RelationTemplates, fact: Fact, other: Fact, form: str, num_paraphrases: int, chance: random.Random
) -> dict[str, Any]:
    prompt, *rest = chance.sample(wording.prompts, len(wording.prompts))
    record: dict[str, Any] = {
        "relation": fact.relation,
        REWRITE: {
            "prompt": prompt,
            "relation_id": fact.relation,
            "subject": fact.subject,
            "target_new": {"str": other.object},
            "target_true": {"str": fact.object},
        },
        "paraphrase_prompts": [fill(template, fact.subject) for template in rest[:num_paraphrases]],
    }
    if form == "qa":
        record["reverse_qa"] = {
            "prompt": fill(chance.choice(wording.reverse), other.object),
            "target_new": {"str": fact.subject},
            "target_true": {"str": other.subject},
        }
    record["reverse_judge"] = {
        "prompt": wording.judge_question(fact.subject, other.object),
        "target_new": {"str": "yes"},
        "target_true": {"str": "no"},
    }
    return record


def reverse_question(record: Mapping[str, Any], form: str) -> tuple[str, str, str]:
    """The question that decides whether a model has the original fact: prompt, original and desired answer."""
    question = record["reverse_qa" if form == "qa" else "reverse_judge"]
    return question["prompt"], question["target_true"]["str"], question["target_new"]["str"]


def fact_of(record: Mapping[str, Any]) -> Fact:
    """The edited fact of a record."""
    rewrite = record[REWRITE]
    return Fact(rewrite["subject"], record["relation"], rewrite["target_true"]["str"])
