"""``lm-edit build-bake``: records of BAKE-Q&J and BAKE-J from facts and templates."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from edit_hooks.utils.numbers import SEED
from lm_edit.cli.command import (
    Verb,
    add_model_arguments,
    add_overwrite_argument,
    check_output_files,
    model_options,
    say,
    whole,
    write_output,
)

if TYPE_CHECKING:
    from lm_eval_tasks.bake.building import Built

MAX_NAMED = 5  # facts that are named for one reason
UNKNOWN = "the model does not prefer the original answer to the desired one"
UNSCORED = "the model cannot score the reverse question: too long, or without a token"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "facts", help='JSON with "relations" (name -> prompts, reverse, judge) and "facts" (subject, relation, object)'
    )
    parser.add_argument(
        "--form", choices=("qa", "judge"), default="qa", help="qa: BAKE-Q&J (default); judge: BAKE-J, no reverse prompt"
    )
    parser.add_argument(
        "--filter",
        choices=("prob", "argmax", "none"),
        default="prob",
        help="keep an edit if the model gives the original answer of the reverse question and not the desired one: by "
        "likelihood per token (default), also as its argmax, or keep all and load no model",
    )
    parser.add_argument(
        "--relations", nargs="+", metavar="NAME", help="relations to edit; the facts of the others are locality prompts"
    )
    parser.add_argument("--per-relation", type=whole(), metavar="N", help="N facts of every relation; default: all")
    parser.add_argument("--paraphrases", type=whole(), default=2, help="paraphrases of a record (default: %(default)s)")
    parser.add_argument(
        "--neighbors", type=whole(), default=10, help="largest number of locality prompts (default: %(default)s)"
    )
    parser.add_argument("--seed", type=whole(SEED), default=0, help="seed of everything that is drawn (default 0)")
    parser.add_argument("--out", required=True, help="file to write, as in BAKE_qa.json; for data=/path")
    add_model_arguments(parser)
    add_overwrite_argument(parser)


def _run(args: argparse.Namespace) -> int:
    from lm_eval_tasks.bake.building import build_records, read_fact_table

    check_output_files(args, "out", inputs=[args.facts])
    table = read_fact_table(args.facts)
    built = build_records(
        table,
        args.form,
        num_paraphrases=args.paraphrases,
        max_neighbors=args.neighbors,
        relations=args.relations,
        per_relation=args.per_relation,
        seed=args.seed,
    )
    if args.filter != "none" and built.records:
        _keep_known(args, built)
    for number, record in enumerate(built.records):
        record["case_id"] = number
        record.setdefault("provenance", {})["seed"] = args.seed
    write_output(args.out, json.dumps(built.records, ensure_ascii=False, indent=1) + "\n")
    _report(table.facts, built)
    task = "bake_qj" if args.form == "qa" else "bake_j"
    say(f"use it: lm_eval --model edited_hf --tasks {task} --model_args data={args.out},...")
    return 0


def _keep_known(args: argparse.Namespace, built: Built) -> None:
    """Keep the records whose original fact the model has, with what it said in ``provenance``."""
    from edit_hooks.assets.demo_name import DEMO_NAME
    from edit_hooks.lm.model import EditedHFLM
    from lm_edit.known_facts import Choice, ask
    from lm_eval_tasks.bake.building import fact_of, reverse_question

    lm = EditedHFLM(**model_options(args), mode="none", store="off")
    answers = ask(lm, [Choice(*reverse_question(record, args.form)) for record in built.records])
    kept: list[dict[str, Any]] = []
    for record, known in zip(built.records, answers, strict=True):
        if known is None or not known.passes(args.filter):
            built.left_out.append((fact_of(record), UNSCORED if known is None else UNKNOWN))
            continue
        record["provenance"] = {
            "model": args.pretrained or DEMO_NAME,
            "weights": lm.identity.weights,
            "filter": args.filter,
            "nll_original": round(known.nll_original, 4),
            "nll_desired": round(known.nll_desired, 4),
            "is_greedy": known.is_greedy,
        }
        kept.append(record)
    built.records = kept


def _report(facts: Any, built: Built) -> None:
    records = built.records
    say(f"facts: {len(facts)}")
    say(f"edits: {len(records)}, of {len({record['relation'] for record in records})} relations")
    for name in ("paraphrase_prompts", "neighborhood_prompts"):
        number = sum(len(record[name]) for record in records)
        say(f"{name}: {number}" + (f" ({number / len(records):.2f} per edit)" if records else ""))
    for reason, count in Counter(reason for _, reason in built.left_out).items():
        named = [" | ".join(fact) for fact, why in built.left_out if why == reason][:MAX_NAMED]
        more = f" and {count - len(named)} more" if count > len(named) else ""
        say(f"left out, {reason}: {'; '.join(named)}{more}")


VERBS: dict[str, Verb] = {
    "build-bake": Verb("build records of BAKE from facts and templates", _add_arguments, _run),
}
