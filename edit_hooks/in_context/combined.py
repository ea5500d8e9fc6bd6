"""``icl=true``: an editor combined with an in-context prompt.

"Evaluating the Reversal Curse in Model Editing", section 6.2. The other editor's weights, codebook or memories do not
depend on the context. Controls are the context alone (``editor=ike``) and either half of it (``icl=fact``,
``icl=demonstrations``). A codebook is looked up at the last token of the whole prompt, whose activation after a context
differs from the edit's, so ``grace`` with a context answers like ``ike``. Side memories are routed by the whole prompt
too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from edit_hooks.base.config import EditorConfig, config_field
from edit_hooks.base.editor import Editor
from edit_hooks.base.job import EditJob
from edit_hooks.base.origin import SettingsOrigin
from edit_hooks.base.wrapping.wrapper import EditorOnBase
from edit_hooks.deltas.delta import Delta
from edit_hooks.request import EditRequest
from edit_hooks.utils.progress import Progress


@dataclass(kw_only=True)
class CombinedConfig(EditorConfig):
    """Settings of both editors."""

    base_settings: dict[str, Any] = config_field("settings of the editor", default_factory=dict)
    context_settings: dict[str, Any] = config_field("settings of the context's editor", default_factory=dict)


class EditorWithContext(EditorOnBase[CombinedConfig]):
    """An editor with the contexts of another one; capabilities are those of the first."""

    config_class = CombinedConfig

    def __init__(self, base: Editor[Any], context: Editor[Any]) -> None:
        super().__init__()
        self._use(base)
        self.context = context
        self.name = f"{base.name}+{context.name}"
        self.reads_past_updates = base.reads_past_updates
        self.writes = (*base.writes, *context.writes)
        self.stream_growth = base.stream_growth

    @property
    def source_modules(self) -> tuple[str, ...]:
        return (*self.base.source_modules, *self.context.source_modules)

    @property
    def parts(self) -> tuple[Editor[Any], ...]:
        return (*self.base.parts, *self.context.parts)

    def default_config(self, model: nn.Module) -> CombinedConfig:
        return _combine_configs(self.base.default_config(model), self.context.default_config(model))

    def settings_origin(self, model: nn.Module) -> SettingsOrigin:
        """Return where the settings of the editor come from."""
        return self.base.settings_origin(model)

    def check_settings(self, outline: nn.Module) -> None:
        self.base.check_settings(outline)
        self.context.check_settings(outline)

    def resolve_config(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, stored: Mapping[str, Any] | None = None
    ) -> CombinedConfig:
        base, context = (stored["base_settings"], stored["context_settings"]) if stored else (None, None)
        return _combine_configs(
            self.base.resolve_config(model, tokenizer, base), self.context.resolve_config(model, tokenizer, context)
        )

    def drawn_settings(self, model: nn.Module) -> dict[str, Any]:
        drawn = {
            "base_settings": self.base.drawn_settings(model),
            "context_settings": self.context.drawn_settings(model),
        }
        return {name: settings for name, settings in drawn.items() if settings}

    def check_model(self, model: nn.Module) -> None:
        self.base.check_model(model)

    def check_request(
        self, tokenizer: PreTrainedTokenizerBase, request: EditRequest, model: PreTrainedModel | None
    ) -> None:
        super().check_request(tokenizer, request, model)
        self.context.check_request(tokenizer, request, model)

    def num_tokens_past_target(self) -> int:
        return self.base.num_tokens_past_target()

    def condensed(self, model: nn.Module, history: Sequence[Delta]) -> list[Delta]:
        return self.base.condensed(model, history)

    def edit(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        requests: Sequence[EditRequest],
        *,
        joint: bool = False,
        history: Sequence[Delta] = (),
        progress: Progress | None = None,
        measure: bool = True,
    ) -> list[Delta]:
        # Contexts first: they are cheap and fail fast on an unusable pool of demonstrations.
        contexts = self.context.edit(model, tokenizer, requests, joint=joint)
        deltas = self.base.edit(
            model, tokenizer, requests, joint=joint, history=history, progress=progress, measure=measure
        )
        for delta, context in zip(deltas, contexts, strict=True):
            delta.contexts = context.contexts
            delta.diagnostics["context"] = context.report().to_json()
            delta.meta |= {"editor": self.name, "context": context.meta}
        return deltas

    def compute(self, job: EditJob[CombinedConfig]) -> list[Delta]:
        raise AssertionError("edit() calls both editors instead")


def _combine_configs(base: EditorConfig, context: EditorConfig) -> CombinedConfig:
    return CombinedConfig(
        layers=base.layers, seed=base.seed, base_settings=base.to_dict(), context_settings=context.to_dict()
    )
