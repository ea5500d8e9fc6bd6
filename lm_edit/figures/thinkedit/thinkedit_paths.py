"""The chains of a case with the probabilities of their steps, and the rules by which one recovers the fact."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from lm_edit.figures.needs import Needs
from lm_eval_tasks.knowgic.chains import share_with_answer

if TYPE_CHECKING:
    from lm_edit.results.answers.documents import CaseDocument, SavedQuestion, SavedResponse

HALF_OF = 0.5  # of a chain's strength before the edit

Pair = tuple[float, float]  # before and after the edit


class PathStep(NamedTuple):
    """A fact of a chain: its ends, its question, and the probability of its answer before and after the edit."""

    subject: str
    answer: str
    question: str
    before: float
    after: float


class Path(NamedTuple):
    """A chain with its strengths R, the products of its steps' probabilities; NaN if an answer is missing."""

    steps: tuple[PathStep, ...]

    @property
    def before(self) -> float:
        """Strength before the edit."""
        return math.prod(step.before for step in self.steps)

    @property
    def after(self) -> float:
        """Strength after the edit."""
        return math.prod(step.after for step in self.steps)

    @property
    def ratio(self) -> float:
        """Strength after the edit as a share of that before; NaN for an inactive chain."""
        return self.after / self.before if self.before else math.nan

    @property
    def is_answered(self) -> bool:
        """Whether no answer is missing."""
        return not math.isnan(self.before + self.after)


class Rule(NamedTuple):
    """A rule by which a chain recovers the original fact.

    Attributes:
        counts: whether a chain can recover it at all.
        recovers: whether a chain does.
        text: the rule in words, for captions.
    """

    name: str
    counts: Callable[[Path], bool]
    recovers: Callable[[Path], bool]
    text: str


ACTIVE = Rule(
    "active",
    lambda path: path.is_answered,
    lambda path: path.after > 0,
    "Rule active (ThinkEdit, table 2): a chain recovers the fact if R after the edit is above 0, that is, if every "
    "question has its answer in some response",
)
HALF = Rule(
    "half",
    lambda path: path.is_answered and path.before > 0,
    lambda path: path.ratio >= HALF_OF,
    "Rule half (of this package; no likelihood is 0): a chain recovers the fact if the product R of its answers' "
    f"probabilities (per token) after the edit is at least {HALF_OF:g} of that before",
)
RULES = {"sampled": ACTIVE, "cloze_sampled": ACTIVE, "prob": HALF, "cloze_prob": HALF}  # by ending of the columns


def read_paths(document: CaseDocument, needs: Needs) -> list[Path]:
    """The chains of a case, with probabilities as its task scores them.

    These are exp of the mean log-probability per token, or shares of sampled responses with the answer.

    Raises:
        EditingError: for a document without an answer of its chains.
    """
    by_prompt: dict[str, list[SavedQuestion]] = {}
    for question in document.questions:
        by_prompt.setdefault(question.prompt, []).append(question)
    prompts = list(by_prompt)
    paths = []
    for chain in document.extras["chains"]:
        steps, subject = [], str(document.edits[0]["subject"])
        for number, answer in chain:
            pair = _pair(by_prompt[prompts[number]], answer, document)
            if pair is None:
                raise needs.missing(f"case {document.case_id} has no answer {answer!r} to {prompts[number]!r}")
            steps.append(PathStep(subject, answer, prompts[number], *pair))
            subject = answer
        paths.append(Path(tuple(steps)))
    return paths


def _pair(questions: Sequence[SavedQuestion], answer: str, document: CaseDocument) -> Pair | None:
    """Probability before and after the edit; ``None`` if the answer was not asked."""
    if all(question.target is None for question in questions):
        names = [answer, *document.extras.get("aliases", {}).get(answer, ())]
        before, after = ([one.unedited for one in questions], [one.answers.get("") for one in questions])
        return _share(before, names), _share(after, names)
    for question in questions:
        if question.target in (answer, f" {answer}"):
            return _likelihood(question.unedited), _likelihood(question.answers.get(""))
    return None


def _share(answers: Sequence[SavedResponse | None], names: Sequence[str]) -> float:
    texts = [one.text for one in answers if one is not None and one.text is not None]
    return share_with_answer(texts, names) if len(texts) == len(answers) else math.nan


def _likelihood(answer: SavedResponse | None) -> float:
    if answer is None or answer.logprob is None or not answer.num_tokens:
        return math.nan
    return math.exp(answer.logprob / answer.num_tokens)
