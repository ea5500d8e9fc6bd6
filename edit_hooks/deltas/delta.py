"""`Delta`: an edit as a value that can be applied, reverted, saved, loaded and used for single rows of a batch."""

from __future__ import annotations

import json
import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from edit_hooks.deltas.content import check_content, check_contexts, check_facts, check_metadata, sorted_tensors
from edit_hooks.deltas.context_edit import ContextEdit
from edit_hooks.deltas.hook_edit import HookEdit
from edit_hooks.deltas.schema import Record, list_of, mapping_of, of_file, one_of, read_field, text
from edit_hooks.edit_report import Cost, EditReport, Effects, Optimization, StreamStep
from edit_hooks.modeling.fingerprint.tensor_hash import tensor_digest
from edit_hooks.modeling.tensors import read_header, read_tensors, unpack_bits, write_tensors
from edit_hooks.request import statement_of
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.files import user_path
from edit_hooks.utils.storage.hashing import key_of
from edit_hooks.utils.text.readable import readable

FORMAT = "lm-eval-editing/delta/1"
HEADER_CHECKSUM = "header_checksum"
# Entries of a header, besides the checksum of it; and what the names of tensors begin with.
HEADER = {"format", "meta", "diagnostics", "facts", "transposed", "hooked", "contexts", "checksum"}
PREFIXES = ("left", "right", "dense", "mask", "carry", "hook")
HOOKED = Record({"kind": text, "settings": mapping_of()})


@readable
class Factor(NamedTuple):
    """Low-rank update ``left @ right.T`` of a linear map R^f -> R^d.

    Attributes:
        left: [d, r].
        right: [f, r].
        transposed: the weight is stored as [f, d] (GPT-2's Conv1D).
    """

    left: torch.Tensor
    right: torch.Tensor
    transposed: bool = False

    def update(self) -> torch.Tensor:
        """The dense update in the stored orientation."""
        return self.right @ self.left.T if self.transposed else self.left @ self.right.T

    def detached(self) -> Factor:
        """The same factors in contiguous memory, without the graph that computed them."""
        return self._replace(left=self.left.detach().contiguous(), right=self.right.detach().contiguous())


class _KnownDigest(NamedTuple):
    """The digest of a tensor at one version of it."""

    tensor: torch.Tensor
    version: int
    digest: str


@dataclass(eq=False)
@readable
class Delta:
    """An edit as a value: weight updates, hooks on modules, text before the prompt, or several of these.

    Compared and hashed by identity, so a delta can be a dictionary key.

    Attributes:
        factors: module name -> low-rank update of its weight.
        dense: parameter name -> dense update in the stored orientation.
        masks: module name -> the entries of its factor's update that are written (packed bits, stored orientation, row
            by row). The update of a module without a mask is written whole.
        hook_edit: the part that acts through hooks while the model runs (a codebook, side memories, adapters).
        contexts: text for prompts, one per fact.
        stream_state: tensors that later steps of a stream need from this one, on the CPU. Saved, but not part of the
            update.
        effects: what the edit did to the model, where it was measured.
        cost: what the edit took to compute, where that is known.
        warnings: sentences about likely problems.
        unusable: request key -> reason for the requests that could not be written; the edit is that of the others.
        diagnostics: further facts of the editor (JSON-able): losses, steps, norms.
        meta: identity of the edit (JSON-able): editor, configuration, requests, base model.
        intermediates: tensors for inspection (keys, values), on request. Never saved.
    """

    factors: dict[str, Factor] = field(default_factory=dict)
    dense: dict[str, torch.Tensor] = field(default_factory=dict)
    masks: dict[str, torch.Tensor] = field(default_factory=dict)
    hook_edit: HookEdit | None = None
    contexts: tuple[ContextEdit, ...] = ()
    stream_state: dict[str, torch.Tensor] = field(default_factory=dict)
    effects: Effects = field(default_factory=Effects)
    cost: Cost = field(default_factory=Cost)
    warnings: list[str] = field(default_factory=list)
    unusable: dict[str, str] = field(default_factory=dict)
    diagnostics: dict[str, Any] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    intermediates: dict[str, torch.Tensor] = field(default_factory=dict)
    _digests: dict[str, _KnownDigest] = field(default_factory=dict, init=False, repr=False)

    @property
    def is_low_rank(self) -> bool:
        """Whether the edit consists of factors without masks only."""
        return not self.dense and not self.masks and self.runtime_part is None

    @property
    def acts_per_row(self) -> bool:
        """Whether the edit can apply to some rows of a batch and not to others, without writing any weight."""
        return not self.dense and not self.masks and (self.hook_edit is None or self.hook_edit.mixes_rows)

    @property
    def writes(self) -> list[str]:
        """The kinds of change: ``weights``, ``hooks``, ``context``."""
        changes = {"weights": self.parameter_names, "hooks": self.hook_edit, "context": self.contexts}
        return [kind for kind, content in changes.items() if content]

    @property
    def runtime_part(self) -> Delta | None:
        """The hooks and contexts, which a checkpoint cannot hold; ``None`` for an edit of weights only."""
        if self.hook_edit is None and not self.contexts:
            return None
        return Delta(hook_edit=self.hook_edit, contexts=self.contexts)

    @property
    def without_contexts(self) -> Delta | None:
        """The rest of the edit, for prompts that already hold its contexts; ``None`` if nothing else is left."""
        if not self.contexts:
            return self
        rest = replace(self, contexts=())
        return rest if rest.parameter_names or rest.hook_edit else None

    @property
    def parameter_names(self) -> list[str]:
        """Names of the changed parameters."""
        return list(dict.fromkeys([*self.dense, *(f"{name}.weight" for name in self.factors)]))

    @property
    def rank(self) -> int:
        """Largest rank of the factors; 0 without factors."""
        return max((factor.left.shape[1] for factor in self.factors.values()), default=0)

    @property
    def num_bytes(self) -> int:
        """Size of the update's tensors in bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors.values())

    def _summary(self) -> Iterator[tuple[str, object]]:
        """What the edit changes and how it went, for ``repr`` and notebooks."""
        edits = _mappings(self.meta.get("parts", [self.meta]))
        yield "editor", _one_or_all([edit.get("editor") for edit in edits])
        yield "edits", [statement_of(record) for edit in edits for record in _mappings(edit.get("requests"))]
        if self.parameter_names:
            yield "writes", self.parameter_names
        if self.factors:
            yield "rank", self.rank
        if self.hook_edit is not None:
            yield "hooks", f"{self.hook_edit.kind} at {self.hook_edit.settings.get('module')}"
        if self.contexts:
            yield "facts in the prompt", len(self.contexts)
        yield "size", f"{self.num_bytes:,} bytes"
        one = Optimization.of(self.diagnostics)
        numbers = {"steps": one.steps, "final_loss": one.final_loss, "update_norm_ratio": one.update_norm_ratio}
        yield from ((name, number) for name, number in numbers.items() if number is not None)
        if self.effects.wrecked is not None:
            yield "wrecked", self.effects.wrecked
        if self.warnings:
            yield "warnings", self.warnings

    def weights(self, except_for: Container[str] = ()) -> dict[str, torch.Tensor]:
        """Parameter name -> dense update in the stored orientation, float32 or wider.

        Args:
            except_for: names of parameters whose updates are not formed.
        """
        return {name: self.weight(name) for name in self.parameter_names if name not in except_for}

    def weight(self, parameter: str) -> torch.Tensor:
        """The dense update of one of the changed parameters."""
        module = parameter.removesuffix(".weight")
        if module not in self.factors or module == parameter:
            return self.dense[parameter]
        update = self.factors[module].update()
        if module in self.masks:
            update = update * unpack_bits(self.masks[module], update)
        # In a sum, one step can be dense and another low-rank at the same weight.
        return self.dense[parameter] + update if parameter in self.dense else update

    @classmethod
    def summed(cls, deltas: Iterable[Delta]) -> Delta:
        """One delta equal to all of them applied in this order.

        Factors are concatenated (ranks add up), dense and masked updates are added, hook edits are combined by their
        kind and contexts are concatenated. A weight's updates are on the device of its first one. The deltas are read
        one by one: of dense updates, memory holds their sum and the current one.

        Raises:
            EditingError: for hook edits of several kinds or at several modules.
        """
        total = cls()
        summands: list[tuple[dict[str, Any], dict[str, Any]]] = []
        hook_edits: list[HookEdit | None] = []
        factors: dict[str, list[Factor]] = {}
        for delta in deltas:
            summands.append((delta.report().to_json(), delta.meta))
            hook_edits.append(delta.hook_edit)
            total.contexts += delta.contexts
            # A masked update has no low rank, so a delta with masks is added as a dense one.
            dense, low_rank = (delta.weights(), {}) if delta.masks else (delta.dense, delta.factors)
            for name, update in dense.items():
                so_far = total.dense.get(name)
                total.dense[name] = update if so_far is None else so_far + update.to(so_far.device)
            for name, factor in low_rank.items():
                factors.setdefault(name, []).append(factor)
        total.factors = {name: _joined(of_weight) for name, of_weight in factors.items()}
        total.hook_edit = HookEdit.combine(hook_edits)
        total.diagnostics = {"parts": [facts for facts, _ in summands]}
        total.meta = {"parts": [meta for _, meta in summands]}
        return total

    def report(self, editor: str | None = None, key: str | None = None, step: StreamStep | None = None) -> EditReport:
        """The facts about the edit.

        Args:
            editor: its name. key: identity of the requests. step: the step of a stream that the edit is.
        """
        return EditReport(
            editor=editor,
            key=key,
            step=step,
            effects=self.effects,
            cost=self.cost,
            warnings=tuple(self.warnings),
            diagnostics=self.diagnostics,
        )

    def check_finite(self) -> None:
        """Raise EditingError if the update holds NaN or infinity."""
        for name, tensor in self._tensors.items():
            if not torch.isfinite(tensor).all():
                part = name.partition("/")[2]  # of the model, without the prefix in the file
                raise EditingError(f"the update of {part} is not finite; lower the learning rate or use float32.")

    def checksum(self) -> str:
        """SHA-256 (hex) over the tensors, hook settings and contexts: the identity of the edit's effect."""
        digests: dict[str, Any] = {name: self._digest(name, tensor) for name, tensor in self._tensors.items()}
        return key_of(digests | self._settings)

    def _digest(self, name: str, tensor: torch.Tensor) -> str:
        """The digest of a tensor, the known one while the tensor has not changed."""
        known = self._digests.get(name)
        if known is not None and known.tensor is tensor and known.version == tensor._version:
            return known.digest
        return tensor_digest(tensor)

    def know_copy(self, on_host: Delta) -> None:
        """Read the digests of the tensors from a copy of the edit on the CPU, once for both.

        A tensor on a GPU would be copied again for every checksum.
        """
        copies = on_host._tensors
        for name, tensor in self._tensors.items():
            copy = copies[name]
            if copy is not tensor and not (tensor.is_inference() or copy.is_inference()):  # those have no versions
                digest = tensor_digest(copy)
                self._digests[name] = _KnownDigest(tensor, tensor._version, digest)
                on_host._digests[name] = _KnownDigest(copy, copy._version, digest)

    # ------------------------------------------------------------------------------------------------- files

    def save(self, path: str | os.PathLike[str], *, absolute_paths: bool = True) -> None:
        """Write tensors and metadata to one safetensors file, atomically.

        Args:
            absolute_paths: name the models behind facts by absolute paths, for runs in other working directories.

        Raises:
            EditingError: for numbers that are not finite, which no reader accepts.
            OSError: if the file cannot be written.
        """
        self.check_finite()
        contexts = self._absolute_contexts() if absolute_paths else self.contexts
        if contexts != self.contexts:
            replace(self, contexts=contexts).save(path, absolute_paths=False)
            return
        header = {
            "format": FORMAT,
            "meta": json.dumps(self.meta),
            "diagnostics": json.dumps(self.diagnostics),
            **({"facts": json.dumps(facts)} if (facts := self._facts) else {}),
            "transposed": json.dumps([name for name, factor in self.factors.items() if factor.transposed]),
            **{name: json.dumps(value) for name, value in self._settings.items()},
            "checksum": self.checksum(),
        }
        write_tensors(Path(path), self._tensors, {**header, HEADER_CHECKSUM: key_of(header)})

    def _absolute_contexts(self) -> tuple[ContextEdit, ...]:
        contexts = []
        for context in self.contexts:
            if context.memory is not None and context.memory.digest:  # models of a folder
                folder = str(user_path(context.memory.artifact, "models of the edit").resolve())
                context = replace(context, memory=replace(context.memory, artifact=folder))
            contexts.append(context)
        return tuple(contexts)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Delta:
        """Read a file written by :meth:`save`. No code named by the file is imported.

        Raises:
            EditingError: the file is missing, damaged or of another kind, or a field holds what no edit of its kind
                does, as numbers that are not finite.
        """
        header, tensors = read_tensors(path, "edit")
        _check_header(header, path)
        with of_file(f"the edit in {path} cannot be used"):
            delta = cls._from_file(header, tensors)
        if delta.checksum() != header.get("checksum"):
            raise EditingError(f"the edit in {path} is damaged (checksum differs).")
        return delta

    @classmethod
    def load_meta(cls, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Read :attr:`meta` from a file written by :meth:`save`, and no tensor.

        Raises:
            EditingError: as :meth:`load`; a damaged tensor is not noticed.
        """
        header = read_header(path, "edit")
        _check_header(header, path)
        with of_file(f"the edit in {path} cannot be used"):
            meta: dict[str, Any] = read_field(header, "meta", strict=False)
            check_metadata(meta)
        return meta

    @classmethod
    def _from_file(cls, header: Mapping[str, str], tensors: Mapping[str, torch.Tensor]) -> Delta:
        if unknown := sorted(header.keys() - HEADER):
            raise EditingError(f"its header has the unknown entry {unknown[0]!r}.")
        by_prefix = sorted_tensors(tensors, PREFIXES)
        left, right = by_prefix["left"], by_prefix["right"]
        if lone := sorted(left.keys() ^ right.keys()):
            raise EditingError(f"tensor {'right' if lone[0] in left else 'left'}/{lone[0]} is missing.")
        transposed = read_field(header, "transposed")
        list_of(one_of(*left))("transposed", transposed)
        delta = cls(
            factors={name: Factor(left[name], right[name], name in transposed) for name in left},
            dense=by_prefix["dense"],
            masks=by_prefix["mask"],
            stream_state=by_prefix["carry"],
            diagnostics=read_field(header, "diagnostics", strict=False),
            meta=read_field(header, "meta", strict=False),
        )
        if "facts" in header:
            facts = check_facts(read_field(header, "facts", strict=False))
            delta.effects, delta.cost = Effects.from_json(facts.get("effects", {})), Cost(**facts.get("cost", {}))
            delta.warnings, delta.unusable = facts.get("warnings", []), facts.get("unusable", {})
        if "contexts" in header:
            delta.contexts = tuple(map(ContextEdit.from_dict, check_contexts(read_field(header, "contexts"))))
        if "hooked" in header:
            hooked = read_field(header, "hooked")
            HOOKED("hooked", hooked)
            delta.hook_edit = HookEdit(tensors=by_prefix["hook"], **hooked)
        elif by_prefix["hook"]:
            raise EditingError("it has tensors of hooks, but its header has no 'hooked'.")
        check_content(delta)
        return delta

    @property
    def _tensors(self) -> dict[str, torch.Tensor]:
        """All saved tensors by their names in the file."""
        tensors = {f"dense/{name}": tensor for name, tensor in self.dense.items()}
        tensors |= {f"mask/{name}": tensor for name, tensor in self.masks.items()}
        tensors |= {f"carry/{name}": tensor for name, tensor in self.stream_state.items()}
        for name, factor in self.factors.items():
            tensors[f"left/{name}"], tensors[f"right/{name}"] = factor.left, factor.right
        if self.hook_edit is not None:
            tensors |= {f"hook/{name}": tensor for name, tensor in self.hook_edit.tensors.items()}
        return tensors

    @property
    def _facts(self) -> dict[str, Any]:
        """The saved facts that every edit can have, JSON-able; absent ones are left out."""
        facts = {
            "effects": self.effects.to_json(),
            "cost": self.cost.to_json(),
            "warnings": self.warnings,
            "unusable": self.unusable,
        }
        return {name: value for name, value in facts.items() if value}

    @property
    def _settings(self) -> dict[str, Any]:
        """The saved part of the effect that is not in tensors: hook kind and settings, and contexts."""
        settings: dict[str, Any] = {}
        if self.hook_edit is not None:
            settings["hooked"] = {"kind": self.hook_edit.kind, "settings": self.hook_edit.settings}
        if self.contexts:
            settings["contexts"] = [context.to_dict() for context in self.contexts]
        return settings


def _check_header(header: dict[str, str], path: str | os.PathLike[str]) -> None:
    """Refuse files of another kind and damaged headers; the header's checksum is removed."""
    if header.get("format") != FORMAT:
        raise EditingError(f"{path} is not a saved edit (format {header.get('format')!r}, want {FORMAT!r}).")
    if header.pop(HEADER_CHECKSUM, None) != key_of(header):
        raise EditingError(f"the edit in {path} is damaged (checksum of the header differs).")


def _mappings(records: object) -> list[Mapping[str, Any]]:
    """The mappings in a list of a file that may hold anything."""
    return [record for record in records if isinstance(record, Mapping)] if isinstance(records, list) else []


def _one_or_all(values: Sequence[object]) -> object:
    """The value that all share, else the distinct ones."""
    distinct = list(dict.fromkeys(map(str, values)))
    return distinct[0] if len(distinct) == 1 else distinct


def _joined(factors: Sequence[Factor]) -> Factor:
    """The columns of all, on the device of the first."""
    if len(factors) == 1:
        return factors[0]
    device = factors[0].left.device
    left, right = (
        torch.cat([part.to(device) for part in parts], 1)
        for parts in ([factor.left for factor in factors], [factor.right for factor in factors])
    )
    return Factor(left, right, factors[-1].transposed)
