"""Categories of QAEdit's records: those of a file, as released, get one of the ten names of the paper's table 10.

The published records have no category, and who or what assigned those of the table is not said. Here a language model
chooses, in the prompt of :mod:`lm_edit.builders.qaedit.wording` that also new records get. Everything else in a record
stays. A record that has a category keeps it, so that corrections by people survive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from edit_hooks.utils.errors import EditingError
from judges.backends.base import Outcome
from judges.prompt import Chat
from lm_edit.builders.qaedit.building import BUILDER_VERSION, read_category
from lm_edit.builders.qaedit.questions import UnusableError
from lm_edit.builders.qaedit.wording import CATEGORIES
from lm_edit.builders.qaedit.wording import CATEGORY as PROMPT
from lm_eval_tasks.common.records.dataset import RawRecords, read_raw
from lm_eval_tasks.common.records.fields import Fields
from lm_eval_tasks.common.scoring.breakdown import CATEGORY
from lm_eval_tasks.qaedit.benchmark import QAEDIT

PROVENANCE = "provenance"


class LabelingRecord(NamedTuple):
    """A checked record: its place for messages, its fields, and its edit question."""

    where: str
    record: Mapping[str, Any]
    question: str

    @property
    def has_category(self) -> bool:
        """Whether the record needs none."""
        return self.record.get(CATEGORY) is not None


@dataclass
class Labeling:
    """The records, and what is left to people.

    Attributes:
        records: all of them, in order.
        num_kept: records that had a category.
        without_category: (location, reason) of the others without a usable reply.
    """

    records: list[dict[str, Any]] = field(default_factory=list)
    num_kept: int = 0
    without_category: list[tuple[str, str]] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """Number of records by category, in the order of the paper's table; others after them."""
        found = Counter(str(record[CATEGORY]) for record in self.records if record.get(CATEGORY) is not None)
        return {name: found[name] for name in (*CATEGORIES, *sorted(set(found) - set(CATEGORIES)))}

    def by_question(self) -> dict[str, str]:
        """Edit question -> category, as the setting ``categories`` of the tasks reads it.

        Questions of several records with different categories are left out.
        """
        found: dict[str, set[str]] = {}
        for record in self.records:
            if record.get(CATEGORY) is not None:
                found.setdefault(_question(record, "a labeled record"), set()).add(record[CATEGORY])
        return {question: names.pop() for question, names in found.items() if len(names) == 1}


def read_records(data: str) -> tuple[list[LabelingRecord], RawRecords]:
    """Read and check records in the released layout.

    Args:
        data: as the setting ``data`` of the tasks: a file or folder, ``hub``, ``hub:inter_1k``, ``mini``.

    Raises:
        EditingError: for data that cannot be read, and for a record that the tasks would refuse.
    """
    raw = read_raw(QAEDIT.source, {"data": data})
    return [_row(where, record) for where, record in raw.rows], raw


def _row(where: str, record: Any) -> LabelingRecord:
    if not isinstance(record, Mapping):
        raise EditingError(f"{where}: the record is a {type(record).__name__}; an object is needed.")
    row = LabelingRecord(where, record, _question(record, where))
    if row.has_category and not isinstance(record[CATEGORY], str):
        raise EditingError(f"{where}: field 'category' is {record[CATEGORY]!r}; a text is needed, or no such field.")
    if not isinstance(record.get(PROVENANCE, {}), Mapping):
        raise EditingError(f"{where}: field 'provenance' is no object; drop it.")
    return row


def _question(record: Mapping[str, Any], where: str) -> str:
    """The edit question as the tasks read it.

    Raises:
        EditingError: for a record that the tasks would refuse.
    """
    return QAEDIT.layout.read(Fields(record, where), 0).request.text


def make_chats(rows: Sequence[LabelingRecord]) -> list[Chat]:
    """A chat for every record without a category, in order."""
    return [PROMPT.chat(row.question) for row in rows if not row.has_category]


def label(rows: Sequence[LabelingRecord], outcomes: Sequence[Outcome], provenance: Mapping[str, Any]) -> Labeling:
    """Add the categories.

    Args:
        outcomes: a reply or a fault for each of :func:`make_chats`.
        provenance: origin of the categories, stored in the ``provenance`` of each record that gets one.
    """
    labeling = Labeling()
    origin = {"builder_version": BUILDER_VERSION, "prompts": {PROMPT.name: PROMPT.hash}, **provenance}
    queue = iter(outcomes)
    for row in rows:
        record = dict(row.record)
        labeling.records.append(record)
        if row.has_category:
            labeling.num_kept += 1
            continue
        try:
            record[CATEGORY] = read_category(next(queue))
            record[PROVENANCE] = {**record.get(PROVENANCE, {}), CATEGORY: origin}
        except UnusableError as reason:
            labeling.without_category.append((row.where, str(reason)))
    return labeling
