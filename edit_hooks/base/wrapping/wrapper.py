"""Base classes of editors that wrap another editor, above all of those that post-process its updates."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from edit_hooks.base.config import EditorConfig, config_field
from edit_hooks.base.editor import Editor
from edit_hooks.base.footprint import Footprint, dense_bytes
from edit_hooks.base.job import ConfigT, EditJob
from edit_hooks.base.origin import SettingsOrigin
from edit_hooks.base.registry import editor_class
from edit_hooks.base.shipped import find_shipped
from edit_hooks.deltas.delta import Delta
from edit_hooks.modeling.architectures import unwrapped
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError

SHARED_SETTINGS = ("layers", "seed", "engine")
DENSE_AT_ONCE = 4  # float32 tensors of a weight's size: it, the update, and what is made of both


@dataclass(kw_only=True)
class WrapperConfig(EditorConfig):
    """Settings of a post-processing editor.

    ``layers``, ``seed`` and ``engine`` also apply to the base editor; its other settings are in ``base_settings``.
    """

    base: str = config_field("the editor whose update is post-processed", default="memit")
    base_settings: dict[str, Any] = config_field("its settings, over its shipped configuration", default_factory=dict)


WrapperConfigT = TypeVar("WrapperConfigT", bound=WrapperConfig)


class EditorOnBase(Editor[ConfigT]):
    """An editor that has another one, ``base``, whose capabilities and answers are its own where it adds nothing."""

    base: Editor[Any]

    def _use(self, base: Editor[Any]) -> None:
        self.base = base
        self.needs_subject, self.supports_joint = base.needs_subject, base.supports_joint
        self.edits_quantized = base.edits_quantized

    def known_contexts(self, model: PreTrainedModel | None = None) -> Sequence[str]:
        return self.base.known_contexts(model)

    def check_request(
        self, tokenizer: PreTrainedTokenizerBase, request: EditRequest, model: PreTrainedModel | None
    ) -> None:
        self.base.check_request(tokenizer, request, model)

    def other_lengths(
        self, tokenizer: PreTrainedTokenizerBase, request: EditRequest, model: PreTrainedModel | None
    ) -> Mapping[str, int]:
        return self.base.other_lengths(tokenizer, request, model)

    def most_state_bytes(self, model: nn.Module) -> int | None:
        return self.base.most_state_bytes(model)


class PostProcessingEditor(EditorOnBase[WrapperConfigT]):
    """Base of post-processing editors, with the capabilities of the wrapped editor."""

    def __init__(self, overrides: Mapping[str, Any] | None = None) -> None:
        super().__init__(overrides)
        config = self.config_class.from_mapping(self.overrides)
        base_class = editor_class(config.base)
        if issubclass(base_class, PostProcessingEditor):
            raise EditingError(f"base={config.base!r} itself has another editor as its base; name that one directly.")
        if base_class.writes != ("weights",):
            raise EditingError(
                f"base={config.base!r} changes {' and '.join(base_class.writes)}; an editor of weights is needed."
            )
        shared = {name: self.overrides[name] for name in SHARED_SETTINGS if name in self.overrides}
        self._use(base_class({**self.settings_of_base(base_class, config), **shared}))

    def settings_of_base(self, base: type[Editor[Any]], config: WrapperConfigT) -> dict[str, Any]:
        """Hook: the settings that the base is made with, without the shared ones."""
        return config.base_settings

    @property
    def source_modules(self) -> tuple[str, ...]:
        return (*super().source_modules, *self.base.source_modules)

    @property
    def parts(self) -> tuple[Editor[Any], ...]:
        return (self, *self.base.parts)

    def default_config(self, model: nn.Module) -> WrapperConfigT:
        return self._with_base(self.base.default_config(model), model)

    def settings_origin(self, model: nn.Module) -> SettingsOrigin:
        """Return where the settings of both editors come from."""
        base = self.base.settings_origin(model)
        own = find_shipped(self.config_folders, unwrapped(model).config, self.overrides.get("shipped"))
        names = [name for name in self.overrides if name not in ("seed", "engine", "base_settings")]
        return dataclasses.replace(
            base,
            editor=self.name,
            base=base.editor,
            tune_editor=self.command_name,
            shipped=(own.file, *base.shipped) if own.file else base.shipped,
            guesses=tuple(dict.fromkeys([*own.guesses, *base.guesses])),
            given=tuple(dict.fromkeys([*names, *base.given])),
            settings=self.overrides,
        )

    def layer_settings(self, model: nn.Module) -> dict[str, Any]:
        return self.base.layer_settings(model)

    def check_settings(self, outline: nn.Module) -> None:
        super().check_settings(outline)
        self.base.check_settings(outline)

    def resolve_config(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, stored: Mapping[str, Any] | None = None
    ) -> WrapperConfigT:
        inner = unwrapped(model)
        if self._is_new(inner, tokenizer) or stored is not None:
            base = self.base.resolve_config(inner, tokenizer, None if stored is None else stored["base_settings"])
            self._resolved[inner] = self._with_base(base, inner)
        return self._resolved[inner]

    def drawn_settings(self, model: nn.Module) -> dict[str, Any]:
        drawn = self.base.drawn_settings(model)
        return {"base_settings": drawn} if drawn else {}

    def target_modules(self, config: WrapperConfigT, model: nn.Module) -> list[str]:
        return self.base.target_modules(self.base.default_config(model), model)

    def footprint(self, config: WrapperConfigT, model: nn.Module) -> Footprint:
        """That of the base editor, whose update is made dense, one map at a time, beside its weight in float32."""
        footprint = self.base.footprint(self.base.default_config(model), model)
        largest = max(dense_bytes(model, [name]) for name in self.target_modules(config, model))
        return dataclasses.replace(footprint, solve=max(footprint.solve, DENSE_AT_ONCE * largest))

    def num_tokens_past_target(self) -> int:
        return max(super().num_tokens_past_target(), self.base.num_tokens_past_target())

    def base_edits(self, job: EditJob[WrapperConfigT], history: Sequence[Delta] | None = None) -> list[Delta]:
        """Compute the base editor's deltas for the same job.

        Args:
            history: the earlier steps as the base editor made them; by default those of the job.
        """
        return self.base.edit(
            job.model,
            job.tokenizer,
            job.requests,
            joint=job.joint,
            history=job.history if history is None else history,
            progress=job.progress,
            measure=False,
        )

    def _with_base(self, base: EditorConfig, model: nn.Module) -> WrapperConfigT:
        """Return the configuration of this editor, including all settings of the base."""
        shipped = find_shipped(self.config_folders, unwrapped(model).config, self.overrides.get("shipped"))
        config = self.config_class.from_mapping(self.config_class.overridden(shipped.settings, self.overrides))
        settings = {item.name: getattr(base, item.name) for item in dataclasses.fields(base)}
        settings |= base.file_digests()
        return dataclasses.replace(
            config, layers=base.layers, seed=base.seed, engine=base.engine, base_settings=settings
        )
