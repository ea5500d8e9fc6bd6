r"""Truth: balanced judgments, True or False, of statements about the edited fact and its neighbors.

Every prompt is stated twice, once with a true and once with a false object, and the same two objects are true of one
prompt and false of the other wherever the neighbor's own answer is the edit's original object:

| cell | statement | wanted |
|---|---|---|
| new | edit prompt with o\* | True |
| old | edit prompt with the original object (another record's where the record has none) | False |
| neighbor | neighbor's prompt with its own answer | True |
| bleed | neighbor's prompt with o\* | False |

A statement has credit 1 if the wanted label has the lower NLL per token, 1/2 for a tie, else 0; ``truth_acc`` is the
mean over the four cells. Any rule that looks at the label, the object or the prompt alone has 1/2. Definitions:
docs/benchmarks/questions.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from edit_hooks.decoding import AskedModel
from edit_hooks.prompt_context import SPACE
from lm_eval_tasks.common.asking.documents import of_all_cases
from lm_eval_tasks.common.asking.probes import CaseAnswers, Probe, ProbeAnswers, case_doc
from lm_eval_tasks.common.records.cases import Case
from lm_eval_tasks.common.scoring import measures
from lm_eval_tasks.common.scoring.measures import Measure, case_mean
from lm_eval_tasks.common.settings import Settings
from lm_eval_tasks.protocols.other_objects import draw_other_objects
from lm_eval_tasks.protocols.wordings import CLOZE, FALSE, QUESTION, TRUE, Wording, judgment, state

NEW, OLD, NEIGHBOR, BLEED, OTHER, CONTENT_FREE = "new", "old", "neighbor", "bleed", "other", "content_free"
# The cells of the accuracy -> whether their statements are true.
CELLS = {NEW: True, OLD: False, NEIGHBOR: True, BLEED: False}
MAX_NEIGHBORS = 2
# The unedited model's judgment of statements without content is its prior for the labels.
CONTENT_FREE_STATEMENTS = ("N/A", "[MASK]")

# Nouns for the reason of a case without such statements.
STATEMENTS = {
    NEW: "statement of its edit",
    OLD: "false object: no original one, and no other object in the data",
    NEIGHBOR: "neighborhood prompts",
    BLEED: "neighborhood prompts whose answer is not the new object",
    OTHER: "other object in the data",
}


# ------------------------------------------------------------------------ documents


@of_all_cases
def truth_docs(cases: Sequence[Case], settings: Settings) -> Iterator[dict[str, Any]]:
    """Documents for cloze prompts."""
    return _truth_docs(cases, CLOZE)


@of_all_cases
def question_truth_docs(cases: Sequence[Case], settings: Settings) -> Iterator[dict[str, Any]]:
    """Documents for questions."""
    return _truth_docs(cases, QUESTION)


def _truth_docs(cases: Sequence[Case], wording: Wording) -> Iterator[dict[str, Any]]:
    drawn = draw_other_objects(cases, 1, questions=wording.is_question)
    for case, other in zip(cases, drawn, strict=True):
        probes = [
            _probe(kind, state(wording, prompt, text, case.request.separator))
            for kind, prompt, text in _statements(case, next(iter(other.objects), None))
        ]
        probes += [_probe(CONTENT_FREE, text) for text in CONTENT_FREE_STATEMENTS]
        yield case_doc(case, probes, generate=False) | {"other": other.to_json()}


def _statements(case: Case, other: str | None) -> Iterator[tuple[str, str, str]]:
    """Kind, prompt and object of every statement of a case."""
    request = case.request
    yield NEW, request.text, request.target_new
    if (old := request.target_true or other) is not None:
        yield OLD, request.text, old
    if other is not None:
        yield OTHER, request.text, other
    neighbors = [question for question in case.neighbors if question.wanted != request.target_new]
    for question in neighbors[:MAX_NEIGHBORS]:
        yield NEIGHBOR, question.prompt, question.wanted
        yield BLEED, question.prompt, request.target_new


def _probe(kind: str, statement: str) -> Probe:
    ask: AskedModel = "unedited" if kind == CONTENT_FREE else "both"
    return Probe(
        kind=kind,
        prompt=judgment(statement),
        targets=(TRUE, FALSE),
        separator=SPACE,
        gold=str(CELLS.get(kind, False)),
        ask=ask,
    )


# -------------------------------------------------------------------------- scoring


def score_truth(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """Accuracy, raw and without the label prior, its cells, and the share of statements called true."""
    scores = {f"truth_{kind}": _credit(answers, kind, wanted) for kind, wanted in CELLS.items()}
    calibrated = [_credit(answers, kind, wanted, calibrate=True) for kind, wanted in CELLS.items()]
    before = [_credit(answers, kind, wanted, unedited=True) for kind, wanted in CELLS.items()]
    called_true = [_credit(answers, kind, True) for kind in CELLS]
    return scores | {
        "truth_acc": _mean(list(scores.values())),
        "truth_acc_calibrated": _mean(calibrated),
        "truth_acc_unedited": _mean(before),
        "truth_called_true": _mean(called_true),
        "truth_other_rejected": _credit(answers, OTHER, False),
    }


def _mean(cells: Sequence[Measure]) -> Measure:
    return lambda: math.fsum(cell() for cell in cells) / len(cells)


def _credit(
    answers: CaseAnswers, kind: str, wanted: bool, *, calibrate: bool = False, unedited: bool = False
) -> Measure:
    """Mean credit over the statements of one kind.

    Args:
        wanted: whether they are true.
        calibrate: compare the evidence for True with that of statements without content in the unedited model.
        unedited: score the unedited model.
    """

    def credit(answered: ProbeAnswers) -> float:
        margin = _evidence(answered, unedited=unedited) - (_prior(answers) if calibrate else 0.0)
        return 0.5 if margin == 0 else float((margin > 0) == wanted)

    return lambda: case_mean(map(credit, answers.of_kind(kind)), STATEMENTS[kind])


def _prior(answers: CaseAnswers) -> float:
    found = answers.of_kind(CONTENT_FREE)
    return math.fsum(_evidence(answered, unedited=True) for answered in found) / len(found)


def _evidence(answered: ProbeAnswers, *, unedited: bool) -> float:
    """NLL(False) - NLL(True) per token: above 0 if the model calls the statement true."""
    true, false = answered.targets
    return measures.nll(false, unedited=unedited) - measures.nll(true, unedited=unedited)
