"""Which model is asked a question, and decoding settings that differ from those of its task.

They travel inside a document, so they are plain JSON values there (:meth:`Decoding.from_json`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from edit_hooks.utils.errors import EditingError, unknown_keys_error
from edit_hooks.utils.settings.numbers import POSITIVE, POSITIVE_SHARE, SEED, require_number, require_whole

# The model that is asked a question: the edited one, the unedited one, or both.
AskedModel = Literal["edited", "unedited", "both"]

# Scoring in which every target token has a prompt of its own: the question and the gold tokens before it, decoded to
# text. Decoders of some tokenizers drop the white space at the beginning of that text; ``as_decoded`` puts it back only
# there, ``extra_space`` always (AlphaEdit's release on Llama models).
TokenPrompts = Literal["as_decoded", "extra_space"]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn: temperature first, then top-k, then top-p, as in transformers.

    Attributes:
        temperature: divisor of the logits.
        top_k: only this many most likely tokens, and those as likely as the last of them; ``None``: all.
        top_p: only the most likely tokens that reach this probability together; ``None``: all.
        seed: seed of the draws of a question, which depend on nothing but seed, draw and prompt.
        draw: number of this answer among several to one question, or to questions with one prompt.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    draw: int = 0

    def __post_init__(self) -> None:
        require_number("temperature", self.temperature, POSITIVE)
        if self.top_k is not None:
            require_whole("top_k", self.top_k)
        if self.top_p is not None:
            require_number("top_p", self.top_p, POSITIVE_SHARE)
        require_whole("seed", self.seed, SEED)


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How the answer to one question is generated.

    Attributes:
        max_new_tokens: longest answer; ``None``: that of the task.
        max_total_tokens: longest prompt and answer together, in place of ``max_new_tokens``. The answer's text is
            decoded with the prompt, so that it keeps the white space between them under every tokenizer.
        length_of: the answer has exactly as many tokens as this text has after the prompt (AR-MATCH); nothing stops it
            earlier. The answer reports the text's tokens.
        length_of_alone: the tokens of that text are those it has by itself, without prompt and space before it.
        teacher_forced: each token of the answer is the most likely one after the prompt and the text's own tokens, not
            after those of the answer.
        until: stop strings; ``None``: those of the task.
        ignore_end: end tokens do not stop the answer; it goes on after them.
        sampling: ``None``: greedy.
        max_thought_tokens: longest thought, in addition to the answer; ``None``: thought and answer share
            ``max_new_tokens``.
    """

    max_new_tokens: int | None = None
    max_total_tokens: int | None = None
    length_of: str | None = None
    length_of_alone: bool = False
    teacher_forced: bool = False
    until: tuple[str, ...] | None = None
    ignore_end: bool = False
    sampling: Sampling | None = None
    max_thought_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "max_total_tokens", "max_thought_tokens"):
            if (value := getattr(self, name)) is not None:
                require_whole(name, value)
        if self.max_total_tokens is not None and (self.max_new_tokens or self.max_thought_tokens or self.length_of):
            raise EditingError("max_total_tokens fixes the length; drop max_new_tokens, max_thought_tokens, length_of.")
        if self.length_of is not None and (self.max_new_tokens is not None or self.until is not None):
            raise EditingError("length_of fixes the length of an answer; drop max_new_tokens and until.")
        if self.length_of is None and (self.length_of_alone or self.teacher_forced):
            raise EditingError("length_of_alone and teacher_forced need length_of, the text with the tokens.")
        if self.teacher_forced and self.sampling is not None:
            raise EditingError("teacher_forced takes the most likely tokens; drop sampling.")

    def to_json(self) -> dict[str, Any]:
        """The settings as plain JSON values."""
        return {**asdict(self), "until": None if self.until is None else list(self.until)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Decoding:
        """Inverse of :meth:`to_json`.

        Raises:
            EditingError: for unknown keys and values that are not accepted.
        """
        fields = dict(record)
        if unknown := set(fields) - set(cls.__dataclass_fields__):
            raise unknown_keys_error("decoding setting", unknown, cls.__dataclass_fields__)
        if fields.get("sampling") is not None:
            fields["sampling"] = Sampling(**fields["sampling"])
        if fields.get("until") is not None:
            fields["until"] = tuple(fields["until"])
        return cls(**fields)
