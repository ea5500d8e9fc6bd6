"""An invented world, and a scripted model that knows a part of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from judges.backends.base import Outcome, Reply
from judges.model.writer import without_thought
from judges.prompt import Chat
from lm_edit.builders.facts import Fact
from lm_edit.builders.knowgic.growth_prompts import (
    CHAIN_PROMPT,
    EXTRACTION_PROMPT,
    REASONING_PROMPT,
    WORDING_PROMPT,
)
from lm_edit.builders.knowgic.seeds import Seeds, read_seeds

SEEDS: dict[str, Any] = {
    "seeds": [["Ada Moss", "school", "Elmwood", "Oakridge"]],
    "aliases": {"Elmwood": ["Elm College"]},
}

# (subject, relation) -> response to "What is the <relation> of <subject>?"
KNOWN = {
    ("Ada Moss", "school"): "It is Elm College.",
    ("Ada Moss", "classmate"): "That would be Bo Reed, I think.",
    ("Ada Moss", "house"): "Larkhall!",
    ("Larkhall", "home"): "Elmwood.",
    ("Bo Reed", "school"): "Elmwood, of course.",
    ("Elmwood", "town"): "The town of Fenn.",
    ("Fenn", "pupil"): "Ada Moss.",
}
# question -> sentences of the reasoning about it
REASONING = {
    "What is the school of Ada Moss?": [
        "Ada Moss is a classmate of Bo Reed.",
        "Ada Moss lives in the house Larkhall.",
        "Larkhall is the home of Elmwood.",
        "Ada Moss is a friend of Zed Orr.",
        "Ada Moss went to Elm College and Pine School.",
        "So the answer is Elmwood.",
    ],
    "What is the classmate of Ada Moss?": ["Bo Reed goes to Elmwood.", "Ada Moss is a classmate of Bo Reed."],
    "What is the house of Ada Moss?": ["Elmwood lies in Fenn."],
    "What is the town of Elmwood?": ["Fenn has the pupil Ada Moss."],
}
# sentence -> triplets
FACTS = {
    "Ada Moss is a classmate of Bo Reed.": [["Ada Moss", "classmate", "Bo Reed"]],
    "Ada Moss lives in the house Larkhall.": [["Ada Moss", "house", "Larkhall"], ["ada moss", "House", "Larkhall"]],
    "Larkhall is the home of Elmwood.": [["Larkhall", "home", "Elmwood"]],
    "Ada Moss is a friend of Zed Orr.": [["Ada Moss", "friend", "Zed Orr"]],
    "Ada Moss went to Elm College and Pine School.": [
        ["Ada Moss", "attended", "Elm College"],
        ["Ada Moss", "school", "Pine School"],
        ["Pine School", "is", "the Pine School"],
        ["Pine School", "kind", "School"],
    ],
    "Bo Reed goes to Elmwood.": [["Bo Reed", "school", "Elmwood"]],
    "Elmwood lies in Fenn.": [["Elmwood", "town", "Fenn"]],
    "Fenn has the pupil Ada Moss.": [["Fenn", "pupil", "Ada Moss"]],
}


# What the world holds, by the round of the growth that finds it.
SEED = Fact("Ada Moss", "school", "Elmwood")
ROUND_1 = {
    Fact("Ada Moss", "classmate", "Bo Reed"),
    Fact("Ada Moss", "house", "Larkhall"),
    Fact("Larkhall", "home", "Elmwood"),
}
ROUND_2 = {Fact("Bo Reed", "school", "Elmwood"), Fact("Elmwood", "town", "Fenn")}
ROUND_3 = {Fact("Fenn", "pupil", "Ada Moss")}


def write_seeds(folder: Path, **changes: Any) -> Path:
    """Write the file of seeds with other values of some keys; return its path."""
    path = folder / "seeds.json"
    path.write_text(json.dumps(SEEDS | changes), encoding="utf-8")
    return path


def seeds_of(folder: Path, **changes: Any) -> Seeds:
    """The seeds with other values of some keys of the file."""
    return read_seeds(write_seeds(folder, **changes))


def facts_of(growth: Any) -> list[Fact]:
    """The facts of a growth, in their order."""
    return [found.fact for found in growth.facts]


def parse_prompt(prompt: str) -> tuple[str, Any]:
    """What a prompt wants: its kind, and its texts as a careful reader finds them."""
    if prompt.startswith(WORDING_PROMPT):
        fact, *earlier = prompt.removeprefix(WORDING_PROMPT).splitlines()
        return "wording", (tuple(json.loads(fact)), len(earlier[2:]))
    if prompt.startswith(CHAIN_PROMPT):
        path, *earlier = prompt.removeprefix(CHAIN_PROMPT).splitlines()
        return "chain", (tuple(map(tuple, json.loads(path))), len(earlier[2:]))
    if prompt.startswith(REASONING_PROMPT):
        return "reasoning", json.loads(prompt.removeprefix(REASONING_PROMPT))
    if prompt.startswith(EXTRACTION_PROMPT):
        _question, sentence = prompt.removeprefix(EXTRACTION_PROMPT).splitlines()
        return "extraction", json.loads(sentence.removeprefix("Sentence: "))
    return "question", prompt


def question_of(subject: str, relation: str) -> str:
    return f"What is the {relation} of {subject}?"


def chain_question_of(path: Sequence[Sequence[str]]) -> str:
    inner = path[0][0]
    for _, relation, _ in path:
        inner = f"the {relation} of {inner}"
    return f"What is {inner}?"


def write_wording(fact: Sequence[str], attempt: int) -> str:
    subject, relation, target = fact
    texts = {"question": question_of(subject, relation), "statement": f"The {relation} of {subject} is {target}."}
    return f"Here you are: {json.dumps(texts)}"


class World:
    """The scripted model, a function from prompt to reply, which counts its prompts.

    Args:
        replies: kind -> function of the texts in the prompt; ``None`` leaves the reply to the world.
    """

    def __init__(self, replies: Mapping[str, Callable[..., str | None]] | None = None) -> None:
        self.replies = replies or {}
        self.prompts: Counter[str] = Counter()

    def __call__(self, prompt: str, attempt: int = 0) -> str:
        self.prompts[prompt] += 1
        kind, texts = parse_prompt(prompt)
        own = self.replies.get(kind)
        reply = own(texts) if own else None
        return reply if reply is not None else self._reply(kind, texts)

    def _reply(self, kind: str, texts: Any) -> str:
        if kind == "wording":
            return write_wording(*texts)
        if kind == "chain":
            return json.dumps({"question": chain_question_of(texts[0])})
        if kind == "reasoning":
            return "\n".join(f"{n}. {text}" for n, text in enumerate(REASONING.get(texts, ["I do not know."]), start=1))
        if kind == "extraction":
            return f"{json.dumps(FACTS.get(texts, []))}\nThat is all."
        return next((reply for key, reply in KNOWN.items() if question_of(*key) == texts), "I do not know.")

    def ask(self, chats: Sequence[Chat]) -> list[Outcome]:
        """Answer chats as a writer does, for a growth without a server."""
        return [without_thought(Reply(self(chat[-1]["content"]), "stop")) for chat in chats]

    def kinds(self) -> Counter[str]:
        """Number of distinct prompts by kind."""
        return Counter(parse_prompt(prompt)[0] for prompt in self.prompts)
