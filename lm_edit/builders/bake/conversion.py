"""Conversion of ConceptEdit's concepts to records of BAKE-concept.

The paper's 902 records are not published. It builds them from ConceptEdit-Inter and ConceptEdit-Intra: every concept
gives one record with a definition of another superclass and one with a definition of its own. The 452 concepts of
``concept_data.json`` would give 904. The :class:`Conversion` counts what was left out, and why.

``concept_data.json`` has no prompts. Those of a record come from a file ``final_<model>_<module>.json`` of the same
release where one has the concept with this new definition, else from a :class:`ConceptWording`; locality prompts and
their answers are in those files only. The wording of the judge question is not published.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from edit_hooks.utils.errors import EditingError
from lm_edit.builders.replies import template_of
from lm_eval_tasks.bake.benchmark import NEIGHBOR_ANSWERS, REWRITE
from lm_eval_tasks.common.records.fields import Fields

MODULES = ("inter", "intra")


@dataclass(frozen=True, kw_only=True)
class ConceptWording:
    """Wording of the prompts that the release does not give.

    Attributes:
        edit, paraphrase: the prompts of a concept, with ``{}`` for its name.
        judge: the judge question, with ``{definition}`` for the new definition and ``{concept}`` for the name.
    """

    edit: str = "{} is defined as"
    paraphrase: str = "The definition of {} is"
    judge: str = 'Whether "{definition}" is the definition of {concept}?'

    def __post_init__(self) -> None:
        slots = {"edit": ["{}"], "paraphrase": ["{}"], "judge": ["{definition}", "{concept}"]}
        for name, needed in slots.items():
            text = getattr(self, name)
            if any(text.count(slot) != 1 for slot in needed):
                raise EditingError(f"{name}={text!r} needs {' and '.join(needed)} exactly once.")

    def judge_question(self, concept: str, definition: str) -> str:
        """The judge question of a record."""
        before, _, after = self.judge.partition("{definition}")
        return "".join((before.replace("{concept}", concept), definition, after.replace("{concept}", concept)))


class ReleasedPrompts(NamedTuple):
    """What a ``final_*.json`` of ConceptEdit holds for one concept and one new definition."""

    edit: str
    paraphrase: str
    neighbor: str
    neighbor_answer: str


@dataclass
class Conversion:
    """The converted records, and counts of what became of every concept.

    Attributes:
        records: in the schema of BAKE-J, with a parallel list of answers to the neighborhood prompts.
        num_concepts: concepts in the file; each could give one record per module.
        left_out: (concept, module, reason) of every record that was not made.
    """

    records: list[dict[str, Any]] = field(default_factory=list)
    num_concepts: int = 0
    left_out: list[tuple[str, str, str]] = field(default_factory=list)

    def statistics(self) -> dict[str, Any]:
        """Counts for a report: possible = made + left out."""
        reasons = Counter(reason for _, _, reason in self.left_out)
        return {
            "concepts": self.num_concepts,
            "possible_records": self.num_concepts * len(MODULES),
            "records": len(self.records),
            "records_by_module": dict(Counter(record["module"] for record in self.records)),
            "left_out": dict(sorted(reasons.items())),
            "without_neighbors": sum(not record["neighborhood_prompts"] for record in self.records),
        }


def convert(
    concepts: Iterable[tuple[str, Any]],
    released: Mapping[tuple[str, str], ReleasedPrompts] | None = None,
    wording: ConceptWording | None = None,
) -> Conversion:
    """Convert the concepts of ``concept_data.json``.

    Args:
        concepts: (place in the file, concept) pairs.
        released: prompts by concept and new definition, from :func:`read_released_prompts`.
        wording: of prompts that are not released.

    Raises:
        EditingError: for a concept without a name, and for fields of the wrong type.
    """
    released, wording = released or {}, wording or ConceptWording()
    conversion = Conversion()
    seen: set[tuple[str, str]] = set()
    for where, concept in concepts:
        fields = _fields(concept, where)
        name, old = fields.text("concept_name"), _optional_text(fields, "concept_def")
        conversion.num_concepts += 1
        for module in MODULES:
            new = _optional_text(fields, f"module_{module}.replace_def")
            prompts = released.get((name, new))
            if reason := _reason_to_leave_out(name, old, new, prompts, seen):
                conversion.left_out.append((name, module, reason))
                continue
            seen.add((_key(name), _key(new)))
            record = _record(name, module, old, new, prompts, wording)
            conversion.records.append({"case_id": len(conversion.records), **record})
    return conversion


def _reason_to_leave_out(
    name: str, old: str, new: str, prompts: ReleasedPrompts | None, seen: set[tuple[str, str]]
) -> str | None:
    if not old:
        return "the concept has no definition"
    if not new:
        return "the concept has no new definition of this module"
    if _key(old) == _key(new):
        return "the new definition is the old one"
    if (_key(name), _key(new)) in seen:
        return "an earlier record has the same concept and new definition"
    if prompts is not None and template_of(prompts.edit, name) is None:
        return "the released edit prompt does not contain the concept exactly once"
    return None


def _record(
    name: str, module: str, old: str, new: str, prompts: ReleasedPrompts | None, wording: ConceptWording
) -> dict[str, Any]:
    edit = wording.edit if prompts is None else template_of(prompts.edit, name)
    assert edit is not None  # _reason_to_leave_out has checked
    paraphrase = wording.paraphrase.replace("{}", name) if prompts is None else prompts.paraphrase
    return {
        "module": module,
        REWRITE: {
            "prompt": edit,
            "relation_id": f"concept_{module}",
            "subject": name,
            "target_new": {"str": new},
            "target_true": {"str": old},
        },
        "paraphrase_prompts": [paraphrase],
        "neighborhood_prompts": [] if prompts is None else [prompts.neighbor],
        NEIGHBOR_ANSWERS: [] if prompts is None else [prompts.neighbor_answer],
        "reverse_judge": {
            "prompt": wording.judge_question(name, new),
            "target_new": {"str": "yes"},
            "target_true": {"str": "no"},
        },
    }


def read_released_prompts(files: Iterable[Sequence[tuple[str, Any]]]) -> dict[tuple[str, str], ReleasedPrompts]:
    """The prompts of ConceptEdit's ``final_<model>_<module>.json`` files, by concept and new definition.

    The files of several models overlap; the first one with a concept and definition counts.

    Args:
        files: for every file its (place, record) pairs.

    Raises:
        EditingError: for records of another layout.
    """
    released: dict[tuple[str, str], ReleasedPrompts] = {}
    for records in files:
        for where, record in records:
            fields = _fields(record, where)
            prompts = ReleasedPrompts(
                edit=fields.text("prompt"),
                paraphrase=fields.text("phrase_prompt"),
                neighbor=fields.text("locality_prompt"),
                neighbor_answer=fields.text("locality_answer"),
            )
            released.setdefault((fields.text("label"), fields.text("target_new_desc")), prompts)
    return released


def _fields(record: Any, where: str) -> Fields:
    if not isinstance(record, Mapping):
        raise EditingError(f"{where}: the record is a {type(record).__name__}; an object is needed.")
    return Fields(record, where)


def _optional_text(fields: Fields, path: str) -> str:
    """A text without outer white space; empty if it is missing."""
    if fields.optional(path) in (None, ""):
        return ""
    return fields.text(path)


def _key(text: str) -> str:
    """A text for comparisons: without case, white space and a closing full stop."""
    return " ".join(text.lower().split()).rstrip(".")
