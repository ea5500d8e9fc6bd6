"""Records of QAEdit from questions and answers: chats for a writer, checks of its replies, and the records.

The paper (sections 4 and A.2) has a language model extract the subject of each question and paraphrase it, and adds
locality pairs drawn from ZsRE. The steps here are the same; prompts, checks and draws are ours. A reply that fails a
check leaves its question out, with a reason; a record without a category is kept.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.json_io import parse_json
from judges.backends.base import Outcome
from judges.match import contains
from judges.prompt import Chat
from lm_edit.builders.qaedit.questions import LocalityPair, QuestionAnswer, UnusableError, is_encodable
from lm_edit.builders.qaedit.wording import CATEGORIES, CATEGORY, PARAPHRASE, SUBJECT, WriterPrompt
from lm_edit.builders.replies import reply_text
from lm_eval_tasks.common.scoring.breakdown import CATEGORY as CATEGORY_FIELD
from lm_eval_tasks.qaedit.texts import MARKS, same_text

BUILDER_VERSION = 2  # increase it when the same questions and replies give other records

# In the released 1,000 records no paraphrase is longer than 2.7 times its question.
MAX_GROWTH, MAX_ADDED = 3, 200  # of a paraphrase's length, times the question's and in characters

_QUOTES = {('"', '"'), ("'", "'"), ("\u201c", "\u201d"), ("\u2018", "\u2019"), ("\u00ab", "\u00bb")}
_EMPHASIS = re.compile(r"(?P<mark>\*\*|__|\*|_|`)(?P<text>[^*_`]+)(?P=mark)")
_MARKUP = frozenset("<>{}[]|`*\\")  # of markup, chat templates and escapes


@dataclass(frozen=True, kw_only=True)
class BuildSettings:
    """What records are made of.

    Attributes:
        num_locality: locality pairs of each record; tasks use the first.
        seed: of the draw of these pairs.
        categories: whether records have a category.
    """

    num_locality: int = 5
    seed: int = 0
    categories: bool = False

    @property
    def prompts(self) -> tuple[WriterPrompt, ...]:
        """The prompts for each question."""
        return (SUBJECT, PARAPHRASE, CATEGORY) if self.categories else (SUBJECT, PARAPHRASE)


@dataclass
class Building:
    """The records, and what became of the other questions.

    Attributes:
        records: in the published schema, with ``provenance``.
        left_out: (location, reason) of every question without a record.
        without_category: (location, reason) of every record without a category, if categories are wanted.
    """

    records: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    without_category: list[tuple[str, str]] = field(default_factory=list)

    def statistics(self) -> dict[str, Any]:
        """Counts for a report."""
        counts: dict[str, Any] = {
            "records": len(self.records),
            "records_by_source": dict(Counter(record["source"] for record in self.records)),
            "subject_in_rephrase": sum(record["subject"] in record["rephrase"] for record in self.records),
        }
        categories = Counter(record[CATEGORY_FIELD] for record in self.records if CATEGORY_FIELD in record)
        if categories:
            counts["records_by_category"] = dict(categories.most_common())
        return counts


def make_chats(questions: Sequence[QuestionAnswer], settings: BuildSettings) -> list[Chat]:
    """Return the chats of all questions: those of one question follow each other, in the order of the prompts."""
    return [prompt.chat(question.question) for question in questions for prompt in settings.prompts]


def build(
    questions: Sequence[QuestionAnswer],
    outcomes: Sequence[Outcome],
    pool: Sequence[LocalityPair],
    settings: BuildSettings,
    provenance: Mapping[str, Any] | None = None,
) -> Building:
    """Make the records.

    Args:
        questions: their position is the ``id`` of the record, which is thereby unique.
        outcomes: a reply or a fault for each of :func:`make_chats`.
        pool: the locality pairs, more than ``settings.num_locality``; those with one of the questions are not drawn.
        provenance: origin of all records; that of each question is added.

    Raises:
        EditingError: if there are too few locality pairs.
    """
    check_pool(pool, settings, questions)
    asked = _keys(questions)
    building = Building()
    step = len(settings.prompts)
    shared = {
        "builder": "lm-edit build-qaedit",
        "builder_version": BUILDER_VERSION,
        "prompts": {prompt.name: prompt.hash for prompt in settings.prompts},
        "seed": settings.seed,
        **(provenance or {}),
    }
    for number, question in enumerate(questions):
        subject, paraphrase, *category = outcomes[number * step : (number + 1) * step]
        try:
            record: dict[str, Any] = {
                "id": number,
                "source": question.file.origin,
                "prompt": question.question,
                "target": question.answer,
                "subject": read_subject(subject, question.question),
                "rephrase": read_paraphrase(paraphrase, question.question, question.answer),
            }
        except UnusableError as reason:
            building.left_out.append((question.where, str(reason)))
            continue
        drawn = draw_locality(pool, question.question, settings.num_locality, settings.seed, asked)
        record["locality"] = [{"loc": pair.question, "loc_ans": pair.answer} for pair in drawn]
        if category:
            try:
                record[CATEGORY_FIELD] = read_category(category[0])
            except UnusableError as reason:
                building.without_category.append((question.where, str(reason)))
        record["provenance"] = {**shared, "file": str(question.file.path), "row": question.row}
        building.records.append(record)
    return building


def check_pool(pool: Sequence[LocalityPair], settings: BuildSettings, questions: Sequence[QuestionAnswer] = ()) -> None:
    """Check that every record finds its locality pairs, also one whose own question is among them.

    Args:
        questions: those of the build, which are not drawn.

    Raises:
        EditingError: otherwise.
    """
    if len(pool) <= settings.num_locality:
        raise EditingError(
            f"there are {len(pool)} different locality questions; more than num_locality={settings.num_locality} are "
            "needed. Lower it, or give a larger file."
        )
    asked = _keys(questions)
    others = [pair for pair in pool if same_text(pair.question) not in asked]
    if len(others) < settings.num_locality:
        raise EditingError(
            f"{len(pool) - len(others)} of the {len(pool)} locality questions are questions of the records, and "
            f"num_locality={settings.num_locality} others are needed. Lower it, or give a larger file."
        )


def draw_locality(
    pool: Sequence[LocalityPair], question: str, num: int, seed: int, asked: Container[str] = ()
) -> list[LocalityPair]:
    """Draw different pairs whose question is not the given one, nor one that another record edits.

    The draw depends on seed, question and pool, not on a random generator; on the other questions only where the pool
    has one of them, which is passed over.

    Args:
        asked: keys (:func:`same_text`) of the questions of all records.
    """
    drawn: dict[int, LocalityPair] = {}
    for position in _positions(seed, question, len(pool)):
        if len(drawn) == num:
            break
        key = same_text(pool[position].question)
        if key != same_text(question) and key not in asked:
            drawn[position] = pool[position]
    return list(drawn.values())


def _keys(questions: Sequence[QuestionAnswer]) -> set[str]:
    return {same_text(one.question) for one in questions}


def _positions(seed: int, question: str, size: int) -> Iterator[int]:
    """Yield endless uniform positions."""
    number = 0
    while True:
        yield int.from_bytes(hashlib.sha256(f"{seed}:{number}:{question}".encode()).digest(), "big") % size
        number += 1


def read_subject(outcome: Outcome, question: str) -> str:
    """The subject in a reply, spelled as in the question.

    Raises:
        UnusableError: if the reply holds no part of the question, or all of it.
    """
    line = _read_line(outcome, SUBJECT, "subject").strip(" ,;:")
    for text in dict.fromkeys((line, _unwrapped(line), line.strip(MARKS))):
        if subject := _find(text, question):
            break
    else:
        raise UnusableError("subject: it does not occur in the question")
    if same_text(subject) == same_text(question):
        raise UnusableError("subject: it is the whole question")
    return subject


def _find(text: str, question: str) -> str:
    """The part of a question that a text repeats; empty if there is none.

    Whole words come first, then whole words in another case, then a part of a word. White space may differ, and the
    question's own closing mark is no part of it.
    """
    words = text.split()
    if not words or len(" ".join(words)) > len(question):
        return ""
    pattern = r"\s+".join(map(re.escape, words))
    whole = rf"(?<!\w){pattern}(?!\w)"
    found = re.search(whole, question) or re.search(whole, question, re.IGNORECASE) or re.search(pattern, question)
    if found is None:
        return ""
    return found[0].rstrip("? \uff1f") if found.end() == len(question) else found[0]


def read_paraphrase(outcome: Outcome, question: str, answer: str) -> str:
    """The paraphrase in a reply.

    Raises:
        UnusableError: the reply repeats the question, holds the answer or markup, or is far longer than the question.
    """
    line = _unwrapped(_read_line(outcome, PARAPHRASE, "paraphrase"))
    if len(line) > MAX_GROWTH * len(question) + MAX_ADDED:
        raise UnusableError("paraphrase: it is far longer than the question")
    if not same_text(line):
        raise UnusableError("paraphrase: it is empty")
    if same_text(line) == same_text(question):
        raise UnusableError("paraphrase: it repeats the question")
    if contains(line, answer):
        raise UnusableError("paraphrase: it holds the answer")
    if (_MARKUP & set(line)) - set(question):
        raise UnusableError("paraphrase: it holds markup")
    return line


def read_category(outcome: Outcome) -> str:
    """The category in a reply.

    Raises:
        UnusableError: unless it is one of :data:`CATEGORIES`.
    """
    key = same_text(_read_line(outcome, CATEGORY, "category")).replace(" and ", " & ")
    name = next((name for name in CATEGORIES if same_text(name) == key), None)
    if name is None:
        raise UnusableError("category: it is not one of the ten")
    return name


def _read_line(outcome: Outcome, prompt: WriterPrompt, what: str) -> str:
    """The only line of a reply without its label, decoded if it is a JSON string.

    Thoughts in tags, the fences of a code block and empty lines are skipped.

    Raises:
        UnusableError: if there is no such line.
    """
    text, reason = reply_text(outcome)
    if text is None:
        raise UnusableError(f"{what}: {reason}")
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("```")]
    if len(lines) > 1:
        raise UnusableError(f"{what}: the reply has several lines")
    line = re.sub(rf"^{prompt.label}\s*:\s*", "", lines[0], flags=re.IGNORECASE) if lines else ""
    line = _decoded(line).strip()
    if not line:
        raise UnusableError(f"{what}: the reply is empty")
    if not is_encodable(line) or any(unicodedata.category(character) in ("Cc", "Zl", "Zp") for character in line):
        raise UnusableError(f"{what}: the reply holds control characters")
    return line


def _decoded(line: str) -> str:
    """The text of a JSON string; any other line as it is."""
    if len(line) < 2 or not (line.startswith('"') and line.endswith('"')):
        return line
    try:
        return str(parse_json(line, "reply"))
    except EditingError:
        return line


def _unwrapped(line: str) -> str:
    """A line without the quotes or the emphasis around all of it."""
    if emphasis := _EMPHASIS.fullmatch(line):
        return _unwrapped(emphasis["text"].strip())
    inner = line[1:-1]
    if len(line) > 2 and (line[0], line[-1]) in _QUOTES and line[0] not in inner and line[-1] not in inner:
        return _unwrapped(inner.strip())
    return line
