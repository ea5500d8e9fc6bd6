"""Aggregation of per-case values to one number per metric.

``None`` is an unscored value. It is left out of every mean and counted in a column of its own, so that
cases in = scored + unscored (+ excluded by a published filter). All sums are exact (``math.fsum``), so no result
depends on the order of documents or ranks.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from edit_hooks.answers import ContextReport
from edit_hooks.edit_report import FIRST_TOKEN_KL, WRECKED, EditReport
from edit_hooks.utils.printable import printable
from lm_eval_tasks.common.scoring.primitives import harmonic_mean

NUM_RESAMPLES = 1000  # of the cases, for the standard error of a pooled mean
NOT_AVAILABLE = "N/A"  # lm-eval prints this literal; its table cannot format a `None` standard error


def mean_scored(values: Sequence[float | None]) -> float | None:
    """Mean of the scored values; ``None`` if there are none."""
    scored = [value for value in values if value is not None]
    return math.fsum(scored) / len(scored) if scored else None


def stderr_scored(values: Sequence[float | None]) -> float | str:
    """Standard error of :func:`mean_scored`: sample standard deviation / sqrt(n).

    It is "N/A" below two scored values.
    """
    scored = [value for value in values if value is not None]
    if len(scored) < 2:
        return NOT_AVAILABLE
    mean = math.fsum(scored) / len(scored)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in scored) / (len(scored) - 1) / len(scored))


def pooled_mean(values: Sequence[Mapping[str, float] | None]) -> float | None:
    """Mean over the units of all cases, as chains or questions, from the weighted mean of each case.

    Args:
        values: per case ``{"value": mean of its units, "weight": sum of their weights}``; ``None`` if unscored.

    Returns:
        ``sum(value * weight) / sum(weight)``; ``None`` without a scored case.
    """
    scored = [value for value in values if value is not None]
    if not scored:
        return None
    return math.fsum(one["value"] * one["weight"] for one in scored) / math.fsum(one["weight"] for one in scored)


def stderr_pooled(values: Sequence[Mapping[str, float] | None]) -> float | str:
    """Standard error of :func:`pooled_mean`: bootstrap over cases, since the units of a case are not independent.

    It is "N/A" below two scored cases. The cases are sorted first, so that their order changes nothing.
    """
    scored = sorted((one["value"] * one["weight"], one["weight"]) for one in values if one is not None)
    if len(scored) < 2:
        return NOT_AVAILABLE
    generator = random.Random(0)
    means = []
    for _ in range(NUM_RESAMPLES):
        drawn = generator.choices(scored, k=len(scored))
        means.append(math.fsum(part for part, _ in drawn) / math.fsum(weight for _, weight in drawn))
    return statistics.pstdev(means)


def total_scored(values: Sequence[int | None]) -> int | None:
    """Sum of the counts of the scored cases; ``None`` without one."""
    scored = [value for value in values if value is not None]
    return sum(scored) if scored else None


def total(values: Sequence[int]) -> int:
    """Sum of per-case counts."""
    return sum(values)


def reason_counts(values: Sequence[Mapping[str, str]]) -> str:
    """Count the cases of each reason, most frequent first.

    Args:
        values: per case a mapping metric -> reason.

    Returns:
        A JSON text reason -> number of cases; not a mapping, since lm-eval's result loggers accept numbers and strings.
    """
    counts = Counter(reason for reasons in values for reason in sorted(set(map(printable, reasons.values()))))
    return json.dumps(dict(sorted(counts.items(), key=lambda item: (-item[1], item[0]))), ensure_ascii=False)


def harmonic_of_means(values: Sequence[Sequence[Sequence[float | None]] | None]) -> float | None:
    """Edit score S over cases: the harmonic mean of its factors.

    A factor is the mean of its components' means over cases.

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


LIKELY_NLL = math.log(2)  # nats per token: a probability of a half
LEAST_FALL = 0.99  # an NLL above this share of what it was has not fallen
CONSTRAINT = "constraint"
# Numbers of prompts that are shorter than a context edit makes them.
SHORTENED_PROMPTS: Mapping[str, Callable[[ContextReport], bool]] = {
    "demonstrations_left_out": lambda report: report.left_out > 0,
    "prompts_cut": lambda report: report.cut,
    "facts_cut": lambda report: report.fact_cut,
}
QUESTIONS_TRAINED = "questions_trained"
WRECKED_FROM_STEP = "wrecked_from_step"
FIRST_TOKEN_KL_NOT_FINITE = f"{FIRST_TOKEN_KL}_not_finite"


def edit_facts(
    edit: EditReport | None, contexts: Sequence[ContextReport], questions: Collection[str]
) -> dict[str, Any] | None:
    """Facts about a case's edit (JSON-able), how many prompts it shortens, and how many it was trained on.

    Args:
        contexts: what the edit put before the questions of the case.
        questions: their texts.
    """
    if edit is None:
        return None
    counts = {name: sum(map(is_so, contexts)) for name, is_so in SHORTENED_PROMPTS.items()}
    counts[QUESTIONS_TRAINED] = num_trained(edit, questions)
    return edit.to_json() | {name: number for name, number in counts.items() if number}


def num_trained(edit: EditReport, questions: Collection[str]) -> int:
    """How many questions are word for word in texts that an edit reports it was trained on.

    The edited prompt itself, which every editor is given, is the first of these texts and does not count.
    """
    trained = edit.diagnostics.get("trained_prompts") or ()
    if not isinstance(trained, (list, tuple)) or not all(isinstance(text, str) for text in trained):
        return 0
    asked = [question for question in dict.fromkeys(questions) if question and question not in "".join(trained[:1])]
    return sum(any(question in text for text in trained[1:]) for question in asked)


def edit_summary(values: Sequence[Mapping[str, Any] | None]) -> str:
    """Summarize the diagnostics of the cases' edits.

    Returns:
        A JSON text with the numbers of edits made and failed, and means over the edits made, to three significant
        digits. ``first_token_kl`` is a mean over independent edits; in a stream, where it belongs to all edits so far,
        it is that after the last of these edits. Means are over finite numbers; ``first_token_kl_not_finite`` counts
        the edits without one there, if there are any. ``seconds_per_edit`` divides the time of a joint step by its
        edits. ``peak_memory_gib``, the largest peak, and ``model_memory_gib`` are those of edits made on GPUs.
        ``wrecked`` counts the edits that wreck the model, if there are any; in a stream those after which it is
        wrecked, from the step ``wrecked_from_step`` on. ``target_nll_not_lower`` counts the edits after which an
        unlikely target is no likelier than before, if there are any. ``constraint`` names what the edits keep fixed,
        such as ``second_moment``, or ``identity``: nothing that was measured. ``demonstrations_left_out``,
        ``prompts_cut`` and ``facts_cut`` are numbers of prompts, ``questions_trained`` that of questions on which the
        edits were trained, where there are any. Diagnostics that the editor does
        not report are absent; "{}" without any edit.
    """
    rows = [value for value in values if value is not None]
    edits = [EditReport.from_json(row) for row in rows]
    made = [edit for edit in edits if edit.error is None]
    if not edits:
        return "{}"
    optimizations = [edit.optimization for edit in made]
    divergences = [edit.effects.first_token_kl for edit in _last_of_stream(made)]
    means = {
        "final_loss": [one.final_loss for one in optimizations],
        "steps": [one.steps for one in optimizations],
        "update_norm_ratio": [one.update_norm_ratio for one in optimizations],
        FIRST_TOKEN_KL: divergences,
        "seconds_per_edit": [_seconds_per_edit(edit) for edit in made],
    }
    peaks = {  # the memory that the edits need, and the share of the model
        "peak_memory_gib": [edit.cost.peak_memory_gib for edit in made],
        "model_memory_gib": [edit.cost.model_memory_gib for edit in made],
    }
    summary: dict[str, float | str] = {"edits": len(made), "failed": len(edits) - len(made)}
    for name, column in means.items():
        if numbers := _finite(column):
            summary[name] = float(f"{math.fsum(numbers) / len(numbers):.3g}")
    for name, column in peaks.items():
        if numbers := _finite(column):
            summary[name] = float(f"{max(numbers):.3g}")
    if not_finite := sum(isinstance(kl, float) and not math.isfinite(kl) for kl in divergences):
        summary[FIRST_TOKEN_KL_NOT_FINITE] = not_finite
    if wrecked := [edit for edit in made if edit.effects.wrecked]:
        summary[WRECKED] = len(wrecked)
        if steps := [edit.step.step for edit in wrecked if edit.step]:
            summary[WRECKED_FROM_STEP] = min(steps)
    if not_lower := sum(map(_is_target_no_likelier, made)):
        summary["target_nll_not_lower"] = not_lower
    for name in (*SHORTENED_PROMPTS, QUESTIONS_TRAINED):
        if number := sum(row.get(name, 0) for row, edit in zip(rows, edits, strict=True) if edit.error is None):
            summary[name] = number
    if constraints := sorted({one.constraint for one in optimizations if one.constraint}):
        summary[CONSTRAINT] = " and ".join(constraints)
    return json.dumps(summary)


def _finite(column: Iterable[Any]) -> list[float]:
    """The finite numbers among the values of a diagnostic."""
    return [number for number in column if isinstance(number, (int, float)) and math.isfinite(number)]


def _last_of_stream(edits: Sequence[EditReport]) -> Sequence[EditReport]:
    """The edits of a stream's last step; all edits if they are independent."""
    last = max((edit.step.step for edit in edits if edit.step), default=None)
    return [edit for edit in edits if (edit.step and edit.step.step) == last]


def judge_summary(values: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """Summarize the verdicts of the cases.

    Returns:
        A JSON text with judge, prompt hash, and the number of verdicts per label and of unscored ones. It includes
        helper questions and excludes the earlier stages of a stream; "{}" without any verdict.
    """
    verdicts = [verdict for case in values for verdict in case]
    if not verdicts:
        return "{}"
    first = verdicts[0]
    labels = Counter(verdict["verdict"] or "unscored" for verdict in verdicts)
    prompt_hash = (first["prompt_hash"] or "")[:12]
    return json.dumps({"judge": first["judge"], "prompt_hash": prompt_hash, **dict(sorted(labels.items()))})


def _is_target_no_likelier(edit: EditReport) -> bool:
    """Whether an edit left its target as unlikely as it was.

    Without a measurement (``measure_edits=false``, models of other classes) the losses of the editor's optimization are
    compared; editors without another term in their loss report the last one as ``final_loss`` only. A target that was
    likely from the start cannot gain, and an edit of it may stop at once. A loss that is no finite number any more has
    not fallen.
    """
    before, after = edit.effects.target_nll_before, edit.effects.target_nll_after
    if before is None:
        one = edit.optimization
        before, after = one.initial_nll, one.final_loss if one.final_nll is None else one.final_nll
    if before is None or after is None:
        return False
    if not math.isfinite(after):
        return math.isfinite(before)
    return after > LEAST_FALL * before and after > LIKELY_NLL


def _seconds_per_edit(edit: EditReport) -> float | None:
    """Time of the step that made an edit, divided by the step's edits.

    In a stream, the divisor is the mean size of the steps so far.
    """
    seconds = edit.cost.seconds
    if seconds is None:
        return None
    if edit.step:
        return seconds * (edit.step.step + 1) / edit.step.num_edits
    return seconds / edit.optimization.num_edits


MAX_STEPS_SHOWN = 10  # in the printed retention matrix


def retention_matrix(values: Sequence[Mapping[str, Any] | None], cell: Callable[[Sequence[Any]], Any]) -> str:
    """Scores of all earlier steps' cases after every step (figure 5 of WILD).

    Args:
        values: per case ``{"step": j, "values": [v_j, v_j+1, ...]}``, its values after its own and every later step.
        cell: the metric's own aggregation; R[k][j] aggregates the cases of step j after step k.

    Returns:
        A JSON text ``{"num_steps", "diagonal_mean", "last_row_mean", "first_column", "matrix"}``: the mean of R[k][k]
        (new edits), that of the last row (all edits at the end), R[k][0] (the first step's edits over time), and the
        rows of the lower triangle. Means are over steps. Values have four decimals, and ``null`` means that no case was
        scored. The harness prints this text, so at most :data:`MAX_STEPS_SHOWN` steps are shown, evenly spaced and
        listed as ``steps_shown``; the means cover all steps. "{}" without a scored case.
    """
    cells: dict[tuple[int, int], list[Any]] = {}
    for case in (value for value in values if value is not None):
        for later, value in enumerate(case["values"]):
            cells.setdefault((case["step"] + later, case["step"]), []).append(value)
    if not cells:
        return "{}"
    matrix = {(row, column): cell(scores) for (row, column), scores in cells.items()}
    num_steps = 1 + max(row for row, _ in matrix)
    last = num_steps - 1
    shown = list(range(num_steps))
    if num_steps > MAX_STEPS_SHOWN:
        shown = [round(number * last / (MAX_STEPS_SHOWN - 1)) for number in range(MAX_STEPS_SHOWN)]
    return json.dumps(
        {
            "num_steps": num_steps,
            "diagonal_mean": _rounded(mean_scored([matrix.get((step, step)) for step in range(num_steps)])),
            "last_row_mean": _rounded(mean_scored([matrix.get((last, step)) for step in range(num_steps)])),
            **({"steps_shown": shown} if len(shown) < num_steps else {}),
            "first_column": [_rounded(matrix.get((row, 0))) for row in shown],
            "matrix": [[_rounded(matrix.get((row, column))) for column in shown if column <= row] for row in shown],
        },
        separators=(",", ":"),
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


AGGREGATIONS: dict[str, Callable[[Sequence[Any]], Any]] = {
    "mean_scored": mean_scored,
    "stderr_scored": stderr_scored,
    "pooled_mean": pooled_mean,
    "stderr_pooled": stderr_pooled,
    "total_scored": total_scored,
    "total": total,
    "reason_counts": reason_counts,
    "harmonic_of_means": harmonic_of_means,
    "edit_summary": edit_summary,
    "judge_summary": judge_summary,
}

# Name of an aggregation -> that of its standard error, for those that have one.
STANDARD_ERRORS = {"mean_scored": "stderr_scored", "pooled_mean": "stderr_pooled"}
