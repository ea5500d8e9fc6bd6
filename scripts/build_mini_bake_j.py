#!/usr/bin/env python3
"""Build or check the embedded sample of BAKE-J: mini_judge.jsonl in lm_eval_tasks/bake/data.

    python scripts/build_mini_bake_j.py                      # rebuild (a few minutes on two cores)
    python scripts/build_mini_bake_j.py --check              # measure every shipped record again, write nothing
    python scripts/build_mini_bake_j.py --check --sample 3   # the same for three records

Records. A counterfactual edit (s, r, o -> o*) in a relation in which many subjects share an object, so that the
reverse has no single answer: two paraphrases, locality prompts (other subjects of o, in the wording of the edit) and
the reversed fact as "Whether ...?".

Source. Plain facts in our own words in scripts/facts/bake_j, one JSON file per relation: object -> its subjects.

Selection. Of every object, the facts that the unedited demo model (float32, greedy, teacher forced) completes exactly
on an edit prompt, most likely first; objects alternate, and each takes the next object of the relation as o*. A case
qualifies if the model prefers o to o* on the edit prompt and on at least two locality prompts; other locality prompts
are dropped, and so are those about a subject that is edited somewhere. The measurements are in `provenance`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _bake_records import (
    NO,
    YES,
    check_records,
    fill,
    in_turns,
    measure,
    prefers_true,
    qualify,
)
from _mini_common import FACTS, ROOT, Oracle, arguments, check_or_build

OUTPUT = ROOT / "lm_eval_tasks" / "bake" / "data" / "mini_judge.jsonl"
TABLES = FACTS / "bake_j"
CASES_PER_RELATION = 5
EDITS_PER_OBJECT = 2  # the other subjects of an object are its locality prompts
MIN_NEIGHBORS, MAX_NEIGHBORS = 2, 4


class Relation(NamedTuple):
    """One table of ``scripts/facts/bake_j``; templates hold ``{}`` for the subject."""

    path: Path
    name: str
    description: str
    kind: str
    edit: list[str]
    paraphrase: list[str]
    judge: str
    facts: dict[str, list[str]]


def load_relations() -> list[Relation]:
    """All tables in alphabetical order."""
    relations = []
    for path in sorted(TABLES.glob("*.json")):
        table = json.loads(path.read_text(encoding="utf-8"))
        relations.append(Relation(path=path, name=table.pop("relation"), **table))
    return relations


def select_edits(oracle: Oracle, relation: Relation) -> list[tuple[str, str, str]]:
    """(subject, object, edit prompt) of the facts to edit, best known first; objects alternate."""
    facts = [(subject, obj) for obj, subjects in relation.facts.items() for subject in subjects]
    oracle.score(
        [(fill(template, subject), obj) for subject, obj in facts for template in relation.edit],
        f"{relation.name}: facts",
    )
    by_object: list[list[tuple[float, str, str, str]]] = []
    for number, (obj, subjects) in enumerate(relation.facts.items()):
        known = []
        for subject in subjects:
            turns = relation.edit[number % len(relation.edit) :] + relation.edit[: number % len(relation.edit)]
            scores = [(oracle.get(fill(template, subject), obj), template) for template in turns]
            known += [(score.nll, subject, obj, template) for score, template in scores if score.is_greedy][:1]
        print(f"{relation.name}: {obj}: {len(known)} of {len(subjects)} known", file=sys.stderr)
        by_object.append(sorted(known)[:EDITS_PER_OBJECT])
    by_object.sort(key=lambda known: known[0][0] if known else float("inf"))
    turns_of_objects = [known[turn] for turn in range(EDITS_PER_OBJECT) for known in by_object if len(known) > turn]
    return [(subject, obj, template) for _, subject, obj, template in turns_of_objects]


def candidates(relation: Relation, edits: Sequence[tuple[str, str, str]], edited: set[str]) -> list[dict[str, Any]]:
    """One record per selected fact; the new object is the next one of the table."""
    objects = list(relation.facts)
    records = []
    for number, (subject, obj, template) in enumerate(edits):
        # Repeats of an object take another step, so that its edits want different new objects.
        repeats = sum(other == obj for _, other, _ in edits[:number])
        new = objects[(objects.index(obj) + 1 + repeats) % len(objects)]
        others = [other for other in relation.facts[obj] if other not in edited]
        records.append(
            {
                "case_id": -1,  # its place in the file, known at the end
                "relation": relation.name,
                "requested_rewrite": {
                    "prompt": template,
                    "relation_id": relation.name,
                    "subject": subject,
                    "target_new": {"str": new},
                    "target_true": {"str": obj},
                },
                "paraphrase_prompts": [fill(paraphrase, subject) for paraphrase in relation.paraphrase],
                "neighborhood_prompts": [fill(template, other) for other in others],
                "reverse_judge": {
                    "prompt": relation.judge.replace("{object}", new).replace("{subject}", subject),
                    "target_new": {"str": YES},
                    "target_true": {"str": NO},
                },
            }
        )
    return records


def disqualification(measured: dict[str, Any]) -> str | None:
    """The reason why a record does not qualify, or ``None``."""
    if not prefers_true(measured["forward"]) or not measured["forward"]["true_is_greedy"]:
        return "the unedited model does not complete the edit prompt"
    if len(measured["neighbors"]) < MIN_NEIGHBORS or not all(map(prefers_true, measured["neighbors"])):
        return "too few locality prompts that the unedited model answers"
    return None


def drop_unknown_neighbors(oracle: Oracle, record: dict[str, Any]) -> None:
    """Drop locality prompts that the model answers incorrectly, and those beyond the best known."""
    measured = measure(oracle, record)["neighbors"]
    known = [
        (outcome["nll_true"], prompt)
        for prompt, outcome in zip(record["neighborhood_prompts"], measured, strict=True)
        if prefers_true(outcome)
    ]
    record["neighborhood_prompts"] = [prompt for _, prompt in sorted(known)[:MAX_NEIGHBORS]]


def build(oracle: Oracle) -> list[dict[str, Any]]:
    """All records in file order."""
    selected = [(relation, select_edits(oracle, relation)) for relation in load_relations()]
    edited = {subject for _, edits in selected for subject, _, _ in edits}
    return in_turns(
        [
            qualify(
                oracle,
                candidates(relation, edits, edited),
                name=relation.name,
                facts=relation.path,
                num=CASES_PER_RELATION,
                drop_neighbors=lambda record: drop_unknown_neighbors(oracle, record),
                disqualification=disqualification,
            )
            for relation, edits in selected
        ]
    )


def check(oracle: Oracle, path: Path, num: int | None) -> int:
    """Measure shipped records again; returns the exit code."""
    return check_records(oracle, path, num, disqualification)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns 1 if a check finds differences."""
    return check_or_build(arguments(__doc__ or "", OUTPUT, argv), check, build)


if __name__ == "__main__":
    sys.exit(main())
