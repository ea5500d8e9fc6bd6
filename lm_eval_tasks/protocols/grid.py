"""The four modules of an evaluation, varied one by one (section 6 of The Mirage of Model Editing, ACL 2025).

| module | variants |
|---|---|
| input | the contexts of :mod:`lm_eval_tasks.protocols.wild`; published: ``question_only``, ``qa_inst`` |
| generation | ``teacher_forcing``: each token after the gold answer's tokens; ``greedy``: after its own |
| truncation | ``gold_length``: as many tokens as the gold answer; ``natural_stop``: up to the stop rule of WILD |
| metric | ``match``: share of the gold answer's tokens; ``em``: exact match of the text; ``judge`` |

A task has one input, generation and truncation, and a column per metric that is possible there. Teacher forcing has the
gold answer's length, and the match ratio needs that length: other combinations are errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from edit_hooks.decoding import Decoding
from edit_hooks.utils.errors import EditingError
from judges.model.factory import chosen_judge
from lm_eval_tasks.common.asking.answers import Answer
from lm_eval_tasks.common.asking.probes import CaseAnswers, ProbeAnswers
from lm_eval_tasks.common.records.cases import EFFICACY, Case
from lm_eval_tasks.common.scoring import measures
from lm_eval_tasks.common.scoring.measures import Measure, mean_over
from lm_eval_tasks.common.settings import Settings, choice_setting
from lm_eval_tasks.protocols.wild import QUESTIONS, WILD_CONTEXT, generation_doc, generation_probe

TEACHER_FORCING, GREEDY = "teacher_forcing", "greedy"
GOLD_LENGTH, NATURAL_STOP = "gold_length", "natural_stop"
ANY, MATCH, JUDGE, EM = "any", "match", "judge", "em"

GENERATION = choice_setting("grid_generation", "generation of a cell of the grid", [GREEDY, TEACHER_FORCING])
TRUNCATION = choice_setting("grid_truncation", "truncation in a cell of the grid", [NATURAL_STOP, GOLD_LENGTH])
METRIC = choice_setting("grid_metric", "refuse a cell of the grid without this metric", [ANY, MATCH, JUDGE, EM])
GRID_SETTINGS = (GENERATION, TRUNCATION, METRIC)


class GridCell(NamedTuple):
    """Generation and truncation of an answer."""

    generation: str
    truncation: str

    def check(self, metric: str = ANY) -> None:
        """Refuse what cannot be combined.

        Raises:
            EditingError: with the reason and what to use.
        """
        if self == (TEACHER_FORCING, NATURAL_STOP):
            raise EditingError(
                f"grid_generation={TEACHER_FORCING} with grid_truncation={NATURAL_STOP}: the model reads the gold "
                f"answer's tokens, so the answer ends with them and has no stop of its own. Use {GOLD_LENGTH}, or "
                f"grid_generation={GREEDY}."
            )
        if metric == MATCH and self.truncation == NATURAL_STOP:
            raise EditingError(
                f"grid_metric={MATCH} with grid_truncation={NATURAL_STOP}: the match ratio compares position by "
                f"position and needs an answer of the gold answer's length. Use {GOLD_LENGTH}, or grid_metric={EM} or "
                f"{JUDGE}."
            )

    def decoding(self, gold: str) -> Decoding | None:
        """Decoding settings of a question with this gold answer; ``None``: those of the task."""
        if self.truncation == NATURAL_STOP:
            return None
        return Decoding(length_of=gold, teacher_forced=self.generation == TEACHER_FORCING)


TF = GridCell(TEACHER_FORCING, GOLD_LENGTH)
AR_GOLD = GridCell(GREEDY, GOLD_LENGTH)
AR_NATURAL = GridCell(GREEDY, NATURAL_STOP)


# ------------------------------------------------------------------------ documents


def chosen_doc(case: Case, settings: Settings) -> dict[str, Any]:
    """The edit question in the cell that the settings choose."""
    cell, metric = GridCell(GENERATION.read(settings), TRUNCATION.read(settings)), METRIC.read(settings)
    cell.check(metric)
    if metric == JUDGE and chosen_judge(settings) is None:
        raise EditingError(f"grid_metric={JUDGE} needs a judge; give one with --metadata judge=..., or use {EM}.")
    return _doc(case, settings, WILD_CONTEXT.read(settings), cell)


def question_only_tf_doc(case: Case, settings: Settings) -> dict[str, Any]:
    """The question alone, teacher forcing."""
    return _named_doc(case, settings, "question_only", TF)


def question_only_ar_gold_doc(case: Case, settings: Settings) -> dict[str, Any]:
    """The question alone, greedy decoding to the gold answer's length."""
    return _named_doc(case, settings, "question_only", AR_GOLD)


def question_only_ar_natural_doc(case: Case, settings: Settings) -> dict[str, Any]:
    """The question alone, greedy decoding to the natural stop."""
    return _named_doc(case, settings, "question_only", AR_NATURAL)


def qa_inst_tf_doc(case: Case, settings: Settings) -> dict[str, Any]:
    """The QA instruction, teacher forcing."""
    return _named_doc(case, settings, "qa_inst", TF)


def qa_inst_ar_gold_doc(case: Case, settings: Settings) -> dict[str, Any]:
    """The QA instruction, greedy decoding to the gold answer's length."""
    return _named_doc(case, settings, "qa_inst", AR_GOLD)


def qa_inst_ar_natural_doc(case: Case, settings: Settings) -> dict[str, Any]:
    """The QA instruction, greedy decoding to the natural stop."""
    return _named_doc(case, settings, "qa_inst", AR_NATURAL)


def _named_doc(case: Case, settings: Settings, context: str, cell: GridCell) -> dict[str, Any]:
    """The edit question in the cell of a task whose name has the input."""
    chosen = settings.get("wild_context")
    if chosen not in (None, context):
        raise EditingError(
            f"wild_context={chosen!r} for a task whose name has {context}. Drop the setting, or run the cell as "
            f"..._grid_cell with wild_context={chosen},{GENERATION.name}={cell.generation},"
            f"{TRUNCATION.name}={cell.truncation}."
        )
    return _doc(case, settings, context, cell)


def _doc(case: Case, settings: Settings, context: str, cell: GridCell) -> dict[str, Any]:
    probes = [
        generation_probe(EFFICACY, question, context, decoding=cell.decoding(question.wanted))
        for question in case.questions(EFFICACY)
    ]
    return generation_doc(case, settings, context, probes)


# -------------------------------------------------------------------------- scoring


def score_chosen(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """The metrics of all cells; the task lists those of its own."""
    return {**score_tf(doc, answers), **score_ar_gold(doc, answers), **score_ar_natural(doc, answers)}


def score_tf(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """Match ratio and exact match of the teacher-forced answer."""
    return _fixed_length_measures("match", "tf_em", answers)


def score_ar_gold(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """Match ratio and exact match of the greedy answer of the gold answer's length."""
    return _fixed_length_measures("ar_match", "ar_em", answers)


def score_ar_natural(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """Exact match up to the natural stop, and what follows a right beginning there."""
    probes, noun = answers.of_kind(EFFICACY), QUESTIONS[EFFICACY]
    # Exact match after the question alone is that of other benchmarks; in a context papers publish it.
    measured = {
        "gen_em": measures.generated_match,
        "wild_em": measures.generated_squad_match,
        **dict.fromkeys(("gen_goes_on", "wild_goes_on"), measures.goes_on),
        **dict.fromkeys(("gen_repeats", "wild_repeats"), measures.repeats),
    }

    def of_generation(answered: ProbeAnswers, *, measure: Callable[[Answer | None, str], float]) -> float:
        return measure(answered.generation, answered.probe.gold)

    return {
        f"{EFFICACY}_{name}": mean_over(probes, noun, partial(of_generation, measure=measure))
        for name, measure in measured.items()
    }


def _fixed_length_measures(match: str, em: str, answers: CaseAnswers) -> dict[str, Measure]:
    """The measures after the question alone, and in a context; the task lists those of its own input."""
    probes, noun = answers.of_kind(EFFICACY), QUESTIONS[EFFICACY]
    found = {
        match: mean_over(probes, noun, lambda answered: measures.target_match(answered.generation)),
        em: mean_over(
            probes, noun, lambda answered: measures.generated_squad_match(answered.generation, answered.probe.gold)
        ),
    }
    return {f"{EFFICACY}{context}_{name}": measure for context in ("", "_qa") for name, measure in found.items()}
