"""``lm-edit judge`` and ``lm-edit judge-quality``: verdicts on saved answers, and the accuracy of judges."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.printable import printable
from edit_hooks.utils.settings.numbers import NON_NEGATIVE, SHARE
from edit_hooks.utils.storage.json_io import json_lines
from lm_edit.cli.command import Verb, add_overwrite_argument, check_output_files, real, say, table, whole, write_output

if TYPE_CHECKING:
    from judges.base import Judge, Verdict
    from lm_edit.results.answers.samples import SavedAnswer

MAX_DISAGREEMENTS = 10  # printed; --out has all of them


def _add_judge_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("samples", nargs="+", help="sample files of lm_eval --log_samples, folders with them, or JSONL")
    parser.add_argument(
        "--judge", help="published_wording, openai:MODEL@URL, hf:MODEL, FILE.yaml, em, ...; default: LM_EDIT_JUDGE"
    )
    parser.add_argument("--compare", metavar="JUDGE", help="a second judge: agreement, Cohen's kappa, disagreements")
    parser.add_argument("--score", action="append", default=[], help="also print a score: match_ratio, bertscore, ...")
    parser.add_argument("-o", "--out", help="write every verdict to this JSONL file")
    parser.add_argument(
        "--write-results",
        metavar="DIR",
        help="write result files with the *_judge columns, and samples, as the runs would have with this judge",
    )
    parser.add_argument(
        "--include-path",
        action="append",
        default=[],
        help="--write-results: folder of tasks that no installed package brings, as of lm_eval; repeatable",
    )
    add_overwrite_argument(parser)
    parser.add_argument("--locality", action="store_true", help="also judge answers of locality tasks by their gold")
    parser.add_argument("--dry-run", action="store_true", help="count calls and tokens without sending a request")
    _add_model_judge_arguments(parser)


def _add_model_judge_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", help="name of a shipped judge prompt, or path of a prompt file")
    parser.add_argument("--max-calls", type=whole(NON_NEGATIVE), help="budget: maximum number of requests")
    parser.add_argument(
        "--min-coverage", type=real(SHARE), help="minimum share of answers with a verdict (default 0.95)"
    )
    parser.add_argument("--store", help="folder of the verdict store, or off")
    parser.add_argument(
        "--ask-again", choices=("unscored",), help="request new replies where the stored one holds no verdict"
    )


def _settings_of(args: argparse.Namespace) -> dict[str, Any]:
    names = ("prompt", "max_calls", "min_coverage", "store", "ask_again")
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def _write_results(args: argparse.Namespace) -> int:
    from judges.model.factory import chosen_judge
    from judges.settings import HOW_TO, with_settings
    from judges.string_judge import RULES

    for option in ("compare", "score", "out", "locality"):
        if getattr(args, option):
            raise EditingError(
                f"--write-results writes what runs with one judge write, without --{option}. Drop one of the two; a "
                "second command finds all replies in the store."
            )
    name = args.judge or chosen_judge({})
    if name is None or name in RULES:
        named = "no judge is configured" if name is None else f"judge {name!r} compares strings, as columns of runs do"
        raise EditingError(f"{named}; a judge of runs is a model, as in {HOW_TO}.")

    from lm_edit.judged_results.judging import Judging

    judging = Judging(args.samples, with_settings(name, _settings_of(args)), args.include_path)
    if args.dry_run:
        plan = judging.plan(args.write_results, overwrite=args.overwrite)
        say(f"judge {judging.model_judge.name}: {plan}")
        return 0
    written, columns = judging.write(args.write_results, overwrite=args.overwrite)
    rows = [
        (*column[:3], "-" if column.value is None else f"{column.value:.3f}", str(column.num_cases))
        for column in columns
    ]
    table(("run", "task", "metric", "value", "n"), rows)
    for path in written:
        say(f"results written to {path}")
    return 0


def _run_judge(args: argparse.Namespace) -> int:
    if args.write_results is not None:
        return _write_results(args)
    if args.include_path:
        raise EditingError("--include-path is about --write-results; drop it, or name a folder with --write-results.")
    from judges.model.factory import chosen_judge, make_judge
    from judges.model.judge import ModelJudge
    from judges.settings import HOW_TO
    from lm_edit.results.answers.rejudge import check_score, judge_answers, score_answers, table_rows, verdict_rows
    from lm_edit.results.answers.sample_files import find_sample_files
    from lm_edit.results.answers.samples import read_saved_answers

    read_from = find_sample_files(args.samples)
    check_output_files(args, "out", inputs=[*read_from, *filter(None, [args.judge, args.compare, args.prompt])])
    for score in args.score:
        check_score(score)
    saved = read_saved_answers(args.samples, locality=args.locality)
    name = args.judge or chosen_judge({})
    if name is None:
        raise EditingError(f"no judge is configured. Use --judge em, contains, ..., or a model as in {HOW_TO}.")
    names = [name, args.compare] if args.compare else [name]
    judges = [make_judge(one, **_settings_of(args)) for one in names]
    columns = _column_names(judges)
    if args.dry_run:
        _print_plans(judges, saved)
        return 0
    scores = {score: score_answers(score, saved) for score in args.score}  # first: they may fail, and cost nothing
    judged = [judge_answers(judge, saved) for judge in judges]
    verdicts = dict(zip(columns, [judgment.verdicts for judgment in judged], strict=True))
    by_judge = [f"{column} ({part})" for column in columns for part in ("share", "scored")]
    table(("run", "task", "answers", "n", *by_judge, "em", *scores), table_rows(saved, verdicts, scores))
    for _, report in judged:
        say(report)
    if args.compare:
        _print_agreement(saved, *verdicts.values())
    if args.out:
        write_output(args.out, json_lines(verdict_rows(saved, verdicts)))
        say(f"verdicts written to {args.out}")
    for judge, (_, report) in zip(judges, judged, strict=True):
        report.require(judge.settings.min_coverage if isinstance(judge, ModelJudge) else 1.0)
    return 0


def _column_names(judges: Sequence[Judge]) -> list[str]:
    """The judges' names, with the settings in which two judges of one name differ.

    Raises:
        EditingError: if both are the same judge.
    """
    from judges.model.judge import ModelJudge

    names = [judge.name for judge in judges]
    if len(set(names)) == len(names):
        return names
    first, second = (judge.describe() if isinstance(judge, ModelJudge) else {} for judge in judges)
    differing = [name for name in {**first, **second} if first.get(name) != second.get(name)]
    if not differing:
        raise EditingError(f"--judge and --compare are the same judge, {names[0]}; name two that differ.")
    return [
        ", ".join([name, *(f"{setting}={described.get(setting)}" for setting in differing)])
        for name, described in zip(names, (first, second), strict=True)
    ]


def _print_plans(judges: Sequence[Judge], saved: Sequence[SavedAnswer]) -> None:
    from judges.model.judge import ModelJudge

    items = [answer.item for answer in saved if answer.failure is None]
    for judge in judges:
        say(f"judge {judge.name}: {judge.plan(items) if isinstance(judge, ModelJudge) else 'no model calls'}")


def _print_agreement(saved: Sequence[SavedAnswer], first: Sequence[Verdict], second: Sequence[Verdict]) -> None:
    from judges.evaluation.agreement import compare_verdicts

    agreement = compare_verdicts(first, second)
    share = "-" if agreement.share is None else f"{agreement.share:.3f}"
    kappa = "undefined (one label only)" if agreement.kappa is None else f"{agreement.kappa:.3f}"
    say(
        f"agreement {share}, Cohen's kappa {kappa}, over {agreement.num_both} answers; "
        f"{agreement.num_unscored} unscored"
    )
    table(("first", "second", "answers"), [(a, b, str(count)) for (a, b), count in agreement.counts.items()])
    for index in agreement.disagreements[:MAX_DISAGREEMENTS]:
        item = saved[index].item
        labels = f"{first[index].label} / {second[index].label}"
        say(f"{labels}: {item.question!r} gold {item.gold!r}: {item.answer!r}")
    if len(agreement.disagreements) > MAX_DISAGREEMENTS:
        say(f"... and {len(agreement.disagreements) - MAX_DISAGREEMENTS} more; --out FILE writes all verdicts")


def _add_quality_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--judge", action="append", help="as for lm-edit judge, repeatable; default: all string judges")
    parser.add_argument("--pairs", help="JSONL rows with question, gold, answer, label; default: the shipped pairs")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    parser.add_argument("--errors", action="store_true", help="list the pairs that a judge got wrong")
    _add_model_judge_arguments(parser)


def _run_quality(args: argparse.Namespace) -> int:
    from judges.evaluation.quality import accuracy_rows, category_rows, load_pairs, measure_judge, overview_rows
    from judges.model.factory import make_judge
    from judges.string_judge import RULES

    pairs = load_pairs(args.pairs)
    print_table = _markdown_table if args.markdown else table
    qualities = [measure_judge(make_judge(name, **_settings_of(args)), pairs) for name in args.judge or RULES]
    say(f"{len(pairs)} labeled pairs, {sum(pair.label == 'correct' for pair in pairs)} of them correct\n")
    header = ("judge", "accuracy", "precision", "recall", "coverage", "kappa", "95% interval")
    print_table(header, overview_rows(qualities))
    if len(qualities) > 1:
        say("\naccuracy by category\n")
        print_table(("category", "pairs", *(quality.judge for quality in qualities)), accuracy_rows(qualities))
    for quality in qualities:
        if quality.report.reasons:
            say(f"\n{quality.report}")
        if len(qualities) == 1:
            say(f"\n{quality.judge}\n")
            header = ("category", "pairs", "correct", "accuracy", "precision", "recall", "coverage")
            print_table(header, category_rows(quality))
        for pair, verdict in quality.errors if args.errors else ():
            label = pair.label + (f" ({pair.reason})" if pair.reason else "")
            say(f"{quality.judge}, {pair.id}: {verdict}, labeled {label}: {pair.item.answer!r}")
    return 0


def _markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    say("| " + " | ".join(header) + " |")
    say("|" + "---|" * len(header))
    for row in rows:
        print("| " + " | ".join(map(printable, row)) + " |")


VERBS: dict[str, Verb] = {
    "judge": Verb("judge saved answers again, also with two judges", _add_judge_arguments, _run_judge, is_core=True),
    "judge-quality": Verb("measure judges on labeled answers", _add_quality_arguments, _run_quality),
}
