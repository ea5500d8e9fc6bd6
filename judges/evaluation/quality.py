"""Accuracy, precision and recall of a judge on labeled answers, by category."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.json_io import read_rows
from judges.base import CORRECT, LABELS, Item, Judge, Report, Verdict

PAIRS = Path(__file__).parents[1] / "pairs" / "pairs_v1.jsonl"
OVERALL = "all"
TEXT_FIELDS = ("category", "question", "gold", "answer", "label", "reason")


class LabeledPair(NamedTuple):
    """A labeled pair of gold answer and answer.

    Args:
        id: category and number within it.
        category: the kind of difficulty.
        item: question, gold answer and answer.
        label: the right verdict, one of :data:`~judges.base.LABELS`.
        reason: why the label is right.
    """

    id: str
    category: str
    item: Item
    label: str
    reason: str


class Scores(NamedTuple):
    """Scores of a judge on some pairs.

    Args:
        num_pairs: number of pairs; ``num_correct`` of them are labeled correct.
        num_scored: pairs with a verdict. The scores are over these.
        accuracy: share of right verdicts.
        precision: share of correct answers among those that the judge labels correct; ``None`` if it labels none so.
        recall: share of answers that the judge labels correct among the correct ones; ``None`` if there are none.
    """

    num_pairs: int
    num_correct: int
    num_scored: int
    accuracy: float | None
    precision: float | None
    recall: float | None


class JudgeQuality(NamedTuple):
    """Scores of a judge by category (:data:`OVERALL` first), the pairs it got wrong, and its report."""

    judge: str
    scores: dict[str, Scores]
    errors: list[tuple[LabeledPair, Verdict]]
    report: Report


def load_pairs(path: str | None = None) -> list[LabeledPair]:
    """Load the shipped pairs, or a user's JSONL file with the same fields.

    Raises:
        EditingError: for a missing file; for a row that is not a JSON object with the texts ``category``, ``question``,
            ``gold``, ``answer``, ``label`` and ``reason`` (and optionally a list ``aliases``); for an unknown label.
    """
    pairs: list[LabeledPair] = []
    counts: Counter[str] = Counter()
    for where, row in read_rows(path or PAIRS, "file of labeled pairs"):
        pair = _parse_pair(row, where)
        counts[pair.category] += 1
        pairs.append(pair._replace(id=f"{pair.category}-{counts[pair.category]:02d}"))
    return pairs


def _parse_pair(row: object, where: str) -> LabeledPair:
    if not isinstance(row, dict) or not all(isinstance(row.get(name), str) for name in TEXT_FIELDS):
        raise EditingError(f"{where}: the texts {', '.join(TEXT_FIELDS)} are needed.")
    if row["label"] not in LABELS:
        raise EditingError(f"{where}: label {row['label']!r} is unknown. Accepted: {', '.join(LABELS)}.")
    item = Item(row["question"], row["gold"], row["answer"], tuple(row.get("aliases") or ()))
    return LabeledPair("", row["category"], item, row["label"], row["reason"])


def measure_judge(judge: Judge, pairs: Sequence[LabeledPair]) -> JudgeQuality:
    """Judge all pairs and compare the verdicts with their labels."""
    judged = judge.judge([pair.item for pair in pairs])
    results = list(zip(pairs, judged.verdicts, strict=True))
    categories = dict.fromkeys(pair.category for pair in pairs)
    scores = {OVERALL: _score(results)} | {
        category: _score([result for result in results if result[0].category == category]) for category in categories
    }
    errors = [(pair, verdict) for pair, verdict in results if verdict.label not in (None, pair.label)]
    return JudgeQuality(judge.name, scores, errors, judged.report)


def _score(results: Sequence[tuple[LabeledPair, Verdict]]) -> Scores:
    # (labeled correct, judged correct)
    scored = [(pair.label == CORRECT, verdict.label == CORRECT) for pair, verdict in results if verdict.label]
    num_right = sum(label == verdict for label, verdict in scored)
    true_positives = sum(label and verdict for label, verdict in scored)
    judged_correct = sum(verdict for _, verdict in scored)
    labeled_correct = sum(label for label, _ in scored)
    return Scores(
        num_pairs=len(results),
        num_correct=sum(pair.label == CORRECT for pair, _ in results),
        num_scored=len(scored),
        accuracy=num_right / len(scored) if scored else None,
        precision=true_positives / judged_correct if judged_correct else None,
        recall=true_positives / labeled_correct if labeled_correct else None,
    )


def category_rows(quality: JudgeQuality) -> Iterator[tuple[str, ...]]:
    """Table rows of one judge: category, pairs, correct ones, accuracy, precision, recall, coverage."""
    for category, scores in quality.scores.items():
        yield (category, str(scores.num_pairs), str(scores.num_correct), *_format_scores(scores))


def overview_rows(qualities: Sequence[JudgeQuality]) -> Iterator[tuple[str, ...]]:
    """Table rows of several judges over all pairs: judge, accuracy, precision, recall, coverage."""
    for quality in qualities:
        yield (quality.judge, *_format_scores(quality.scores[OVERALL]))


def accuracy_rows(qualities: Sequence[JudgeQuality]) -> Iterator[tuple[str, ...]]:
    """Table rows of several judges by category: category, pairs, accuracy of each judge."""
    for category, first in qualities[0].scores.items():
        accuracies = [quality.scores[category].accuracy for quality in qualities]
        yield (category, str(first.num_pairs), *map(_format_number, accuracies))


def _format_scores(scores: Scores) -> tuple[str, ...]:
    coverage = scores.num_scored / (scores.num_pairs or 1)
    return tuple(map(_format_number, (scores.accuracy, scores.precision, scores.recall, coverage)))


def _format_number(number: float | None) -> str:
    return "-" if number is None else f"{number:.2f}"
