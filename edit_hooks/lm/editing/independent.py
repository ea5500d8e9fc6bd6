"""Independent edits: each group of requests on the unedited model, stored."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from edit_hooks.base.checks import position_limit
from edit_hooks.base.editor import Editor
from edit_hooks.deltas.delta import Delta
from edit_hooks.deltas.placement import off_device
from edit_hooks.edit_report import EditReport, Effects
from edit_hooks.inference.effects.edit_effects import EditEffects
from edit_hooks.inference.effects.neutral_prompts import NeutralPrompts
from edit_hooks.lm.editing.cost import EditCost, measured
from edit_hooks.lm.editing.joint import modules_behind, write_together
from edit_hooks.lm.editing.memory_limit import LargeEdits
from edit_hooks.lm.editing.resolve import resolve_with_store
from edit_hooks.lm.editing.stored_bar import StoredBar
from edit_hooks.lm.editing.stored_trainings import trainings_of
from edit_hooks.lm.editing.stored_values import StoredValues
from edit_hooks.lm.editing.unusable import edit_usable, named_reasons, warn_of_unusable
from edit_hooks.modeling.architectures import unwrapped
from edit_hooks.modeling.fingerprint.identity import ModelIdentity
from edit_hooks.request import EditRequest, InTurn, RequestGroup
from edit_hooks.store.store import Description, Store
from edit_hooks.utils.errors import EditingError, UnusableRequestError
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.storage.hashing import code_fingerprint, key_of

log = get_logger("lm_eval.edited_hf")

# Edits per batch: few enough to lose little to a kill, many enough to use the hardware.
BATCH, BATCH_ON_GPU = 16, 64


@dataclass(frozen=True)
class FailedEdit:
    """An edit that could not be made; its questions stay unscored."""

    reason: str


class IndependentEdits:
    """Deltas of groups of requests, each on the unedited model, made on demand.

    A group of several requests (a case with several edits, a group of cases) is written jointly if the editor supports
    it and the group is not :class:`~edit_hooks.request.InTurn`, else one request after another.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        editor: Editor[Any],
        store: Store | None,
        identity: ModelIdentity,
        quiet: bool = False,
        partial_groups: bool = False,
        measure_edits: bool = True,
    ) -> None:
        """Set up the edits; none is made yet.

        Args:
            partial_groups: a group whose requests belong to several cases is written without unusable ones.
            measure_edits: measure what the edits do to neutral prompts and to their targets' likelihood.
        """
        self._is_measured = measure_edits and editor.writes != ("context",)
        self.partial_groups = partial_groups
        self.model, self.tokenizer, self.editor, self.store, self.quiet = model, tokenizer, editor, store, quiet
        self.identity = identity
        self.config = resolve_with_store(model, tokenizer, editor, store, identity)
        self._edits: dict[str, Delta | FailedEdit] = {}
        self._large = LargeEdits(store)
        self._num_expected = 0  # edits to come that the store has not been told of
        self._batch_size = BATCH_ON_GPU if next(model.parameters()).is_cuda else BATCH

    def in_order(self, groups: Sequence[RequestGroup]) -> Iterator[Delta | FailedEdit]:
        """Yield the edits of the groups; those that have left memory are read one at a time."""
        distinct = {group_key(group): group for group in groups}
        self._finish(distinct)
        for group in groups:
            yield self._whole(group_key(group), group)

    def portions(self, groups: Iterable[RequestGroup]) -> Iterator[dict[str, Delta | FailedEdit]]:
        """Yield the edits by group key in portions that fit into memory; see :class:`LargeEdits`.

        Edits that act per row share batches within a portion.
        """
        distinct = {group_key(group): group for group in groups}
        self._finish(distinct)
        made = {key: edit for key in distinct if isinstance(edit := self._edits[key], Delta)}
        yield {key: edit for key in distinct if isinstance(edit := self._edits[key], FailedEdit)}
        for portion in self._large.portions(made):
            yield {key: self._whole(key, distinct[key]) for key in portion}

    def _whole(self, key: str, group: RequestGroup) -> Delta | FailedEdit:
        """A finished edit with its updates, which may have been dropped."""
        edit = self._edits[key]
        if isinstance(edit, FailedEdit):
            return edit
        if (whole := self._large.whole(edit)) is not None:
            return whole
        del self._edits[key]  # pruned or damaged since it was stored
        self._make([group], len(group))
        edit = self._edits[key]
        whole = self._large.whole(edit) if isinstance(edit, Delta) else None
        return edit if whole is None else whole

    def _finish(self, distinct: Mapping[str, RequestGroup]) -> None:
        """Load or compute the edits that are not finished."""
        new = [group for key, group in distinct.items() if key not in self._edits]
        missing = [group for group in new if not self._load(group)]
        if missing:
            self._mark_unusable(missing)
            missing = [group for group in missing if group_key(group) not in self._edits]
            if missing:
                self._make([group for group in new if not self._failed(group)], sum(map(len, missing)))

    def report(self, key: str, requests: Sequence[EditRequest] = ()) -> EditReport:
        """Return the report on a group's edit.

        Args:
            requests: those of the group's requests that must be part of it.
        """
        edit = self._edits[key]
        if isinstance(edit, FailedEdit):
            return EditReport(editor=self.editor.name, key=key, error=edit.reason)
        if reasons := [edit.unusable[request.key] for request in requests if request.key in edit.unusable]:
            return EditReport(editor=self.editor.name, key=key, error=reasons[0])
        return edit.report(self.editor.name, key).of_case()

    def _description(self, group: RequestGroup) -> Description:
        return Description(
            what="independent edit",
            model=self.identity.to_dict(),
            code=code_fingerprint(*self.editor.source_modules, *modules_behind(group)),
            inputs={
                "editor": self.editor.key_identity,
                "config": self.config,
                "requests": [request.key for request in group],
                **({"in_turn": True} if isinstance(group, InTurn) else {}),
            },
        )

    def _load(self, group: RequestGroup) -> bool:
        description = self._description(group)
        delta = self.store.load_delta(description) if self.store else None
        if delta is not None:
            self._measure([(delta, group)])
            self._edits[group_key(group)] = self._large.kept(delta, description)
        return delta is not None

    def _measure(self, edits: Sequence[tuple[Delta, RequestGroup]]) -> None:
        """Measure the effects of edits, unless the store had them; contexts have none."""
        if not self._is_measured:
            for delta, _ in edits:
                delta.effects = Effects()  # a stored edit may have some
            return
        code = code_fingerprint(EditEffects.__module__, NeutralPrompts.__module__)
        new = [(delta, group) for delta, group in edits if delta.meta.get("measured_by") != code]
        if not new:
            return
        written = [(delta, [request for request in group if request.key not in delta.unusable]) for delta, group in new]
        for (delta, _), effects in zip(new, self._effects.of_independent(written), strict=True):
            delta.effects = effects
            delta.meta["measured_by"] = code

    @functools.cached_property
    def _effects(self) -> EditEffects:
        return EditEffects(self.model, self.tokenizer)

    def _failed(self, group: RequestGroup) -> bool:
        return isinstance(self._edits.get(group_key(group)), FailedEdit)

    def _mark_unusable(self, groups: Sequence[RequestGroup]) -> None:
        """Record the groups with a request that the editor cannot use, before any edit is computed."""
        inner = unwrapped(self.model)
        requests = [request for group in groups for request in group]
        reasons = self.editor.find_unusable(self.tokenizer, requests, position_limit(inner.config), inner)
        for group in groups:
            if found := [reasons[request.key] for request in group if request.key in reasons]:
                self._edits[group_key(group)] = FailedEdit(found[0])

    def _make(self, groups: Sequence[RequestGroup], num_missing: int) -> None:
        """Compute the edits of groups that are not in memory."""
        lone = [group for group in groups if len(group) == 1]
        self._num_expected = num_missing
        label = f"Editing with {self.editor.name}"
        with StoredBar(num_missing, label, quiet=self.quiet) as bar:
            for start in range(0, len(lone), self._batch_size):
                self._make_chunk(lone[start : start + self._batch_size], bar)
            for group in groups:
                if len(group) > 1 and group_key(group) not in self._edits:
                    self._make_group(group)
                    bar.finished(len(group))

    def _make_chunk(self, chunk: Sequence[RequestGroup], bar: StoredBar) -> None:
        """Compute the missing edits of a chunk in one batch.

        Where an error names requests, the others are computed without them. The last bits of float32 sums depend on the
        rows that share a batch. If a kill interrupted the saving of a
        batch, the entire batch is computed again and only its missing part is saved: a resumed run is bit-identical.
        """
        while missing := [group for group in chunk if group_key(group) not in self._edits]:
            batch = self._interrupted_batch(chunk, missing) or missing
            requests = [group[0] for group in batch]
            try:
                with measured(self.model, StoredValues.of(self.store, self.identity)) as cost:
                    deltas = self.editor.edit(
                        self.model, self.tokenizer, requests, progress=bar.computed, measure=False
                    )
            except EditingError as error:
                if named := named_reasons(error, requests):
                    self._edits |= {key: FailedEdit(reason) for key, reason in named.items()}
                    log.warning("%s", "; ".join(named.values()))
                    bar.finished(len(named))
                else:
                    self._make_one_by_one(batch, error, bar)
                bar.end_batch()
                continue
            keys = [group_key(group) for group in batch]
            for delta in deltas:
                delta.meta["batch"] = keys
            self._save(list(zip(deltas, batch, strict=True)), cost, len(batch), bar)
            bar.end_batch()

    def _make_one_by_one(self, batch: Sequence[RequestGroup], error: EditingError, bar: StoredBar) -> None:
        """Compute the edits of a failed batch each by itself; those that fail again are failed edits.

        Raises:
            EditingError: if no edit of the run succeeds and the error is not one of the requests.
        """
        for group in batch:
            if group_key(group) in self._edits:
                continue
            try:
                if len(batch) == 1:
                    raise error
                with measured(self.model, StoredValues.of(self.store, self.identity)) as cost:
                    (delta,) = self.editor.edit(self.model, self.tokenizer, list(group), measure=False)
            except EditingError as reason:
                self._edits[group_key(group)] = FailedEdit(str(reason))
                log.warning("%s: %s", group[0].label, reason)
            else:
                delta.meta["batch"] = [group_key(group)]
                self._save([(delta, group)], cost)
            bar.finished()
        made = any(isinstance(edit, Delta) for edit in self._edits.values())
        if not made and not isinstance(error, UnusableRequestError):
            raise error

    def _interrupted_batch(
        self, chunk: Sequence[RequestGroup], missing: Sequence[RequestGroup]
    ) -> list[RequestGroup] | None:
        """Return a batch that was stored only in part, if a missing group belongs to it."""
        by_key = {group_key(group): group for group in chunk}
        for key in by_key:
            edit = self._edits.get(key)
            batch = edit.meta.get("batch", []) if isinstance(edit, Delta) else []
            if by_key.keys() >= set(batch) and any(group_key(group) in batch for group in missing):
                return [by_key[key] for key in batch]
        return None

    def _make_group(self, group: RequestGroup) -> None:
        """Compute the edit of several requests; a plan's group is written without its unusable requests.

        A case with several edits is not: a part of them is another edit.
        """
        made = any(isinstance(edit, Delta) for edit in self._edits.values())
        with trainings_of(self.store, self._description(group)) as trainings:
            with measured(self.model, StoredValues.of(self.store, self.identity), trainings) as cost:
                delta, unusable = edit_usable(self._write_together, group, edits_made=made)
            if unusable and (not self.partial_groups or len(unusable) == len(group)):
                self._edits[group_key(group)] = FailedEdit(next(iter(unusable.values())))
                return
            if unusable:
                delta.unusable = dict(unusable)
                warn_of_unusable("edits of a group", unusable, len(group))
            self._save([(delta, group)], cost)

    def _write_together(self, group: Sequence[EditRequest]) -> Delta:
        return write_together(self.editor, self.model, self.tokenizer, group)

    def _save(
        self,
        edits: Sequence[tuple[Delta, RequestGroup]],
        cost: EditCost,
        num_edits: int = 1,
        bar: StoredBar | None = None,
    ) -> None:
        """Keep and store edits, of ``num_edits`` that were computed together at this cost.

        Those of an interrupted batch that are there already are measured with the others, whose last bits depend on
        them, and stay.
        """
        new = {group_key(group) for _, group in edits} - self._edits.keys()
        finite = []
        for delta, group in edits:
            delta.cost = cost.of_one(num_edits)
            try:
                delta.check_finite()
            except EditingError as error:
                if group_key(group) not in new:
                    continue
                log.warning("%s: %s", group[0].label, error)
                self._edits[group_key(group)] = FailedEdit(str(error))
                if bar:
                    bar.finished()
            else:
                finite.append((delta, group))
        self._measure(finite)
        for delta, group in finite:
            if group_key(group) in new:
                self._keep(delta, group)
                if bar:
                    bar.finished()

    def _keep(self, delta: Delta, group: RequestGroup) -> None:
        """Store a finished edit, and keep it in memory if there is room."""
        description = self._description(group)
        on_host = None
        if self.store:
            on_host = off_device(delta)  # the one copy, for the file and its checksum
            if self._num_expected:
                self.store.expect(self._num_expected, on_host.num_bytes)
                self._num_expected = 0
            delta.know_copy(on_host)
            self.store.save_delta(description, on_host)
        self._edits[group_key(group)] = self._large.kept(delta, description, on_host)


def group_key(group: RequestGroup) -> str:
    """Key of requests that are written together; for a single request its own key."""
    if len(group) == 1:
        return group[0].key
    keys = [request.key for request in group]
    return key_of({"in_turn": keys} if isinstance(group, InTurn) else keys)
