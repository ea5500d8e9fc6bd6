"""Streams of edits on the same weights: resumable, bit-identical, guarded.

The key of a stored step covers the weights before it. A second pass, or a resumed run, applies the stored deltas and
verifies the fingerprint of the weights after every step, so a resumed stream is bit-identical.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from edit_hooks.base.editor import Editor
from edit_hooks.deltas.apply import AppliedDeltas
from edit_hooks.deltas.delta import Delta
from edit_hooks.deltas.hook_edit import attached
from edit_hooks.deltas.placement import placed
from edit_hooks.edit_report import FIRST_TOKEN_KL, WRECKED_KL, EditReport, Effects, StreamStep
from edit_hooks.inference.effects.edit_effects import EditEffects
from edit_hooks.lm.editing.cost import measured
from edit_hooks.lm.editing.joint import modules_behind, write_together
from edit_hooks.lm.editing.memory_limit import LargeEdits
from edit_hooks.lm.editing.resolve import resolve_with_store
from edit_hooks.lm.editing.stored_bar import StoredBar
from edit_hooks.lm.editing.stored_trainings import StoredTrainings, trainings_of
from edit_hooks.lm.editing.stored_values import StoredValues
from edit_hooks.lm.editing.stream_state import GrowthWatch, StreamState, rebuilt
from edit_hooks.lm.editing.unusable import edit_usable, warn_of_unusable
from edit_hooks.lm.options.plan import EditPlan
from edit_hooks.modeling.architectures import unwrapped
from edit_hooks.modeling.fingerprint.identity import ModelIdentity
from edit_hooks.request import EditRequest, RequestGroup
from edit_hooks.store.store import Description, Store
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.progress import Progress
from edit_hooks.utils.storage.hashing import code_fingerprint, key_of

log = get_logger("lm_eval.edited_hf")


# A short plain text; its loss on the edited model reveals a collapse before any benchmark does.
PROBE_TEXT = "The weather was fine in the morning, so they walked to the market and bought bread, apples and cheese."


@dataclass(frozen=True)
class Guard:
    """Detects the collapse of a model during a stream.

    Attributes:
        action: ``report`` (log a warning and continue) or ``stop`` (make no further edits).
        max_norm_ratio: allowed ||W_now - W_0|| / ||W_0|| of the edited weights.
        max_loss_increase: allowed increase of the loss per token of a plain sentence, in nats.
    """

    action: Literal["report", "stop"] = "report"
    max_norm_ratio: float = 1.0
    max_loss_increase: float = 3.0

    def complaint(self, norm_ratio: float, losses: tuple[float, float], finite: bool, effects: Effects) -> str | None:
        """Return a sentence if a threshold is exceeded after a step, else ``None``.

        Args:
            losses: of the plain sentence, on the unedited model and now.
            finite: whether the logits of that sentence are.
        """
        if not finite:
            return "the model's logits are not finite"
        if norm_ratio > self.max_norm_ratio:
            return f"the edited weights have moved by {norm_ratio:.2f} of their norm"
        if losses[1] - losses[0] > self.max_loss_increase:
            return f"the loss of a plain sentence rose from {losses[0]:.2f} to {losses[1]:.2f}"
        if effects.wrecked:
            return (
                f"the model is wrecked: the next token after neutral prompts is {effects.first_token_kl:.2f} nats from "
                f"the unedited model's ({FIRST_TOKEN_KL}, above {WRECKED_KL:g})"
            )
        return None


class EditStream:
    """The steps of a cumulative plan on one model.

    :meth:`visit` applies them in order and restores the model at the end.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        editor: Editor[Any],
        plan: EditPlan,
        store: Store | None,
        identity: ModelIdentity,
        guard: Guard,
        quiet: bool = False,
        shared: bool = False,
        measure_edits: bool = True,
    ) -> None:
        """Set up the stream; nothing is edited yet.

        Args:
            shared: other processes make the same stream; one of them computes each step, the others load it.
            measure_edits: measure what every step does to neutral prompts and to its targets' likelihood.
        """
        self.model, self.tokenizer, self.editor, self.plan = model, tokenizer, editor, plan
        self.shared = shared
        self.store, self.guard, self.quiet = store, guard, quiet
        self._check(plan)
        self.identity = identity
        self.config = resolve_with_store(model, tokenizer, editor, store, identity)
        self._unedited_loss, _ = self._probe()
        measured = measure_edits and editor.writes != ("context",)
        self._effects = EditEffects(model, tokenizer) if measured else None
        self.reports: list[EditReport] = []  # on the finished steps
        self.stopped: str | None = None
        self.deltas: list[Delta] = []  # later and large ones are empty, see `whole`
        self._large = LargeEdits(store, of_stream=True)
        self._carried = StreamState()
        self._unusable: dict[str, str] = {}
        self._growth = GrowthWatch(editor.name, len(plan.groups), editor.most_state_bytes(unwrapped(model)), store)

    def _check(self, plan: EditPlan) -> None:
        largest = plan.most_written_together
        if largest > 1 and not self.editor.supports_joint:
            raise EditingError(
                f"editor {self.editor.name!r} writes one request at a time, the plan has steps of {largest} cases; "
                "use mode=sequential,edit_batch_size=1 or an editor that writes batches (memit, alphaedit, ft_m)."
            )

    @functools.cached_property
    def _first_of_several(self) -> int:
        """The first step of several requests; without one, the number of steps."""
        groups = self.plan.groups
        return next((step for step, group in enumerate(groups) if len(group) > 1), len(groups))

    @property
    def num_steps(self) -> int:
        """Number of planned steps, or of completed ones if the guard stopped the stream."""
        return len(self.reports) if self.stopped else len(self.plan.groups)

    @property
    def unusable(self) -> dict[str, str]:
        """Request key -> reason for the requests that could not be written, of the plan and of the steps so far."""
        return {**self.plan.unusable, **self._unusable}

    @property
    def wrecked_at(self) -> int | None:
        """The first step after which the model was wrecked; ``None`` without one, or without measurements."""
        return next((number for number, report in enumerate(self.reports) if report.effects.wrecked), None)

    def edits_after(self, step: int) -> int:
        """Number of edits in the weights after a completed step; 0 for the step before the first."""
        return self.step(step).num_edits if step >= 0 else 0

    def step(self, number: int) -> StreamStep:
        """A finished step, and the model after it."""
        step = self.reports[number].step
        assert step is not None
        return step

    def state_after(self, number: int) -> str:
        """Fingerprint of the weights after a finished step."""
        state = self.step(number).state_after
        assert state is not None
        return state

    @property
    def carried_bytes(self) -> int:
        """Size of the tensors that the steps so far leave to the next one."""
        return self._carried.num_bytes

    @property
    def final_state(self) -> str | None:
        """Fingerprint of the weights after the last step; ``None`` before the first pass."""
        return self.state_after(-1) if self.reports else None

    def visit(self, visitor: Callable[[int, Delta | None], None]) -> None:
        """Apply the steps in order and call ``visitor(step, runtime_part)`` after each.

        ``runtime_part`` holds the edits so far that do not live in weights (hooks, contexts); evaluate under it. The
        first pass computes or loads the deltas, later passes apply the same ones. The weights are restored at the end,
        also after an exception.
        """
        with (
            AppliedDeltas(self.model) as applied,
            StoredBar(self.plan.num_edits, self._label, quiet=self.quiet) as bar,
        ):
            for step, group in enumerate(self.plan.groups):
                if self.stopped and step >= len(self.reports):
                    break
                usable = self.plan.usable(group)
                self._write(step, usable, applied, bar.computed if len(usable) > 1 else None)
                bar.finished(len(usable))
                bar.end_batch()
                visitor(step, applied.runtime_part)

    def make(self) -> None:
        """Compute or load all steps, unless an earlier pass has."""
        if len(self.deltas) < self.num_steps:
            self.visit(lambda step, runtime_part: None)

    @property
    def _label(self) -> str:
        return f"Stream of {self.editor.name}"

    def _write(self, step: int, group: RequestGroup, applied: AppliedDeltas, progress: Progress | None) -> None:
        """Apply a step: the delta of an earlier pass, a stored one, or a new one."""
        if step < len(self.deltas):
            applied.add(self.whole(step))
            self._verify(step, applied.state(), self.state_after(step))
            return
        del self.reports[step:]  # that of a step that was interrupted after it was watched
        if self._carried.num_steps != step:  # an earlier pass was interrupted between the last two lines
            self._carried = rebuilt([self.whole(number) for number in range(step)], self.editor, self.model)
        before = self._effects.target_nlls(group, applied.runtime_part)[0] if self._effects else {}
        with self._one_at_a_time():
            delta = self._load_or_make(step, group, applied, progress)
        self._watch(step, group, delta, applied, before)
        self._unusable |= delta.unusable
        carried = self._carried.after(delta, self.editor, self.model)
        self._growth.check(carried, self._large.num_bytes)
        # last: a step that was interrupted is made again by the next pass
        self.deltas.append(self._large.kept(delta, _description_of(delta)))
        self._carried = carried

    def whole(self, step: int) -> Delta:
        """The delta of a finished step, from the store if its updates were dropped.

        Raises:
            EditingError: if the store no longer has it.
        """
        delta = self._large.whole(self.deltas[step])
        if delta is None:
            raise EditingError(
                f"step {step} of the stream was removed from the store while the run needed it. Run again, and prune "
                "the store when no run uses it."
            )
        return placed(self.model, delta)

    def _load_or_make(self, step: int, group: RequestGroup, applied: AppliedDeltas, progress: Progress | None) -> Delta:
        description = self._description(step, group, applied.state())
        delta = self.store.load_delta(description) if self.store else None
        if delta is not None:
            # once, where each later step would move it again
            delta = placed(self.model, delta, updates=self.editor.reads_past_updates)
            applied.add(delta)
            self._verify(step, applied.state(), delta.meta["state_after"])
            return delta
        with trainings_of(self.store, description) as trainings:
            delta = self._make(group, applied, progress, trainings)
            delta.meta |= {"description": description.to_dict(), "state_after": applied.state()}
            if self.store:
                self.store.save_delta(description, delta)
                self._growth.check_store(step + 1, delta.num_bytes)
        return delta

    def _one_at_a_time(self) -> contextlib.AbstractContextManager[None]:
        """Lock for a step, so that all processes of a shared stream use the same delta."""
        if not self.shared or self.store is None:
            return contextlib.nullcontext()
        return self.store.lock(key_of([self.identity.key, self.editor.name, self.config, self.plan.request_keys])[:16])

    def _make(
        self,
        group: RequestGroup,
        applied: AppliedDeltas,
        progress: Progress | None,
        trainings: StoredTrainings | None,
    ) -> Delta:
        carried = self._carried

        def write(requests: Sequence[EditRequest]) -> Delta:
            return write_together(self.editor, self.model, self.tokenizer, requests, carried.history, progress)

        with measured(self.model, StoredValues.of(self.store, self.identity), trainings) as cost:
            delta, unusable = edit_usable(write, group, edits_made=carried.edits_made)
        try:
            delta.check_finite()
        except EditingError as error:  # the model stays as it is, and so do the edits before this step
            delta, unusable = Delta(), unusable | {one.key: str(error) for one in group if one.key not in unusable}
        if unusable:
            delta.unusable = unusable
            warn_of_unusable("edits of a step", unusable, len(group))
        delta.cost = cost.of_one()
        applied.add(delta)
        return delta

    def _description(self, step: int, group: RequestGroup, state: str) -> Description:
        # also of earlier steps, whose state does not show in the weights
        first = self._first_of_several
        modules = modules_behind(self.plan.groups[first]) if step >= first else ()
        # Steps that changed nothing do not show in the weights, but later steps read what they carry.
        unseen = list(self._carried.unseen)
        return Description(
            what="stream step",
            model=self.identity.to_dict(),
            # what is written of a step is part of the next one's start
            code=code_fingerprint(*self.editor.source_modules, AppliedDeltas.__module__, *modules),
            inputs={
                "editor": self.editor.key_identity,
                "config": self.config,
                "requests": [request.key for request in group],
                "state_before": state,
                **({"carried": unseen} if unseen else {}),
            },
        )

    @staticmethod
    def _verify(step: int, state: str, expected: str) -> None:
        if state != expected:
            raise EditingError(
                f"the weights after step {step} of the stream differ from those of the stored run, so the stored edits "
                "do not belong to this stream. Remove them with lm-edit cache prune and run again."
            )

    def _watch(
        self, step: int, group: RequestGroup, delta: Delta, applied: AppliedDeltas, before: Mapping[str, float]
    ) -> None:
        """Record the weights' norms, the step's effects and the loss of a plain sentence; apply the guard."""
        written = [request for request in group if request.key not in delta.unusable]
        with attached(self.model, applied.hook_edit):
            loss, finite = self._probe()
        effects = self._effects.of_step(applied.runtime_part, written, before) if self._effects else Effects()
        norm_ratio = applied.norm_ratio()
        complaint = self.guard.complaint(norm_ratio, (self._unedited_loss, loss), finite, effects)
        record = StreamStep(
            step=step,
            num_edits=self.edits_after(step - 1) + len(written),
            norm_ratio=norm_ratio,
            probe_loss=loss,
            finite=finite,
            unusable=len(delta.unusable) or None,
            state_after=delta.meta["state_after"],
            guard=complaint,
        )
        self.reports.append(replace(delta.report(step=record), effects=effects).without_losses())
        if complaint and self.guard.action == "stop":
            self.stopped = f"the guard stopped the stream after {record.num_edits} edits: {complaint}"
            log.warning("%s.", self.stopped)
        elif complaint:
            log.warning("after %d edits %s; the stream continues (guard=report).", record.num_edits, complaint)

    @torch.no_grad()
    def _probe(self) -> tuple[float, bool]:
        inner = unwrapped(self.model)
        ids = self.tokenizer(PROBE_TEXT, return_tensors="pt")["input_ids"].to(inner.device)
        logits = inner(input_ids=ids, use_cache=False).logits[0, :-1].float()
        loss = float(nn.functional.cross_entropy(logits, ids[0, 1:].to(logits.device)))
        return loss, bool(torch.isfinite(logits).all()) and math.isfinite(loss)

    def report(self, step: int) -> EditReport:
        """Return the report on a step."""
        return replace(self.reports[step], editor=self.editor.name).of_case()


def _description_of(delta: Delta) -> Description:
    """The description under which a step is stored."""
    inputs = dict(delta.meta["description"])
    return Description(what=inputs.pop("what"), model=inputs.pop("model"), code=inputs.pop("code"), inputs=inputs)
