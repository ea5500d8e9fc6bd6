"""LocFT-BF: plain fine-tuning of one place, breadth first.

"Fine-tuning Done Right in Model Editing" (2509.22072). FT-M's loss and stop rule, and what its frameworks leave out:
the end-of-text token is part of the target, a joint edit is trained in large batches (100) that are shuffled before
every pass, the bias stays, and the place is chosen per model: an MLP output projection, or a whole block (``trained:
block``) as in the release's file for Mistral. One Adam, no KL term, no clipping.

Not copied from the release: it adds a ``[PAD]`` token and thereby a row to the vocabulary, whose logit enters every
softmax from then on; it pads on the left without position ids, which shifts learned positions (GPT-2) in batches of
unequal rows; it finds parameters by a part of their names, so block 2 would also train 20 to 29. It sets no seed; here
the order is drawn with ``seed``, by Python's shuffle of the order before.

``loc_ft_crispedit`` is the row of that name in CrispEdit's table (2602.15823): no end-of-text token and batches of 32.
Without the token the model runs on after a right answer, so the two rows are not comparable under free generation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from edit_hooks.base.config import Settings, config_field
from edit_hooks.editors.ft_m import FineTuningEditor, FTConfig
from edit_hooks.utils.settings.numbers import POSITIVE


@dataclass(kw_only=True)
class LocFTConfig(FTConfig):
    """FT-M's settings with the release's values."""

    batch_size: int = config_field("requests per step of a joint edit", within=POSITIVE, default=100)
    train_bias: bool = config_field("also train the bias where the module has one", default=False)
    append_eos: bool = config_field("append the end-of-text token to the target", default=True)
    shuffle: bool = config_field(
        "shuffle the requests of a joint edit with the seed before every pass, each order from the one before",
        default=True,
    )


@dataclass(kw_only=True)
class LocFTCrispEditConfig(LocFTConfig):
    """The variant in CrispEdit's table."""

    batch_size: int = config_field("requests per step of a joint edit", within=POSITIVE, default=32)
    append_eos: bool = config_field("append the end-of-text token to the target", default=False)


class LocFT(FineTuningEditor[LocFTConfig]):
    """Fine-tuning of one place in shuffled batches, with the end of the text as part of the target."""

    name = "loc_ft"
    config_class = LocFTConfig
    config_folders: tuple[str, ...] = ("loc_ft",)
    default_depth = 0.71
    contract_settings: ClassVar[Settings] = {"layers": [1], "num_steps": 8, "lr": 5e-3}


class LocFTCrispEdit(FineTuningEditor[LocFTCrispEditConfig]):
    """LocFT-BF as in CrispEdit's table: without the end of the text, in batches of 32."""

    name = "loc_ft_crispedit"
    config_class = LocFTCrispEditConfig
    config_folders: tuple[str, ...] = ("loc_ft_crispedit",)
    default_depth = 0.71
    contract_settings: ClassVar[Settings] = {"layers": [1], "num_steps": 8, "lr": 5e-3}
