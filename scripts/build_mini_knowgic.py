#!/usr/bin/env python3
"""Build or check the embedded sample of KnowGIC, lm_eval_tasks/knowgic/data/mini.jsonl, from scripts/facts/knowgic.

    python scripts/build_mini_knowgic.py            # rebuild: a few minutes on two cores
    python scripts/build_mini_knowgic.py --check    # measure the shipped records again; --sample N for some of them

`graph.json` holds facts in our own words, with a statement and a question for every relation, and the edits. Facts that
the unedited demo model does not know are left out, as ThinkEdit leaves out facts that a model does not recognize: a
model knows a fact if the object is its argmax, or has a probability of 0.1 per token or more, after the question or
after the statement. The chains are those of `lm-edit build-knowgic` over the rest. An edit needs chains of three
lengths.

Each record has the NLL per token of all its facts in `provenance`. The other names of the answers are written beside
the records, `attributes_with_aliases.json`.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _mini_common import (
    FACTS,
    ROOT,
    Oracle,
    Scored,
    arguments,
    check_or_build,
    differences,
    provenance,
    read_jsonl,
    report,
    rounded,
    spread,
)

from edit_hooks.prompt_context import QA_INSTRUCTION
from lm_eval_tasks.knowgic.graph import build_record, read_graph

GRAPH = FACTS / "knowgic" / "graph.json"
OUTPUT = ROOT / "lm_eval_tasks" / "knowgic" / "data" / "mini.jsonl"
ALIASES = OUTPUT.with_name("attributes_with_aliases.json")
LEAST_PROBABILITY = 0.1  # per token
LEAST_LENGTHS = 3  # of the chains of an edit

# A fact as its record has it: question, statement, object
Wording = tuple[str, str, str]


def wordings(record: dict[str, Any]) -> list[Wording]:
    """The distinct facts of a record, in order."""
    lists = [*record["chains"], record["broader_context"]]
    return list(
        dict.fromkeys(
            (question, prompt.replace("{}", subject), answer)
            for one in lists
            for question, prompt, subject, answer in zip(
                one["questions"], one["prompts"], one["subjects"], one["answers"], strict=True
            )
        )
    )


def pairs(facts: Iterable[Wording]) -> list[tuple[str, str]]:
    """Prompt and target of both wordings of some facts."""
    return [
        (prompt, answer)
        for question, statement, answer in facts
        for prompt in (QA_INSTRUCTION.replace("{question}", question), statement)
    ]


def measure(oracle: Oracle, facts: Sequence[Wording]) -> list[list[float]]:
    """NLL per token of every fact's object, after its question and after its statement."""
    scores = [oracle.get(*pair) for pair in pairs(facts)]
    return [[rounded(score.nll) for score in scores[start : start + 2]] for start in range(0, len(scores), 2)]


def is_known(scores: Sequence[Scored]) -> bool:
    """Whether the model has the object in one of the wordings."""
    return any(score.is_greedy or math.exp(-score.nll) >= LEAST_PROBABILITY for score in scores)


def build(oracle: Oracle) -> list[dict[str, Any]]:
    """All records in the order of the edits; also writes the other names."""
    graph = read_graph(GRAPH)
    facts = {
        fact: (
            graph.relations[fact.relation].question.replace("{}", fact.subject),
            graph.relations[fact.relation].prompt.replace("{}", fact.subject),
            fact.object,
        )
        for fact in graph.facts
    }
    oracle.score(pairs(facts.values()), "facts")
    known = [fact for fact, wording in facts.items() if is_known([oracle.get(*pair) for pair in pairs([wording])])]
    print(f"{len(known)} of {len(facts)} facts are known", file=sys.stderr)
    records: list[dict[str, Any]] = []
    for edit in graph.edits:
        record = build_record(replace(graph, facts=known), edit, len(records))
        if edit.fact not in known or len({len(chain["answers"]) for chain in record["chains"]}) < LEAST_LENGTHS:
            print(f"  dropped {edit.fact}: unknown, or chains of too few lengths", file=sys.stderr)
            continue
        measured = measure(oracle, wordings(record))
        records.append(record | {"provenance": provenance(GRAPH, unedited=measured)})
    aliases = {name: {"answer_alias": list(names)} for name, names in graph.aliases.items()}
    ALIASES.write_text(json.dumps(aliases, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    return records


def check(oracle: Oracle, path: Path, num: int | None) -> int:
    """Measure shipped records again; returns the exit code."""
    records = spread(read_jsonl(path), num)
    oracle.score(pairs({wording for record in records for wording in wordings(record)}), "facts")
    problems = [
        f"record {record['case_id']}: {difference}"
        for record in records
        for difference in differences(
            record["provenance"], provenance(GRAPH, unedited=measure(oracle, wordings(record)))
        )
    ]
    return report(problems, len(records), path)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns 1 if a check finds differences."""
    return check_or_build(arguments(__doc__ or "", OUTPUT, argv), check, build)


if __name__ == "__main__":
    sys.exit(main())
