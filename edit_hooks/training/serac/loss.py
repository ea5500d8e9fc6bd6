"""Loss of batches of training edits under SERAC.

Shapes: R rows, L labels, N facts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from edit_hooks.deltas.context_edit import before_question
from edit_hooks.gradient.labeled_rows import LabeledRow, batch_rows, label_logits, target_row
from edit_hooks.in_context.memory_artifact import SavedModels
from edit_hooks.in_context.scope_classifier import fact_text, scope_scores
from edit_hooks.training.edit_data import EditExample, LossTerms, NumberedExample
from edit_hooks.training.questions import TrainingQuestions, text_row
from edit_hooks.training.serac.config import SERACTrainingConfig
from edit_hooks.utils.errors import UnusableRequestError

EPS = torch.finfo(torch.float32).eps  # of the release, inside the logarithm of the mixture


class _Question(NamedTuple):
    """A question of the loss: its row for the base model and its texts."""

    row: LabeledRow
    prompt: str
    answer: str


class SERACLoss:
    """The training loss of the release without hard negatives (``supervised: false``).

    The edits of a batch are one memory. A question gets the fact with the best score s, and the answer is drawn from
    the mixture (1 - s) * p_base + s * p_counterfactual. Loss: c_edit * NLL(target | paraphrase of an edit) + c_loc *
    KL(base || mixture) on locality texts, both means over tokens. Both models get gradients, through s and p.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        models: SavedModels,
        config: SERACTrainingConfig,
        train: Sequence[EditExample],
    ) -> None:
        self.model, self.tokenizer, self.config = model, tokenizer, config
        self.classifier, self.counterfactual = models
        self.questions = TrainingQuestions(config, train)

    def __call__(self, batches: Sequence[Sequence[NumberedExample]], observe: bool = False) -> list[LossTerms]:
        """Losses of some batches, each of edits in one memory. The batches share the passes of the models."""
        examples = [example for batch in batches for example, _ in batch]
        batch_N = torch.tensor([number for number, batch in enumerate(batches) for _ in batch])
        questions = [self._edit_question(*numbered) for batch in batches for numbered in batch]
        questions += [self._locality_question(*numbered) for batch in batches for numbered in batch]
        batch_R = batch_N.repeat(2)
        score_R, fact_R = self._best_facts(examples, questions, batch_N, batch_R)
        pairs = [
            aligned(question.row, self._counterfactual_row(examples[fact], question))
            for question, fact in zip(questions, fact_R.tolist(), strict=True)
        ]
        base_rows = batch_rows(self.model, [base for base, _ in pairs])
        with torch.no_grad():
            base_LV = label_logits(self.model, base_rows).log_softmax(1)
        other_LV = label_logits(self.counterfactual, batch_rows(self.counterfactual, [other for _, other in pairs]))
        row_L = base_rows.row_L
        score_L1 = score_R.to(base_LV.device)[row_L.to(base_LV.device)][:, None]
        mixture_LV = mixture(score_L1, base_LV, other_LV.to(base_LV.device))
        token_L = base_rows.token_L.to(base_LV.device)
        nll_L = -mixture_LV.gather(1, token_L[:, None])[:, 0]
        right_L = mixture_LV.argmax(1) == token_L
        kl_L = (base_LV.exp() * (base_LV - mixture_LV)).sum(1)
        is_edit_L = (row_L < len(examples)).to(base_LV.device)
        batch_L = batch_R.to(row_L.device)[row_L].to(base_LV.device)
        return [
            self._terms(nll_L[is_edit_L & own_L], kl_L[~is_edit_L & own_L], right_L[is_edit_L & own_L])
            for own_L in (batch_L == number for number in range(len(batches)))
        ]

    def _terms(self, nll_L: torch.Tensor, kl_L: torch.Tensor, right_L: torch.Tensor) -> LossTerms:
        nll, kl = nll_L.mean(), kl_L.mean()
        metrics = {"edit": float(nll.detach()), "locality": float(kl.detach()), "right": float(right_L.float().mean())}
        return LossTerms(self.config.c_edit * nll + self.config.c_loc * kl, metrics)

    @torch.no_grad()
    def unedited(self, batch: Sequence[NumberedExample]) -> dict[str, float]:
        """The loss of one batch for the unedited model, and its terms: the values that training has to beat."""
        rows = batch_rows(self.model, [self._edit_question(*numbered).row for numbered in batch])
        logprobs_LV = label_logits(self.model, rows).log_softmax(1)
        token_L1 = rows.token_L.to(logprobs_LV.device)[:, None]
        nll = -float(logprobs_LV.gather(1, token_L1).mean())
        return {"loss": self.config.c_edit * nll, "edit": nll, "locality": 0.0}

    def _edit_question(self, example: EditExample, number: int) -> _Question:
        prompt = self.questions.edit_prompt(example, number)
        answer = example.continuation(prompt)
        return _Question(target_row(self.tokenizer, prompt, answer), prompt, answer)

    def _locality_question(self, example: EditExample, number: int) -> _Question:
        prompt, answer = self.questions.locality(example, number)
        return _Question(text_row(self.tokenizer, prompt, answer, self.config.locality_tokens), prompt, answer)

    def _counterfactual_row(self, fact: EditExample, question: _Question) -> LabeledRow:
        """The row of the fact and the question, with every token after the first one as a label."""
        prompt = before_question(fact.statement) + question.prompt
        return text_row(self.tokenizer, prompt, question.answer, "all")

    def _best_facts(
        self,
        examples: Sequence[EditExample],
        questions: Sequence[_Question],
        batch_N: torch.Tensor,
        batch_R: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Score [R], with gradients, and number [R] of the best fact in each question's memory."""
        view, classifier = self.config.scope_texts, self.classifier
        facts = [fact_text(view, one.prompt, one.statement, classifier.separator) for one in examples]
        texts = [one.prompt if view == "prompts" else one.prompt + one.answer for one in questions]
        vectors = classifier([*facts, *texts])
        scores_RN = scope_scores(vectors[: len(facts)], vectors[len(facts) :])
        is_own_RN = (batch_R[:, None] == batch_N[None]).to(scores_RN.device)
        score_R, fact_R = scores_RN.masked_fill(~is_own_RN, -1.0).max(1)
        return score_R, fact_R


def mixture(score_L1: torch.Tensor, base_LV: torch.Tensor, counterfactual_LV: torch.Tensor) -> torch.Tensor:
    """Logarithm [L, V] of the soft mixture of both models.

    Args:
        base_LV: log-probabilities.
        counterfactual_LV: logits, of at most as many tokens.
    """
    missing = base_LV.shape[1] - counterfactual_LV.shape[1]
    other_LV = torch.nn.functional.pad(counterfactual_LV.softmax(1), (0, missing))
    return ((1 - score_L1) * base_LV.exp() + score_L1 * other_LV + EPS).log()


def aligned(base: LabeledRow, counterfactual: LabeledRow) -> tuple[LabeledRow, LabeledRow]:
    """Both rows with the labels that they share, compared from the end.

    The first words of a question can have other tokens behind a fact than at the start of a text.

    Raises:
        UnusableRequestError: not even the last token is the same.
    """
    count = 0
    for (_, ours), (_, theirs) in zip(reversed(base.labels), reversed(counterfactual.labels), strict=False):
        if ours != theirs:
            break
        count += 1
    if not count:
        raise UnusableRequestError(
            "a training text has another last token behind a fact than by itself; drop the edit from the training data."
        )
    return base._replace(labels=base.labels[-count:]), counterfactual._replace(labels=counterfactual.labels[-count:])
