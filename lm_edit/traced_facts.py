"""Facts to trace: edits, or facts without a new answer as in ROME's known_1000.json."""

from __future__ import annotations

from edit_hooks.lm.options.edit_sources import load_edits
from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError
from edit_hooks.utils.storage.files import names_file, user_path
from edit_hooks.utils.storage.json_io import JSON_SUFFIXES, read_rows
from lm_eval_tasks.common.records.fields import Fields
from lm_eval_tasks.common.records.foreign import is_known_facts
from lm_eval_tasks.common.settings import Settings


def load_facts(source: str, settings: Settings, num_facts: int | None) -> list[EditRequest]:
    """The first distinct facts of a benchmark or file; a trace reads their prompts, subjects and old answers.

    Raises:
        EditingError: as :func:`~edit_hooks.lm.options.edit_sources.load_edits`.
    """
    if names_file(source) and (path := user_path(source, "file of facts")).suffix in JSON_SUFFIXES:
        rows = read_rows(path, "file of facts")
        if is_known_facts(rows[0][1]):
            facts = [_known_fact(Fields(record, where)) for where, record in rows]
            if num_facts is not None and num_facts > len(facts):
                raise EditingError(f"num_edits={num_facts}, but {source} has {len(facts)} facts.")
            return facts[:num_facts]
    return load_edits(source, settings, num_facts)


def _known_fact(fields: Fields) -> EditRequest:
    """The fact of a record; it has no new answer, so the target is its answer, too."""
    answer, template = fields.text("attribute"), fields.text_or_none("template")
    return EditRequest.from_dict(
        {
            "prompt": template or fields.text("prompt"),
            "subject": fields.text("subject"),
            "target_new": answer,
            "target_true": answer,
            "case_id": fields.optional("known_id"),
            "relation_id": fields.text_or_none("relation_id"),
        },
        where=fields.where,
    )
