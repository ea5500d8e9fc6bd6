#!/usr/bin/env python3
"""Build or check the embedded samples of CounterFact in lm_eval_tasks/counterfact/data.

    python scripts/build_mini_counterfact.py            # rebuild; needs no model
    python scripts/build_mini_counterfact.py --check    # compare the files with a rebuild; exit code 1 if they differ

Records. The edits, paraphrases and neighborhood prompts are those of BAKE's sample (scripts/build_mini_bake.py), which
the unedited demo model answers; its measurements are in `provenance`. Attribute prompts state other facts whose object
is the new one (scripts/facts/bake/neighbors.tsv). Generation prompts and reference texts are in our own words, in
scripts/facts/counterfact, one file per relation; relations without such a file are left out.

Files: `mini.jsonl` (nested layout), `mini_flat.jsonl` (flat layout: the first paraphrase and the first neighborhood
prompt), `attribute_snippets.json` (the reference texts in the layout of the published ones). The ids of relations and
objects are names, so that none is mistaken for a published id.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _mini_common import FACTS, ROOT, read_jsonl
from build_mini_bake import fill, load_neighbors

BAKE = ROOT / "lm_eval_tasks" / "bake" / "data" / "mini.jsonl"
OUTPUT = ROOT / "lm_eval_tasks" / "counterfact" / "data"
TABLES = FACTS / "counterfact"
MEASURED = ("forward", "paraphrases", "neighbors")


def load_tables() -> dict[str, dict[str, Any]]:
    """Relation -> its generation prompts and its reference texts by object."""
    tables = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(TABLES.glob("*.json"))]
    return {table["relation"]: table for table in tables}


def nested_record(
    number: int, bake: Mapping[str, Any], table: Mapping[str, Any], neighbors: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """A record of the nested layout from one of BAKE's."""
    rewrite = bake["requested_rewrite"]
    new, true = rewrite["target_new"]["str"], rewrite["target_true"]["str"]
    measured = bake["provenance"]["unedited"]
    origin = {
        "facts": f"scripts/facts/counterfact/{table['relation']}.json",
        "bake_case_id": bake["case_id"],
        "model": bake["provenance"]["model"],
        "unedited": {kind: measured[kind] for kind in MEASURED},
    }
    return {
        "case_id": number,
        "pararel_idx": number,
        "requested_rewrite": {
            "prompt": rewrite["prompt"],
            "relation_id": rewrite["relation_id"],
            "target_new": {"str": new, "id": object_id(new)},
            "target_true": {"str": true, "id": object_id(true)},
            "subject": rewrite["subject"],
        },
        "paraphrase_prompts": bake["paraphrase_prompts"],
        "neighborhood_prompts": bake["neighborhood_prompts"],
        "attribute_prompts": neighbors.get(new, []),
        "generation_prompts": [fill(prompt, rewrite["subject"]) for prompt in table["generation"]],
        "provenance": origin,
    }


def flat_record(nested: Mapping[str, Any]) -> dict[str, Any]:
    """The record of the flat layout with the same edit."""
    rewrite = nested["requested_rewrite"]
    return {
        "case_id": nested["case_id"],
        "prompt": fill(rewrite["prompt"], rewrite["subject"]),
        "target_new": rewrite["target_new"]["str"],
        "subject": rewrite["subject"],
        "ground_truth": rewrite["target_true"]["str"],
        "rephrase_prompt": nested["paraphrase_prompts"][0],
        "locality_prompt": nested["neighborhood_prompts"][0],
        "locality_ground_truth": rewrite["target_true"]["str"],
        "provenance": {"facts": nested["provenance"]["facts"]},
    }


def object_id(name: str) -> str:
    """The id of an object: its name."""
    return name.lower().replace(" ", "_")


def build() -> dict[str, str]:
    """File name -> content."""
    tables, neighbors = load_tables(), load_neighbors()
    sources = [record for record in read_jsonl(BAKE) if record["relation"] in tables]
    nested = [
        nested_record(number, record, tables[record["relation"]], neighbors) for number, record in enumerate(sources)
    ]
    snippets = [
        {"relation_id": relation, "target_id": object_id(name), "samples": [{"text": text} for text in texts]}
        for relation, table in tables.items()
        for name, texts in table["references"].items()
    ]
    return {
        "mini.jsonl": _lines(nested),
        "mini_flat.jsonl": _lines([flat_record(record) for record in nested]),
        "attribute_snippets.json": "[\n"
        + ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in snippets)
        + "\n]\n",
    }


def _lines(records: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the files; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder to write or check (default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a file is out of date")
    options = parser.parse_args(arguments)
    stale = []
    for name, content in build().items():
        path = options.output / name
        if options.check:
            stale += [name] if not path.is_file() or path.read_text(encoding="utf-8") != content else []
        else:
            path.write_text(content, encoding="utf-8")
    print(f"{options.output}: {'out of date: ' + ', '.join(stale) if stale else 'up to date'}")
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
