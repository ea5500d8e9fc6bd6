"""Which runs may stand side by side, and what they are called: for `results show`, figures, leaderboard and exports.

The columns that tell runs apart follow from the table of run options (:mod:`edit_hooks.run_options`). An option
without a column of its own is in ``edit_options`` or ``answer_options``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from edit_hooks.run_options import RUN_OPTIONS
from lm_edit.results.filters import is_missing, text_of
from lm_eval_tasks.report.model_parts import differing_parts

if TYPE_CHECKING:
    from pandas import DataFrame

# Columns in which the results of a metric have to agree to be compared, with their names in messages.
SAME_SCORE = {
    "task_version": "task version",
    "data": "data source",
    "data_revision": "data revision",
    "data_hash": "hash of the data",
    "population": "population",
    "judge": "judge",
    "protocol": "protocol",
}
# The same where the cases themselves are not at hand.
SAME_CASES = {"limit": "--limit", "samples": "choice of --samples"}
MODEL = {"model": "model", "model_hash": "weights", "model_parts": "tokenizers or configurations"}

_CHANGING = [option for option in RUN_OPTIONS if option.column and option.changes in ("edits", "settings")]
# Columns of the settings in which runs differ that are not of one edited model.
SETTINGS = (*dict.fromkeys(option.column for option in _CHANGING), "edit_options", "answer_options")
# Columns that runs of one edited model share. Its benchmarks may be evaluated by several commands, whose seeds and
# edits are those of the benchmark.
EDITED_MODEL = (*MODEL, *(name for name in SETTINGS if name not in ("seed", "edits")), "context_editor")

_PLAIN = ("model", "editor", "edits", "data", "edit_options", "answer_options")
_FORMATS = {
    **{option.column: option.label for option in RUN_OPTIONS if option.label},
    **dict.fromkeys(_PLAIN, "{}"),
    "limit": "--limit {}",
    "samples": "--samples {}",
}
# Parts of labels, in this order: where any two runs differ; where runs of one name do; where labels would be equal.
_OF_ALL = (
    "model",
    *(one.column for one in _CHANGING if one.changes == "edits" and one.column not in ("editor", "edits")),
    "edit_options",
    "answer_options",
)
_OF_A_NAME = tuple(dict.fromkeys(one.column for one in _CHANGING if one.changes == "settings"))
_OF_EQUALS = ("editor", "model_parts", "edits", "data", "limit", "samples")
_NO_EDITS = ("none", "")  # modes
_NO_CONTEXT = ("no", "", "False")


class Difference(NamedTuple):
    """Results of one metric that cannot be compared.

    Attributes:
        place: the metric, as values of the columns that the rows were grouped by.
        condition: the column in which they differ.
        values: runs with their values, as texts; a run can have several, as under two protocols.
    """

    place: tuple[str, ...]
    condition: str
    values: tuple[tuple[str, str], ...]


def differences(
    rows: DataFrame, by: Sequence[str], conditions: Iterable[str], silent: Collection[str] = ()
) -> Iterator[Difference]:
    """The metrics whose rows differ in a condition, for each condition.

    Args:
        by: columns that name a metric.
        conditions: columns.
        silent: those of them about which rows without a value say nothing.
    """
    named = list(conditions)
    for place, group in rows.groupby(list(by), sort=False):
        for condition in named:
            known = group[~group[condition].map(is_missing)] if condition in silent else group
            pairs = zip(map(str, known["run"]), map(text_of, known[condition]), strict=True)
            values = tuple(dict.fromkeys(pairs))
            if len({value for _, value in values}) > 1:
                yield Difference(tuple(map(str, place)), condition, values)


def name_of(row: Mapping[str, object]) -> str:
    """The name of a run's editor: its label in the plan of a sweep, or its own."""
    return text_of(row.get("editor_label")) or text_of(row["editor"])


def has_context(icl: object) -> bool:
    """Whether a value of the column ``icl`` is an added context."""
    return text_of(icl) not in _NO_CONTEXT


def run_labels(rows: DataFrame, *, always: Sequence[str] = ()) -> dict[str, str]:
    """Run -> label: the name of its editor, with the settings in which the runs differ. No two are equal.

    Args:
        rows: of the runs that stand side by side.
        always: columns that every label has.
    """
    records = {str(row["run"]): row for row in rows.drop_duplicates("run").to_dict("records")}
    of_model = differing_parts(text_of(row["model_parts"]) for row in records.values())
    labels: dict[str, tuple[str, ...]] = {run: (name_of(row),) for run, row in records.items()}

    def add(runs: Sequence[str], column: str) -> None:
        own = [records[run] for run in runs]
        if column in always or _vary(own, column):
            for run in runs:
                row = records[run]
                part = of_model[text_of(row[column])] if column == "model_parts" else _part(column, row)
                labels[run] += (part,) if part else ()

    for column in _OF_ALL:
        add(list(labels), column)
    for same in _of_equal({run: label[:1] for run, label in labels.items()}):
        for column in _OF_A_NAME:
            add(same, column)
    for column in _OF_EQUALS:
        for same in _of_equal(labels):
            add(same, column)
    texts = {run: name + (f" ({', '.join(parts)})" if parts else "") for run, (name, *parts) in labels.items()}
    repeated = {run for same in _of_equal({run: (text,) for run, text in texts.items()}) for run in same}
    return {run: f"{text} [{run[:6]}]" if run in repeated else text for run, text in texts.items()}


def _of_equal(labels: Mapping[str, tuple[str, ...]]) -> list[list[str]]:
    """The runs of each label that several have."""
    runs: dict[tuple[str, ...], list[str]] = {}
    for run, label in labels.items():
        runs.setdefault(label, []).append(run)
    return [same for same in runs.values() if len(same) > 1]


def _vary(rows: Iterable[Mapping[str, object]], column: str) -> bool:
    """Whether the runs differ in a column; runs without edits do not count in the settings of edits."""
    is_of_edits = column in SETTINGS and column != "answer_options"
    return len({text_of(row[column]) for row in rows if not is_of_edits or row["mode"] not in _NO_EDITS}) > 1


def _part(column: str, row: Mapping[str, object]) -> str:
    """The value of a column in a label; "" if there is none."""
    text = text_of(row[column])
    if column == "icl":  # an editor's own name has its context
        text = "" if text in (*_NO_CONTEXT, "yes") and not text_of(row.get("editor_label")) else text
        return "" if text in _NO_CONTEXT else "icl" if text == "yes" else f"{text} only"
    if not text or (column == "mode" and text in _NO_EDITS):
        return ""
    return _FORMATS.get(column, f"{column} {{}}").format(text)


def shared_facts(rows: DataFrame) -> str:
    """The model, data and settings of edits that all rows share, which no label has; as a sentence, "" without any."""
    records = rows.to_dict("records")
    found = {name: {text_of(row[name]) for row in records} for name in ("model", "data")}
    facts = [f"{name} {next(iter(texts))}" for name, texts in found.items() if len(texts) == 1]
    edited = [row for row in records if row["mode"] not in _NO_EDITS]
    parts = [{_part(name, row) for row in edited} for name in _OF_ALL[1:]]
    edits = ", ".join(text for texts in parts if len(texts) == 1 for text in texts if text)
    facts += [f"edits: {edits}"] if edits else []
    return f"All runs: {'; '.join(facts)}." if facts else ""
