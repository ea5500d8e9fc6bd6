"""IKE: tell the model the new fact, after demonstrations of how such facts are to be used. No weight changes.

IKE ("Can We Edit Factual Knowledge by In-Context Learning?"): 32 demonstrations for the records nearest to the edit by
sentence embeddings, 4 of which copy their fact, 12 apply it to a paraphrase and 16 keep an unrelated one (1:3:4,
assigned at random), the nearest record last; then one that copies the edit itself. EasyEdit's and BAKE's variant
(``selection: sentences``) takes the 16 nearest *sentences* of any kind, the nearest first, and has no block of the
edit's own. ICE is the line of the fact alone.

The pool must not hold what is tested: a request whose edit is in the pool is refused. BAKE's released protocol draws
from the evaluation set itself; it exists as ``ike_leaky_pool``, for reproducing its numbers only.

Several edits (batch, stream): each keeps its context, and a question is asked under the ``num_facts`` edits it is most
like. The releases build every context from scratch, so that a stream is nothing but single edits there.

``min_similarity`` bounds the scope: a question that is like no fact is asked as it is, on the unedited model. Published
IKE tells the fact before every question, unrelated ones too.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

from torch import nn

from edit_hooks.base.config import EditorConfig, config_field
from edit_hooks.base.editor import EditJob, Editor
from edit_hooks.deltas.context_edit import ContextEdit
from edit_hooks.deltas.delta import Delta
from edit_hooks.in_context.demonstrations import BUILTIN, Pool, PoolRecord, load_pool, query_text
from edit_hooks.in_context.embeddings import MINILM, most_similar, require_embedder
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError

KINDS = ("copy", "update", "retain")


@dataclass(kw_only=True)
class ICEConfig(EditorConfig):
    """Settings of a context without demonstrations."""

    include_fact: bool = config_field(
        "state the fact; without it only demonstrations are shown (a control)", default=True, formerly="states_fact"
    )
    num_facts: int = config_field("of several edits, how many are told before a question", default=1)
    embedder: str = config_field("measures likeness: minilm, words, or a sentence-transformers model", default="words")
    min_similarity: float | None = config_field(
        "tell a fact only before questions whose cosine with it is at least this; null: before every question",
        default=None,
        formerly="min_likeness",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers is not None:
            raise EditingError("'layers' has no meaning for an editor that changes the prompt; drop it.")
        if self.num_facts < 1:
            raise EditingError(f"editor setting 'num_facts' is {self.num_facts}; at least one fact is told.")
        if self.min_similarity is not None and not -1 <= self.min_similarity <= 1:
            raise EditingError(
                f"editor setting 'min_similarity' is {self.min_similarity}; a cosine (-1 to 1) or null is needed."
            )
        require_embedder(self.embedder)


@dataclass(kw_only=True)
class IKEConfig(ICEConfig):
    """Settings of a context with demonstrations."""

    embedder: str = config_field("measures likeness: minilm, words, or a sentence-transformers model", default=MINILM)
    selection: Literal["records", "sentences"] = config_field(
        "records: IKE's, nearest records in three kinds, nearest last; sentences: EasyEdit's, nearest sentences first",
        default="records",
    )
    num_demonstrations: int | None = config_field("null: 32 for records, 16 for sentences", default=None)
    ratio: list[int] = config_field("copy : update : retain, for records", default_factory=lambda: [1, 3, 4])
    pool: str = config_field("where demonstrations come from: builtin, or a JSON(L) file", default=BUILTIN)
    pool_start: int = config_field(
        "first record of the pool file that is used; those before it are for testing", default=0
    )
    pool_digest: str | None = config_field("filled in: checksum of the pool file", default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_demonstrations is None:
            self.num_demonstrations = 32 if self.selection == "records" else 16
        if self.num_demonstrations < 1:
            raise EditingError("editor setting 'num_demonstrations' must be positive; without any, use editor=ice.")
        if len(self.ratio) != 3 or min(self.ratio) < 0 or not sum(self.ratio):
            raise EditingError(
                f"editor setting 'ratio' is {self.ratio}; three counts (copy, update, retain) are needed."
            )


ICEConfigT = TypeVar("ICEConfigT", bound=ICEConfig)


class ContextEditor(Editor[ICEConfigT]):
    """Edits that are a context before the question; base of ICE and IKE."""

    contract_exemptions: ClassVar[Mapping[str, str]] = {"target": "a random model does not follow its prompt"}
    needs_subject = False
    supports_joint = True
    writes = ("context",)

    def default_config(self, model: nn.Module) -> ICEConfigT:
        """The user's settings: nothing depends on the model."""
        return self.config_class.from_mapping(self.overrides)

    def compute(self, job: EditJob[ICEConfigT]) -> list[Delta]:
        deltas = []
        for request in job.requests:
            demonstrations, report = self.demonstrations(request, job.config)
            context = ContextEdit(
                prompt=request.text,
                target_new=request.target_new,
                demonstrations=tuple(demonstrations),
                include_fact=job.config.include_fact,
                num_facts=job.config.num_facts,
                embedder=job.config.embedder,
                min_similarity=job.config.min_similarity,
            )
            deltas.append(Delta(contexts=(context,), diagnostics=report))
            job.progress(1)
        if not job.joint:
            return deltas
        together = Delta.summed(deltas)
        return [Delta(contexts=together.contexts, diagnostics=together.diagnostics)]

    def demonstrations(self, request: EditRequest, config: ICEConfigT) -> tuple[list[str], dict[str, Any]]:
        """Hook: blocks shown before the fact, and their diagnostics."""
        return [], {"demonstrations": 0}


class ICE(ContextEditor[ICEConfig]):
    """In-context editing without demonstrations: one line before the question states the new fact."""

    name = "ice"
    config_class = ICEConfig


class IKE(ContextEditor[IKEConfig]):
    """In-context editing with demonstrations from a pool that holds nothing that is tested."""

    name = "ike"
    config_class = IKEConfig
    may_hold_tested: bool = False
    contract_settings: ClassVar[Mapping[str, Any]] = {"embedder": "words", "num_demonstrations": 8}

    def default_config(self, model: nn.Module) -> IKEConfig:
        config = super().default_config(model)
        config.pool_digest = load_pool(config.pool, config.pool_start).digest
        return config

    def demonstrations(self, request: EditRequest, config: IKEConfig) -> tuple[list[str], dict[str, Any]]:
        pool = load_pool(config.pool, config.pool_start)
        if not self.may_hold_tested:
            _require_disjoint(request, pool, config)
        choose = _nearest_records if config.selection == "records" else _nearest_sentences
        return choose(request, pool, config)


class IKELeakyPool(IKE):
    """IKE as BAKE released it: the pool may be the evaluation set itself, the tested answers are in the prompt."""

    name = "ike_leaky_pool"
    may_hold_tested = True


def _require_disjoint(request: EditRequest, pool: Pool, config: IKEConfig) -> None:
    if request.text.lower() in pool.prompts:
        raise EditingError(
            f"case {request.case_id}: its prompt {request.text!r} is in the pool of demonstrations ({config.pool}), "
            "which must hold nothing that is tested. Leave out tested records with pool_start, or give another pool. "
            "(editor=ike_leaky_pool allows it, to reproduce a published protocol that leaks answers.)"
        )


def _nearest_records(request: EditRequest, pool: Pool, config: IKEConfig) -> tuple[list[str], dict[str, Any]]:
    """IKE: kinds in a fixed ratio, at random over the nearest records; the nearest last, then the edit itself."""
    count = config.num_demonstrations or 0
    if count > len(pool.records):
        raise EditingError(
            f"num_demonstrations={count}, but the pool {config.pool} has {len(pool.records)} usable records "
            f"({pool.incomplete} lack a paraphrase, a neighbor or its answer)."
        )
    draw = random.Random(f"{config.seed} {request.key}")
    chosen = most_similar(
        config.embedder, query_text(request), [record.copy_demonstration() for record in pool.records], count
    )
    kinds = [kind for kind, size in zip(KINDS, _shares(count, config.ratio), strict=True) for _ in range(size)]
    draw.shuffle(kinds)
    blocks = [_block(pool.records[index], kind, draw) for index, kind in zip(chosen, kinds, strict=True)]
    blocks.reverse()
    if config.include_fact:
        blocks.append(PoolRecord(request, (), ()).copy_demonstration())
    counts = {kind: kinds.count(kind) for kind in KINDS}
    return blocks, {"demonstrations": len(blocks), **counts, "records": chosen[::-1]}


def _shares(count: int, ratio: list[int]) -> list[int]:
    """Whole numbers in the ratio that add up to ``count``; what is left over goes to the last kinds."""
    shares = [count * part // sum(ratio) for part in ratio]
    for kind in list(range(len(ratio) - 1, -1, -1)) * count:
        if sum(shares) == count:
            break
        shares[kind] += bool(ratio[kind])
    return shares


def _block(record: PoolRecord, kind: str, draw: random.Random) -> str:
    if kind == "copy":
        return record.copy_demonstration()
    if kind == "update":
        return record.demonstration(draw.choice(record.paraphrases), record.edit.target_new)
    return record.demonstration(*draw.choice(record.neighbors))


def _nearest_sentences(request: EditRequest, pool: Pool, config: IKEConfig) -> tuple[list[str], dict[str, Any]]:
    """EasyEdit: of three sentences per record the nearest ones, whatever their kind, the nearest first."""
    kinds, sentences = [], []
    for record in pool.records:
        for kind, text in (
            ("copy", record.copy_demonstration()),
            ("update", record.demonstration(record.paraphrases[0], record.edit.target_new)),
            ("retain", record.demonstration(*record.neighbors[0])),
        ):
            kinds.append(kind)
            sentences.append(text)
    chosen = most_similar(config.embedder, query_text(request), sentences, config.num_demonstrations or 0)
    counts = {kind: sum(kinds[index] == kind for index in chosen) for kind in KINDS}
    report = {"demonstrations": len(chosen), **counts, "records": [index // 3 for index in chosen]}
    return [sentences[index] for index in chosen], report
