"""What every editor is: a typed configuration and a function from requests to deltas."""

from __future__ import annotations

import abc
import dataclasses
import functools
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from edit_hooks.base.config import EditorConfig, _jsonable
from edit_hooks.base.shipped import shipped_config
from edit_hooks.deltas.delta import Delta
from edit_hooks.modeling.architectures import architecture_of, check_layers, num_layers, unwrapped
from edit_hooks.modeling.tokens import encode, join_target
from edit_hooks.request import SLOT, EditRequest, require_subjects
from edit_hooks.utils.errors import EditingError

log = logging.getLogger("lm_eval.edited_hf")


Progress = Callable[[int], None]


@dataclass
class EditJob:
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
        self.overrides = self.config_class.with_current_names(overrides or {})
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
            job = EditJob(list(requests), config, joint, list(history), progress or (lambda count: None))
            deltas = self.compute(model, tokenizer, job)
        groups = [job.requests] if joint else [[request] for request in job.requests]
        for group, delta in zip(groups, deltas, strict=True):
            delta.meta.setdefault("editor", self.name)
            self._record(delta, self.warnings(model, tokenizer, config, group, delta))
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

    def warnings(
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

    def _record(self, delta: Delta, warnings: Sequence[str]) -> None:
        if warnings:
            known = delta.diagnostics.get("warnings", [])
            delta.diagnostics["warnings"] = [*known, *(text for text in warnings if text not in known)]
        for text in warnings:
            if text not in self._said:
                self._said.add(text)
                log.warning("editor %s: %s", self.name, text)

    @abc.abstractmethod
    def compute(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, job: EditJob) -> list[Delta]:
        """The method itself."""


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
