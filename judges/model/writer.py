"""`Writer`: a language model that answers chats with texts, and the store of its replies.

Each reply is written as soon as it arrives: a killed run loses only the requests in flight, and a second run sends only
the missing ones. Replies are stored verbatim and checked on each read. Faults are not stored.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edit_hooks.utils.storage.files import cache_root, require_folder
from edit_hooks.utils.storage.sqlite_cache import CacheTable, Column, SQLiteCache
from judges.backends.base import UNFINISHED_THOUGHT, Backend, Fault, Outcome, Reply
from judges.base import CoverageError, what_is_kept
from judges.model.cost import CostEstimate
from judges.model.judge import DRY_RUN
from judges.prompt import Chat
from judges.settings import OFF, JudgeSettings
from judges.thoughts import split_answer, without_special_tokens

FILE = "writer.sqlite"

TABLE = CacheTable(
    name="replies",
    columns="key TEXT PRIMARY KEY, writer TEXT, chat TEXT, reply TEXT, checksum TEXT, stored_at REAL",
    value="reply",
)


class ReplyStore:
    """Replies of one writer by chat.

    Args:
        folder: folder of the file, created at the first write. ``None`` keeps the replies in memory.
        writer: all settings that a reply depends on (JSON-able).
    """

    def __init__(self, folder: Path | None, writer: Mapping[str, object]) -> None:
        self.path = None if folder is None else folder / FILE
        self.writer = json.dumps(writer, sort_keys=True, ensure_ascii=False)
        self._cache = SQLiteCache(self.path, TABLE)
        self._lock = threading.Lock()

    @property
    def is_kept(self) -> bool:
        """Whether replies are stored for later runs: there is a folder, and no write has failed."""
        return self._cache.is_kept

    def key(self, chat: Chat) -> str:
        """SHA-256 (hex) over writer and chat."""
        return hashlib.sha256(json.dumps([self.writer, chat]).encode()).hexdigest()

    def read(self, chats: Iterable[Chat]) -> dict[str, Reply]:
        """Return the stored replies by the chat's key."""
        stored = self._cache.read([self.key(chat) for chat in chats])
        return {key: Reply(**json.loads(reply)) for key, reply in stored.items()}

    def write(self, chat: Chat, reply: Reply) -> None:
        """Store a reply; safe to call from several threads."""
        details: dict[str, Column] = {"writer": self.writer, "chat": json.dumps(chat), "stored_at": time.time()}
        with self._lock:  # the threads of a process would otherwise wait for the file in SQLite's busy loop
            self._cache.write({self.key(chat): json.dumps(reply._asdict())}, details)


@dataclass(frozen=True, kw_only=True)
class WriterReplies:
    """Outcomes in the order of the chats, and what they cost.

    Args:
        outcomes: a reply, without its thought, or a fault for each chat.
        num_stored: distinct chats whose reply was in the store.
        num_calls: requests sent, retries included.
        prompt_tokens, reply_tokens: token counts of the new replies: those that the server reported, or estimates.
        is_stored: whether replies are in a store that the next run reads.
    """

    outcomes: list[Outcome]
    num_stored: int
    num_calls: int
    prompt_tokens: int
    reply_tokens: int
    is_stored: bool = True

    def __str__(self) -> str:
        return (
            f"{len(self.outcomes)} requests, {self.num_stored} from the store, {self.num_calls} calls, "
            f"{self.prompt_tokens} + {self.reply_tokens} tokens"
        )

    def require(self, min_coverage: float) -> None:
        """Raise CoverageError if less than ``min_coverage`` (0..1) of the chats have a reply."""
        faults = [outcome for outcome in self.outcomes if isinstance(outcome, Fault)]
        num_replies = len(self.outcomes) - len(faults)
        if num_replies < min_coverage * len(self.outcomes):
            reasons = Counter(fault.reason for fault in faults).most_common()
            raise CoverageError(
                f"the writer replied to {num_replies} of {len(self.outcomes)} requests "
                f"({num_replies / len(self.outcomes):.1%}), less than min_coverage={min_coverage:.0%}. Reasons: "
                f"{', '.join(f'{reason} ({count})' for reason, count in reasons)}. "
                f"{what_is_kept(self.is_stored, 'store')}"
            )


class Writer:
    """A language model that writes.

    Args:
        settings: model and limits. A system message precedes each chat.
        backend: runs the model.
    """

    def __init__(self, settings: JudgeSettings, backend: Backend) -> None:
        self.settings, self.backend = settings, backend
        self.name = Path(settings.model).name if settings.backend == "hf" else settings.model  # last part of a folder
        self.store = ReplyStore(_store_folder(settings), settings.identity)
        self._is_checked = False

    def describe(self) -> dict[str, object]:
        """Return all settings that the replies depend on besides the chats (JSON-able, without keys)."""
        system = {} if self.settings.system is None else {"system": self.settings.system}
        return {**self.settings.identity, **self.settings.reading, **system}

    def plan(self, chats: Sequence[Chat]) -> CostEstimate:
        """Compute the cost of :meth:`write` without a request."""
        distinct, stored = self._read_stored(chats)
        missing = [chat for key, chat in distinct.items() if key not in stored]
        return CostEstimate.of("requests", len(chats), len(stored), missing, self.settings)

    def write(self, chats: Sequence[Chat]) -> WriterReplies:
        """Return one outcome per chat, in order. Each distinct chat without a stored reply costs one request.

        Raises:
            EditingError: if the estimate exceeds the budget, before any request; if the writer cannot be used.
        """
        distinct, stored = self._read_stored(chats)
        missing = {key: chat for key, chat in distinct.items() if key not in stored}
        outcomes: dict[str, Outcome] = dict(stored)
        num_calls, new_replies = 0, list[Reply]()
        if self.settings.dry_run:
            outcomes |= {key: Fault(DRY_RUN) for key in missing}
        elif missing:
            self.plan(chats).require_within(self.settings, f"writer {self.name}", "write less")
            self._check_backend()
            requests = list(missing.values())
            result = self.backend.complete(requests, lambda index, reply: self.store.write(requests[index], reply))
            outcomes |= dict(zip(missing, result.outcomes, strict=True))
            num_calls = result.num_calls
            new_replies = [outcome for outcome in result.outcomes if isinstance(outcome, Reply)]
        return WriterReplies(
            outcomes=[
                without_thought(outcomes[self.store.key(self._with_system(chat))], self.settings.think_end_token)
                for chat in chats
            ],
            num_stored=len(stored),
            num_calls=num_calls,
            prompt_tokens=sum(reply.prompt_tokens for reply in new_replies),
            reply_tokens=sum(reply.reply_tokens for reply in new_replies),
            is_stored=self.store.is_kept,
        )

    def _check_backend(self) -> None:
        """Check the backend before the first request; a writer of many steps asks its server once."""
        if not self._is_checked:
            self.backend.check()
            self._is_checked = True

    def _read_stored(self, chats: Sequence[Chat]) -> tuple[dict[str, Chat], dict[str, Reply]]:
        """Return the distinct chats, as they are sent, and the stored replies among them; both by key."""
        sent = map(self._with_system, chats)
        distinct = {self.store.key(chat): chat for chat in sent}
        return distinct, self.store.read(distinct.values())

    def _with_system(self, chat: Chat) -> Chat:
        system = self.settings.system
        return chat if system is None else [{"role": "system", "content": system}, *chat]


def without_thought(outcome: Outcome, think_end: str | None = None) -> Outcome:
    """Return a reply's answer; that of a reply without one is empty, with its own finish reason."""
    if isinstance(outcome, Fault):
        return outcome
    text = split_answer(outcome.text, think_end).text
    if text is None:
        return outcome._replace(text="", finish=UNFINISHED_THOUGHT)
    return outcome._replace(text=without_special_tokens(text))


def _store_folder(settings: JudgeSettings) -> Path | None:
    """Folder of the store; ``None`` with ``store=off``."""
    if settings.store == OFF:
        return None
    return require_folder(settings.store or cache_root() / "writer", "reply store")
