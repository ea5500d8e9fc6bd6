"""Pools of demonstrations for in-context editing: facts with questions about them.

A record has an edit, paraphrases of its prompt (*update*: the answer is the new one) and questions about other facts
(*retain*: the answer is unchanged). Files in the CounterFact and BAKE schemas are supported. The built-in pool consists
of invented people and places, so no benchmark can contain it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edit_hooks.deltas.context_edit import format_demonstration
from edit_hooks.prompt_context import QUESTION_PREFIX, content_of, fact_line
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.files import sha256_of
from edit_hooks.utils.storage.json_io import read_rows

BUILTIN = "builtin"
COUNTERFACT_FIELD = "pararel_idx"  # of CounterFact's records; others in its schema, such as BAKE's, lack it


@dataclass(frozen=True)
class PoolRecord:
    """One fact and questions about it.

    Attributes:
        edit: the fact.
        paraphrases: questions whose answer is ``edit.target_new``.
        neighbors: (question, answer) pairs about other facts.
    """

    edit: EditRequest
    paraphrases: tuple[str, ...]
    neighbors: tuple[tuple[str, str], ...]

    def demonstration(self, question: str, answer: str) -> str:
        """The demonstration that answers a question given this fact."""
        return format_demonstration(line_of(self.edit), question, answer, self.edit.separator)

    def copy_demonstration(self) -> str:
        """The demonstration whose question is the edit prompt itself; similarity to a request is measured with it."""
        return self.demonstration(self.edit.bare_text, self.edit.target_new)


def line_of(request: EditRequest) -> str:
    """The line that states the fact of a request."""
    return fact_line(request.bare_text, request.target_new, request.separator)


def query_text(request: EditRequest) -> str:
    """The text of a request that is compared with demonstrations: the fact and its question, without the answer."""
    return f"{line_of(request)}{QUESTION_PREFIX}{request.bare_text}"


@dataclass(frozen=True)
class Pool:
    """The usable records of a source.

    Attributes:
        incomplete: number of records without a paraphrase or a neighbor with its answer, which are left out.
        digest: checksum of the source.
    """

    records: tuple[PoolRecord, ...]
    incomplete: int
    digest: str

    @functools.cached_property
    def prompts(self) -> frozenset[str]:
        """All questions of the pool, lower case."""
        return frozenset(
            text.lower()
            for record in self.records
            for text in (record.edit.bare_text, *record.paraphrases, *(question for question, _ in record.neighbors))
        )

    @functools.cached_property
    def edits(self) -> frozenset[str]:
        """All edit prompts of the pool, lower case."""
        return frozenset(record.edit.bare_text.lower() for record in self.records)


@functools.cache
def load_pool(source: str, start: int = 0, clean_paraphrases: bool = False) -> Pool:
    """The built-in pool, or the records of a JSON or JSONL file from number ``start`` on.

    Args:
        clean_paraphrases: apply :func:`without_unrelated_sentences` to the paraphrases of CounterFact's records.

    Raises:
        EditingError: the file cannot be read, has another schema or holds no usable record.
    """
    if source == BUILTIN:
        return Pool(tuple(_builtin_records()), 0, BUILTIN)
    try:
        rows = read_rows(source, "pool")
    except EditingError as error:
        raise EditingError(
            f"{error} A pool is a JSON or JSONL file in the CounterFact or BAKE schema, or {BUILTIN!r}."
        ) from None
    records = [_parse_record(row, f"pool {where}", clean_paraphrases) for where, row in rows[start:]]
    usable = tuple(record for record in records if record.paraphrases and record.neighbors)
    if not usable:
        raise EditingError(f"pool={source}: no usable record from number {start} on (of {len(rows)}).")
    return Pool(usable, len(records) - len(usable), sha256_of(Path(source).expanduser()))


def without_unrelated_sentences(paraphrase: str, subject: str) -> str:
    """A paraphrase of CounterFact without the text before its own sentence, as IKE's release prepares the file.

    CounterFact puts a sentence about something else before many paraphrases. Kept is the text after the last period or
    line break before the first mention of the subject; where the rest has a heading "Category", the text from the
    subject on. A paraphrase without the subject is unchanged.
    """
    before, mention, after = paraphrase.partition(subject)
    if not mention:
        return paraphrase
    start = max(before.rfind("."), before.rfind("\n")) + 1
    own = before[start:] + mention + after
    return (mention + after if "Category" in own else own).strip()


def _parse_record(row: object, where: str, clean_paraphrases: bool) -> PoolRecord:
    if not isinstance(row, Mapping) or not isinstance(row.get("requested_rewrite"), Mapping):
        raise EditingError(
            f"{where}: the field 'requested_rewrite' is missing; give records in the CounterFact or BAKE schema."
        )
    rewrite = dict(row["requested_rewrite"])
    objects = {name: rewrite.get(name) or {} for name in ("target_new", "target_true")}
    lists = {name: row.get(name) or [] for name in ("paraphrase_prompts", "neighborhood_prompts")}
    for name, value in objects.items():
        if not isinstance(value, Mapping):
            raise EditingError(f"{where}: {name!r} is {value!r}; an object with 'str' is needed.")
    for name, value in lists.items():
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise EditingError(f"{where}: {name!r} is {value!r}; a list of texts is needed.")
    targets = {name: value.get("str") for name, value in objects.items()}
    fields = {
        "prompt": rewrite.get("prompt"),
        "subject": rewrite.get("subject"),
        "separator": row.get("separator"),
        **targets,
    }
    edit = EditRequest.from_dict({name: value for name, value in fields.items() if value is not None}, where=where)
    neighbors = list(filter(None, map(content_of, lists["neighborhood_prompts"])))
    paraphrases = list(filter(None, map(content_of, lists["paraphrase_prompts"])))
    if clean_paraphrases and COUNTERFACT_FIELD in row and edit.subject:
        paraphrases = [without_unrelated_sentences(text, edit.subject) for text in paraphrases]
    return PoolRecord(
        edit=edit,
        paraphrases=tuple(paraphrases),
        neighbors=tuple((text, edit.target_true) for text in neighbors) if edit.target_true else (),
    )


# (edit prompt, paraphrases, subjects, objects), all invented here. "{}" is the subject.
_RELATIONS: Sequence[tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = (
    (
        "The mother tongue of {} is",
        ("At home {} speaks", "The language {} grew up with is"),
        ("Arlo Venn", "Mirela Tosk", "Jonas Habbeck", "Ines Quall", "Pavel Ostrin", "Dora Lindgard", "Teo Marrash"),
        ("Dutch", "Welsh", "Finnish", "Korean", "Greek", "Basque", "Danish"),
    ),
    (
        "The town of {} is located in",
        ("Travellers to {} fly to", "The country around the town of {} is"),
        ("Brellin", "Osterwick", "Caldora", "Nimmersee", "Port Savane", "Yarrowmouth", "Tessaly"),
        ("Portugal", "Norway", "Chile", "Japan", "Ghana", "Austria", "Canada"),
    ),
    (
        "{} works as a",
        ("The profession of {} is that of a", "People know {} as a"),
        ("Hilda Bromm", "Samir Okello", "Lena Fauste", "Viktor Amsel", "Rosa Tienda", "Colm Arden", "Yuki Hanato"),
        ("baker", "geologist", "lawyer", "sculptor", "pilot", "nurse", "weaver"),
    ),
    (
        "The instrument that {} plays is the",
        ("On stage {} is seen with the", "As a musician {} chose the"),
        ("Greta Sool", "Malik Dorne", "Petra Wynn", "Ivo Castell", "Nora Blix", "Emil Raske", "Salma Irwin"),
        ("cello", "flute", "harp", "trombone", "oboe", "drums", "organ"),
    ),
    (
        "The company {} was founded in",
        ("The first office of {} opened in", "The birthplace of the firm {} is"),
        ("Halvex", "Mirrowell", "Tandrix", "Coppergate Mills", "Solvane", "Bexley & Orr", "Nordlux"),
        ("Lyon", "Boston", "Nairobi", "Osaka", "Prague", "Lima", "Oslo"),
    ),
    (
        "The author of the novel {} is",
        ("The novel {} was written by", "The cover of {} bears the name of"),
        ("The Salt Orchard", "Nine Winters", "A Lamp for Ada", "The Glass Ferry", "Low Tide", "Red Clover", "Ashlane"),
        ("Mara Ellery", "Tomas Brink", "Joan Sayer", "Felix Durand", "Anna Kosta", "Leo Hartwell", "Ruth Amado"),
    ),
)


def _builtin_records() -> list[PoolRecord]:
    """One record per subject; its new object is that of the next subject, and neighbors keep their own."""
    records = []
    for prompt, paraphrases, subjects, objects in _RELATIONS:
        for number, subject in enumerate(subjects):
            edit = EditRequest(
                prompt=prompt,
                subject=subject,
                target_new=objects[(number + 1) % len(objects)],
                target_true=objects[number],
            )
            others = [(number + step) % len(subjects) for step in (2, 3)]
            records.append(
                PoolRecord(
                    edit=edit,
                    paraphrases=tuple(text.replace("{}", subject) for text in paraphrases),
                    neighbors=tuple((prompt.replace("{}", subjects[i]), objects[i]) for i in others),
                )
            )
    return records
