"""A scripted server behind a writer, and invented questions with the replies of a good one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from judge_server import JudgeServer, Script, serve

from lm_edit.builders.qaedit.wording import CATEGORY, PARAPHRASE, SUBJECT


class Asked(NamedTuple):
    """What a prompt asks for, and of which question."""

    prompt: str
    question: str


class Fact(NamedTuple):
    """An invented question, its answer, and what a good writer makes of it."""

    question: str
    answer: str
    subject: str
    paraphrase: str
    category: str


FACTS = (
    Fact(
        "who designed the fenwick aqueduct",
        "Orsa Lind",
        "fenwick aqueduct",
        "Which engineer drew up the Fenwick aqueduct?",
        "Science & Technology",
    ),
    Fact(
        "In which city was the painter Jo Marsh born?",
        "St. Brannock",
        "Jo Marsh",
        "What is the birthplace of the painter Jo Marsh?",
        "People & Biographies",
    ),
    Fact(
        'Which mark, "<" or "[", closes the third stanza of Pim\'s Ode?',
        "a dash",
        "Pim's Ode",
        "With which of two marks does the third stanza of Pim's Ode end?",
        "Art & Culture",
    ),
    Fact(
        "what is the longest river of Tarn", "the Ull", "Tarn", "Name Tarn's longest river.", "Geography & Environment"
    ),
)
LOCALITY = [
    {"subject": "s", "src": "q?", "loc": f"nq question: when did canal {number} open", "loc_ans": str(1800 + number)}
    for number in range(12)
]


def parse_asked(prompt: str) -> Asked:
    """What a filled prompt asks for: its last two lines."""
    question, label = prompt.splitlines()[-2:]
    return Asked(label.removesuffix(":"), json.loads(question.removeprefix("Question: ")))


def write_well(asked: Asked, attempt: int) -> str:
    """Script of a good writer, which quotes its replies."""
    (fact,) = [fact for fact in FACTS if fact.question == asked.question]
    texts = {SUBJECT.label: fact.subject, PARAPHRASE.label: fact.paraphrase, CATEGORY.label: fact.category}
    return json.dumps(texts[asked.prompt])


@contextmanager
def serve_writer(script: Script = write_well, delay: float = 0.0) -> Iterator[JudgeServer]:
    """Run a server for the duration of a block."""
    with serve(script, delay, parse_asked) as server:
        yield server


def write_json(path: Path, content: Any) -> Path:
    """Write a JSON file and return its path."""
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def write_inputs(folder: Path) -> list[str]:
    """Write the facts in two layouts and the locality pairs; returns the arguments of the verb that name them."""
    nq = folder / "nq.jsonl"
    rows = [{"question": fact.question, "answer": [fact.answer, "another"]} for fact in FACTS[:2]]
    nq.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    trivia = [{"question": fact.question, "answer": {"value": fact.answer, "aliases": []}} for fact in FACTS[2:]]
    locality = write_json(folder / "zsre.json", LOCALITY)
    return [f"NQ={nq}", str(write_json(folder / "trivia.json", trivia)), "--locality", str(locality)]
