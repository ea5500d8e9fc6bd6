"""Facts about an edit as typed values: its effects, its cost, its place in a stream; and the report with all of them.

A report has a flat JSON format, one name per fact. Editors add diagnostics of their own: these are passed on, and
nothing reads them by name but :class:`Optimization`, which lists the names that editors have in common.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from edit_hooks.utils.settings.numbers import numbers_again
from edit_hooks.utils.text.readable import readable

# Names in reports and of columns, and the bound of the verdict. It was measured on two models, see the README of
# general_ability.
FIRST_TOKEN_KL, WRECKED = "first_token_kl", "wrecked"
WRECKED_KL = 3.0
LOSSES = "losses"  # an editor's diagnostic with an entry per step of its optimization


@dataclass(frozen=True, kw_only=True)
class Effects:
    """What an edit did to the model, measured alike for every editor; ``None`` where nothing was measured.

    Attributes:
        first_token_kl: divergence of the next token after neutral prompts, in nats.
        wrecked: the divergence is above :data:`WRECKED_KL`, or not finite.
        target_nll_before, target_nll_after: negative log-likelihood of the target in nats per token; of several
            requests the mean.
        target_nlls: of several requests, before and after of each, in their order.
    """

    first_token_kl: float | None = None
    wrecked: bool | None = None
    target_nll_before: float | None = None
    target_nll_after: float | None = None
    target_nlls: tuple[tuple[float, float], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The facts that were measured, JSON-able."""
        return _present({**vars(self), "target_nlls": [list(pair) for pair in self.target_nlls] or None})

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Effects:
        """Inverse of :meth:`to_json`."""
        return cls(
            **{**record, "target_nlls": tuple((before, after) for before, after in record.get("target_nlls", ()))}
        )


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What an edit took to compute; a stored edit keeps what it took then. Neither is part of a key.

    Attributes:
        seconds: of one edit, where several were computed together.
        peak_memory_gib, model_memory_gib: GPU memory of all of them, and of the model, which is part of it.
    """

    seconds: float | None = None
    peak_memory_gib: float | None = None
    model_memory_gib: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The facts that are known, JSON-able."""
        return _present(vars(self))


@dataclass(frozen=True, kw_only=True)
class StreamStep:
    """A finished step of a stream, and the model after it.

    Attributes:
        step: its number, counted from 0.
        num_edits: edits in the model.
        norm_ratio: ||W_now - W_0|| / ||W_0|| of the edited weights.
        probe_loss: loss per token of a plain sentence, in nats.
        finite: the logits of that sentence are.
        unusable: number of the step's requests that could not be written.
        state_after: fingerprint of the weights; ``None`` in the reports of cases.
        guard: the threshold that the model exceeded, as a sentence.
    """

    step: int
    num_edits: int
    norm_ratio: float | None = None
    probe_loss: float | None = None
    finite: bool | None = None
    unusable: int | None = None
    state_after: str | None = None
    guard: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The facts that are known, JSON-able."""
        return _present(vars(self))


@dataclass(frozen=True, kw_only=True)
class Optimization:
    """The facts that editors report under common names, where an editor optimizes anything.

    Attributes:
        initial_nll, final_nll: negative log-likelihood of the target at the first and the last step.
        final_loss: the whole loss at the last step; without another term it is the likelihood's.
        steps: number of them.
        update_norm_ratio: largest ||update|| / ||W|| of the edited weights.
        constraint: what the edit keeps fixed, such as ``second_moment``, or ``identity``: nothing that was measured.
        num_edits: requests that were written together.
    """

    initial_nll: float | None = None
    final_nll: float | None = None
    final_loss: float | None = None
    steps: float | None = None
    update_norm_ratio: float | None = None
    constraint: str | None = None
    num_edits: int = 1

    @classmethod
    def of(cls, diagnostics: Mapping[str, Any]) -> Optimization:
        """Read the diagnostics of any editor; a value of another type than expected is left out."""
        names = ("initial_nll", "final_nll", "final_loss", "steps", "update_norm_ratio")
        numbers = {name: diagnostics.get(name) for name in names}
        constraint = diagnostics.get("constraint")
        parts, written = diagnostics.get("parts"), diagnostics.get("num_requests")
        together = (written if isinstance(written, int) else 0) or (len(parts) if isinstance(parts, list) else 0) or 1
        return cls(
            **{name: value for name, value in numbers.items() if isinstance(value, (int, float))},
            constraint=constraint if isinstance(constraint, str) else None,
            num_edits=together,
        )


@dataclass(frozen=True, kw_only=True)
@readable
class EditReport:
    """Facts about one edit, for sample files and result files.

    Attributes:
        editor: name of the editor, if known.
        key: identity of the edited requests.
        error: reason of a failed edit.
        texts: the texts on which the case's edits were made, each with its target.
        step: in a stream, the step that made the edit.
        warnings: sentences about likely problems.
        diagnostics: JSON-able facts of the editor (final loss, steps, norms, ...).
    """

    editor: str | None = None
    key: str | None = None
    error: str | None = None
    texts: tuple[str, ...] = ()
    step: StreamStep | None = None
    effects: Effects = field(default_factory=Effects)
    cost: Cost = field(default_factory=Cost)
    warnings: tuple[str, ...] = ()
    diagnostics: Mapping[str, Any] = field(default_factory=dict)

    @property
    def optimization(self) -> Optimization:
        """The diagnostics that editors have in common."""
        return Optimization.of(self.diagnostics)

    def without_losses(self) -> EditReport:
        """The report without the losses, which grow with the steps of an optimization."""
        return replace(self, diagnostics={name: value for name, value in self.diagnostics.items() if name != LOSSES})

    def of_case(self) -> EditReport:
        """The report as every case of an edit repeats it: without what grows with steps or requests."""
        step = self.step and replace(self.step, state_after=None)
        return replace(self.without_losses(), step=step, effects=replace(self.effects, target_nlls=()))

    def to_json(self) -> dict[str, Any]:
        """Return one flat JSON-able mapping."""
        return {
            **_present({"editor": self.editor, "key": self.key, "error": self.error}),
            **({"edited_texts": list(self.texts)} if self.texts else {}),
            **(self.step.to_json() if self.step else {}),
            **{name: value for name, value in self.diagnostics.items() if name not in REPORT_NAMES},
            **({"warnings": list(self.warnings)} if self.warnings else {}),
            **self.cost.to_json(),
            **self.effects.to_json(),
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> EditReport:
        """Inverse of :meth:`to_json`.

        Raises:
            TypeError, ValueError: for facts of another type.
        """
        rest = {name: numbers_again(value) for name, value in record.items() if name not in TEXTS}

        def taken(kind: type[Any]) -> dict[str, Any]:
            return {name: rest.pop(name) for name in kind.__dataclass_fields__ if name in rest}

        step = StreamStep(**taken(StreamStep)) if "step" in rest and "num_edits" in rest else None
        effects, cost = Effects.from_json(taken(Effects)), Cost(**taken(Cost))
        return cls(
            editor=record.get("editor"),
            key=record.get("key"),
            error=record.get("error"),
            texts=tuple(record.get("edited_texts", ())),
            step=step,
            effects=effects,
            cost=cost,
            warnings=tuple(record.get("warnings", ())),
            diagnostics=rest,
        )


TEXTS = ("editor", "key", "error", "edited_texts", "warnings")
# In the JSON of a report these are no diagnostics; an editor that reported an ``error`` would seem to have failed.
REPORT_NAMES = frozenset(
    (*TEXTS, *(name for kind in (StreamStep, Effects, Cost) for name in kind.__dataclass_fields__))
)


def _present(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if value is not None}
