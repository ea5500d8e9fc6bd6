"""``lm-edit build-bake-concept``: records of BAKE-concept from ConceptEdit's files."""

from __future__ import annotations

import argparse
from collections import Counter
from shlex import quote

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.json_io import json_text
from lm_edit.cli.command import Verb, add_overwrite_argument, check_output_files, say, write_output

MAX_NAMED = 5  # concepts that are named for one reason


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("concepts", help="concept_data.json of the dataset zjunlp/ConceptEdit")
    parser.add_argument(
        "--final",
        action="append",
        default=[],
        metavar="FILE",
        help="final_<model>_<module>.json of the same dataset, for prompts and locality; may be repeated",
    )
    parser.add_argument("--edit-prompt", help="edit prompt of concepts without a released one, with {} for the name")
    parser.add_argument("--paraphrase-prompt", help="the same for the paraphrase")
    parser.add_argument("--judge-question", help="judge question, with {definition} and {concept}")
    parser.add_argument("-o", "--out", required=True, help="file to write, as in BAKE_concept.json; for data=/path")
    add_overwrite_argument(parser)


def _run(args: argparse.Namespace) -> int:
    from edit_hooks.utils.storage.json_io import read_rows
    from lm_edit.builders.bake.conversion import ConceptWording, convert, read_released_prompts

    check_output_files(args, "out", inputs=[args.concepts, *args.final])
    given = {"edit": args.edit_prompt, "paraphrase": args.paraphrase_prompt, "judge": args.judge_question}
    wording = ConceptWording(**{name: text for name, text in given.items() if text is not None})
    released = read_released_prompts(read_rows(path, "file of prompts") for path in args.final)
    conversion = convert(read_rows(args.concepts, "file of concepts"), released, wording)
    for name, count in conversion.statistics().items():
        say(f"{name}: {count}")
    for reason in sorted({reason for _, _, reason in conversion.left_out}):
        named = Counter(concept for concept, _, why in conversion.left_out if why == reason)
        more = f" and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""
        say(f"left out, {reason}: {', '.join(list(named)[:MAX_NAMED])}{more}")
    if not conversion.records:
        raise EditingError(f"{args.concepts} gives no record; nothing is written. Is it ConceptEdit's complete file?")
    write_output(args.out, json_text(conversion.records, indent=1) + "\n")
    say(f"use it: lm_eval --model edited_hf --tasks bake_concept --model_args {quote(f'data={args.out},...')}")
    return 0


VERBS: dict[str, Verb] = {
    "build-bake-concept": Verb("build the records of BAKE-concept from ConceptEdit's files", _add_arguments, _run),
}
