"""Growth of a knowledge graph from seed triplets by asking a model, as in ThinkEdit (arXiv:2506.01386, section 5).

A round has the steps of the paper. The validated questions about each new fact, and about chains with one, are answered
step by step; every sentence of the response is searched for triplets (5.2). A triplet is valid if the model's response
to a question about it has its object (5.1). People keep, reject, correct and add triplets, and give other questions for
those that failed. The kept ones become edges of the graph (5.3), at most one from one entity to another, and the new
facts of the next round.

Here the texts of a question and of a statement belong to the relation, since the benchmark needs both for every fact:
the model writes them for the first triplet of a relation, with several attempts, and further triplets are validated
with them. Everything is a function of the seeds, the replies and the decisions.
"""

from __future__ import annotations

import bisect
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from edit_hooks.utils.errors import EditingError
from judges.match import alias_match
from lm_edit.builders.facts import Fact
from lm_edit.builders.knowgic.chain_questions import ChainQuestion, ChainQuestioner, draw_paths, find_paths
from lm_edit.builders.knowgic.graph import Edit, KnowledgeGraph, Relation, find_chains
from lm_edit.builders.knowgic.growth_prompts import (
    UnusableReply,
    chain_question_problem,
    check_wording,
    extraction_chat,
    parse_triplets,
    reasoning_chat,
    split_sentences,
)
from lm_edit.builders.knowgic.review import ChainFailure, Failure, Line, Proposal, Review, triplet_id
from lm_edit.builders.knowgic.seeds import Seeds, Spelling
from lm_edit.builders.knowgic.validation import Ask, TripletCandidate, Validator, ValidTriplet, responses

# Reasons for which a triplet is discarded, besides those of its validation
SAME_ENTITY = "subject and object are the same entity"
OBJECT_IN_SUBJECT = "the object occurs in the subject"
SECOND_LINK = "another fact links the two entities"
SECOND_OBJECT = "an edited relation of the subject has another object"
REJECTED = "rejected by people"
BEYOND = "not needed: the graph is as large as wanted"

# Reasons for which the growth ends
ALL_ROUNDS = "all rounds are done"
ENOUGH_CHAINS = "every seed has enough chains"
ENOUGH_FACTS = "the graph has enough facts"
NOTHING_NEW = "the last round brought nothing new"
WAITING = "triplets wait for a decision"

SEED, PEOPLE, MODEL = "seed", "people", "model"  # origins of facts


@dataclass(frozen=True, kw_only=True)
class GrowthLimits:
    """Where the growth stops.

    Attributes:
        rounds: of reasoning and extraction.
        attempts: question-and-statement pairs for the first triplet of a relation, and questions about a chain.
        chain_questions: chains of a round about which a question is asked.
        max_chains: chains of every seed.
        max_facts: facts of the graph, or ``None``.
        seed: draws these chains, and the order in which a round's facts are added, so that a limit favors no seed
            triplet.
    """

    rounds: int = 3
    attempts: int = 3
    chain_questions: int = 10
    max_chains: int = 100
    max_facts: int | None = None
    seed: int = 0


@dataclass
class Growth:
    """A graph and how it came about.

    Attributes:
        facts: in the order of their addition.
        discarded: triplets with the reason, in the order of the decisions.
        chain_questions: about paths of the graph, those with another answer included.
        rounds: number of completed ones.
        waiting: triplets of the last round without a decision; the growth goes on once they have one.
        failures: triplets and questions of that round that failed and that people have not seen.
        proposed: triplets about which people decide, in all rounds.
        num_own_waiting: undecided lines that people added for that round.
        num_sentences: sentences searched for triplets.
        num_unreadable: replies without a readable list of triplets.
        num_unusable: extracted triplets with a name that no question can hold.
        stopped: the reason for the end.
    """

    facts: list[ValidTriplet] = field(default_factory=list)
    discarded: list[tuple[Fact, str]] = field(default_factory=list)
    chain_questions: list[ChainQuestion] = field(default_factory=list)
    rounds: int = 0
    waiting: list[Proposal] = field(default_factory=list)
    failures: list[Failure | ChainFailure] = field(default_factory=list)
    proposed: set[Fact] = field(default_factory=set)
    num_own_waiting: int = 0
    num_sentences: int = 0
    num_unreadable: int = 0
    num_unusable: int = 0
    stopped: str = ""

    def reasons(self) -> dict[str, int]:
        """Number of discarded triplets by reason, the most frequent first."""
        return dict(Counter(reason for _, reason in self.discarded).most_common())


class Grower:
    """One growth.

    Args:
        seeds: what people give.
        ask: sends chats to the model and returns their outcomes, in order.
        limits: where to stop.
        review: decisions of people, or ``None`` to keep all that is validated.
        report: called with a line after every step.
    """

    def __init__(
        self,
        seeds: Seeds,
        ask: Ask,
        limits: GrowthLimits,
        review: Review | None = None,
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        if limits.max_facts is not None and limits.max_facts < len(seeds.triplets):
            raise EditingError(f"max_facts={limits.max_facts} is less than the {len(seeds.triplets)} given triplets.")
        self.seeds, self.ask, self.limits, self.review, self.report = seeds, ask, limits, review, report
        self.growth = Growth()
        self._validator = Validator(seeds, ask, limits.attempts)
        self._step, self._number = "", 0
        self._entity = Spelling(seeds.aliases)
        self._relation = Spelling(dict.fromkeys(seeds.relations, ()))
        for fact in seeds.triplets:
            self._spell(fact)
        self._check_review()
        given = review.chain_questions() if review is not None else {}
        self._questioner = ChainQuestioner(seeds, ask, limits.attempts, given)
        self._failed: list[Failure | ChainFailure] = []  # of the current round
        self._seen: set[Fact] = set()
        self._links: set[tuple[str, str]] = set()
        self._edits: list[Edit] = []

    @property
    def step(self) -> str:
        """What the next requests are for."""
        return self._step or f"round {self._number}, {self._questioner.step or self._validator.step}"

    def grow(self) -> Growth:
        """Grow until a limit is reached, nothing is new, or triplets wait for people.

        Raises:
            EditingError: if no seed triplet is validated, and for requests without a reply that another run may get.
        """
        growth = self.growth
        new = self._start()
        while not (growth.stopped or self._reached()):
            number = growth.rounds + 1
            found = self._validate(self._explore(new, number), number)
            reviewed = self._decide(found, number)
            if growth.stopped:
                break
            new = self._add(reviewed)
            growth.rounds = number
            self.report(
                f"round {number}: {len(new)} new facts, {len(growth.facts)} in all; chains: {self._chain_counts()}"
            )
            if not new:
                growth.stopped = NOTHING_NEW
        growth.stopped = growth.stopped or self._reached()
        return growth

    def graph(self) -> KnowledgeGraph:
        """The graph so far, with the relations of its facts."""
        facts = [found.fact for found in self.growth.facts]
        used = {fact.relation for fact in facts}
        relations = {name: relation for name, relation in self._validator.relations.items() if name in used}
        wordings = {fact: self._validator.wordings[fact] for fact in facts if fact in self._validator.wordings}
        return KnowledgeGraph(relations, facts, self._edits, self.seeds.aliases, wordings)

    # -------------------------------------------------------------------- steps

    def _start(self) -> list[ValidTriplet]:
        """Validate what people give; the seeds that fail are dropped with their edits."""
        seeds = [edit.fact for edit in self.seeds.edits]
        given = [TripletCandidate(fact, SEED if fact in seeds else PEOPLE) for fact in self.seeds.triplets]
        self._seen.update(self.seeds.triplets)
        found = self._validate(given, 0)
        own = self._own(0, found)
        found += self._validate(own, 0)
        self.growth.num_own_waiting = self.review.num_undecided(0) if self.review is not None else 0
        if self._shows_failures() or self.growth.num_own_waiting:
            self.growth.stopped = WAITING
            return []
        validated = {one.fact for one in found}
        self._edits = [edit for edit in self.seeds.edits if edit.fact in validated]
        if not self._edits:
            reasons = "; ".join(f"{' | '.join(fact)}: {why}" for fact, why in self.growth.discarded if fact in seeds)
            raise EditingError(
                f"no seed triplet was validated, so there is nothing to grow from ({reasons}). Use other seeds, give "
                "their aliases or the wordings of their relations, or use another writer."
            )
        new = self._add(found, draw=False)
        self.report(
            f"start: {len(found)} of {len(given) + len(own)} given triplets validated; chains: {self._chain_counts()}"
        )
        return new

    def _explore(self, facts: Sequence[ValidTriplet], number: int) -> list[TripletCandidate]:
        """Triplets that the model states in its reasoning about facts and that are new."""
        growth = self.growth
        about_chains = [one.question for one in self._question_chains(facts, number) if not one.problem]
        questions = list(dict.fromkeys([*(found.question for found in facts), *about_chains]))
        self._step = f"round {number}, reasoning: at least {len(questions)} requests, then one for each sentence"
        sentences: dict[str, str] = {}  # sentence -> question that it belongs to
        for question, response in zip(questions, responses(self.ask, map(reasoning_chat, questions)), strict=True):
            for sentence in split_sentences(response.text or "", is_cut=response.is_cut):
                sentences.setdefault(sentence, question)
        self._step = f"round {number}, extraction: at least {len(sentences)} requests, then one for each new triplet"
        chats = [extraction_chat(sentence, question) for sentence, question in sentences.items()]
        candidates: list[TripletCandidate] = []
        for sentence, response in zip(sentences, responses(self.ask, chats), strict=True):
            extracted = parse_triplets(response.text or "")
            if extracted is None:
                growth.num_unreadable += 1
                continue
            growth.num_unusable += extracted.num_unusable
            candidates += [TripletCandidate(self._spell(fact), MODEL, sentence) for fact in extracted.facts]
        growth.num_sentences += len(sentences)
        new = self._screen(candidates)
        self.report(
            f"round {number}: {len(questions)} questions, {len(sentences)} sentences, {len(candidates)} triplets, "
            f"{len(new)} to validate"
        )
        return new

    def _question_chains(self, new: Sequence[ValidTriplet], number: int) -> list[ChainQuestion]:
        """Ask about paths with a new fact."""
        growth = self.growth
        paths = find_paths([one.fact for one in growth.facts], self._edits, {one.fact for one in new})
        self._step, self._number = "", number
        asked = self._questioner.question(draw_paths(paths, self.limits.chain_questions, self.limits.seed))
        self._questioner.step = ""
        growth.chain_questions += asked
        self._failed += [
            ChainFailure(number, one.path, one.question, one.response, one.problem) for one in asked if one.problem
        ]
        if asked:
            valid = sum(not one.problem for one in asked)
            self.report(f"round {number}: {valid} of {len(asked)} questions about {len(paths)} new chains validated")
        return asked

    def _screen(self, candidates: Iterable[TripletCandidate]) -> list[TripletCandidate]:
        """Those that are new and may be in the graph, each once."""
        new: list[TripletCandidate] = []
        for candidate in candidates:
            fact = candidate.fact
            if fact in self._seen:
                continue
            self._seen.add(fact)
            if reason := self._obstacle(fact):
                self.growth.discarded.append((fact, reason))
            else:
                new.append(candidate)
        return new

    def _obstacle(self, fact: Fact) -> str | None:
        if fact.subject == fact.object:
            return SAME_ENTITY
        if alias_match(fact.subject, self.seeds.object_names(fact)):
            return OBJECT_IN_SUBJECT  # every response that names the subject would be valid
        if (fact.subject, fact.object) in self._links:
            return SECOND_LINK
        if any(edit.fact[:2] == fact[:2] and edit.fact != fact for edit in self.seeds.edits):
            return SECOND_OBJECT  # an edit has one original object
        return None

    def _decide(self, found: Sequence[ValidTriplet], number: int) -> list[ValidTriplet]:
        """What people keep of a round, with their own triplets; sets the end if some have no decision."""
        if self.review is None:
            return list(found)
        decisions = {one.fact: self.review.decision(one.fact) for one in found}
        self.growth.proposed |= set(decisions)
        self.growth.num_own_waiting = self.review.num_undecided(number)
        self.growth.waiting = [
            Proposal(number, one.fact, one.question, one.response, one.candidate.sentence)
            for one in found
            if decisions[one.fact] is None
        ]
        if self._shows_failures() or self.growth.waiting or self.growth.num_own_waiting:
            self.growth.stopped = WAITING
            return []
        kept = [one for one in found if decisions[one.fact]]
        self.growth.discarded += [(one.fact, REJECTED) for one in found if not decisions[one.fact]]
        own = self._validate(self._own(number, kept), number)
        if self._shows_failures():
            self.growth.stopped = WAITING
            return []
        return [*kept, *own]

    def _shows_failures(self) -> bool:
        """Whether some of the round failed that the review does not list yet; people then have to see them."""
        failed, self._failed = self._failed, []
        if self.review is not None:
            self.growth.failures += [one for one in failed if self.review.lacks(one)]
        return bool(self.growth.failures)

    def _own(self, number: int, valid: Sequence[ValidTriplet]) -> list[TripletCandidate]:
        """Triplets that people give for a round, with their wordings. One that was discarded before is tried again."""
        if self.review is None:
            return []
        wordings: dict[Fact, list[Relation]] = {}
        for line in self.review.own(number):
            of_fact = wordings.setdefault(self._spell(line.fact), [])
            if line.has_other_wording:
                of_fact.append(self._wording(line))
        done = {one.fact for one in [*self.growth.facts, *valid]}
        self._seen -= wordings.keys() - done
        seeds = [edit.fact for edit in self.seeds.edits]
        return self._screen(
            TripletCandidate(fact, SEED if fact in seeds else PEOPLE, wordings=tuple(texts))
            for fact, texts in wordings.items()
        )

    def _wording(self, line: Line) -> Relation:
        """Question and statement of people for a triplet; raises EditingError if no record can have them."""
        question, statement = (" ".join(text.split()) for text in (line.question, line.statement))
        wording = check_wording(question, statement, line.fact, self.seeds.object_names(line.fact)[1:])
        if isinstance(wording, UnusableReply):
            raise EditingError(
                f"{line.where}: question {line.question!r} and statement {line.statement!r} cannot be used: "
                f"{wording.problem}. Give both for {' | '.join(line.fact)}, or leave them as they were written."
            )
        return wording

    def _check_review(self) -> None:
        """Check the texts of people before any request.

        Raises:
            EditingError: for texts that cannot be used, and for a corrected seed, whose edit would be lost.
        """
        seeds = {triplet_id(edit.fact) for edit in self.seeds.edits}
        for line in self.review.lines if self.review is not None else ():
            if line.is_failed and line.keep and line.has_other_fact and str(line.id).split("-")[1] in seeds:
                raise EditingError(f"{line.where} corrects a seed triplet; correct it in the file of seeds.")
            if line.keep and line.has_other_wording:
                self._wording(line)
        for chain in self.review.chains if self.review is not None else ():
            names = self.seeds.object_names(chain.path[-1])[1:]
            if chain.is_own and (problem := chain_question_problem(chain.question, chain.path, names)):
                raise EditingError(f"{chain.where}: {chain.question!r} cannot be asked about the chain: {problem}.")

    def _add(self, found: Sequence[ValidTriplet], *, draw: bool = True) -> list[ValidTriplet]:
        """Add facts to the graph until a limit is reached; return those added."""
        growth, before = self.growth, len(self.growth.facts)
        for one in sorted(found, key=self._draw) if draw else found:
            ends = (one.fact.subject, one.fact.object)
            if ends in self._links:
                growth.discarded.append((one.fact, SECOND_LINK))
            else:
                self._links.add(ends)
                growth.facts.append(one)
        most = len(growth.facts) if self.limits.max_facts is None else self.limits.max_facts
        # The numbers of chains grow with every fact: the fewest new facts that give enough of them.
        sizes = range(before, min(most, len(growth.facts)) + 1)
        size = (
            sizes[min(bisect.bisect_left(sizes, True, key=self._has_chains), len(sizes) - 1)]
            if draw
            else len(growth.facts)
        )
        for one in growth.facts[size:]:
            growth.discarded.append((one.fact, BEYOND))
        del growth.facts[size:]
        return growth.facts[before:]

    def _draw(self, found: ValidTriplet) -> str:
        return hashlib.sha256(json.dumps([self.limits.seed, found.fact]).encode()).hexdigest()

    def _validate(self, candidates: Sequence[TripletCandidate], number: int) -> list[ValidTriplet]:
        """Those whose object the model gives, in order; the others are discarded."""
        self._step, self._number = "", number
        checked = self._validator.validate(candidates)
        again = {one.fact for one in candidates}  # people may give one that failed before
        self.growth.discarded = [one for one in self.growth.discarded if one[0] not in again]
        self.growth.discarded += [(one.candidate.fact, one.problem) for one in checked if one.problem]
        self._failed += [
            Failure(number, one.candidate.fact, one.question, one.statement, one.response, one.candidate.sentence,
                    one.problem)
            for one in checked
            if one.problem
        ]  # fmt: skip
        found = [ValidTriplet(one.candidate, one.question, one.response, number) for one in checked if not one.problem]
        if candidates:
            self.report(f"round {number}: {len(found)} of {len(candidates)} triplets validated")
        return found

    # -------------------------------------------------------------------- limits

    def _reached(self) -> str:
        if self._has_chains(len(self.growth.facts)):
            return ENOUGH_CHAINS
        if self.limits.max_facts is not None and len(self.growth.facts) >= self.limits.max_facts:
            return ENOUGH_FACTS
        return ALL_ROUNDS if self.growth.rounds >= self.limits.rounds else ""

    def _has_chains(self, num_facts: int) -> bool:
        """Whether the first facts hold enough chains for every seed."""
        facts = [found.fact for found in self.growth.facts[:num_facts]]
        return all(len(find_chains(facts, edit)) >= self.limits.max_chains for edit in self._edits)

    def chain_counts(self) -> Mapping[Fact, int]:
        """Number of chains of every validated seed triplet."""
        facts = [found.fact for found in self.growth.facts]
        return {edit.fact: len(find_chains(facts, edit)) for edit in self._edits}

    def _chain_counts(self) -> str:
        return ", ".join(map(str, self.chain_counts().values()))

    def _spell(self, fact: Fact) -> Fact:
        """A triplet with the names under which graph and seeds have its entities and its relation."""
        return Fact(self._entity(fact.subject), self._relation(fact.relation), self._entity(fact.object))
