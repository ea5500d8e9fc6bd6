"""Hidden states, or the distribution of the next token, that a question compares between edited and unedited model.

A reading travels inside a document, so it is plain JSON values there (:meth:`StateReading.from_json`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from edit_hooks.utils.errors import EditingError, unknown_keys_error
from edit_hooks.utils.settings.numbers import NON_NEGATIVE, require_number, require_whole

# The tokens whose input embeddings are perturbed.
Drift = Literal["subject", "relation", "all"]

# The input of the LM head, the output of the last block before the final norm, or the output of a block by its number;
# next_token: the distribution of the next token in place of a state.
NEXT_TOKEN: Literal["next_token"] = "next_token"
HiddenState: TypeAlias = Literal["after_norm", "before_norm"] | int
State: TypeAlias = HiddenState | Literal["next_token"]
NAMED_STATES = ("after_norm", "before_norm")


@dataclass(frozen=True, kw_only=True)
class EmbeddingDrift:
    """Gaussian noise on input embeddings; both models get the same numbers.

    Attributes:
        drift: the perturbed tokens.
        subject_span: characters [start, end) of the subject in the prompt.
        sigma: standard deviation of the noise.
        relative: sigma is in units of the standard deviation of the model's input embeddings, else absolute.
        seed: text; with it and the number of tokens the noise is fixed.
    """

    drift: Drift
    subject_span: tuple[int, int]
    sigma: float
    relative: bool = False
    seed: str


@dataclass(frozen=True, kw_only=True)
class StateReading:
    """The hidden state of a prompt's last token, which both models are asked for.

    Attributes:
        prompt: the prompt; lm-eval may put other text around it.
        state: the layer.
        noise: the perturbation of the prompt's embeddings; ``None``: the text itself.
    """

    prompt: str
    state: State = "after_norm"
    noise: EmbeddingDrift | None = None

    def __post_init__(self) -> None:
        if self.state == NEXT_TOKEN:
            if self.noise is not None:
                raise EditingError("state='next_token' compares distributions after a text as it is; drop the noise.")
        elif self.state in NAMED_STATES:
            pass
        elif isinstance(self.state, bool) or not isinstance(self.state, int) or self.state < 0:
            raise EditingError(f"state={self.state!r}; {', '.join(NAMED_STATES)} or the number of a block is needed.")
        if self.noise is not None:
            require_number("sigma", self.noise.sigma, NON_NEGATIVE)
            for bound in self.noise.subject_span:
                require_whole("a bound of subject_span", bound, NON_NEGATIVE)

    def to_json(self) -> dict[str, Any]:
        """The reading as plain JSON values."""
        record = asdict(self)
        if self.noise is not None:
            record["noise"]["subject_span"] = list(self.noise.subject_span)
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> StateReading:
        """Inverse of :meth:`to_json`.

        Raises:
            EditingError: for unknown keys and values that are not accepted.
        """
        fields = dict(record)
        if unknown := set(fields) - set(cls.__dataclass_fields__):
            raise unknown_keys_error("field of a state reading", unknown, cls.__dataclass_fields__)
        if fields.get("noise") is not None:
            noise = dict(fields["noise"])
            fields["noise"] = EmbeddingDrift(**{**noise, "subject_span": tuple(noise["subject_span"])})
        return cls(**fields)
