"""CounterFact in the flat layout of the editing frameworks: its file and schema."""

from __future__ import annotations

from collections.abc import Sequence

from edit_hooks.request import EditRequest
from edit_hooks.utils.pinned_file import PinnedFile
from lm_eval_tasks.common.benchmark import Benchmark
from lm_eval_tasks.common.cases import Case, Question
from lm_eval_tasks.common.dataset import Source
from lm_eval_tasks.common.fields import Fields, source_id
from lm_eval_tasks.protocols.likelihood import GENERATE


def parse_flat(fields: Fields, row: int) -> Case:
    """Check and convert a record: an edit, one paraphrase, and one prompt of another fact with the same true object."""
    new, true = fields.text("target_new"), fields.text("ground_truth")
    request = EditRequest.from_dict(
        {
            "prompt": fields.text("prompt"),
            "subject": fields.text("subject"),
            "target_new": new,
            "target_true": true,
            "case_id": str(row),
        },
        where=fields.where,
    )
    return Case(
        request=request,
        paraphrases=[Question(fields.text("rephrase_prompt"), new, true)],
        neighbors=[Question(fields.text("locality_prompt"), fields.text("locality_ground_truth"), new)],
        extras={"source_id": source_id(fields, "case_id", row)},
    )


def count_odd(cases: Sequence[Case]) -> dict[str, int]:
    """Counts of cases whose neighbor has another answer than the edited fact had, for the results."""
    return {
        "neighbors_with_another_object": sum(
            case.neighbors[0].wanted != case.request.target_true for case in cases if case.neighbors
        )
    }


COUNTERFACT_FLAT = Benchmark(
    name="counterfact_flat",
    source=Source(
        title="CounterFact (flat)",
        files=("counterfact-edit.json", "counterfact_flat.jsonl"),
        published=PinnedFile(
            repository="WanliYoung/Revisit-Editing-Evaluation",
            commit="61ccca3c1ecdb3976c9c0924e9352f3e64cc7d48",
            path="data/counterfact-edit.json",
            sha256="20c225e6299b3c5b2c569bd9103aa212806e0d1e6e0c307de5c379773979b967",
        ),
        foreign_fields={
            "requested_rewrite": "it is a field of the nested layout (several paraphrases and neighbors per record), "
            "which this task does not read; the flat file has one of each.",
        },
    ),
    parse=parse_flat,
    settings=(GENERATE,),
    count_odd=count_odd,
)

BENCHMARKS = (COUNTERFACT_FLAT,)
