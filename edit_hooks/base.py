"""What every editor is: a typed configuration and a function from requests to deltas."""

from __future__ import annotations

import abc
import dataclasses
import functools
import logging
import types
import typing
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Union

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from edit_hooks.architectures import architecture_of, check_layers, num_layers, unwrapped
from edit_hooks.configs import shipped_config
from edit_hooks.delta import Delta
from edit_hooks.errors import EditingError, unknown_keys_error
from edit_hooks.locate import encode, join_target, require_subjects
from edit_hooks.request import SLOT, EditRequest

log = logging.getLogger("lm_eval.edited_hf")

Progress = Callable[[int], None]


def setting(help: str, **kwargs: Any) -> Any:
    """A configuration field with its one-line help."""
    return field(metadata={"help": help}, **kwargs)


@dataclass(kw_only=True)
class EditorConfig:
    """Settings every editor has. Unknown keys and wrong types are errors; ``layers=None`` asks for a default."""

    layers: list[int] | None = setting("blocks whose rewrite module is edited, ascending", default=None)
    seed: int = setting("seed of everything that is drawn at random", default=0)
    engine: Literal["fast", "reference"] = setting(
        "fast: batched and suffix only; reference: plain loop", default="fast"
    )

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for item in dataclasses.fields(self):
            setattr(self, item.name, _coerce(getattr(self, item.name), hints[item.name], item.name))

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> EditorConfig:
        """Build from a mapping (YAML, ``editor_args``); unknown keys are errors with near misses."""
        known = {item.name for item in dataclasses.fields(cls)}
        if unknown := set(mapping) - known:
            raise unknown_keys_error("editor setting", unknown, known)
        return cls(**mapping)

    def to_dict(self) -> dict[str, Any]:
        """All settings, defaults filled in, JSON-able (tensors are described by shape and checksum)."""
        return {item.name: _jsonable(getattr(self, item.name)) for item in dataclasses.fields(self)}


@dataclass
class Job:
    """One call of an editor: the requests, the full configuration, and what the caller asked for."""

    requests: list[EditRequest]
    config: Any
    joint: bool
    history: list[Delta]
    progress: Progress


class Editor(abc.ABC):
    """Turns requests into deltas; leaves the model as it found it.

    Capabilities are class attributes that runners read; nobody compares an editor's name.

    Attributes:
        name: registry name, also of file, configuration folder and parity test.
        config_class: its typed configuration.
        config_folders: where shipped configurations are looked up, first match wins.
        needs_subject: requests must mark the subject.
        supports_joint: can write several requests into one delta.
        writes: what its edits change: ``weights``, ``hooks`` (the running model), ``context`` (the prompt).
        default_depth: relative depth of the default layer for models without a shipped configuration.
    """

    name: ClassVar[str]
    config_class: ClassVar[type[EditorConfig]]
    config_folders: ClassVar[tuple[str, ...]]
    needs_subject: ClassVar[bool] = True
    supports_joint: ClassVar[bool] = False
    writes: ClassVar[tuple[str, ...]] = ("weights",)
    default_depth: ClassVar[float] = 0.3

    def __init__(self, overrides: Mapping[str, Any] | None = None) -> None:
        self.overrides = dict(overrides or {})
        self.config_class.from_mapping(self.overrides)  # fail now, not after the model is loaded
        self._resolved: weakref.WeakKeyDictionary[nn.Module, EditorConfig] = weakref.WeakKeyDictionary()
        self._said: set[str] = set()

    def resolve(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> EditorConfig:
        """The full configuration for a model, everything drawn at random made explicit.

        Done once per model object, from the weights it has at that moment, and then kept.
        """
        inner = unwrapped(model)
        if inner not in self._resolved:
            self._resolved[inner] = self.complete(self.config_for(inner), inner, tokenizer)
        return self._resolved[inner]

    def adopt(self, model: nn.Module, settings: Mapping[str, Any]) -> None:
        """Use an earlier result of :meth:`resolve` (as ``to_dict`` gave it) for this model."""
        given = self.config_for(model)
        drawn = {name: value for name, value in settings.items() if _jsonable(getattr(given, name)) != value}
        self._resolved[unwrapped(model)] = dataclasses.replace(given, **drawn)

    def complete(self, config: Any, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> Any:
        """Hook: make explicit what an edit depends on beyond its settings (context templates)."""
        return config

    def config_for(self, model: nn.Module) -> EditorConfig:
        """The full configuration for a model: defaults, then the shipped file for this model, then the user's settings.

        The shipped file is found by the shape of the model (type, depth, width, vocabulary), not by its name.
        """
        config = unwrapped(model).config
        shipped = shipped_config(self.config_folders, config)
        merged = self.config_class.from_mapping({**shipped, **self.overrides})
        if merged.layers is None:
            merged.layers = self.default_layers(config)
            _say_depth(self.name, config.model_type, num_layers(config), tuple(merged.layers))
        check_layers(merged.layers, config)
        architecture_of(config)
        return merged

    def default_layers(self, config: Any) -> list[int]:
        """Layers for a model without a shipped configuration: one, at :attr:`default_depth`."""
        return [round(self.default_depth * (num_layers(config) - 1))]

    def edit(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        requests: Sequence[EditRequest],
        *,
        joint: bool = False,
        history: Sequence[Delta] = (),
        progress: Progress | None = None,
    ) -> list[Delta]:
        """Deltas for the requests; the model is left as it was.

        Args:
            joint: one delta that writes all requests at once, instead of one independent delta each.
            history: deltas of the earlier steps of a stream, whose sum the model's weights already hold; what an editor
                carries from step to step is in them (``Delta.carry``).
            progress: called with the number of requests finished since the last call.

        Raises:
            EditingError: before any computation, for requests or modes this editor cannot handle.
        """
        if not requests:
            return []
        if joint and not self.supports_joint:
            raise EditingError(f"editor {self.name!r} writes one request at a time; joint=True is not possible.")
        if self.needs_subject:
            require_subjects(requests, self.name)
        self.check_lengths(model, tokenizer, requests)
        config = self.resolve(model, tokenizer)
        # The harness calls models where gradients are off; editors need them whatever the caller's mode is.
        with torch.inference_mode(False), torch.enable_grad():
            job = Job(list(requests), config, joint, list(history), progress or (lambda count: None))
            deltas = self.compute(model, tokenizer, job)
        groups = [job.requests] if joint else [[request] for request in job.requests]
        for group, delta in zip(groups, deltas, strict=True):
            delta.meta.setdefault("editor", self.name)
            self._record(delta, self.remarks(model, tokenizer, config, group, delta))
        return deltas

    def check_lengths(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, requests: Sequence[EditRequest]
    ) -> None:
        """Refuse requests that do not fit into the model's positions, the longest context of :meth:`contexts` included.

        Raises:
            EditingError: naming the case and the two lengths.
        """
        limit = getattr(unwrapped(model).config, "max_position_embeddings", None)
        before = max((template.partition(SLOT)[0] for template in self.contexts(model)), key=len, default="")
        if limit is None:
            return
        for request in requests:
            length = len(encode(tokenizer, join_target(before + request.text, request.target_new)).ids) - 1
            if length > limit:
                context = ", the longest context included," if before else ""
                raise EditingError(
                    f"case {request.case_id}: prompt and target_new take {length} tokens{context} and the model has "
                    f"{limit} positions; shorten target_new or the prompt, or drop the record."
                )

    def contexts(self, model: nn.Module) -> Sequence[str]:
        """Hook: templates that are put around every prompt, as far as they are known before anything is drawn."""
        return ()

    def remarks(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        config: Any,
        requests: Sequence[EditRequest],
        delta: Delta,
    ) -> list[str]:
        """Hook: what users of a finished edit of these requests should be warned of, in sentences without numbers of
        the single edit (they are logged once each, and recorded with every edit they are true of)."""
        return []

    def _record(self, delta: Delta, remarks: Sequence[str]) -> None:
        if remarks:
            known = delta.diagnostics.get("warnings", [])
            delta.diagnostics["warnings"] = [*known, *(text for text in remarks if text not in known)]
        for text in remarks:
            if text not in self._said:
                self._said.add(text)
                log.warning("editor %s: %s", self.name, text)

    @abc.abstractmethod
    def compute(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, job: Job) -> list[Delta]:
        """The method itself."""


def _coerce(value: Any, hint: Any, name: str) -> Any:
    """Check a setting against its annotation; numbers written as text (YAML's 5e-4) become numbers."""
    if hint is Any:
        return value
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        for option in arguments:
            try:
                return _coerce(value, option, name)
            except EditingError:
                continue
    elif origin is Literal:
        if value in arguments:
            return value
    elif hint is type(None):
        if value is None:
            return None
    elif hint is bool:
        if isinstance(value, bool):
            return value
    elif hint is float:
        return _number(value, float, name, hint)
    elif hint is int:
        return _number(value, int, name, hint)
    elif origin is list:
        if isinstance(value, (list, tuple)):
            return [_coerce(entry, arguments[0], name) for entry in value]
    elif origin is dict:
        if isinstance(value, Mapping):
            return {_coerce(k, arguments[0], name): _coerce(v, arguments[1], name) for k, v in value.items()}
    elif isinstance(value, origin or hint):
        return value
    raise EditingError(f"editor setting {name!r} is {value!r}; accepted: {_spell(hint)}.")


def _number(value: Any, kind: type, name: str, hint: Any) -> Any:
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            number = kind(value)
        except ValueError:
            number = None
        if number is not None and (isinstance(value, str) or number == value):
            return number
    raise EditingError(f"editor setting {name!r} is {value!r}; accepted: {_spell(hint)}.")


def _spell(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return " or ".join(repr(option) for option in typing.get_args(hint))
    return str(getattr(hint, "__name__", hint)) if not typing.get_args(hint) else str(hint)


def _jsonable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _jsonable(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(entry) for entry in value]
    if hasattr(value, "shape"):
        return {"shape": list(value.shape), "dtype": str(value.dtype), "sum": float(value.double().sum())}
    return value


@functools.cache
def _say_depth(editor: str, model_type: str, blocks: int, layers: tuple[int, ...]) -> None:
    """Once per process: a run makes its editor more than once."""
    log.warning(
        "no configuration is shipped for this %s model of %d blocks: editor %s edits layer %s, by depth.",
        model_type,
        blocks,
        editor,
        list(layers),
    )
