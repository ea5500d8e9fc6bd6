"""BIRD: ROME with both directions of a relation in the value.

Method of "Untying the Reversal Curse via Bidirectional Language Model Editing". With R(x) the mean over an expression's
tokens of the last hidden state (behind the final norm) and R_d(s) that of the subject under the offset, the value
optimization of ROME gets (eq. 4 to 6)

    alpha [ L1 + L2 - beta (L3 + L4) ],

    L1 = sum_j || R_d(s) + R(r) - R(o*) ||        L2 = sum_j || R(o*) + R(r^-1) - R_d(s) ||

and L3, L4 the same with the old object o (``target_true``) for o*: the subject is drawn to the new object along the
relation r and back along its inverse, and away from the old one. Every expression stands on its own behind each context
template j ("TEXT. Lyon", "TEXT. has as its capital"). Only R_d(s) depends on the offset, which is added at the
subject's last token as in the rewriting rows; the rest is computed once. Keys, update and everything else are ROME's,
its inconsistent keys included (``key_mode``).

The paper writes a mean over j, the released code sums: ``template_reduction``. The published alphas were presumably
tuned with the sum, which is the default. They are in units of hidden states; for other models the ratio of ||R(s)|| to
LLaMA-2's is a first guess. The early stop tests ROME's part of the loss.

The relation is ``EditRequest.relation_id``; its phrases come from ``relation_phrases.yaml`` and from the setting of the
same name.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from edit_hooks.base.config import config_field
from edit_hooks.base.editor import EditJob
from edit_hooks.deltas.delta import Delta
from edit_hooks.editors.rome import RankOneEditor, ROMEConfig
from edit_hooks.locate.editor import VALUE_CONTRACT_SETTINGS
from edit_hooks.locate.rows import Row, fact_position, key_row
from edit_hooks.locate.suffix_forward import SuffixForward
from edit_hooks.locate.value_batch import Batch, MakeForward
from edit_hooks.locate.value_optimization import Term, TermMaker
from edit_hooks.modeling.architectures import decoder_of, input_device
from edit_hooks.modeling.hooks import hooks, on_output
from edit_hooks.modeling.kv_cache import right_padded
from edit_hooks.modeling.tensors import at_least_float32
from edit_hooks.modeling.tokens import Encoding, encode, split_template
from edit_hooks.request import EditRequest
from edit_hooks.utils.batching import token_batches
from edit_hooks.utils.errors import EditingError, near_misses
from edit_hooks.utils.yaml_io import read_yaml

PHRASES = Path(__file__).parent / "data" / "relation_phrases.yaml"


MAX_TOKENS = 4096


@dataclass(kw_only=True)
class BIRDConfig(ROMEConfig):
    """ROME's settings and the weights of the bidirectional terms; the defaults are those for LLaMA-2."""

    alpha: float = config_field("weight of the bidirectional terms", default=0.002)
    beta: float = config_field("weight of the old object among them", default=0.8)
    template_reduction: Literal["sum", "mean"] = config_field(
        "over context templates: released code, paper", default="sum"
    )
    relation_phrases: dict[str, list[str]] = config_field(
        "relation id -> [phrase, inverse phrase], besides the shipped table", default_factory=dict
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("alpha", "beta"):
            if getattr(self, name) < 0:
                raise EditingError(f"editor setting {name!r} is {getattr(self, name)}; it cannot be negative.")
        for relation, phrases in self.relation_phrases.items():
            if len(phrases) != 2 or not all(phrase.strip() for phrase in phrases):
                raise EditingError(
                    f"'relation_phrases' has {phrases!r} for {relation!r}; two phrases are needed: subject to object, "
                    "and object to subject."
                )


class BIRD(RankOneEditor[BIRDConfig]):
    """ROME whose value also relates subject and object in both directions."""

    name = "bird"
    config_class = BIRDConfig
    config_folders = ("bird", "rome")
    contract_settings: ClassVar[Mapping[str, Any]] = {**VALUE_CONTRACT_SETTINGS, "alpha": 0.002, "beta": 0.8}

    def compute(self, job: EditJob[BIRDConfig]) -> list[Delta]:
        for request in job.requests:
            expressions_of(request, job.config)  # fail before any optimization
        return super().compute(job)

    def terms(self, job: EditJob[BIRDConfig], make_forward: MakeForward) -> TermMaker | None:
        others = super().terms(job, make_forward)

        def make_terms(chunk: Sequence[int]) -> list[Term]:
            requests = [job.requests[index] for index in chunk]
            own = BIRDTerm(job.model, job.tokenizer, requests, job.config, make_forward)
            return [own, *(others(chunk) if others is not None else ())]

        return make_terms


class Expressions(NamedTuple):
    """What is put behind the templates; ``old`` is ``None`` where the old object has no weight."""

    subject: str
    forward: str
    backward: str
    new: str
    old: str | None


@functools.cache
def phrase_table() -> dict[str, list[str]]:
    """The shipped phrases: relation id -> [subject to object, object to subject]."""
    return read_yaml(PHRASES)


def expressions_of(request: EditRequest, config: BIRDConfig) -> Expressions:
    """The expressions of one request.

    Raises:
        EditingError: without a relation, phrases for it, or an old object that is asked for.
    """
    where = f"case {request.case_id} ({request.text!r})"
    if request.relation_id is None:
        raise EditingError(
            f"{where} has no 'relation_id', which BIRD needs to know how subject and object are related; add it to the "
            "record, or use r_rome."
        )
    table = {**phrase_table(), **config.relation_phrases}
    if request.relation_id not in table:
        raise EditingError(
            f"{where}: no phrases are known for relation {request.relation_id!r}."
            f"{near_misses(request.relation_id, table)} Give them: relation_phrases: {{{request.relation_id}: [subject "
            "to object, object to subject]}, for example [is the capital of, has as its capital]."
        )
    weighted = config.alpha * config.beta > 0
    if weighted and request.target_true is None:
        raise EditingError(f"{where} has no 'target_true', which BIRD moves away from; add it, or set beta: 0.")
    forward, backward = table[request.relation_id]
    assert request.subject is not None
    return Expressions(
        request.subject, forward, backward, request.target_new, request.target_true if weighted else None
    )


class BIRDTerm:
    """The bidirectional terms for the edits of one batch (a :class:`edit_hooks.locate.value_optimization.Term`).

    Shapes: E edits, N templates, d residual width.
    """

    name = "bird"

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        requests: Sequence[EditRequest],
        config: BIRDConfig,
        make_forward: MakeForward,
    ) -> None:
        self.model, self.config = model, config
        templates: list[str] = list(config.context_templates)
        self.num_templates = len(templates)
        wanted = [expressions_of(request, config) for request in requests]
        mean = _means(model, tokenizer, wanted, templates)
        new_END, self.subject_END = mean["new"], mean["subject"]
        # L1 = ||R_d(s) - (R(o) - R(r))||, L2 = ||R_d(s) - (R(o) + R(r^-1))||: two points per object.
        points = [new_END - mean["forward"], new_END + mean["backward"]]
        if "old" in mean:
            points += [mean["old"] - mean["forward"], mean["old"] + mean["backward"]]
        self.points_EPND = torch.stack(points, 1)
        self.signs_P = self.points_EPND.new_tensor([1.0, 1.0, -config.beta, -config.beta][: len(points)])
        placed = [[_subject_row(tokenizer, own.subject, text, config) for text in templates] for own in wanted]
        rows = [[row for row, _ in own] for own in placed]
        problems = [(own, key_row(own[0])) for own in rows]
        self.count_EN = torch.tensor([[count for _, count in own] for own in placed]).to(self.points_EPND)
        with torch.no_grad():
            self.forward = make_forward(Batch.of(problems, input_device(model)))
            site_RD = self.forward.activations.site_RD
            self.moving_END = self._sums(site_RD.new_zeros(len(rows), site_RD.shape[1]))

    def _sums(self, delta_ED: torch.Tensor) -> torch.Tensor:
        """Sum of the last hidden states of the subject tokens from the fact token on, [E, N, d]."""
        batch = self.forward.batch
        if isinstance(self.forward, SuffixForward):
            states = self.forward.hidden_at_labels(delta_ED)[: len(batch.label_row_L)]
        else:
            kept: list[torch.Tensor] = []
            with hooks(on_output(decoder_of(self.model), lambda hidden: kept.append(hidden))):
                self.forward.hidden_at_labels(delta_ED)
            states = kept[0][batch.label_row_L, batch.label_column_L]
        states = at_least_float32(states)
        num_rows = len(delta_ED) * self.num_templates  # rewriting rows come first, edit by edit
        sums_RD = states.new_zeros(num_rows, states.shape[1]).index_add(0, batch.label_row_L.to(states.device), states)
        return sums_RD.view(len(delta_ED), self.num_templates, -1).to(self.points_EPND.device)

    def loss(self, delta_ED: torch.Tensor, step: int) -> torch.Tensor:
        """alpha [L1 + L2 - beta (L3 + L4)] for the running edits, [E]."""
        moved_END = (self._sums(delta_ED) - self.moving_END) / self.count_EN[..., None]
        distance_EPN = (self.subject_END[:, None] + moved_END[:, None] - self.points_EPND).norm(dim=3)
        total_E = (self.signs_P[:, None] * distance_EPN).sum((1, 2))
        if self.config.template_reduction == "mean":
            total_E = total_E / self.num_templates
        return self.config.alpha * total_E.to(delta_ED)

    def select(self, keep_E: torch.Tensor) -> None:
        """Drop finished edits."""
        keep = keep_E.to(self.points_EPND.device)
        for name in ("points_EPND", "subject_END", "moving_END", "count_EN"):
            setattr(self, name, getattr(self, name)[keep])
        self.forward.select(keep_E)


class Placed(NamedTuple):
    """Encoding of an expression behind a template, the expression's tokens, and its character span."""

    encoding: Encoding
    tokens: list[int]
    span: tuple[int, int]


def _placed(tokenizer: PreTrainedTokenizerBase, expression: str, template: str) -> Placed:
    before, after = split_template(template)
    encoding = encode(tokenizer, before + expression + after)
    span = (len(before), len(before) + len(expression))
    tokens = [i for i, (start, end) in enumerate(encoding.offsets) if start < span[1] and end > span[0]]
    if not tokens:
        raise EditingError(f"no token covers {expression!r}; is it made of characters the tokenizer drops?")
    return Placed(encoding, tokens, span)


def _subject_row(
    tokenizer: PreTrainedTokenizerBase, subject: str, template: str, config: BIRDConfig
) -> tuple[Row, int]:
    """The subject behind a template, labels marking its tokens from the fact token on, and how many it has in all."""
    encoding, tokens, span = _placed(tokenizer, subject, template)
    position = fact_position(encoding, span, len(encoding.ids), config.fact_token)
    labels = tuple((token, 0) for token in tokens if token >= position)
    return Row(tuple(encoding.ids), position, labels, len(encoding.ids)), len(tokens)


@torch.no_grad()
def _means(
    model: Any, tokenizer: PreTrainedTokenizerBase, wanted: Sequence[Expressions], templates: Sequence[str]
) -> dict[str, torch.Tensor]:
    """R of every expression behind every template on the model as it is, by kind [E, N, d]."""
    kinds = [kind for kind in Expressions._fields if getattr(wanted[0], kind) is not None]
    texts = [(getattr(own, kind), template) for kind in kinds for own in wanted for template in templates]
    distinct = list(dict.fromkeys(texts))
    placed = [_placed(tokenizer, *text) for text in distinct]
    found: dict[tuple[str, str], torch.Tensor] = {}
    device = input_device(model)
    lengths = [len(one.encoding.ids) for one in placed]
    longest_first = sorted(range(len(distinct)), key=lambda index: lengths[index])[::-1]
    for chunk in token_batches(longest_first, lengths, MAX_TOKENS):
        ids_RT, mask_RT = right_padded([placed[index].encoding.ids for index in chunk], device)
        hidden_RTD = decoder_of(model)(input_ids=ids_RT, attention_mask=mask_RT, use_cache=False).last_hidden_state
        for row, index in enumerate(chunk):
            found[distinct[index]] = at_least_float32(hidden_RTD[row, placed[index].tokens]).mean(0)
    states = torch.stack([found[text] for text in texts])
    shape = (len(kinds), len(wanted), len(templates), -1)
    return dict(zip(kinds, states.view(shape), strict=True))
