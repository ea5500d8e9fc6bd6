"""Cost of the requests behind some answers or texts, before any of them is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from edit_hooks.utils.errors import EditingError
from judges.prompt import Chat, estimate_tokens
from judges.settings import JudgeSettings


class CostEstimate(NamedTuple):
    """Cost of some items, computed without a request.

    Attributes:
        unit: plural name of the items, for messages.
        num_items: items, duplicates included.
        num_distinct: distinct items; ``num_stored`` of them have a stored reply, ``num_calls`` need a request.
        prompt_tokens: estimate, characters / 4.
        reply_tokens: upper bound; ``None`` if replies are not limited.
    """

    unit: str
    num_items: int
    num_distinct: int
    num_stored: int
    num_calls: int
    prompt_tokens: int
    reply_tokens: int | None

    @classmethod
    def of(
        cls, unit: str, num_items: int, num_stored: int, missing: Sequence[Chat], settings: JudgeSettings
    ) -> CostEstimate:
        """The estimate for items of which ``num_stored`` distinct ones have a reply, and ``missing`` have none."""
        limit = settings.max_reply_tokens
        return cls(
            unit=unit,
            num_items=num_items,
            num_distinct=num_stored + len(missing),
            num_stored=num_stored,
            num_calls=len(missing),
            prompt_tokens=sum(map(estimate_tokens, missing)),
            reply_tokens=None if limit is None else limit * len(missing),
        )

    def require_within(self, settings: JudgeSettings, who: str, remedy: str) -> None:
        """Raise EditingError if the estimate exceeds a budget of the settings.

        Args:
            who: the model, for the message. remedy: what needs fewer requests.
        """
        for name, estimate, budget in (
            ("max_calls", self.num_calls, settings.max_calls),
            ("max_tokens", self.prompt_tokens, settings.max_tokens),
        ):
            if budget is not None and estimate > budget:
                raise EditingError(
                    f"{who} would need {self}; that is more than {name}={budget}. No request was sent. Raise the "
                    f"budget, or {remedy} (--limit)."
                )

    def __str__(self) -> str:
        bound = "unbounded" if self.reply_tokens is None else f"at most {self.reply_tokens}"
        return (
            f"{self.num_items} {self.unit}, {self.num_distinct} distinct, {self.num_stored} in the store: "
            f"{self.num_calls} calls, about {self.prompt_tokens} prompt tokens, {bound} reply tokens"
        )
