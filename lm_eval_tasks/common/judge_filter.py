"""The seam between tasks and judges: a filter that turns generated answers into verdicts, and who plugs it in.

A task that declares metrics with ``from: judge`` gets a second filter pipeline, ``judge``, as soon as a judge is
configured; it reads the same generations again. Without one the task says once how to configure it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lm_eval.filters  # noqa: F401  # fills the registry: it does so only while it is empty, so before we add to it
from lm_eval.api.filter import Filter
from lm_eval.api.registry import register_filter

from edit_hooks.answers import FailedAnswer, GeneratedText
from edit_hooks.utils.errors import EditingError
from judges.base import Item, Verdict
from judges.model.factory import chosen_judge, make_model_judge
from judges.model.judge import ModelJudge
from judges.settings import HOW_TO
from lm_eval_tasks.common.answers import NEEDS_EDITED_HF, Answer

logger = logging.getLogger("lm_eval.editing_tasks")


PIPELINE = "judge"


def judge_pipeline(settings: Mapping[str, Any]) -> tuple[list[dict[str, Any]], ModelJudge | None]:
    """The filter pipeline of the judge that a task's settings or the environment ask for, as lm-eval configures it.

    Returns:
        The entries for ``filter_list`` and the judge; none without a judge, and then a hint is logged, once.

    Raises:
        EditingError: for settings that cannot work and a judge that cannot be reached, before any weight is loaded.
    """
    given = chosen_judge(settings)
    if given is None:
        _hint()
        return [], None
    judge = make_model_judge(given, edited=settings.get("pretrained"))
    if not judge.settings.dry_run:
        judge.backend.check()
    filters = [{"function": "natural_stop"}, {"function": "model_judge", "judge": given}]
    return [{"name": PIPELINE, "filter": filters}], judge


@functools.cache
def _hint() -> None:
    if os.environ.get("RANK", "0") == "0":
        logger.warning("No judge configured: exact match only. For the *_judge columns give %s.", HOW_TO)


@register_filter("model_judge")
class ModelJudgeFilter(Filter):
    """Verdicts in place of generated answers; everything else goes through as it is.

    Of a probe that asks for the unedited model's answer only, that answer is judged.

    Args:
        judge: names a judge (see judges/README.md).
    """

    judges = True

    def __init__(self, judge: Any = None) -> None:
        super().__init__()
        self.judge = make_model_judge(judge)

    def apply(self, resps: Sequence[Answer], docs: Sequence[Mapping[str, Any]]) -> list[Answer]:
        """Judge all answers of a task at once.

        Raises:
            CoverageError: when too few of them have a verdict.
        """
        answers = [_to_judge(answer, doc["asked"]) for answer, doc in zip(resps, docs, strict=True)]
        places = [place for place, answer in enumerate(answers) if isinstance(answer, GeneratedText)]
        items = [_item(answers[place], docs[place]["asked"]) for place in places]
        if not items:
            return answers
        with kept_until_judged(items, self.judge):
            verdicts, report = self.judge.judge(items)
            logger.warning("%s", report) if report.reasons else logger.info("%s", report)
            if not self.judge.settings.dry_run:
                report.require(self.judge.settings.min_coverage)
        for place, verdict in zip(places, verdicts, strict=True):
            answers[place] = verdict
        return answers


def _to_judge(answer: Answer, asked: Mapping[str, Any]) -> Answer:
    if not asked.get("only_unedited") or not isinstance(answer, GeneratedText):
        return answer
    return answer.unedited or FailedAnswer(NEEDS_EDITED_HF.format(what="the unedited model's answers"))


def _item(answer: Answer, asked: Mapping[str, Any]) -> Item:
    assert isinstance(answer, GeneratedText)
    return Item(asked["question"], asked["gold"], answer.text.strip())


@contextmanager
def kept_until_judged(items: Sequence[Item], judge: ModelJudge) -> Iterator[None]:
    """Keep the answers in a file until they are judged: generating them again would cost more than judging them."""
    path = judge.store.path and _pending(judge.store.path.parent, items)
    if not path:
        yield
        return
    try:
        yield
    except EditingError as error:
        raise type(error)(
            f"{error} The answers are kept: lm-edit judge {path} --judge ... goes on with them."
        ) from None
    path.unlink(missing_ok=True)


def _pending(folder: Path, items: Sequence[Item]) -> Path:
    lines = [json.dumps({"question": item.question, "gold": item.gold, "answer": item.answer}) for item in items]
    text = "\n".join(lines) + "\n"
    path = folder / "pending" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    from edit_hooks.utils.files import replacing

    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path


def describe_verdicts(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """The verdicts of a case for its sample: truncated answer, label or reason, the judge's whole reply, and who."""
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
