"""Token accuracy: the share of target tokens that the model predicts, against gold answers everywhere.

Source: the ZsRE evaluation of Meng et al., Mass-Editing Memory in a Transformer (ICLR 2023), and its released code,
which AlphaEdit and later papers run unchanged. Specificity is accuracy, too, not agreement with the unedited model.

Every question is asked twice. ``_token_acc`` is the released form: each target token has a prompt of its own, the
question followed by the decoded gold tokens before it, and the argmax after that prompt is compared with the first id
of the token's own text, tokenized alone. ``_match`` compares token ids along the target in one forward pass. They
differ where decoding and tokenizing again gives other ids: in the former, the tokens of a character that has several
are wanted as the first token of the replacement character. They also differ under editors that look an edit up by the
end of the prompt (``grace``), which find none after the first token's prompt. ``_argmax`` reads the same pass as
``_match`` and is 1 where every token is right: the exact match by which Liu et al., Beyond Local Edits (EVK), equations
15 and 16, define efficacy and generalization. The values that they print are not of that form (README of zsre).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from edit_hooks.decoding import AskedModel, TokenPrompts
from lm_eval_tasks.common.asking.answers import Answer
from lm_eval_tasks.common.asking.probes import CaseAnswers, Probe, ProbeAnswers, case_doc
from lm_eval_tasks.common.records.cases import EFFICACY, NEIGHBORHOOD, PARAPHRASE, Case
from lm_eval_tasks.common.scoring import measures
from lm_eval_tasks.common.scoring.measures import Measure, mean_over
from lm_eval_tasks.common.settings import Settings, choice_setting

TOKEN_PROMPTS = choice_setting(
    "token_prompts", "white space before the gold tokens in the prompts of *_token_acc", get_args(TokenPrompts)
)

# Plural nouns for the reason of a case without such questions.
QUESTIONS = {EFFICACY: "edit questions", PARAPHRASE: "paraphrased questions", NEIGHBORHOOD: "unrelated questions"}


def efficacy_doc(case: Case, settings: Settings) -> dict[str, Any]:
    """Document of the edit question."""
    return _doc(case, settings, EFFICACY)


def paraphrase_doc(case: Case, settings: Settings) -> dict[str, Any]:
    """Document of the paraphrased questions."""
    return _doc(case, settings, PARAPHRASE)


def specificity_doc(case: Case, settings: Settings) -> dict[str, Any]:
    """Document of the unrelated questions; agreement needs the unedited model."""
    return _doc(case, settings, NEIGHBORHOOD, "both")


def _doc(case: Case, settings: Settings, kind: str, ask: AskedModel = "edited") -> dict[str, Any]:
    rules: tuple[TokenPrompts | None, ...] = (_rule(settings), None)
    probes = [
        Probe(
            kind=kind,
            prompt=question.prompt,
            targets=[question.wanted],
            gold=question.wanted,
            # agreement is computed from the ids along the target only
            ask="edited" if rule else ask,
            token_prompts=rule,
        )
        for question in case.questions(kind)
        for rule in rules
    ]
    return case_doc(case, probes, generate=False)


def _rule(settings: Settings) -> TokenPrompts:
    chosen = TOKEN_PROMPTS.read(settings)
    return next(rule for rule in get_args(TokenPrompts) if rule == chosen)


def score_efficacy(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """Accuracy of the edit's answer after the edit question, also in whole (EVK, equation 15)."""
    return _accuracies(answers, EFFICACY)


def score_paraphrase(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """Accuracy of the edit's answer after the paraphrased questions, also in whole (EVK, equation 16)."""
    return _accuracies(answers, PARAPHRASE)


def score_specificity(doc: Mapping[str, Any], answers: CaseAnswers) -> dict[str, Measure]:
    """Accuracy of the gold answers of unrelated questions, and agreement with the unedited model along them."""
    _, along_target = _by_form(answers, NEIGHBORHOOD)
    return _accuracies(answers, NEIGHBORHOOD) | {
        "neighborhood_agree_tf": _mean(along_target, NEIGHBORHOOD, measures.agree_tf)
    }


def _accuracies(answers: CaseAnswers, kind: str) -> dict[str, Measure]:
    own_prompts, along_target = _by_form(answers, kind)
    return {
        f"{kind}_token_acc": _mean(own_prompts, kind, measures.tf_match),
        f"{kind}_match": _mean(along_target, kind, measures.tf_match),
        f"{kind}_argmax": _mean(along_target, kind, measures.tf_exact),
    }


def _by_form(answers: CaseAnswers, kind: str) -> tuple[list[ProbeAnswers], list[ProbeAnswers]]:
    """The probes with a prompt for every token, and those scored along the target."""
    probes = answers.of_kind(kind)
    return (
        [answered for answered in probes if answered.probe.token_prompts],
        [answered for answered in probes if not answered.probe.token_prompts],
    )


def _mean(probes: Sequence[ProbeAnswers], kind: str, measure: Callable[[Answer], float]) -> Measure:
    return mean_over(probes, QUESTIONS[kind], lambda answered: measure(answered.wanted))
