"""Conditions on results and runs, as ``--only`` of commands gives them, and values as the texts that are compared."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import pandas as pd

from edit_hooks.run_options import RUN_OPTIONS
from edit_hooks.utils.errors import EditingError, near_misses
from lm_eval_tasks.report.run_options import options_of

LISTED_IN = {"edits": "edit_options", "answers": "answer_options"}  # columns of options without a column of their own
LISTED = {one.name: one for one in RUN_OPTIONS if not one.column and one.changes in LISTED_IN}
LABELS = {"editor": "editor_label", "model": "model_label"}  # field -> column of its name in the plan of a sweep
SAMPLE_FILE = ("file", "task")  # columns that name the samples of a result
MATRIX = (*SAMPLE_FILE, "metric", "filter")  # columns that name the matrix of a result
MAX_NAMED = 12  # values that an error lists


def read_conditions(conditions: Sequence[str]) -> dict[str, list[str]]:
    """Parse conditions ``FIELD=VALUE[,VALUE]`` into field -> texts after ``=``; raises EditingError for other texts.

    The rows decide whether a text is one value with commas or several values.
    """
    wanted: dict[str, list[str]] = {}
    for condition in conditions:
        name, equals, text = condition.partition("=")
        if not equals or not name:
            raise EditingError(f"--only {condition!r}: FIELD=VALUE[,VALUE] is needed, as in --only editor=memit.")
        wanted.setdefault(name, []).append(text)
    return wanted


def filter_rows(results: pd.DataFrame, conditions: Sequence[str]) -> pd.DataFrame:
    """The rows that satisfy all conditions ``FIELD=VALUE[,VALUE]`` (``--only``).

    A field is a column, or an option of runs without a column of its own, as ``edit_context``; one that a run was not
    given has its default; editor and model also have the names that a sweep's plan gives them. Conditions on one field
    are alternatives. A text is a value of the field or, if no row has it, several between commas; an empty text is the
    value of rows that have none.

    Raises:
        EditingError: for texts of another form, unknown fields, and when no row is left.
    """
    for name, given in read_conditions(conditions).items():
        texts, labels = _texts(results, name), _labels(results, name)
        known = {*texts, *labels} - ({""} - set(texts))
        accepted = accepted_values(given, known)
        if not accepted & known:
            raise unknown_value(name, given, accepted, known, "result")
        results = results[texts.isin(accepted) | labels.isin(accepted - {""})]
    return results


def accepted_values(given: Sequence[str], known: Collection[str]) -> set[str]:
    """The values that the texts of conditions accept: a text that is no known value is several, between commas."""
    return {value for text in given for value in ([text] if text in known else text.split(","))}


def unknown_value(
    name: str, given: Sequence[str], wanted: Collection[str], known: Collection[str], what: str
) -> EditingError:
    """The error about conditions that leave no result, or another thing that is chosen; it lists the known values."""
    near = "".join(dict.fromkeys(near_misses(value, known) for value in sorted(set(wanted) - {""})))
    more = f" and {len(known) - MAX_NAMED} more" if len(known) > MAX_NAMED else ""
    found = ", ".join(sorted(known)[:MAX_NAMED]) + more
    return EditingError(f"--only {name}={','.join(given)} leaves no {what}; {name} is one of: {found}.{near}")


def unknown_field(name: str, known: Collection[str], owner: str) -> EditingError:
    """The error about a field that results, or another owner, do not have."""
    return EditingError(
        f"--only {name}: {owner} have no such field.{near_misses(name, known)} Accepted: {', '.join(known)}."
    )


def places_of(rows: pd.DataFrame, columns: Sequence[str]) -> set[tuple[str, ...]]:
    """The values of the rows in some columns."""
    return set(zip(*(rows[column] for column in columns), strict=True))


def rows_at(rows: pd.DataFrame, columns: Sequence[str], places: Collection[tuple[str, ...]]) -> pd.DataFrame:
    """The rows that have one of the places in these columns."""
    found = [place in places for place in zip(*(rows[column] for column in columns), strict=True)]
    return rows[pd.Series(found, index=rows.index, dtype=bool)]


def _texts(results: pd.DataFrame, name: str) -> pd.Series[str]:
    """The values of a field, which is a column or an option of runs that has none."""
    if name in results.columns:
        return results[name].map(text_of)
    if (option := LISTED.get(name)) is None:
        raise unknown_field(name, [*results.columns, *LISTED], "results")
    default = text_of(option.default)
    return results[LISTED_IN[option.changes]].map(lambda text: options_of(text_of(text)).get(name, default))


def _labels(results: pd.DataFrame, name: str) -> pd.Series[str]:
    """The names that plans of sweeps give to the values of a field; "" for rows without one."""
    column = LABELS.get(name)
    return results[column].map(text_of) if column in results.columns else pd.Series("", index=results.index)


def is_missing(value: object) -> bool:
    """Whether a cell of a frame holds nothing: ``None`` or NaN."""
    return value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value))


def text_of(value: object) -> str:
    """A cell as text: nothing is empty, whole numbers have no decimal point."""
    if is_missing(value):
        return ""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
