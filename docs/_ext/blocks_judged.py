"""The block of the study of metrics: how well each column tells facts that were trained in from edited ones.

``docs/_data/metrics_judged`` has a file per editor, which ``lm-edit results separate --out`` wrote from runs of the
plan ``metrics_judged``.
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


JUDGED_BLOCKS: dict[str, Callable[[str], Block]] = {"metrics-judged": metrics_judged}
