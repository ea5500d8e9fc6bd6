"""The model's own choice among retrieved facts: the prompts of SCR, and how a reply is read.

The prompts are those of the release (MIT; ``scr/edit_rag.py`` of ECNU-Text-Computing), which fills them with sentences.
A reply is read by one of two rules:

``released``: "no relevant fact", "no relevant information" and "false" anywhere in the reply mean that no fact is
relevant. Else the fact is what follows "The fact that best matches the question is" up to a quotation mark, a period or
the end of the line, and the whole reply where that phrase is missing. So a model can state a fact that is not an edit,
an edit about an album called "False Alarm" is never chosen, and "3.5" ends at its point. Of one candidate any other
reply chooses it.

``named``: the fact that the reply repeats in full, the longest of several; no fact if it repeats none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from edit_hooks.deltas.context_edit import ContextEdit
from edit_hooks.in_context.rounds import ANSWER, THOUGHTS
from edit_hooks.in_context.selection import bare_question
from edit_hooks.utils.text.scripts import ENDS, PERIODS

ReplyRule = Literal["released", "named"]
REPLY_TOKENS = 50  # longest reply, as in the release
NONE_RELEVANT = ("no relevant information", "no relevant fact", "false")

_BEST_MATCH = re.compile(
    r"The fact that best matches the (?:question|core knowledge (?:asked )?in the question) is[:\s]*"
    r'"?([^".\n]*)[".\n]'
)


def sentence_of(fact: ContextEdit) -> str:
    """A fact as a sentence, with a period unless it has an end of its own."""
    text = fact.statement
    return text if text.endswith(ENDS) else f"{text}."


def choice_prompt(facts: Sequence[ContextEdit], question: str) -> str:
    """The prompt that asks for the relevant fact.

    Args:
        facts: the candidates, the most similar one first.
        question: a prompt; of an instruction or demonstrations in it only the question is shown.
    """
    entire, start = ("", "") if len(facts) == 1 else (" (the entire sentence)", "\n")
    return (
        f"Given a set of facts and a question, return the fact{entire} that best matches the core knowledge asked in "
        'the question. If the question cannot be answered with the facts, return "no relevant fact."\n\n'
        f"Facts: {start}{chr(10).join(map(sentence_of, facts))}\nQuestion: {bare_question(question)}\n\nOutput:"
    )


def answer_prompt(fact: str, question: str) -> str:
    """The prompt of the answer, with the chosen fact; it ends with "Thoughts:" where the question's prompt does."""
    end = THOUGHTS if question.rstrip().endswith(THOUGHTS) else ANSWER
    return f"Answer the question based on the Fact.\n\nFact: {fact}\nQuestion: {bare_question(question)}\n{end}"


def read_choice(reply: str, facts: Sequence[ContextEdit], rule: ReplyRule) -> str | None:
    """The fact that a reply chooses; ``None`` if none is relevant.

    Args:
        facts: the candidates.
    """
    sentences = [sentence_of(fact) for fact in facts]
    if rule == "named":
        lowered = reply.lower()
        named = [text for text in sentences if text.rstrip("".join(PERIODS)).lower() in lowered]
        return max(named, key=len, default=None)
    if any(words in reply.lower() for words in NONE_RELEVANT):
        return None
    return sentences[0] if len(sentences) == 1 else released_fact(reply)


def released_fact(reply: str) -> str:
    """The fact that a reply states, by the rule of the release."""
    if (match := _BEST_MATCH.search(f"{reply}.")) is None:
        return _with_period(reply)
    return _with_period(match.group(1).strip())


def _with_period(text: str) -> str:
    return text if not text or text.endswith(PERIODS) else f"{text}."
