"""Validation of triplets by questions to a model (ThinkEdit, arXiv:2506.01386, section 5.1).

A triplet is valid if the model's response to the question about it has its object or another name of it, by the rule of
KnowGIC's sampled scores. The question must not have one of them: a response that repeats it would be valid.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

from edit_hooks.prompt_context import statement
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.text.slots import fill_slots
from judges.backends.base import UNFINISHED_THOUGHT, Fault, Outcome
from judges.match import has_answer
from judges.prompt import Chat
from lm_edit.builders.facts import Fact
from lm_edit.builders.knowgic.graph import Relation
from lm_edit.builders.knowgic.growth_prompts import UnusableReply, parse_wording, question_chat, wording_chat
from lm_edit.builders.knowgic.seeds import Seeds

# Reasons for which a triplet is not valid
UNKNOWN = "the response does not have the object"
NO_WORDING = "the writer gave no usable question and statement"
UNFINISHED = "the response ended inside of a thought"
OBJECT_IN_QUESTION = "the object occurs in the question"

ANOTHER_ANSWER = "the answer to it was another one"  # what the writer reads about its earlier question

Ask: TypeAlias = Callable[[Sequence[Chat]], Sequence[Outcome]]


class TripletCandidate(NamedTuple):
    """A triplet to validate.

    Attributes:
        origin: who gives it.
        sentence: that of the model that states it.
        wordings: question and statement that people give for it, to be tried in turn; empty for those of its relation.
    """

    fact: Fact
    origin: str
    sentence: str = ""
    wordings: tuple[Relation, ...] = ()


class ValidTriplet(NamedTuple):
    """A validated triplet, the question about it, the response, and the round of the growth."""

    candidate: TripletCandidate
    question: str
    response: str
    round: int

    @property
    def fact(self) -> Fact:
        """The triplet."""
        return self.candidate.fact


class TripletCheck(NamedTuple):
    """A triplet with the texts that were tried last, and the response; ``problem`` is empty if it is valid."""

    candidate: TripletCandidate
    question: str
    response: str
    problem: str
    statement: str = ""


class Response(NamedTuple):
    """A reply's text; ``None`` with a reason for having none."""

    text: str | None
    reason: str = ""
    is_cut: bool = False


def responses(ask: Ask, chats: Iterable[Chat]) -> list[Response]:
    """Ask a model.

    Raises:
        EditingError: for requests without a reply, unless the server refuses the request for its content.
    """
    sent = list(chats)
    outcomes = ask(sent) if sent else []
    lost = Counter(one.reason for one in outcomes if isinstance(one, Fault) and not _is_final(one))
    if lost:
        reasons = ", ".join(f"{reason} ({count})" for reason, count in lost.most_common())
        raise EditingError(
            f"the writer did not reply to {lost.total()} of {len(sent)} requests: {reasons}. All replies received so "
            "far are in the store; run the same command again."
        )
    return [_response(outcome) for outcome in outcomes]


def _is_final(fault: Fault) -> bool:
    """Whether the server refused this request alone, such as with HTTP 400."""
    return not fault.retryable and not fault.fatal and fault.reason.startswith("HTTP ")


def _response(outcome: Outcome) -> Response:
    if isinstance(outcome, Fault):
        return Response(None, f"no response: {outcome.reason}")
    if outcome.finish == UNFINISHED_THOUGHT:
        return Response(None, UNFINISHED)
    return Response(outcome.text, is_cut=outcome.finish == "length")


class Validator:
    """Validates triplets, and finds the wordings of their relations.

    Args:
        seeds: wordings by people, and other names of objects.
        ask: sends chats to the model.
        attempts: question-and-statement pairs for the first triplet of a relation.

    Attributes:
        relations: wordings so far, by name.
        wordings: those of triplets that differ from their relation's, since people gave another one.
        step: what the next requests are for.
    """

    def __init__(self, seeds: Seeds, ask: Ask, attempts: int) -> None:
        self.seeds, self.ask, self.attempts = seeds, ask, attempts
        self.relations: dict[str, Relation] = dict(seeds.relations)
        self.wordings: dict[Fact, Relation] = {}
        self.step = ""

    def validate(self, candidates: Sequence[TripletCandidate]) -> list[TripletCheck]:
        """Check every candidate; return them in order.

        Those with wordings of people go ahead, then the first triplet of a relation without wording; if it fails, the
        next one does.
        """
        checked = {one.candidate.fact: one for one in self._refine([one for one in candidates if one.wordings])}
        pending = [one for one in candidates if one.fact not in checked]
        while pending:
            worded = set(self.relations)
            ready = [one for one in pending if one.fact.relation in worded]
            num_asked = sum(not self._is_given_away(one, self.relations[one.fact.relation]) for one in ready)
            first = {one.fact.relation: one for one in reversed(pending) if one.fact.relation not in worded}
            leaders = [one for one in pending if first.get(one.fact.relation) is one]
            self.step = (
                f"validation of {len(pending)} triplets ({len(leaders)} the first of their relation): at least "
                f"{num_asked + len(leaders)} requests"
            )
            for one in [
                *self._question([(one, self.relations[one.fact.relation]) for one in ready]),
                *self._word(leaders),
            ]:
                checked[one.candidate.fact] = one
            pending = [one for one in pending if one.fact not in checked]
        return [checked[one.fact] for one in candidates]

    def _refine(self, candidates: Sequence[TripletCandidate]) -> list[TripletCheck]:
        """Check triplets with the wordings of people; the first valid one counts."""
        checked: dict[TripletCandidate, TripletCheck] = {}
        for turn in range(max((len(one.wordings) for one in candidates), default=0)):
            left = [one for one in candidates if one.wordings[turn:] and (turn == 0 or checked[one].problem)]
            self.step = f"validation of {len(left)} triplets with questions of people: {len(left)} requests"
            for answered in self._question([(one, one.wordings[turn]) for one in left]):
                one = answered.candidate
                checked[one] = answered
                if not answered.problem:
                    self._adopt(one.fact, one.wordings[turn])
        return list(checked.values())

    def _adopt(self, fact: Fact, wording: Relation) -> None:
        """Keep a valid wording of people: for the relation if it has none yet, otherwise for the triplet alone."""
        if self.relations.setdefault(fact.relation, wording) != wording:
            self.wordings[fact] = wording

    def _word(self, candidates: Sequence[TripletCandidate]) -> list[TripletCheck]:
        """Check triplets of relations without wording, one each; a valid one leaves its relation the wording."""
        checked: dict[TripletCandidate, TripletCheck] = {}
        earlier: dict[TripletCandidate, list[UnusableReply]] = {one: [] for one in candidates}
        for _ in range(self.attempts):
            replies = responses(self.ask, (wording_chat(one.fact, failed) for one, failed in earlier.items()))
            worded: list[tuple[TripletCandidate, Relation]] = []
            for one, reply in zip(earlier, replies, strict=True):
                parsed = parse_wording(reply.text or "", one.fact, self.seeds.object_names(one.fact)[1:])
                if isinstance(parsed, Relation):
                    worded.append((one, parsed))
                else:
                    earlier[one].append(parsed)
                    checked[one] = TripletCheck(one, parsed.question or "", "", reply.reason or NO_WORDING)
            for answered, (one, wording) in zip(self._question(worded), worded, strict=True):
                checked[one] = answered
                if answered.problem:
                    is_unasked = answered.problem == OBJECT_IN_QUESTION
                    earlier[one].append(
                        UnusableReply(answered.question, OBJECT_IN_QUESTION if is_unasked else ANOTHER_ANSWER)
                    )
                else:
                    self.relations[one.fact.relation] = wording
                    del earlier[one]
        return [checked[one] for one in candidates]

    def _question(self, worded: Sequence[tuple[TripletCandidate, Relation]]) -> list[TripletCheck]:
        """Ask about triplets with the given wordings; a question that has the object is not sent."""
        questions = [fill_slots(wording.question, one.fact.subject) for one, wording in worded]
        asked = [not self._is_given_away(one, wording) for one, wording in worded]
        replies = iter(responses(self.ask, map(question_chat, itertools.compress(questions, asked))))
        checked = []
        for (one, wording), question, is_asked in zip(worded, questions, asked, strict=True):
            response = next(replies) if is_asked else Response(None, OBJECT_IN_QUESTION)
            names = self.seeds.object_names(one.fact)
            is_known = response.text is not None and has_answer(response.text, names)
            problem = "" if is_known else response.reason or UNKNOWN
            fact = statement(fill_slots(wording.prompt, one.fact.subject), one.fact.object)
            checked.append(TripletCheck(one, question, response.text or "", problem, fact))
        return checked

    def _is_given_away(self, candidate: TripletCandidate, wording: Relation) -> bool:
        question = fill_slots(wording.question, candidate.fact.subject)
        return has_answer(question, self.seeds.object_names(candidate.fact))
