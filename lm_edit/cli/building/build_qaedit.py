"""``lm-edit build-qaedit``: records of QAEdit from files of questions and answers, and categories of records."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.settings.numbers import NON_NEGATIVE, SEED
from edit_hooks.utils.storage.json_io import json_text
from lm_edit.cli.command import Verb, add_overwrite_argument, check_output_files, say, say_reasons, whole, write_output

if TYPE_CHECKING:
    from judges.model.writer import Writer
    from lm_edit.builders.qaedit.building import Building
    from lm_edit.builders.qaedit.questions import LocalityPair, QuestionAnswer, QuestionFile, Reading


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "questions",
        nargs="+",
        metavar="[NAME=]FILE",
        help="questions and answers as JSON, JSONL or CSV, in the layout of NQ-open, TriviaQA or SimpleQA; NAME is the "
        "source in the records (default: the file's stem). With --categories-only: records of QAEdit, as data=",
    )
    parser.add_argument(
        "--locality",
        metavar="FILE",
        help="unrelated questions: loc and loc_ans, as in ZsRE's files; needed but with --categories-only",
    )
    parser.add_argument(
        "--writer",
        required=True,
        help="model that writes subjects and paraphrases: openai:MODEL, openai:MODEL@URL, hf:MODEL, FILE.yaml",
    )
    parser.add_argument("-o", "--out", required=True, help="file of records to write, for data=/path")
    add_overwrite_argument(parser)
    parser.add_argument("--categories", action="store_true", help="also choose one of the paper's ten categories")
    parser.add_argument(
        "--categories-only",
        action="store_true",
        help="choose a category for each record of an existing file in the released layout (a file, hub, hub:inter_1k) "
        "and change nothing else; records that have one keep it",
    )
    parser.add_argument(
        "--categories-out",
        metavar="FILE",
        help="with --categories-only: also write edit question -> category, for the setting categories of the tasks",
    )
    parser.add_argument("--num-locality", type=whole(), help="locality pairs of a record (default: 5, as released)")
    parser.add_argument("--seed", type=whole(SEED), help="seed of the locality pairs (default: 0)")
    parser.add_argument("--limit", type=whole(), help="use the first usable questions, or the first records, only")
    parser.add_argument("--dry-run", action="store_true", help="count calls and tokens without sending a request")
    parser.add_argument("--max-calls", type=whole(NON_NEGATIVE), help="budget: maximum number of requests")
    parser.add_argument("--store", help="folder of the writer's replies, or off; default: in the user's cache folder")


def _run(args: argparse.Namespace) -> int:
    return _run_labeling(args) if args.categories_only else _run_building(args)


def _run_building(args: argparse.Namespace) -> int:
    from judges.model.factory import make_writer
    from lm_edit.builders.qaedit.building import BuildSettings, build, check_pool, make_chats
    from lm_edit.builders.qaedit.questions import parse_question_file, read_locality, read_questions

    if args.categories_out is not None:
        raise EditingError("--categories-out belongs to --categories-only; add it, or drop --categories-out.")
    if args.locality is None:
        raise EditingError("--locality FILE is needed: unrelated questions for the records' locality.")
    files = [parse_question_file(text) for text in args.questions]
    check_output_files(args, "out", inputs=[*(file.path for file in files), args.locality, args.writer])
    writer = make_writer(args.writer, **_given(args, "max_calls", "store"))
    settings = BuildSettings(categories=args.categories, **_given(args, "num_locality", "seed"))
    reading, locality = read_questions(files), read_locality(Path(args.locality))
    questions = reading.pairs[: args.limit]
    check_pool(locality.pairs, settings, questions)  # before the writer is paid
    _say_reading(reading, locality)
    chats = make_chats(questions, settings)
    say(f"writer {writer.name}, {len(questions)} questions: {writer.plan(chats)}")
    if args.dry_run or writer.settings.dry_run:
        return 0
    written = writer.write(chats)
    written.require(writer.settings.min_coverage)
    building = build(questions, written.outcomes, locality.pairs, settings, _provenance(writer, files, args.locality))
    say(f"writer {writer.name}: {written}")
    _say_building(building)
    if not building.records:
        raise EditingError(f"no reply of {writer.name} could be used; nothing is written. Use another model.")
    write_output(args.out, json_text(building.records, indent=1) + "\n")
    say(f"use it: lm_eval --model edited_hf --tasks qaedit_wild --model_args {quote(f'data={args.out},...')}")
    return 0


def _given(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The named options that are given."""
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def _run_labeling(args: argparse.Namespace) -> int:
    from judges.model.factory import make_writer
    from lm_edit.builders.qaedit.labeling import label, make_chats, read_records

    for name in ("locality", "num_locality", "seed"):
        if getattr(args, name) is not None:
            raise EditingError(
                f"--{name.replace('_', '-')} has no use with --categories-only: the records keep their locality."
            )
    if len(args.questions) != 1:
        raise EditingError("--categories-only reads one file of records; run it once for each.")
    (data,) = args.questions
    check_output_files(args, "out", "categories_out", inputs=[data, args.writer])
    writer = make_writer(args.writer, **_given(args, "max_calls", "store"))
    rows, raw = read_records(data)
    rows = rows[: args.limit]
    chats = make_chats(rows)
    say(f"writer {writer.name}, {len(rows)} records: {writer.plan(chats)}")
    if args.dry_run or writer.settings.dry_run:
        return 0
    written = writer.write(chats)
    written.require(writer.settings.min_coverage)
    origin = {"builder": "lm-edit build-qaedit", "writer": writer.describe(), "sha256": raw.origin["sha256"]}
    labeling = label(rows, written.outcomes, origin)
    say(f"writer {writer.name}: {written}")
    if labeling.num_kept:
        say(f"records that had a category: {labeling.num_kept}")
    for name, count in labeling.counts().items():
        say(f"{name}: {count} ({count / len(rows):.1%})")
    say_reasons("without category", labeling.without_category)
    if len(labeling.without_category) == len(rows):
        raise EditingError(f"no reply of {writer.name} could be used; nothing is written. Use another model.")
    write_output(args.out, json_text(labeling.records, indent=1) + "\n")
    if args.categories_out is not None:
        write_output(args.categories_out, json_text(labeling.by_question(), indent=1) + "\n")
    say(f"use it: lm-edit figure qaedit_categories --data {quote(str(args.out))} -o categories.md")
    run = f"lm_eval --model edited_hf --tasks qaedit_wild --model_args {quote(f'data={args.out},...')}"
    say(f"or: {run} --metadata score_by=category")
    return 0


def _provenance(writer: Writer, files: Iterable[QuestionFile], locality: str) -> dict[str, Any]:
    """Writer and input files of all records."""
    from edit_hooks.utils.storage.files import sha256_of, user_path

    inputs = [*(file.path for file in files), user_path(locality, "file of locality questions")]
    return {
        "writer": writer.describe(),
        "locality": str(inputs[-1]),
        "sha256": {str(path): sha256_of(path) for path in inputs},
    }


def _say_reading(reading: Reading[QuestionAnswer], locality: Reading[LocalityPair]) -> None:
    counts = Counter(question.file.origin for question in reading.pairs)
    say(f"questions: {len(reading.pairs)} ({', '.join(f'{name} {count}' for name, count in counts.items())})")
    say_reasons("left out", reading.left_out)
    say(f"locality questions: {len(locality.pairs)}")
    say_reasons("locality left out", locality.left_out)


def _say_building(building: Building) -> None:
    for name, count in building.statistics().items():
        say(f"{name}: {count}")
    say_reasons("left out", building.left_out)
    say_reasons("without category", building.without_category)


VERBS: dict[str, Verb] = {
    "build-qaedit": Verb("build records of QAEdit from questions and answers", _add_arguments, _run),
}
