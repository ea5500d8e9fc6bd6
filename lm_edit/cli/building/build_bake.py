"""``lm-edit build-bake``: records of BAKE-Q&J and BAKE-J from facts and templates."""

from __future__ import annotations

import argparse
from collections import Counter
from shlex import quote
from typing import TYPE_CHECKING, Any

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.settings.numbers import NON_NEGATIVE, SEED
from edit_hooks.utils.storage.json_io import json_text, without_half_surrogates
from lm_edit.cli.building.bake_files import add_category_argument, say_categories
from lm_edit.cli.command import (
    MAX_NAMED,
    Verb,
    add_model_arguments,
    add_overwrite_argument,
    check_output_files,
    model_options,
    say,
    say_reasons,
    whole,
    write_output,
)

if TYPE_CHECKING:
    from judges.model.writer import Writer
    from lm_edit.builders.bake.building import BakeRecords, FactTable
    from lm_edit.builders.bake.writing import TemplateReplies

REPLY_TOKENS = 1024  # unless the writer's settings name a limit; a reply has nine templates
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
    add_category_argument(parser)
    parser.add_argument("--per-relation", type=whole(), metavar="N", help="N facts of every relation; default: all")
    parser.add_argument("--paraphrases", type=whole(), default=2, help="paraphrases of a record (default: %(default)s)")
    parser.add_argument(
        "--neighbors", type=whole(), default=10, help="largest number of locality prompts (default: %(default)s)"
    )
    parser.add_argument("--seed", type=whole(SEED), default=0, help="seed of everything that is drawn (default 0)")
    parser.add_argument("-o", "--out", required=True, help="file to write, as in BAKE_qa.json; for data=/path")
    parser.add_argument(
        "--templates",
        nargs="+",
        default=[],
        metavar="FILE",
        help="files with templates of relations that have none in the file of facts",
    )
    parser.add_argument(
        "--writer",
        help="model that writes the templates of relations without any: openai:MODEL, openai:MODEL@URL, hf:MODEL, "
        "FILE.yaml; needs --templates-out",
    )
    parser.add_argument(
        "--templates-out",
        metavar="FILE",
        help="file for what --writer wrote: with it as --templates, the same command without --writer makes the same "
        "records",
    )
    parser.add_argument("--dry-run", action="store_true", help="--writer: show the first request and send none")
    parser.add_argument("--max-calls", type=whole(NON_NEGATIVE), help="--writer: budget, maximum number of requests")
    parser.add_argument("--store", help="--writer: folder of its replies, or off; default: in the user's cache folder")
    add_model_arguments(parser)
    add_overwrite_argument(parser)


def _run(args: argparse.Namespace) -> int:
    from lm_edit.builders.bake.building import build_records, read_fact_table
    from lm_edit.builders.bake.templates import read_templates

    _check_writer_options(args)
    check_output_files(args, "out", "templates_out", inputs=[args.facts, *args.templates, args.writer])
    table = read_fact_table(args.facts)
    table.check_names(args.relations)
    _say_categories(args, table)
    for path in args.templates:
        table = table.with_templates(read_templates(path))
    if args.writer is not None:
        if not _write_templates(args, table):
            return 0
        table = table.with_templates(read_templates(args.templates_out))
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
        if args.templates or args.writer:
            record["provenance"]["templates_sha256"] = table.templates_hash(record["relation"])
    _report(table.facts, built)
    if not built.records:
        raise EditingError(f"no record is left; nothing is written to {args.out}.")
    write_output(args.out, json_text(built.records, indent=1) + "\n")
    task = "bake_qj" if args.form == "qa" else "bake_j"
    say(f"use it: lm_eval --model edited_hf --tasks {task} --model_args {quote(f'data={args.out},...')}")
    return 0


def _say_categories(args: argparse.Namespace, table: FactTable) -> None:
    """Print the categories of the relations to edit; warn of those that the papers ask about in the other form."""
    from lm_edit.builders.bake.categories import categorize

    found = categorize(table.facts, args.category_rule)
    edited = {name: one for name, one in found.items() if args.relations is None or name in args.relations}
    say_categories(edited)
    others = ", ".join(f"{name} ({one.name})" for name, one in edited.items() if one.form != args.form)
    if others and args.form == "qa":
        say(
            "warning: reverse questions about these relations have several answers, and the papers ask for judgments "
            f"only (--form judge); objects with several subjects are no new objects here: {others}"
        )
    elif others:
        say(
            "warning: reverse questions about these relations have one answer, and the papers ask them beside the "
            f"judgments (--form qa): {others}"
        )


def _check_writer_options(args: argparse.Namespace) -> None:
    """Refuse options that have no meaning without another one."""
    own = {"--templates-out": args.templates_out, "--max-calls": args.max_calls, "--store": args.store}
    given = [name for name, value in own.items() if value is not None] + ["--dry-run"] * args.dry_run
    if args.writer is None and given:
        raise EditingError(f"{given[0]} belongs to --writer; add it, or drop {given[0]}.")
    if args.writer is not None and args.templates_out is None:
        raise EditingError("--writer needs --templates-out FILE: what the model writes has to be read by people.")


def _write_templates(args: argparse.Namespace, table: FactTable) -> bool:
    """Let a model write the missing templates; whether this was more than a dry run.

    Raises:
        EditingError: if no relation lacks templates, or some still lack what their facts need.
    """
    from judges.model.factory import make_writer
    from lm_edit.builders.bake.templates import read_templates, templates_content
    from lm_edit.builders.bake.writing import make_chats, read_replies

    relations = table.without_templates()
    if not relations:
        raise EditingError(f"every relation with facts in {args.facts} has templates; drop --writer.")
    overrides = {name: value for name in ("max_calls", "store") if (value := getattr(args, name)) is not None}
    writer = make_writer(args.writer, reply_tokens=REPLY_TOKENS, **overrides)
    chats = make_chats(table, relations)
    say(f"writer {writer.name}, relations without templates: {len(relations)}: {writer.plan(chats)}")
    if args.dry_run or writer.settings.dry_run:
        say("first request:")
        for line in chats[0][-1]["content"].splitlines():
            say(f"  {line}")
        return False
    outcomes = writer.write(chats)
    outcomes.require(writer.settings.min_coverage)
    written = read_replies(table, relations, outcomes.outcomes)
    content = templates_content(written.wordings, _provenance(args, writer, written))
    # It also names what was dropped, as the writer wrote it, and is read again.
    write_output(args.templates_out, json_text(without_half_surrogates(content), indent=1) + "\n")
    say(f"writer {writer.name}: {outcomes}")
    _report_templates(written)
    lacking = table.with_templates(read_templates(args.templates_out)).lacks(args.form, args.relations)
    if open_ones := [name for name in relations if name in lacking]:
        raise EditingError(
            f"relation {open_ones[0]!r} needs {lacking[open_ones[0]]}"
            + (f" ({len(open_ones)} such relations)" if len(open_ones) > 1 else "")
            + f". {args.templates_out} has all usable templates: add to it by hand and run the same command with "
            f"--templates {args.templates_out} in place of --writer, or use another model."
        )
    say(f"read {args.templates_out} before you use the records; --templates {args.templates_out} uses it again.")
    return True


def _provenance(args: argparse.Namespace, writer: Writer, written: TemplateReplies) -> dict[str, Any]:
    """Origin of written templates, and what was dropped."""
    from edit_hooks.utils.storage.files import sha256_of, user_path
    from lm_edit.builders.bake.writing import PROMPT_NAME, prompt_hash

    return {
        "builder": "lm-edit build-bake",
        "writer": writer.describe(),
        "prompts": {PROMPT_NAME: prompt_hash()},
        "facts_sha256": sha256_of(user_path(args.facts, "table of facts")),
        "dropped": [list(entry) for entry in written.dropped],
        "unreadable": [list(entry) for entry in written.unreadable],
    }


def _report_templates(written: TemplateReplies) -> None:
    wordings = written.wordings.values()
    counts = {
        "prompts": sum(len(one.prompts) for one in wordings),
        "reverse": sum(len(one.reverse) for one in wordings),
        "judge": sum(one.judge is not None for one in wordings),
    }
    say(f"templates of {len(wordings)} relations: " + ", ".join(f"{name} {count}" for name, count in counts.items()))
    say_reasons("template dropped", [(f"{relation} | {text}", reason) for relation, text, reason in written.dropped])
    say_reasons("relation without templates", written.unreadable)


def _keep_known(args: argparse.Namespace, built: BakeRecords) -> None:
    """Keep the records whose original fact the model has, with what it said in ``provenance``."""
    from edit_hooks.assets.demo_name import DEMO_NAME
    from edit_hooks.lm.model import EditedHFLM
    from lm_edit.builders.bake.building import fact_of, reverse_question
    from lm_edit.builders.known_facts import Choice, ask

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


def _report(facts: Any, built: BakeRecords) -> None:
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
