"""Training edits, and the random choices made for them.

Every random choice is a function of the seed and a number (an epoch, or an example's position in the run), so a resumed
run draws what the interrupted one would have drawn.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from edit_hooks.prompt_context import continuation
from edit_hooks.utils.storage.hashing import key_of
from edit_hooks.utils.text.readable import readable

# What a random number is drawn for; part of the seed.
ORDER, PARAPHRASE, LOCALITY = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class EditExample:
    """One training edit.

    Attributes:
        prompt, target: the edit itself.
        paraphrases: rephrased prompts with the same target.
        locality: unrelated (prompt, answer) pairs whose predictions should not change.
        separator: white space between prompts and answers; ``None``: by the scripts of the texts.
    """

    prompt: str
    target: str
    paraphrases: tuple[str, ...] = ()
    locality: tuple[tuple[str, str], ...] = ()
    separator: str | None = None

    def continuation(self, prompt: str, answer: str | None = None) -> str:
        """The target, or another answer, as it continues a prompt of the example."""
        return continuation(prompt, self.target if answer is None else answer, self.separator)

    @property
    def statement(self) -> str:
        """The edit as one text."""
        return self.prompt + self.continuation(self.prompt)


class EditData(NamedTuple):
    """Training and validation examples, and a JSON-able report on their source."""

    train: list[EditExample]
    validation: list[EditExample]
    report: dict[str, Any]


@readable
class NumberedExample(NamedTuple):
    """An example and its position in the run, which seeds the choices made for it; negative in validation."""

    example: EditExample
    number: int


@readable
class LossTerms(NamedTuple):
    """A batch's loss, and its terms as numbers: ``edit``, ``locality``, and ``right``, the share of correct tokens."""

    loss: torch.Tensor
    metrics: dict[str, float]


def training_batch(train: list[EditExample], size: int, seed: int, batch: int) -> list[NumberedExample]:
    """Batch ``batch`` of a run that goes through the examples in a new random order every epoch."""
    examples = []
    for number in range(batch * size, (batch + 1) * size):
        epoch, index = divmod(number, len(train))
        examples.append(NumberedExample(train[_epoch_order(len(train), seed, epoch)[index]], number))
    return examples


def draw_index(length: int, seed: int, number: int, purpose: int) -> int:
    """A random index below ``length``, a function of the other arguments."""
    return int(torch.randint(length, (), generator=_generator(seed, number, purpose)))


@functools.lru_cache(maxsize=1)
def _epoch_order(length: int, seed: int, epoch: int) -> tuple[int, ...]:
    return tuple(torch.randperm(length, generator=_generator(seed, epoch, ORDER)).tolist())


def _generator(*numbers: int) -> torch.Generator:
    return torch.Generator().manual_seed(int(key_of(list(numbers))[:15], 16))
