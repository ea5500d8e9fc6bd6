"""Saved edits of real editors, and forgeries of them: one change each, with checksums that fit."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hook_edits import EDIT_REQUESTS, loaded
from mutations import places
from safetensors import safe_open
from safetensors.torch import save_file

from edit_hooks import Delta, load_editor
from edit_hooks.base.registry import editor_class
from edit_hooks.contract.subject import contract_settings
from edit_hooks.deltas.delta import HEADER_CHECKSUM
from edit_hooks.deltas.saving.saved import save_edits
from edit_hooks.modeling.fingerprint.identity import model_identity
from edit_hooks.modeling.fingerprint.tensor_hash import tensor_digest
from edit_hooks.utils.storage.hashing import key_of

# Name of a saved edit -> family of its model, editor, and number of steps of a stream that are summed.
EDITS: dict[str, tuple[str, str, int]] = {
    "low-rank": ("llama", "r_rome", 1),
    "transposed": ("gpt2", "r_rome", 1),
    "dense": ("llama", "ft_m", 1),
    "masked": ("llama", "rect", 1),
    "stream": ("llama", "alphaedit", 2),
    "codebook": ("llama", "grace", 2),
    "gated_predictor": ("llama", "defer", 1),
    "adapter_database": ("gpt2", "melo", 2),
    "side_memory": ("llama", "wise", 2),
    "column_memory": ("llama", "memoir", 2),
    "residual_table": ("llama", "neural_db", 2),
    "context": ("llama", "ice", 1),
    "rounds": ("llama", "mello", 2),
    "choice": ("llama", "scr", 1),
}
MISSING, NUM_FIRST = object(), 20
PARTS = ("meta", "diagnostics", "facts", "transposed", "hooked", "contexts")  # JSON in the header


def deep(levels: int) -> Any:
    """A list inside of a list, and so on."""
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


HUGE, NAN, INFINITE = 10**400, math.nan, math.inf
ODD: tuple[Any, ...] = (
    None, True, -1, 0, 3, 0.5, HUGE, -HUGE, 1e308, NAN, INFINITE, "", "x", "model.norm", "\ud800", "a" * 5000,
    [], [1], [[]], ["x"], [None], {}, {"x": 1}, deep(40), deep(500),
)  # fmt: skip


class Saved(NamedTuple):
    """The content of a saved edit."""

    header: dict[str, str]
    tensors: dict[str, torch.Tensor]


class Forgery(NamedTuple):
    """A changed copy."""

    name: str
    header: dict[str, str]
    tensors: dict[str, torch.Tensor]

    def save(self, path: Path) -> Path:
        """Write it with the checksums of its content."""
        header = {key: value for key, value in self.header.items() if key != HEADER_CHECKSUM}
        if "checksum" in header:
            header["checksum"] = self._checksum(header)
        header[HEADER_CHECKSUM] = key_of(header)
        save_file({name: tensor.clone().contiguous() for name, tensor in self.tensors.items()}, path, header)
        return path

    def _checksum(self, header: dict[str, str]) -> str:
        try:
            sums = {name: tensor_digest(tensor) for name, tensor in self.tensors.items()}
            settings = {name: json.loads(header[name]) for name in ("hooked", "contexts") if name in header}
            return key_of(sums | settings)
        except (KeyError, ValueError, RecursionError, RuntimeError):  # of what no edit can hold
            return header["checksum"]


def save_real(name: str, folder: Path) -> Path:
    """Make an edit and save it as ``lm-edit edit`` does."""
    family, editor, num_steps = EDITS[name]
    model, tokenizer = loaded(family)
    made, steps = load_editor(editor, contract_settings(editor_class(editor))), list[Delta]()
    requests = [one for one in EDIT_REQUESTS if one.subject is not None][:num_steps]
    for request in requests:
        steps += made.edit(model, tokenizer, [request], history=steps)
    delta = steps[0] if num_steps == 1 else Delta.summed(steps)
    delta.stream_state = steps[-1].stream_state
    metadata = {"model": model_identity(model, tokenizer).to_dict(), "editor": editor}
    (path,) = save_edits(folder / name, [(tuple(requests), delta)], metadata, most=1)
    return path


def read(path: Path) -> Saved:
    with safe_open(path, framework="pt") as opened:
        return Saved(dict(opened.metadata()), {name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118


def forgeries(saved: Saved) -> Iterator[Forgery]:
    """All single changes of a saved edit."""
    yield from _of_header(saved)
    for part in PARTS:
        if part in saved.header:
            yield from _of_json(saved, part)
    yield from _of_tensors(saved)


def _of_header(saved: Saved) -> Iterator[Forgery]:
    for name in (*PARTS, "checksum", "format", "more"):
        for text in ("", "{", "null", "[]", "{}", "7", '"x"', "[" * 5000):
            yield Forgery(f"header {name}={text[:9]}", {**saved.header, name: text}, saved.tensors)
        if name in saved.header:
            yield Forgery(f"header without {name}", _without(saved.header, name), saved.tensors)


def _of_json(saved: Saved, part: str) -> Iterator[Forgery]:
    """Every field in turn; of the many settings and parts of a model inside of ``meta``, one in nine."""
    for number in range(len(list(places(json.loads(saved.header[part]))))):
        if part == "meta" and number > NUM_FIRST and number % 9:
            continue
        for value in (MISSING, *ODD):
            content = json.loads(saved.header[part])
            box, key = list(places(content))[number]
            if value is MISSING:
                del box[key]
            else:
                box[key] = value
            shown = "a number" if isinstance(value, int) else "nested" if isinstance(value, list) else repr(value)[:20]
            yield Forgery(f"{part} {number} {key}={shown}", {**saved.header, part: json.dumps(content)}, saved.tensors)


def _of_tensors(saved: Saved) -> Iterator[Forgery]:
    for name, tensor in saved.tensors.items():
        for change, make in TENSOR_CHANGES.items():
            try:
                changed = make(tensor.clone())
            except (RuntimeError, IndexError, TypeError):  # not of this tensor
                continue
            tensors = _without(saved.tensors, name) if changed is None else {**saved.tensors, name: changed}
            yield Forgery(f"tensor {name} {change}", saved.header, tensors)
        for other in (
            f"{name}x",
            f"x/{name}",
            name.partition("/")[2],
            f"hook/{name}",
            f"carry/{name}",
            f"dense/{name}",
        ):
            yield Forgery(f"tensor {name} as {other}", saved.header, {**_without(saved.tensors, name), other: tensor})
            yield Forgery(f"tensor {name} and {other}", saved.header, {**saved.tensors, other: tensor})


def _filled(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def fill(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[0] = value
        return tensor

    return fill


TENSOR_CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "missing": lambda tensor: None,
    "half": lambda tensor: tensor.half(),
    "double": lambda tensor: tensor.double(),
    "float8": lambda tensor: tensor.float().to(torch.float8_e4m3fn),
    "whole": lambda tensor: tensor.long(),
    "small": lambda tensor: tensor.to(torch.int8),
    "bytes": lambda tensor: tensor.to(torch.uint8),
    "flags": lambda tensor: tensor.bool(),
    "complex": lambda tensor: tensor.to(torch.complex64),
    "NaN": _filled(math.nan),
    "infinity": _filled(math.inf),
    "negative": _filled(-1),
    "large": _filled(2**40),
    "very large": lambda tensor: torch.full_like(tensor, 1e38),
    "zero": lambda tensor: tensor * 0,
    "no entry": lambda tensor: tensor[:0],
    "shorter": lambda tensor: tensor[:-1],
    "longer": lambda tensor: torch.cat([tensor, tensor[:1]]),
    "narrower": lambda tensor: tensor[:, :-1],
    "transposed": lambda tensor: tensor.T if tensor.dim() > 1 else None,
    "flat": lambda tensor: tensor.reshape(-1),
    "one more dimension": lambda tensor: tensor[None],
    "a number": lambda tensor: tensor.reshape(-1)[0],
}


def _without(mapping: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if key != name}
