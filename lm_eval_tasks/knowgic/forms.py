"""Forms in which a fact is asked, and how its probability is estimated; their settings.

ThinkEdit names three forms of a question, by the part of the fact that it leaves out: the object, the relation, or
nothing (yes or no). The files have questions for the object, and a statement that the object completes. The wordings of
the other two forms are ours, made from the statement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edit_hooks.prompt_context import QA_INSTRUCTION, statement
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.settings.numbers import POSITIVE, require_number, require_whole
from edit_hooks.utils.text.scripts import warn_of_english_rule
from lm_eval_tasks.common.settings import Setting, Settings, choice_setting, context_setting
from lm_eval_tasks.knowgic.case import Hop
from lm_eval_tasks.protocols.fluency import GENERATION_SEED

logger = get_logger("lm_eval.editing_tasks")

CONTEXTS = {"qa_inst": QA_INSTRUCTION, "question_only": "{question}"}


def _draws(settings: Settings) -> int:
    value = settings.get("knowgic_draws")
    return 5 if value is None else require_whole("knowgic_draws", value)


def _temperature(settings: Settings) -> float:
    value = settings.get("knowgic_temperature")
    return 0.7 if value is None else require_number("knowgic_temperature", value, POSITIVE)


def _max_tokens(settings: Settings) -> int:
    value = settings.get("knowgic_max_tokens")
    return 64 if value is None else require_whole("knowgic_max_tokens", value)


# The paper states five responses per question in its case study. It states no prompt, temperature or length.
KNOWGIC_DRAWS = Setting("knowgic_draws", "a whole number >= 1", "responses per question and model", _draws)
KNOWGIC_TEMPERATURE = Setting("knowgic_temperature", POSITIVE.text, "temperature of the responses", _temperature)
KNOWGIC_MAX_TOKENS = Setting("knowgic_max_tokens", "a whole number >= 1", "longest response, in tokens", _max_tokens)
SINGLE, SEQUENTIAL = "single", "sequential"
KNOWGIC_PROMPTING = choice_setting(
    "knowgic_prompting",
    "ask each question of a chain alone, or after the earlier ones and their answers",
    [SINGLE, SEQUENTIAL],
)
KNOWGIC_CONTEXT = context_setting("knowgic_context", "context of the questions", CONTEXTS)
FORM_SETTINGS = (
    KNOWGIC_DRAWS,
    KNOWGIC_TEMPERATURE,
    KNOWGIC_MAX_TOKENS,
    KNOWGIC_CONTEXT,
    KNOWGIC_PROMPTING,
    GENERATION_SEED,
)


@dataclass(frozen=True, kw_only=True)
class Form:
    """A form of questions.

    Attributes:
        name: as in the columns; empty for the questions of the file.
        ask: the question about a fact.
        answer: the text that answers it.
        competitor: the only other answer, for forms with two.
        is_statement: the answer continues the text, so there is no question and no context.
    """

    name: str
    ask: Callable[[Hop], str]
    answer: Callable[[Hop], str]
    competitor: str = ""
    is_statement: bool = False

    def prompt(self, hop: Hop, settings: Settings, earlier: Sequence[Hop] = ()) -> str:
        """The prompt about a fact, in the context that the settings choose.

        Args:
            earlier: facts whose prompts and right answers stand before it, as the turns of one conversation.
        """
        turns = [f"{self._alone(one, settings)} {self.answer(one)}" for one in earlier]
        return ("\n" if self.is_statement else "\n\n").join([*turns, self._alone(hop, settings)])

    def _alone(self, hop: Hop, settings: Settings) -> str:
        asked, context = self.ask(hop), KNOWGIC_CONTEXT.read(settings)
        if self.is_statement:
            prompt, is_own = asked, asked == hop.statement
        else:
            prompt = CONTEXTS.get(context, context).replace("{question}", asked)
            is_own = asked == hop.question and context != "qa_inst"
        if not is_own:
            remedy = "Without: --metadata knowgic_context=question_only, in the form that asks for the object."
            warn_of_english_rule(logger, "wordings and instruction of knowgic", [hop.statement], remedy)
        return prompt

    @property
    def stops(self) -> Sequence[str]:
        """Stop strings of a response: the next question of a text of questions, or the end of the statement's line."""
        return ("\n",) if self.is_statement else ("\nQ:",)


OBJECT = Form(name="", ask=lambda hop: hop.question, answer=lambda hop: hop.answer)
CLOZE = Form(name="cloze", ask=lambda hop: hop.statement, answer=lambda hop: hop.answer, is_statement=True)
RELATION = Form(
    name="relation",
    ask=lambda hop: f'Which words link "{hop.subject}" to "{hop.answer}"?',
    answer=lambda hop: hop.relation,
)
YES_NO = Form(
    name="yes_no",
    ask=lambda hop: f'Is it true that "{statement(hop.statement, hop.answer)}"? Answer with yes or no.',
    answer=lambda hop: "Yes",
    competitor="No",
)
