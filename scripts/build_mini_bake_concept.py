#!/usr/bin/env python3
"""Build or check the embedded sample of BAKE-concept: mini_concept.jsonl in lm_eval_tasks/bake/data.

    python scripts/build_mini_bake_concept.py                      # rebuild (a minute on two cores)
    python scripts/build_mini_bake_concept.py --check              # measure every shipped record again, write nothing
    python scripts/build_mini_bake_concept.py --check --sample 3   # the same for three records

Records. A concept takes the definition of another one: of the next superclass (inter), or of the next concept of its
own superclass (intra). One paraphrase, one locality prompt with its own answer, and the judge question. The conversion
is that of `lm-edit build-bake-concept`.

Source. Common concepts with definitions in our own words (scripts/facts/bake_concept/concepts.tsv), and plain facts for
locality (locality.tsv). No text of ConceptEdit is used.

Selection. A case qualifies if the unedited demo model (float32) prefers the old definition to the new one on the edit
prompt, and the locality answer to the new definition. The measurements are in `provenance`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _bake_records import answer_pairs, check_records, in_turns, measure, prefers_true
from _mini_common import FACTS, ROOT, Oracle, arguments, check_or_build, provenance, read_tsv

from lm_eval_tasks.bake.conversion import MODULES, ReleasedPrompts, convert

OUTPUT = ROOT / "lm_eval_tasks" / "bake" / "data" / "mini_concept.jsonl"
CONCEPTS, LOCALITY = FACTS / "bake_concept" / "concepts.tsv", FACTS / "bake_concept" / "locality.tsv"
EDIT_PROMPT, PARAPHRASE = "The word {} means", "A simple definition of the word {} is:"
CASES_PER_MODULE = 12


def load_concepts() -> list[dict[str, Any]]:
    """The concepts in the layout of ConceptEdit's concept_data.json."""
    rows = read_tsv(CONCEPTS)
    classes = list(dict.fromkeys(row["superclass"] for row in rows))
    members = {name: [row for row in rows if row["superclass"] == name] for name in classes}
    concepts = []
    for row in rows:
        place = members[row["superclass"]].index(row)
        own, following = (members[classes[(classes.index(row["superclass"]) + step) % len(classes)]] for step in (0, 1))
        concepts.append(
            {
                "concept_name": row["concept"],
                "concept_def": row["definition"],
                "superclass": row["superclass"],
                "module_inter": {"replace_def": following[place % len(following)]["definition"]},
                "module_intra": {"replace_def": own[(place + 1) % len(own)]["definition"]},
            }
        )
    return concepts


def candidates() -> list[dict[str, Any]]:
    """Records of all concepts in both modules, each with a locality prompt."""
    concepts, facts = load_concepts(), read_tsv(LOCALITY)
    released = {}
    for number, concept in enumerate(concepts):
        name = concept["concept_name"]
        for turn, module in enumerate(MODULES):
            fact = facts[(2 * number + turn) % len(facts)]
            released[name, concept[f"module_{module}"]["replace_def"]] = ReleasedPrompts(
                EDIT_PROMPT.replace("{}", name), PARAPHRASE.replace("{}", name), fact["prompt"], fact["answer"]
            )
    return convert(((concept["concept_name"], concept) for concept in concepts), released).records


def disqualification(measured: dict[str, Any]) -> str | None:
    """The reason why a record does not qualify, or ``None``."""
    if not prefers_true(measured["forward"]):
        return "the unedited model prefers the new definition on the edit prompt"
    if not all(map(prefers_true, measured["neighbors"])):
        return "the unedited model prefers the new definition on the locality prompt"
    return None


def build(oracle: Oracle) -> list[dict[str, Any]]:
    """All records in file order; the modules alternate."""
    records = candidates()
    oracle.score(answer_pairs(records), "cases")
    qualified: dict[str, list[dict[str, Any]]] = {module: [] for module in MODULES}
    for record in records:
        measured = measure(oracle, record)
        if reason := disqualification(measured):
            print(f"dropped {record['requested_rewrite']['subject']!r}: {reason}", file=sys.stderr)
        else:
            qualified[record["module"]].append(record | {"provenance": provenance(CONCEPTS, unedited=measured)})

    def old_definition(record: dict[str, Any]) -> float:
        nll: float = record["provenance"]["unedited"]["forward"]["nll_true"]
        return nll

    best = [sorted(group, key=old_definition)[:CASES_PER_MODULE] for group in qualified.values()]
    print(f"{[len(group) for group in best]} of {len(records)} cases", file=sys.stderr)
    return in_turns(best)


def check(oracle: Oracle, path: Path, num: int | None) -> int:
    """Measure shipped records again; returns the exit code."""
    return check_records(oracle, path, num, disqualification)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns 1 if a check finds differences."""
    return check_or_build(arguments(__doc__ or "", OUTPUT, argv), check, build)


if __name__ == "__main__":
    sys.exit(main())
