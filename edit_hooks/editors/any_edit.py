"""AnyEdit: UnKE with one state per window of the answer, so that long answers are written part by part.

"AnyEdit: Edit Any Knowledge Encoded in Language Models" (2502.05628), on UnKE (``UnKE_ARE`` of the release). The answer
is cut into windows of ``window`` tokens. The state at the token before a window makes the window's tokens likely with
those of all earlier windows in place (:mod:`edit_hooks.locate.answer_windows`). The blocks are trained on question and
answer together: the output at every such token moves to its state, and stays at all others.

Decoding reaches a window only by the exact text before it. The release's loop for the end of a window's optimization,
a loss below 5e-3, is the default here, too. Its last window under an ``overlap`` can lie in the window before, and then
is trained one token too late; such a window is left out here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from transformers import PreTrainedTokenizerBase

from edit_hooks.base.config import Settings, config_field
from edit_hooks.editors.unke import BlockFittingEditor, UnKE, UnKEConfig
from edit_hooks.locate.answer_windows import WindowedAnswer, answer_of
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.settings.numbers import NON_NEGATIVE, POSITIVE


@dataclass(kw_only=True)
class AnyEditConfig(UnKEConfig):
    """UnKE's settings and those of the windows."""

    early_stop_loss: float = config_field("stop when the loss of a window falls below this; 0: never", default=5e-3)
    window: int = config_field("tokens of the answer per window", within=POSITIVE, default=40)
    overlap: int = config_field("tokens that a window shares with the one before", within=NON_NEGATIVE, default=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.overlap >= self.window:
            raise EditingError(
                f"'overlap' is {self.overlap} and 'window' {self.window}, so windows would not advance; give a smaller "
                "overlap."
            )


class AnyEdit(BlockFittingEditor[AnyEditConfig]):
    """Blocks trained towards one state per window of an answer."""

    name = "any_edit"
    config_class = AnyEditConfig
    config_folders = ("any_edit",)
    feeds_last_token = True
    contract_settings: ClassVar[Settings] = {**UnKE.contract_settings, "window": 2}

    def num_tokens_past_target(self) -> int:
        """The whole answer is run, its end-of-text token included."""
        return super().num_tokens_past_target() + bool(self._append_eos)

    def answer(self, tokenizer: PreTrainedTokenizerBase, request: EditRequest, config: AnyEditConfig) -> WindowedAnswer:
        return answer_of(tokenizer, request, config.append_eos, config.window, config.overlap)

    def fitted_ids(self, answer: WindowedAnswer) -> tuple[int, ...]:
        return answer.ids
