"""Shared parts of the builders of BAKE's embedded samples: the questions of a record, and their measurements."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from _mini_common import Oracle, differences, provenance, read_jsonl, report, rounded, spread

YES, NO = "yes", "no"


def fill(template: str, word: str) -> str:
    """Fill the slot of a template; braces in the word are kept."""
    before, after = template.split("{}")
    return before + word + after


def questions(record: dict[str, Any]) -> dict[str, list[tuple[str, str, str]]]:
    """Questions to the model about a record: kind -> (prompt, target_true, target_new).

    Neighborhood prompts of BAKE-concept have answers of their own; BAKE-J has no reverse question.
    """
    rewrite, judge = record["requested_rewrite"], record["reverse_judge"]
    true, new = rewrite["target_true"]["str"], rewrite["target_new"]["str"]
    neighbors = record["neighborhood_prompts"]
    answers = record.get("neighborhood_targets", [true] * len(neighbors))
    reverse = [record[name] for name in ("reverse_qa",) if name in record]
    return {
        "forward": [(fill(rewrite["prompt"], rewrite["subject"]), true, new)],
        "paraphrases": [(prompt, true, new) for prompt in record["paraphrase_prompts"]],
        "neighbors": [(prompt, answer, new) for prompt, answer in zip(neighbors, answers, strict=True)],
        "reverse_qa": [(qa["prompt"], qa["target_true"]["str"], qa["target_new"]["str"]) for qa in reverse],
        "reverse_judge": [(judge["prompt"], judge["target_true"]["str"], judge["target_new"]["str"])],
    }


def answer_pairs(records: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """(prompt, target) of both answers to all questions about the records."""
    rows = [row for record in records for rows in questions(record).values() for row in rows]
    return [(prompt, target) for prompt, *targets in rows for target in targets]


def measure(oracle: Oracle, record: dict[str, Any]) -> dict[str, Any]:
    """Measurements of the unedited model: mean NLL per token of both answers, and its first predicted token."""
    measured: dict[str, Any] = {}
    for kind, rows in questions(record).items():
        outcomes = []
        for prompt, true, new in rows:
            score_true, score_new = oracle.get(prompt, true), oracle.get(prompt, new)
            outcomes.append(
                {
                    "nll_true": rounded(score_true.nll),
                    "nll_new": rounded(score_new.nll),
                    "true_is_greedy": score_true.is_greedy,
                    "first_token": score_true.first_argmax,
                }
            )
        if kind in ("paraphrases", "neighbors"):
            measured[kind] = outcomes
        elif outcomes:
            (measured[kind],) = outcomes
    return measured


def prefers_true(outcome: dict[str, Any]) -> bool:
    """Whether the unedited model gives the old answer a lower NLL than the new one."""
    return outcome["nll_true"] < outcome["nll_new"]


def mentions(text: str, words: str) -> bool:
    """True if the words occur in the text as whole words."""
    return re.search(rf"(?<!\w){re.escape(words)}(?!\w)", text) is not None


def qualify(
    oracle: Oracle,
    candidates: Sequence[dict[str, Any]],
    *,
    name: str,
    facts: Path,
    num: int,
    drop_neighbors: Callable[[dict[str, Any]], None],
    disqualification: Callable[[dict[str, Any]], str | None],
) -> list[dict[str, Any]]:
    """The first ``num`` candidates of a relation that qualify, each with its measurements in ``provenance``.

    Args:
        name: the relation.
        facts: the table of its facts.
        drop_neighbors: drops locality prompts of a record before it is measured.
        disqualification: measurements -> reason why a record does not qualify, or ``None``.
    """
    oracle.score(answer_pairs(candidates), f"{name}: cases")
    passed = []
    for record in candidates:
        drop_neighbors(record)
        measured = measure(oracle, record)
        if reason := disqualification(measured):
            print(f"  dropped {record['requested_rewrite']['subject']!r}: {reason}", file=sys.stderr)
        else:
            passed.append(record | {"provenance": provenance(facts, unedited=measured)})
    print(f"{name}: {min(len(passed), num)} of {len(candidates)} cases qualify", file=sys.stderr)
    return passed[:num]


def in_turns(groups: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One record of every group, then the next of every group, numbered, so that any first records cover all groups."""
    turns = itertools.chain.from_iterable(itertools.zip_longest(*groups))
    return [record | {"case_id": number} for number, record in enumerate(filter(None, turns))]


def check_records(
    oracle: Oracle, path: Path, num: int | None, disqualification: Callable[[dict[str, Any]], str | None]
) -> int:
    """Measure shipped records again; returns the exit code.

    Args:
        num: check only this many records, evenly spread.
        disqualification: measurements -> reason why a record does not qualify, or ``None``.
    """
    records = spread(read_jsonl(path), num)
    oracle.score(answer_pairs(records), "checking")
    problems = []
    for record in records:
        measured = measure(oracle, record)
        deviations = list(differences(record["provenance"]["unedited"], measured))
        if reason := disqualification(measured):
            deviations.append(reason)
        problems += [f"case {record['case_id']}: {problem}" for problem in deviations]
    return report(problems, len(records), path)
