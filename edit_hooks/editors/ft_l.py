"""FT-L: fine-tune one MLP output projection so that the prompt's last token predicts the target, maybe inside a ball.

The objective of the FT baseline of ROME's release and of EasyEdit's "FT-L": the prompt alone is fed, and every target
token is scored against the same next-token distribution, loss = mean over requests of the mean over target tokens of
-log p(token | prompt). It is a known mistake that the numbers of many papers rest on: with m different target tokens
the loss cannot fall below log m, the early stop never fires, and greedy decoding may start with any piece of the
target. Use ``ft_m`` for an honest baseline, this one to reproduce published "FT" rows.

Everything else (Adam, early stop, ball, batches) is FT-M's. ``norm_constraint`` is the ball: ROME's release constrains
gpt2-xl and GPT-J; EasyEdit's files leave GPT-J, Llama and Qwen without one, although papers that use them describe it.
The ball is centered on the weights this call started from, so a stream of edits is not confined.

Not copied from the release: with left padding it reads the wrong position for all but the longest prompt of a batch,
it doubles the space before targets that begin with one, and it leaves ``requires_grad`` off. ``targets: alone`` keeps
its encoding of the target by itself, by which tokenizers with a BOS train the BOS as a target token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from transformers import PreTrainedTokenizerBase

from edit_hooks.base.config import config_field
from edit_hooks.editors.ft_m import FineTuningEditor, FTConfig
from edit_hooks.gradient.labeled_rows import LabeledRow, Objective
from edit_hooks.modeling.tokens import encode
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError


@dataclass(kw_only=True)
class FTLConfig(FTConfig):
    """Settings of fine-tuning on the last prompt token."""

    objective: Objective = config_field("as ft_m; last_token is what makes this FT-L", default="last_token")
    targets: Literal["in_context", "alone"] = config_field(
        "in_context: the target's tokens after the prompt; alone: the target encoded by itself, special tokens "
        "included, as released",
        default="in_context",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.targets == "alone" and self.objective != "last_token":
            raise EditingError("targets=alone goes with objective=last_token; a fed target is encoded in context.")


class FTL(FineTuningEditor[FTLConfig]):
    """FT-M with the released last-token objective."""

    name = "ft_l"
    config_class = FTLConfig
    config_folders = ("ft_l",)
    contract_settings: ClassVar[Mapping[str, Any]] = {"layers": [1], "num_steps": 8, "lr": 5e-3}

    def example(self, tokenizer: PreTrainedTokenizerBase, request: EditRequest, config: FTLConfig) -> LabeledRow:
        if config.targets == "in_context":
            return super().example(tokenizer, request, config)
        prompt = encode(tokenizer, request.text).ids
        if not prompt:
            raise EditingError(f"prompt {request.text!r} has no token; nothing could predict the target.")
        target = tokenizer(f" {request.target_new}", verbose=False)["input_ids"]
        return LabeledRow(prompt, [(len(prompt) - 1, token) for token in target])
