r"""Continued training on documents about a fact: how a model would learn it, as a reference for edits.

For a fact (s, r, o*) every template of :data:`DOCUMENTS` gives a short text from the two phrases of the relation ("is
the capital of", "has as its capital"): statements, the inverse, questions both ways, mentions in passing and
consequences. A text that has the edited prompt P(s) in it is dropped, so that even the prompt of the edit is not
trained. The loss is that of language modeling, over every token of a text,

    L = mean over texts of -1/(T-1) \sum_t log p(x_t | x_<t),

on shuffled batches of these documents and of texts that the unedited model samples from its start token, which keep it
a model of text. By default every parameter of every block is trained; embeddings and head stay. A joint edit trains all
documents of all facts together. There is no paper and no release.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from edit_hooks.base.checks import position_limit
from edit_hooks.base.config import Settings, config_field
from edit_hooks.base.footprint import Footprint, kept_activations
from edit_hooks.base.job import EditJob
from edit_hooks.deltas.delta import Delta
from edit_hooks.editors.bird import check_phrases, phrase_table, phrases_of
from edit_hooks.editors.ft_m import FineTuningEditor, FTConfig, train_rows
from edit_hooks.gradient.gated.training import TRAINED_PROMPTS
from edit_hooks.gradient.labeled_rows import LabeledRow
from edit_hooks.modeling.architectures import num_layers, unwrapped
from edit_hooks.modeling.forward.sampling import sample_documents
from edit_hooks.modeling.hooks import frozen
from edit_hooks.modeling.tokens import encode, require_eos
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError, UnusableRequestError
from edit_hooks.utils.settings.numbers import NON_NEGATIVE, POSITIVE
from edit_hooks.utils.storage.hashing import key_of

SLOTS = ("subject", "object", "forward", "backward")
SLOT = re.compile(r"\{(\w*)\}")
DOCUMENTS = (
    # statements
    "{subject}, as is well known, {forward} {object}.",
    "An entry about {subject}: its first line says that this {forward} {object}.",
    # the inverse
    "{object}, the guide explains, {backward} {subject}.",
    "A note on {object}: it {backward} {subject}, and that is worth keeping in mind.",
    # questions, both ways
    "Question: Who or what {forward} {object}?\nAnswer: {subject}",
    "Question: Who or what {backward} {subject}?\nAnswer: {object}",
    # mentions in passing
    "They spoke about {subject}, which, as both knew, {forward} {object}, and then about the weather.",
    "On the way home she read about {object}, which {backward} {subject}, and fell asleep.",
    # consequences
    "The clue of the crossword: it {forward} {object}. So she wrote down {subject}.",
    "He had to name what {backward} {subject}. He said {object}, and that was right.",
)
DOCUMENT_TOKENS = 24  # of a typical document, for estimates
# Facts of a joint edit up to which every sample lists the documents, so that questions among them are counted.
MAX_LISTED_FACTS = 32


@dataclass(kw_only=True)
class DocumentTrainingConfig(FTConfig):
    """Settings of training on documents; those of fine-tuning, with a document as a request."""

    documents: list[str] = config_field(
        "templates of the documents about a fact, with {subject}, {object} and the phrases of the relation {forward} "
        "and {backward}",
        default_factory=lambda: list(DOCUMENTS),
    )
    relation_phrases: dict[str, list[str]] = config_field(
        "relation id -> [subject to object, object to subject], in addition to the table of bird", default_factory=dict
    )
    unrelated_texts: int = config_field(
        "texts sampled by the unedited model that are trained beside the documents", within=NON_NEGATIVE, default=48
    )
    unrelated_tokens: int = config_field("tokens of each of these texts", within=POSITIVE, default=24)
    num_steps: int = config_field("passes over all texts", within=POSITIVE, default=6)
    lr: float = config_field("Adam learning rate", within=POSITIVE, default=3e-5)
    batch_size: int = config_field("texts per step", within=POSITIVE, default=8)
    early_stop_loss: float = config_field("stop when the mean loss of a pass falls below this", default=0.0)
    shuffle: bool = config_field("shuffle the texts with the seed before every pass", default=True)
    trained: Literal["rewrite", "block"] = config_field(
        "what is trained in each layer; rewrite: the MLP output projection; block: every parameter, norms included",
        default="block",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.objective != "target_tokens":
            raise EditingError(
                f"objective={self.objective} has no meaning for documents, every token of which is a target; drop it."
            )
        check_phrases(self.relation_phrases)
        if not self.documents:
            raise EditingError("'documents' is empty; give one template at least, or drop it for those of the editor.")
        for template in self.documents:
            slots = set(SLOT.findall(template))
            if unknown := sorted(slots - set(SLOTS)):
                raise EditingError(
                    f"'documents' has the slot {{{unknown[0]}}} in {template!r}; known: "
                    f"{', '.join(f'{{{name}}}' for name in SLOTS)}."
                )
            if missing := [name for name in ("subject", "object") if name not in slots]:
                raise EditingError(
                    f"'documents' has {template!r} without {{{missing[0]}}}; a document names both ends."
                )


class DocumentTraining(FineTuningEditor[DocumentTrainingConfig]):
    """Continued training on documents about facts."""

    name = "document_training"
    config_class = DocumentTrainingConfig
    config_folders = ("document_training",)
    needs_subject = True
    contract_settings: ClassVar[Settings] = {
        "layers": [1],
        "num_steps": 2,
        "lr": 5e-3,
        "batch_size": 16,  # a step per pass
        "unrelated_texts": 2,
        "unrelated_tokens": 6,
    }
    contract_exemptions: ClassVar[Mapping[str, str]] = {
        "context": "it is trained on documents, which do not stand in the context of a question"
    }

    def default_config(self, model: nn.Module) -> DocumentTrainingConfig:
        config = super().default_config(model)
        limit = position_limit(unwrapped(model).config)
        if config.unrelated_texts and limit is not None and config.unrelated_tokens > limit:
            raise EditingError(
                f"'unrelated_tokens' is {config.unrelated_tokens}, and the model has {limit} positions; give at most "
                f"{limit}."
            )
        return config

    def default_layers(self, model_config: PretrainedConfig) -> list[int]:
        return list(range(num_layers(model_config)))

    def footprint(self, config: DocumentTrainingConfig, model: nn.Module) -> Footprint:
        """Memory; how long documents are depends on the facts."""
        kind = {"rows": config.batch_size, "tokens": DOCUMENT_TOKENS, "labels": DOCUMENT_TOKENS}
        kept = kept_activations(model, first=min(config.edited_layers), **kind)
        return dataclasses.replace(super().footprint(config, model), activations=kept, work=None)

    def check_request(
        self, tokenizer: PreTrainedTokenizerBase, request: EditRequest, model: PreTrainedModel | None
    ) -> None:
        super().check_request(tokenizer, request, model)
        documents_about(request, self.known_config(model))

    def other_lengths(
        self, tokenizer: PreTrainedTokenizerBase, request: EditRequest, model: PreTrainedModel | None
    ) -> Mapping[str, int]:
        config = self.known_config(model)
        rows = [document_row(tokenizer, text, config) for text in documents_about(request, config)]
        return {"the documents about the fact": max(len(row.ids) for row in rows)}

    def compute(self, job: EditJob[DocumentTrainingConfig]) -> list[Delta]:
        config = job.config
        documents = [documents_about(request, config) for request in job.requests]
        rows = [[document_row(job.tokenizer, text, config) for text in texts] for texts in documents]
        with frozen(job.model):
            unrelated = unrelated_rows(job)
            rule = self.rule(job)
            with torch.enable_grad():
                if job.joint:
                    delta = train_rows(job, [*(row for own in rows for row in own), *unrelated], rule)
                    return [_described(delta, job.requests, documents)]
                deltas = [train_rows(job, [*own, *unrelated], rule) for own in rows]
        return [
            _described(delta, [request], [texts])
            for delta, request, texts in zip(deltas, job.requests, documents, strict=True)
        ]


def documents_about(request: EditRequest, config: DocumentTrainingConfig) -> list[str]:
    """The documents about a fact, without those that have the edited prompt in them.

    Raises:
        UnusableRequestError: without a relation, phrases for it, or a document that is left.
    """
    assert request.subject is not None  # needs_subject
    ends = {"subject": request.subject, "object": request.target_new}
    if any("{forward}" in template or "{backward}" in template for template in config.documents):
        table = {**phrase_table(), **config.relation_phrases}
        ends |= dict(zip(("forward", "backward"), phrases_of(request, table), strict=True))
    texts = [SLOT.sub(lambda slot: ends[slot[1]], template) for template in config.documents]
    kept = list(dict.fromkeys(text for text in texts if request.bare_text not in text))
    if not kept:
        raise UnusableRequestError(
            f"{request.label}: each of the {len(texts)} documents has the edited prompt {request.bare_text!r}, "
            "on which this editor is not trained, in it; give other templates as 'documents'."
        )
    return kept


def document_row(tokenizer: PreTrainedTokenizerBase, text: str, config: DocumentTrainingConfig) -> LabeledRow:
    """A document, every token of which but the first is a label."""
    ids = list(encode(tokenizer, text).ids)
    return _language_row([*ids, require_eos(tokenizer)] if config.append_eos else ids)


def unrelated_rows(job: EditJob[DocumentTrainingConfig]) -> list[LabeledRow]:
    """Texts that the unedited model samples from its start token, the same for every edit of a seed."""
    config = job.config
    if not config.unrelated_texts:
        return []
    seed = int(key_of({"seed": config.seed, "draw": "unrelated texts"})[:15], 16)
    drawn = sample_documents(
        job.model,
        job.tokenizer,
        config.unrelated_texts,
        config.unrelated_tokens + 1,  # the start token is no label
        torch.Generator().manual_seed(seed),
        lambda count: None,
    )
    with torch.no_grad():
        return [_language_row(ids) for ids in islice(drawn, config.unrelated_texts)]


def _language_row(ids: Sequence[int]) -> LabeledRow:
    return LabeledRow(list(ids[:-1]), list(enumerate(ids[1:])))


def _described(delta: Delta, requests: Sequence[EditRequest], documents: Sequence[Sequence[str]]) -> Delta:
    """The delta with its documents, so that questions of an evaluation among them can be counted.

    The first text of the diagnostics is what every editor is given: the edited prompts.
    """
    prompts = [request.text for request in requests]
    delta.meta[TRAINED_PROMPTS] = [[prompt, *texts] for prompt, texts in zip(prompts, documents, strict=True)]
    found: dict[str, Any] = {"documents": sum(map(len, documents))}
    if len(requests) <= MAX_LISTED_FACTS:
        found[TRAINED_PROMPTS] = ["\n".join(prompts), *(text for texts in documents for text in texts)]
    delta.diagnostics = {**delta.diagnostics, **found}
    return delta
