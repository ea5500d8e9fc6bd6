"""``lm-edit judge`` and ``lm-edit judge-quality``: verdicts on saved answers, and how good a judge is."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from edit_hooks.utils.errors import EditingError
from lm_edit.cli.command import Verb, table

SHOWN = 10  # disagreements printed; all of them go to --out


def _judge_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("samples", nargs="+", help="sample files of lm_eval --log_samples, folders with them, or JSONL")
    parser.add_argument("--judge", help="published, openai:MODEL@URL, hf:MODEL, FILE.yaml, em, ...; else LM_EDIT_JUDGE")
    parser.add_argument("--compare", metavar="JUDGE", help="a second judge: agreement, Cohen's kappa, disagreements")
    parser.add_argument("--score", action="append", default=[], help="also print a score: match_ratio, bertscore, ...")
    parser.add_argument("--out", help="write every verdict to this JSONL file")
    parser.add_argument("--locality", action="store_true", help="also judge answers of locality tasks by their gold")
    parser.add_argument("--dry-run", action="store_true", help="count calls and tokens, ask nothing")
    _model_judge_arguments(parser)


def _model_judge_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", help="a shipped judge prompt, or the path of your own")
    parser.add_argument("--max-calls", type=int, help="budget: at most so many requests")
    parser.add_argument("--min-coverage", type=float, help="least share of answers with a verdict (default 0.95)")
    parser.add_argument("--store", help="folder of the verdict store, or off")


def _overrides(given: argparse.Namespace) -> dict[str, Any]:
    names = ("prompt", "max_calls", "min_coverage", "store")
    return {name: getattr(given, name) for name in names if getattr(given, name) is not None}


def _judge(given: argparse.Namespace) -> int:
    from judges.model.factory import chosen_judge, make_judge
    from judges.model.judge import ModelJudge
    from judges.settings import HOW_TO
    from lm_edit.results.rejudge import judge_saved, rows_of, scores_of, written
    from lm_edit.results.samples import read_saved

    saved = read_saved(given.samples, locality=given.locality)
    name = given.judge or chosen_judge({})
    if name is None:
        raise EditingError(f"say which judge: --judge em, contains, ..., or a model as in {HOW_TO}.")
    names = [name, given.compare] if given.compare else [name]
    judges = [make_judge(one, **_overrides(given)) for one in names]
    if given.dry_run:
        for judge in judges:
            plan = (
                judge.plan([one.item for one in saved if one.failed is None]) if isinstance(judge, ModelJudge) else ""
            )
            print(f"judge {judge.name}: {plan or 'asks nobody'}")
        return 0
    judged = [judge_saved(judge, saved) for judge in judges]
    columns = {report.judge: verdicts for verdicts, report in judged}
    scores = {score: scores_of(score, saved) for score in given.score}
    header = ("task", "answers", "n", *[f"{column} ({part})" for column in columns for part in ("share", "scored")])
    table((*header, "em", *scores), rows_of(saved, columns, scores))
    for _, report in judged:
        print(report)
    if given.compare:
        _print_agreement(saved, *(verdicts for verdicts, _ in judged))
    if given.out:
        Path(given.out).write_text("".join(json.dumps(row) + "\n" for row in written(saved, columns)), encoding="utf-8")
        print(f"verdicts written to {given.out}")
    for judge, (_, report) in zip(judges, judged, strict=True):
        report.require(judge.settings.min_coverage if isinstance(judge, ModelJudge) else 1.0)
    return 0


def _print_agreement(saved: Any, first: Any, second: Any) -> None:
    from judges.evaluation.agreement import compare

    found = compare(first, second)
    share = "-" if found.share is None else f"{found.share:.3f}"
    kappa = "undefined (one label only)" if found.kappa is None else f"{found.kappa:.3f}"
    print(f"agreement {share}, Cohen's kappa {kappa}, over {found.num_both} answers; {found.num_unscored} unscored")
    table(("first", "second", "answers"), [(a, b, str(count)) for (a, b), count in found.counts.items()])
    for place in found.disagreements[:SHOWN]:
        item = saved[place].item
        print(f"{first[place].label} / {second[place].label}: {item.question!r} gold {item.gold!r}: {item.answer!r}")
    if len(found.disagreements) > SHOWN:
        print(f"... and {len(found.disagreements) - SHOWN} more; --out FILE has all verdicts")


def _quality_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--judge", action="append", help="as for lm-edit judge, repeatable; all string judges when absent"
    )
    parser.add_argument("--pairs", help="your own hand-labeled JSONL; the shipped set when absent")
    parser.add_argument("--markdown", action="store_true", help="print tables for a README")
    parser.add_argument("--errors", action="store_true", help="list the pairs that a judge got wrong")
    _model_judge_arguments(parser)


def _quality(given: argparse.Namespace) -> int:
    from judges.evaluation.quality import accuracy_rows, load_pairs, measure, overview_rows, rows
    from judges.model.factory import make_judge
    from judges.strings import RULES

    pairs = load_pairs(given.pairs)
    show = _markdown if given.markdown else table
    found = [measure(make_judge(name, **_overrides(given)), pairs) for name in given.judge or RULES]
    print(f"{len(pairs)} hand-labeled pairs, {sum(pair.label == 'correct' for pair in pairs)} of them correct\n")
    show(("judge", "accuracy", "precision", "recall", "coverage"), overview_rows(found))
    if len(found) > 1:
        print("\naccuracy by category\n")
        show(("category", "pairs", *(quality.judge for quality in found)), accuracy_rows(found))
    for quality in found:
        if quality.report.reasons:
            print(f"\n{quality.report}")
        if len(found) == 1:
            print(f"\n{quality.judge}\n")
            show(("category", "pairs", "correct", "accuracy", "precision", "recall", "coverage"), rows(quality))
        for pair, verdict in quality.errors if given.errors else ():
            print(f"{quality.judge}, {pair.id}: {verdict}, labeled {pair.label} ({pair.reason}): {pair.item.answer!r}")
    return 0


def _markdown(header: Any, body: Any) -> None:
    for number, line in enumerate([header, *body]):
        print("| " + " | ".join(line) + " |")
        if number == 0:
            print("|" + "---|" * len(header))


VERBS: dict[str, Verb] = {
    "judge": Verb("judge saved answers again, also with two judges", _judge_arguments, _judge),
    "judge-quality": Verb("measure judges on hand-labeled answers", _quality_arguments, _quality),
}
