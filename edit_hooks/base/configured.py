"""Settings of an editor for a model: given, shipped, chosen by depth, or drawn with the seed."""

from __future__ import annotations

import abc
import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Generic

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from edit_hooks.base.config import FILE_DIGESTS
from edit_hooks.base.job import ConfigT
from edit_hooks.base.model_support import TargetsOf, nearest_editable, require_support
from edit_hooks.base.origin import UNNAMED, LayersFrom, SettingsOrigin
from edit_hooks.base.shipped import ShippedSettings, find_file, find_shipped
from edit_hooks.modeling.architectures import architecture_of, check_layers, num_layers, unwrapped
from edit_hooks.utils.plugins import is_own


class ConfiguredEditor(abc.ABC, Generic[ConfigT]):
    """The part of :class:`edit_hooks.base.editor.Editor` that resolves settings; its attributes are described there."""

    name: str
    config_class: type[ConfigT]
    config_folders: tuple[str, ...] = ()
    writes: tuple[str, ...] = ("weights",)
    default_depth: float = 0.3

    def __init__(self, overrides: Mapping[str, Any] | None = None) -> None:
        self.overrides = dict(overrides or {})
        config = self.config_class.from_mapping(self.overrides)  # fail fast: the model is not loaded yet
        config.check_given(self.overrides)
        if config.shipped is not None:
            find_file(self.config_folders, config.shipped)
        self._append_eos = getattr(config, "append_eos", False)  # read for every request
        self._resolved: weakref.WeakKeyDictionary[nn.Module, ConfigT] = weakref.WeakKeyDictionary()
        self._tokenizers: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()

    @property
    def command_name(self) -> str | None:
        """The editor as a command names it: its name, or ``package.module:Class`` for a class of another package.

        ``None`` for a class that no command can import, as one of a notebook.
        """
        cls = type(self)
        if is_own(cls):
            return self.name
        return (
            None if cls.__module__ == "__main__" or "." in cls.__qualname__ else f"{cls.__module__}:{cls.__qualname__}"
        )

    def default_config(self, model: nn.Module) -> ConfigT:
        """Return the configuration for a model before sampling.

        The user's settings override the shipped file, which overrides the defaults. The shipped file is selected by the
        shape of the model (type, depth, width, vocabulary), not by its name; the setting ``shipped`` names another one.
        """
        model_config = unwrapped(model).config
        shipped = find_shipped(self.config_folders, model_config, self.overrides.get("shipped"))
        config = shipped.under(self.overrides, self.config_class)
        is_default = config.layers is None
        if config.layers is None:
            config.layers = self.default_layers(model_config)
        check_layers(config.layers, model_config)
        inner = unwrapped(model)
        if is_default and architecture_of(inner).is_mixed:
            config.layers = nearest_editable(inner, config.edited_layers, self._targets_of(config, inner))
        return config

    def _targets_of(self, config: ConfigT, model: PreTrainedModel) -> TargetsOf:
        return lambda layers: self.target_modules(dataclasses.replace(config, layers=layers), model)

    def settings_origin(self, model: nn.Module) -> SettingsOrigin:
        """Return where the settings for a model come from; not for editors of contexts alone."""
        model_config = unwrapped(model).config
        shipped = find_shipped(self.config_folders, model_config, self.overrides.get("shipped"))
        config = self.default_config(model)
        return SettingsOrigin(
            editor=self.name,
            model=f"{model_config.model_type} model of {num_layers(model_config)} blocks",
            pretrained=getattr(model_config, "_name_or_path", None) or UNNAMED,
            shipped=(shipped.file,) if shipped.file else (),
            given=tuple(name for name in self.overrides if name not in ("seed", "engine")),
            settings=self.overrides,
            layers=tuple(config.edited_layers),
            layers_from=self._layers_from(shipped.settings),
            guesses=(*shipped.guesses, *self.guesses(config)),
            by_rule=shipped.kin is not None,
            tune_editor=self.command_name,
        )

    def _layers_from(self, shipped: Mapping[str, Any]) -> LayersFrom:
        if not self.names_layers(self.config_class.overridden(shipped, self.overrides)):
            return "by depth"
        return "given" if self.names_layers(self.overrides) else "shipped"

    def names_layers(self, settings: Mapping[str, Any]) -> bool:
        """Hook: whether settings, shipped or given, determine the edited blocks; otherwise they are chosen by depth."""
        return settings.get("layers") is not None

    def layer_settings(self, model: nn.Module) -> dict[str, Any]:
        """Hook: the settings that determine the blocks edited in a model, for a search around them."""
        return {"layers": self.default_config(model).layers}

    def guesses(self, config: ConfigT) -> Sequence[str]:
        """Hook: clauses about settings besides ``layers`` that were not chosen for the model."""
        return ()

    def check_settings(self, outline: nn.Module) -> None:
        """Check the user's settings and the files that they name, before any weight is loaded.

        Args:
            outline: the model without weights: its configuration, modules and shapes.

        Raises:
            EditingError: for settings that do not fit the model, and for inputs that are missing or unreadable.
        """
        self.check_inputs(self.default_config(outline))

    def check_inputs(self, config: ConfigT) -> None:
        """Hook: check the inputs besides the model that :meth:`prepare` will read."""

    def resolve_config(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, stored: Mapping[str, Any] | None = None
    ) -> ConfigT:
        """Return the full configuration for a model, with sampled settings made explicit.

        Resolved once per model object and tokenizer, from the weights at the first call, and cached.

        Args:
            stored: an earlier result for this model, as a mapping from ``to_dict``; its sampled settings are reused.
        """
        inner = unwrapped(model)
        if self._is_new(inner, tokenizer) or stored is not None:
            config = self.default_config(inner)
            if stored is None:
                config = self.fill_sampled_settings(config, inner, tokenizer)
            else:
                explicit = config.to_dict()
                sampled = {
                    name: value for name, value in stored.items() if name != FILE_DIGESTS and explicit[name] != value
                }
                config = dataclasses.replace(config, **sampled)
            if self.writes != ("context",) and not require_support(inner).fast and config.engine == "fast":
                config = dataclasses.replace(config, engine="reference")
            self.prepare(config, inner, tokenizer)
            self._resolved[inner] = config
        return self._resolved[inner]

    def _is_new(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> bool:
        """Whether the configuration was not resolved for this model and tokenizer; the tokenizer is remembered."""
        known = self._tokenizers.get(model)
        self._tokenizers[model] = weakref.ref(tokenizer)
        return model not in self._resolved or known is None or known() is not tokenizer

    def default_layers(self, model_config: Any) -> list[int]:
        """Hook: layers for a model without a shipped configuration.

        By default one layer, at the relative depth :attr:`default_depth`.
        """
        return [round(self.default_depth * (num_layers(model_config) - 1))]

    def fill_sampled_settings(
        self, config: ConfigT, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
    ) -> ConfigT:
        """Hook: return the configuration with sampled settings (context templates)."""
        return config

    def drawn_settings(self, model: nn.Module) -> dict[str, Any]:
        """What was given for the settings that were drawn with the seed, as ``{"context_templates": "sampled_6"}``.

        Runs that differ in a draw alone have the same settings. The configuration must be resolved for the model.
        """
        inner = unwrapped(model)
        given, resolved = self.default_config(inner).to_dict(), self._resolved[inner].to_dict()
        return {name: value for name, value in given.items() if value != resolved[name]}

    def prepare(self, config: ConfigT, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Hook: compute the statistics of the unedited model that edits need."""

    def known_config(self, model: PreTrainedModel | None = None) -> ConfigT:
        """Return the configuration as far as it is known: resolved for a model, else without sampled settings.

        Without a model, settings of its shipped file are missing.
        """
        if model is not None and model in self._resolved:
            return self._resolved[model]
        chosen = self.overrides.get("shipped")
        shipped = (
            ShippedSettings(None, {}, {}) if model is None else find_shipped(self.config_folders, model.config, chosen)
        )
        return shipped.under(self.overrides, self.config_class)

    def target_modules(self, config: ConfigT, model: nn.Module) -> list[str]:
        """Hook: names of the linear maps whose weights the editor reads or changes; by default the rewrite modules."""
        arch = architecture_of(model)
        return [arch.rewrite_name(layer) for layer in config.edited_layers]
