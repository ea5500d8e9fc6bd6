"""The same row at several dates: its numbers, and what changed after each of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from edit_hooks.utils.errors import EditingError, near_misses
from lm_edit.results.comparing import SAME_CASES, SAME_SCORE, run_labels
from lm_edit.results.files.runs import Paths, ResultFile, read_result_files
from lm_edit.results.filters import filter_rows, is_missing, text_of
from lm_edit.results.schema import RESULT_COLUMNS
from lm_edit.results.show import Comparison
from lm_edit.results.tables import make_frame, result_rows

# What a row keeps over time. Everything else that may move its number is a change.
ROW = (
    "task", "metric", "stage", "filter", "model", "editor", "editor_label", "mode", "num_edits", "edit_batch_size",
    "group_size", "icl", "seed", "data",
)  # fmt: skip
# Columns that may change, with their names for readers.
CHANGES = {
    **{name: words for name, words in (SAME_SCORE | SAME_CASES).items() if name != "data"},
    "model_hash": "weights",
    "model_parts": "parts of the model",
    "edit_options": "options of the edits",
    "answer_options": "options of the answers",
    "edits_hash": "set of edits",
}
DIGITS = 12  # of a digest that are shown
MAX_NAMED = 4  # changes that a cell names
BASE = "base_settings"
SAME = "a run of the same settings and versions"


class DatedRow(NamedTuple):
    """A row in one file.

    Attributes:
        facts: name -> text of everything that may change.
        recorded: what the file has about the run.
        settings: of the task, as the file has them.
    """

    row: Mapping[str, Any]
    facts: Mapping[str, str]
    recorded: Mapping[str, Any]
    settings: Mapping[str, Any]


def history(paths: Paths, metrics: Sequence[str] = (), only: Sequence[str] = ()) -> Comparison:
    """One table of the rows that several files have, oldest first.

    A file counts as long as it is there, also where a newer one replaces its results in other tables.

    Args:
        metrics: only these, each with or without its stage; none: the first one of each task.

    Raises:
        EditingError: as ``load_results``; for an unknown metric; and if every row is in one file only.
    """
    read = _read(paths, metrics, only)
    groups, files = read.groups, read.files
    several = [group for group in groups if len(group) > 1]
    if not several:
        raise EditingError(
            f"{len(read.frame)} results, each of one date: a history needs files of the same task, model, editor and "
            "mode; --installed compares each with what is installed."
        )
    labels = run_labels(read.frame)
    table = [["task", "metric", "run", "date", "value", "cases", "made stale by"]]
    for group in several:
        entries = [_dated(row, files) for row in group.to_dict("records")]
        table += _rows_of(entries, labels)
    notes = [f"{len(groups) - len(several)} further rows have one date only."] if len(groups) > len(several) else []
    return Comparison(table, [*notes, *_installed(files.values())])


def newest_rows(
    paths: Paths, metrics: Sequence[str] = (), only: Sequence[str] = ()
) -> tuple[list[DatedRow], dict[str, str]]:
    """The newest result of each row, and a label for every run; for arguments and errors see :func:`history`."""
    read = _read(paths, metrics, only)
    newest = [_dated(group.to_dict("records")[-1], read.files) for group in read.groups]
    return newest, run_labels(read.frame)


class _Read(NamedTuple):
    """Files by path, the chosen results, and those of each row, oldest first, without copies."""

    files: dict[str, ResultFile]
    frame: pd.DataFrame
    groups: list[pd.DataFrame]


def _read(paths: Paths, metrics: Sequence[str], only: Sequence[str]) -> _Read:
    files = {str(file.path): file for file in read_result_files(paths)}
    frame = filter_rows(_frame([row for file in files.values() for row in result_rows(file)]), only)
    frame = frame.assign(shown=[f"{one.metric}@{one.stage}" if one.stage else one.metric for one in frame.itertuples()])
    frame = _chosen(frame, metrics)
    groups = frame.groupby([frame[name].map(text_of) for name in ROW], sort=False)
    # A copy of a file is no further date.
    kept = [group.drop_duplicates(["run", "date", "value"]) for _, group in groups]
    return _Read(files, frame, [group.sort_values(["date", "file"], kind="stable") for group in kept])


def _dated(row: Mapping[str, Any], files: Mapping[str, ResultFile]) -> DatedRow:
    file = files[row["file"]]
    task = (file.content.get("configs") or {}).get(row["task"]) or {}
    own = file.content["config"].get("edited_hf") or {}
    return DatedRow(row, _facts(row, file), own, task.get("metadata") or {})


def _frame(rows: list[dict[str, Any]]) -> pd.DataFrame:
    return make_frame(rows, RESULT_COLUMNS)


def _chosen(frame: pd.DataFrame, metrics: Sequence[str]) -> pd.DataFrame:
    if not metrics:
        final = frame[frame["stage"] == ""]
        first = final.groupby("task", sort=False)["metric"].transform("first")
        return final[final["metric"] == first]
    known = {*frame["metric"], *frame["shown"]}
    for name in metrics:
        if name not in known:
            raise EditingError(f"no run has a metric named {name!r}.{near_misses(name, known)}")
    return frame[frame["shown"].isin(metrics) | (frame["metric"].isin(metrics) & (frame["stage"] == ""))]


def _rows_of(entries: Sequence[DatedRow], labels: Mapping[str, str]) -> Iterator[list[str]]:
    before = None
    for number, entry in enumerate(entries):
        row = entry.row
        later = entries[number + 1 :]
        stale = describe_changes(entry.facts, later[0].facts) if later else "newest"
        value = "unscored" if is_missing(row["value"]) else f"{row['value']:.3f}"
        if before is not None and not is_missing(row["value"]):
            value += f" ({row['value'] - before:+.3f})"
        before = before if is_missing(row["value"]) else row["value"]
        cases = "" if is_missing(row["n"]) else f"{row['n']:g}"
        yield [row["task"], row["shown"], labels[row["run"]], row["date"], value, cases, stale]


def _facts(row: Mapping[str, Any], file: ResultFile) -> dict[str, str]:
    """Everything about a result that may have changed since, as texts."""
    own = file.content["config"].get("edited_hf") or {}
    versions = own.get("versions") or {}
    facts = {words: text_of(row[name]) for name, words in CHANGES.items()}
    facts |= {f"version of {name}": str(version) for name, version in versions.items()}
    for name in ("lm_eval_version", "transformers_version"):
        facts.setdefault(
            f"version of {name.removesuffix('_version').replace('_', '-')}", text_of(file.content.get(name))
        )
    facts["code of the package"] = text_of(own.get("code_fingerprint"))
    origin = own.get("settings_origin")
    shipped = origin.get("shipped") if isinstance(origin, Mapping) else None
    facts |= {f"settings file {name}": "shipped" for name in shipped or ()}
    config = row["editor_config"] if isinstance(row["editor_config"], Mapping) else {}
    settings = {f"setting {name}": str(value) for name, value in config.items() if name not in ("seed", BASE)}
    return facts | settings | {f"setting {BASE}.{name}": str(value) for name, value in base_settings(config).items()}


def base_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of the editor whose updates another one changes; empty if there is none."""
    found = config.get(BASE)
    return found if isinstance(found, Mapping) else {}


def describe_changes(older: Mapping[str, str], newer: Mapping[str, str], none: str = SAME) -> str:
    """What differs between two results of a row; facts that one of them has not recorded do not count.

    Args:
        none: the text if nothing differs.
    """
    found = [
        _change(name, older[name], newer[name])
        for name in older
        if name in newer
        and older[name] != newer[name]
        and ((older[name] and newer[name]) or name in SAME_CASES.values())
    ]
    for one, word in ((older, "no longer"), (newer, "now")):
        other = newer if one is older else older
        found += [f"{word} {name}" for name in one if name.startswith("setting ") and name not in other]
    more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
    return "; ".join(found[:MAX_NAMED]) + more if found else none


def _change(name: str, older: str, newer: str) -> str:
    """A change in words; long texts, as protocols, begin alike and are not shown."""
    before, after = _short(older), _short(newer)
    return f"{name} changed" if before == after else f"{name} {before} to {after}"


def _short(text: str) -> str:
    return (f"{text[:DIGITS]}..." if len(text) > 3 * DIGITS else text) or "none"


def _installed(files: Any) -> Iterator[str]:
    """A sentence if the newest file is of another version of this package than the installed one."""
    from importlib.metadata import PackageNotFoundError, version

    newest = max(files, key=lambda file: (file.date, file.path.name))
    saved = ((newest.content["config"].get("edited_hf") or {}).get("versions") or {}).get("lm-eval-editing")
    try:
        installed = version("lm-eval-editing")
    except PackageNotFoundError:
        return
    if saved and saved != installed:
        yield f"The newest file is of lm-eval-editing {saved}; {installed} is installed."
