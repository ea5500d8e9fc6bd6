"""QAEdit records: the published schema, read and checked; and the contexts in which WILD puts a question."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edit_hooks.request import EditRequest
from edit_hooks.utils.options import choice
from judges.match import normalize
from lm_eval_tasks.common.dataset import Loaded, Source, load
from lm_eval_tasks.common.fields import Fields

SOURCE = Source(
    name="QAEdit",
    hub_id="WenDingY/QAEdit",
    files=("QAEdit.json", "QAEdit_inter_1k.json", "QAEdit.jsonl"),
    mini=Path(__file__).parent / "data" / "mini.jsonl",
)


ALL_SOURCES = (SOURCE,)


# `qa_inst` is the released code, with a blank line; the figure of the paper shows a single newline.
CONTEXTS = {
    "qa_inst": "Please answer the question:\n\nQ: {question}\nA:",
    "qa_inst_single_newline": "Please answer the question:\nQ: {question}\nA:",
    "question_only": "{question}",
}


@dataclass(frozen=True, kw_only=True)
class QAEditRecord:
    """An edit of a question's answer, the rephrased question, and an unrelated one (the first of the file's five)."""

    request: EditRequest
    source_id: str
    origin: str | None
    rephrase: str
    locality_question: str
    locality_answer: str


def load_records(settings: Mapping[str, Any], subset: str | None = None) -> Loaded[QAEditRecord]:
    """Read QAEdit; raises EditingError for unreachable or invalid data. Counts of odd rows go to the source."""
    context(settings)  # a misspelt one is reported before anything is fetched
    loaded = load(SOURCE, settings, parse)
    targets = [record.request.target_new for record in loaded.records]
    ids = [record.source_id for record in loaded.records]
    loaded.source["duplicate_ids"] = len(ids) - len(set(ids))
    # The natural stop "." can cut these answers short; they are kept and counted.
    loaded.source["targets_with_inner_period"] = sum("." in target[:-1] for target in targets)
    loaded.source["targets_ending_in_period"] = sum(target.endswith(".") for target in targets)
    loaded.source["targets_empty_when_normalized"] = sum(not normalize(target) for target in targets)
    return loaded


def parse(record: Mapping[str, Any], row: int, where: str) -> QAEditRecord:
    """Check one record against the published schema."""
    fields = Fields(record, where)
    request = EditRequest.from_dict(
        {
            "prompt": fields.text("prompt"),
            "subject": fields.text("subject"),
            "target_new": fields.text("target"),
            "case_id": str(row),  # the row: ids of the published 1k file are not unique
        },
        where=where,
    )
    locality = Fields(fields.objects("locality")[0], f"{where}, locality[0]")
    return QAEditRecord(
        request=request,
        source_id=str(record.get("id", row)),
        origin=record.get("source"),
        rephrase=fields.text("rephrase"),
        locality_question=locality.text("loc"),
        locality_answer=locality.text("loc_ans"),
    )


def context(settings: Mapping[str, Any]) -> str:
    """The text around a question, as the setting ``wild_context`` asks; ``{question}`` marks its place."""
    return CONTEXTS[choice(settings, "wild_context", list(CONTEXTS), "qa_inst")]
