"""Documents and scores of long answers: how much of the target text the model writes.

Sources: Deng et al., UnKE (2405.15349); Wu et al., AKEW (2402.18909). Answers are greedy, up to 512 tokens, and end
where the model ends them. ROUGE-L is that of the package rouge-score, BLEU that of sacreBLEU by sentence. ``char_bleu``
is what UnKE's release prints as BLEU: nltk's ``sentence_bleu`` of texts in the place of lists of words, so that its
n-grams are of characters. The release prints the recall of ROUGE, which rewards text without an end; F1 and precision
stand beside it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from edit_hooks.decoding import Decoding
from lm_eval_tasks.common.asking.probes import CaseAnswers, Probe, ProbeAnswers, case_doc
from lm_eval_tasks.common.records.cases import EFFICACY, PARAPHRASE, Question
from lm_eval_tasks.common.scoring import measures
from lm_eval_tasks.common.scoring.measures import Measure, mean_over
from lm_eval_tasks.common.settings import Settings
from lm_eval_tasks.unstructured.benchmark import TextCase

SUB_QUESTION = "sub_question"
NOUNS = {EFFICACY: "edit questions", PARAPHRASE: "paraphrased questions", SUB_QUESTION: "sub-questions"}
DECODING = Decoding(max_new_tokens=512, until=())


# ------------------------------------------------------------------------ documents


def original_doc(case: TextCase, settings: Settings) -> dict[str, Any]:
    """The edited question."""
    return _doc(case, EFFICACY, case.questions(EFFICACY))


def paraphrase_doc(case: TextCase, settings: Settings) -> dict[str, Any]:
    """The question in other words."""
    return _doc(case, PARAPHRASE, case.paraphrases)


def sub_questions_doc(case: TextCase, settings: Settings) -> dict[str, Any]:
    """Questions about details of the text."""
    return _doc(case, SUB_QUESTION, case.sub_questions)


def _doc(case: TextCase, kind: str, questions: Sequence[Question]) -> dict[str, Any]:
    probes = [
        Probe(kind=kind, prompt=question.prompt, generate=True, gold=question.wanted, decoding=DECODING)
        for question in questions
    ]
    return case_doc(case, probes, generate=True)


# -------------------------------------------------------------------------- scoring


def score_original(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """ROUGE-L and BLEU of the answer to the edited question."""
    return _measures(answers, EFFICACY)


def score_paraphrase(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """ROUGE-L and BLEU of the answer to the paraphrased question."""
    return _measures(answers, PARAPHRASE)


def score_sub_questions(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """ROUGE-L of the answers to the sub-questions, and whether they contain the gold answer."""
    return _measures(answers, SUB_QUESTION)


def _measures(answers: CaseAnswers, kind: str) -> dict[str, Measure]:
    probes, noun = answers.of_kind(kind), NOUNS[kind]

    def of_texts(measure: Callable[[str, str], float]) -> Measure:
        def value(answered: ProbeAnswers) -> float:
            return measure(measures.generated_text(answered.generation).text.strip(), answered.probe.gold)

        return mean_over(probes, noun, value)

    def contains(answered: ProbeAnswers) -> float:
        return measures.generated_contains(answered.generation, answered.probe.gold)

    return {
        f"{kind}_text_rouge_l": of_texts(lambda text, gold: rouge_l(text, gold)[2]),
        f"{kind}_text_rouge_l_recall": of_texts(lambda text, gold: rouge_l(text, gold)[1]),
        f"{kind}_text_rouge_l_precision": of_texts(lambda text, gold: rouge_l(text, gold)[0]),
        f"{kind}_text_bleu": of_texts(bleu),
        f"{kind}_text_char_bleu": of_texts(char_bleu),
        f"{kind}_text_contains": mean_over(probes, noun, contains),
    }


def rouge_l(text: str, gold: str) -> tuple[float, float, float]:
    """Precision, recall and F1 of the longest common subsequence of words (Lin 2004)."""
    score = _rouge().score(gold, text)["rougeL"]
    return float(score.precision), float(score.recall), float(score.fmeasure)


@functools.cache
def _rouge() -> Any:
    from rouge_score.rouge_scorer import RougeScorer  # here: its import takes a second

    return RougeScorer(["rougeL"])


def bleu(text: str, gold: str) -> float:
    """SacreBLEU of one sentence, in 0..1 (Post 2018): 13a tokens, exponential smoothing, the orders that fit."""
    import sacrebleu

    return float(sacrebleu.sentence_bleu(text, [gold]).score) / 100


def char_bleu(text: str, gold: str) -> float:
    """BLEU of n-grams of characters, in 0..1, as the release computes it; 0 where no n-gram of some length agrees."""
    import warnings

    from nltk.translate.bleu_score import sentence_bleu

    if not text:
        return 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about n-grams of a length that do not occur
        return float(sentence_bleu([list(gold)], list(text)))
