"""Which facts a model has: the test by which BAKE's records are kept (section 4.2 of both papers)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tqdm import tqdm

from edit_hooks.inference.batching import limits_for
from edit_hooks.inference.items import ScoreItem
from edit_hooks.inference.scoring import score
from edit_hooks.lm.model import EditedHFLM
from edit_hooks.modeling.tokens import split_continuation
from edit_hooks.prompt_context import continuation


class Choice(NamedTuple):
    """A prompt with the answer that the model should have, and the one that it should not have."""

    prompt: str
    original: str
    desired: str


class Known(NamedTuple):
    """What a model says to a :class:`Choice`.

    Attributes:
        nll_original, nll_desired: mean negative log-likelihood per token, in nats.
        is_greedy: every teacher-forced argmax along the original answer is its token.
    """

    nll_original: float
    nll_desired: float
    is_greedy: bool

    def passes(self, rule: str) -> bool:
        """Whether the model gives the original answer and not the desired one.

        Args:
            rule: ``prob``, the original answer is likelier per token, as in the filter of BAKE's scores; ``argmax``,
                it is, and the model would write it.
        """
        return self.nll_original < self.nll_desired and (rule == "prob" or self.is_greedy)


def ask(lm: EditedHFLM, choices: Sequence[Choice]) -> list[Known | None]:
    """Score both answers of every choice on the unedited model; ``None`` where one cannot be scored.

    It cannot if the prompt or an answer has no token of its own, or if both together are longer than the model's
    context.
    """
    items = [_items(lm, choice) for choice in choices]
    asked = [item for pair in items if pair is not None for item in pair]
    with tqdm(total=len(asked), desc="Asking the model", unit="answer", disable=not asked) as bar:
        answers = iter(score(lm.model, [(item, None) for item in asked], limits_for(lm.model), bar.update))
    known: list[Known | None] = []
    for pair in items:
        if pair is None:
            known.append(None)
            continue
        original, desired = next(answers), next(answers)
        nll_original, nll_desired = (
            -answer.logprob / len(item.continuation) for answer, item in zip((original, desired), pair, strict=True)
        )
        known.append(Known(nll_original, nll_desired, original.is_greedy))
    return known


def _items(lm: EditedHFLM, choice: Choice) -> tuple[ScoreItem, ScoreItem] | None:
    items = []
    for answer in (choice.original, choice.desired):
        context, target = split_continuation(lm.tokenizer, choice.prompt, continuation(choice.prompt, answer))
        if not context or not target or len(context) + len(target) - 1 > lm.max_length:
            return None
        items.append(ScoreItem(tuple(context), tuple(target)))
    return items[0], items[1]
