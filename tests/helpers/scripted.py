"""Language models that answer from a script: no weights, no tokenizer, every number chosen by the test."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

# (context, continuation, unedited?) -> sum log-probability and the teacher-forced argmax; ids count up from 0
Likelihoods = Callable[[str, str, bool], tuple[float, list[int]]]
# (context, unedited?) -> raw continuation
Texts = Callable[[str, bool], str]


def default_likelihood(context: str, continuation: str, unedited: bool) -> tuple[float, list[int]]:
    """Every word one token; log-probability and argmax are a fixed function of the texts."""
    num_tokens = len(continuation.split())
    drawn = sum(map(ord, context + continuation)) % 7
    return -0.5 * num_tokens - drawn / 4, [index if drawn < 4 else index + 1 for index in range(num_tokens)]


def default_text(context: str, unedited: bool) -> str:
    """A sentence and the start of another one."""
    return " Port Elna. Then"


class ScriptedLM(LM):
    """Answers with mappings, as `edited_hf` does.

    Args:
        likelihoods, texts: the script.
        errors: case id -> reason, for cases whose edit "fails".
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
        raise AssertionError("no editing task asks for this")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        text = "".join(f"<{message['role']}>{message['content']}</{message['role']}>" for message in chat_history)
        return text + ("<assistant>" if add_generation_prompt else "")

    def chat_template(self, chat_template: bool | str = False) -> str:
        return "scripted"

    def _answer(self, request: Instance, answer: Callable[[tuple, bool], dict[str, Any]]) -> Any:
        self.seen.append(request)
        if reason := self.errors.get(request.doc["case_id"]):
            return {"error": reason}
        found = answer(request.args, False) | {"edit": {"key": request.doc["case_id"], "seconds": 0.1}}
        return found | {"unedited": answer(request.args, True)} if request.doc["ask_unedited"] else found

    def _likelihood(self, args: tuple, unedited: bool) -> dict[str, Any]:
        logprob, argmax = self.likelihoods(*args, unedited)
        ids = list(range(len(argmax)))
        return {
            "logprob": logprob,
            "is_greedy": argmax == ids,
            "num_tokens": len(ids),
            "token_logprobs": [logprob / len(ids)] * len(ids),
            "token_argmax": argmax,
            "token_ids": ids,
        }

    def _generation(self, args: tuple, unedited: bool) -> dict[str, Any]:
        text = self.texts(args[0], unedited)
        return {"text": text, "token_ids": [ord(character) for character in text], "stop": "length"}


class StockLM(ScriptedLM):
    """Answers as lm-eval's own models do: pairs, and texts cut at the stop strings."""

    def _answer(self, request: Instance, answer: Callable[[tuple, bool], dict[str, Any]]) -> Any:
        self.seen.append(request)
        found = answer(request.args, False)
        if "logprob" in found:
            return found["logprob"], found["is_greedy"]
        text = found["text"]
        for stop in request.args[1]["until"]:
            text = text.split(stop)[0]
        return text


class StreamLM(ScriptedLM):
    """Answers as `edited_hf` does with ``mode=sequential``: the first target and the gold answer, or neither.

    Args:
        holds: case id -> one mark per step: "." before the case's edit, "1" or "0" after a step that leaves it right or
            wrong. Cases that are not listed are not among the stream's edits; "?" marks an edit that was not made. The
            unedited model and cases outside are wrong, unless listed in ``known``.
        checkpoints: number of edits -> step after which it is taken.
        retention: also answer after every step.
        known: case ids that the model answers rightly without any edit.
        num_edits: edits in the final weights; by default all that were made.
    """

    def __init__(
        self,
        holds: dict[str, str],
        checkpoints: dict[int, int] | None = None,
        retention: bool = False,
        known: tuple[str, ...] = (),
        num_edits: int | None = None,
    ) -> None:
        super().__init__()
        self.holds, self.checkpoints, self.retention, self.known = holds, checkpoints or {}, retention, known
        self.num_edits = sum("?" not in marks for marks in holds.values()) if num_edits is None else num_edits

    def _answer(self, request: Instance, answer: Callable[[tuple, bool], dict[str, Any]]) -> Any:
        self.seen.append(request)
        case = request.doc["case_id"]
        unedited = {"unedited": self._ask(request, case in self.known)} if request.doc["ask_unedited"] else {}
        marks = self.holds.get(case)
        if marks is None:
            place = {"edited": False, "step": None, "num_edits": self.num_edits}
            return {**self._ask(request, case in self.known), "edit": None, **unedited, "stream": place}
        own = marks.count(".")
        place = {"edited": "?" not in marks, "step": own, "num_edits": self.num_edits}
        if "?" in marks:
            return {"error": "the guard stopped the stream", **unedited, "stream": place}
        after = {step: self._ask(request, marks[step] == "1") for step in range(own, len(marks))}
        place["immediate"] = after[own]
        place["checkpoints"] = {
            str(number): after[step] for number, step in self.checkpoints.items() if own <= step < len(marks)
        }
        if self.retention:
            place["after_step"] = {str(step): found for step, found in after.items()}
        edit = {"editor": "scripted", "step": own, "num_edits": own + 1, "seconds": 0.5, "final_loss": 0.25}
        return {**after[len(marks) - 1], "edit": edit, **unedited, "stream": place}

    def _ask(self, request: Instance, right: bool) -> dict[str, Any]:
        if request.request_type == "generate_until":
            text = f" {request.doc['asked']['gold']}." if right else " something else."
            return {"text": text, "token_ids": [ord(character) for character in text], "stop": "stop_string"}
        target = request.args[1].strip()
        ids = list(range(len(target.split())))
        probes = [probe for probe in request.doc["probes"] if probe["prompt"] == request.args[0]]
        wanted = target in [probe["targets"][0] for probe in probes if probe["targets"]]
        argmax = ids if right == wanted else [index + 1 for index in ids]
        logprob = (-1.0 if right == wanted else -2.0) * len(ids)
        return {"logprob": logprob, "is_greedy": argmax == ids, "num_tokens": len(ids)} | {
            "token_logprobs": [logprob / len(ids)] * len(ids),
            "token_argmax": argmax,
            "token_ids": ids,
        }


class Exchange:
    """What the ranks of a simulated distributed run share."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size, timeout=60)
        self.slots: list[Any] = [None] * world_size

    def gather(self, rank: int, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        self.slots[rank] = value
        self.barrier.wait()
        everyone = list(self.slots)
        self.barrier.wait()
        return everyone


class Ranked:
    """One rank of a distributed run, in a thread; goes before a scripted model among the bases."""

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
        everyone = self.exchange.gather(self.rank, obj)
        return everyone if self.rank == dst else None

    def barrier(self) -> None:
        self.exchange.barrier.wait()


class RankedLM(Ranked, ScriptedLM):
    """A rank that answers with mappings."""


class RankedStreamLM(Ranked, StreamLM):
    """A rank that answers from a stream of edits."""
