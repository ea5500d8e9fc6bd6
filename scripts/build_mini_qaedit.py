#!/usr/bin/env python3
"""Build or check the embedded sample of QAEdit: lm_eval_tasks/qaedit/data/mini.jsonl.

    python scripts/build_mini_qaedit.py                       # rebuild (a few minutes on two cores)
    python scripts/build_mini_qaedit.py --check               # answer every shipped question again, write nothing
    python scripts/build_mini_qaedit.py --check --sample 3    # the same for three records

Records. A plain question that the unedited demo model answers incorrectly, with its true answer as the target of the
edit (a correction), the subject, a rephrased question with the same answer, and an unrelated question for locality.

Source. Common knowledge in our own words: scripts/facts/qaedit/questions.tsv and locality.tsv. The schema is that of
the published benchmark plus `category` and `provenance`; none of its text is used.

Selection. The unedited model (float32, greedy) answers questions in WILD's format: instruction, blank line, "Q: ...",
"A:", at most 50 new tokens, cut at the first full stop or line break. A question qualifies if that answer differs from
the true one after SQuAD's normalization, the benchmark's own condition, and if neither text contains the other: a
correct answer inside a sentence, or a part of it, needs no correction. The answers to the rephrased question and to the
locality question are measured and stored, but are no condition. Categories alternate in the file, so that its first
records cover all of them.
"""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _mini_common import (
    FACTS,
    ROOT,
    Oracle,
    arguments,
    check_or_build,
    mentions,
    provenance,
    read_jsonl,
    read_tsv,
    report,
    rounded,
    spread,
)
from _mini_common import differences as provenance_differences

from edit_hooks.answers import truncate
from judges.match import exact_match
from lm_eval_tasks.protocols.wild import CONTEXTS

OUTPUT = ROOT / "lm_eval_tasks" / "qaedit" / "data" / "mini.jsonl"
TABLES = FACTS / "qaedit"
QUESTIONS_PER_CATEGORY = 8
CONTEXT = CONTEXTS["qa_inst"]
MAX_NEW_TOKENS = 50
STOPS = (".", "\n")  # decoding drops the end-of-text token and all text after it


def candidates() -> list[dict[str, Any]]:
    """One record per row of the table, with locality questions in the order of their table."""
    unrelated = itertools.cycle(read_tsv(TABLES / "locality.tsv"))
    records = []
    for row, locality in zip(read_tsv(TABLES / "questions.tsv"), unrelated, strict=False):
        records.append(
            {
                "id": -1,  # its place in the file, known at the end
                "source": "mini",
                "category": row["category"],
                "prompt": row["question"],
                "target": row["answer"],
                "subject": row["subject"],
                "rephrase": row["rephrase"],
                "locality": [{"loc": locality["question"], "loc_ans": locality["answer"]}],
            }
        )
    return records


def measure(oracle: Oracle, records: Sequence[dict[str, Any]], label: str) -> list[dict[str, Any]]:
    """The unedited model's answers to each record's three questions, and the NLL of the true answer to the first."""
    questions = [q for r in records for q in (r["prompt"], r["rephrase"], r["locality"][0]["loc"])]
    contexts = {question: CONTEXT.replace("{question}", question) for question in questions}
    raw = oracle.generate(list(contexts.values()), STOPS, MAX_NEW_TOKENS, f"{label}: answers")
    answers = dict(zip(contexts, (truncate(text, STOPS).strip() for text in raw), strict=True))
    oracle.score([(contexts[r["prompt"]], r["target"]) for r in records], f"{label}: true answers")
    return [
        {
            "answer": answers[record["prompt"]],
            "answer_is_true": exact_match(answers[record["prompt"]], record["target"]),
            "answer_mentions_truth": mentions(answers[record["prompt"]], record["target"]),
            "nll_true": rounded(oracle.get(contexts[record["prompt"]], record["target"]).nll),
            "rephrase_answer": answers[record["rephrase"]],
            "rephrase_is_true": exact_match(answers[record["rephrase"]], record["target"]),
            "locality_answer": answers[record["locality"][0]["loc"]],
        }
        for record in records
    ]


def is_answered(measured: dict[str, Any]) -> bool:
    """Whether the unedited model gave the true answer, alone or inside other words."""
    return measured["answer_is_true"] or measured["answer_mentions_truth"]


def build(oracle: Oracle) -> list[dict[str, Any]]:
    """All records of the sample, in file order."""
    records = candidates()
    table = TABLES / "questions.tsv"
    qualified: dict[str, list[dict[str, Any]]] = defaultdict(list)
    num_known: dict[str, int] = defaultdict(int)
    for record, measured in zip(records, measure(oracle, records, "candidates"), strict=True):
        if is_answered(measured):
            num_known[record["category"]] += 1
        else:
            qualified[record["category"]].append(record | {"provenance": provenance(table, unedited=measured)})
    for category, passed in qualified.items():
        print(f"{category}: {len(passed)} answered incorrectly, {num_known[category]} correctly", file=sys.stderr)
    turns = itertools.zip_longest(*(passed[:QUESTIONS_PER_CATEGORY] for passed in qualified.values()))
    return [record | {"id": at} for at, record in enumerate(filter(None, itertools.chain.from_iterable(turns)))]


def check(oracle: Oracle, path: Path, num: int | None) -> int:
    """Answer shipped questions again; returns the exit code."""
    records = spread(read_jsonl(path), num)
    problems = []
    for record, measured in zip(records, measure(oracle, records, "checking"), strict=True):
        stored = record["provenance"]["unedited"]
        if stored["answer"] != measured["answer"]:
            print(f"record {record['id']}: note: answered {measured['answer']!r}, in the file {stored['answer']!r}")
        deviations = list(provenance_differences(stored, measured))
        if is_answered(measured):
            deviations.append("the unedited model answers this question")
        problems += [f"record {record['id']}: {problem}" for problem in deviations]
    return report(problems, len(records), path)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns 1 if a check finds differences."""
    return check_or_build(arguments(__doc__ or "", OUTPUT, argv), check, build)


if __name__ == "__main__":
    sys.exit(main())
