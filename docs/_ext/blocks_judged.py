"""The blocks of two studies of metrics: columns that tell trained facts from edited ones, or follow a regularizer.

``docs/_data/metrics_judged`` and ``docs/_data/locality_judged`` have a file per editor, from ``lm-edit results separate
--out`` and runs of the plans of these names.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

from block import ROOT, Block, table, unique

JUDGED = ROOT / "docs/_data/metrics_judged"
# Editors of the plan, in the order of the columns.
ORDER = ("ft_m", "r_rome", "grace", "two_way", "memit")


@functools.cache
def kept_separations() -> dict[str, dict[str, Any]]:
    """Editor -> its file: document training first, the editor second."""
    paths = {name: JUDGED / f"{name}.json" for name in ORDER}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.is_file()}


def columns_of(kept: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Name of a column -> its numbers, without columns of the unedited model."""
    return unique(
        (f"{one['metric']}@{one['stage']}" if one["stage"] else one["metric"], one)
        for one in kept["columns"]
        if not one["unedited"]
    )


def areas() -> dict[str, dict[str, dict[str, Any]]]:
    """Column -> editor -> numbers; the column whose weakest separation is strongest first."""
    by_editor = {editor: columns_of(kept) for editor, kept in kept_separations().items()}
    first = next(iter(by_editor.values()))
    found = {name: {editor: own[name] for editor, own in by_editor.items() if name in own} for name in first}
    return dict(sorted(found.items(), key=lambda item: -min(map(_strength, item[1].values()))))


def _strength(one: dict[str, Any]) -> float:
    return 0.0 if one["auc"] is None else abs(one["auc"] - 0.5)


def metrics_judged(_: str) -> Block:
    """A row per column that separates document training from some editor; the others below the table."""
    kept = kept_separations()
    heads = ["column", "trained in", *(head for editor in kept for head in (f"`{editor}`", "AUC"))]
    lines, others = [], []
    for name, own in areas().items():
        if not any(one["separates"] for one in own.values()):
            others.append(name)
            continue
        cells = [_mean(next(iter(own.values()))["first"])]
        for editor in kept:
            cells += [_mean(own[editor]["second"]), _area(own[editor])] if editor in own else ["-", "-"]
        lines.append([f"`{name}`", *cells])
    facts = "; ".join(
        f"`{editor}` {one['second']['compared']} of {one['second']['facts']}" for editor, one in kept.items()
    )
    first = next(iter(kept.values()))["first"]
    notes = [
        f"Facts that are compared: trained in {first['compared']} of {first['facts']}; {facts}. "
        "In bold: the interval is without 0.5.",
        f"Columns that separate from no editor ({len(others)}): {', '.join(f'`{name}`' for name in others)}.",
    ]
    return Block("\n\n".join([table(heads, lines), *notes]))


def _mean(side: dict[str, Any]) -> str:
    unscored = sum(side["unscored"].values())
    text = "-" if side["mean"] is None else f"{side['mean']:.2f}"
    return f"{text} ({side['facts']}, {unscored} unscored)" if unscored else text


def _area(one: dict[str, Any]) -> str:
    if one["auc"] is None:
        return "-"
    text = "{:.2f} ({:.2f}-{:.2f})".format(one["auc"], *one["interval"])
    return f"**{text}**" if one["separates"] else text


LOCALITY = ROOT / "docs/_data/locality_judged"
REGULARIZERS = {
    "ft_l": "`norm_constraint` 1e-3, 2.5e-4",
    "r_rome": "`clamp_factor` 3, 0.75",
    "memit": "`moment_weight` 250, 4000",
    "two_way": "`locality_weight` 0, 10",
}
LOCALITY_COLUMNS = (
    "neighborhood_prob",
    "neighborhood_argmax",
    "neighborhood_agree_tf",
    "neighborhood_overlap",
    "neighborhood_within_10",
    "neighborhood_within_1",
)


@functools.cache
def kept_regularized() -> dict[str, dict[str, dict[str, Any]]]:
    """Editor -> column -> numbers; the strong regularizer first, the weak one second."""
    files = {name: json.loads((LOCALITY / f"{name}.json").read_text(encoding="utf-8")) for name in REGULARIZERS}
    return {name: columns_of(kept) for name, kept in files.items()}


def moved(one: dict[str, Any]) -> tuple[int, int]:
    """Numbers of facts whose score is higher, and lower, with the strong regularizer."""
    pairs = list(zip(one["first"]["scores"], one["second"]["scores"], strict=True))
    return sum(strong > weak for strong, weak in pairs), sum(strong < weak for strong, weak in pairs)


def locality_judged(_: str) -> Block:
    """A row per locality column: its means, weak and strong regularizer, and in how many facts it rose and fell."""
    kept = kept_regularized()
    heads = ["column", *(f"`{editor}`, {text}" for editor, text in REGULARIZERS.items())]
    lines = [[f"`{name}`", *(_step(columns[name]) for columns in kept.values())] for name in LOCALITY_COLUMNS]
    return Block(table(heads, lines))


def _step(one: dict[str, Any]) -> str:
    up, down = moved(one)
    return f"{one['second']['mean']:.3f} to {one['first']['mean']:.3f} ({up} up, {down} down)"


JUDGED_BLOCKS: dict[str, Callable[[str], Block]] = {
    "metrics-judged": metrics_judged,
    "locality-judged": locality_judged,
}
