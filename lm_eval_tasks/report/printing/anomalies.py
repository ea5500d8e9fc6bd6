"""Results of a run that point at a broken edit rather than at a bad one.

Metrics declare in their task's ``metric_list`` what can be checked: ``chance: 0.5`` is the value of a guess (a
comparison of two answers), ``role: efficacy`` the success of the edits themselves, and ``role: unchanged`` the share of
other answers that are those of the unedited model. Six things are reported, each only from data that the run has:

- ``below_chance``: a stream's edits held right after they were made, and at the end the metric is below chance;
- ``target_nll``: an edit after which its target is as unlikely as before, or unlikelier;
- ``no_effect``: efficacy is 0 and every other answer exactly as before;
- ``wrecked``: an edit or a stream after which the model continues neutral prompts like another model (``wrecked``);
- ``damage``: after the edits the model continues neutral prompts with other tokens (``first_token_kl``);
- ``edited_checkpoint``: the model before the run's edits is an exported one with edits in it.

A run without edits has the last one only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from edit_hooks.answers import IMMEDIATE
from edit_hooks.edit_report import FIRST_TOKEN_KL, WRECKED, WRECKED_KL
from edit_hooks.utils.logs import get_logger
from lm_eval_tasks.common.scoring.metric_list import declared_metrics

log = get_logger("lm_eval.edited_hf")

DAMAGE = "damage"
WRECKED_REMEDY = (
    "Its other scores are those of a broken model. Try a smaller step, another layer or editor, or prompts with words "
    "before the subject; lm-edit tune searches over settings, and the samples (--log_samples) name the edits."
)
EFFICACY_ROLE, UNCHANGED_ROLE = "efficacy", "unchanged"
# Fewer cases show nothing: five guesses out of five are wrong once in 32 runs.
MIN_CASES = 5
# Nats; the likeliest next token of the unedited model has lost about two thirds of its probability.
MAX_FIRST_TOKEN_KL = 1.0
NUM_ERRORS = 2  # standard errors by which a mean must be below chance


class _Column(NamedTuple):
    """A metric of a task in one filter pipeline; numbers that are missing are ``None``."""

    task: str
    benchmark: str
    metric: Mapping[str, Any]
    pipeline: str
    values: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.metric["metric"])

    def number(self, suffix: str = "") -> float | None:
        value = self.values.get(f"{self.name}{suffix},{self.pipeline}")
        return value if isinstance(value, (int, float)) else None

    @property
    def num_cases(self) -> float:
        return self.number("_n") or 0


def add_anomalies(results: dict[str, Any]) -> None:
    """Store the anomalies of a run under ``anomalies`` in its results, and log them.

    Args:
        results: of ``simple_evaluate`` with ``edited_hf``.
    """
    results["anomalies"] = anomalies = find_anomalies(results)
    for anomaly in anomalies:
        log.warning("anomaly: %s", anomaly["text"])


def find_anomalies(results: Mapping[str, Any]) -> list[dict[str, str]]:
    """The anomalies of a run, each with its ``kind`` and ``text``."""
    run = results["config"]["edited_hf"]
    found = [("edited_checkpoint", text)] if (text := run.get("about_checkpoint")) else []
    if run["mode"] == "none":
        return [{"kind": kind, "text": text} for kind, text in found]
    columns = list(_columns(results))
    found += [("below_chance", text) for text in _below_chance(columns, run)]
    found += [("target_nll", text) for text in _target_nll(results)]
    found += [("no_effect", text) for text in _no_effect(columns, run)]
    found += _damage(results)
    return [{"kind": kind, "text": text} for kind, text in found]


def table_note(results: Mapping[str, Any]) -> str:
    """The lines under the printed table; empty without an anomaly."""
    return "".join(f"\nAnomaly: {anomaly['text']}" for anomaly in results.get("anomalies", ()))


def _columns(results: Mapping[str, Any]) -> Iterator[_Column]:
    for task, values in results["results"].items():
        config = results["configs"].get(task, {})
        pipelines = dict.fromkeys(key.partition(",")[2] for key in values if "," in key)
        for metric in declared_metrics(config).values():
            for pipeline in pipelines:
                yield _Column(task, str(config.get("custom_dataset")), metric, pipeline, values)


def _below_chance(columns: list[_Column], run: Mapping[str, Any]) -> Iterator[str]:
    if run["mode"] != "sequential":
        return
    for column in columns:
        chance = column.metric.get("chance")
        final, immediate, error = column.number(), column.number(f"@{IMMEDIATE}"), column.number("_stderr")
        if chance is None or final is None or immediate is None or error is None:
            continue
        # Otherwise the two means are over different cases (score_unedited_cases, failed steps).
        is_comparable = column.num_cases == column.number(f"@{IMMEDIATE}_n") and column.num_cases >= MIN_CASES
        if is_comparable and immediate > chance and final + NUM_ERRORS * error < chance:
            yield (
                f"{column.task}: {column.name} was {immediate:.2f} right after each edit and is {final:.2f} after the "
                f"stream, worse than chance ({chance:g}); the weights no longer hold the edits."
            )


def _target_nll(results: Mapping[str, Any]) -> Iterator[str]:
    """One sentence for the task with the most such cases: tasks of a benchmark share their edits."""
    worst: tuple[int, int, str] | None = None
    for task, summary in _edit_summaries(results):
        if count := summary.get("target_nll_not_lower", 0):
            worst = max(worst or (0, 0, ""), (count, summary["edits"], task))
    if worst is not None:
        count, edits, task = worst
        yield (
            f"{task}: the target's negative log-likelihood did not fall in the edits of {count} of {edits} cases; the "
            "samples (--log_samples) name them (target_nll_before, target_nll_after)."
        )


def _damage(results: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """One kind and sentence for the worst case: tasks of a benchmark share their edits.

    ``wrecked`` is the verdict on an edit or step. Below it a large mean is ``damage``.
    """
    run = results["config"]["edited_hf"]
    steps: Sequence[Mapping[str, Any]] = run.get("steps") or ()
    loaded: Mapping[str, Any] = run.get("loaded_edit") or {}
    summaries = [] if steps or loaded else list(_edit_summaries(results))
    if (wreck := _wreck_of_one_model(steps, loaded) or _wrecks_of_cases(summaries)) is not None:
        yield WRECKED, f"{wreck} {WRECKED_REMEDY}"
        return
    found = [(step[FIRST_TOKEN_KL], "the stream") for step in steps[-1:] if FIRST_TOKEN_KL in step]
    found += [(loaded[FIRST_TOKEN_KL], "the loaded edit")] if FIRST_TOKEN_KL in loaded else []
    found += [(summary[FIRST_TOKEN_KL], task) for task, summary in summaries if FIRST_TOKEN_KL in summary]
    divergence, where = max(found, default=(0.0, ""))
    if divergence > MAX_FIRST_TOKEN_KL:
        yield (
            DAMAGE,
            f"{where}: after the edits the next-token distribution on neutral prompts is {divergence:.2f} nats from "
            "that of the unedited model (first_token_kl); general abilities are likely to suffer. "
            "compare_unedited=true and --tasks general_ability,editglue measure them.",
        )


def _wreck_of_one_model(steps: Sequence[Mapping[str, Any]], loaded: Mapping[str, Any]) -> str | None:
    """The sentence about a stream or a loaded edit that wrecks the model."""
    neutral = "the next-token distribution on neutral prompts"
    if (first := next((step for step in steps if step.get(WRECKED)), None)) is not None:
        return (
            f"the stream wrecked the model at step {first['step']}, after {first['num_edits']} edits: {neutral} was "
            f"{first[FIRST_TOKEN_KL]:.2f} nats from that of the unedited model and is {steps[-1][FIRST_TOKEN_KL]:.2f} "
            f"at the end (first_token_kl, above {WRECKED_KL:g})."
        )
    if loaded.get(WRECKED):
        return (
            f"the loaded edit wrecks the model: {neutral} is {loaded[FIRST_TOKEN_KL]:.2f} nats from that of the "
            f"unedited model (first_token_kl, above {WRECKED_KL:g})."
        )
    return None


def _wrecks_of_cases(summaries: Sequence[tuple[str, Mapping[str, Any]]]) -> str | None:
    """The sentence about independent edits that wreck the model."""
    counts = [(summary[WRECKED], summary["edits"], task) for task, summary in summaries if WRECKED in summary]
    if not counts:
        return None
    count, edits, task = max(counts)
    return (
        f"{task}: the edits of {count} of {edits} cases wreck the model: the next-token distribution on neutral "
        f"prompts is more than {WRECKED_KL:g} nats from that of the unedited model, or not finite (first_token_kl)."
    )


def _edit_summaries(results: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The summaries of the edits of every task."""
    for task, values in results["results"].items():
        for key, value in values.items():
            if key.startswith("edit,") and isinstance(value, str):
                yield task, json.loads(value)


def _no_effect(columns: list[_Column], run: Mapping[str, Any]) -> Iterator[str]:
    for efficacy in columns:
        if efficacy.metric.get("role") != EFFICACY_ROLE or efficacy.number() != 0 or efficacy.num_cases < MIN_CASES:
            continue
        others = [
            column
            for column in columns
            if column.metric.get("role") == UNCHANGED_ROLE
            and (column.benchmark, column.pipeline) == (efficacy.benchmark, efficacy.pipeline)
            and column.number() is not None
        ]
        if others and all(column.number() == 1 and column.num_cases >= MIN_CASES for column in others):
            unchanged = ", ".join(f"{column.name} exactly 1" for column in others)
            can_tune = run["editor"] and set(run["editor_writes"]) != {"context"}
            editor = (run.get("settings_origin") or {}).get("tune_editor", run["editor"])  # as a command names it
            advice = f" Is the step too small? lm-edit tune --editor {editor} searches it." if can_tune else ""
            yield (
                f"{efficacy.task}: {efficacy.name} is 0 over {efficacy.num_cases:g} cases and {unchanged}: the edits "
                f"changed no answer.{advice}"
            )
