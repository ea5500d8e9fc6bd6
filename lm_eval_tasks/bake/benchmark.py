"""BAKE-Q&J, BAKE-J and BAKE-concept: their files and schemas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError
from lm_eval_tasks.common.records.benchmark import Benchmark
from lm_eval_tasks.common.records.cases import Case, Question, count_missing
from lm_eval_tasks.common.records.dataset import HUB, Source, choose_data
from lm_eval_tasks.common.records.fields import Fields, source_id
from lm_eval_tasks.common.settings import Settings, choice_setting
from lm_eval_tasks.protocols.likelihood import GENERATE

HUB_ID = "jym7/BAKE"
REWRITE = "requested_rewrite"

# The answers of neighborhood prompts, in BAKE-concept only. Read as BAKE-J, its neighborhood prompts would be scored
# against the answer of the edited fact. Other converters of ConceptEdit may use other names.
NEIGHBOR_ANSWERS = "neighborhood_targets"
CONCEPT_FIELDS = dict.fromkeys(
    ("neighborhood_answers", "locality_prompt", "locality_answer"),
    "in BAKE-concept every neighborhood prompt has its own answer. Use the tasks bake_concept_es, bake_concept_gs, ... "
    f"(group bake_concept), which read the field {NEIGHBOR_ANSWERS!r}.",
)
CONCEPT_REMEDY = (
    "The converted records are not published. Build them from ConceptEdit's concept_data.json with lm-edit "
    "build-bake-concept, and give the file: data=/path."
)


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
    return _parse(fields, row)


def parse_concept(fields: Fields, row: int) -> BakeCase:
    """Check and convert a record of BAKE-concept: like BAKE-J, with an answer for every neighborhood prompt.

    The new definition competes with that answer, as the new object does in BAKE-J.
    """
    case = _parse(fields, row, shared_answer=False)
    prompts = fields.texts("neighborhood_prompts")
    answers = fields.texts(NEIGHBOR_ANSWERS, required=bool(prompts))
    if len(prompts) != len(answers):
        raise EditingError(
            f"{fields.where}: field {NEIGHBOR_ANSWERS!r} has {len(answers)} answers for {len(prompts)} "
            "neighborhood_prompts; one for each is needed."
        )
    if missing := [prompt for prompt, answer in zip(prompts, answers, strict=True) if prompt and not answer]:
        raise EditingError(f"{fields.where}: the answer of the neighborhood prompt {missing[0]!r} is empty; give one.")
    neighbors = [Question(p, a, case.request.target_new) for p, a in zip(prompts, answers, strict=True) if p]
    return replace(case, neighbors=neighbors)


def _parse(fields: Fields, row: int, *, has_reverse_qa: bool = False, shared_answer: bool = True) -> BakeCase:
    """``shared_answer``: the old answer is that of the neighborhood prompts, too; else the caller adds these."""
    new, old = fields.text(f"{REWRITE}.target_new.str"), f"{REWRITE}.target_true.str"
    true = fields.old_answer(old, "neighborhood_prompts") if shared_answer else fields.text_or_none(old)
    request = EditRequest.from_dict(
        {
            "prompt": fields.text(f"{REWRITE}.prompt"),
            "subject": fields.text(f"{REWRITE}.subject"),
            "target_new": new,
            "target_true": true,
            "case_id": str(row),  # the row, since the ids in the file need not be unique
            "relation_id": fields.optional(f"{REWRITE}.relation_id"),
        },
        where=f"{fields.where}, field {REWRITE!r}",
    )
    paraphrases, neighbors = fields.texts("paraphrase_prompts"), fields.texts("neighborhood_prompts")
    return BakeCase(
        request=request,
        paraphrases=[Question(prompt, new, true) for prompt in paraphrases if prompt],
        neighbors=[Question(prompt, true, new) for prompt in neighbors if prompt and true],
        extras={"source_id": source_id(fields, "case_id", row)},
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
    return {**count_missing(cases), "blank_prompts": sum(case.blank_prompts for case in cases)}


# ``raw`` is the published form for GPT-2 XL, ``correct`` for GPT-J and ``true`` for LLaMA-1 7B; ``instruction`` is like
# the form for LLaMA-2 7B (no space before the statement), in our own words.
JUDGE_TEMPLATES = {
    "raw": None,
    "correct": "{statement}, is the information described in this sentence correct?",
    "true": "{statement}, is the information described in this sentence true?",
    "instruction": (
        "Say yes or no about the factuality of the next sentence, where yes means that it is correct and no that it is "
        "wrong:{statement}. Is this sentence correct?"
    ),
}
# By default the record's own wording, which suits small base models.
JUDGE_TEMPLATE = choice_setting("judge_template", "wording of the judge question", list(JUDGE_TEMPLATES))

DATA_FOLDER = Path(__file__).parent / "data"

BAKE_QJ = Benchmark(
    name="bake",
    other_names=("bake_qj",),
    source=Source(
        title="BAKE-Q&J",
        hub_id=HUB_ID,
        files=("BAKE_qa.json", "BAKE_qa.jsonl"),
        mini=DATA_FOLDER / "mini.jsonl",
        mini_sets={"held_out": DATA_FOLDER / "held_out.jsonl"},  # settings are tuned on these facts
        notes=("provenance", "relation"),
        foreign_fields=CONCEPT_FIELDS,
    ),
    parse=parse_qa,
    settings=(GENERATE, JUDGE_TEMPLATE),
    count_odd=count_odd,
)

BAKE_J = Benchmark(
    name="bake_j",
    source=Source(
        title="BAKE-J",
        hub_id=HUB_ID,
        files=("BAKE_judge.json", "BAKE_judge.jsonl"),
        mini=DATA_FOLDER / "mini_judge.jsonl",
        notes=("provenance", "relation"),
        foreign_fields=CONCEPT_FIELDS,
    ),
    parse=parse_judge,
    settings=(GENERATE, JUDGE_TEMPLATE),
    count_odd=count_odd,
)


@dataclass(frozen=True, kw_only=True)
class ConceptBenchmark(Benchmark[BakeCase]):
    """BAKE-concept; its records are not published."""

    def _own_settings(self, settings: Settings) -> Settings:
        own = super()._own_settings(settings)
        if choose_data(own) == HUB:
            raise EditingError(f"data=hub: {self.source.title} is not on the Hugging Face hub. {CONCEPT_REMEDY}")
        return own


BAKE_CONCEPT = ConceptBenchmark(
    name="bake_concept",
    source=Source(
        title="BAKE-concept",
        hub_id="zjunlp/ConceptEdit",
        files=("BAKE_concept.json", "BAKE_concept.jsonl"),
        mini=DATA_FOLDER / "mini_concept.jsonl",
        notes=("provenance", "module"),
        foreign_fields=dict.fromkeys(
            ("concept_def", "target_new_desc"), f"it is a field of ConceptEdit. {CONCEPT_REMEDY}"
        ),
    ),
    parse=parse_concept,
    settings=(GENERATE, JUDGE_TEMPLATE),
    count_odd=count_odd,
)

BENCHMARKS = (BAKE_QJ, BAKE_J, BAKE_CONCEPT)
