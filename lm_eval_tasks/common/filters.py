"""`natural_stop`: the first step of every filter pipeline of our tasks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import lm_eval.filters  # noqa: F401  # fills the registry: it does so only while it is empty, so before we add to it
from lm_eval.api.filter import Filter
from lm_eval.api.registry import register_filter

from lm_eval_tasks.common.answers import Answer, read_answer


@register_filter("natural_stop")
class NaturalStop(Filter):
    """Read each response into its typed form and cut generated texts at the first stop string.

    The raw continuation stays in ``resps``, so the same generation can be read again under another rule.

    Args:
        until: stop strings to use instead of those the task asked for, for a second pipeline with another rule.
    """

    def __init__(self, until: list[str] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.until = until

    def apply(self, resps: Iterable[list[Any]], docs: list[dict[str, Any]]) -> list[Answer]:
        """First response of each instance, read; padding on several ranks may append more, which are copies."""
        answers = []
        for responses, doc in zip(resps, docs, strict=True):
            stops = doc["asked"]["until"] if self.until is None else self.until
            answers.append(read_answer(responses[0], stops))
        return answers
