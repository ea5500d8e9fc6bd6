"""SCR: retrieve facts, let the model select the relevant one, and answer with it in the prompt.

Method of "Knowledge Updating? No More Model Editing! Just Selective Contextual Reasoning". The edits are a memory of
sentences. Before an answer the ``num_facts`` facts most similar to the question are shown to the model, which replies
with the one that matters, or that none does (greedily, at most 50 tokens, without a chat template;
:mod:`edit_hooks.in_context.fact_choice`). With a fact the question becomes

    Answer the question based on the Fact. / Fact: ... / Question: ... / Answer:

Without one the unedited model reads the unchanged prompt. The choice is made for likelihoods, too, which the release
does not have.

It differs from the release in its retriever: cosines of the embedder of ``ike``, where the release takes dot products
of Contriever. Under single edits the release retrieves nothing, and here the memory has one fact: the same.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from edit_hooks.base.config import Settings, config_field
from edit_hooks.deltas.context_edit import ContextEdit
from edit_hooks.editors.ike import EMBEDDER_HELP, ContextEditor, ICEConfig
from edit_hooks.in_context.embeddings import MINILM
from edit_hooks.in_context.fact_choice import ReplyRule
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.settings.numbers import POSITIVE
from edit_hooks.utils.text.scripts import warn_of_english_rule

log = get_logger("lm_eval.edited_hf")


@dataclass(kw_only=True)
class SCRConfig(ICEConfig):
    """Settings of the retrieval and of the choice."""

    embedder: str = config_field(EMBEDDER_HELP, default=MINILM)
    num_facts: int = config_field(
        "number of facts that are retrieved, of which the model chooses one", within=POSITIVE, default=5
    )
    reply: ReplyRule = config_field(
        "reading of the model's choice; released: the text of the reply is the fact, unless it contains 'no relevant "
        "fact' or 'false'; named: the retrieved fact that the reply repeats in full, else none",
        default="released",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.include_fact:
            raise EditingError("include_fact=false leaves scr without a fact to choose; drop it, or take ice or ike.")


class SCR(ContextEditor[SCRConfig]):
    """Retrieval of facts, of which the model itself selects the one in its prompt."""

    name = "scr"
    config_class = SCRConfig
    contract_settings: ClassVar[Settings] = {"embedder": "words"}

    def context_edit(self, request: EditRequest, demonstrations: tuple[str, ...], config: SCRConfig) -> ContextEdit:
        remedy = "Its replies may be read wrongly; reply=named reads the fact itself."
        warn_of_english_rule(log, f"the prompts of {self.name}", [request.bare_text], remedy)
        context = super().context_edit(request, demonstrations, config)
        return dataclasses.replace(context, choice=config.reply)
