"""Wordings of statements, judgments and options around a prompt, for cloze prompts and for questions.

A prompt is wrapped as a whole and never changed inside, so any prompt stays grammatical, and editors that look for the
subject find it. All wordings are ours.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from edit_hooks.prompt_context import statement
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.text.scripts import PERIODS, warn_of_english_rule

logger = get_logger("lm_eval.editing_tasks")


@dataclass(frozen=True, kw_only=True)
class Wording:
    """The frames of one kind of prompts; ``{prompt}``, ``{object}`` and ``{fact}``, which is both, are filled in.

    Attributes:
        affirmed, negated: pairs of frames that a true, or a false, object completes.
        statement: the fact as one statement, without its period.
        choice: the prompt above a list of options.
        is_question: the prompts are questions.
    """

    affirmed: Sequence[str]
    negated: Sequence[str]
    statement: str
    choice: str
    is_question: bool


CLOZE = Wording(
    affirmed=("This statement is true: {prompt}", "It is correct to say: {prompt}"),
    negated=("This statement is false: {prompt}", "It is wrong to say: {prompt}"),
    statement="{fact}",
    choice="Which option completes the sentence?\nSentence: {prompt} ...",
    is_question=False,
)

QUESTION = Wording(
    affirmed=("Question: {prompt}\nRight answer:", "Give an answer that is correct.\nQuestion: {prompt}\nAnswer:"),
    negated=("Question: {prompt}\nWrong answer:", "Give an answer that is wrong.\nQuestion: {prompt}\nAnswer:"),
    statement='The answer to the question "{prompt}" is: {object}',
    choice="Question: {prompt}",
    is_question=True,
)

DENIED = 'It is not true that this statement holds: "{statement}"'
JUDGMENT = "Statement: {statement}\nIs the statement true or false?\nAnswer:"
TRUE, FALSE = "True", "False"


def fill(frame: str, **texts: str) -> str:
    """Fill the slots of a frame in one pass, so that braces in a text stay as they are."""
    remedy = "Likelihoods and free answers (_es, _gs, _ls, _wild) ask the record's own prompts."
    warn_of_english_rule(logger, "wordings of judgments, negations and options", texts.values(), remedy)
    return re.sub(r"\{(\w+)\}", lambda slot: texts[slot[1]], frame)


def state(wording: Wording, prompt: str, text: str, separator: str | None = None) -> str:
    """A fact as one sentence; an object that ends in a period, of any script, gets no second one.

    Args:
        separator: white space between prompt and object, if their record has one.
    """
    sentence = fill(wording.statement, prompt=prompt, object=text, fact=statement(prompt, text, separator))
    return sentence if sentence.endswith(PERIODS) else sentence + "."


def judgment(statement: str) -> str:
    """The question whether a statement is true; it is answered with :data:`TRUE` or :data:`FALSE`."""
    return fill(JUDGMENT, statement=statement)
