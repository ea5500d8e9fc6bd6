"""How good a judge is: hand-labeled answers, and accuracy, precision and recall on them by category."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from edit_hooks.utils.errors import EditingError
from judges.base import CORRECT, LABELS, Item, Judge, Report, Verdict

PAIRS = Path(__file__).parents[1] / "pairs" / "pairs_v1.jsonl"


OVERALL = "all"


class Pair(NamedTuple):
    """A hand-labeled answer: what it is an example of and its number there, the right verdict, and why."""

    id: str
    category: str
    item: Item
    label: str
    reason: str


class Scores(NamedTuple):
    """How a judge did on some pairs.

    Args:
        num_pairs, num_correct: pairs, and those labeled correct.
        num_scored: pairs with a verdict; the other numbers are over these.
        accuracy: share of right verdicts.
        precision: of the answers the judge calls correct, the share that are; ``None`` when it calls none so.
        recall: of the correct answers, the share that the judge calls so; ``None`` when there are none.
    """

    num_pairs: int
    num_correct: int
    num_scored: int
    accuracy: float | None
    precision: float | None
    recall: float | None


class Quality(NamedTuple):
    """A judge's scores by category, ``all`` first, the pairs it got wrong, and the report on its replies."""

    judge: str
    scores: dict[str, Scores]
    errors: list[tuple[Pair, Verdict]]
    report: Report


def load_pairs(path: str | None = None) -> list[Pair]:
    """The shipped pairs, or one's own file with the same fields.

    Raises:
        EditingError: for a row that is no JSON object with the texts ``category``, ``question``, ``gold``, ``answer``,
            ``label`` and ``reason`` (a list ``aliases`` may be there), and for an unknown label.
    """
    chosen = Path(path).expanduser() if path else PAIRS
    if not chosen.is_file():
        raise EditingError(f"there is no file {chosen}.")
    pairs: list[Pair] = []
    counts: Counter[str] = Counter()
    for number, line in enumerate(chosen.read_text(encoding="utf-8").split("\n"), start=1):
        if line.strip():
            pair = _pair(line, f"{chosen.name}, line {number}")
            counts[pair.category] += 1
            pairs.append(pair._replace(id=f"{pair.category}-{counts[pair.category]:02d}"))
    return pairs


def _pair(line: str, where: str) -> Pair:
    fields = ("category", "question", "gold", "answer", "label", "reason")
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise EditingError(f"{where}: not valid JSON ({error.msg}).") from None
    if not isinstance(row, dict) or not all(isinstance(row.get(name), str) for name in fields):
        raise EditingError(f"{where}: the texts {', '.join(fields)} are needed.")
    if row["label"] not in LABELS:
        raise EditingError(f"{where}: label {row['label']!r}. Accepted: {', '.join(LABELS)}.")
    item = Item(row["question"], row["gold"], row["answer"], tuple(row.get("aliases") or ()))
    return Pair("", row["category"], item, row["label"], row["reason"])


def measure(judge: Judge, pairs: Sequence[Pair]) -> Quality:
    """Let a judge decide all pairs and compare with their labels."""
    judged = judge.judge([pair.item for pair in pairs])
    decided = list(zip(pairs, judged.verdicts, strict=True))
    categories = dict.fromkeys(pair.category for pair in pairs)
    scores = {OVERALL: _scores(decided)} | {
        category: _scores([one for one in decided if one[0].category == category]) for category in categories
    }
    errors = [(pair, verdict) for pair, verdict in decided if verdict.label not in (None, pair.label)]
    return Quality(judge.name, scores, errors, judged.report)


def _scores(decided: Sequence[tuple[Pair, Verdict]]) -> Scores:
    scored = [(pair.label == CORRECT, verdict.label == CORRECT) for pair, verdict in decided if verdict.label]
    right = sum(wanted == said for wanted, said in scored)
    both = sum(wanted and said for wanted, said in scored)
    called, there = sum(said for _, said in scored), sum(wanted for wanted, _ in scored)
    return Scores(
        num_pairs=len(decided),
        num_correct=sum(pair.label == CORRECT for pair, _ in decided),
        num_scored=len(scored),
        accuracy=right / len(scored) if scored else None,
        precision=both / called if called else None,
        recall=both / there if there else None,
    )


def rows(quality: Quality) -> Iterator[tuple[str, ...]]:
    """Table rows of one judge: category, pairs, correct ones, accuracy, precision, recall, coverage."""
    for category, scores in quality.scores.items():
        yield (category, str(scores.num_pairs), str(scores.num_correct), *_cells(scores))


def overview_rows(found: Sequence[Quality]) -> Iterator[tuple[str, ...]]:
    """Table rows of several judges over all pairs: judge, accuracy, precision, recall, coverage."""
    for quality in found:
        yield (quality.judge, *_cells(quality.scores[OVERALL]))


def accuracy_rows(found: Sequence[Quality]) -> Iterator[tuple[str, ...]]:
    """Table rows of several judges by category: category, pairs, accuracy of each judge."""
    for category, first in found[0].scores.items():
        accuracies = [quality.scores[category].accuracy for quality in found]
        yield (category, str(first.num_pairs), *("-" if value is None else f"{value:.2f}" for value in accuracies))


def _cells(scores: Scores) -> tuple[str, ...]:
    numbers = (scores.accuracy, scores.precision, scores.recall, scores.num_scored / (scores.num_pairs or 1))
    return tuple("-" if number is None else f"{number:.2f}" for number in numbers)
