"""`Delta`: an edit as a value that can be applied, undone, saved, loaded and used per row of a batch."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from edit_hooks.architectures import is_transposed, map_shape, unwrapped, weight_of
from edit_hooks.capture import widened
from edit_hooks.errors import EditingError
from edit_hooks.files import replacing
from edit_hooks.fingerprint import key_of, tensor_checksum

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
    """An edit as a value.

    Attributes:
        factors: module name -> low-rank update of its weight.
        dense: parameter name -> dense update in the stored orientation.
        masks: module name -> which entries of its factor's update are written (packed bits, stored orientation, row by
            row); modules without a mask are written whole.
        carry: tensors that later steps of a stream need from this one (saved with it, not part of the update).
        diagnostics: what happened while the edit was made (JSON-able): losses, steps, norms, warnings.
        meta: what the edit is (JSON-able): editor, configuration, request(s), base model fingerprint.
        intermediates: tensors kept for inspection on request (keys, values); never saved.
    """

    factors: dict[str, Factor] = field(default_factory=dict)
    dense: dict[str, torch.Tensor] = field(default_factory=dict)
    masks: dict[str, torch.Tensor] = field(default_factory=dict)
    carry: dict[str, torch.Tensor] = field(default_factory=dict)
    diagnostics: dict[str, Any] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    intermediates: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def is_low_rank(self) -> bool:
        """Whether the edit is made of whole factors only, so that it can act per row of a batch."""
        return not self.dense and not self.masks

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
        return tensors

    @classmethod
    def summed(cls, deltas: Sequence[Delta]) -> Delta:
        """One delta with the updates of all: factors side by side (ranks add up), dense and masked updates added."""
        total = cls(diagnostics={"parts": [delta.diagnostics for delta in deltas]})
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
        return key_of({name: [list(t.shape), str(t.dtype), tensor_checksum(t)] for name, t in self._tensors.items()})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write tensors and metadata to one safetensors file (temporary name first, then renamed)."""
        path = Path(path)
        header = {
            "format": FORMAT,
            "meta": json.dumps(self.meta),
            "diagnostics": json.dumps(self.diagnostics),
            "transposed": json.dumps([name for name, factor in self.factors.items() if factor.transposed]),
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
        transposed = set(json.loads(header["transposed"]))
        for name, tensor in tensors.items():
            kind, _, target = name.partition("/")
            if kind == "dense":
                delta.dense[target] = tensor
            elif kind == "mask":
                delta.masks[target] = tensor
            elif kind == "carry":
                delta.carry[target] = tensor
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

    Every parameter name is resolved and every shape checked before the first write. Each sum W + update is formed in at
    least float32 and rounded once to the weight's dtype, so a stream of deltas rounds once per step.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = unwrapped(model)
        self._parameters = dict(self.model.named_parameters())
        self._originals: dict[str, torch.Tensor] = {}

    def __enter__(self) -> AppliedDeltas:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.restore()

    def check(self, delta: Delta) -> None:
        """Raise EditingError when a delta does not fit this model."""
        _check_shapes(self.model, delta)
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

    @torch.no_grad()
    def restore(self) -> None:
        """Put the original weights back."""
        for name, original in self._originals.items():
            self._parameters[name].copy_(original)
        self._originals.clear()

    def state(self) -> str:
        """Fingerprint of the weights written so far; ``unedited`` before the first write."""
        if not self._originals:
            return UNEDITED_STATE
        return key_of({name: tensor_checksum(self._parameters[name]) for name in sorted(self._originals)})

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
def edited(model: nn.Module, *deltas: Delta) -> Iterator[nn.Module]:
    """Apply deltas inside the scope and put the original weights back on exit, also after an exception."""
    with AppliedDeltas(model) as applied:
        for delta in deltas:
            applied.check(delta)
        for delta in deltas:
            applied.add(delta)
        yield model


class PerRowAdapters:
    """Gives every row of a batch its own low-rank edit: ``y_row += (x . right_row) left_row`` at each edited module.

    Nothing is patched, so prompts of different edits share one forward pass, and leaving the scope is all the undoing.
    Rows without an edit (``None``) get zeros.
    """

    def __init__(self, model: nn.Module, deltas: list[Delta | None]) -> None:
        inner = unwrapped(model)
        for delta in deltas:
            if delta is not None and not delta.is_low_rank:
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
