"""Judges that compare strings: free, deterministic, and blind to meaning."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from judges.base import CORRECT, INCORRECT, Item, Judgment, Report, Verdict
from judges.match import alias_match, any_exact_match, contains, match_ratio

# name -> whether the item's answer is correct. ``contains`` and ``match_ratio`` are defined for one text: no aliases.
RULES: dict[str, Callable[[Item], bool]] = {
    "em": lambda item: any_exact_match(item.answer, (item.gold, *item.aliases)),
    "alias": lambda item: alias_match(item.answer, (item.gold, *item.aliases)),
    "contains": lambda item: contains(item.answer, item.gold),
    "match_ratio": lambda item: match_ratio(item.answer, item.gold) == 1.0,
}


class StringJudge:
    """A rule of :data:`RULES` as a judge; every answer gets a label."""

    def __init__(self, name: str) -> None:
        self.name, self.rule = name, RULES[name]

    def judge(self, items: Sequence[Item]) -> Judgment:
        """Return one verdict per item, in order."""
        verdicts = [
            Verdict(label=CORRECT if self.rule(item) else INCORRECT, judge=self.name, answer=item.answer)
            for item in items
        ]
        return Judgment(verdicts, Report(judge=self.name, num_items=len(items), num_scored=len(items)))
