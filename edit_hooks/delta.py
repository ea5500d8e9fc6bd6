"""`Delta`: an edit as a value that can be applied, undone, saved, loaded and used per row of a batch."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from edit_hooks.architectures import is_transposed, map_shape, unwrapped, weight_of
from edit_hooks.capture import widened
from edit_hooks.context import ContextEdit
from edit_hooks.errors import EditingError
from edit_hooks.files import replacing
from edit_hooks.fingerprint import key_of, tensor_checksum
from edit_hooks.hooked import Hooked, attached

FORMAT = "lm-eval-editing/delta/1"
UNEDITED_STATE = "unedited"


class Factor(NamedTuple):
    """Low-rank update ``left @ right.T`` of a linear map R^f -> R^d.

    Attributes:
        left: [d, r]; right: [f, r].
        transposed: the weight is stored as [f, d] (GPT-2's Conv1D).
    """

    left: torch.Tensor
    right: torch.Tensor
    transposed: bool = False

    def update(self) -> torch.Tensor:
        """The dense update in the stored orientation."""
        return self.right @ self.left.T if self.transposed else self.left @ self.right.T


@dataclass
class Delta:
    """An edit as a value: new weights, hooks on modules, text before the prompt, or several of these.

    Attributes:
        factors: module name -> low-rank update of its weight.
        dense: parameter name -> dense update in the stored orientation.
        masks: module name -> which entries of its factor's update are written (packed bits, stored orientation, row by
            row); modules without a mask are written whole.
        hooked: what acts through hooks while the model runs (a codebook, a side memory).
        contexts: what is put before prompts, one per fact.
        carry: tensors that later steps of a stream need from this one (saved with it, not part of the update).
        diagnostics: what happened while the edit was made (JSON-able): losses, steps, norms, warnings.
        meta: what the edit is (JSON-able): editor, configuration, request(s), base model fingerprint.
        intermediates: tensors kept for inspection on request (keys, values); never saved.
    """

    factors: dict[str, Factor] = field(default_factory=dict)
    dense: dict[str, torch.Tensor] = field(default_factory=dict)
    masks: dict[str, torch.Tensor] = field(default_factory=dict)
    hooked: Hooked | None = None
    contexts: tuple[ContextEdit, ...] = ()
    carry: dict[str, torch.Tensor] = field(default_factory=dict)
    diagnostics: dict[str, Any] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    intermediates: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def is_low_rank(self) -> bool:
        """Whether the edit is made of whole factors only."""
        return not self.dense and not self.masks and self.weights_only

    @property
    def weights_only(self) -> bool:
        """Whether the edit is all in the weights, so that a checkpoint can hold it."""
        return self.hooked is None and not self.contexts

    @property
    def writes(self) -> list[str]:
        """What the edit changes: ``weights``, ``hooks``, ``context``."""
        parts = {"weights": self.parameter_names, "hooks": self.hooked, "context": self.contexts}
        return [name for name, part in parts.items() if part]

    @property
    def acts_per_row(self) -> bool:
        """Whether the edit can act on some rows of a batch only, nothing being written."""
        return not self.dense and not self.masks and (self.hooked is None or self.hooked.mixes_rows)

    @property
    def standing(self) -> Delta | None:
        """What is left of the edit once its weights are written: hooks and contexts; ``None`` without either."""
        return None if self.weights_only else Delta(hooked=self.hooked, contexts=self.contexts)

    @property
    def without_contexts(self) -> Delta | None:
        """The edit on prompts that hold its context already; ``None`` when nothing is left."""
        if not self.contexts:
            return self
        rest = replace(self, contexts=())
        return rest if rest.parameter_names or rest.hooked else None

    @property
    def num_bytes(self) -> int:
        """Memory taken by the update's tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors.values())

    def weights(self) -> dict[str, torch.Tensor]:
        """Parameter name -> dense update in the stored orientation, float32 or wider."""
        updates = {f"{name}.weight": factor.update() for name, factor in self.factors.items()}
        for name, packed in self.masks.items():
            update = updates[f"{name}.weight"]
            updates[f"{name}.weight"] = update * unpack_bits(packed, update)
        return {**self.dense, **updates}

    @property
    def parameter_names(self) -> list[str]:
        """Names of the parameters the delta changes."""
        return [*self.dense, *(f"{name}.weight" for name in self.factors)]

    @property
    def rank(self) -> int:
        """Largest rank of the factors; 0 without factors."""
        return max((factor.left.shape[1] for factor in self.factors.values()), default=0)

    @property
    def _tensors(self) -> dict[str, torch.Tensor]:
        """All tensors under the names they are saved with."""
        tensors = {f"dense/{name}": tensor for name, tensor in self.dense.items()}
        tensors |= {f"mask/{name}": tensor for name, tensor in self.masks.items()}
        tensors |= {f"carry/{name}": tensor for name, tensor in self.carry.items()}
        for name, factor in self.factors.items():
            tensors[f"left/{name}"], tensors[f"right/{name}"] = factor.left, factor.right
        if self.hooked is not None:
            tensors |= {f"hook/{name}": tensor for name, tensor in self.hooked.tensors.items()}
        return tensors

    @property
    def _settings(self) -> dict[str, Any]:
        """What is not tensors: the hooks' kind and settings, and the contexts; empty for edits of weights."""
        found: dict[str, Any] = {}
        if self.hooked is not None:
            found["hooked"] = {"kind": self.hooked.kind, "settings": self.hooked.settings}
        if self.contexts:
            found["contexts"] = [context.to_dict() for context in self.contexts]
        return found

    @classmethod
    def summed(cls, deltas: Sequence[Delta]) -> Delta:
        """One delta that does what all do, written in this order: factors side by side (ranks add up), dense and masked
        updates added, codebooks and memories as the last step left them, contexts one after another.

        Raises:
            EditingError: for hooked edits of several kinds or at several modules.
        """
        total = cls(diagnostics={"parts": [delta.diagnostics for delta in deltas]})
        total.hooked = Hooked.composed([delta.hooked for delta in deltas if delta.hooked is not None])
        total.contexts = tuple(context for delta in deltas for context in delta.contexts)
        total.meta["parts"] = [delta.meta for delta in deltas]
        for delta in deltas:
            for name, update in (delta.weights() if delta.masks else delta.dense).items():
                total.dense[name] = total.dense[name] + update if name in total.dense else update
            for name, factor in ({} if delta.masks else delta.factors).items():
                if name in total.factors:
                    before = total.factors[name]
                    left, right = torch.cat([before.left, factor.left], 1), torch.cat([before.right, factor.right], 1)
                    factor = Factor(left, right, factor.transposed)
                total.factors[name] = factor
        return total

    def check_finite(self) -> None:
        """Raise EditingError when the update holds NaN or infinity."""
        for name, tensor in self._tensors.items():
            if not torch.isfinite(tensor).all():
                raise EditingError(f"the update of {name} is not finite; lower the learning rate or use float32.")

    def checksum(self) -> str:
        """SHA-256 (hex) over the update's tensors; the identity of what is written into the model."""
        tensors = {name: [list(t.shape), str(t.dtype), tensor_checksum(t)] for name, t in self._tensors.items()}
        return key_of(tensors | self._settings)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write tensors and metadata to one safetensors file (temporary name first, then renamed)."""
        path = Path(path)
        header = {
            "format": FORMAT,
            "meta": json.dumps(self.meta),
            "diagnostics": json.dumps(self.diagnostics),
            "transposed": json.dumps([name for name, factor in self.factors.items() if factor.transposed]),
            **{name: json.dumps(value) for name, value in self._settings.items()},
            "checksum": self.checksum(),
        }
        write_tensors(path, self._tensors, header)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Delta:
        """Read what :meth:`save` wrote.

        Raises:
            EditingError: when the file is missing, damaged or something else.
        """
        try:
            with safe_open(path, framework="pt") as file:
                header = file.metadata() or {}
                if header.get("format") != FORMAT:
                    raise EditingError(
                        f"{path} is not a saved edit (format {header.get('format')!r}, want {FORMAT!r})."
                    )
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except EditingError:
            raise
        except Exception as error:
            raise EditingError(f"cannot read the edit in {path}: {error}") from error
        delta = cls(meta=json.loads(header["meta"]), diagnostics=json.loads(header["diagnostics"]))
        delta.contexts = tuple(map(ContextEdit.from_dict, json.loads(header.get("contexts", "[]"))))
        if "hooked" in header:
            delta.hooked = Hooked(**json.loads(header["hooked"]))
        transposed = set(json.loads(header["transposed"]))
        for name, tensor in tensors.items():
            kind, _, target = name.partition("/")
            if kind == "dense":
                delta.dense[target] = tensor
            elif kind == "mask":
                delta.masks[target] = tensor
            elif kind == "carry":
                delta.carry[target] = tensor
            elif kind == "hook" and delta.hooked is not None:
                delta.hooked.tensors[target] = tensor
            elif kind == "left":
                delta.factors[target] = Factor(tensor, tensors[f"right/{target}"], target in transposed)
        if delta.checksum() != header.get("checksum"):
            raise EditingError(f"the edit in {path} is damaged (checksum differs).")
        return delta


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], header: Mapping[str, str]) -> None:
    """Write a safetensors file with text metadata: under a temporary name first, readable by whom the umask allows."""
    with replacing(path) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode  # safetensors makes files that only their owner can read
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, metadata=dict(header))
        temporary.chmod(mode)


class AppliedDeltas:
    """Deltas written into a model's weights one after another; on exit the original weights are back, bit for bit.

    Hooks and contexts are not put on the model here: :attr:`standing` says what whoever asks questions has to apply.

    Every parameter name is resolved and every shape checked before the first write. Each sum W + update is formed in at
    least float32 and rounded once to the weight's dtype, so a stream of deltas rounds once per step.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = unwrapped(model)
        self._parameters = dict(self.model.named_parameters())
        self._originals: dict[str, torch.Tensor] = {}
        self.standing: Delta | None = None

    def __enter__(self) -> AppliedDeltas:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.restore()

    @property
    def hooked(self) -> Hooked | None:
        """What of the deltas so far acts through hooks."""
        return None if self.standing is None else self.standing.hooked

    def check(self, delta: Delta) -> None:
        """Raise EditingError when a delta does not fit this model, or what was added before."""
        _check_shapes(self.model, delta)
        if delta.hooked is not None:
            delta.hooked.check(self.model)
            Hooked.composed([part.hooked for part in (self.standing, delta) if part is not None and part.hooked])
        for name in delta.parameter_names:
            weight = self._parameters[self._resolved(name)]
            if name in delta.dense and delta.dense[name].shape != weight.shape:
                raise EditingError(
                    f"the edit of {name} has shape {list(delta.dense[name].shape)}, the weight {list(weight.shape)}."
                )

    @torch.no_grad()
    def add(self, delta: Delta) -> None:
        """Write one more delta."""
        self.check(delta)
        for name, update in delta.weights().items():
            name = self._resolved(name)
            weight = self._parameters[name]
            if name not in self._originals:
                self._originals[name] = weight.detach().clone()
            weight.copy_((widened(weight) + update.to(weight.device)).to(weight.dtype))
        if not delta.weights_only:
            self.standing = Delta.summed([part for part in (self.standing, delta.standing) if part is not None])

    @torch.no_grad()
    def restore(self) -> None:
        """Put the original weights back."""
        self.standing = None
        for name, original in self._originals.items():
            self._parameters[name].copy_(original)
        self._originals.clear()

    def state(self) -> str:
        """Fingerprint of the weights, hooks and contexts so far; ``unedited`` before the first write."""
        if not self._originals and self.standing is None:
            return UNEDITED_STATE
        written: dict[str, Any] = {name: tensor_checksum(self._parameters[name]) for name in sorted(self._originals)}
        return key_of(written if self.standing is None else {**written, "standing": self.standing.checksum()})

    @torch.no_grad()
    def norm_ratio(self) -> float:
        """||W_now - W_before|| / ||W_before|| over all weights written so far."""
        moved = before = 0.0
        for name, original in self._originals.items():
            moved += float((widened(self._parameters[name]) - widened(original)).norm()) ** 2
            before += float(widened(original).norm()) ** 2
        return (moved / before) ** 0.5 if before else 0.0

    def _resolved(self, name: str) -> str:
        return parameter_name(name, self._parameters)


def pack_bits(mask: torch.Tensor) -> torch.Tensor:
    """A boolean tensor as bits, eight to a byte, row by row."""
    return torch.from_numpy(numpy.packbits(mask.cpu().numpy().reshape(-1)))


def unpack_bits(packed: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The boolean tensor of ``like``'s shape and device behind packed bits."""
    bits = numpy.unpackbits(packed.cpu().numpy(), count=like.numel())
    return torch.from_numpy(bits).bool().view(like.shape).to(like.device)


@contextlib.contextmanager
def edited(
    model: nn.Module, *deltas: Delta, prompt_lengths: Sequence[int] | torch.Tensor | None = None
) -> Iterator[nn.Module]:
    """Apply deltas inside the scope and put everything back on exit, also after an exception.

    Args:
        prompt_lengths: for hooked edits the prompt tokens of each row of the batches run inside (one number serves all
            rows); by default all that is fed at prefill is prompt. See :func:`edit_hooks.hooked.attached`.

    Raises:
        EditingError: for edits of another model, and for contexts, which no model can hold.
    """
    for delta in deltas:
        require_no_context(delta)
    with AppliedDeltas(model) as applied:
        for delta in deltas:
            applied.check(delta)
        for delta in deltas:
            applied.add(delta)
        with attached(model, applied.hooked, prompt_lengths):
            yield model


def require_no_context(delta: Delta) -> None:
    """Refuse an edit that is text before the prompt where there is no prompt to change."""
    if delta.contexts:
        raise EditingError(
            "this edit is a context: it changes prompts, not the model. Ask through edited_hf, or put "
            "ContextEdit.before(question) in front of the prompt and apply delta.without_contexts, if that is not None."
        )


class PerRowAdapters:
    """Gives every row of a batch its own low-rank update: ``y_row += (x . right_row) left_row`` at each edited module.

    Nothing is patched, so prompts of different edits share one forward pass, and leaving the scope is all the undoing.
    Rows without an edit (``None``) get zeros.
    """

    def __init__(self, model: nn.Module, deltas: list[Delta | None]) -> None:
        inner = unwrapped(model)
        for delta in deltas:
            if delta is not None and (delta.dense or delta.masks):
                raise EditingError("only low-rank edits can act per row; apply this one with edited(model, delta).")
        names = sorted({name for delta in deltas if delta is not None for name in delta.factors})
        self._adapters: list[tuple[nn.Module, torch.Tensor, torch.Tensor]] = []
        for name in names:
            module = inner.get_submodule(name)
            left, right = self._stack(module, name, deltas)
            self._adapters.append((module, left, right))

    def select(self, rows: torch.Tensor) -> PerRowAdapters:
        """The adapters of some rows of the batch, in the given order."""
        chosen = object.__new__(PerRowAdapters)
        chosen._adapters = [
            (module, left[rows.to(left.device)], right[rows.to(right.device)]) for module, left, right in self._adapters
        ]
        return chosen

    @staticmethod
    def _stack(module: nn.Module, name: str, deltas: list[Delta | None]) -> tuple[torch.Tensor, torch.Tensor]:
        """Factors of all rows at one module, zero-padded to the largest rank: [rows, d, r] and [rows, f, r]."""
        weight = weight_of(module)
        dtype = torch.promote_types(weight.dtype, torch.float32)
        width_out, width_in = map_shape(module)
        factors = [delta.factors.get(name) if delta is not None else None for delta in deltas]
        rank = max(factor.left.shape[1] for factor in factors if factor is not None)
        left = torch.zeros(len(deltas), width_out, rank, dtype=dtype, device=weight.device)
        right = torch.zeros(len(deltas), width_in, rank, dtype=dtype, device=weight.device)
        for row, factor in enumerate(factors):
            if factor is not None:
                left[row, :, : factor.left.shape[1]] = factor.left.to(left)
                right[row, :, : factor.right.shape[1]] = factor.right.to(right)
        return left, right

    def __enter__(self) -> PerRowAdapters:
        self._handles = []
        for module, left, right in self._adapters:

            def hook(_module: nn.Module, args: Any, output: torch.Tensor, left=left, right=right) -> torch.Tensor:  # type: ignore[no-untyped-def]
                x = args[0]
                coefficients = torch.einsum("btf,bfr->btr", x.to(right.dtype), right)
                return (output.to(left.dtype) + torch.einsum("btr,bdr->btd", coefficients, left)).to(output.dtype)

            self._handles.append(module.register_forward_hook(hook))
        return self

    def __exit__(self, *_exc: object) -> None:
        for handle in self._handles:
            handle.remove()


def parameter_name(name: str, parameters: Mapping[str, torch.Tensor]) -> str:
    """Resolve ``module.weight`` through adapter wrappers; an unknown name is an error before any write."""
    if name in parameters:
        return name
    module, _, leaf = name.rpartition(".")
    wrapped = f"{module}.base_layer.{leaf}"
    if wrapped in parameters:
        return wrapped
    raise EditingError(f"the model has no parameter {name!r}; was this edit made for another model?")


def _check_shapes(model: nn.Module, delta: Delta) -> None:
    for name, factor in delta.factors.items():
        try:
            module = model.get_submodule(name)
        except AttributeError:
            raise EditingError(f"the model has no module {name!r}; was this edit made for another model?") from None
        if (factor.left.shape[0], factor.right.shape[0]) != map_shape(module):
            raise EditingError(
                f"the edit of {name} maps {factor.right.shape[0]} -> {factor.left.shape[0]}, "
                f"the model's module {map_shape(module)[1]} -> {map_shape(module)[0]}."
            )
        if factor.transposed != is_transposed(module):
            raise EditingError(f"the edit of {name} was made for a weight stored in the other orientation.")
