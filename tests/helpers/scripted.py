"""Language models that answer from a script: no weights, no tokenizer, every number set by the test."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from edit_hooks.answers import (
    IMMEDIATE,
    EditedAnswer,
    FailedAnswer,
    GeneratedText,
    ModelAnswer,
    ScoredContinuation,
    StopReason,
    StreamPosition,
)
from edit_hooks.edit_report import Cost, EditReport, StreamStep

# (context, continuation, unedited?) -> sum log-probability and the teacher-forced argmax; ids count up from 0
Likelihoods = Callable[[str, str, bool], tuple[float, list[int]]]
# (context, unedited?) -> raw continuation
Texts = Callable[[str, bool], str]


def default_likelihood(context: str, continuation: str, unedited: bool) -> tuple[float, list[int]]:
    """Every word is a token; log-probability and argmax are a fixed function of the texts."""
    num_tokens = len(continuation.split())
    drawn = sum(map(ord, context + continuation)) % 7
    return -0.5 * num_tokens - drawn / 4, [index if drawn < 4 else index + 1 for index in range(num_tokens)]


def default_text(context: str, unedited: bool) -> str:
    """A sentence and the start of another."""
    return " Port Elna. Then"


class ScriptedLM(LM):
    """Answers like `edited_hf`.

    Args:
        likelihoods, texts: the script.
        errors: case id -> reason, for cases whose edit fails.
    """

    tokenizer_name = "scripted"

    def __init__(
        self,
        likelihoods: Likelihoods = default_likelihood,
        texts: Texts = default_text,
        errors: dict[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.likelihoods, self.texts, self.errors = likelihoods, texts, errors or {}
        self.seen: list[Instance] = []

    def loglikelihood(self, requests: list[Instance]) -> list[Any]:
        return [self._answer(request, self._likelihood) for request in requests]

    def generate_until(self, requests: list[Instance]) -> list[Any]:
        return [self._answer(request, self._generation) for request in requests]

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[Any]:
        raise AssertionError("no editing task has such requests")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        text = "".join(f"<{message['role']}>{message['content']}</{message['role']}>" for message in chat_history)
        return text + ("<assistant>" if add_generation_prompt else "")

    def chat_template(self, chat_template: bool | str = False) -> str:
        return "scripted"

    def _answer(self, request: Instance, answer: Callable[[tuple, bool], ModelAnswer]) -> Any:
        self.seen.append(request)
        if reason := self.errors.get(request.doc["case_id"]):
            asked = request.doc["asked"]["model"]
            before = None if asked == "edited" else answer(request.args, True)
            failed = FailedAnswer(f"edit failed: {reason}", unedited=before)
            return EditedAnswer(
                final=replace(before, unedited=before) if asked == "unedited" else failed,
                edit=EditReport(error=reason),
            )
        final = answer(request.args, False)
        if request.doc["asked"]["model"] != "edited":
            final = replace(final, unedited=answer(request.args, True))
        report = EditReport(key=request.doc["case_id"], cost=Cost(seconds=0.1))
        return EditedAnswer(final=final, edit=report)

    def _likelihood(self, args: tuple, unedited: bool) -> ScoredContinuation:
        return scored(*self.likelihoods(*args, unedited))

    def _generation(self, args: tuple, unedited: bool) -> GeneratedText:
        return generated(self.texts(args[0], unedited), "length")


class StockLM(ScriptedLM):
    """Answers like lm-eval's own models: pairs, and texts cut at the stop strings."""

    def _answer(self, request: Instance, answer: Callable[[tuple, bool], ModelAnswer]) -> Any:
        self.seen.append(request)
        final = answer(request.args, False)
        if isinstance(final, ScoredContinuation):
            return final.logprob, final.is_greedy
        return final.until(request.args[1]["until"]).text


class StreamLM(ScriptedLM):
    """Answers like `edited_hf` with ``mode=sequential``.

    A right answer prefers the first target and generates the gold answer; a wrong one does neither.

    Args:
        holds: case id -> one mark per step: "." before the case's edit, "1" or "0" after a step that leaves it right or
            wrong; "?" marks an edit that was not made. Other cases are not among the stream's edits. The unedited model
            and cases outside the stream are wrong, unless listed in ``known``.
        checkpoints: number of cases -> step that reaches it.
        retention: also answer after every step.
        known: case ids that the unedited model answers correctly.
        num_edits: edits in the final weights; by default all edits made.
        batch_size: cases per step.
    """

    def __init__(
        self,
        holds: dict[str, str],
        checkpoints: dict[int, int] | None = None,
        retention: bool = False,
        known: tuple[str, ...] = (),
        num_edits: int | None = None,
        batch_size: int = 1,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.holds, self.checkpoints, self.retention, self.known = holds, checkpoints or {}, retention, known
        self.num_cases = sum("?" not in marks for marks in holds.values())
        self.num_edits = self.num_cases if num_edits is None else num_edits

    def _answer(self, request: Instance, answer: Callable[[tuple, bool], ModelAnswer]) -> Any:
        self.seen.append(request)
        case = request.doc["case_id"]
        compared = request.doc["asked"]["model"] != "edited"
        unedited = self._answer_by_mark(request, case in self.known) if compared else None
        marks = self.holds.get(case)
        if marks is None:
            position = StreamPosition(
                edited=False, step=None, num_edits=self.num_edits, cases_before=0, num_cases=self.num_cases
            )
            return EditedAnswer(
                final=replace(self._answer_by_mark(request, case in self.known), unedited=unedited), position=position
            )
        own = marks.count(".")
        position = StreamPosition(
            edited="?" not in marks,
            step=own,
            num_edits=self.num_edits,
            cases_before=own * self.batch_size,
            num_cases=self.num_cases,
        )
        if "?" in marks:
            reason = "the guard stopped the stream"
            report = EditReport(error=reason)
            failed = FailedAnswer(f"edit failed: {reason}", unedited=unedited)
            return EditedAnswer(final=failed, edit=report, position=position)
        after = {step: self._answer_by_mark(request, marks[step] == "1") for step in range(own, len(marks))}
        report = EditReport(
            editor="scripted",
            step=StreamStep(step=own, num_edits=own + 1),
            cost=Cost(seconds=0.5),
            diagnostics={"final_loss": 0.25},
        )
        checkpoints = self.checkpoints.items()
        return EditedAnswer(
            final=replace(after[len(marks) - 1], unedited=unedited),
            edit=report,
            position=position,
            stages={
                IMMEDIATE: after[own],
                **{str(number): after[step] for number, step in checkpoints if own <= step < len(marks)},
                **(after if self.retention else {}),
            },
        )

    def _answer_by_mark(self, request: Instance, right: bool) -> ModelAnswer:
        if request.request_type == "generate_until":
            decoding = request.doc["asked"]["decoding"]
            if decoding and decoding["length_of"] is not None:  # one token per character of that text
                target = tuple(map(ord, decoding["length_of"]))
                answer = generated(decoding["length_of"] if right else "#" * len(target), "length")
                return replace(answer, target_ids=target)
            return generated(f" {request.doc['asked']['gold']}." if right else " something else.", "stop_string")
        target = request.args[1].strip()
        ids = list(range(len(target.split())))
        probes = [probe for probe in request.doc["probes"] if probe["prompt"] == request.args[0]]
        wanted = target in [probe["targets"][0] for probe in probes if probe["targets"]]
        argmax = ids if right == wanted else [index + 1 for index in ids]
        return scored((-1.0 if right == wanted else -2.0) * len(ids), argmax)


def scored(logprob: float, argmax: list[int]) -> ScoredContinuation:
    """A continuation of the tokens 0, 1, ... with a log-probability spread evenly over them."""
    ids = tuple(range(len(argmax)))
    return ScoredContinuation(
        logprob=logprob,
        is_greedy=tuple(argmax) == ids,
        token_ids=ids,
        token_logprobs=(logprob / len(ids),) * len(ids),
        token_argmax=tuple(argmax),
    )


def generated(text: str, stop: StopReason) -> GeneratedText:
    """A generation with one token per character."""
    return GeneratedText(raw=text, token_ids=tuple(map(ord, text)), stop=stop)


class Exchange:
    """Exchange of values between the ranks of a simulated distributed run."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size, timeout=60)
        self.slots: list[Any] = [None] * world_size

    def gather(self, rank: int, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        self.slots[rank] = value
        self.barrier.wait()
        values = list(self.slots)
        self.barrier.wait()
        return values


class Ranked:
    """Mix-in that makes a scripted model one rank of a distributed run in threads; the first base class."""

    def __init__(self, rank: int, exchange: Exchange, **script: Any) -> None:
        super().__init__(**script)
        self._rank, self._world_size, self._device = rank, len(exchange.slots), "cpu"
        self.exchange = exchange

    @property
    def device(self) -> str:
        return "cpu"

    def all_gather(self, tensor: Any) -> Any:
        import torch

        return torch.stack(self.exchange.gather(self.rank, tensor))

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        values = self.exchange.gather(self.rank, obj)
        return values if self.rank == dst else None

    def barrier(self) -> None:
        self.exchange.barrier.wait()


class RankedLM(Ranked, ScriptedLM):
    """A rank that answers like `edited_hf`."""


class RankedStreamLM(Ranked, StreamLM):
    """A rank that answers from a stream of edits."""
