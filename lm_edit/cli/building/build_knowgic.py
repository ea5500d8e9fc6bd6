"""``lm-edit build-knowgic``: records of KnowGIC from a knowledge graph, or from several joined ones."""

from __future__ import annotations

import argparse
from collections import Counter
from shlex import quote
from typing import TYPE_CHECKING

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.json_io import json_text
from lm_edit.cli.command import (
    MAX_NAMED,
    Verb,
    add_overwrite_argument,
    check_output_files,
    say,
    say_reasons,
    whole,
    write_output,
)

if TYPE_CHECKING:
    from lm_edit.builders.knowgic.graph import KnowledgeGraph
    from lm_edit.builders.knowgic.joining import JoinedGraph


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "graphs",
        nargs="+",
        metavar="GRAPH",
        help='JSON with "relations" (name -> prompt, question), "facts", "edits" and, if wanted, "aliases" and '
        '"wordings" (of single facts: fact, prompt, question); several graphs, as of several models, are joined, and '
        "the first one decides where they disagree",
    )
    parser.add_argument(
        "--max-steps", type=whole(), default=5, help="longest chain (default: %(default)s, as published)"
    )
    parser.add_argument(
        "--context",
        choices=("entities", "chains", "graph"),
        default="entities",
        help="broader context: facts about the entities of the chains (default), the facts of the chains, as in the "
        "published files, or all of the graph, as in the paper's definition 4; never about the edited subject",
    )
    parser.add_argument("-o", "--out", required=True, help="file of records to write, for data=/path")
    parser.add_argument("--aliases-out", help="file of the answers' other names to write, for knowgic_aliases=/path")
    parser.add_argument("--joined-out", help="file of the joined graph to write, with the graphs that have each fact")
    add_overwrite_argument(parser)


def _run(args: argparse.Namespace) -> int:
    from lm_edit.builders.knowgic.graph import build_record, read_graph

    if args.joined_out is not None and len(args.graphs) == 1:
        raise EditingError("--joined-out is for several graphs, and one is given; drop it.")
    check_output_files(args, "out", "aliases_out", "joined_out", inputs=args.graphs)
    graph = read_graph(args.graphs[0]) if len(args.graphs) == 1 else _join(args)
    records = [
        build_record(graph, edit, number, args.max_steps, args.context) for number, edit in enumerate(graph.edits)
    ]
    write_output(args.out, json_text(records, indent=1) + "\n")
    if args.aliases_out:
        aliases = {name: {"answer_alias": list(names)} for name, names in graph.aliases.items()}
        write_output(args.aliases_out, json_text(aliases, indent=1) + "\n")
    lengths = Counter(len(chain["answers"]) for record in records for chain in record["chains"])
    say(f"edits: {len(records)}")
    for length, count in sorted(lengths.items()):
        say(f"chains of length {length}: {count}")
    if given_away := graph.given_away():
        named = "; ".join(map(graph.question, given_away[:MAX_NAMED]))
        more = f" and {len(given_away) - MAX_NAMED} more" if len(given_away) > MAX_NAMED else ""
        say(f"facts whose question has the answer, as a response that repeats it: {len(given_away)} ({named}{more})")
    say(f"use it: lm_eval --model edited_hf --tasks knowgic_prob --model_args {quote(f'data={args.out},...')}")
    return 0


def _join(args: argparse.Namespace) -> KnowledgeGraph:
    """The joined graph, after a report."""
    from lm_edit.builders.knowgic.joining import join_graphs, read_graphs

    joined = join_graphs(read_graphs(args.graphs))
    if args.joined_out:
        write_output(args.joined_out, json_text(joined.content(), indent=1) + "\n")
    _say_joined(joined)
    return joined.graph


def _say_joined(joined: JoinedGraph) -> None:
    holders = joined.origin.holders
    for file in joined.files:
        held = joined.held_by(file)
        alone = sum(len(holders[fact]) == 1 for fact in held)
        say(f"{file.title}: {len(file.graph.facts)} facts, {len(held)} of them joined, {alone} in no other graph")
    say(f"facts: {len(holders)}, {sum(len(names) == len(joined.files) for names in holders.values())} in all graphs")
    say_reasons("left out", [(f"{one.graph}: {' | '.join(one.fact)}", one.reason) for one in joined.left_out])
    names = [f"{one.graph}: {one.name} -> {one.joined_name}" for one in joined.renamed]
    say_reasons("names", [(name, "as in an earlier graph") for name in names])
    relations = [f"{file}: {relation}" for file, relation in joined.reworded]
    say_reasons("relations", [(relation, "worded otherwise in an earlier graph") for relation in relations])


VERBS: dict[str, Verb] = {
    "build-knowgic": Verb("build records of KnowGIC from one knowledge graph or several", _add_arguments, _run),
}
