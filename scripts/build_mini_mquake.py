#!/usr/bin/env python3
"""Build or check the embedded sample of MQuAKE.

    python scripts/build_mini_mquake.py                       # rebuild (a few minutes on two cores)
    python scripts/build_mini_mquake.py --check               # measure every shipped record again, write nothing
    python scripts/build_mini_mquake.py --check --sample 3    # the same for three records

Source. Plain facts and questions in our own words: scripts/facts/mquake/chains.json. None of the published records'
text is used. Every first subject of a chain (a place, a book, a product) gives one case. Its edits are at
one of the positions in :data:`EDITED`, the object of an edited fact is that of another fact of its relation, and the
chain goes on from there.

Selection. The unedited model (float32, greedy) must know every fact of the chain before the edits and every fact after
them that no edit makes: its answer after the relation's demonstrations is the object or an alias. After the cloze
prompt of an edit its old object is likelier per token than its new one. No two cases contradict each other: an edit
changes no fact that another case needs, so that all cases can be edited together.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _mini_common import (
    FACTS,
    ROOT,
    Oracle,
    arguments,
    check_or_build,
    differences,
    provenance,
    read_jsonl,
    report,
    rounded,
    spread,
)

from edit_hooks.answers import truncate
from lm_eval_tasks.mquake.demonstrations import find_demonstrations
from lm_eval_tasks.mquake.multi_hop import equals

OUTPUT = ROOT / "lm_eval_tasks" / "mquake" / "data" / "mini.jsonl"
TABLE = FACTS / "mquake" / "chains.json"
MAX_NEW_TOKENS = 12
# Positions of the edits in a chain, by its length; tried in turn, a different one first for each case.
EDITED = {
    2: [(0,), (0, 1), (0,), (1,)],
    3: [(0,), (1,), (0, 1), (0, 2), (0, 1, 2)],
    4: [(0,), (1, 2), (0, 1, 2), (0, 1, 2, 3), (2,)],
}


class Fact(NamedTuple):
    """One fact: relation, subject and object."""

    relation: str
    subject: str
    object: str


class Chain(NamedTuple):
    """A chain of facts before the edits, after them, and the positions of the edits."""

    wordings: Sequence[str]
    old: Sequence[Fact]
    new: Sequence[Fact]
    edited: Sequence[int]


class Facts:
    """The table of facts, restricted to those that a model knows."""

    def __init__(self, table: Mapping[str, Any], known: frozenset[Fact] | None = None) -> None:
        self.table = table
        facts = [Fact(name, *fact) for name, relation in table["relations"].items() for fact in relation["facts"]]
        self.all = [fact for fact in facts if known is None or fact in known]
        self.objects = {(fact.relation, fact.subject): fact.object for fact in self.all}

    def text(self, fact: Fact, form: str) -> str:
        """A fact as ``cloze`` or ``question``."""
        return str(self.table["relations"][fact.relation][form]).replace("{}", fact.subject)

    def accepted(self, name: str) -> list[str]:
        """A name and its aliases."""
        return [name, *self.table["aliases"].get(name, [])]

    def other_objects(self, fact: Fact) -> list[str]:
        """Objects of the other facts of the relation, in turn from this fact on."""
        facts = [one for one in self.all if one.relation == fact.relation]
        start = next((index for index, one in enumerate(facts) if one.subject == fact.subject), 0)
        turned = [one.object for one in facts[start + 1 :] + facts[:start]]
        return [name for name in dict.fromkeys(turned) if name != fact.object]

    def chain(self, relations: Sequence[str], subject: str, edited: Sequence[int] = (), turn: int = 0) -> list[Fact]:
        """The facts from a subject on, until one is lacking; ``turn`` chooses the objects of the edited ones."""
        facts: list[Fact] = []
        for position, relation in enumerate(relations):
            true = self.objects.get((relation, subject))
            if true is None:
                break
            fact = Fact(relation, subject, true)
            if position in edited:
                others = self.other_objects(fact)
                if not others:
                    break
                fact = fact._replace(object=others[turn % len(others)])
            facts.append(fact)
            subject = fact.object
        return facts


def patterns(table: Mapping[str, Any]) -> list[tuple[list[str], list[str]]]:
    """Relations of a chain, and the wordings of its question; the first relation decides the subject."""
    found = [(path.split(), wordings) for path, wordings in table["questions_that_end_there"].items()]
    for (path, starts), (end, questions) in itertools.product(
        table["paths_to_a_country"].items(), table["questions_about_a_country"].items()
    ):
        wordings = [question.replace("<country>", start) for question, start in zip(questions, starts, strict=True)]
        found.append(([*path.split(), end], wordings))
    return found


def candidates(facts: Facts) -> Iterator[list[Chain]]:
    """For every first subject its possible cases, the preferred one first."""
    of_relation: dict[str, list[tuple[list[str], list[str]]]] = {}
    for relations, wordings in patterns(facts.table):
        of_relation.setdefault(relations[0], []).append((relations, wordings))
    for first, found in of_relation.items():
        subjects = [fact.subject for fact in facts.all if fact.relation == first]
        for number, subject in enumerate(subjects):
            options = []
            for offset, turn in itertools.product(range(len(found)), range(6)):
                relations, wordings = found[(number + offset) % len(found)]
                places = EDITED[len(relations)]
                for shift in range(len(places)):
                    edited = places[(number + shift) % len(places)]
                    old = facts.chain(relations, subject)
                    new = facts.chain(relations, subject, edited, turn)
                    if len(old) == len(new) == len(relations) and old[-1].object != new[-1].object:
                        options.append(Chain([one.replace("{}", subject) for one in wordings], old, new, edited))
            yield options


def choose(facts: Facts, oracle: Oracle) -> list[Chain]:
    """One case for each first subject, without contradictions between the cases."""
    needed: dict[tuple[str, str], str] = {}
    chosen = []
    for options in candidates(facts):
        for chain in options:
            wanted = {(fact.relation, fact.subject): fact.object for fact in chain.new}
            edits = {(fact.relation, fact.subject) for fact in (chain.new[place] for place in chain.edited)}
            if edits & needed.keys() or any(needed.get(key, name) != name for key, name in wanted.items()):
                continue
            if all(prefers_old(oracle, facts, chain.new[place]) for place in chain.edited):
                needed |= wanted
                chosen.append(chain)
                break
    return chosen


def prefers_old(oracle: Oracle, facts: Facts, fact: Fact) -> bool:
    """Whether the true object of an edited fact is likelier than the new one."""
    true = facts.objects[fact.relation, fact.subject]
    cloze = facts.text(fact, "cloze")
    return oracle.get(cloze, true).nll < oracle.get(cloze, fact.object).nll


def measure_answers(oracle: Oracle, prompts: Sequence[str], label: str) -> list[str]:
    """The unedited model's answers, cut at the end of the line."""
    texts = oracle.generate(prompts, ("\n",), MAX_NEW_TOKENS, label, batch_size=12)
    return [truncate(text.lstrip(" "), ("\n",)).strip() for text in texts]


def known_facts(oracle: Oracle, facts: Facts) -> frozenset[Fact]:
    """The facts that the unedited model answers after the demonstrations of their relation."""
    answers = measure_answers(oracle, [hop_prompt(facts, fact) for fact in facts.all], "facts")
    known = [
        fact for fact, answer in zip(facts.all, answers, strict=True) if equals(answer, facts.accepted(fact.object))
    ]
    print(f"{len(known)} of {len(facts.all)} facts are known", file=sys.stderr)
    for fact, answer in zip(facts.all, answers, strict=True):
        if fact not in known:
            print(f"  not known: {fact.subject} {fact.relation} {fact.object}: {answer!r}", file=sys.stderr)
    return frozenset(known)


def hop_prompt(facts: Facts, fact: Fact) -> str:
    """The question about a fact after the demonstrations of its relation."""
    prompt = find_demonstrations({"demonstrations": "own"}).relation_prompt(fact.relation, facts.text(fact, "question"))
    assert prompt is not None
    return prompt


def build(oracle: Oracle) -> list[dict[str, Any]]:
    """The records, with chains of all lengths in turn."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    facts = Facts(table, known_facts(oracle, Facts(table)))
    chosen = choose(facts, oracle)
    of_start: dict[str, list[Chain]] = {}
    for chain in chosen:
        of_start.setdefault(chain.old[0].relation, []).append(chain)
    turns = filter(None, itertools.chain.from_iterable(itertools.zip_longest(*of_start.values())))
    records = [record(facts, chain, number) for number, chain in enumerate(turns)]
    measured = measure(oracle, records)
    return [one | {"provenance": provenance(TABLE, unedited=m)} for one, m in zip(records, measured, strict=True)]


def record(facts: Facts, chain: Chain, number: int) -> dict[str, Any]:
    """A record of the original layout."""

    def hops(chain: Sequence[Fact]) -> list[dict[str, Any]]:
        return [
            {
                "question": facts.text(fact, "question"),
                "cloze": facts.text(fact, "cloze"),
                "answer": fact.object,
                "answer_alias": facts.accepted(fact.object)[1:],
            }
            for fact in chain
        ]

    edits = [chain.new[place] for place in chain.edited]
    return {
        "case_id": number + 1,
        "requested_rewrite": [
            {
                "prompt": facts.table["relations"][fact.relation]["cloze"],
                "relation_id": fact.relation,
                "target_new": {"str": fact.object},
                "target_true": {"str": facts.objects[fact.relation, fact.subject]},
                "subject": fact.subject,
                "question": facts.text(fact, "question"),
            }
            for fact in edits
        ],
        "questions": list(chain.wordings),
        "answer": chain.old[-1].object,
        "answer_alias": facts.accepted(chain.old[-1].object)[1:],
        "new_answer": chain.new[-1].object,
        "new_answer_alias": facts.accepted(chain.new[-1].object)[1:],
        "single_hops": hops(chain.old),
        "new_single_hops": hops(chain.new),
        "orig": {
            "triples": [[fact.subject, fact.relation, fact.object] for fact in chain.old],
            "new_triples": [[fact.subject, fact.relation, fact.object] for fact in chain.new],
            "edit_triples": [[fact.subject, fact.relation, fact.object] for fact in edits],
        },
    }


def measure(oracle: Oracle, records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The unedited model's answers to all unedited facts, and the NLL of both objects after the edit prompts."""
    shown = find_demonstrations({"demonstrations": "own"})
    prompts = [shown.relation_prompt(*key) or "" for one in records for key in unedited_hops(one)]
    answers = dict(zip(prompts, measure_answers(oracle, prompts, "chains"), strict=True))
    measured = []
    for one in records:
        hops = [(shown.relation_prompt(*key) or "", accepted) for key, accepted in unedited_hops(one).items()]
        measured.append(
            {
                "facts_known": [equals(answers[prompt], accepted) for prompt, accepted in hops],
                "nlls": [
                    {
                        name: rounded(oracle.get(cloze(edit), edit[f"target_{name}"]["str"]).nll)
                        for name in ("true", "new")
                    }
                    for edit in one["requested_rewrite"]
                ],
            }
        )
    return measured


def cloze(edit: Mapping[str, Any]) -> str:
    """The prompt of an edit."""
    return str(edit["prompt"]).replace("{}", edit["subject"])


def unedited_hops(one: Mapping[str, Any]) -> dict[tuple[str, str], list[str]]:
    """(relation, question) -> accepted answers, of the old chain and the unedited facts of the new one."""
    edited = {cloze(edit) for edit in one["requested_rewrite"]}
    found = {}
    for hops, triples in (("single_hops", "triples"), ("new_single_hops", "new_triples")):
        for hop, triple in zip(one[hops], one["orig"][triples], strict=True):
            if hops == "single_hops" or hop["cloze"] not in edited:
                found[triple[1], hop["question"]] = [hop["answer"], *hop["answer_alias"]]
    return found


def qualifies(measured: Mapping[str, Any]) -> bool:
    """Whether the unedited model knows all facts and prefers the old objects."""
    return all(measured["facts_known"]) and all(nll["true"] < nll["new"] for nll in measured["nlls"])


def check(oracle: Oracle, path: Path, num: int | None) -> int:
    """Measure shipped records again; returns the exit code."""
    records = spread(read_jsonl(path), num)
    problems = []
    for one, measured in zip(records, measure(oracle, records), strict=True):
        deviations = list(differences(one["provenance"]["unedited"], measured))
        if not qualifies(measured):
            deviations.append("the unedited model does not know the facts")
        problems += [f"record {one['case_id']}: {problem}" for problem in deviations]
    return report(problems, len(records), path)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns 1 if a check finds differences."""
    return check_or_build(arguments(__doc__ or "", OUTPUT, argv), check, build)


if __name__ == "__main__":
    sys.exit(main())
