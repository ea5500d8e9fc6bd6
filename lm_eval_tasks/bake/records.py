"""BAKE records: the published schema, read and checked; and the wordings of the judge prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from edit_hooks.request import EditRequest
from edit_hooks.utils.options import choice
from lm_eval_tasks.common.dataset import Loaded, Source, load
from lm_eval_tasks.common.fields import Fields

_MINI = Path(__file__).parent / "data"


_HUB_ID = "jym7/BAKE"


SOURCES = {
    "qa": Source(name="BAKE-Q&J", hub_id=_HUB_ID, files=("BAKE_qa.json", "BAKE_qa.jsonl"), mini=_MINI / "mini.jsonl"),
    "judge": Source(
        name="BAKE-J", hub_id=_HUB_ID, files=("BAKE_judge.json", "BAKE_judge.jsonl"), mini=_MINI / "mini_judge.jsonl"
    ),
}


ALL_SOURCES = tuple(SOURCES.values())


class Question(NamedTuple):
    """A prompt with the answer wanted after the edit and the one it competes with."""

    prompt: str
    wanted: str
    other: str


@dataclass(frozen=True, kw_only=True)
class BakeRecord:
    """One counterfactual edit and its probes.

    ``reverse_qa`` verbalizes (new object, inverse relation, ?): wanted is the edited subject, other the object's
    original subject. It is ``None`` in BAKE-J, whose relations have no unique inverse. ``reverse_judge`` asks
    "Whether ...?" for the reversed fact: wanted yes, other no. ``blank_prompts`` were in the lists and are not asked.
    """

    request: EditRequest
    source_id: str
    paraphrases: list[str]
    neighbors: list[str]
    blank_prompts: int
    reverse_qa: Question | None
    reverse_judge: Question


def load_records(settings: Mapping[str, Any], subset: str) -> Loaded[BakeRecord]:
    """Read BAKE-Q&J (``qa``) or BAKE-J (``judge``); raises EditingError for unreachable or invalid data."""
    judge_template(settings)  # a misspelt one is reported before anything is fetched
    loaded = load(SOURCES[subset], settings, parse_qa if subset == "qa" else parse_judge)
    loaded.source["without_paraphrases"] = sum(not record.paraphrases for record in loaded.records)
    loaded.source["blank_prompts"] = sum(record.blank_prompts for record in loaded.records)
    loaded.source["without_neighbors"] = sum(not record.neighbors for record in loaded.records)
    return loaded


def parse_qa(record: Mapping[str, Any], row: int, where: str) -> BakeRecord:
    """Check one record of BAKE-Q&J."""
    return _parse(record, row, where, reverse_qa=True)


def parse_judge(record: Mapping[str, Any], row: int, where: str) -> BakeRecord:
    """Check one record of BAKE-J: as Q&J, without ``reverse_qa``."""
    return _parse(record, row, where, reverse_qa=False)


def _parse(record: Mapping[str, Any], row: int, where: str, *, reverse_qa: bool) -> BakeRecord:
    fields = Fields(record, where)
    rewrite = "requested_rewrite"
    relation = record[rewrite].get("relation_id") if isinstance(record.get(rewrite), Mapping) else None
    request = EditRequest.from_dict(
        {
            "prompt": fields.text(f"{rewrite}.prompt"),
            "subject": fields.text(f"{rewrite}.subject"),
            "target_new": fields.text(f"{rewrite}.target_new.str"),
            "target_true": fields.text(f"{rewrite}.target_true.str"),
            "case_id": str(row),  # the row, not the file's own id: ids need not be unique
            "relation_id": relation,
        },
        where=f"{where}, field {rewrite!r}",
    )
    paraphrases, neighbors = fields.texts("paraphrase_prompts"), fields.texts("neighborhood_prompts")
    return BakeRecord(
        request=request,
        source_id=str(record.get("case_id", row)),
        paraphrases=[prompt for prompt in paraphrases if prompt],
        neighbors=[prompt for prompt in neighbors if prompt],
        blank_prompts=[*paraphrases, *neighbors].count(""),
        reverse_qa=_question(fields, "reverse_qa") if reverse_qa else None,
        reverse_judge=_question(fields, "reverse_judge"),
    )


def _question(fields: Fields, name: str) -> Question:
    return Question(
        fields.text(f"{name}.prompt"), fields.text(f"{name}.target_new.str"), fields.text(f"{name}.target_true.str")
    )


# How the reversed fact is put to the model. ``raw`` is the published form for GPT-2 XL, ``correct`` for GPT-J and
# ``true`` for LLaMA-1 7B; ``instruction`` is built like the one for LLaMA-2 7B (no space before the statement), in our
# own words.
JUDGE_TEMPLATES = {
    "raw": None,
    "correct": "{statement}, is the information described in this sentence correct?",
    "true": "{statement}, is the information described in this sentence true?",
    "instruction": (
        "Say yes or no about the factuality of the next sentence, where yes means that it is correct and no that it is "
        "wrong:{statement}. Is this sentence correct?"
    ),
}


JUDGE_OPTIONS = ("yes, it is true", "no, it is false")


def judge_template(settings: Mapping[str, Any]) -> str:
    """The setting ``judge_template``; raw (for small base models) unless given."""
    return choice(settings, "judge_template", list(JUDGE_TEMPLATES), "raw")


def judge_question(record: BakeRecord, template: str) -> Question:
    """The judge prompt under a template, with its option pair (the record's own strings for ``raw``)."""
    wording = JUDGE_TEMPLATES[template]
    if wording is None:
        return record.reverse_judge
    return Question(wording.replace("{statement}", statement(record)), *JUDGE_OPTIONS)


def statement(record: BakeRecord) -> str:
    """The reversed fact as a sentence: reverse question and subject, or the judge prompt without "Whether" and "?"."""
    if record.reverse_qa is not None:
        return f"{record.reverse_qa.prompt} {record.reverse_qa.wanted}"
    text = record.reverse_judge.prompt.removeprefix("Whether ").removesuffix("?").strip()
    return text[:1].upper() + text[1:]
