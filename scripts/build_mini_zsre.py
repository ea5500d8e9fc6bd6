#!/usr/bin/env python3
"""Build or check the embedded samples of ZsRE and KnowEdit.

    python scripts/build_mini_zsre.py                       # rebuild (a few minutes on two cores)
    python scripts/build_mini_zsre.py --check               # measure every shipped record again, write nothing
    python scripts/build_mini_zsre.py --check --sample 3    # the same for three records

Three files with the same edits, in the schemas of the three layouts: lm_eval_tasks/zsre/data/mini.jsonl (question,
rephrased question, true and counterfactual answer, unrelated question), the same records with a portability question in
mini_portability.jsonl beside it, and lm_eval_tasks/knowedit/data/mini_zsre.jsonl.

Source. Plain facts in our own words: scripts/facts/zsre/*.json and scripts/facts/qaedit/locality.tsv. None of the
published records' text is used. The counterfactual answer of a fact is the true answer of the next fact of its relation
that qualifies. Every KnowEdit record has all three kinds of portability questions; published ones have one kind.

Selection. The unedited model (float32, greedy) must know the fact: its answer after WILD's question instruction, cut at
the first full stop or line break, contains the true answer, and after the bare question the true answer is likelier per
token than the counterfactual one. Relations alternate in the file, so that its first records cover all of them.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _mini_common import (
    FACTS,
    ROOT,
    Oracle,
    arguments,
    differences,
    mentions,
    provenance,
    read_jsonl,
    read_tsv,
    report,
    rounded,
    spread,
    write_jsonl,
)

from edit_hooks.answers import truncate
from lm_eval_tasks.protocols.wild import CONTEXTS

OUTPUT = ROOT / "lm_eval_tasks" / "zsre" / "data" / "mini.jsonl"
PORTABILITY = OUTPUT.with_name("mini_portability.jsonl")
KNOWEDIT = ROOT / "lm_eval_tasks" / "knowedit" / "data" / "mini_zsre.jsonl"
TABLES = FACTS / "zsre"
CONTEXT = CONTEXTS["qa_inst"]
MAX_NEW_TOKENS = 50
STOPS = (".", "\n")

Relation = Mapping[str, Any]
Fact = Mapping[str, str]


def build(oracle: Oracle) -> list[dict[str, Any]]:
    """The edits with all their questions, in file order; :func:`write` brings them into the layouts."""
    by_relation = []
    for table in sorted(TABLES.glob("*.json")):
        relation = json.loads(table.read_text(encoding="utf-8"))
        answers = measure_answers(oracle, [question(relation, fact) for fact in relation["facts"]], table.stem)
        known = [
            fact
            for fact, answer in zip(relation["facts"], answers, strict=True)
            if mentions(answer, fact["answer"]) and answer
        ]
        edits = [edit_of(relation, fact, new) for fact, new in itertools.pairwise([*known, *known[:1]])]
        measured = measure(oracle, edits, table.stem)
        kept = [
            edit | {"provenance": provenance(table, unedited=unedited)}
            for edit, unedited in zip(edits, measured, strict=True)
            if qualifies(unedited)
        ]
        print(f"{table.stem}: {len(kept)} of {len(relation['facts'])} facts are known", file=sys.stderr)
        by_relation.append(kept)
    unrelated = itertools.cycle(read_tsv(FACTS / "qaedit" / "locality.tsv"))
    turns = filter(None, itertools.chain.from_iterable(itertools.zip_longest(*by_relation)))
    return [edit | {"unrelated": next(unrelated)} for edit in turns]


def question(relation: Relation, fact: Fact) -> str:
    """The edited question of a fact."""
    return str(relation["question"].format(**fact))


def edit_of(relation: Relation, fact: Fact, new: Fact) -> dict[str, Any]:
    """The edit that gives a fact the answer of another one, and its questions with their answers after the edit."""
    if fact["answer"] == new["answer"]:
        raise ValueError(f"{fact['subject']!r} has no other answer; more facts of its relation must be known")
    words = {**fact, "target": new["answer"]}
    return {
        "subject": fact["subject"],
        "question": question(relation, fact),
        "rephrase": relation["rephrase"].format(**words),
        "true": fact["answer"],
        "target": new["answer"],
        "portability": {
            "Reasoning": (relation["reasoning"].format(**words), new["of_answer"]),
            "Logical_Generalization": (relation["logical_generalization"].format(**words), fact["subject"]),
            "Subject_Aliasing": (relation["subject_aliasing"].format(**words), new["answer"]),
        },
        "specificity": [(prompt.format(**words), fact["unchanged"]) for prompt in relation["relation_specificity"]],
    }


def measure_answers(oracle: Oracle, questions: Sequence[str], label: str) -> list[str]:
    """The unedited model's answers after the question instruction."""
    contexts = [CONTEXT.replace("{question}", one) for one in questions]
    texts = oracle.generate(contexts, STOPS, MAX_NEW_TOKENS, f"{label}: answers")
    return [truncate(text.lstrip(), STOPS).strip() for text in texts]


def measure(oracle: Oracle, edits: Sequence[Mapping[str, Any]], label: str) -> list[dict[str, Any]]:
    """The unedited model's answer, and the NLL of true and counterfactual answer after the bare question."""
    pairs = [(edit["question"], edit[answer]) for edit in edits for answer in ("true", "target")]
    oracle.score(pairs, f"{label}: true and counterfactual answers")
    answers = measure_answers(oracle, [edit["question"] for edit in edits], label)
    return [
        {
            "answer": answer,
            "answer_mentions_truth": mentions(answer, edit["true"]),
            "nll_true": rounded(oracle.get(edit["question"], edit["true"]).nll),
            "nll_target": rounded(oracle.get(edit["question"], edit["target"]).nll),
        }
        for edit, answer in zip(edits, answers, strict=True)
    ]


def qualifies(measured: Mapping[str, Any]) -> bool:
    """Whether the unedited model knows the fact."""
    return bool(measured["answer_mentions_truth"]) and measured["nll_true"] < measured["nll_target"]


# ------------------------------------------------------------------------ layouts


def mend_record(edit: Mapping[str, Any]) -> dict[str, Any]:
    """MEND's layout; the old model's answer is that of the demo model."""
    pred = edit["provenance"]["unedited"]["answer"]
    return {
        "subject": edit["subject"],
        "src": edit["question"],
        "pred": pred,
        "rephrase": edit["rephrase"],
        "alt": edit["target"],
        "answers": [edit["true"]],
        "loc": f"nq question: {edit['unrelated']['question']}",
        "loc_ans": edit["unrelated"]["answer"],
        "cond": f"{pred} >> {edit['target']} || {edit['question']}",
        "provenance": edit["provenance"],
    }


def portability_record(edit: Mapping[str, Any]) -> dict[str, Any]:
    """MEND's layout with the reasoning question."""
    asked, answer = edit["portability"]["Reasoning"]
    recalled = f"({edit['target']}, {answer})"
    return mend_record(edit) | {
        "portability": {"Recalled Relation": recalled, "New Question": asked, "New Answer": answer}
    }


def knowedit_record(edit: Mapping[str, Any]) -> dict[str, Any]:
    """KnowEdit's layout, with every kind of portability question."""
    mend = mend_record(edit)
    return {
        "subject": edit["subject"],
        "target_new": edit["target"],
        "prompt": edit["question"],
        "ground_truth": [edit["true"]],
        "rephrase_prompt": edit["rephrase"],
        "cond": mend["cond"],
        "locality": {
            "Relation_Specificity": [
                {"prompt": prompt, "ground_truth": [answer]} for prompt, answer in edit["specificity"]
            ]
        },
        "portability": {
            kind: [{"prompt": prompt, "ground_truth": answer}] for kind, (prompt, answer) in edit["portability"].items()
        },
        "provenance": edit["provenance"],
    }


# -------------------------------------------------------------------------- check


def check(oracle: Oracle, path: Path, num: int | None) -> int:
    """Measure shipped edits again, and compare the three files; returns the exit code."""
    every = read_jsonl(path)
    problems = list(file_differences(every))
    records = spread(every, num)
    edits = [{"question": r["src"], "true": r["answers"][0], "target": r["alt"]} for r in records]
    for record, measured in zip(records, measure(oracle, edits, "checking"), strict=True):
        deviations = list(differences(record["provenance"]["unedited"], measured))
        if not qualifies(measured):
            deviations.append("the unedited model does not know the fact")
        problems += [f"record {record['src']!r}: {problem}" for problem in deviations]
    return report(problems, len(records), path)


def file_differences(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Differences between the edits of the three files."""
    with_portability, knowedit = read_jsonl(PORTABILITY), read_jsonl(KNOWEDIT)
    if [{key: value for key, value in r.items() if key != "portability"} for r in with_portability] != list(records):
        yield f"{PORTABILITY.name}: other edits"
    if [(r["prompt"], r["target_new"]) for r in knowedit] != [(r["src"], r["alt"]) for r in records]:
        yield f"{KNOWEDIT.name}: other edits"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns 1 if a check finds differences."""
    options = arguments(__doc__ or "", OUTPUT, argv)
    oracle = Oracle(num_threads=options.threads)
    if options.check:
        return check(oracle, options.output, options.sample)
    edits = build(oracle)
    for path, layout in ((options.output, mend_record), (PORTABILITY, portability_record), (KNOWEDIT, knowedit_record)):
        write_jsonl(path, map(layout, edits))
        print(f"{path}: {len(edits)} records")
    return 0


if __name__ == "__main__":
    sys.exit(main())
