#!/usr/bin/env python3
"""Build or check the embedded samples of BAKE-Q&J: mini.jsonl and held_out.jsonl in lm_eval_tasks/bake/data.

    python scripts/build_mini_bake.py                       # rebuild (a few minutes on two cores)
    python scripts/build_mini_bake.py --held-out            # rebuild the facts to tune on, after mini.jsonl
    python scripts/build_mini_bake.py --check               # measure every shipped record again, write nothing
    python scripts/build_mini_bake.py --check --sample 3    # the same for three records (--held-out: of the other file)

Records. A counterfactual edit (s, r, o -> o*) inside one relation, where o* is the true object of another subject s*;
two paraphrases; locality prompts, which state other facts whose object is o; the reverse question (o*, r^-1, ?) with
the answers s (after the edit) and s* (before it); and the same question as "Whether ...?".

Source. Plain facts in our own words in scripts/facts/bake: one JSON file per relation, and one table of prompts per
object. The schema is that of the published benchmark; none of its text is used.

Selection. Of every relation, the facts that the unedited demo model (float32, greedy, teacher forced) knows best: it
must complete the reverse question of o with s, exactly. The selected facts are ordered by a hash, and each takes the
object of its successor as o*, so the new objects are distinct. A case qualifies if the model prefers o to o* on the
edit prompt and s* to s on the reverse question (mean NLL per token), and o to o* on at least two locality prompts;
other locality prompts are dropped. Relations alternate in the file, best-known facts first, so that its first records
cover all relations. The measurements are in `provenance`.

Held-out facts. Settings are tuned on other facts than those of mini.jsonl: of the same relations, but with no subject
and no object that mini.jsonl has in that relation. Selected and qualified alike.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections import defaultdict
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
    mentions,
    prefers_true,
    qualify,
)
from _mini_common import (
    FACTS,
    ROOT,
    Oracle,
    arguments,
    check_or_build,
    read_jsonl,
    read_tsv,
)

OUTPUT = ROOT / "lm_eval_tasks" / "bake" / "data" / "mini.jsonl"
HELD_OUT = OUTPUT.with_name("held_out.jsonl")
TABLES = FACTS / "bake"
CASES_PER_RELATION = 6
SPARES_PER_RELATION = 2  # facts selected beyond the quota, because some cases do not qualify
MIN_NEIGHBORS = 2


class Fact(NamedTuple):
    """A true triple of a relation."""

    subject: str
    object: str


class Relation(NamedTuple):
    """One table of ``scripts/facts/bake``; templates hold ``{}`` for the subject (``reverse``: for the object)."""

    path: Path
    name: str
    description: str
    kind: str
    edit: list[str]
    paraphrase: list[str]
    reverse: str
    judge: str
    facts: list[Fact]


def load_relations() -> list[Relation]:
    """All tables in alphabetical order."""
    relations = []
    for path in sorted(TABLES.glob("*.json")):
        table = json.loads(path.read_text(encoding="utf-8"))
        facts = [Fact(*pair) for pair in table.pop("facts")]
        relations.append(Relation(path=path, name=table.pop("relation"), facts=facts, **table))
    return relations


def without_names(relations: Sequence[Relation], records: Sequence[dict[str, Any]]) -> list[Relation]:
    """The relations without the facts that share a subject or an object with a record of the same relation."""
    taken: dict[str, set[str]] = defaultdict(set)
    for record in records:
        rewrite, reverse = record["requested_rewrite"], record["reverse_qa"]
        entities = [rewrite["target_true"], rewrite["target_new"], reverse["target_true"], reverse["target_new"]]
        taken[record["relation"]].update(entity["str"] for entity in entities)
    return [
        relation._replace(facts=[fact for fact in relation.facts if not taken[relation.name] & set(fact)])
        for relation in relations
    ]


def load_neighbors() -> dict[str, list[str]]:
    """Object -> prompts that it completes truthfully."""
    prompts: dict[str, list[str]] = defaultdict(list)
    for row in read_tsv(TABLES / "neighbors.tsv"):
        prompts[row["object"]].append(row["prompt"])
    return dict(prompts)


def select_facts(oracle: Oracle, relation: Relation, neighbors: dict[str, list[str]]) -> list[tuple[Fact, str]]:
    """The facts the model knows best in both directions, each with the edit prompt it answers best; best first."""
    facts = [fact for fact in relation.facts if len(neighbors.get(fact.object, ())) >= MIN_NEIGHBORS]
    pairs = [(fill(relation.reverse, fact.object), fact.subject) for fact in facts]
    pairs += [(fill(template, fact.subject), fact.object) for fact in facts for template in relation.edit]
    oracle.score(pairs, f"{relation.name}: facts")
    known = [fact for fact in facts if oracle.get(fill(relation.reverse, fact.object), fact.subject).is_greedy]
    forward = [
        sum(oracle.get(fill(template, fact.subject), fact.object).is_greedy for fact in facts)
        for template in relation.edit
    ]
    print(
        f"{relation.name}: {len(facts)} facts; known backward {len(known)}, forward "
        + ", ".join(f"{count} ({template!r})" for count, template in zip(forward, relation.edit, strict=True)),
        file=sys.stderr,
    )
    ranked = []
    for number, fact in enumerate(known):
        # Templates alternate; another one is used only if the model completes that one and not this one.
        turns = relation.edit[number % len(relation.edit) :] + relation.edit[: number % len(relation.edit)]
        scores = [oracle.get(fill(template, fact.subject), fact.object) for template in turns]
        best = next((at for at, score in enumerate(scores) if score.is_greedy), 0)
        ranked.append(((not scores[best].is_greedy, scores[best].nll), fact, turns[best]))
    ranked.sort(key=lambda entry: entry[0])
    return [(fact, template) for _, fact, template in ranked[: CASES_PER_RELATION + SPARES_PER_RELATION]]


def candidates(
    relation: Relation, selected: Sequence[tuple[Fact, str]], neighbors: dict[str, list[str]]
) -> list[dict[str, Any]]:
    """One record per selected fact, best-known first, with the object of its successor in the order of a hash."""
    ring = sorted(selected, key=lambda entry: hashlib.sha256(entry[0].subject.encode()).hexdigest())
    successor = {fact: ring[(at + 1) % len(ring)][0] for at, (fact, _) in enumerate(ring)}
    records = []
    for fact, template in selected:
        other = successor[fact]
        statement = relation.judge.replace("{object}", other.object).replace("{subject}", fact.subject)
        records.append(
            {
                "case_id": -1,  # its place in the file, known at the end
                "relation": relation.name,
                "requested_rewrite": {
                    "prompt": template,
                    "relation_id": relation.name,
                    "subject": fact.subject,
                    "target_new": {"str": other.object},
                    "target_true": {"str": fact.object},
                },
                "paraphrase_prompts": [fill(paraphrase, fact.subject) for paraphrase in relation.paraphrase],
                "neighborhood_prompts": neighbors[fact.object],
                "reverse_qa": {
                    "prompt": fill(relation.reverse, other.object),
                    "target_new": {"str": fact.subject},
                    "target_true": {"str": other.subject},
                },
                "reverse_judge": {"prompt": statement, "target_new": {"str": YES}, "target_true": {"str": NO}},
            }
        )
    return records


def disqualification(measured: dict[str, Any]) -> str | None:
    """The reason why a record does not qualify, or ``None``."""
    if not prefers_true(measured["forward"]):
        return "the unedited model prefers the new object on the edit prompt"
    if not prefers_true(measured["reverse_qa"]) or not measured["reverse_qa"]["true_is_greedy"]:
        return "the unedited model does not answer the reverse question"
    if len(measured["neighbors"]) < MIN_NEIGHBORS or not all(map(prefers_true, measured["neighbors"])):
        return "too few locality prompts that the unedited model answers"
    return None


def drop_unknown_neighbors(oracle: Oracle, record: dict[str, Any], edited_names: Sequence[str]) -> None:
    """Drop locality prompts that the model answers incorrectly or that mention an edited subject."""
    subject = record["requested_rewrite"]["subject"]
    measured = measure(oracle, record)["neighbors"]
    record["neighborhood_prompts"] = [
        prompt
        for prompt, outcome in zip(record["neighborhood_prompts"], measured, strict=True)
        if prefers_true(outcome) and not any(mentions(prompt, name) for name in (subject, *edited_names))
    ]


def build(oracle: Oracle, relations: Sequence[Relation]) -> list[dict[str, Any]]:
    """All records of a sample, in file order."""
    neighbors = load_neighbors()
    proposals = [
        (relation, candidates(relation, select_facts(oracle, relation, neighbors), neighbors)) for relation in relations
    ]
    names = [record["requested_rewrite"]["subject"] for _, records in proposals for record in records]
    proper_names = [name for name in names if name[:1].isupper() and len(name) > 2]
    return in_turns(
        [
            qualify(
                oracle,
                records,
                name=relation.name,
                facts=relation.path,
                num=CASES_PER_RELATION,
                drop_neighbors=lambda record: drop_unknown_neighbors(oracle, record, proper_names),
                disqualification=disqualification,
            )
            for relation, records in proposals
        ]
    )


def check(oracle: Oracle, path: Path, num: int | None) -> int:
    """Measure shipped records again; returns the exit code."""
    return check_records(oracle, path, num, disqualification)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns 1 if a check finds differences."""
    held_out = argparse.ArgumentParser(add_help=False)
    held_out.add_argument("--held-out", action="store_true", help="the facts to tune on, not those of mini.jsonl")
    options = arguments(__doc__ or "", OUTPUT, argv, held_out)
    if options.held_out and options.output == OUTPUT:
        options.output = HELD_OUT

    def build_chosen(oracle: Oracle) -> list[dict[str, Any]]:
        relations = load_relations()
        return build(oracle, without_names(relations, read_jsonl(OUTPUT)) if options.held_out else relations)

    return check_or_build(options, check, build_chosen)


if __name__ == "__main__":
    sys.exit(main())
