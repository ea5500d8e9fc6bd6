"""Editors that post-process the updates of another editor, named in their configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn
from transformers import PreTrainedTokenizerBase

from edit_hooks.base.config import EditorConfig, config_field
from edit_hooks.base.editor import Editor
from edit_hooks.base.shipped import shipped_config
from edit_hooks.deltas.apply import parameter_name
from edit_hooks.deltas.delta import Delta
from edit_hooks.modeling.architectures import unwrapped
from edit_hooks.modeling.tensors import at_least_float32
from edit_hooks.utils.errors import EditingError


@dataclass(kw_only=True)
class WrapperConfig(EditorConfig):
    """``layers``, ``seed`` and ``engine`` go to the base editor as well; its own settings go into base_settings."""

    base: str = config_field("the editor whose update is post-processed", default="memit")
    base_settings: dict[str, Any] = config_field("its settings, over its shipped configuration", default_factory=dict)


class WrapperEditor(Editor):
    """Base of the post-processing editors; capabilities are those of the base editor."""

    config_class: ClassVar[type[EditorConfig]] = WrapperConfig
    config_folders: ClassVar[tuple[str, ...]] = ()
    supports_joint = True

    def __init__(self, overrides: Mapping[str, Any] | None = None) -> None:
        from edit_hooks.base.registry import editor_class  # the registry knows the editors, not the other way round

        super().__init__(overrides)
        config: Any = self.config_class.from_mapping(self.overrides)
        chosen = editor_class(config.base)
        if issubclass(chosen, WrapperEditor):
            raise EditingError(f"base={config.base!r} itself post-processes another editor; name that one directly.")
        if chosen.writes != ("weights",):
            raise EditingError(
                f"base={config.base!r} changes {' and '.join(chosen.writes)}; an editor of weights is needed."
            )
        shared: dict[str, Any] = {
            name: self.overrides[name] for name in ("layers", "seed", "engine") if name in self.overrides
        }
        self.base: Editor = chosen({**config.base_settings, **shared})
        self.supports_joint = self.base.supports_joint  # type: ignore[misc]
        self.needs_subject = self.base.needs_subject  # type: ignore[misc]

    def config_for(self, model: nn.Module) -> EditorConfig:
        return self._with_base(self.base.config_for(model), model)

    def complete(self, config: Any, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> Any:
        return self._with_base(self.base.resolve(model, tokenizer), model)

    def resolve(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> EditorConfig:
        config = super().resolve(model, tokenizer)
        self.base.resolve(model, tokenizer)  # after adopt(): whatever the base reads from the model, it reads now
        return config

    def adopt(self, model: nn.Module, settings: Mapping[str, Any]) -> None:
        inner = unwrapped(model)
        self.base.adopt(inner, settings["base_settings"])
        self._resolved[inner] = self._with_base(self.base._resolved[inner], inner)

    def _with_base(self, base: EditorConfig, model: nn.Module) -> EditorConfig:
        """Our configuration with the base's in full; a shipped file of ours says nothing about the base."""
        shipped = shipped_config(self.config_folders, unwrapped(model).config)
        config = self.config_class.from_mapping({**shipped, **self.overrides})
        settings = {item.name: getattr(base, item.name) for item in dataclasses.fields(base)}
        return dataclasses.replace(
            config,
            layers=base.layers,
            seed=base.seed,
            engine=base.engine,
            base_settings=settings,  # type: ignore[call-arg]
        )

    def describe(self, model: nn.Module, delta: Delta, config: EditorConfig) -> None:
        """Put our name, configuration and the size of what is really written on a post-processed delta."""
        parameters = dict(unwrapped(model).named_parameters())
        delta.meta |= {"editor": self.name, "config": config.to_dict()}
        delta.diagnostics["update_norm_ratio"] = max(
            float(update.norm()) / float(at_least_float32(parameters[parameter_name(name, parameters)].detach()).norm())
            for name, update in delta.weights().items()
        )
