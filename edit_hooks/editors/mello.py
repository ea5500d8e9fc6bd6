"""MeLLo: the edits are a memory, from which the model's own sub-questions retrieve facts.

In the spirit of Zhong et al., MQuAKE: Assessing Knowledge Editing in Language Models via Multi-Hop Questions (EMNLP
2023). The rounds are in :mod:`edit_hooks.in_context.rounds`. It differs from the release in three points: the
demonstrations are our own; facts are retrieved with the embedder of ``ike``, not with Contriever; decoding and model
are those of the run, not a hosted model's.

A likelihood has no rounds: the most similar fact precedes the question, as with ``ice``. So does it before answers of a
given length.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from edit_hooks.base.config import Settings, config_field
from edit_hooks.deltas.context_edit import MOST_ROUNDS, ContextEdit
from edit_hooks.editors.ike import EMBEDDER_HELP, ContextEditor, ICEConfig
from edit_hooks.in_context.embeddings import MINILM
from edit_hooks.request import EditRequest


@dataclass(kw_only=True)
class MeLLoConfig(ICEConfig):
    """Settings of rounds of sub-questions."""

    embedder: str = config_field(EMBEDDER_HELP, default=MINILM)
    num_rounds: int = config_field(
        "most rounds of a question; one fact is read between two rounds",
        within=MOST_ROUNDS,
        default=4,
    )


class MeLLo(ContextEditor[MeLLoConfig]):
    """Sub-questions, each answered with the most similar edited fact in view."""

    name = "mello"
    config_class = MeLLoConfig
    contract_settings: ClassVar[Settings] = {"embedder": "words"}

    def context_edit(self, request: EditRequest, demonstrations: tuple[str, ...], config: MeLLoConfig) -> ContextEdit:
        context = super().context_edit(request, demonstrations, config)
        return dataclasses.replace(context, rounds=config.num_rounds)
