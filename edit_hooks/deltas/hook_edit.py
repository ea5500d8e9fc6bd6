"""Edits that act through hooks while the model runs: codebooks and side memories.

A :class:`HookEdit` is data: named tensors, JSON-able settings and a *kind*, looked up in :data:`HOOK_KINDS`. The kind's
class puts hooks on the modules it names and takes them off again. What a hook must know about the running pass and
cannot see at its module (where each row's prompt ends, which columns are real tokens, prefill or decoding step) is
handed to it as a :class:`ForwardContext`, by whoever runs the model.
"""

from __future__ import annotations

import abc
import contextlib
import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from edit_hooks.modeling.architectures import map_shape, unwrapped
from edit_hooks.utils.errors import EditingError

# kind -> ``module:class``. A new way of acting through hooks is one row here and one subclass of HookKind.
HOOK_KINDS: dict[str, str] = {
    "codebook": "edit_hooks.memory.codebook:CodebookHooks",
    "side_memory": "edit_hooks.memory.side_memory:SideMemoryHooks",
    "adapter_database": "edit_hooks.memory.adapter_database:AdapterDatabaseHooks",
}


@dataclass(eq=False)
class HookEdit:
    """The part of an edit that acts through hooks.

    Attributes:
        kind: key of :data:`HOOK_KINDS`.
        tensors: name -> tensor, on any device, saved with the edit.
        settings: JSON-able, saved with the edit; ``module`` names the hooked module.
    """

    kind: str
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def mixes_rows(self) -> bool:
        """Whether rows under different edits of this kind may share a batch."""
        return kind_class(self.kind).mixes_rows

    def check(self, model: nn.Module) -> None:
        """Raise EditingError when this does not fit the model."""
        kind_class(self.kind).check(unwrapped(model), self)

    @staticmethod
    def composed(parts: Sequence[HookEdit]) -> HookEdit | None:
        """Parts written one after another as one; each holds what its step added or replaced.

        Raises:
            EditingError: for parts of several kinds or at several modules.
        """
        if not parts:
            return None
        places = {(part.kind, part.settings["module"]) for part in parts}
        if len(places) > 1:
            raise EditingError(
                f"edits of {', '.join(f'{kind} at {module}' for kind, module in sorted(places))} cannot be put "
                "together; use one memory editor, at one layer, at a time."
            )
        return parts[0] if len(parts) == 1 else kind_class(parts[0].kind).compose(parts)


@dataclass(frozen=True)
class ForwardContext:
    """What one forward pass holds, row by row.

    Attributes:
        attended_RT: bool, which columns of this pass are real tokens.
        prompt_end_R: column of the prompt's last token; of no meaning in decoding.
        prefill: the rows' prompts (and, in teacher forcing, their continuations); else one new token per row.
    """

    attended_RT: torch.Tensor
    prompt_end_R: torch.Tensor
    prefill: bool

    @property
    def prompt_RT(self) -> torch.Tensor:
        """Which columns are prompt tokens."""
        columns_T = torch.arange(self.attended_RT.shape[1], device=self.attended_RT.device)
        return self.attended_RT & (columns_T <= self.prompt_end_R[:, None])

    def to(self, device: torch.device) -> ForwardContext:
        """The same on another device: a model split by a device map runs its modules where they are."""
        return ForwardContext(self.attended_RT.to(device), self.prompt_end_R.to(device), self.prefill)

    @classmethod
    def of_prompts(cls, mask_RT: torch.Tensor, prompt_length_R: torch.Tensor | None) -> ForwardContext:
        """A prefill pass from its attention mask, padded on either side.

        Args:
            prompt_length_R: prompt tokens of each row; ``None``: all tokens are prompt.
        """
        attended_RT = mask_RT.bool()
        start_R = attended_RT.long().argmax(1)
        length_R = attended_RT.sum(1) if prompt_length_R is None else prompt_length_R.to(mask_RT.device)
        if len(length_R) not in (1, len(mask_RT)):
            raise EditingError(f"{len(length_R)} prompt lengths are given for a batch of {len(mask_RT)} rows.")
        if (length_R > attended_RT.sum(1)).any() or (length_R < 1).any():
            raise EditingError("prompt lengths are longer than the rows' attended tokens, or zero; is a mask missing?")
        return cls(attended_RT, (start_R + length_R - 1).expand(len(mask_RT)), prefill=True)

    @classmethod
    def of_step(cls, num_rows: int, device: torch.device) -> ForwardContext:
        """One decoding step."""
        ones = torch.ones(num_rows, 1, dtype=torch.bool, device=device)
        return cls(ones, torch.zeros(num_rows, dtype=torch.long, device=device), prefill=False)


class HookKind(abc.ABC):
    """Hooked edits of one kind, ready to act on a model.

    Args:
        model: the unwrapped model.
        edits: the distinct edits.
        edit_of_row: [rows] index into ``edits``, -1 for rows without one; ``None``: every row has ``edits[0]``.
    """

    mixes_rows: ClassVar[bool] = False

    def __init__(self, model: nn.Module, edits: Sequence[HookEdit], edit_of_row: torch.Tensor | None = None) -> None:
        self.model, self.edits, self.edit_of_row = model, edits, edit_of_row
        self.running: ForwardContext | None = None

    @classmethod
    @abc.abstractmethod
    def compose(cls, parts: Sequence[HookEdit]) -> HookEdit:
        """Parts of this kind and module, written one after another, as one."""

    @classmethod
    def check(cls, model: nn.Module, hook_edit: HookEdit) -> None:
        """Raise EditingError when the edit does not fit the model; subclasses compare shapes too."""
        target_module(model, hook_edit)

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Hooks on the modules inside the scope."""
        handles: list[Any] = []
        try:
            for number, edit in enumerate(self.edits):
                module = target_module(self.model, edit)

                def hook(_module: nn.Module, args: Any, output: torch.Tensor, number: int = number) -> torch.Tensor:
                    return self.transform_output(number, args[0], output)

                handles.append(module.register_forward_hook(hook))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def rows(self, number: int, num_rows: int, device: torch.device) -> torch.Tensor:
        """Indices of the rows under edit ``number``."""
        if self.edit_of_row is None:
            return torch.arange(num_rows, device=device)
        return (self.edit_of_row == number).nonzero()[:, 0].to(device)

    @property
    def now(self) -> ForwardContext:
        """The running pass."""
        if self.running is None:
            raise EditingError("a hooked edit acts in a forward pass nobody has described; run the model in its scope.")
        return self.running

    @abc.abstractmethod
    def transform_output(self, number: int, x_RTF: torch.Tensor, output_RTD: torch.Tensor) -> torch.Tensor:
        """Output of the module of edit ``number`` for rows under it, the given output for all others."""

    @abc.abstractmethod
    def select(self, rows: torch.Tensor) -> HookKind:
        """The same for some rows of the batch, with what was decided for them at prefill."""


def kind_class(kind: str) -> type[HookKind]:
    """The class behind a kind.

    Raises:
        EditingError: for an unknown kind.
    """
    if kind not in HOOK_KINDS:
        raise EditingError(f"this edit is of the unknown kind {kind!r}; known: {', '.join(sorted(HOOK_KINDS))}.")
    module, _, attribute = HOOK_KINDS[kind].partition(":")
    return getattr(importlib.import_module(module), attribute)


def target_module(model: nn.Module, hook_edit: HookEdit) -> nn.Module:
    """The module an edit acts on."""
    name = hook_edit.settings["module"]
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise EditingError(f"the model has no module {name!r}; was this edit made for another model?") from None


def check_width(module: nn.Module, name: str, width_out: int, width_in: int) -> None:
    """Raise EditingError when a linear map is not R^width_in -> R^width_out."""
    if map_shape(module) != (width_out, width_in):
        raise EditingError(
            f"the edit of {name} maps {width_in} -> {width_out}, the model's module "
            f"{map_shape(module)[1]} -> {map_shape(module)[0]}."
        )


@contextlib.contextmanager
def attached(
    model: nn.Module, hook_edit: HookEdit | None, prompt_lengths: Sequence[int] | torch.Tensor | None = None
) -> Iterator[None]:
    """One hooked edit on a model that somebody else runs (its own ``generate``, a plain forward).

    Passes are recognized by their key-value cache: an empty or absent one means prefill. Rows may be padded on either
    side.

    Args:
        prompt_lengths: prompt tokens of each row (one number serves all rows). ``None``: everything that is fed at
            prefill is prompt, which is wrong for teacher forcing and for decoding without a cache.
    """
    if hook_edit is None:
        yield
        return
    inner = unwrapped(model)
    hook_edit.check(inner)
    lengths = None if prompt_lengths is None else torch.as_tensor(prompt_lengths)
    acting = kind_class(hook_edit.kind)(inner, [hook_edit])

    def describe(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        acting.running = _described(args, kwargs, lengths)

    handle = getattr(inner, str(inner.base_model_prefix)).register_forward_pre_hook(describe, with_kwargs=True)
    try:
        with acting.attached():
            yield
    finally:
        handle.remove()


def _described(args: tuple[Any, ...], kwargs: dict[str, Any], lengths: torch.Tensor | None) -> ForwardContext:
    """The pass behind a call of the decoder."""
    ids = args[0] if args else kwargs.get("input_ids")
    fed = ids if ids is not None else kwargs["inputs_embeds"]
    cache, mask = kwargs.get("past_key_values"), kwargs.get("attention_mask")
    if cache is not None and cache.get_seq_length() > 0:
        return ForwardContext.of_step(fed.shape[0], fed.device)
    if mask is None:
        mask = torch.ones(fed.shape[:2], dtype=torch.long, device=fed.device)
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        raise EditingError("hooked edits need a two-dimensional attention mask to find the end of each prompt.")
    return ForwardContext.of_prompts(mask[:, -fed.shape[1] :], lengths)
