"""`natural_stop`: the first step of every filter pipeline of the tasks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import lm_eval.filters  # noqa: F401  # fills the registry; it does so only while that is empty, so before we add to it
from lm_eval.api.filter import Filter
from lm_eval.api.registry import register_filter

from lm_eval_tasks.common.asking.answers import Answer, read_answer


@register_filter("natural_stop")
class NaturalStop(Filter):
    """Convert responses to typed answers; cut texts at the first stop string.

    The raw continuation stays in ``resps``, so another pipeline can cut the same generation by another rule.

    Args:
        until: stop strings that replace the task's own, for a second pipeline with another rule.
    """

    def __init__(self, until: list[str] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.until = until

    def apply(self, resps: Iterable[Sequence[Any]], docs: Iterable[Mapping[str, Any]]) -> list[Answer]:
        """The first response of each instance.

        Further ones are copies that padding on several ranks appends.
        """
        return [
            read_answer(
                responses[0],
                doc["asked"]["until"] if self.until is None else self.until,
                fixed_length=has_fixed_length(doc["asked"]),
            )
            for responses, doc in zip(resps, docs, strict=True)
        ]


def has_fixed_length(asked: Mapping[str, Any]) -> bool:
    """Whether the answer to a question has the length of a given text."""
    return bool(asked.get("decoding") and asked["decoding"]["length_of"] is not None)
