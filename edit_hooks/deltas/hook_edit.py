"""Edits that act through forward hooks: codebooks, side memories, adapter databases, predictors.

A :class:`HookEdit` is data: named tensors, JSON-able settings and a *kind*. The kind's :class:`HookKind` subclass
places hooks on the modules and removes them. Facts about the running pass that a hook cannot see at its module (where
each row's prompt ends, which columns are real tokens, prefill or decoding step) come as a :class:`ForwardContext` from
the code that runs the model.

Kinds are looked up by name: the built-in ones in :data:`HOOK_KINDS`, those of other packages among the entry points of
the group :data:`ENTRY_POINTS`, and those of editors in use (``Editor.hook_kinds``, through :func:`register_kinds`). A
saved edit contains the name only, so loading one never imports code that the file chooses.
"""

from __future__ import annotations

import abc
import contextlib
import copy
import functools
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from edit_hooks.deltas.forward_context import ForwardContext
from edit_hooks.deltas.schema import Record, Schema, check_numeric, text
from edit_hooks.modeling.architectures import edited_module, head_of, map_shape, unwrapped, weight_of
from edit_hooks.modeling.forward.kv_cache import CACHE_NAMES
from edit_hooks.modeling.hooks import Registration, hooks
from edit_hooks.modeling.linear_maps import is_linear_map
from edit_hooks.utils.errors import EditingError, first_line
from edit_hooks.utils.plugins import import_object, registered
from edit_hooks.utils.text.readable import readable

# kind -> ``module:class``. A built-in kind is one row here and one subclass of HookKind.
HOOK_KINDS: dict[str, str] = {
    "codebook": "edit_hooks.memory.codebook:CodebookHooks",
    "side_memory": "edit_hooks.memory.side_memory:SideMemoryHooks",
    "adapter_database": "edit_hooks.memory.adapter_database:AdapterDatabaseHooks",
    "gated_predictor": "edit_hooks.memory.gated_predictor:GatedPredictorHooks",
    "column_memory": "edit_hooks.memory.column_memory:ColumnMemoryHooks",
    "residual_table": "edit_hooks.memory.residual_table:ResidualTableHooks",
}
ENTRY_POINTS = "lm_eval_editing.hook_kinds"


@dataclass(eq=False)
@readable
class HookEdit:
    """The part of an edit that acts through hooks: a value, never changed. Compared and hashed by identity.

    Attributes:
        kind: name of the kind.
        tensors: name -> tensor, on any device, saved with the edit.
        settings: JSON-able, saved with the edit; ``module`` names the hooked module.
    """

    kind: str
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def mixes_rows(self) -> bool:
        """Whether rows under different edits of this kind can share a batch."""
        return kind_class(self.kind).mixes_rows

    def check_content(self) -> None:
        """Raise EditingError, with the field, for settings and tensors that no edit of its kind has."""
        kind_class(self.kind).check_content(self)

    def check(self, model: nn.Module) -> None:
        """Raise EditingError if the edit does not fit the model."""
        inner = unwrapped(model)
        if target_module(inner, self) is head_of(inner):
            raise EditingError(
                f"the edit hooks {self.settings['module']}, the head, which is computed for the read positions alone, "
                "apart from the rest of the pass; hook a module inside the decoder."
            )
        kind = kind_class(self.kind)
        try:
            kind.check(inner, self)
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            if kind.schema is not None or isinstance(error, EditingError):
                raise
            raise EditingError(f"the hook edit lacks what its kind {self.kind!r} needs: {first_line(error)}.") from None

    @staticmethod
    def after(steps: Iterable[HookEdit | None], kind: str, module: str, what: str) -> HookEdit | None:
        """The steps of a stream of one kind at one module, as one edit; ``None`` if no step has hooks.

        Args:
            what: the edits of the kind, for the error.

        Raises:
            EditingError: for steps of another kind or at another module.
        """
        edit = HookEdit.combine(steps)
        if edit is not None and (edit.kind, edit.settings["module"]) != (kind, module):
            raise EditingError(
                f"the earlier edits are a {edit.kind} at {edit.settings['module']}, not {what} at {module}; a stream "
                "has one editor and one module throughout."
            )
        return edit

    @staticmethod
    def combine(steps: Iterable[HookEdit | None]) -> HookEdit | None:
        """The steps of a stream, in order, as one edit; ``None`` if no step has hooks.

        Each step holds what it added or replaced.

        Raises:
            EditingError: for steps of several kinds or at several modules.
        """
        edits = [edit for edit in steps if edit is not None]
        if not edits:
            return None
        targets = {(edit.kind, edit.settings["module"]) for edit in edits}
        if len(targets) > 1:
            raise EditingError(
                f"edits of {', '.join(f'{kind} at {module}' for kind, module in sorted(targets))} cannot be put "
                "together; use one memory editor, at one layer, at a time."
            )
        return edits[0] if len(edits) == 1 else _sum_of(edits)


class HookKind(abc.ABC):
    """Hook edits of one kind, bound to a model and to the rows of a batch.

    Args:
        model: the unwrapped model.
        edits: the distinct edits.
        edit_of_row: [R] index into ``edits``, -1 for rows without an edit; ``None``: every row has ``edits[0]``.

    Raises:
        EditingError: for an edit that lacks a part which an earlier step of its stream has.

    Attributes:
        mixes_rows: whether rows under different edits of this kind can share a batch.
        row_state: names of the attributes that hold one entry per row ([R, ...], or ``None`` before prefill);
            :meth:`select` indexes them.
        schema: what settings and tensors hold; ``None``: a text ``module``, and numbers that are finite.
    """

    mixes_rows: ClassVar[bool] = False
    row_state: ClassVar[tuple[str, ...]] = ()
    schema: ClassVar[Schema | None] = None

    def __init__(self, model: nn.Module, edits: Sequence[HookEdit], edit_of_row: torch.Tensor | None = None) -> None:
        self.model, self.edits, self.edit_of_row = model, edits, edit_of_row
        self._forward_context: ForwardContext | None = None

    @classmethod
    @abc.abstractmethod
    def combine(cls, steps: Sequence[HookEdit]) -> HookEdit:
        """Steps of this kind at one module, in order, as one edit."""

    @classmethod
    def check_content(cls, hook_edit: HookEdit) -> None:
        """Raise EditingError, with the field, for content that does not follow :attr:`schema`.

        Subclasses add what a schema does not express. Later code relies on it.
        """
        if cls.schema is not None:
            cls.schema.check(hook_edit.settings, hook_edit.tensors)
            return
        Record({"module": text}, is_open=True)("settings", hook_edit.settings)
        for name, tensor in hook_edit.tensors.items():
            check_numeric(name, tensor)

    @classmethod
    def check(cls, model: nn.Module, hook_edit: HookEdit) -> None:
        """Raise EditingError if the edit does not fit the model; subclasses compare shapes too."""
        target_module(model, hook_edit)

    @property
    def forward_context(self) -> ForwardContext:
        """The running pass, set by the code that runs the model."""
        if self._forward_context is None:
            raise EditingError("hook edit used outside RowEdits.prefill()/step() or attached().")
        return self._forward_context

    @forward_context.setter
    def forward_context(self, context: ForwardContext) -> None:
        self._forward_context = context

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Scope in which the modules have their hooks."""
        with hooks(*self.registrations()):
            yield

    def registrations(self) -> list[Registration]:
        """The hooks of all edits."""
        return [self._registration(index, target_module(self.model, edit)) for index, edit in enumerate(self.edits)]

    def _registration(self, index: int, module: nn.Module) -> Registration:
        def hook(_module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            return self.transform_output(index, args[0], output)

        return Registration(module, hook)

    def rows_of_edit(self, index: int, num_rows: int, device: torch.device) -> torch.Tensor:
        """Indices of the rows under edit ``index``."""
        if self.edit_of_row is None:
            return torch.arange(num_rows, device=device)
        return (self.edit_of_row == index).nonzero()[:, 0].to(device)

    @abc.abstractmethod
    def transform_output(self, index: int, x_RTF: torch.Tensor, output_RTD: torch.Tensor) -> torch.Tensor:
        """New output of the module of edit ``index``; rows that are not under it keep their output."""

    def select(self, rows: torch.Tensor) -> HookKind:
        """The same edits for some rows of the batch, with the rows' state from prefill."""
        selected = copy.copy(self)
        selected._forward_context = None
        for name in ("edit_of_row", *self.row_state):
            state = getattr(self, name)
            if state is not None:
                setattr(selected, name, state[rows.to(state.device)])
        return selected


def _sum_of(edits: Sequence[HookEdit]) -> HookEdit:
    """Steps of one kind as one edit; the same object again for the last steps that were asked for.

    The check of a step, the model and the history of a stream each need the sum of the same two, which can be large.
    """
    global _last_sum
    terms, total = _last_sum
    known = total() if total is not None and [term() for term in terms] == list(edits) else None
    if known is None:
        known = kind_class(edits[0].kind).combine(edits)
        _last_sum = [weakref.ref(edit) for edit in edits], weakref.ref(known)
    return known


# The steps of the last sum, and the sum; both live as long as others hold them.
_last_sum: tuple[list[weakref.ref[HookEdit]], weakref.ref[HookEdit] | None] = [], None


def kind_class(kind: str) -> type[HookKind]:
    """The class of a kind.

    Raises:
        EditingError: for a kind that is neither built in, nor registered by an installed package, nor brought by an
            editor in use.
    """
    if kind in _kinds_of_editors:
        return _kinds_of_editors[kind]
    path = HOOK_KINDS.get(kind) or _registered_kinds().get(kind)
    if path is None:
        known = sorted({*HOOK_KINDS, *_registered_kinds()})
        raise EditingError(
            f"this edit is of the unknown kind {kind!r}; known: {', '.join(known)}. If it was made with another "
            f"package, install that; the package registers its kinds as entry points {ENTRY_POINTS}. A kind that is "
            "named in hook_kinds of an editor's class alone is known where that editor is used, not to saved edits."
        )
    target = import_object(path, "hook kind")
    if not (isinstance(target, type) and issubclass(target, HookKind)):
        raise EditingError(f"hook kind {kind!r}: {path} is not a subclass of edit_hooks.deltas.hook_edit.HookKind.")
    return target


def register_kinds(kinds: Mapping[str, type[HookKind]]) -> None:
    """Make the kinds of an editor known to this process; idempotent.

    Raises:
        EditingError: for a class that is no HookKind, and for the name of another kind.
    """
    for kind, cls in kinds.items():
        if not (isinstance(cls, type) and issubclass(cls, HookKind)):
            raise EditingError(f"hook kind {kind!r} of an editor is {cls!r}; a subclass of HookKind is needed.")
        path = f"{cls.__module__}:{cls.__qualname__}"
        if earlier := _kinds_of_editors.get(kind):
            taken: str | None = f"{earlier.__module__}:{earlier.__qualname__}"
        else:
            taken = HOOK_KINDS.get(kind) or _registered_kinds().get(kind)
        if taken not in (None, path):
            raise EditingError(
                f"an editor brings {path} as hook kind {kind!r}, which is {taken}; give it another name."
            )
        _kinds_of_editors[kind] = cls


# Kinds of editors that need no installation (``editor=package.module:Class``).
_kinds_of_editors: dict[str, type[HookKind]] = {}


@functools.cache
def _registered_kinds() -> dict[str, str]:
    """Kind -> ``module:class`` of installed packages; the names of built-in kinds are refused."""
    entries = registered(ENTRY_POINTS)
    for kind in sorted(entries.keys() & HOOK_KINDS.keys()):
        raise EditingError(
            f"{entries[kind].value} registers the hook kind {kind!r}, which is built in; uninstall its package."
        )
    return {kind: entry.value for kind, entry in entries.items()}


def target_module(model: nn.Module, hook_edit: HookEdit) -> nn.Module:
    """The hooked module of an edit."""
    return edited_module(model, hook_edit.settings["module"])


def on_target(model: nn.Module, hook_edit: HookEdit) -> dict[str, torch.Tensor]:
    """The tensors of an edit on the device of the hooked module's weight."""
    device = weight_of(target_module(model, hook_edit)).device
    return {name: tensor.to(device) for name, tensor in hook_edit.tensors.items()}


def check_table(model: nn.Module, hook_edit: HookEdit, outputs: str) -> None:
    """Raise EditingError if the hooked module has other widths than ``keys`` and the outputs beside them."""
    width_out, width_in = (hook_edit.tensors[name].shape[1] for name in (outputs, "keys"))
    check_width(target_module(model, hook_edit), hook_edit.settings["module"], width_out, width_in)


def check_width(module: nn.Module, name: str, width_out: int, width_in: int) -> None:
    """Raise EditingError if a module is no linear map R^width_in -> R^width_out."""
    if not is_linear_map(module):
        raise EditingError(f"the edit hooks {name}, a {type(module).__name__}; a linear map is needed.")
    if map_shape(module) != (width_out, width_in):
        raise EditingError(
            f"the edit of {name} maps {width_in} -> {width_out}, the model's module "
            f"{map_shape(module)[1]} -> {map_shape(module)[0]}."
        )


@contextlib.contextmanager
def attached(
    model: nn.Module, hook_edit: HookEdit | None, prompt_lengths: Sequence[int] | torch.Tensor | None = None
) -> Iterator[None]:
    """Scope in which a hook edit acts on forward passes run by other code (``generate``, a plain call).

    The kind of a pass is read from its key-value cache: an empty or absent cache means prefill. Rows can be padded on
    either side.

    Args:
        prompt_lengths: prompt tokens of each row, or one number for all. ``None``: all tokens fed at prefill are
            prompt, which is wrong for teacher forcing and for decoding without a cache.
    """
    if hook_edit is None:
        yield
        return
    inner = unwrapped(model)
    hook_edit.check(inner)
    lengths = None if prompt_lengths is None else torch.as_tensor(prompt_lengths).reshape(-1)
    kind = kind_class(hook_edit.kind)(inner, [hook_edit])

    def set_context(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kind.forward_context = _context_of_call(args, kwargs, lengths)

    decoder = getattr(inner, str(inner.base_model_prefix))
    with hooks(Registration(decoder, set_context, on_input=True)), kind.attached():
        yield


def _context_of_call(args: tuple[Any, ...], kwargs: dict[str, Any], lengths: torch.Tensor | None) -> ForwardContext:
    """The forward context of a call of the decoder, from its arguments."""
    ids = args[0] if args else kwargs.get("input_ids")
    inputs = ids if ids is not None else kwargs["inputs_embeds"]
    cache = next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)
    mask = kwargs.get("attention_mask")
    if cache is not None and cache.get_seq_length() > 0:
        return ForwardContext.for_step(inputs.shape[0], inputs.device)
    if mask is None:
        mask = torch.ones(inputs.shape[:2], dtype=torch.long, device=inputs.device)
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        raise EditingError("hook edits need a two-dimensional attention mask to find the end of each prompt.")
    return ForwardContext.for_prefill(mask[:, -inputs.shape[1] :], lengths)
