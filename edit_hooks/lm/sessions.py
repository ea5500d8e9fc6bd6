"""The session of ``load_edit=``: every question with one saved edit written into the weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from edit_hooks.deltas.apply import AppliedDeltas
from edit_hooks.deltas.delta import Delta
from edit_hooks.lm.independent import IndependentEdits, group_key
from edit_hooks.lm.plan import EditPlan
from edit_hooks.lm.stream import EditStream
from edit_hooks.request import EditRequest, RequestGroup


class SavedEditSession:
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

    def answer(self, asked: Sequence[Question], unedited: Unedited, ask: Ask) -> Answers:
        with self.scope() as runtime_part:
            found = ask_once((q.item for q in asked), lambda items: ask([(item, runtime_part) for item in items]))
        before = {q.item: {"unedited": dict(unedited[q.item])} for q in asked if q.ask_unedited}
        return [{**found[q.item], **self._place(q), **(before[q.item] if q.ask_unedited else {})} for q in asked]

    def _place(self, question: Question) -> dict[str, Any]:
        edited = self.keys is None or all(request.key in self.keys for request in question.requests)
        place = {"edited": edited, "step": 0 if edited else None, "num_edits": len(self.keys or ())}
        return {"edit": self.report if edited else None, "stream": place}

    @contextlib.contextmanager
    def scope(self) -> Iterator[Delta | None]:
        with AppliedDeltas(self.model) as applied:
            applied.add(self.delta)
            yield applied.runtime_part

    def stamp(self) -> dict[str, Any]:
        return {"editor_config": None, "loaded_edit": self.report}


Job = tuple[Any, Delta | None]


Ask = Callable[[Sequence[Job]], list[dict[str, Any]]]


Answers = list[dict[str, Any]]


Unedited = Mapping[Any, dict[str, Any]]


@dataclass(frozen=True)
class Question:
    """One question: the token-level item, the edits of its case, and whether the unedited answer is wanted too."""

    item: Any
    requests: tuple[EditRequest, ...]
    ask_unedited: bool


class Session(Protocol):
    """What the model class needs from a run's way of editing."""

    def answer(self, asked: Sequence[Question], unedited: Unedited, ask: Ask) -> Answers:
        """Answers in the order of the questions."""

    def scope(self) -> contextlib.AbstractContextManager[Delta | None]:
        """The weights under which ordinary tasks (mmlu, glue, ...) are answered; gives what is not in the weights."""

    def stamp(self) -> dict[str, Any]:
        """What the result file says about the edits: full configuration, steps."""


class UneditedSession:
    """``mode=none``: every question on the untouched model."""

    def answer(self, asked: Sequence[Question], unedited: Unedited, ask: Ask) -> Answers:
        return [{**unedited[question.item], "edit": None, **_before(question, unedited)} for question in asked]

    def scope(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def stamp(self) -> dict[str, Any]:
        return {"editor_config": None}


class SingleEditSession:
    """``mode=single`` and grouped ``mode=batch``: every unit of edits on the untouched model.

    Args:
        plan: with units, a question is answered under the unit that holds its case's edits; without, under its own.
    """

    def __init__(self, edits: IndependentEdits, plan: EditPlan) -> None:
        self.edits, self.plan = edits, plan

    def answer(self, asked: Sequence[Question], unedited: Unedited, ask: Ask) -> Answers:
        units = [self._unit(question) for question in asked]
        deltas = self.edits.get(unit for unit in units if unit is not None)
        jobs: dict[tuple[str, Any], Delta] = {}
        for question, unit in zip(asked, units, strict=True):
            if unit is not None:
                delta = deltas[group_key(unit)]
                if isinstance(delta, Delta):
                    jobs[(group_key(unit), question.item)] = delta
        answered = ask([(item, delta) for (_, item), delta in jobs.items()])
        found = dict(zip(jobs, answered, strict=True))
        return [
            {**self._assemble(question, unit, found), **_before(question, unedited)}
            for question, unit in zip(asked, units, strict=True)
        ]

    def _unit(self, question: Question) -> RequestGroup | None:
        if not self.plan.units:
            return question.requests
        numbers = {self.plan.unit_of.get(request.key) for request in question.requests}
        return None if None in numbers or len(numbers) != 1 else self.plan.units[numbers.pop() or 0]

    def _assemble(
        self, question: Question, unit: RequestGroup | None, found: dict[Any, dict[str, Any]]
    ) -> dict[str, Any]:
        if unit is None:
            place = {"edited": False, "step": None, "num_edits": self.plan.num_edits}
            return {"error": "this case's edits are not (all) in one group of this run's edits", "stream": place}
        report = self.edits.report(group_key(unit))
        answer = found.get((group_key(unit), question.item))
        if answer is None:
            return {"error": report["error"]}
        return {**answer, "edit": report}

    def scope(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def stamp(self) -> dict[str, Any]:
        return {"editor_config": self.edits.config}


class StreamSession:
    """``mode=batch`` (one step) and ``mode=sequential``: all edits on the same weights.

    A question whose case is not among the stream's edits is still answered on the final weights; its answer says
    ``stream.edited = false``.
    """

    def __init__(self, stream: EditStream, immediate: bool, retention: bool) -> None:
        self.stream, self.immediate, self.retention = stream, immediate, retention
        self.plan = stream.plan

    def answer(self, asked: Sequence[Question], unedited: Unedited, ask: Ask) -> Answers:
        steps = [self._step_of(question) for question in asked]
        checkpoints = self.plan.checkpoint_steps()
        watched = set(checkpoints.values())
        seen: dict[int, dict[Any, dict[str, Any]]] = {}

        def visitor(step: int, runtime_part: Delta | None) -> None:
            due = [q.item for q, own in zip(asked, steps, strict=True) if self._due(step, own, watched)]
            seen[step] = ask_once(due, lambda items: ask([(item, runtime_part) for item in items]))

        self.stream.visit(visitor)
        final = self.stream.num_steps - 1
        return [
            self._assemble(question, own, seen, unedited, checkpoints, final)
            for question, own in zip(asked, steps, strict=True)
        ]

    def _step_of(self, question: Question) -> int | None:
        """The step with which a case's edits are complete; ``None`` when some of them are not in the stream."""
        numbers = [self.plan.unit_of.get(request.key) for request in question.requests]
        return None if None in numbers else max(number for number in numbers if number is not None)

    def _due(self, step: int, own: int | None, watched: set[int]) -> bool:
        """Whether a question is asked after ``step``: at the end, right after its edit, at checkpoints, or always."""
        if step == self.stream.num_steps - 1:
            return True
        if own is None or own > step:
            return False
        return (self.immediate and own == step) or step in watched or self.retention

    def _assemble(
        self,
        question: Question,
        own: int | None,
        seen: dict[int, dict[Any, dict[str, Any]]],
        unedited: Unedited,
        checkpoints: dict[int, int],
        final: int,
    ) -> dict[str, Any]:
        before = _before(question, unedited)
        made = own is not None and own <= final
        place: dict[str, Any] = {"edited": made, "step": own, "num_edits": self.plan.edits_after(final)}
        if own is not None and not made:
            return {"error": self.stream.stopped or "the stream ended before this edit", **before, "stream": place}
        if made and own is not None:
            if self.immediate:
                place["immediate"] = dict(seen[own][question.item])
            place["checkpoints"] = {
                str(number): dict(seen[step][question.item])
                for number, step in checkpoints.items()
                if own <= step <= final
            }
            if self.retention:
                place["after_step"] = {str(step): dict(seen[step][question.item]) for step in range(own, final + 1)}
        report = self.stream.report(own) if made and own is not None else None
        return {**seen[final][question.item], "edit": report, **before, "stream": place}

    @contextlib.contextmanager
    def scope(self) -> Iterator[Delta | None]:
        """The final weights of the stream."""
        self.stream.visit(lambda step, runtime_part: None)  # makes what is not made yet
        with AppliedDeltas(self.stream.model) as applied:
            for delta in self.stream.deltas:
                applied.add(delta)
            yield applied.runtime_part

    def stamp(self) -> dict[str, Any]:
        return {
            "editor_config": self.stream.config,
            "num_edits": self.plan.num_edits,
            "num_steps": len(self.plan.units),
            "stopped": self.stream.stopped,
            "steps": self.stream.steps,
        }


def ask_once(items: Iterable[Any], ask: Callable[[Sequence[Any]], list[dict[str, Any]]]) -> dict[Any, dict[str, Any]]:
    """Answers by item; identical items are asked once."""
    distinct = list(dict.fromkeys(items))
    return dict(zip(distinct, ask(distinct), strict=True)) if distinct else {}


def _before(question: Question, unedited: Unedited) -> dict[str, Any]:
    """The field ``unedited`` of an answer, where it is wanted."""
    return {"unedited": dict(unedited[question.item])} if question.ask_unedited else {}
