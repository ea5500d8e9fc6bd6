"""The validated inputs of one call of an editor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from edit_hooks.base.config import EditorConfig
from edit_hooks.deltas.delta import Delta
from edit_hooks.request import EditRequest
from edit_hooks.utils.progress import Progress
from edit_hooks.utils.text.readable import readable

ConfigT = TypeVar("ConfigT", bound=EditorConfig)


@dataclass(frozen=True)
@readable
class EditJob(Generic[ConfigT]):
    """Validated inputs of one call of an editor.

    Attributes:
        model: the unwrapped causal model.
        config: configuration with every setting explicit.
        requests: at least one.
        joint: one delta writes all requests.
        history: deltas of the earlier steps of a stream, already applied to the weights. Updates are on the devices of
            their weights if the editor reads them, the tensors of ``stream_state`` and of hook edits on the CPU.
        progress: called with the number of requests finished since the last call.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    config: ConfigT
    requests: list[EditRequest]
    joint: bool
    history: list[Delta]
    progress: Progress

    @property
    def groups(self) -> list[list[EditRequest]]:
        """The requests of each delta: all in one group if joint, else one each."""
        return [self.requests] if self.joint else [[request] for request in self.requests]
