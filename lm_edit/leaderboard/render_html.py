"""The leaderboard as one HTML page, which works from a file and loads nothing.

Everything that comes from results is in a block of JSON, from which the script makes text nodes: no answer of a model
is ever parsed as HTML. The page's content security policy allows this one script and this one style sheet, by hash.

The script is our own, without a library: the tables need sorting, hiding of columns and sections with a common header,
which takes less code than the configuration of a table library. Cases are compressed, and unpacked by the browser.
"""

from __future__ import annotations

import base64
import hashlib
import html
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from edit_hooks.utils.storage.files import packaged_file, read_text
from lm_edit.leaderboard.board import Board, Cell, Row
from lm_edit.leaderboard.cases import Cases, Json, plain, to_json
from lm_edit.leaderboard.columns import Column, ColumnKey
from lm_edit.leaderboard.published import PublishedRow
from lm_edit.leaderboard.render_text import GENERATOR, LATEX, describe_column
from lm_edit.leaderboard.significance import ALPHA, Comparison, Ranking
from lm_edit.results.comparing import EDITED_MODEL
from lm_edit.results.filters import text_of

MAX_MEGABYTES = 25  # of the page
PARTS = "cases"  # folder beside a page that cannot hold all cases


class Page(NamedTuple):
    """A page.

    Attributes:
        text: HTML.
        note: a sentence about cases that are not in it; empty if it has all.
        parts: name -> text of the files beside it with all cases; none if it has all.
    """

    text: str
    note: str
    parts: dict[str, str]


class EditorKind(NamedTuple):
    """What the page filters editors by.

    Attributes:
        tier: ``core``, ``more`` or ``installed``.
        writes: parts that its edits change: ``weights``, ``hooks``, ``context``.
    """

    tier: str
    writes: tuple[str, ...]


EDITOR_CONFIG = "editor_config"
COST = "cost"  # benchmark of the columns without cases
COSTS: tuple[dict[str, Json], ...] = tuple(
    {
        "name": f"cost {name}",
        "task": "",
        "metric": name,
        "score": "",
        "benchmark": COST,
        "higher": False,
        "shown": False,
        "group": False,
        "about": about,
    }
    for name, about in (
        ("seconds per edit", "seconds that making the edits took, by their number; neither ranked nor tested"),
        ("peak GiB", "most memory while an edit was made; neither ranked nor tested"),
        (
            "seconds per case",
            "seconds of the evaluation, loading and edits included, by its number of cases; neither ranked nor tested",
        ),
        ("size of the update", "norm of the update, relative to the weights it changes; neither ranked nor tested"),
    )
)
# Room for the sentence about cases that are left out.
NOTE_BYTES = 1000
# Parts of the script; the last one starts the page.
SCRIPTS = (
    "basics.js",
    "filters.js",
    "tables.js",
    "ranks.js",
    "frontier.js",
    "streams.js",
    "pairs.js",
    "paper.js",
    "cases.js",
    "viewer.js",
    "page.js",
)


def render_html(
    board: Board,
    published: Sequence[PublishedRow],
    cases: Cases,
    title: str,
    max_bytes: int = MAX_MEGABYTES * 10**6,
    reload_seconds: int | None = None,
    kinds: Mapping[str, EditorKind] | None = None,
) -> Page:
    """The page.

    Cases are compressed. Beyond the size limit, all cases are in files beside the page, which it reads where a web
    server serves them, and the page itself has some of them; numbers are never left out.

    Args:
        reload_seconds: after which the page loads itself again, unless cases are looked at.
        kinds: of the editors that are installed here, by name; rows are filtered by them.
    """
    content = {**_board(board, published, title, kinds or {}), "reload": reload_seconds, "parts": {}}
    room = max_bytes - NOTE_BYTES
    values, step = cases.packed(room - len(_fill(title, content, {}).encode()))
    if step == 1:
        return Page(_fill(title, {**content, "thinned": ""}, values), "", {})
    files: dict[str, str] = {}
    places: dict[str, dict[str, Json]] = {}
    for task, run, text in cases.parts():
        # The name is the content's, so a page that is open and the files of a newer one do not mix.
        name = f"{PARTS}/{hashlib.sha256(text.encode()).hexdigest()[:20]}.txt"
        files[name] = text
        places.setdefault(task, {})[run] = name
    content["parts"] = dict(places)
    values, step = cases.packed(room - len(_fill(title, content, {}).encode()))
    note = _thinned(step, max_bytes)
    return Page(_fill(title, {**content, "thinned": note}, values), note, files)


def _thinned(step: int, max_bytes: int) -> str:
    limit = f"{max_bytes / 10**6:g} MB (--max-mb)"
    shown = f"the first of every {step} cases of each task" if step else "no single cases"
    return (
        f"Opened as a file, the page shows {shown}, to stay below {limit}. All cases are in the folder {PARTS} beside "
        "it, which it reads where a web server serves both, as with --serve. Numbers are over all cases."
    )


def _fill(title: str, board: dict[str, Json], cases: dict[str, Json]) -> str:
    page, style = _template("page.html"), _template("page.css")
    script = '"use strict";\n(() => {\n' + "\n".join(map(_template, SCRIPTS)) + "})();\n"
    parts = {
        "title": html.escape(title),
        "generator": GENERATOR,
        "connect": "connect-src 'self'; " if board["parts"] else "",
        "style_hash": _digest(style),
        "script_hash": _digest(script),
        "style": style,
        "script": script,
        "board": to_json(board),
        "cases": to_json(cases),
    }
    return re.sub(r"@@(\w+)@@", lambda marker: parts[marker[1]], page)


def _template(name: str) -> str:
    path = packaged_file("lm_edit", "leaderboard", "templates", name)
    if path is None:
        raise ValueError(f"lm_edit/leaderboard/templates/{name} is not installed")
    return read_text(path, "template")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _board(
    board: Board, published: Sequence[PublishedRow], title: str, kinds: Mapping[str, EditorKind]
) -> dict[str, Json]:
    numbers = {column.key: number for number, column in enumerate(board.columns)}
    every = [row for section in board.sections for row in section.rows]
    # Kept results lack some: a column without a number is none.
    known = [place for place in range(len(COSTS)) if any(_costs(row)[place] is not None for row in every)]
    by_names: dict[tuple[str, str], list[int]] = {}
    for column in board.columns:
        if not column.key.stage:
            by_names.setdefault((column.key.task, column.key.metric), []).append(numbers[column.key])
    return {
        "title": title,
        "latex": {**LATEX},
        "alpha": ALPHA,
        "methods": list(board.methods),
        "columns": [*(_column(column) for column in board.columns), *(COSTS[place] for place in known)],
        "sections": [
            {
                "title": section.title,
                "rows": [_row(row, numbers, known, kinds.get(row.key["editor"])) for row in section.rows],
                "ranking": _ranking(section.ranking),
                "note": section.ranking_note,
                "coverage": section.coverage_note,
                "pairs": {
                    str(numbers[key]): [[*pair[:-1], list(pair.test)] for pair in pairs]
                    for key, pairs in section.pairs.items()
                },
            }
            for section in board.sections
        ],
        "published": [
            {
                "source": row.source,
                "model": row.model,
                "editor": row.editor,
                "regime": row.regime,
                "cells": {
                    str(number): [value.value, value.agreement, value.column, value.differs]
                    for names, value in row.values.items()
                    for number in by_names[names]
                },
            }
            for row in published
        ],
    }


def _column(column: Column) -> Json:
    return {
        "name": column.key.name,
        "task": column.key.task,
        "metric": column.key.name.removeprefix(f"{column.key.task} "),
        "score": f"{column.key.metric}{f'@{column.key.stage}' if column.key.stage else ''},{column.key.filter}",
        "benchmark": column.benchmark,
        "higher": column.higher_is_better,
        "shown": column.is_default,
        "group": column.is_group,
        "about": describe_column(column),
    }


def _row(row: Row, numbers: dict[ColumnKey, int], known: Sequence[int], kind: EditorKind | None) -> Json:
    """A row; ``known`` are the places of the columns :data:`COSTS` that the page has."""
    costs = _costs(row)
    changes = [*(kind.writes if kind else ()), *(["context"] if row.key.acts_in_prompt else [])]
    return {
        "label": row.label,
        "reference": row.is_reference,
        "model": row.key["model"],
        # Equal names can be several models, as in two precisions, or one that answers under other options.
        "identity": [row.key[name] for name in ("model", "model_hash", "answer_options", "model_parts")],
        "regime": row.key.regime,
        "mode": row.key["mode"] or "as is",
        "changes": [*dict.fromkeys(changes)],
        "tier": kind.tier if kind else "",
        "origin": row.settings_origin,
        "settings": row.key["settings"],
        "facts": _facts(row),
        "seeds": [[seed, list(runs)] for seed, runs in row.runs.items()],
        "names": list(row.run_names),
        "cells": {str(numbers[key]): _cell(cell) for key, cell in row.cells.items()}
        | {
            str(len(numbers) + number): {"value": cost}
            for number, place in enumerate(known)
            if (cost := costs[place]) is not None
        },
    }


def _costs(row: Row) -> tuple[float | None, ...]:
    """The numbers of the columns :data:`COSTS`."""
    cost = row.cost
    return cost.seconds_per_edit, cost.peak_gib, cost.seconds_per_case, cost.update_norm_ratio


def _facts(row: Row) -> dict[str, Json]:
    """What identifies the edited model, and the editor's settings: what can differ between two rows."""
    facts: dict[str, Json] = {name: row.key[name] for name in EDITED_MODEL if row.key[name]}
    config = row.first[EDITOR_CONFIG]
    if isinstance(config, Mapping):
        facts |= {f"{EDITOR_CONFIG}: {name}": plain(value) for name, value in config.items()}
    return facts | {name: text for name in ("limit", "date") if (text := text_of(row.first[name]))}


def _cell(cell: Cell) -> Json:
    return {
        "value": _number(cell.value),
        "interval": list(cell.interval) if cell.interval else None,
        "n": cell.num_scored if cell.counts else None,
        "of": cell.num_cases if cell.counts else None,
        "left": {**cell.left_out},
        "note": cell.note,
        "seeds": [[seed, _number(value)] for seed, value in cell.by_seed.items()],
        "rank": cell.rank,
        "bold": cell.is_best,
        "or_0": _number(cell.or_0) if cell.left_out else None,
        "marks": cell.marks,
        "unedited": _test(cell.versus_unedited),
        "best": _test(cell.versus_best),
    }


def _number(value: float) -> Json:
    """JSON has no infinity, which is a text that JavaScript reads as a number, and no NaN."""
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return None if math.isnan(value) else value


def _test(comparison: Comparison | None) -> Json:
    return None if comparison is None else list(comparison)


def _ranking(ranking: Ranking | None) -> Json:
    if ranking is None:
        return None
    return {
        "names": list(ranking.names),
        "ranks": list(ranking.mean_ranks),
        "benchmarks": ranking.num_blocks,
        "p": ranking.p,
        "difference": ranking.critical_difference,
        "groups": [list(group) for group in ranking.groups],
    }
