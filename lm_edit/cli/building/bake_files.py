"""``lm-edit bake-facts``, ``lm-edit bake-templates``: files for ``build-bake`` from query results and from records.

``build-bake`` prints the table of categories, too.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping
from shlex import quote
from typing import TYPE_CHECKING

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.settings.numbers import SHARE
from edit_hooks.utils.storage.json_io import json_text
from lm_edit.cli.command import (
    Verb,
    add_overwrite_argument,
    check_output_files,
    real,
    say,
    say_reasons,
    table,
    whole,
    write_output,
)

if TYPE_CHECKING:
    from lm_edit.builders.bake.categories import Category


def add_category_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--category-rule``, for verbs that print :func:`say_categories`."""
    parser.add_argument(
        "--category-rule",
        choices=("mean", "any"),
        default="mean",
        help="when a relation counts as one-to-many (many-to-one): mean: subjects have 1.5 objects or more in the mean "
        "(objects 1.5 subjects), as in Bordes et al., 2013 (default); any: one subject (object) with several is enough",
    )


def say_categories(categories: Mapping[str, Category]) -> None:
    """Print a table of the relations with their categories, counts and the form of the papers."""
    table(
        (
            "relation", "category", "facts", "subjects with several objects", "objects with several subjects",
            "the papers' form",
        ),
        [
            (name, one.name, str(one.num_facts), str(one.subjects), str(one.objects), f"--form {one.form}")
            for name, one in categories.items()
        ],
    )  # fmt: skip


def _add_facts_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "results",
        nargs="+",
        metavar="NAME:LABEL=FILE",
        help="a relation and its facts, as in P36:capital=P36.json: JSON or CSV of the Wikidata Query Service with the "
        "columns s, sLabel, o and oLabel",
    )
    parser.add_argument(
        "--several-objects", action="store_true", help="accept subjects with several objects (one-to-many relations)"
    )
    parser.add_argument(
        "--skip-ambiguous",
        action="store_true",
        help="leave ambiguous rows out instead of an error: an item without a label or with that of another one, a "
        "subject with several objects",
    )
    parser.add_argument(
        "--swap",
        nargs="+",
        default=[],
        metavar="NAME",
        help="relations whose file is that of the inverse relation, as re_P112 (founder of) of P112 (founded by): "
        "subjects and objects of its rows change places",
    )
    add_category_argument(parser)
    parser.add_argument("-o", "--out", required=True, help="file of facts to write, for build-bake")
    add_overwrite_argument(parser)


def _run_facts(args: argparse.Namespace) -> int:
    from lm_edit.builders.bake.categories import categorize
    from lm_edit.builders.bake.wikidata import content, convert, parse_relation_file, swap

    files = swap([parse_relation_file(text) for text in args.results], args.swap)
    check_output_files(args, "out", inputs=[file.path for file in files])
    converted = convert(files, several_objects=args.several_objects, skip_ambiguous=args.skip_ambiguous)
    write_output(args.out, json_text(content(files, converted), indent=1) + "\n")
    counts = Counter(fact.relation for fact in converted.facts)
    say(f"facts: {len(converted.facts)} ({', '.join(f'{name} {count}' for name, count in counts.items())})")
    if converted.num_repeated:
        say(f"repeated rows: {converted.num_repeated}")
    named = [(f"{row.subject_label} | {row.object_label}", reason) for row, reason in converted.ambiguous]
    say_reasons("left out", named)
    say_categories(categorize(converted.items, args.category_rule))
    if more := len(converted.items) - len(converted.facts):
        say(f"the table also counts {more} pairs of items whose rows are left out")
    out = quote(str(args.out))
    say(f"the relations have no templates yet: lm-edit build-bake {out} --templates FILE, or --writer MODEL")
    return 0


def _add_templates_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("records", nargs="+", help="records of BAKE-Q&J or BAKE-J: files, or hub")
    parser.add_argument(
        "--min-records",
        type=whole(),
        default=2,
        help="keep templates that at least this many records of the relation share (default: %(default)s)",
    )
    parser.add_argument(
        "--min-share",
        type=real(SHARE),
        default=0.1,
        help="and that are at least so frequent, next to the most frequent one of the same kind (default: %(default)s)",
    )
    parser.add_argument("-o", "--out", required=True, help="file of templates to write, for build-bake --templates")
    add_overwrite_argument(parser)


def _run_templates(args: argparse.Namespace) -> int:
    from lm_edit.builders.bake.derivation import KINDS, derive
    from lm_edit.builders.bake.templates import templates_content
    from lm_eval_tasks.bake.benchmark import BAKE_QJ
    from lm_eval_tasks.common.records.dataset import read_raw

    check_output_files(args, "out", inputs=args.records)
    read = [read_raw(BAKE_QJ.source, {"data": data}) for data in args.records]
    rows = [row for raw in read for row in raw.rows]
    derived = derive(rows, min_records=args.min_records, min_share=args.min_share)
    if not derived.wordings:
        raise EditingError("no template is shared by enough records; nothing is written. Lower --min-records.")
    provenance = {
        "builder": "lm-edit bake-templates",
        "sha256": [raw.origin["sha256"] for raw in read],
        "min_records": args.min_records,
        "min_share": args.min_share,
        "records": {name: counts.num_records for name, counts in derived.counts.items()},
        "kept": derived.kept,
        "rest": derived.rest,
        "unread": [list(one) for one in derived.unread],
    }
    content = templates_content(derived.wordings, provenance)
    write_output(args.out, json_text(content, indent=1) + "\n")
    for name, counts in derived.counts.items():
        listed = ", ".join(f"{kind} {len(derived.kept[name][kind])}" for kind in KINDS)
        rest = sum(map(len, derived.rest[name].values()))
        say(f"{name}: {counts.num_records} records, {listed}; not kept {rest}")
    say_reasons("no template", [(f"{one.where}: {one.text}", one.reason) for one in derived.unread])
    say(f"what was not kept is in provenance of {args.out}")
    say(f"use it: lm-edit build-bake FACTS --templates {quote(str(args.out))}")
    return 0


VERBS: dict[str, Verb] = {
    "bake-facts": Verb("make facts for build-bake of Wikidata query results", _add_facts_arguments, _run_facts),
    "bake-templates": Verb(
        "read the templates of relations off records of BAKE", _add_templates_arguments, _run_templates
    ),
}
