"""Accuracy, precision, recall and kappa of a judge on labeled answers, by category."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.storage.json_io import read_rows
from judges.base import CORRECT, LABELS, Item, Judge, Report, Verdict
from judges.evaluation.agreement import compute_kappa, kappa_interval

log = get_logger("lm_eval.judges")

PAIRS = Path(__file__).parents[1] / "pairs" / "pairs_v1.jsonl"
OVERALL = "all"
NO_CATEGORY = "uncategorized"
TEXT_FIELDS = ("question", "gold", "answer")
OPTIONAL_TEXTS = ("category", "task", "reason")


class LabeledPair(NamedTuple):
    """A labeled pair of gold answer and answer.

    Args:
        id: category and number within it.
        category: the kind of difficulty, or any other group.
        item: question, gold answer and answer.
        label: the right verdict, one of :data:`~judges.base.LABELS`.
        reason: why the label is right; may be empty.
    """

    id: str
    category: str
    item: Item
    label: str
    reason: str


class JudgeScores(NamedTuple):
    """Scores of a judge on some pairs.

    Args:
        num_pairs: number of pairs; ``num_correct`` of them are labeled correct.
        num_scored: pairs with a verdict. The scores are over these.
        accuracy: share of right verdicts.
        precision: share of correct answers among those that the judge labels correct; ``None`` if it labels none so.
        recall: share of answers that the judge labels correct among the correct ones; ``None`` if there are none.
        kappa: Cohen's kappa of verdicts and labels; ``None`` where undefined: both are a single, equal label.
        interval: 95% interval of ``kappa``.
    """

    num_pairs: int
    num_correct: int
    num_scored: int
    accuracy: float | None
    precision: float | None
    recall: float | None
    kappa: float | None
    interval: tuple[float, float] | None


class JudgeQuality(NamedTuple):
    """Scores of a judge by category (:data:`OVERALL` first), the pairs it got wrong, and its report."""

    judge: str
    scores: dict[str, JudgeScores]
    errors: list[tuple[LabeledPair, Verdict]]
    report: Report


def load_pairs(path: str | None = None) -> list[LabeledPair]:
    """Load the shipped pairs, or a user's JSONL file of labeled answers.

    A row has the texts ``question``, ``gold``, ``answer`` and ``label``, and optionally ``category`` (default: its
    ``task``), ``reason`` and a list ``aliases``; other fields are ignored. So rows of ``lm-edit judge --out`` need a
    label and nothing else. Rows without a label are left out and counted in a warning.

    Raises:
        EditingError: for a missing file; for a row that is not as described; if no row has a label.
    """
    pairs: list[LabeledPair] = []
    counts: Counter[str] = Counter()
    num_unlabeled = 0
    for where, row in read_rows(path or PAIRS, "file of labeled pairs"):
        pair = _parse_pair(row, where)
        if pair is None:
            num_unlabeled += 1
            continue
        counts[pair.category] += 1
        pairs.append(pair._replace(id=f"{pair.category}-{counts[pair.category]:02d}"))
    if not pairs and num_unlabeled:
        raise EditingError(f"{path}: no row has a label; add label: {' or '.join(LABELS)}.")
    if num_unlabeled:
        log.warning("%s: %d of %d rows have no label and are left out", path, num_unlabeled, num_unlabeled + len(pairs))
    return pairs


def _parse_pair(row: object, where: str) -> LabeledPair | None:
    """The pair in a row; ``None`` if it has no label."""
    if not isinstance(row, dict) or not all(isinstance(row.get(name), str) for name in TEXT_FIELDS):
        raise EditingError(f"{where}: the texts {', '.join(TEXT_FIELDS)} and label ({' or '.join(LABELS)}) are needed.")
    if wrong := [name for name in OPTIONAL_TEXTS if not isinstance(row.get(name, ""), str)]:
        raise EditingError(f"{where}: {wrong[0]} is not a text.")
    aliases = row.get("aliases") or []
    if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
        raise EditingError(f"{where}: aliases is not a list of texts.")
    label = row.get("label")
    if label in (None, ""):
        return None
    if label not in LABELS:
        raise EditingError(f"{where}: label {label!r} is unknown. Accepted: {', '.join(LABELS)}.")
    item = Item(row["question"], row["gold"], row["answer"], tuple(aliases))
    category = row.get("category") or row.get("task") or NO_CATEGORY
    return LabeledPair("", category, item, label, row.get("reason", ""))


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


def _score(results: Sequence[tuple[LabeledPair, Verdict]]) -> JudgeScores:
    labels = [(pair.label, verdict.label) for pair, verdict in results if verdict.label]
    counts = {(label, verdict): labels.count((label, verdict)) for label in LABELS for verdict in LABELS}
    # (labeled correct, judged correct)
    scored = [(pair.label == CORRECT, verdict.label == CORRECT) for pair, verdict in results if verdict.label]
    num_right = sum(label == verdict for label, verdict in scored)
    true_positives = sum(label and verdict for label, verdict in scored)
    judged_correct = sum(verdict for _, verdict in scored)
    labeled_correct = sum(label for label, _ in scored)
    return JudgeScores(
        num_pairs=len(results),
        num_correct=sum(pair.label == CORRECT for pair, _ in results),
        num_scored=len(scored),
        accuracy=num_right / len(scored) if scored else None,
        precision=true_positives / judged_correct if judged_correct else None,
        recall=true_positives / labeled_correct if labeled_correct else None,
        kappa=compute_kappa(counts),
        interval=kappa_interval(counts),
    )


def category_rows(quality: JudgeQuality) -> Iterator[tuple[str, ...]]:
    """Table rows of one judge: category, pairs, correct ones, accuracy, precision, recall, coverage."""
    for category, scores in quality.scores.items():
        yield (category, str(scores.num_pairs), str(scores.num_correct), *_format_scores(scores))


def overview_rows(qualities: Sequence[JudgeQuality]) -> Iterator[tuple[str, ...]]:
    """Table rows of several judges over all pairs: judge, accuracy, precision, recall, coverage, kappa, interval."""
    for quality in qualities:
        scores = quality.scores[OVERALL]
        interval = "-" if scores.interval is None else " to ".join(map(_format_number, scores.interval))
        yield (quality.judge, *_format_scores(scores), _format_number(scores.kappa), interval)


def accuracy_rows(qualities: Sequence[JudgeQuality]) -> Iterator[tuple[str, ...]]:
    """Table rows of several judges by category: category, pairs, accuracy of each judge."""
    for category, first in qualities[0].scores.items():
        accuracies = [quality.scores[category].accuracy for quality in qualities]
        yield (category, str(first.num_pairs), *map(_format_number, accuracies))


def _format_scores(scores: JudgeScores) -> tuple[str, ...]:
    coverage = scores.num_scored / (scores.num_pairs or 1)
    return tuple(map(_format_number, (scores.accuracy, scores.precision, scores.recall, coverage)))


def _format_number(number: float | None) -> str:
    return "-" if number is None else f"{number:.2f}"
