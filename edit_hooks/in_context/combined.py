"""``icl=true``: an in-context prompt on top of any other editor.

After "Evaluating the Reversal Curse in Model Editing", section 6.2. The weights, codebook or memory are the other
editor's and know nothing of the context. Its controls: the context without an editor (``editor=ike``), and either half
of it (``icl=fact``, ``icl=demonstrations``). When reading results, know that a codebook looks at the last token
of the whole prompt, which after a context is not the token it was made at, so ``grace`` with a context answers like
``ike``, and that a side memory chooses by the whole prompt too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from edit_hooks.base.config import EditorConfig
from edit_hooks.base.editor import EditJob, Editor, Progress
from edit_hooks.deltas.delta import Delta
from edit_hooks.request import EditRequest


@dataclass(kw_only=True)
class PairConfig(EditorConfig):
    """The full settings of both editors."""

    base_settings: Any = None
    context_settings: Any = None


class InContext(Editor):
    """An editor and the context of another one; capabilities are the first one's."""

    config_class = PairConfig
    config_folders = ()

    def __init__(self, base: Editor, context: Editor) -> None:
        super().__init__()
        self.base, self.context = base, context
        self.name = f"{base.name}+{context.name}"  # type: ignore[misc]
        self.needs_subject, self.supports_joint = base.needs_subject, base.supports_joint  # type: ignore[misc]
        self.writes = (*base.writes, *context.writes)  # type: ignore[misc]

    def config_for(self, model: nn.Module) -> PairConfig:
        return self._pair(self.base.config_for(model), self.context.config_for(model))

    def resolve(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> PairConfig:
        return self._pair(self.base.resolve(model, tokenizer), self.context.resolve(model, tokenizer))

    def adopt(self, model: nn.Module, settings: Mapping[str, Any]) -> None:
        self.base.adopt(model, settings["base_settings"])
        self.context.adopt(model, settings["context_settings"])

    @staticmethod
    def _pair(base: EditorConfig, context: EditorConfig) -> PairConfig:
        return PairConfig(
            layers=base.layers, seed=base.seed, base_settings=base.to_dict(), context_settings=context.to_dict()
        )

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
        told = self.context.edit(model, tokenizer, requests, joint=joint)  # first: it checks its pool, and costs little
        deltas = self.base.edit(model, tokenizer, requests, joint=joint, history=history, progress=progress)
        for delta, context in zip(deltas, told, strict=True):
            delta.contexts = context.contexts
            delta.diagnostics["context"] = context.diagnostics
            delta.meta |= {"editor": self.name, "context": context.meta}
        return deltas

    def compute(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, job: EditJob) -> list[Delta]:
        raise AssertionError("edit() asks both editors")
