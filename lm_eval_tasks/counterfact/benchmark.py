"""CounterFact in two layouts: the nested one of ROME and MEMIT, and the flat one of the editing frameworks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edit_hooks.request import EditRequest
from edit_hooks.utils.storage.pinned_file import PinnedFile, UrlFile
from lm_eval_tasks.common.records.benchmark import Benchmark
from lm_eval_tasks.common.records.cases import Case, Question, count_missing
from lm_eval_tasks.common.records.dataset import Source
from lm_eval_tasks.common.records.fields import Fields, source_id
from lm_eval_tasks.common.records.published import HubFile
from lm_eval_tasks.common.scoring.population import POPULATION
from lm_eval_tasks.counterfact.references import CONSISTENCY_FILES, CONSISTENCY_TEXTS, SERVER
from lm_eval_tasks.protocols.fluency import FLUENCY_SETTINGS
from lm_eval_tasks.protocols.likelihood import GENERATE
from lm_eval_tasks.protocols.published_sets import LOCFT_3K, locft_file
from lm_eval_tasks.protocols.stability import EVK_SETTINGS
from lm_eval_tasks.protocols.wild import WILD_CONTEXT

REWRITE = "requested_rewrite"
DATA_FOLDER = Path(__file__).parent / "data"


@dataclass(frozen=True, kw_only=True)
class CounterfactCase(Case):
    """An edit of the nested layout.

    Attributes:
        relation_id, target_id: Wikidata ids of the relation and the new object, which identify the reference texts.
        generation_prompts: beginnings of texts about the subject.
        attribute_prompts: prompts of other subjects that truly have the new object.
        blank_prompts: number of blank prompts in the record's lists, which are left out.
    """

    relation_id: str
    target_id: str
    generation_prompts: Sequence[str]
    attribute_prompts: Sequence[str]
    blank_prompts: int


def parse_nested(fields: Fields, row: int) -> CounterfactCase:
    """Check and convert a record of the nested layout."""
    new = fields.text(f"{REWRITE}.target_new.str")
    true = fields.old_answer(f"{REWRITE}.target_true.str", "neighborhood_prompts")
    relation_id = fields.text(f"{REWRITE}.relation_id")
    request = EditRequest.from_dict(
        {
            "prompt": fields.text(f"{REWRITE}.prompt"),
            "subject": fields.text(f"{REWRITE}.subject"),
            "target_new": new,
            "target_true": true,
            "case_id": str(row),  # the row, since the ids of a selection need not start at 0
            "relation_id": relation_id,
        },
        where=f"{fields.where}, field {REWRITE!r}",
    )
    paraphrases, neighbors = fields.texts("paraphrase_prompts"), fields.texts("neighborhood_prompts")
    generations, attributes = fields.texts("generation_prompts"), fields.texts("attribute_prompts")
    return CounterfactCase(
        request=request,
        paraphrases=[Question(prompt, new, true) for prompt in paraphrases if prompt],
        neighbors=[Question(prompt, true, new) for prompt in neighbors if prompt and true],
        extras={"source_id": source_id(fields, "case_id", row)},
        relation_id=relation_id,
        target_id=fields.text(f"{REWRITE}.target_new.id"),
        generation_prompts=[prompt for prompt in generations if prompt],
        attribute_prompts=[prompt for prompt in attributes if prompt],
        blank_prompts=[*paraphrases, *neighbors, *generations, *attributes].count(""),
    )


def count_nested(cases: Sequence[CounterfactCase]) -> dict[str, int]:
    """Counts of incomplete records and of prompts, for the results.

    A stream or batch of several cases may be meant to change a neighbor's answer: that of a prompt that is edited, too.
    """
    edited = {case.request.text for case in cases}
    return {
        **count_missing(cases),
        "without_generation_prompts": sum(not case.generation_prompts for case in cases),
        "blank_prompts": sum(case.blank_prompts for case in cases),
        "paraphrase_prompts": sum(len(case.paraphrases) for case in cases),
        "neighborhood_prompts": sum(len(case.neighbors) for case in cases),
        "generation_prompts": sum(len(case.generation_prompts) for case in cases),
        "attribute_prompts": sum(len(case.attribute_prompts) for case in cases),
        "neighbors_that_are_edits": sum(one.prompt in edited for case in cases for one in case.neighbors),
    }


def parse_flat(fields: Fields, row: int) -> Case:
    """Check and convert a record: an edit, its paraphrases, and prompts of other facts with their answers.

    This is also the layout of a user's own facts. Needed are the prompt and the new answer; the old one is
    ``ground_truth``, or ``target_true`` as in an edit request, and the first of several.
    """
    new = fields.text("target_new")
    old = [*fields.one_or_more("ground_truth"), *fields.one_or_more("target_true")]
    true = old[0] if old else None
    request = EditRequest.from_dict(
        {
            "prompt": fields.text("prompt"),
            "subject": fields.text_or_none("subject"),
            "target_new": new,
            "target_true": true,
            "case_id": str(row),
            "relation_id": fields.text_or_none("relation_id"),
        },
        where=fields.where,
    )
    return Case(
        request=request,
        paraphrases=[Question(prompt, new, true) for prompt in fields.one_or_more("rephrase_prompt")],
        neighbors=[
            Question(prompt, answer, new) for prompt, answer in fields.pairs("locality_prompt", "locality_ground_truth")
        ],
        extras={"source_id": source_id(fields, "id" if fields.has("id") else "case_id", row)},
    )


def count_flat(cases: Sequence[Case]) -> dict[str, int]:
    """Counts of absent parts, and of odd neighbors and paraphrases, for the results.

    A neighbor's answer may not be the one that the edited fact had, or an edit of the same file may be meant to change
    it; a paraphrase may repeat the edit prompt.
    """
    edited = {case.request.text for case in cases}
    return {
        **count_missing(cases),
        "neighbors_with_another_object": sum(
            one.wanted != case.request.target_true
            for case in cases
            for one in case.neighbors
            if case.request.target_true is not None
        ),
        "neighbors_that_are_edits": sum(one.prompt in edited for case in cases for one in case.neighbors),
        "paraphrases_equal_to_prompt": sum(
            one.prompt == case.request.text for case in cases for one in case.paraphrases
        ),
    }


COUNTERFACT = Benchmark(
    name="counterfact",
    source=Source(
        title="CounterFact",
        files=("counterfact.json", "multi_counterfact.json", "counterfact.jsonl"),
        # The digest is named by many public projects that use this file.
        published=UrlFile(
            url=f"{SERVER}/counterfact.json", sha256="d017056125178a13728594e66a801357a8db9ed7973a7425554bb4271de9fc6f"
        ),
        sets={
            # Without edits that contradict each other, for runs of many edits.
            "multi": UrlFile(url="https://memit.baulab.info/data/dsets/multi_counterfact.json", sha256=None),
            # The same records as the full file, which the hub has in two splits.
            "hub": HubFile(
                repository="azhx/counterfact",
                paths=(
                    "data/train-00000-of-00001-05d11247db7abce8.parquet",
                    "data/test-00000-of-00001-bacb83500fca49a9.parquet",
                ),
                revision="c01c413f856ee38f5c080c9fc5e87aff478e2ff9",
                sort_by="case_id",
            ),
        },
        mini=DATA_FOLDER / "mini.jsonl",
        notes=("pararel_idx", f"{REWRITE}.target_true.id", "provenance"),
    ),
    parse=parse_nested,
    settings=(GENERATE, *FLUENCY_SETTINGS, CONSISTENCY_FILES, CONSISTENCY_TEXTS, *EVK_SETTINGS),
    count_odd=count_nested,
)

COUNTERFACT_FLAT = Benchmark(
    name="counterfact_flat",
    other_names=("counterfact_syn", "counterfact_wild", "counterfact_field"),
    source=Source(
        title="CounterFact (flat)",
        files=("counterfact-edit.json", "counterfact_flat.jsonl"),
        published=PinnedFile(
            repository="WanliYoung/Revisit-Editing-Evaluation",
            commit="61ccca3c1ecdb3976c9c0924e9352f3e64cc7d48",
            path="data/counterfact-edit.json",
            sha256="20c225e6299b3c5b2c569bd9103aa212806e0d1e6e0c307de5c379773979b967",
        ),
        sets={
            LOCFT_3K: locft_file("counterfact", "a34303165e89e5898a51646e6d17a21da924d815be086a1933bcd54a91e96076"),
        },
        mini=DATA_FOLDER / "mini_flat.jsonl",
        notes=("provenance",),
    ),
    parse=parse_flat,
    settings=(GENERATE, POPULATION, WILD_CONTEXT),
    count_odd=count_flat,
)

BENCHMARKS = (COUNTERFACT, COUNTERFACT_FLAT)
