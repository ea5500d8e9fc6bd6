"""The runs of a plan that ``--only`` chooses: by the fields that results have, or by a text in their names."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from edit_hooks.run_options import RUN_OPTIONS
from edit_hooks.utils.errors import EditingError, near_misses
from lm_edit.results.filters import LABELS, accepted_values, read_conditions, text_of, unknown_field, unknown_value
from lm_edit.sweeps.planning.grid import RULES, Grid, OmittedRun, Run

Fields: TypeAlias = dict[str, set[str]]  # field -> its values

_CONDITION = re.compile(r"\w+=")
_NAMED_RUNS = 3  # that an error lists


def select_runs(grid: Grid, texts: Sequence[str], plan: str) -> list[Run]:
    """The runs that satisfy the texts of ``--only``: conditions ``FIELD=VALUE[,VALUE]``, or parts of a run's name.

    Conditions on one field are alternatives, and so are parts of names. Some run has to have each value, unlike in
    results: a misspelled one would leave its run out of a long sweep.

    Args:
        plan: its name, for messages.

    Raises:
        EditingError: for unknown fields, values and parts of names, and when no run is left.
    """
    parts = [text for text in texts if not _CONDITION.match(text)]
    conditions = read_conditions([text for text in texts if _CONDITION.match(text)])
    runs = {run.name: fields_of(run) for run in grid.runs}
    chosen = set(runs)
    if runs and parts:
        chosen &= {name for part in parts for name in _named(part, runs, grid.left_out, plan)}
    for field, given in conditions.items() if runs else ():
        chosen &= _with_value(field, given, runs)
    if not chosen:
        wanted = f" with {' and '.join(texts)}" if texts else ""
        raise EditingError(f"{plan} has no run{wanted}.{_reasons(grid.left_out)}")
    return [run for run in grid.runs if run.name in chosen]


def _reasons(left_out: Sequence[OmittedRun]) -> str:
    """Why runs are missing, as a sentence; "" if none is."""
    rules = "; ".join(f"{item.name}: {RULES[item.rule]}" for item in left_out[:_NAMED_RUNS])
    return f" Left out: {rules}." if rules else ""


def _named(part: str, names: Collection[str], left_out: Sequence[OmittedRun], plan: str) -> set[str]:
    """The names with a text in them."""
    if not (found := {name for name in names if part in name}):
        words = dict.fromkeys(word for name in names for word in name.split(", "))
        some = "; ".join(list(names)[:_NAMED_RUNS])
        raise EditingError(
            f"--only {part!r}: {plan} has no run with this text in its name, as in {some}.{near_misses(part, words)}"
            f"{_reasons([item for item in left_out if part in item.name])}"
        )
    return found


def _with_value(field: str, given: Sequence[str], runs: Mapping[str, Fields]) -> set[str]:
    """The names of the runs with one of the values in a field; ``""`` is the value of a run without the field."""
    fields = dict.fromkeys(one for own in runs.values() for one in own)
    if field not in fields:
        raise unknown_field(field, list(fields), "runs")
    known = {value for own in runs.values() for value in own.get(field, {""})}
    accepted = accepted_values(given, known)
    if unknown := accepted - known:
        raise unknown_value(field, sorted(unknown), unknown, known, "run")
    return {name for name, own in runs.items() if accepted & own.get(field, {""})}


def fields_of(run: Run) -> Fields:
    """Field -> its values as texts: what the plan names, the options of the run, and settings of its tasks.

    An option that the plan does not give has its default; what has two names, as an editor with a label, has both.
    """
    options = {option.name: option.default for option in RUN_OPTIONS} | dict(run.metadata) | dict(run.model_args)
    fields = {name: _texts(value) for name, value in options.items()}
    pretrained = str(options.get("pretrained") or "")
    return {
        **fields,
        "name": {run.name},
        "model": {run.model, pretrained, Path(pretrained).name} - {""},
        "benchmark": {run.benchmark},
        "task": set(run.tasks),
        "limit": {text_of(run.limit)},
        "editor": {run.editor} if run.mode == "none" else {run.editor, *fields["editor"]},
        **{name: {run.labels.get(name, "")} for name in LABELS.values()},
        "mode": {run.mode, *fields["mode"]},
    }


def _texts(value: Any) -> set[str]:
    """An option as results have it, and as a plan does: a switch is ``yes`` or ``no`` in columns."""
    if isinstance(value, bool):
        return {"yes", "true"} if value else {"no", "false"}
    if isinstance(value, (list, tuple, dict)):
        return {json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)}
    return {text_of(value)}
