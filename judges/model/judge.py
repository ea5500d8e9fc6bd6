"""`ModelJudge`: fill the prompt, request the replies that are not stored, and parse them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.storage.files import cache_root, require_folder
from judges.backends.base import Backend, Fault, Outcome, Reply
from judges.base import Item, Judgment, Report, Verdict, count_reasons
from judges.model.cost import CostEstimate
from judges.model.verdict_store import VerdictStore
from judges.parse import ParsedReply, read_verdict
from judges.prompt import Prompt
from judges.settings import OFF, JudgeSettings

log = get_logger("lm_eval.judges")

DRY_RUN = "dry run: no request sent"


class ModelJudge:
    """A language model as a judge.

    Args:
        settings: model and limits.
        prompt: the prompt; its system message gives way to that of the settings.
        backend: runs the model.
        folder: folder of the verdict store; by default from the settings.
    """

    def __init__(self, settings: JudgeSettings, prompt: Prompt, backend: Backend, folder: Path | None = None) -> None:
        self.settings, self.backend = settings, backend
        self.prompt = prompt if settings.system is None else replace(prompt, system=settings.system)
        self.store = VerdictStore(folder or store_folder(settings), settings.identity, self.prompt.hash)
        model = Path(settings.model).name if settings.backend == "hf" else settings.model  # last part of a folder
        self.name = f"{model} ({prompt.name})"

    def describe(self) -> dict[str, object]:
        """Return the judge's entry in the results (JSON-able, without keys)."""
        settings = self.settings
        return {**settings.identity, **settings.reading, "prompt": self.prompt.name, "prompt_hash": self.prompt.hash}

    def plan(self, items: Sequence[Item]) -> CostEstimate:
        """Compute the cost of :meth:`judge` without a request."""
        distinct, stored = self._read_stored(items)
        chats = [self.prompt.chat(item) for item in distinct if item not in stored]
        return CostEstimate.of("answers", len(items), len(stored), chats, self.settings)

    def judge(self, items: Sequence[Item]) -> Judgment:
        """Return one verdict per item, in order. Each distinct item without a stored reply costs one request.

        With ``ask_again=unscored`` a stored reply without a verdict counts as none.

        Raises:
            EditingError: if the estimate exceeds the budget, before any request; if the judge cannot be used.
        """
        distinct, stored = self._read_stored(items)
        missing = [item for item in distinct if item not in stored]
        outcomes: dict[Item, Outcome] = dict(stored)
        num_calls, new_replies = 0, list[Reply]()
        if self.settings.dry_run:
            log.warning("judge %s, dry run: %s", self.name, self.plan(items))
            outcomes |= {item: Fault(DRY_RUN) for item in missing}
        elif missing:
            self.plan(items).require_within(self.settings, f"judge {self.name}", "judge fewer answers")
            result = self.backend.complete(
                [self.prompt.chat(item) for item in missing],
                lambda index, reply: self.store.write(missing[index], reply),
            )
            outcomes |= dict(zip(missing, result.outcomes, strict=True))
            num_calls = result.num_calls
            new_replies = [outcome for outcome in result.outcomes if isinstance(outcome, Reply)]
        verdicts = [self._verdict(item, outcomes[_without_aliases(item)]) for item in items]
        unreadable = [
            verdict.raw_reply for verdict in verdicts if verdict.label is None and verdict.raw_reply is not None
        ]
        report = Report(
            judge=self.name,
            num_items=len(items),
            num_scored=sum(verdict.label is not None for verdict in verdicts),
            num_distinct=len(distinct),
            num_stored=len(stored),
            num_calls=num_calls,
            prompt_tokens=sum(reply.prompt_tokens for reply in new_replies),
            reply_tokens=sum(reply.reply_tokens for reply in new_replies),
            reasons=count_reasons(verdicts),
            num_unreadable=len(unreadable),
            unreadable_reply=next(iter(unreadable), None),
            is_stored=self.store.is_kept,
        )
        return Judgment(verdicts, report)

    def _read_stored(self, items: Sequence[Item]) -> tuple[list[Item], dict[Item, Reply]]:
        """Return the distinct items and the stored replies among them, without those to be requested again."""
        distinct = list(dict.fromkeys(map(_without_aliases, items)))
        stored = self.store.read(distinct)
        if self.settings.ask_again == "unscored":
            stored = {item: reply for item, reply in stored.items() if self._verdict(item, reply).label is not None}
        return distinct, stored

    def _verdict(self, item: Item, outcome: Outcome) -> Verdict:
        if isinstance(outcome, Fault):
            parsed, raw_reply = ParsedReply(reason=outcome.reason), None
        else:
            raw_reply = outcome.text
            parsed = read_verdict(
                raw_reply, self.prompt.labels, finish=outcome.finish, think_end=self.settings.think_end_token
            )
        return Verdict(
            label=parsed.label,
            unscored_reason=parsed.reason,
            judge=self.name,
            prompt_hash=self.prompt.hash,
            raw_reply=raw_reply,
            answer=item.answer,
        )


def store_folder(settings: JudgeSettings) -> Path | None:
    """Folder of the verdict store and of answers that wait for a verdict; ``None`` with ``store=off``."""
    if settings.store == OFF:
        return None
    return require_folder(settings.store or cache_root() / "judges", "verdict store")


def _without_aliases(item: Item) -> Item:
    """Return the part of an item that the prompt shows."""
    return item._replace(aliases=())
