"""Multi-hop questions about paths of a growing graph, as in ThinkEdit (arXiv:2506.01386, sections 5.1 and 5.3.2).

A path leads from an edited subject over several facts to an entity; the model writes one question that starts at the
subject and asks for that entity. If its own response has the entity, its reasoning about the question is searched for
triplets, as is that about single facts. No record has these questions: KnowGIC asks about one fact at a time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from judges.match import has_answer
from lm_edit.builders.facts import Fact
from lm_edit.builders.knowgic.graph import MAX_STEPS, Edit
from lm_edit.builders.knowgic.growth_prompts import UnusableReply, chain_chat, parse_chain_question, question_chat
from lm_edit.builders.knowgic.seeds import Seeds
from lm_edit.builders.knowgic.validation import ANOTHER_ANSWER, UNKNOWN, Ask, responses

NO_QUESTION = "the writer gave no usable question"

Path = tuple[Fact, ...]


class ChainQuestion(NamedTuple):
    """A question about a path, and the model's response; ``problem`` is empty if it has the last entity."""

    path: Path
    question: str
    response: str
    problem: str


def find_paths(facts: Sequence[Fact], edits: Sequence[Edit], new: Collection[Fact]) -> list[Path]:
    """Paths of two to five facts from an edited subject, without repeated entities, that have a fact of ``new``."""
    by_subject: dict[str, list[Fact]] = {}
    for fact in facts:
        by_subject.setdefault(fact.subject, []).append(fact)

    def extend(path: Path, seen: frozenset[str]) -> Iterator[Path]:
        for fact in by_subject.get(path[-1].object, []):
            if fact.object not in seen:
                longer = (*path, fact)
                yield longer
                if len(longer) < MAX_STEPS:
                    yield from extend(longer, seen | {fact.object})

    subjects = dict.fromkeys(edit.fact.subject for edit in edits)
    starts = [fact for subject in subjects for fact in by_subject.get(subject, [])]
    paths = [path for fact in starts for path in extend((fact,), frozenset((fact.subject, fact.object)))]
    return [path for path in paths if not set(new).isdisjoint(path)]


def draw_paths(paths: Sequence[Path], number: int, seed: int) -> list[Path]:
    """At most ``number`` paths, drawn; a path's place in the draw depends on nothing but itself and the seed."""
    return sorted(paths, key=lambda path: hashlib.sha256(json.dumps([seed, path]).encode()).digest())[:number]


class ChainQuestioner:
    """Asks multi-hop questions.

    Args:
        seeds: other names of entities.
        ask: sends chats to the model.
        attempts: questions about a path.
        given: questions of people, which are tried after those of the writer.

    Attributes:
        step: what the next requests are for.
    """

    def __init__(
        self, seeds: Seeds, ask: Ask, attempts: int, given: Mapping[Path, Sequence[str]] | None = None
    ) -> None:
        self.seeds, self.ask, self.attempts, self.given = seeds, ask, attempts, given or {}
        self.step = ""

    def question(self, paths: Sequence[Path]) -> list[ChainQuestion]:
        """Have a question written about every path and answered, with further attempts where the answer is another."""
        checked: dict[Path, ChainQuestion] = {}
        earlier: dict[Path, list[UnusableReply]] = {path: [] for path in paths}
        for _ in range(self.attempts):
            self.step = f"questions about {len(earlier)} chains: at least {len(earlier)} requests"
            replies = responses(self.ask, (chain_chat(path, failed) for path, failed in earlier.items()))
            written: list[tuple[Path, str]] = []
            for path, reply in zip(earlier, replies, strict=True):
                parsed = parse_chain_question(reply.text or "", path, self.seeds.object_names(path[-1])[1:])
                if isinstance(parsed, UnusableReply):
                    earlier[path].append(parsed)
                    checked[path] = ChainQuestion(path, parsed.question or "", "", reply.reason or NO_QUESTION)
                else:
                    written.append((path, parsed))
            for one in self._answer(written):
                checked[one.path] = one
                if one.problem:
                    earlier[one.path].append(UnusableReply(one.question, ANOTHER_ANSWER))
                else:
                    del earlier[one.path]
        self._try_given(checked)
        return [checked[path] for path in paths]

    def _try_given(self, checked: dict[Path, ChainQuestion]) -> None:
        """Replace failed questions by those of people; the first valid one counts, or the last one."""
        for turn in range(max(map(len, self.given.values()), default=0)):
            left = [path for path, one in checked.items() if one.problem and self.given.get(path, ())[turn:]]
            self.step = f"questions of people about {len(left)} chains: {len(left)} requests"
            for one in self._answer([(path, self.given[path][turn]) for path in left]):
                checked[one.path] = one

    def _answer(self, written: Sequence[tuple[Path, str]]) -> Iterator[ChainQuestion]:
        answers = responses(self.ask, (question_chat(question) for _, question in written))
        for (path, question), response in zip(written, answers, strict=True):
            names = self.seeds.object_names(path[-1])
            is_known = response.text is not None and has_answer(response.text, names)
            yield ChainQuestion(path, question, response.text or "", "" if is_known else response.reason or UNKNOWN)
