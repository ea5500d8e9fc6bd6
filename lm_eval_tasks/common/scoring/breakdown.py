"""Scores by a field of the records, such as the source data set or the category of a question.

``score_by=origin;category`` adds a column ``<metric>_by_<field>`` to every metric: a JSON text field value -> value and
number of scored cases. ``categories=FILE.json`` gives records a category: a JSON object from the id of a record, or
from its edit question, to a category. All tasks of a run see the file, and other data have the same ids by coincidence:
ids count in the tasks of benchmarks that declare :data:`CATEGORIES`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from edit_hooks.request import EditRequest
from edit_hooks.utils.errors import EditingError, near_misses
from edit_hooks.utils.logs import get_logger
from edit_hooks.utils.storage.files import user_path
from edit_hooks.utils.storage.json_io import read_json
from lm_eval_tasks.common.records.cases import Case
from lm_eval_tasks.common.scoring.measures import Score
from lm_eval_tasks.common.settings import Setting, Settings, text_setting

logger = get_logger("lm_eval.editing_tasks")

Aggregation = Callable[[Sequence[Any]], Any]

CATEGORY = "category"
NO_VALUE = "(none)"  # cases whose record has no value in the field

SCORE_BY = text_setting(
    "score_by", "also report every metric by these fields of the records", "fields, as in origin;category"
)
CATEGORIES = text_setting(
    "categories", "category of each record, for score_by=category", "a JSON file: id or edit question -> category"
)
BREAKDOWN_SETTINGS: tuple[Setting[Any], ...] = (SCORE_BY, CATEGORIES)


def breakdown_fields(settings: Settings) -> tuple[str, ...]:
    """The fields by which metrics are reported."""
    fields = [field.strip() for field in (SCORE_BY.read(settings) or "").split(";")]
    return tuple(dict.fromkeys(field for field in fields if field))


def prepare(docs: Sequence[dict[str, Any]], settings: Settings, with_ids: Sequence[Case] = ()) -> dict[str, int]:
    """Add the categories to the documents, and check that they have the fields of :data:`SCORE_BY`.

    Args:
        with_ids: the cases that ids of the categories may name, also those outside the subset of this run.

    Returns:
        Counts for ``data_source``: documents without a category, if categories are given.

    Raises:
        EditingError: for a file that is no such object or belongs to other records, and for fields that no record has.
    """
    counts = {}
    if (path := CATEGORIES.read(settings)) is not None:
        counts["without_category"] = _add_categories(docs, path, with_ids)
    known = {name for doc in docs for name, value in doc.items() if isinstance(value, str) and name != "case_id"}
    for field in breakdown_fields(settings):
        if field not in known:
            hint = near_misses(field, known) or (" Give categories=FILE.json." if field == CATEGORY else "")
            raise EditingError(f"score_by={field}: no record has this field.{hint} Fields: {', '.join(sorted(known))}.")
    return counts


def _add_categories(docs: Sequence[dict[str, Any]], path: str, with_ids: Sequence[Case]) -> int:
    """Add the field ``category``; an id of several records decides for none of them.

    Documents without an edit, as the questions of EVK-Bench about a stream, have none.

    Returns:
        The number of documents with an edit and without a category.
    """
    category_of = read_json(user_path(path, CATEGORIES.name), "categories file")
    if not isinstance(category_of, Mapping) or not all(isinstance(value, str) for value in category_of.values()):
        raise EditingError(f"categories={path} is no JSON object of texts, {CATEGORIES.accepted}.")
    ids = Counter(case.extras.get("source_id") for case in with_ids)
    edited = [doc for doc in docs if doc["edit_requests"]]
    missing = 0
    for doc in edited:
        source_id = doc.get("source_id")
        question = EditRequest.from_dict(doc["edit_requests"][0]).text
        category = category_of.get(question) or (category_of.get(source_id) if ids[source_id] == 1 else None)
        missing += category is None
        doc |= {} if category is None else {CATEGORY: category}
    if edited and missing == len(edited):
        ids_too = "no id and no edit question" if with_ids else "no edit question"
        raise EditingError(f"categories={path}: {ids_too} of the data is in it; is it of other data?")
    if missing:
        logger.warning(
            "%s gives no category to %d of %d cases (an id that occurs twice gives none)", path, missing, len(edited)
        )
    return missing


def breakdown_columns(column: str, fields: Sequence[str], cell: Aggregation) -> dict[str, Aggregation]:
    """The columns of a metric by field, with their aggregation."""
    return {f"{column}_by_{field}": partial(by_group, cell=cell) for field in fields}


def breakdown_row(column: str, fields: Sequence[str], doc: Mapping[str, Any], score: Score) -> dict[str, Any]:
    """The columns of one case, in the form that :func:`by_group` aggregates."""
    return {f"{column}_by_{field}": (doc.get(field) or NO_VALUE, score.value) for field in fields}


def by_group(values: Sequence[tuple[str, Any]], cell: Aggregation) -> str:
    """Aggregate by group.

    Args:
        values: per case its group and its value; ``None`` if unscored or excluded.
        cell: the metric's own aggregation.

    Returns:
        A JSON text group -> ``{"value", "n"}``, most cases first; ``n`` counts scored cases. Values have four decimals.
    """
    groups: dict[str, list[Any]] = {}
    for group, value in values:
        groups.setdefault(group, []).append(value)
    found = {}
    for group in sorted(groups, key=lambda name: (-len(groups[name]), name)):
        value = cell(groups[group])
        n = sum(one is not None for one in groups[group])
        found[group] = {"value": round(value, 4) if isinstance(value, float) else value, "n": n}
    return json.dumps(found, ensure_ascii=False)
