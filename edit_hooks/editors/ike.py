"""IKE: the new fact in the prompt, after demonstrations of its use.

IKE ("Can We Edit Factual Knowledge by In-Context Learning?"): 32 demonstrations for the records nearest to the edit by
sentence embeddings, 4 of which copy their fact, 12 apply it to a paraphrase and 16 retain an unrelated one (1:3:4,
assigned at random), the nearest record last; then one that copies the edit itself. EasyEdit's and BAKE's variant
(``selection: sentences``) takes the 16 nearest *sentences* of any kind, the nearest first, without a demonstration of
the edit itself. ICE is the fact's line alone.

IKE's release removes the unrelated sentence before many paraphrases of CounterFact. ``clean_paraphrases`` does so in a
pool of CounterFact's records, by default for ``selection: records`` alone: EasyEdit takes paraphrases as they are.

The pool must not contain the tested questions: a request whose prompt occurs in the pool is refused. BAKE's released
protocol draws from the evaluation set itself; ``ike_leaky_pool`` allows that, for comparison with its numbers only.

With several edits (batch, stream) each has its own context, and a question is answered under the ``num_facts`` edits
most similar to it. The releases build every context from scratch, so a stream is a series of single edits there.

``min_similarity`` limits the scope: a question that is not similar to any fact is answered without a context. Published
IKE states the fact before every question, unrelated ones too.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from edit_hooks.base.config import EditorConfig, Settings, config_field
from edit_hooks.base.editor import Editor
from edit_hooks.base.footprint import TEXTS_CARRIED, Footprint
from edit_hooks.base.job import EditJob
from edit_hooks.deltas.context_edit import ContextEdit
from edit_hooks.deltas.delta import Delta
from edit_hooks.in_context.demonstrations import BUILTIN, Pool, PoolRecord, load_pool, query_text
from edit_hooks.in_context.embeddings import EMBEDDERS, MINILM, most_similar, require_embedder
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError, UnusableRequestError
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.settings.numbers import COSINE, NON_NEGATIVE, POSITIVE
from edit_hooks.utils.storage.files import path_digest
from edit_hooks.utils.text.scripts import warn_of_english_rule

log = get_logger("lm_eval.edited_hf")

KINDS = ("copy", "update", "retain")

EMBEDDER_HELP = "sentence embeddings behind similarities: minilm, words, or a sentence-transformers model"


@dataclass(kw_only=True)
class ICEConfig(EditorConfig):
    """Settings of a context without demonstrations."""

    include_fact: bool = config_field(
        "state the fact; without it only demonstrations are shown (a control)", default=True
    )
    num_facts: int = config_field(
        "of several edits, number of facts stated before a question", within=POSITIVE, default=1
    )
    embedder: str = config_field(EMBEDDER_HELP, default="words")
    embedder_digest: str | None = config_field("set by the editor: checksum of the embedder's folder", default=None)
    min_similarity: float | None = config_field(
        "state a fact only before questions whose cosine similarity with it reaches this; null: before every question",
        within=COSINE,
        default=None,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers is not None:
            raise EditingError("'layers' is set, but this editor changes the prompt and no layer; drop the setting.")


@dataclass(kw_only=True)
class IKEConfig(ICEConfig):
    """Settings of a context with demonstrations."""

    embedder: str = config_field(EMBEDDER_HELP, default=MINILM)
    selection: Literal["records", "sentences"] = config_field(
        "records: the nearest records in three kinds, nearest last (IKE); sentences: the nearest sentences, nearest "
        "first (EasyEdit)",
        default="records",
    )
    num_demonstrations: int | None = config_field(
        "number of demonstrations; null: 32 for records, 16 for sentences", within=POSITIVE, default=None
    )
    ratio: list[int] = config_field(
        "selection=records: ratio of the kinds copy, update and retain",
        within=NON_NEGATIVE,
        default_factory=lambda: [1, 3, 4],
    )
    pool: str = config_field("source of demonstrations: builtin, or a JSON or JSONL file of records", default=BUILTIN)
    pool_start: int = config_field(
        "first record of the pool file that is used; earlier ones are reserved for testing",
        within=NON_NEGATIVE,
        default=0,
    )
    pool_digest: str | None = config_field("set by the editor: checksum of the pool file", default=None)
    clean_paraphrases: bool | None = config_field(
        "pool of CounterFact's records: remove the unrelated sentence before a paraphrase (IKE's release); null: for "
        "selection=records alone",
        default=None,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_demonstrations is None:
            self.num_demonstrations = 32 if self.selection == "records" else 16
        if self.clean_paraphrases is None:
            self.clean_paraphrases = self.selection == "records"
        if len(self.ratio) != 3 or not sum(self.ratio):
            raise EditingError(
                f"editor setting 'ratio' is {self.ratio}; three counts (copy, update, retain) are needed, not all zero."
            )


ICEConfigT = TypeVar("ICEConfigT", bound=ICEConfig)


class PromptDemonstrations(NamedTuple):
    """Demonstrations in the order of the prompt, and diagnostics about them."""

    texts: tuple[str, ...]
    diagnostics: dict[str, Any]


class ContextEditor(Editor[ICEConfigT]):
    """Edits that put a context before the question; base of ICE and IKE."""

    contract_exemptions: ClassVar[Mapping[str, str]] = {"target": "a random model does not follow its prompt"}
    needs_subject = False
    supports_joint = True
    writes = ("context",)
    edits_quantized = True
    stream_growth = TEXTS_CARRIED

    def default_config(self, model: nn.Module) -> ICEConfigT:
        """The user's settings: nothing depends on the model."""
        config = self.config_class.from_mapping(self.overrides)
        digest = None if config.embedder in EMBEDDERS else path_digest(config.embedder)
        config.record_digest("embedder_digest", "embedder", digest)
        return config

    def check_inputs(self, config: ICEConfigT) -> None:
        require_embedder(config.embedder)

    def footprint(self, config: ICEConfigT, model: nn.Module) -> Footprint:
        """Nothing: the context is text."""
        return Footprint()

    def compute(self, job: EditJob[ICEConfigT]) -> list[Delta]:
        deltas = []
        for request in job.requests:
            demonstrations = self.demonstrations(request, job.config)
            context = self.context_edit(request, demonstrations.texts, job.config)
            deltas.append(Delta(contexts=(context,), diagnostics=demonstrations.diagnostics))
            job.progress(1)
        if not job.joint:
            return deltas
        joint = Delta.summed(deltas)
        return [Delta(contexts=joint.contexts, diagnostics=joint.diagnostics)]

    def context_edit(self, request: EditRequest, demonstrations: tuple[str, ...], config: ICEConfigT) -> ContextEdit:
        """Hook: the fact for prompts."""
        return ContextEdit(
            prompt=request.bare_text,
            target_new=request.target_new,
            separator=request.without_context.seam,
            demonstrations=demonstrations,
            include_fact=config.include_fact,
            num_facts=config.num_facts,
            embedder=config.embedder,
            min_similarity=config.min_similarity,
        )

    def demonstrations(self, request: EditRequest, config: ICEConfigT) -> PromptDemonstrations:
        """Hook: demonstrations that precede the fact."""
        return PromptDemonstrations((), {"demonstrations": 0})


class ICE(ContextEditor[ICEConfig]):
    """The new fact in one line before the question, without demonstrations."""

    name = "ice"
    config_class = ICEConfig


class IKE(ContextEditor[IKEConfig]):
    """The new fact and demonstrations of its use before the question."""

    name = "ike"
    config_class = IKEConfig
    allows_tested: bool = False
    contract_settings: ClassVar[Settings] = {"embedder": "words", "num_demonstrations": 8}

    def default_config(self, model: nn.Module) -> IKEConfig:
        config = super().default_config(model)
        config.record_digest("pool_digest", "pool", _pool_of(config).digest)
        return config

    def check_request(
        self, tokenizer: PreTrainedTokenizerBase, request: EditRequest, model: PreTrainedModel | None
    ) -> None:
        if not self.allows_tested:
            config = self.known_config(model)
            _require_disjoint(request, _pool_of(config), config)

    def demonstrations(self, request: EditRequest, config: IKEConfig) -> PromptDemonstrations:
        pool = _pool_of(config)
        if config.pool == BUILTIN:
            remedy = "Give demonstrations of your language: pool: FILE, records in the CounterFact or BAKE schema."
            warn_of_english_rule(log, f"the built-in demonstrations of {self.name}", [request.bare_text], remedy)
        select = _nearest_records if config.selection == "records" else _nearest_sentences
        return select(request, pool, config)


class IKELeakyPool(IKE):
    """IKE as released with BAKE: the pool may be the evaluation set.

    The tested answers can then be in the prompt.
    """

    name = "ike_leaky_pool"
    allows_tested = True


def _pool_of(config: IKEConfig) -> Pool:
    return load_pool(config.pool, config.pool_start, bool(config.clean_paraphrases))


def _require_disjoint(request: EditRequest, pool: Pool, config: IKEConfig) -> None:
    if request.bare_text.lower() in pool.prompts:
        raise UnusableRequestError(
            f"{request.label}: its prompt {request.bare_text!r} is in the pool of demonstrations "
            f"({config.pool}), which must not contain tested questions. Exclude tested records with pool_start, or "
            "give another pool. (editor=ike_leaky_pool allows it, to reproduce a published protocol that leaks "
            "answers.)"
        )


def _nearest_records(request: EditRequest, pool: Pool, config: IKEConfig) -> PromptDemonstrations:
    """IKE's selection: kinds in a fixed ratio over the nearest records.

    Kinds are assigned at random. The nearest record comes last, then the edit itself.
    """
    count = config.num_demonstrations or 0
    if count > len(pool.records):
        raise EditingError(
            f"num_demonstrations={count}, but the pool {config.pool} has {len(pool.records)} usable records "
            f"({pool.incomplete} lack a paraphrase, a neighbor or its answer)."
        )
    generator = random.Random(f"{config.seed} {request.key}")
    candidates = [record.copy_demonstration() for record in pool.records]
    nearest_first = [text.number for text in most_similar(config.embedder, query_text(request), candidates, count)]
    kinds = [kind for kind, size in zip(KINDS, _shares(count, config.ratio), strict=True) for _ in range(size)]
    generator.shuffle(kinds)
    texts = [
        _demonstration(pool.records[index], kind, generator) for index, kind in zip(nearest_first, kinds, strict=True)
    ]
    texts.reverse()
    if config.include_fact:
        texts.append(PoolRecord(request, (), ()).copy_demonstration())
    return _with_diagnostics(texts, kinds, nearest_first[::-1])


def _shares(count: int, ratio: list[int]) -> list[int]:
    """Whole numbers in the ratio that add up to ``count``.

    The remainder goes to the last kinds.
    """
    shares = [count * part // sum(ratio) for part in ratio]
    for kind in list(range(len(ratio) - 1, -1, -1)) * count:
        if sum(shares) == count:
            break
        shares[kind] += bool(ratio[kind])
    return shares


def _demonstration(record: PoolRecord, kind: str, generator: random.Random) -> str:
    if kind == "copy":
        return record.copy_demonstration()
    if kind == "update":
        return record.demonstration(generator.choice(record.paraphrases), record.edit.target_new)
    return record.demonstration(*generator.choice(record.neighbors))


def _nearest_sentences(request: EditRequest, pool: Pool, config: IKEConfig) -> PromptDemonstrations:
    """EasyEdit's selection: the nearest sentences of any kind, nearest first.

    Every record has three sentences, one per kind.
    """
    kinds, sentences = [], []
    for record in pool.records:
        for kind, text in (
            ("copy", record.copy_demonstration()),
            ("update", record.demonstration(record.paraphrases[0], record.edit.target_new)),
            ("retain", record.demonstration(*record.neighbors[0])),
        ):
            kinds.append(kind)
            sentences.append(text)
    count = config.num_demonstrations or 0
    nearest_first = [text.number for text in most_similar(config.embedder, query_text(request), sentences, count)]
    texts = [sentences[index] for index in nearest_first]
    return _with_diagnostics(texts, [kinds[index] for index in nearest_first], [index // 3 for index in nearest_first])


def _with_diagnostics(texts: Sequence[str], kinds: Sequence[str], records: list[int]) -> PromptDemonstrations:
    """Demonstrations with their counts by kind and their records in the pool."""
    counts = {kind: kinds.count(kind) for kind in KINDS}
    return PromptDemonstrations(tuple(texts), {"demonstrations": len(texts), **counts, "records": records})
