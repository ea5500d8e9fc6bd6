"""QAEdit: its files and the published schema."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edit_hooks.request import EditRequest
from edit_hooks.utils.storage.pinned_file import PinnedFile
from judges.match import normalize
from lm_eval_tasks.common.records.benchmark import Benchmark
from lm_eval_tasks.common.records.cases import Case, Question
from lm_eval_tasks.common.records.dataset import Source
from lm_eval_tasks.common.records.fields import Fields, source_id
from lm_eval_tasks.common.scoring.breakdown import BREAKDOWN_SETTINGS, CATEGORY
from lm_eval_tasks.protocols.grid import GRID_SETTINGS
from lm_eval_tasks.protocols.wild import WILD_SETTINGS
from lm_eval_tasks.qaedit.texts import same_text


def parse(fields: Fields, row: int) -> Case:
    """Check and convert a record.

    A case is an edit, its rephrased questions, and the first of the record's unrelated questions.
    """
    target = fields.text("target")
    request = EditRequest.from_dict(
        {
            "prompt": fields.text("prompt"),
            "subject": fields.text("subject"),
            "target_new": target,
            "case_id": str(row),  # the row, since the ids of the published 1k file are not unique
        },
        where=fields.where,
    )
    locality = fields.objects("locality")[0]
    category = fields.optional(CATEGORY)
    return Case(
        request=request,
        paraphrases=[Question(prompt, target) for prompt in fields.one_or_more("rephrase", required=True)],
        neighbors=[Question(locality.text("loc"), locality.text("loc_ans"))],
        extras={
            "source_id": source_id(fields, "id", row),
            "origin": fields.optional("source"),
            **({} if category is None else {CATEGORY: category}),
        },
    )


def count_odd(cases: Sequence[Case]) -> dict[str, int]:
    """Counts of repeated ids, of locality questions that are edited, and of odd targets.

    Odd are targets that the stop rule or the normalization of answers affects.
    """
    edited = {same_text(case.request.text) for case in cases}
    ids = [case.extras["source_id"] for case in cases]
    targets = [case.request.target_new for case in cases]
    return {
        "duplicate_ids": len(ids) - len(set(ids)),
        # A stream that makes the edit is meant to change the answer.
        "neighbors_that_are_edits": sum(same_text(one.prompt) in edited for case in cases for one in case.neighbors),
        # The natural stop "." can cut these answers short; they are included and counted.
        "targets_with_inner_period": sum("." in target[:-1] for target in targets),
        "targets_ending_in_period": sum(target.endswith(".") for target in targets),
        "targets_empty_when_normalized": sum(not normalize(target) for target in targets),
    }


QAEDIT = Benchmark(
    name="qaedit",
    other_names=("qaedit_syn", "qaedit_wild"),
    source=Source(
        title="QAEdit",
        hub_id="WenDingY/QAEdit",
        files=("QAEdit.json", "QAEdit_inter_1k.json", "QAEdit.jsonl"),
        mini=Path(__file__).parent / "data" / "mini.jsonl",
        # The 1,000 rows of the paper's sequential editing, which are not the first 1,000 of QAEdit.json.
        sets={
            "inter_1k": PinnedFile(
                repository="WanliYoung/Revisit-Editing-Evaluation",
                commit="61ccca3c1ecdb3976c9c0924e9352f3e64cc7d48",
                path="data/QAEdit_inter_1k.json",
                sha256="640e1d279759263fdaae543a385680d21a55aa3597ca8b597ffd7937fef07c42",
            )
        },
        notes=("provenance",),
    ),
    parse=parse,
    settings=(*WILD_SETTINGS, *GRID_SETTINGS, *BREAKDOWN_SETTINGS),
    count_odd=count_odd,
)

BENCHMARKS = (QAEDIT,)
