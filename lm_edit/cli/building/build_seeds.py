"""``lm-edit build-seeds``: seed triplets for ``grow-graph``, drawn from MQuAKE's edits."""

from __future__ import annotations

import argparse
from shlex import quote
from typing import TYPE_CHECKING, Any

from edit_hooks.utils.settings.numbers import SEED
from edit_hooks.utils.storage.json_io import json_text
from lm_edit.cli.command import (
    DATA_HELP,
    Verb,
    add_overwrite_argument,
    check_output_files,
    say,
    whole,
    write_output,
)

if TYPE_CHECKING:
    from lm_edit.builders.knowgic.seed_triplets import SeedDraw


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", default="mini", help=f"{DATA_HELP}, of MQuAKE (default mini)")
    parser.add_argument(
        "--relations",
        nargs="+",
        metavar="NAME",
        help="relations by Wikidata id or label; default: those of ThinkEdit's ten question templates that the records "
        "have",
    )
    parser.add_argument(
        "--per-relation", type=whole(), default=2, metavar="N", help="seeds of every relation (default: %(default)s)"
    )
    parser.add_argument("--seed", type=whole(SEED), default=0, help="seed of the draw (default: %(default)s)")
    parser.add_argument("-o", "--out", required=True, help="file of seeds to write, for lm-edit grow-graph")
    add_overwrite_argument(parser)


def _run(args: argparse.Namespace) -> int:
    from lm_edit.builders.knowgic.seed_triplets import draw_seeds
    from lm_edit.builders.knowgic.seeds import parse_seeds
    from lm_eval_tasks.common.records.benchmark import find_benchmark

    check_output_files(args, "out", inputs=[args.data])
    loaded = find_benchmark("mquake").load({"data": args.data})
    drawn = draw_seeds(loaded.records, args.per_relation, args.relations, args.seed)
    content = drawn.content() | {"provenance": _provenance(args, drawn, loaded.source)}
    parse_seeds(content, "the drawn seeds")
    write_output(args.out, json_text(content, indent=1) + "\n")
    _report(drawn, args.per_relation)
    say(f"use it: lm-edit grow-graph {quote(str(args.out))} --writer hf:MODEL --out graph.json")
    return 0


def _provenance(args: argparse.Namespace, drawn: SeedDraw, source: dict[str, Any]) -> dict[str, Any]:
    named = ("data", "file", "sha256", "commit", "revision", "url")
    return {
        "records": {name: source[name] for name in named if name in source},
        "per_relation": args.per_relation,
        "seed": args.seed,
        "source_ids": [one.source_id for one in drawn.candidates],
    }


def _report(drawn: SeedDraw, per_relation: int) -> None:
    for name, available in drawn.available.items():
        taken = sum(one.edit.fact.relation == name for one in drawn.candidates)
        lacking = f", {per_relation} wanted" if taken < per_relation else ""
        say(f"{name}: {taken} of {available} edits{lacking}")
    if drawn.absent:
        say(f"relations of ThinkEdit without an edit: {', '.join(drawn.absent)}")
    for reason, count in drawn.left_out.most_common():
        say(f"left out, {reason}: {count}")
    say(f"seeds: {len(drawn.candidates)}, of {len(drawn.relations)} relations")


VERBS: dict[str, Verb] = {
    "build-seeds": Verb("draw seed triplets for grow-graph from MQuAKE's edits", _add_arguments, _run),
}
