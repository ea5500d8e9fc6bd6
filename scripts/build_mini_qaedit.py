#!/usr/bin/env python3
"""Build or check the embedded sample of QAEdit: lm_eval_tasks/qaedit/data/mini.jsonl.

    python scripts/build_mini_qaedit.py                       # build again (a few minutes on two cores)
    python scripts/build_mini_qaedit.py --check               # ask every shipped question again, write nothing
    python scripts/build_mini_qaedit.py --check --sample 3    # the same for three records

What a record is. A plain question that the unedited demo model answers wrongly, with its true answer as the target of
the edit (a correction), the subject marked by name, a rephrased question with the same answer, and an unrelated
question for locality.

Where it comes from. Common knowledge in our own words: scripts/facts/qaedit/questions.tsv and locality.tsv. No text of
the published benchmark is used; its schema is, with `category` and `provenance` added.

What is kept. Questions are put to the unedited model (float32, greedy) as WILD does: instruction, blank line,
"Q: ...", "A:", at most 50 new tokens, cut at the first full stop or line break. A question stays if that answer does
not equal the true one after SQuAD's normalization, which is the benchmark's own condition, and if neither text contains
the other: a right answer in a sentence of its own, or a part of it, is no mistake to correct. Whether the rephrased
question is answered, and what the locality question gets, is measured and stored as well, but decides nothing.
Categories take turns in the file, so that its first records already cover all of them.
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
    provenance,
    read_jsonl,
    read_tsv,
    report,
    rounded,
    spread,
    write_jsonl,
)
from _mini_common import differences as provenance_differences

from edit_hooks.answers import truncate
from judges.match import exact_match, normalize
from lm_eval_tasks.protocols.wild import CONTEXTS

OUTPUT = ROOT / "lm_eval_tasks" / "qaedit" / "data" / "mini.jsonl"
TABLES = FACTS / "qaedit"
QUESTIONS_PER_CATEGORY = 8
CONTEXT = CONTEXTS["qa_inst"]
MAX_NEW_TOKENS = 50
STOPS = (".", "\n")  # the end-of-text token is dropped in decoding, with all that follows it


def candidates() -> list[dict[str, Any]]:
    """One record per row of the table, in its order. Locality questions are dealt out in the order of their table."""
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
    asked = {q: "" for r in records for q in (r["prompt"], r["rephrase"], r["locality"][0]["loc"])}
    contexts = {question: CONTEXT.replace("{question}", question) for question in asked}
    raw = oracle.generate(list(contexts.values()), STOPS, MAX_NEW_TOKENS, f"{label}: answers")
    asked.update(zip(contexts, (truncate(text, STOPS).strip() for text in raw), strict=True))
    oracle.score([(contexts[r["prompt"]], r["target"]) for r in records], f"{label}: true answers")
    return [
        {
            "answer": asked[record["prompt"]],
            "answer_is_true": exact_match(asked[record["prompt"]], record["target"]),
            "answer_mentions_truth": mentions(asked[record["prompt"]], record["target"]),
            "nll_true": rounded(oracle.get(contexts[record["prompt"]], record["target"]).nll),
            "rephrase_answer": asked[record["rephrase"]],
            "rephrase_is_true": exact_match(asked[record["rephrase"]], record["target"]),
            "locality_answer": asked[record["locality"][0]["loc"]],
        }
        for record in records
    ]


def mentions(answer: str, target: str) -> bool:
    """True if the answer holds the target, also within a word ("180 degrees", "Incas"), or is a part ("Gutenberg")."""
    said, true = normalize(answer), normalize(target)
    return true in said or (bool(said) and set(said.split()) <= set(true.split()))


def is_answered(measured: dict[str, Any]) -> bool:
    """The unedited model gave the true answer, alone or in other words around it."""
    return measured["answer_is_true"] or measured["answer_mentions_truth"]


def build(oracle: Oracle) -> list[dict[str, Any]]:
    """All records of the sample, in file order."""
    records = candidates()
    table = TABLES / "questions.tsv"
    kept: dict[str, list[dict[str, Any]]] = defaultdict(list)
    num_known: dict[str, int] = defaultdict(int)
    for record, measured in zip(records, measure(oracle, records, "candidates"), strict=True):
        if is_answered(measured):
            num_known[record["category"]] += 1
        else:
            kept[record["category"]].append(record | {"provenance": provenance(table, unedited=measured)})
    for category, passed in kept.items():
        print(f"{category}: {len(passed)} answered wrongly, {num_known[category]} rightly", file=sys.stderr)
    turns = itertools.zip_longest(*(passed[:QUESTIONS_PER_CATEGORY] for passed in kept.values()))
    return [record | {"id": at} for at, record in enumerate(filter(None, itertools.chain.from_iterable(turns)))]


def check(oracle: Oracle, path: Path, num: int | None) -> int:
    """Ask shipped questions again; the exit status."""
    records = spread(read_jsonl(path), num)
    problems = []
    for record, measured in zip(records, measure(oracle, records, "checking"), strict=True):
        stored = record["provenance"]["unedited"]
        if stored["answer"] != measured["answer"]:
            print(f"record {record['id']}: note: answered {measured['answer']!r}, in the file {stored['answer']!r}")
        found = list(provenance_differences(stored, measured))
        if is_answered(measured):
            found.append("the unedited model answers this question")
        problems += [f"record {record['id']}: {problem}" for problem in found]
    return report(problems, len(records), path)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; the exit status is 1 when a check finds differences."""
    options = arguments(__doc__ or "", OUTPUT, argv)
    oracle = Oracle(num_threads=options.threads)
    if options.check:
        return check(oracle, options.output, options.sample)
    records = build(oracle)
    write_jsonl(options.output, records)
    print(f"{options.output}: {len(records)} records")
    return 0


if __name__ == "__main__":
    sys.exit(main())
