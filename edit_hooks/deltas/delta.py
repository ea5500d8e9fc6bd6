"""`Delta`: an edit as a value that can be applied, undone, saved, loaded and used per row of a batch."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from edit_hooks.deltas.context_edit import ContextEdit
from edit_hooks.deltas.hook_edit import HookEdit
from edit_hooks.modeling.fingerprint import tensor_checksum
from edit_hooks.modeling.tensors import unpack_bits, write_tensors
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.hashing import key_of

FORMAT = "lm-eval-editing/delta/1"


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


@dataclass(eq=False)
class Delta:
    """An edit as a value: new weights, hooks on modules, text before the prompt, or several of these.

    Compared and hashed by identity.

    Attributes:
        factors: module name -> low-rank update of its weight.
        dense: parameter name -> dense update in the stored orientation.
        masks: module name -> which entries of its factor's update are written (packed bits, stored orientation, row by
            row); modules without a mask are written whole.
        hooked: what acts through hooks while the model runs (a codebook, a side memory).
        contexts: what is put before prompts, one per fact.
        stream_state: tensors that later steps of a stream need from this one (saved with it, not part of the update).
        diagnostics: what happened while the edit was made (JSON-able): losses, steps, norms, warnings.
        meta: what the edit is (JSON-able): editor, configuration, request(s), base model fingerprint.
        intermediates: tensors kept for inspection on request (keys, values); never saved.
    """

    factors: dict[str, Factor] = field(default_factory=dict)
    dense: dict[str, torch.Tensor] = field(default_factory=dict)
    masks: dict[str, torch.Tensor] = field(default_factory=dict)
    hook_edit: HookEdit | None = None
    contexts: tuple[ContextEdit, ...] = ()
    stream_state: dict[str, torch.Tensor] = field(default_factory=dict)
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
        return self.hook_edit is None and not self.contexts

    @property
    def writes(self) -> list[str]:
        """What the edit changes: ``weights``, ``hooks``, ``context``."""
        parts = {"weights": self.parameter_names, "hooks": self.hook_edit, "context": self.contexts}
        return [name for name, part in parts.items() if part]

    @property
    def acts_per_row(self) -> bool:
        """Whether the edit can act on some rows of a batch only, nothing being written."""
        return not self.dense and not self.masks and (self.hook_edit is None or self.hook_edit.mixes_rows)

    @property
    def runtime_part(self) -> Delta | None:
        """What is left of the edit once its weights are written: hooks and contexts; ``None`` without either."""
        return None if self.weights_only else Delta(hook_edit=self.hook_edit, contexts=self.contexts)

    @property
    def without_contexts(self) -> Delta | None:
        """The edit on prompts that hold its context already; ``None`` when nothing is left."""
        if not self.contexts:
            return self
        rest = replace(self, contexts=())
        return rest if rest.parameter_names or rest.hook_edit else None

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
        for name, update in self.dense.items():  # a sum of edits may hold both kinds at one parameter
            updates[name] = update + updates[name] if name in updates else update
        return updates

    @property
    def parameter_names(self) -> list[str]:
        """Names of the parameters the delta changes."""
        return list(dict.fromkeys([*self.dense, *(f"{name}.weight" for name in self.factors)]))

    @property
    def rank(self) -> int:
        """Largest rank of the factors; 0 without factors."""
        return max((factor.left.shape[1] for factor in self.factors.values()), default=0)

    @property
    def _tensors(self) -> dict[str, torch.Tensor]:
        """All tensors under the names they are saved with."""
        tensors = {f"dense/{name}": tensor for name, tensor in self.dense.items()}
        tensors |= {f"mask/{name}": tensor for name, tensor in self.masks.items()}
        tensors |= {f"carry/{name}": tensor for name, tensor in self.stream_state.items()}
        for name, factor in self.factors.items():
            tensors[f"left/{name}"], tensors[f"right/{name}"] = factor.left, factor.right
        if self.hook_edit is not None:
            tensors |= {f"hook/{name}": tensor for name, tensor in self.hook_edit.tensors.items()}
        return tensors

    @property
    def _settings(self) -> dict[str, Any]:
        """What is not tensors: the hooks' kind and settings, and the contexts; empty for edits of weights."""
        found: dict[str, Any] = {}
        if self.hook_edit is not None:
            found["hooked"] = {"kind": self.hook_edit.kind, "settings": self.hook_edit.settings}
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
        total.hook_edit = HookEdit.composed([delta.hook_edit for delta in deltas if delta.hook_edit is not None])
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
            delta.hook_edit = HookEdit(**json.loads(header["hooked"]))
        transposed = set(json.loads(header["transposed"]))
        for name, tensor in tensors.items():
            kind, _, target = name.partition("/")
            if kind == "dense":
                delta.dense[target] = tensor
            elif kind == "mask":
                delta.masks[target] = tensor
            elif kind == "carry":
                delta.stream_state[target] = tensor
            elif kind == "hook" and delta.hook_edit is not None:
                delta.hook_edit.tensors[target] = tensor
            elif kind == "left":
                delta.factors[target] = Factor(tensor, tensors[f"right/{target}"], target in transposed)
        if delta.checksum() != header.get("checksum"):
            raise EditingError(f"the edit in {path} is damaged (checksum differs).")
        return delta
