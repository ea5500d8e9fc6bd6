"""The filter that judges generated answers, and its pipeline.

A task that declares metrics with ``from: judge`` gets a second filter pipeline, ``judge``, as soon as a judge is
configured. It reads the same generations. Without a judge, one log line per process explains how to configure one.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import lm_eval.filters  # noqa: F401  # fills the registry; it does so only while that is empty, so before we add to it
from lm_eval.api.filter import Filter
from lm_eval.api.registry import get_filter, register_filter

from edit_hooks.answers import FailedAnswer, GeneratedText
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.storage.files import write_atomically, write_to_cache
from judges.base import Item, Verdict
from judges.model.factory import chosen_judge, make_model_judge
from judges.model.judge import ModelJudge
from judges.settings import HOW_TO
from lm_eval_tasks.common.asking.answers import Answer, unedited_answer, why_no_answer
from lm_eval_tasks.common.asking.probes import why_not_judged
from lm_eval_tasks.common.scoring.population import WRONG_EM, WRONG_JUDGE

logger = get_logger("lm_eval.editing_tasks")

PIPELINE = "judge"


def add_judge(config: dict[str, Any]) -> ModelJudge | None:
    """Add the judge that a task's settings or the environment name to the task's filter pipelines.

    A task with judged metrics gets the pipeline :data:`PIPELINE`, unless its YAML defines one. If the judge decides on
    the population, all other pipelines judge the helper's answer. The judge's description goes to the config's
    metadata, and those of judges in the YAML's pipelines go to its ``own_judges``. Without a judge a hint is logged
    once.

    Raises:
        EditingError: for invalid settings and a judge that cannot be reached, and for a population that needs a judge
            where there is none; before any weight is loaded.
    """
    settings = config["metadata"]
    pipelines = list(config.get("filter_list") or [])
    if own := _describe_own_judges(pipelines):
        settings["own_judges"] = own
    metrics = config["metric_list"]
    reports = any(metric.get("from") == "judge" for metric in metrics)
    reports = reports and not any(pipeline["name"] == PIPELINE for pipeline in pipelines)
    selects = any(metric.get("population") == WRONG_JUDGE for metric in metrics)
    if not (reports or selects):
        return None
    chosen = chosen_judge(settings)
    if chosen is None:
        if selects:
            raise EditingError(f"population={WRONG_JUDGE} needs a judge. Give {HOW_TO}; or use {WRONG_EM}.")
        _log_hint()
        return None
    judge = make_model_judge(chosen, edited=settings.get("pretrained"))
    if not judge.settings.dry_run:
        judge.backend.check()
    if selects:
        step = {"function": "helper_judge", "judge": chosen}
        pipelines = [
            pipeline if pipeline["name"] == PIPELINE else {**pipeline, "filter": [*pipeline["filter"], step]}
            for pipeline in pipelines
        ]
    if reports:
        filters = [{"function": "natural_stop"}, {"function": "model_judge", "judge": chosen, "helpers": selects}]
        pipelines.append({"name": PIPELINE, "filter": filters})
    config["filter_list"] = pipelines
    settings["judge"] = judge.describe()
    return judge


def _describe_own_judges(pipelines: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, object]]:
    """Pipeline of a task's YAML -> description of its judge; without those whose filters have no ``describe()``."""
    described = {}
    for pipeline in pipelines:
        for step in pipeline["filter"]:
            filter_class = get_filter(step["function"])
            if getattr(filter_class, "judges", False) and hasattr(filter_class, "describe"):
                arguments = {name: value for name, value in step.items() if name != "function"}
                described[pipeline["name"]] = dict(filter_class(**arguments).describe())
    return described


@functools.cache
def _log_hint() -> None:
    if os.environ.get("RANK", "0") == "0":
        logger.warning("No judge configured: exact match only. For the *_judge columns give %s.", HOW_TO)


@register_filter("model_judge")
class ModelJudgeFilter(Filter):
    """Replace generated answers by verdicts; other answers are unchanged.

    Args:
        judge: names a judge (docs/guides/judges.md).
        helpers: also judge the unedited model's answers to helper probes, which nothing but a population needs.
        are_saved: the answers are in a file already, so none is written for those without a verdict.
    """

    judges = True

    def __init__(self, judge: Any = None, helpers: bool = True, are_saved: bool = False) -> None:
        super().__init__()
        self.judge = make_model_judge(judge)
        self.helpers, self.are_saved = helpers, are_saved

    def describe(self) -> dict[str, object]:
        """All settings that a verdict depends on (JSON-able)."""
        return self.judge.describe()

    def concerns(self, probe: Mapping[str, Any]) -> bool:
        """Whether the answer to a probe is judged."""
        return self.helpers or probe["model"] != "unedited"

    def select(
        self, resps: Sequence[Answer], docs: Sequence[Mapping[str, Any]]
    ) -> tuple[list[Answer], dict[int, Item]]:
        """The answers, and by index what the judge is asked about some of them.

        Answers without anything to judge them by become failed answers and are neither sent nor counted in the
        coverage: see :func:`~lm_eval_tasks.common.asking.probes.why_not_judged`.
        """
        probes = [doc["asked"] for doc in docs]
        answers = [
            _judged_text(answer, doc) if self.concerns(doc["asked"]) else answer
            for answer, doc in zip(resps, docs, strict=True)
        ]
        items = {
            index: Item(probe["question"], probe["gold"], answer.text.strip())
            for index, (answer, probe) in enumerate(zip(answers, probes, strict=True))
            if isinstance(answer, GeneratedText) and self.concerns(probe)
        }
        return answers, items

    def apply(self, resps: Sequence[Answer], docs: Sequence[Mapping[str, Any]]) -> list[Answer]:
        """Judge all answers of a task in one call.

        Every process checks the coverage of its own answers. Sums over the processes would need a collective, which a
        process that has nothing to judge, or whose judge fails, would never join.

        Raises:
            CoverageError: when too few of them get a verdict.
        """
        answers, items = self.select(resps, docs)
        if not items:
            return answers
        with nullcontext() if self.are_saved else save_until_judged(list(items.values()), self.judge):
            verdicts, report = self.judge.judge(list(items.values()))
            logger.warning("%s", report) if report.reasons else logger.info("%s", report)
            if not self.judge.settings.dry_run:
                report.require(self.judge.settings.min_coverage, part=_share_of_answers())
        for index, verdict in zip(items, verdicts, strict=True):
            answers[index] = verdict
        return answers


@register_filter("helper_judge")
class HelperJudgeFilter(ModelJudgeFilter):
    """Replace the unedited model's answers to helper probes by verdicts; other answers are unchanged.

    The pipeline remains one that compares strings: it reports the metrics that no judge decides.
    """

    judges = False

    def concerns(self, probe: Mapping[str, Any]) -> bool:
        return bool(probe["model"] == "unedited")


def _judged_text(answer: Answer, doc: Mapping[str, Any]) -> Answer:
    """The answer to judge: of a helper probe the unedited model's."""
    probe = doc["asked"]
    is_helper = bool(probe["model"] == "unedited")
    if is_helper:
        answer = unedited_answer(answer)
    if isinstance(answer, GeneratedText) and (reason := why_no_answer(answer)):
        return FailedAnswer(reason, is_failure=not is_helper)
    if isinstance(answer, GeneratedText) and (reason := why_not_judged(doc, probe["kind"], probe["gold"])):
        return FailedAnswer(reason, is_failure=False)
    return answer


def _share_of_answers() -> str:
    """The answers that a process judges, for messages; "" if it judges all of them."""
    num_processes = os.environ.get("WORLD_SIZE", "1")
    if num_processes == "1":
        return ""
    rank = os.environ.get("RANK", "0")
    return f" of process {rank} of {num_processes}, which checks its own share of the task's answers"


@contextmanager
def save_until_judged(items: Sequence[Item], judge: ModelJudge) -> Iterator[None]:
    """Save the answers in a file until they are judged.

    Generating them again would cost more than judging them.
    """
    path = _save_answers(judge.store.path.parent / "pending", items) if judge.store.path else None
    if path is None:
        yield
        return
    try:
        yield
    except EditingError as error:
        raise type(error)(f"{error} The answers are saved; judge them with: lm-edit judge {path} --judge ...") from None
    with suppress(OSError):  # a disk that has become read-only
        path.unlink()


def _save_answers(folder: Path, items: Sequence[Item]) -> Path | None:
    """Write the answers as rows for ``lm-edit judge``; ``None`` if the disk does not take them."""
    lines = [json.dumps({"question": item.question, "gold": item.gold, "answer": item.answer}) for item in items]
    text = "\n".join(lines) + "\n"
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.jsonl"
    write_to_cache(path, lambda: write_atomically(path, text))
    return path if path.is_file() else None


def describe_verdicts(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """The verdicts of a case for its sample (JSON-able).

    Each has the truncated answer, label or reason, full reply, judge and prompt.
    """
    return [
        {
            "answer": answer.answer,
            "verdict": answer.label,
            "reason": answer.unscored_reason,
            "reply": answer.raw_reply,
            "judge": answer.judge,
            "prompt_hash": answer.prompt_hash,
        }
        for answer in answers
        if isinstance(answer, Verdict)
    ]
