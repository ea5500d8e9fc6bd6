"""Multiple choice: new, old and other object, and none of these, in four cyclic orders.

Order k (0..3) puts role i (0..3) at position (i + k) mod 4, so every role is at every position once. The model chooses
the letter with the lowest NLL per token; k tied letters share the choice. ``mcq_<role>`` is the share of the orders in
which the role is chosen; the four shares add up to 1. A model that always chooses the same letter has 1/4 each.
``mcq_position_bias`` is the total variation distance between the shares of the letters and 1/4 each: 0 if the choice
follows the content, 3/4 for one letter in all orders. Definitions: docs/benchmarks/questions.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from edit_hooks.prompt_context import SPACE
from lm_eval_tasks.common.asking.documents import of_all_cases
from lm_eval_tasks.common.asking.probes import CaseAnswers, Probe, ProbeAnswers, case_doc
from lm_eval_tasks.common.records.cases import Case
from lm_eval_tasks.common.scoring import measures
from lm_eval_tasks.common.scoring.measures import Measure, Unscored, case_mean
from lm_eval_tasks.common.settings import Settings
from lm_eval_tasks.protocols.other_objects import draw_other_objects
from lm_eval_tasks.protocols.wordings import CLOZE, QUESTION, Wording, fill

NEW, OLD, OTHER, NONE = "new", "old", "other", "none"
LETTERS = ("A", "B", "C", "D")
NONE_TEXT = "none of these"
CHOICE = "choice"
NO_OPTIONS = "third option: too few other objects in the data"


# ------------------------------------------------------------------------ documents


@of_all_cases
def mcq_docs(cases: Sequence[Case], settings: Settings) -> Iterator[dict[str, Any]]:
    """Documents for cloze prompts."""
    return _mcq_docs(cases, CLOZE)


@of_all_cases
def question_mcq_docs(cases: Sequence[Case], settings: Settings) -> Iterator[dict[str, Any]]:
    """Documents for questions."""
    return _mcq_docs(cases, QUESTION)


def _mcq_docs(cases: Sequence[Case], wording: Wording) -> Iterator[dict[str, Any]]:
    """Two other objects take the places of old and other where the record has no original object."""
    two_others = draw_other_objects(cases, 2, questions=wording.is_question)
    one_other = draw_other_objects(cases, 1, questions=wording.is_question)
    for case, two, one in zip(cases, two_others, one_other, strict=True):
        old = case.request.target_true
        drawn = two if old is None else one
        known = [(NEW, case.request.target_new), *([] if old is None else [(OLD, old)])]
        options = [*known, *((OTHER, text) for text in drawn.objects), (NONE, NONE_TEXT)]
        probes = []
        if len(options) == len(LETTERS):
            texts = [text for _, text in options]
            probes = [_probe(case.request.text, texts, order, wording) for order in range(len(LETTERS))]
        yield case_doc(case, probes, generate=False) | {
            "options": [{"role": role, "text": text} for role, text in options],
            "other": drawn.to_json(),
        }


def _probe(prompt: str, options: Sequence[str], order: int, wording: Wording) -> Probe:
    """The question in one order; its targets are the letters of the options in the fixed order of the roles."""
    letters = [LETTERS[(number + order) % len(LETTERS)] for number in range(len(LETTERS))]
    listed = sorted(zip(letters, options, strict=True))
    lines = [fill(wording.choice, prompt=prompt), *(f"{letter}. {text}" for letter, text in listed), "Answer:"]
    return Probe(kind=CHOICE, prompt="\n".join(lines), targets=letters, separator=SPACE, gold=letters[0], ask="both")


# -------------------------------------------------------------------------- scoring


def score_mcq(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """Share of each role, that of the new object in the unedited model, and the position bias."""
    probes = answers.of_kind(CHOICE)
    roles = [option["role"] for option in doc["options"]]

    def share(role: str, *, unedited: bool = False) -> Measure:
        def chosen(answered: ProbeAnswers) -> float:
            shares = _choice(answered, unedited=unedited)
            return math.fsum(part for found, part in zip(roles, shares, strict=True) if found == role)

        def mean() -> float:
            if probes and role not in roles:
                raise Unscored(f"the question has no option {role!r}")
            return case_mean(map(chosen, probes), NO_OPTIONS)

        return mean

    def position_bias() -> float:
        by_letter = dict.fromkeys(LETTERS, 0.0)
        for answered in probes:
            for letter, part in zip(answered.probe.targets, _choice(answered), strict=True):
                by_letter[letter] += part / len(probes)
        return case_mean([math.fsum(abs(part - 0.25) for part in by_letter.values()) / 2] if probes else [], NO_OPTIONS)

    scores = {f"mcq_{role}": share(role) for role in (NEW, OLD, OTHER, NONE)}
    return scores | {"mcq_new_unedited": share(NEW, unedited=True), "mcq_position_bias": position_bias}


def _choice(answered: ProbeAnswers, *, unedited: bool = False) -> list[float]:
    """The share of the choice that each target has: 1 for the most likely one, equal parts for tied ones."""
    nlls = [measures.nll(target, unedited=unedited) for target in answered.targets]
    best = min(nlls)
    return [(nll == best) / nlls.count(best) for nll in nlls]
