"""BAKE-Q&J and BAKE-J: their files and the published schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edit_hooks.request import EditRequest
from lm_eval_tasks.common.benchmark import Benchmark
from lm_eval_tasks.common.cases import Case, Question
from lm_eval_tasks.common.dataset import Source
from lm_eval_tasks.common.fields import Fields

HUB_ID = "jym7/BAKE"
REWRITE = "requested_rewrite"


@dataclass(frozen=True, kw_only=True)
class BakeCase(Case):
    """A counterfactual edit with its reverse questions.

    Attributes:
        reverse_qa: the prompt (new object, inverse relation, ?). The edited subject is wanted; the object's original
            subject competes. ``None`` in BAKE-J, whose relations have no unique inverse.
        reverse_judge: "Whether ...?" for the reversed fact. Yes is wanted; no competes.
        blank_prompts: number of blank prompts in the record's lists, which are left out.
    """

    reverse_qa: Question | None
    reverse_judge: Question
    blank_prompts: int


def parse_qa(fields: Fields, row: int) -> BakeCase:
    """Check and convert a record of BAKE-Q&J."""
    return _parse(fields, row, has_reverse_qa=True)


def parse_judge(fields: Fields, row: int) -> BakeCase:
    """Check and convert a record of BAKE-J: like Q&J, without ``reverse_qa``."""
    return _parse(fields, row, has_reverse_qa=False)


def _parse(fields: Fields, row: int, *, has_reverse_qa: bool) -> BakeCase:
    rewrite = fields.record.get(REWRITE)
    new, true = fields.text(f"{REWRITE}.target_new.str"), fields.text(f"{REWRITE}.target_true.str")
    request = EditRequest.from_dict(
        {
            "prompt": fields.text(f"{REWRITE}.prompt"),
            "subject": fields.text(f"{REWRITE}.subject"),
            "target_new": new,
            "target_true": true,
            "case_id": str(row),  # the row, since the ids in the file need not be unique
            "relation_id": rewrite.get("relation_id") if isinstance(rewrite, Mapping) else None,
        },
        where=f"{fields.where}, field {REWRITE!r}",
    )
    paraphrases, neighbors = fields.texts("paraphrase_prompts"), fields.texts("neighborhood_prompts")
    return BakeCase(
        request=request,
        paraphrases=[Question(prompt, new, true) for prompt in paraphrases if prompt],
        neighbors=[Question(prompt, true, new) for prompt in neighbors if prompt],
        extras={"source_id": str(fields.record.get("case_id", row))},
        reverse_qa=_question(fields, "reverse_qa") if has_reverse_qa else None,
        reverse_judge=_question(fields, "reverse_judge"),
        blank_prompts=[*paraphrases, *neighbors].count(""),
    )


def _question(fields: Fields, name: str) -> Question:
    return Question(
        fields.text(f"{name}.prompt"), fields.text(f"{name}.target_new.str"), fields.text(f"{name}.target_true.str")
    )


def count_odd(cases: Sequence[BakeCase]) -> dict[str, int]:
    """Counts of incomplete records, for the results."""
    return {
        "without_paraphrases": sum(not case.paraphrases for case in cases),
        "blank_prompts": sum(case.blank_prompts for case in cases),
        "without_neighbors": sum(not case.neighbors for case in cases),
    }


BAKE_QJ = Benchmark(
    name="bake",
    other_names=("bake_qj",),
    source=Source(
        title="BAKE-Q&J",
        hub_id=HUB_ID,
        files=("BAKE_qa.json", "BAKE_qa.jsonl"),
        mini=Path(__file__).parent / "data" / "mini.jsonl",
    ),
    parse=parse_qa,
    count_odd=count_odd,
)

BAKE_J = Benchmark(
    name="bake_j",
    source=Source(title="BAKE-J", hub_id=HUB_ID, files=("BAKE_judge.json", "BAKE_judge.jsonl")),
    parse=parse_judge,
    count_odd=count_odd,
)

BENCHMARKS = (BAKE_QJ, BAKE_J)
