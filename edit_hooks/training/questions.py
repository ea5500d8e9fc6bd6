"""The questions of a training loss: prompts of the edit loss and texts of the locality loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from transformers import PreTrainedTokenizerBase

from edit_hooks.gradient.labeled_rows import LabeledRow, target_row
from edit_hooks.training.edit_data import LOCALITY, PARAPHRASE, EditExample, draw_index
from edit_hooks.training.settings import TrainingSettings
from edit_hooks.utils.errors import EditingError


class TrainingQuestions:
    """Questions about training edits, drawn by the seed and an example's number.

    Args:
        train: the training edits, from which an edit without locality texts borrows another one's prompt.
    """

    def __init__(self, config: TrainingSettings, train: Sequence[EditExample]) -> None:
        self.config, self.train = config, train

    def edit_prompt(self, example: EditExample, number: int) -> str:
        """The prompt of the edit loss: a random paraphrase, or the edit's own prompt if it has none."""
        if self.config.edit_loss == "edit" or not example.paraphrases:
            return example.prompt
        return example.paraphrases[draw_index(len(example.paraphrases), self.config.seed, number, PARAPHRASE)]

    def locality(self, example: EditExample, number: int) -> tuple[str, str]:
        """A random locality text of the example, or another edit's if it has none: the prompt and its continuation."""
        if example.locality:
            drawn = draw_index(len(example.locality), self.config.seed, number, LOCALITY)
            prompt, answer = example.locality[drawn]
            return prompt, example.continuation(prompt, answer)
        other = self._other_edit(example, draw_index(len(self.train), self.config.seed, number, LOCALITY))
        return other.prompt, other.continuation(other.prompt)

    def _other_edit(self, example: EditExample, start: int) -> EditExample:
        """The first training edit with another prompt, from index ``start`` on."""
        for offset in range(len(self.train)):
            other = self.train[(start + offset) % len(self.train)]
            if other.prompt != example.prompt:
                return other
        raise EditingError(
            f"the edit {example.prompt!r} has no locality texts, and there is no edit with another prompt to borrow "
            "one from; add locality texts or edits."
        )


def text_row(
    tokenizer: PreTrainedTokenizerBase, prompt: str, continuation: str, tokens: Literal["all", "answer"]
) -> LabeledRow:
    """The row of a text, with all tokens after the first one as labels, or those of the continuation."""
    row = target_row(tokenizer, prompt, continuation)
    if tokens == "answer":
        return row
    following = [*row.ids[1:], row.labels[-1][1]]
    return LabeledRow(row.ids, list(enumerate(following)))
