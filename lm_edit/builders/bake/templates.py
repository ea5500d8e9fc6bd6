"""Templates of relations, T(r) and T(r^-1) of the papers (TMLR, section 4.2), and the files that hold them.

A file of templates has ``relations`` in the layout of a file of facts, and no facts: those that a model has written or
that records were made with, for people to read and for ``build-bake --templates``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.json_io import read_json
from edit_hooks.utils.text.slots import fill_slots, split_slots
from lm_eval_tasks.common.records.fields import Fields

SUBJECT, OBJECT = "{subject}", "{object}"  # slots of a judge question
WHETHER = "Whether "  # how one begins
_SLOT = re.compile(r"\{(subject|object)\}")


class RelationTemplates(NamedTuple):
    """Templates of a relation; it has none if all three are empty.

    Attributes:
        prompts: statements or questions that the object completes, with ``{}`` for the subject.
        reverse: the same for the inverse relation, with ``{}`` for the object.
        judge: "Whether ...?" about the inverse relation, with ``{object}`` and ``{subject}``.
    """

    prompts: Sequence[str] = ()
    reverse: Sequence[str] = ()
    judge: str | None = None

    def lacks(self, form: str) -> str | None:
        """What an edit of the relation needs besides, if anything."""
        if len(self.prompts) < 2:
            return "two prompts, one for the edit and one for a paraphrase"
        if form == "qa" and not self.reverse:
            return "a reverse prompt (--form judge needs none)"
        return "a judge question" if self.judge is None else None

    def judge_question(self, subject: str, object: str) -> str:
        """The judge question; a name that looks like a slot stays a name."""
        names = {"subject": subject, "object": object}
        assert self.judge is not None  # build_records has checked
        return _SLOT.sub(lambda slot: names[slot[1]], self.judge)

    def to_json(self) -> dict[str, Any]:
        """The entry of a file; only ``prompts`` has a field if it is empty."""
        entry: dict[str, Any] = {"prompts": list(self.prompts)}
        if self.reverse:
            entry["reverse"] = list(self.reverse)
        return entry if self.judge is None else {**entry, "judge": self.judge}


def read_wording(fields: Fields) -> RelationTemplates:
    """The templates in an entry of ``relations``; of equal ones the first. An entry may have none at all.

    Raises:
        EditingError: for templates without their slots, other fields that look like misspelled ones, and an entry with
            some templates and without ``prompts``.
    """
    fields.optional("label")
    if not any(fields.has(name) for name in RelationTemplates._fields):
        for name in RelationTemplates._fields:
            fields.optional(name)
        unread = fields.unread()
        fields.check_spelling(unread)
        if unread:
            raise fields.error(unread[0], "is not known; prompts, reverse, judge and label are")
        return RelationTemplates()
    prompts, reverse = fields.texts("prompts", required=True), fields.texts("reverse")
    judge = fields.text("judge") if fields.has("judge") else None
    fields.check_spelling(fields.unread())
    for key, template in [("prompts", text) for text in prompts] + [("reverse", text) for text in reverse]:
        if len(split_slots(template)) != 2 or template == "{}":
            raise fields.error(key, f"has {template!r}; words and one {{}} are needed")
    if judge is not None and sorted(_SLOT.findall(judge)) != ["object", "subject"]:
        raise fields.error("judge", f"is {judge!r}; {{object}} and {{subject}} are needed once each")
    if judge is not None and not (judge.startswith(WHETHER) and judge.endswith("?")):
        raise fields.error("judge", f"is {judge!r}; it begins with 'Whether ' and ends with '?'")
    return RelationTemplates(tuple(dict.fromkeys(prompts)), tuple(dict.fromkeys(reverse)), judge)


def read_relations(fields: Fields, names: Sequence[str]) -> dict[str, RelationTemplates]:
    """The templates of the named entries of ``relations``.

    Raises:
        EditingError: for entries that are no objects, and as :func:`read_wording`.
    """
    found = {}
    for name in names:
        entry = fields.record["relations"][name]
        if not isinstance(entry, Mapping):
            raise fields.error(f"relations.{name}", "must be an object with prompts, judge and, for Q&J, reverse")
        found[name] = read_wording(Fields(entry, f"{fields.where}, relation {name!r}"))
    return found


def read_templates(path: str | Path) -> dict[str, RelationTemplates]:
    """Read a file of templates; one without any relation is accepted.

    Raises:
        EditingError: for unreadable JSON, another layout, and as :func:`read_relations`.
    """
    record = read_json(path, "file of templates")
    relations = record.get("relations") if isinstance(record, Mapping) else None
    if not isinstance(record, Mapping) or not isinstance(relations, Mapping):
        raise EditingError(
            f"{path} is no file of templates; an object with relations (name -> prompts, ...) is needed."
        )
    return read_relations(Fields(record, str(path)), list(relations))


def templates_content(wordings: Mapping[str, RelationTemplates], provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a file of templates."""
    return {"relations": {name: wording.to_json() for name, wording in wordings.items()}, "provenance": provenance}


def fill(template: str, name: str) -> str:
    """Fill the slot of a template; braces in the name are kept."""
    return fill_slots(template, name)
