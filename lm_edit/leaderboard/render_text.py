"""The leaderboard as Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Sequence

from lm_edit.leaderboard.board import Board, Cell, Row, Section
from lm_edit.leaderboard.columns import Column
from lm_edit.leaderboard.published import PublishedRow
from lm_edit.leaderboard.significance import Comparison, Ranking
from lm_edit.results.markdown import escape_cell
from lm_edit.results.statistics.intervals import Interval

GENERATOR = "written by lm-edit leaderboard"  # in every file, which the next call may then replace
NO_NUMBER = "-"
CSV_HEADER = (
    "section",
    "model",
    "editor",
    "mode",
    "origin",
    "task",
    "metric",
    "stage",
    "filter",
    "value",
    "low",
    "high",
    "scored",
    "cases",
    "left_out",
    "rank",
    "p_unedited",
    "p_best",
    "test_unedited",
    "test_best",
    "runs",
    "or_0",
    "by_seed",
    "interval",
)
# Characters that LaTeX reads as commands, and the marks of the tests.
LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "†": r"$^{\dagger}$",
    "‡": r"$^{\ddagger}$",
    "±": r"$\pm$",
}
_FORMULA = re.compile(r"^[=+\-@\t\r]")


def format_value(value: float) -> str:
    """Three decimals; one from 100 on, as for perplexities and entropies."""
    if math.isnan(value):
        return NO_NUMBER
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.1f}"


def format_interval(interval: Interval) -> str:
    """The ends in brackets, after ~ if they are those of the normal approximation."""
    return f"{interval.mark}[{format_value(interval.low)}, {format_value(interval.high)}]"


def render_markdown(board: Board, columns: Sequence[Column], published: Sequence[PublishedRow]) -> str:
    """One table per section, the mean ranks below, and how everything is computed."""
    parts = ["# Leaderboard", ""]
    for section in board.sections:
        parts += [f"## {escape_cell(section.title)}", ""]
        evaluated = section.evaluated(columns)
        header = ["editor", *(escape_cell(column.key.name) for column in evaluated), *_cost_header(section)]
        parts += _markdown_table(header, _markdown_rows(section, evaluated))
        parts += [
            "",
            escape_cell(_ranks(section.ranking)) if section.ranking else "",
            escape_cell(section.ranking_note),
            "",
            *([escape_cell(section.coverage_note), ""] if section.coverage_note else []),
        ]
    if published:
        parts += [
            "## Published in papers",
            "",
            "Not computed here; `agreement` tells how close the definitions are.",
            "",
        ]
        header = ["model", "editor", "edits", "source", *(escape_cell(column.key.name) for column in columns)]
        parts += [
            *_markdown_table(
                header, [[escape_cell(cell) for cell in _published_cells(row, columns)] for row in published]
            ),
            "",
        ]
    parts += ["## How to read this", "", *(f"- {sentence}" for sentence in board.methods)]
    parts += [f"- `{column.key.name}`: {escape_cell(describe_column(column))}" for column in columns]
    return "\n".join(parts) + "\n"


def _markdown_rows(section: Section, columns: Sequence[Column]) -> Iterable[list[str]]:
    for row in section.rows:
        cells = [_markdown_cell(row.cells.get(column.key)) for column in columns]
        yield [escape_cell(row.label), *cells, *_cost_cells(section, row)]


def format_minutes(value: float) -> str:
    """Two decimals below ten, as for small models; no exponents."""
    return "<0.01" if value < 0.01 else f"{value:.2f}" if value < 10 else f"{value:.0f}"


def _cost_header(section: Section) -> list[str]:
    """The columns of cost that a row of the section has."""
    costs = [row.cost for row in section.rows]
    has_seconds, has_peak = (any(cost[part] is not None for cost in costs) for part in range(2))
    return ["minutes"] * has_seconds + ["GiB"] * has_peak


def _cost_cells(section: Section, row: Row) -> list[str]:
    texts = {
        "minutes": "" if row.cost.seconds is None else format_minutes(row.cost.seconds / 60),
        "GiB": "" if row.cost.peak_gib is None else f"{row.cost.peak_gib:.1f}",
    }
    return [texts[name] for name in _cost_header(section)]


def _markdown_cell(cell: Cell | None) -> str:
    if cell is None:
        return ""
    value = format_value(cell.value)
    text = f"**{value}**" if cell.is_best else value
    interval = f" {format_interval(cell.interval)}" if cell.interval else ""
    return f"{text}{cell.marks}{interval}" + (f" ({cell.counts})" if cell.counts else "")


def _markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Escaped cells as a table."""
    lines = ["| " + " | ".join(header) + " |", "|---|" + "---:|" * (len(header) - 1)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def _published_cells(row: PublishedRow, columns: Sequence[Column]) -> list[str]:
    cells = []
    for column in columns:
        value = row.values.get((column.key.task, column.key.metric)) if not column.key.stage else None
        cells.append("" if value is None else f"{format_value(value.value)} ({value.agreement})")
    return [row.model, row.editor, row.regime, row.source, *cells]


def _ranks(ranking: Ranking) -> str:
    names = ", ".join(f"{name} {rank:.2f}" for name, rank in zip(ranking.names, ranking.mean_ranks, strict=True))
    return (
        f"Mean ranks: {names}. Friedman p = {ranking.p:.3g} over {ranking.num_blocks} benchmarks; critical difference "
        f"{ranking.critical_difference:.2f} (Nemenyi, 0.05)."
    )


def describe_column(column: Column) -> str:
    """Measure, data, judge and direction of a column, in words."""
    identity = column.identity
    better = {True: "higher is better", False: "lower is better", None: "no direction"}[column.higher_is_better]
    data = " ".join(filter(None, (identity["data"], identity["data_revision"], identity["data_hash"][:12])))
    facts = {
        "settings of the task": identity["protocol"],
        "population": identity["population"],
        "judge": identity["judge"],
        "data": data,
        "task version": identity["task_version"],
        "cases": identity["cases"],
        "edits": identity.get("edits", ""),
        "chance": "" if column.chance is None else format_value(column.chance),
    }
    return "; ".join([better, *(f"{name}: {text}" for name, text in facts.items() if text)])


def render_csv(board: Board, published: Sequence[PublishedRow]) -> str:
    """All columns, one line per number; texts that a spreadsheet would compute begin with an apostrophe."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(CSV_HEADER)
    for section in board.sections:
        for row in section.rows:
            for key, cell in row.cells.items():
                writer.writerow(map(_spreadsheet, [section.title, *_csv_cells(row, cell, key)]))
    for printed in published:
        for (task, metric), value in printed.values.items():
            line = [printed.source, printed.model, printed.editor, printed.regime, f"published ({value.agreement})"]
            line += [task, metric, "", "", repr(value.value)]
            writer.writerow(map(_spreadsheet, line + [""] * (len(CSV_HEADER) - len(line))))
    return file.getvalue()


def _csv_cells(row: Row, cell: Cell, key: Sequence[str]) -> list[str]:
    low, high = (repr(cell.interval.low), repr(cell.interval.high)) if cell.interval else ("", "")
    left_out = "; ".join(f"{reason}: {number}" for reason, number in cell.left_out.items())
    return [
        row.key["model"],
        row.label,
        row.key["mode"],
        row.settings_origin,
        *key,
        "" if math.isnan(cell.value) else repr(cell.value),
        low,
        high,
        str(cell.num_scored) if cell.counts else "",
        str(cell.num_cases) if cell.counts else "",
        left_out,
        "" if cell.rank is None else str(cell.rank),
        _p_value(cell.versus_unedited),
        _p_value(cell.versus_best),
        cell.versus_unedited.test if cell.versus_unedited else "",
        cell.versus_best.test if cell.versus_best else "",
        " ".join(row.run_ids),
        "" if math.isnan(cell.or_0) else repr(cell.or_0),
        " ".join(f"{seed}:{value!r}" for seed, value in cell.by_seed.items()),
        cell.interval.method if cell.interval else "",
    ]


def _p_value(comparison: Comparison | None) -> str:
    return "" if comparison is None else repr(comparison.p)


def _spreadsheet(text: str) -> str:
    is_number = re.fullmatch(r"-?[\d.]+(e-?\d+)?", text) is not None
    return f"'{text}" if _FORMULA.match(text) and not is_number else text


def render_latex(board: Board, columns: Sequence[Column], published: Sequence[PublishedRow]) -> str:
    """A ``booktabs`` table per section, with the marks of the tests and the interval in small print."""
    parts = [r"% Needs \usepackage{booktabs}."]
    for section in board.sections:
        evaluated = section.evaluated(columns)
        rows = [
            [
                _latex(row.label),
                *(_latex_cell(row.cells.get(column.key)) for column in evaluated),
                *_cost_cells(section, row),
            ]
            for row in section.rows
        ]
        if section.coverage_note:
            parts.append(f"% {_flat(section.coverage_note)}")
        header = ["Editor", *(column.key.name for column in evaluated), *_cost_header(section)]
        parts += _latex_table(section.title, header, rows)
    if published:
        header = ["Model", "Editor", "Edits", "Source", *(column.key.name for column in columns)]
        rows = [[_latex(cell) for cell in _published_cells(row, columns)] for row in published]
        parts += _latex_table("Published in papers", header, rows)
    parts += [f"% {_flat(sentence)}" for sentence in board.methods]
    return "\n".join(parts) + "\n"


def _latex_table(caption: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [r"\begin{table}", rf"\caption{{{_latex(caption)}}}", rf"\begin{{tabular}}{{l{'r' * (len(header) - 1)}}}"]
    lines += [r"\toprule", " & ".join(map(_latex, header)) + r" \\", r"\midrule"]
    lines += [" & ".join(row) + r" \\" for row in rows]
    return [*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"]


def _latex_cell(cell: Cell | None) -> str:
    if cell is None:
        return ""
    value = rf"\textbf{{{format_value(cell.value)}}}" if cell.is_best else _latex(format_value(cell.value))
    partly = f"({cell.counts})" if cell.num_scored < (cell.num_cases or 0) else ""  # complete ones need no count
    small = " ".join(filter(None, (format_interval(cell.interval) if cell.interval else "", partly)))
    return value + _latex(cell.marks) + (rf" {{\scriptsize {_latex(small)}}}" if small else "")


def _latex(text: str) -> str:
    return "".join(LATEX.get(character, character) for character in _flat(text))


def _flat(text: str) -> str:
    return re.sub(r"\s+", " ", text)
