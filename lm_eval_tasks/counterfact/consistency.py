"""Generations of CounterFact: documents of its prompts, and consistency with reference texts.

Consistency is the cosine of TF-IDF vectors of all generations of a case and of the texts about subjects that have the
new object in the same relation. The generations are those of :mod:`lm_eval_tasks.protocols.fluency`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lm_eval_tasks.common.asking.probes import CaseAnswers
from lm_eval_tasks.common.scoring.measures import Measure, Unscored
from lm_eval_tasks.common.scoring.text_metrics import tfidf_consistency
from lm_eval_tasks.common.settings import Settings
from lm_eval_tasks.counterfact.benchmark import CounterfactCase
from lm_eval_tasks.counterfact.references import find_references, load_references
from lm_eval_tasks.protocols.fluency import FLUENCY, PROMPTS, fluency_doc, generated_whole

NO_REFERENCES = (
    "there are no reference texts for the relation and the new object; for published records, give the published texts "
    "(consistency_files)"
)


def generation_doc(case: CounterfactCase, settings: Settings) -> dict[str, Any]:
    """Document of the generation prompts of a case."""
    return fluency_doc(case, settings, case.generation_prompts)


def consistency_doc(case: CounterfactCase, settings: Settings) -> dict[str, Any]:
    """The same document, and where the reference texts of the case are."""
    ids = {"relation_id": case.relation_id, "target_id": case.target_id}
    return {**generation_doc(case, settings), **ids, "references": find_references(settings)}


def score_consistency(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """Cosine of the joined generations and the joined reference texts, under both names."""
    probes = answers.of_kind(FLUENCY)

    def cosine(unedited: bool) -> float:
        if not probes:
            raise Unscored(f"the record has no {PROMPTS}")
        generated = " ".join(generated_whole(answered, unedited=unedited) for answered in probes)
        references = load_references(**doc["references"])
        texts = references.texts.get((doc["relation_id"], doc["target_id"]))
        if not texts:
            raise Unscored(NO_REFERENCES)
        value = tfidf_consistency(generated, " ".join(texts), references.weights)
        if value is None:
            raise Unscored("generations or reference texts have no word of the vocabulary")
        return value

    return _with_unedited("reference_score", cosine) | _with_unedited("consistency_own_idf", cosine)


def _with_unedited(metric: str, value: Callable[[bool], float]) -> dict[str, Measure]:
    """A measure of the edited model, of the unedited one, and their difference.

    Args:
        value: whether the unedited model is meant -> the value.
    """
    return {
        metric: lambda: value(False),
        f"{metric}_unedited": lambda: value(True),
        f"{metric}_change": lambda: value(False) - value(True),
    }
