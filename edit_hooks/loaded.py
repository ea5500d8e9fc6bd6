"""The session of ``load_edit=``: every question with one saved edit written into the weights."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch import nn

from edit_hooks.delta import AppliedDeltas, Delta
from edit_hooks.session import Answers, Ask, Asked, Unedited, ask_once


class Loaded:
    """One saved edit, and nothing else.

    Args:
        report: what samples and results say about the edit (editor, file, checksum).
        keys: the requests the edit writes; ``None`` when it does not say. A question whose case is not among them is
            answered all the same and says ``stream.edited = false``, as in a stream.
    """

    def __init__(self, model: nn.Module, delta: Delta, report: dict[str, Any], keys: Collection[str] | None) -> None:
        self.model, self.delta, self.keys = model, delta, keys
        with AppliedDeltas(model) as applied:
            applied.add(delta)
            self.report = {**report, "update_norm_ratio": applied.norm_ratio()}

    def answer(self, asked: Sequence[Asked], unedited: Unedited, ask: Ask) -> Answers:
        with self.scope() as standing:
            found = ask_once((q.item for q in asked), lambda items: ask([(item, standing) for item in items]))
        before = {q.item: {"unedited": dict(unedited[q.item])} for q in asked if q.ask_unedited}
        return [{**found[q.item], **self._place(q), **(before[q.item] if q.ask_unedited else {})} for q in asked]

    def _place(self, question: Asked) -> dict[str, Any]:
        edited = self.keys is None or all(request.key in self.keys for request in question.requests)
        place = {"edited": edited, "step": 0 if edited else None, "num_edits": len(self.keys or ())}
        return {"edit": self.report if edited else None, "stream": place}

    @contextlib.contextmanager
    def scope(self) -> Iterator[Delta | None]:
        with AppliedDeltas(self.model) as applied:
            applied.add(self.delta)
            yield applied.standing

    def stamp(self) -> dict[str, Any]:
        return {"editor_config": None, "loaded_edit": self.report}
