"""Mirror: a fact and its inverse, written as several facts by a locate-then-edit editor.

Fact (p, s, o*); P(x) is the prompt with x in place of the subject s. The base editor writes jointly

=========  ========================================================  =======  ======
row        prompt                                                    located  target
=========  ========================================================  =======  ======
fact       P(s)                                                      s        o*
cloze      Fill in the blank: "P(___) o*." The blank stands for      o*       s
question   Who or what fits here: "P(___) o*"? Answer:               o*       s
link       o* is linked to                                           o*       s
=========  ========================================================  =======  ======

so the key of an inverse row is that of the new object's last token, and a question about another object has another
key. These are the rows of :mod:`edit_hooks.editors.two_way`, without its locality prompts. The update D is written as
``strength`` D: a key k' of another wording gets the part (D k') of a residual, which a strength above 1 makes up for.

There is no paper and no release: the recipe is this project's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from edit_hooks.base.config import Settings, config_field
from edit_hooks.base.footprint import Footprint, StreamGrowth
from edit_hooks.base.job import EditJob
from edit_hooks.base.wrapping.wrapper import PostProcessingEditor, WrapperConfig
from edit_hooks.deltas.delta import Delta
from edit_hooks.editors.two_way import Frame, inverse_requests
from edit_hooks.locate.value_editor import MEMIT_CONTRACT_SETTINGS
from edit_hooks.modeling.tokens import encode
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.settings.numbers import POSITIVE


@dataclass(kw_only=True)
class MirrorConfig(WrapperConfig):
    """Settings of mirrored edits."""

    inverse_rows: list[Frame] = config_field(
        "the rows that ask for the subject", default_factory=lambda: ["cloze", "question", "link"]
    )
    strength: float = config_field("factor of the update", within=POSITIVE, default=1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.base_settings.get("stream") == "exact" and self.strength != 1:
            raise EditingError(
                f"base_settings have stream: exact, which counts on the update being written as it is, and "
                f"strength={self.strength:g} changes it. Set strength: 1, or drop stream: exact."
            )


class Mirror(PostProcessingEditor[MirrorConfig]):
    """A fact and its inverse rows, written jointly by a base editor that locates subjects."""

    name = "mirror"
    config_class = MirrorConfig
    config_folders = ("mirror",)
    stream_growth = StreamGrowth("as its base, with the keys of all rows", "as its base")
    contract_settings: ClassVar[Settings] = {
        "layers": [0, 1],
        "base": "memit",
        "base_settings": MEMIT_CONTRACT_SETTINGS,
        "inverse_rows": ["link"],
        "strength": 2.0,
    }

    def __init__(self, overrides: Settings | None = None) -> None:
        super().__init__(overrides)
        if not (self.base.needs_subject and self.base.supports_joint):
            raise EditingError(
                f"base={self.base.name!r} cannot be mirrored: an editor is needed that locates subjects and writes "
                "several facts in one update, such as memit, alphaedit or emmet."
            )
        self.reads_past_updates = self.base.reads_past_updates

    def check_request(
        self, tokenizer: PreTrainedTokenizerBase, request: EditRequest, model: PreTrainedModel | None
    ) -> None:
        for row in self._rows(request, model):
            self.base.check_request(tokenizer, row, model)

    def other_lengths(
        self, tokenizer: PreTrainedTokenizerBase, request: EditRequest, model: PreTrainedModel | None
    ) -> Mapping[str, int]:
        rows = self._rows(request, model)[1:]
        longest = max((len(encode(tokenizer, row.text + row.continuation).ids) for row in rows), default=0)
        return {**super().other_lengths(tokenizer, request, model), "the inverse rows of the fact": longest}

    def footprint(self, config: MirrorConfig, model: nn.Module) -> Footprint:
        """That of the base editor, with an update of the rank of all rows."""
        footprint = self.base.footprint(self.base.default_config(model), model)
        return dataclasses.replace(footprint, update=footprint.update * (1 + len(config.inverse_rows)))

    def condensed(self, model: nn.Module, history: Sequence[Delta]) -> list[Delta]:
        return self.base.condensed(model, history)

    def compute(self, job: EditJob[MirrorConfig]) -> list[Delta]:
        deltas = []
        for group in job.groups:
            rows = [row for request in group for row in mirrored(request, job.config.inverse_rows)]
            (delta,) = self.base.edit(job.model, job.tokenizer, rows, joint=True, history=job.history, measure=False)
            deltas.append(_scaled(delta, job.config.strength, len(group), len(rows)))
            job.progress(len(group))
        return deltas

    def _rows(self, request: EditRequest, model: PreTrainedModel | None) -> list[EditRequest]:
        return mirrored(request, self.known_config(model).inverse_rows)


def mirrored(request: EditRequest, frames: Sequence[Frame]) -> list[EditRequest]:
    """A fact, and its inverse rows with the new object as their subject."""
    return [request, *inverse_requests(request, frames, located=True)]


def _scaled(delta: Delta, strength: float, num_facts: int, num_rows: int) -> Delta:
    """The base editor's update times the strength, as one of facts instead of rows."""
    factors = {name: factor._replace(left=factor.left * strength) for name, factor in delta.factors.items()}
    dense = {name: update * strength for name, update in delta.dense.items()}
    ratio = delta.diagnostics["update_norm_ratio"] * strength
    counts = {"num_rows": num_rows, "num_requests": num_facts}
    diagnostics = {**delta.diagnostics, "update_norm_ratio": ratio, **counts}
    return dataclasses.replace(delta, factors=factors, dense=dense, diagnostics=diagnostics)
