"""The session of a run, from its options."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedTokenizerBase

from edit_hooks.base.editor import Editor
from edit_hooks.deltas.delta import Delta
from edit_hooks.deltas.saving.saved import check_base, editor_of, requests_of
from edit_hooks.edit_report import EditReport
from edit_hooks.lm.editing.independent import IndependentEdits
from edit_hooks.lm.editing.stream import EditStream, Guard
from edit_hooks.lm.options.editing import EditingOptions
from edit_hooks.lm.options.plan import EditPlan
from edit_hooks.lm.sessions import SavedEditSession, Session, SingleEditSession, StreamSession, UneditedSession
from edit_hooks.modeling.fingerprint.identity import ModelIdentity
from edit_hooks.store.store import Store


class RunParts(NamedTuple):
    """The loaded model of a run, and what edits it.

    Attributes:
        quiet: hide progress bars.
    """

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    editor: Editor[Any]
    store: Store | None
    identity: ModelIdentity
    quiet: bool


def session_of(
    run: RunParts, options: EditingOptions, plan: EditPlan, saved_edit: Delta | None, *, shared: bool
) -> Session:
    """The session of a mode; no edit is made yet.

    Args:
        saved_edit: that of ``load_edit``.
        shared: other processes make the same stream.

    Raises:
        EditingError: for a saved edit of other weights.
    """
    if options.mode == "none":
        return UneditedSession()
    if options.load_edit:
        assert saved_edit is not None
        return _of_saved_edit(run, options, saved_edit)
    if run.store:
        run.store.remove_leftovers()
    if not plan.cumulative:
        edits = IndependentEdits(*run, partial_groups=bool(plan.groups), measure_edits=options.measure_edits)
        return SingleEditSession(edits, plan)
    stream = EditStream(
        run.model,
        run.tokenizer,
        run.editor,
        plan,
        run.store,
        run.identity,
        Guard(options.guard, options.guard_norm_ratio, options.guard_loss_increase),
        run.quiet,
        shared=shared,
        measure_edits=options.measure_edits,
    )
    return StreamSession(stream, options.immediate and options.mode == "sequential", options.retention)


def _of_saved_edit(run: RunParts, options: EditingOptions, delta: Delta) -> SavedEditSession:
    differences = check_base(delta, run.model, run.identity, str(options.load_edit))
    facts = {"loaded_from": options.load_edit, "checksum": delta.checksum(), "model_differences": differences}
    report = EditReport(editor=editor_of(delta), diagnostics=facts)
    return SavedEditSession(run.model, run.tokenizer, delta, report, requests_of(delta), options.measure_edits)
