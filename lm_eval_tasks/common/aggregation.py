"""From per-case values to one number per benchmark.

``None`` is a value that could not be scored. It stays out of every mean and is counted beside it, so that
cases in = scored + unscored (+ excluded by a published filter). All sums are exact (``math.fsum``), so no result
depends on the order in which documents, or ranks, hand in their values.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lm_eval_tasks.common.scoring import harmonic_mean

NOT_AVAILABLE = "N/A"  # lm-eval prints this literal; its table cannot format a `None` standard error


def mean_scored(values: Sequence[float | None]) -> float | None:
    """Mean of the scored values; ``None`` when nothing was scored."""
    scored = [value for value in values if value is not None]
    return math.fsum(scored) / len(scored) if scored else None


def stderr_scored(values: Sequence[float | None]) -> float | str:
    """Standard error of :func:`mean_scored` (sample standard deviation / sqrt(n)); "N/A" below two scored values."""
    scored = [value for value in values if value is not None]
    if len(scored) < 2:
        return NOT_AVAILABLE
    mean = math.fsum(scored) / len(scored)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in scored) / (len(scored) - 1) / len(scored))


def total(values: Sequence[int]) -> int:
    """Sum of per-case counts."""
    return sum(values)


def reason_counts(values: Sequence[Mapping[str, str]]) -> str:
    """Per-case mappings metric -> reason to a JSON text reason -> number of cases, most frequent first.

    A text, not a mapping: lm-eval's result loggers accept numbers and strings only.
    """
    counts = Counter(reason for reasons in values for reason in sorted(set(reasons.values())))
    return json.dumps(dict(sorted(counts.items(), key=lambda item: (-item[1], item[0]))), ensure_ascii=False)


def harmonic_of_means(values: Sequence[Sequence[Sequence[float | None]] | None]) -> float | None:
    """Edit score S over cases: harmonic mean of factors, each the mean of its components' means over cases.

    Args:
        values: per case a list of factors, each a list of component values, such as
            ``[[ES], [GS], [LS], [RQS, RJS]]``. Components are averaged over the cases in which they are scored.

    Returns:
        S in 0..1. As published, components enter as percentages rounded to two decimals, and S is 0 if a factor is 0.
        ``None`` if some component was scored in no case.
    """
    cases = [case for case in values if case is not None]
    if not cases:
        return None
    factors = []
    for column in zip(*cases, strict=True):
        means = [mean_scored(component) for component in zip(*column, strict=True)]
        if None in means:
            return None
        percentages = [round(100 * mean, 2) for mean in means if mean is not None]
        factors.append(math.fsum(percentages) / len(percentages))
    return harmonic_mean(factors) / 100


# Diagnostics whose mean over the edits says how an editor did; seconds are shared out over the edits of a step.
EDIT_MEANS = ("final_loss", "steps", "update_norm_ratio")


def edit_summary(values: Sequence[Mapping[str, Any] | None]) -> str:
    """Diagnostics of the cases' edits to a JSON text: edits made and failed, and means over those that were made.

    ``seconds_per_edit`` divides the time of a joint step by its edits. Numbers have three significant digits; editors
    without some diagnostic leave it out. "{}" where nothing was edited.
    """
    edits = [value for value in values if value is not None]
    made = [edit for edit in edits if "error" not in edit]
    if not edits:
        return "{}"
    columns = {name: [edit.get(name) for edit in made] for name in EDIT_MEANS}
    columns["seconds_per_edit"] = [_seconds_per_edit(edit) for edit in made]
    summary: dict[str, float] = {"edits": len(made), "failed": len(edits) - len(made)}
    for name, column in columns.items():
        numbers = [number for number in column if isinstance(number, (int, float)) and math.isfinite(number)]
        if numbers:
            summary[name] = float(f"{math.fsum(numbers) / len(numbers):.3g}")
    return json.dumps(summary)


def judge_summary(values: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """Verdicts of the cases to a JSON text: who judged under which prompt, and counts of each label and of none.

    Helper questions are counted too; answers at earlier stages of a stream are not. "{}" where nothing was judged.
    """
    verdicts = [verdict for case in values for verdict in case]
    if not verdicts:
        return "{}"
    first = verdicts[0]
    labels = Counter(verdict["verdict"] or "unscored" for verdict in verdicts)
    hashed = (first["prompt_hash"] or "")[:12]
    return json.dumps({"judge": first["judge"], "prompt_hash": hashed, **dict(sorted(labels.items()))})


def _seconds_per_edit(edit: Mapping[str, Any]) -> float | None:
    """Time of the step that made an edit, over the step's edits (in a stream: the mean size of the steps so far)."""
    seconds = edit.get("seconds")
    if not isinstance(seconds, (int, float)):
        return None
    if "num_edits" in edit and "step" in edit:
        return seconds * (edit["step"] + 1) / edit["num_edits"]
    return seconds / (edit.get("num_requests") or len(edit.get("parts") or ()) or 1)


MAX_STEPS_SHOWN = 10


def retention_matrix(values: Sequence[Mapping[str, Any] | None], cell: Callable[[Sequence[Any]], Any]) -> str:
    """Re-evaluation of earlier steps (Figure 5 of WILD) to a JSON text.

    Args:
        values: per case ``{"step": j, "values": [v_j, v_j+1, ...]}``: its values after its own and every later step.
        cell: the metric's own aggregation; R[k][j] is that of the cases of step j after step k.

    Returns:
        ``{"num_steps", "diagonal_mean", "last_row_mean", "first_column", "matrix"}``: the mean of R[k][k] (new edits),
        that of the last row (all edits at the end), R[k][0] (the first step's edits over time), and the rows of the
        lower triangle. Means are over steps. Values have four decimals; ``null`` where no case was scored. Of more than
        :data:`MAX_STEPS_SHOWN` steps that many are shown, evenly spaced, and listed as ``steps_shown``: the harness
        prints this text. Means are over all steps, and the samples hold every value. "{}" without a scored case.
    """
    cells: dict[tuple[int, int], list[Any]] = {}
    for case in (value for value in values if value is not None):
        for later, value in enumerate(case["values"]):
            cells.setdefault((case["step"] + later, case["step"]), []).append(value)
    if not cells:
        return "{}"
    found = {place: cell(column) for place, column in cells.items()}
    num_steps = 1 + max(row for row, _ in found)
    last = num_steps - 1
    shown = list(range(num_steps))
    if num_steps > MAX_STEPS_SHOWN:
        shown = [round(number * last / (MAX_STEPS_SHOWN - 1)) for number in range(MAX_STEPS_SHOWN)]
    return json.dumps(
        {
            "num_steps": num_steps,
            "diagonal_mean": _rounded(mean_scored([found.get((step, step)) for step in range(num_steps)])),
            "last_row_mean": _rounded(mean_scored([found.get((last, step)) for step in range(num_steps)])),
            **({"steps_shown": shown} if len(shown) < num_steps else {}),
            "first_column": [_rounded(found.get((row, 0))) for row in shown],
            "matrix": [[_rounded(found.get((row, column))) for column in shown if column <= row] for row in shown],
        },
        separators=(",", ":"),
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


AGGREGATIONS: dict[str, Callable[[Sequence[Any]], Any]] = {
    "mean_scored": mean_scored,
    "stderr_scored": stderr_scored,
    "total": total,
    "reason_counts": reason_counts,
    "harmonic_of_means": harmonic_of_means,
    "edit_summary": edit_summary,
    "judge_summary": judge_summary,
}
