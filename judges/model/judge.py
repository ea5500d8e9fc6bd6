"""`ModelJudge`: fill the prompt, ask what the store does not know, read the replies."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from edit_hooks.utils.errors import EditingError
from judges.backends.base import Backend, Fault, Outcome, Reply
from judges.base import Item, Judged, Report, Verdict, count_reasons
from judges.model.verdict_store import VerdictStore
from judges.parse import read_verdict
from judges.prompt import Chat, Prompt
from judges.settings import OFF, JudgeSettings

log = logging.getLogger("lm_eval.judges")


DRY_RUN = "dry run: the judge was not asked"


CHARACTERS_PER_TOKEN = 4  # a rough rule for English, good enough for a budget


class Plan(NamedTuple):
    """What judging would take: answers, different ones, those in the store, calls to make, and tokens.

    ``prompt_tokens`` is an estimate (characters / 4); ``reply_tokens`` is the most that may come, ``None``: no bound.
    """

    num_items: int
    num_distinct: int
    num_stored: int
    num_calls: int
    prompt_tokens: int
    reply_tokens: int | None

    def __str__(self) -> str:
        most = "unbounded" if self.reply_tokens is None else f"at most {self.reply_tokens}"
        return (
            f"{self.num_items} answers, {self.num_distinct} distinct, {self.num_stored} in the store: "
            f"{self.num_calls} calls, about {self.prompt_tokens} prompt tokens, {most} reply tokens"
        )


class ModelJudge:
    """A language model as a judge.

    Args:
        settings: which model and how.
        prompt: the filled-in slots' frame.
        backend: runs the model.
        folder: of the verdict store; by default as the settings say.
    """

    def __init__(self, settings: JudgeSettings, prompt: Prompt, backend: Backend, folder: Path | None = None) -> None:
        self.settings, self.backend = settings, backend
        self.prompt = prompt if settings.system is None else replace(prompt, system=settings.system)
        self.store = VerdictStore(folder or store_folder(settings), settings.identity, self.prompt.hash)
        model = Path(settings.model).name if settings.backend == "hf" else settings.model  # of a folder its name
        self.name = f"{model} ({prompt.name})"

    def describe(self) -> dict[str, object]:
        """What results say about this judge (JSON-able, without keys)."""
        return {**self.settings.identity, "prompt": self.prompt.name, "prompt_hash": self.prompt.hash}

    def plan(self, items: Sequence[Item]) -> Plan:
        """What :meth:`judge` would ask, without asking."""
        distinct, stored = self._known(items)
        chats = [self.prompt.chat(item) for item in distinct if item not in stored]
        bound = self.settings.max_reply_tokens
        replies = None if bound is None else bound * len(chats)
        return Plan(len(items), len(distinct), len(stored), len(chats), sum(map(_estimate, chats)), replies)

    def judge(self, items: Sequence[Item]) -> Judged:
        """One verdict per item, in order; each distinct item is asked once, and never again when the store has it.

        Raises:
            EditingError: when the budget is plainly too small, before anything is asked; when the judge cannot work.
        """
        distinct, stored = self._known(items)
        missing = [item for item in distinct if item not in stored]
        outcomes: dict[Item, Outcome] = dict(stored)
        num_calls, fresh = 0, list[Reply]()
        if self.settings.dry_run:
            log.warning("judge %s, dry run: %s", self.name, self.plan(items))
            outcomes |= {item: Fault(DRY_RUN) for item in missing}
        elif missing:
            self._check_budget(items)
            asked = self.backend.ask(
                [self.prompt.chat(item) for item in missing],
                lambda index, reply: self.store.write(missing[index], reply),
            )
            outcomes |= dict(zip(missing, asked.outcomes, strict=True))
            num_calls, fresh = asked.num_calls, [outcome for outcome in asked.outcomes if isinstance(outcome, Reply)]
        verdicts = [self._verdict(item, outcomes[_asked(item)]) for item in items]
        report = Report(
            judge=self.name,
            num_items=len(items),
            num_scored=sum(verdict.label is not None for verdict in verdicts),
            num_distinct=len(distinct),
            num_stored=len(stored),
            num_calls=num_calls,
            prompt_tokens=sum(reply.prompt_tokens for reply in fresh),
            reply_tokens=sum(reply.reply_tokens for reply in fresh),
            reasons=count_reasons(verdicts),
        )
        return Judged(verdicts, report)

    def _known(self, items: Sequence[Item]) -> tuple[list[Item], dict[Item, Reply]]:
        distinct = list(dict.fromkeys(map(_asked, items)))
        return distinct, self.store.read(distinct)

    def _check_budget(self, items: Sequence[Item]) -> None:
        plan, settings = self.plan(items), self.settings
        for what, needed, allowed in (
            ("max_calls", plan.num_calls, settings.max_calls),
            ("max_tokens", plan.prompt_tokens, settings.max_tokens),
        ):
            if allowed is not None and needed > allowed:
                raise EditingError(
                    f"judge {self.name} would need {plan}; that is more than {what}={allowed}. Nothing was asked. "
                    "Raise the budget, or judge fewer answers (--limit)."
                )

    def _verdict(self, item: Item, outcome: Outcome) -> Verdict:
        about = {"judge": self.name, "prompt_hash": self.prompt.hash, "answer": item.answer}
        if isinstance(outcome, Fault):
            return Verdict(unscored_reason=outcome.reason, **about)  # type: ignore[arg-type]
        label, reason = read_verdict(outcome.text, self.prompt.labels, finish=outcome.finish)
        return Verdict(label=label, unscored_reason=reason, raw_reply=outcome.text, **about)  # type: ignore[arg-type]


def store_folder(settings: JudgeSettings) -> Path | None:
    """Where replies and answers waiting for a verdict are kept; ``None`` with ``store=off``."""
    if settings.store == OFF:
        return None
    if settings.store:
        return Path(settings.store).expanduser()
    from edit_hooks.utils.files import cache_root  # imports torch, which string judges do not need

    return cache_root() / "judges"


def _asked(item: Item) -> Item:
    """What of an item the judge sees: not the aliases."""
    return item._replace(aliases=())


def _estimate(chat: Chat) -> int:
    return math.ceil(sum(len(message["content"]) for message in chat) / CHARACTERS_PER_TOKEN)
