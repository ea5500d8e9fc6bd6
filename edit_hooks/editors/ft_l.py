"""FT-L: fine-tune one MLP projection at the last token of the prompt.

The objective of the FT baseline in ROME's release and of EasyEdit's "FT-L": the prompt alone is the input, and every
target token is scored against the same next-token distribution. The loss is the mean over requests of the mean over
target tokens of -log p(token | prompt). This is a known mistake behind the numbers of many papers: with m different
target tokens the loss cannot fall below log m, the early stop never fires, and greedy decoding may start with any
piece of the target. Use ``ft_m`` as a baseline, and this editor to compare with published "FT" rows.

Everything else (Adam, early stop, ball, batches) is FT-M's. ``norm_constraint`` is the radius of the ball. ROME's
release has one for gpt2-xl and GPT-J; EasyEdit's files have none for GPT-J, Llama and Qwen, although papers that use
them describe one. The ball is centered on the weights at the start of this call, so a stream of edits is not bounded.

Not copied from EasyEdit: with left padding it reads the wrong position for all but the longest prompt of a batch, it
doubles the space before targets that begin with one, and it leaves ``requires_grad`` off. ``targets: alone`` is its
encoding of the target without the prompt, by which tokenizers with a BOS make the BOS a target token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from transformers import PreTrainedTokenizerBase

from edit_hooks.base.config import Settings, config_field
from edit_hooks.editors.ft_m import FineTuningEditor, FTConfig
from edit_hooks.gradient.labeled_rows import LabeledRow, Objective
from edit_hooks.modeling.tokens import encode
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError, UnusableRequestError


@dataclass(kw_only=True)
class FTLConfig(FTConfig):
    """Settings of fine-tuning on the last prompt token."""

    objective: Objective = config_field("labels of the loss, as for ft_m; FT-L is last_token", default="last_token")
    targets: Literal["in_context", "alone"] = config_field(
        "encoding of the target; in_context: as it continues the prompt; alone: without the prompt, special tokens "
        "included (released)",
        default="in_context",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.targets == "alone" and self.objective != "last_token":
            raise EditingError(
                "targets=alone needs objective=last_token; with target_tokens the target is part of the input, "
                "encoded after the prompt."
            )


class FTL(FineTuningEditor[FTLConfig]):
    """Fine-tuning with the last-token objective of the released FT baselines."""

    name = "ft_l"
    config_class = FTLConfig
    config_folders = ("ft_l",)
    contract_settings: ClassVar[Settings] = {"layers": [1], "num_steps": 8, "lr": 5e-3}

    def row(self, tokenizer: PreTrainedTokenizerBase, request: EditRequest, config: FTLConfig) -> LabeledRow:
        if config.targets == "in_context":
            return super().row(tokenizer, request, config)
        prompt = encode(tokenizer, request.text).ids
        if not prompt:
            raise UnusableRequestError(
                f"prompt {request.text!r} has no token that could predict the target; give a longer prompt."
            )
        target = tokenizer(request.continuation, verbose=False)["input_ids"]
        return LabeledRow(prompt, [(len(prompt) - 1, token) for token in target])
