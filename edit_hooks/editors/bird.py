"""BIRD: ROME with both directions of a relation in the value.

"Untying the Reversal Curse via Bidirectional Language Model Editing". With R(x) the mean over an expression's tokens of
the last hidden state (after the final norm) and R_d(s) that of the subject under the offset, the value optimization of
ROME has the additional terms (eq. 4 to 6)

    alpha [ L1 + L2 - beta (L3 + L4) ],

    L1 = sum_j || R_d(s) + R(r) - R(o*) ||        L2 = sum_j || R(o*) + R(r^-1) - R_d(s) ||

and L3, L4 with the old object o (``target_true``) in place of o*. They draw the subject to the new object along the
relation r and back along its inverse, and away from the old object. Every expression is read by itself after the text
of each context template j ("TEXT. Lyon", "TEXT. has as its capital"). Only R_d(s) depends on the offset, which is added
at the subject's last token as in the rewriting rows; the other terms are computed once. Keys and update are ROME's,
inconsistent keys included (``key_mode``).

The paper writes a mean over j, the released code sums (``template_reduction``). The published alphas were presumably
tuned with the sum, which is the default. They are in units of hidden states; for other models, scale LLaMA-2's by the
ratio of ||R(s)|| as a first guess. The early stop tests ROME's part of the loss only.

``token_span`` selects the tokens of an expression: ``released`` takes the last n tokens of the text, n being the number
of tokens of the expression alone, without the space that precedes it behind a template, so the span may begin a token
early or late; ``covering`` takes the tokens that overlap the expression's characters.

The relation is ``EditRequest.relation_id``. Its phrases come from ``data/relation_phrases.yaml`` (``wording: own``) or
from the release (``wording: released``, downloaded), and from the setting ``relation_phrases``, which takes precedence.
All are part of an edit's identity in the store. BAKE writes ``re_P112``
for the inverse of ``P112``: our phrases for it are those of ``P112``, exchanged.

Shapes: E edits, N context templates, P points (two per object), R rows, T tokens, d residual width.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from edit_hooks.base.config import Settings, config_field
from edit_hooks.base.job import EditJob
from edit_hooks.editors.rome import RankOneEditor, ROMEConfig
from edit_hooks.locate.context_templates import BARE
from edit_hooks.locate.value_editor import VALUE_CONTRACT_SETTINGS, templates_of
from edit_hooks.locate.values.rows import TokenRow, fact_position, key_row
from edit_hooks.locate.values.suffix_forward import SuffixForward
from edit_hooks.locate.values.value_batch import MakeForward, ValueBatch
from edit_hooks.locate.values.value_steps import Term, TermMaker
from edit_hooks.modeling.architectures import decoder_of, input_device
from edit_hooks.modeling.forward.kv_cache import right_padded
from edit_hooks.modeling.hooks import hooks, on_output
from edit_hooks.modeling.tensors import at_least_float32
from edit_hooks.modeling.tokens import Encoding, encode, tokens_in_span
from edit_hooks.request import EditRequest
from edit_hooks.utils.batching import token_batches
from edit_hooks.utils.errors import EditingError, UnusableRequestError, near_misses
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.settings.numbers import NON_NEGATIVE
from edit_hooks.utils.storage.files import read_text
from edit_hooks.utils.storage.hashing import key_of
from edit_hooks.utils.storage.pinned_file import PinnedFile
from edit_hooks.utils.storage.yaml_io import read_yaml
from edit_hooks.utils.text.scripts import is_latin, warn_of_english_rule
from edit_hooks.utils.text.slots import split_template

log = get_logger("lm_eval.edited_hf")

PHRASES = Path(__file__).parent / "data" / "relation_phrases.yaml"
# The last commit of BAKE's release that contains BIRD.
RELEASED_PHRASES = PinnedFile(
    repository="mjy1111/BAKE",
    commit="f0c7bf3a8b046adf82615038aabab77ef2f33f40",
    path="easyeditor/models/rome/const.py",
    sha256="8704a779b4da9c1600f4675c9a1b4a555833f724690fb0076f3d827051a10d77",
)

# BAKE's ids of relations that run from the object of a Wikidata property to its subject.
INVERSE_PREFIX = "re_"

MAX_TOKENS = 4096


@dataclass(kw_only=True)
class BIRDConfig(ROMEConfig):
    """ROME's settings and the weights of the bidirectional terms.

    The defaults are those for LLaMA-2.
    """

    alpha: float = config_field("weight of the bidirectional terms", within=NON_NEGATIVE, default=0.002)
    beta: float = config_field(
        "weight of the old object within the bidirectional terms", within=NON_NEGATIVE, default=0.8
    )
    template_reduction: Literal["sum", "mean"] = config_field(
        "reduction over context templates; sum: released code, mean: paper", default="sum"
    )
    token_span: Literal["released", "covering"] = config_field(
        "tokens of an expression; released: the last n of the text, n counted on the expression alone; covering: those "
        "that overlap its characters",
        default="released",
    )
    wording: Literal["own", "released"] = config_field(
        "table of relation phrases; own: shipped with this package; released: BAKE's, downloaded at a pinned commit",
        default="own",
    )
    relation_phrases: dict[str, list[str]] = config_field(
        "relation id -> [subject to object, object to subject], in addition to the table", default_factory=dict
    )
    phrase_table_digest: str | None = config_field(
        "set by the editor: checksum of the table of relation phrases", default=None
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_phrases(self.relation_phrases)


class BIRD(RankOneEditor[BIRDConfig]):
    """ROME whose value also relates subject and object in both directions."""

    name = "bird"
    config_class = BIRDConfig
    config_folders = ("bird", "rome")
    contract_settings: ClassVar[Settings] = {**VALUE_CONTRACT_SETTINGS, "alpha": 0.002, "beta": 0.8}

    def default_config(self, model: nn.Module) -> BIRDConfig:
        config = super().default_config(model)
        config.record_digest("phrase_table_digest", "wording", key_of(phrase_table(config.wording)))
        return config

    def check_request(
        self, tokenizer: PreTrainedTokenizerBase, request: EditRequest, model: PreTrainedModel | None
    ) -> None:
        super().check_request(tokenizer, request, model)
        config = self.known_config(model)
        expressions = [text for text in expressions_of(request, config) if text is not None]
        try:
            for text in expressions:
                _encode_expression(tokenizer, text, BARE, config)
        except UnusableRequestError as error:
            raise UnusableRequestError(f"{request.label}: {error}") from None

    def terms(self, job: EditJob[BIRDConfig], make_forward: MakeForward) -> TermMaker | None:
        make_others = super().terms(job, make_forward)

        def make_terms(chunk: Sequence[int]) -> list[Term]:
            requests = [job.requests[index] for index in chunk]
            bidirectional = BIRDTerm(job.model, job.tokenizer, requests, job.config, make_forward)
            return [bidirectional, *(make_others(chunk) if make_others is not None else ())]

        return make_terms


class Expressions(NamedTuple):
    """Texts of one request that are read after the templates.

    Attributes:
        forward, backward: phrases of the relation and of its inverse.
        new, old: the objects; ``old`` is ``None`` where it has no weight.
    """

    subject: str
    forward: str
    backward: str
    new: str
    old: str | None


def phrase_table(wording: str = "own") -> dict[str, list[str]]:
    """The phrases of one wording: relation id -> [subject to object, object to subject].

    Raises:
        EditingError: if the released table cannot be fetched.
    """
    return _released_phrases() if wording == "released" else _own_phrases()


@functools.cache
def _own_phrases() -> dict[str, list[str]]:
    table: dict[str, list[str]] = read_yaml(PHRASES)
    inverse = {INVERSE_PREFIX + relation: phrases[::-1] for relation, phrases in table.items()}
    return inverse | table


@functools.cache
def _released_phrases() -> dict[str, list[str]]:
    """The dictionary in the release's ``const.py``: parsed as syntax, never run."""
    module = ast.parse(read_text(RELEASED_PHRASES.fetch()))
    tables = [node.value for node in module.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)]
    assert len(tables) == 1  # the file is pinned by its hash
    return {
        _text(key): [_text(phrase) for phrase in phrases.elts]
        for key, phrases in zip(tables[0].keys, tables[0].values, strict=True)
        if isinstance(phrases, ast.List)
    }


def _text(node: ast.expr | None) -> str:
    assert isinstance(node, ast.Constant) and isinstance(node.value, str)
    return node.value


def check_phrases(given: Mapping[str, Sequence[str]]) -> None:
    """Refuse a setting ``relation_phrases`` with anything but two phrases for a relation."""
    for relation, phrases in given.items():
        if len(phrases) != 2 or not all(phrase.strip() for phrase in phrases):
            raise EditingError(
                f"'relation_phrases' has {phrases!r} for {relation!r}; two phrases are needed: subject to object, "
                "and object to subject."
            )


def phrases_of(request: EditRequest, table: Mapping[str, Sequence[str]]) -> Sequence[str]:
    """The phrases of a request's relation: subject to object, object to subject.

    Raises:
        UnusableRequestError: the request has no relation, or no phrases are known for it.
    """
    where = f"{request.label} ({request.text!r})"
    if request.relation_id is None:
        raise UnusableRequestError(
            f"{where} has no 'relation_id', which names the relation of subject and object; add it to the record, or "
            "use r_rome."
        )
    if request.relation_id not in table:
        raise UnusableRequestError(
            f"{where}: no phrases are known for relation {request.relation_id!r}."
            f"{near_misses(request.relation_id, table)} Set relation_phrases: {{{request.relation_id}: [subject "
            "to object, object to subject]}, for example [is the capital of, has as its capital]."
        )
    return table[request.relation_id]


def expressions_of(request: EditRequest, config: BIRDConfig) -> Expressions:
    """Look up the expressions of one request.

    Raises:
        EditingError: the request has no relation, no phrases are known for it, or the old object has a weight and the
            request none.
    """
    where = f"{request.label} ({request.text!r})"
    forward, backward = phrases_of(request, {**phrase_table(config.wording), **config.relation_phrases})
    if not (forward.strip() and backward.strip()):
        raise UnusableRequestError(
            f"{where}: the released wording of relation {request.relation_id!r} has an empty phrase; a mean over no "
            "token is undefined (the release computes NaN). Use wording: own, or give two phrases in relation_phrases."
        )
    uses_old = config.alpha * config.beta > 0
    if uses_old and request.target_true is None:
        raise UnusableRequestError(f"{where} has no 'target_true', which BIRD moves away from; add it, or set beta: 0.")
    if is_latin(forward + backward):
        remedy = "Give phrases of your language: relation_phrases: {relation: [phrase, phrase]}."
        warn_of_english_rule(log, "the relation phrases of bird", [request.bare_text], remedy)
    assert request.subject is not None
    return Expressions(
        request.subject, forward, backward, request.target_new, request.target_true if uses_old else None
    )


class BIRDTerm:
    """The bidirectional terms for the edits of one batch.

    A :class:`edit_hooks.locate.values.value_steps.Term`.
    """

    name = "bird"

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        requests: Sequence[EditRequest],
        config: BIRDConfig,
        make_forward: MakeForward,
    ) -> None:
        self.model, self.config = model, config
        templates = [templates_of(tokenizer, request, config) for request in requests]
        self.num_templates = len(config.context_templates)
        expressions = [expressions_of(request, config) for request in requests]
        mean = _mean_states(model, tokenizer, expressions, templates, config)
        new_END, self.subject_END = mean["new"], mean["subject"]
        # L1 = ||R_d(s) - (R(o) - R(r))||, L2 = ||R_d(s) - (R(o) + R(r^-1))||: two points per object.
        points = [new_END - mean["forward"], new_END + mean["backward"]]
        if "old" in mean:
            points += [mean["old"] - mean["forward"], mean["old"] + mean["backward"]]
        self.points_EPND = torch.stack(points, 1)
        self.signs_P = self.points_EPND.new_tensor([1.0, 1.0, -config.beta, -config.beta][: len(points)])
        subjects = [
            [_subject_row(tokenizer, edit.subject, text, config) for text in of_edit]
            for edit, of_edit in zip(expressions, templates, strict=True)
        ]
        problems = [([row for row, _ in edit], key_row(edit[0].row)) for edit in subjects]
        self.count_EN = torch.tensor([[count for _, count in edit] for edit in subjects]).to(self.points_EPND)
        with torch.no_grad():
            self.forward = make_forward(ValueBatch.of(problems, input_device(model)))
            site_RD = self.forward.activations.site_RD
            self.unedited_sum_END = self._sum_states(site_RD.new_zeros(len(problems), site_RD.shape[1]))

    def _sum_states(self, delta_ED: torch.Tensor) -> torch.Tensor:
        """Sum of the last hidden states of the subject from the fact token on, [E, N, d]."""
        batch = self.forward.batch
        if isinstance(self.forward, SuffixForward):
            states = self.forward.hidden_at_labels(delta_ED)[: len(batch.label_row_L)]
        else:
            outputs: list[torch.Tensor] = []
            with hooks(on_output(decoder_of(self.model), outputs.append)):
                self.forward.hidden_at_labels(delta_ED)
            labels = (batch.label_row_L.to(outputs[0].device), batch.label_column_L.to(outputs[0].device))
            states = outputs[0][labels]
        states = at_least_float32(states)
        num_rows = len(delta_ED) * self.num_templates  # rewriting rows come first, edit by edit
        sums_RD = states.new_zeros(num_rows, states.shape[1]).index_add(0, batch.label_row_L.to(states.device), states)
        return sums_RD.view(len(delta_ED), self.num_templates, -1).to(self.points_EPND.device)

    def loss(self, delta_ED: torch.Tensor, step: int) -> torch.Tensor:
        """alpha [L1 + L2 - beta (L3 + L4)] for the running edits, [E]."""
        # R_d(s) - R(s): tokens before the fact token do not change.
        shift_END = (self._sum_states(delta_ED) - self.unedited_sum_END) / self.count_EN[..., None]
        distance_EPN = (self.subject_END[:, None] + shift_END[:, None] - self.points_EPND).norm(dim=3)
        total_E = (self.signs_P[:, None] * distance_EPN).sum((1, 2))
        if self.config.template_reduction == "mean":
            total_E = total_E / self.num_templates
        return self.config.alpha * total_E.to(delta_ED)

    def select(self, keep_E: torch.Tensor) -> None:
        """Drop finished edits."""
        keep = keep_E.to(self.points_EPND.device)
        for name in ("points_EPND", "subject_END", "unedited_sum_END", "count_EN"):
            setattr(self, name, getattr(self, name)[keep])
        self.forward.select(keep_E)


class ExpressionTokens(NamedTuple):
    """An expression after a template's text: encoding, its tokens, its characters."""

    encoding: Encoding
    tokens: list[int]
    span: tuple[int, int]


class SubjectRow(NamedTuple):
    """A subject after a template's text, and its number of tokens.

    The labels of the row mark the subject's tokens from the fact token on.
    """

    row: TokenRow
    num_tokens: int


def _encode_expression(
    tokenizer: PreTrainedTokenizerBase, expression: str, template: str, config: BIRDConfig
) -> ExpressionTokens:
    before, after = split_template(template)
    encoding = encode(tokenizer, before + expression + after)
    span = (len(before), len(before) + len(expression))
    tokens = tokens_in_span(encoding, span)
    if not tokens:
        raise UnusableRequestError(
            f"no token covers {expression!r}: the tokenizer drops its characters. Give another text, or another model."
        )
    if config.token_span == "released":
        count = len(tokenizer(expression, add_special_tokens=False)["input_ids"])
        tokens = list(range(max(0, tokens[-1] + 1 - count), tokens[-1] + 1))
    return ExpressionTokens(encoding, tokens, span)


def _subject_row(tokenizer: PreTrainedTokenizerBase, subject: str, template: str, config: BIRDConfig) -> SubjectRow:
    encoding, tokens, span = _encode_expression(tokenizer, subject, template, config)
    position = fact_position(encoding, span, len(encoding.ids), config.fact_token)
    labels = tuple((token, 0) for token in tokens if token >= position)
    return SubjectRow(TokenRow(tuple(encoding.ids), position, labels, len(encoding.ids)), len(tokens))


@torch.no_grad()
def _mean_states(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    expressions: Sequence[Expressions],
    templates: Sequence[Sequence[str]],
    config: BIRDConfig,
) -> dict[str, torch.Tensor]:
    """R of every expression after every template of its edit, by kind of expression [E, N, d].

    Read on the unedited model.
    """
    kinds = [kind for kind in Expressions._fields if getattr(expressions[0], kind) is not None]
    of_edits = list(zip(expressions, templates, strict=True))
    texts = [(getattr(edit, kind), template) for kind in kinds for edit, of_edit in of_edits for template in of_edit]
    distinct = list(dict.fromkeys(texts))
    encoded = [_encode_expression(tokenizer, *text, config) for text in distinct]
    lengths = [len(text.encoding.ids) for text in encoded]
    longest_first = sorted(range(len(distinct)), key=lambda index: lengths[index])[::-1]
    means: dict[tuple[str, str], torch.Tensor] = {}
    for chunk in token_batches(longest_first, lengths, MAX_TOKENS):
        ids_RT, mask_RT = right_padded([encoded[index].encoding.ids for index in chunk], input_device(model))
        hidden_RTD = decoder_of(model)(input_ids=ids_RT, attention_mask=mask_RT, use_cache=False).last_hidden_state
        for row, index in enumerate(chunk):
            means[distinct[index]] = at_least_float32(hidden_RTD[row, encoded[index].tokens]).mean(0)
    states = torch.stack([means[text] for text in texts])
    shape = (len(kinds), len(expressions), len(config.context_templates), -1)
    return dict(zip(kinds, states.view(shape), strict=True))
