"""Chains of KnowGIC by their length."""

from __future__ import annotations

from lm_edit.figures.drawing.tables import Table
from lm_edit.figures.needs import DATA, Needs, Options
from lm_edit.figures.spec import FigureSpec
from lm_eval_tasks.common.records.benchmark import find_benchmark

PREFIX = "chains_of_"  # counts that the benchmark reports with its records

NEEDS = Needs(
    "knowgic_lengths", "the records of KnowGIC (--data)", "lm-edit figure knowgic_lengths --data hub -o chains.md", DATA
)


def draw(options: Options) -> Table:
    """A row per length: number and share of the chains."""
    benchmark = find_benchmark("knowgic")
    loaded = benchmark.load({"data": options.origin})
    counts = {int(name.removeprefix(PREFIX)): count for name, count in loaded.source.items() if name.startswith(PREFIX)}
    if not counts:
        raise NEEDS.missing(f"data={options.origin} has no chains")
    total = sum(counts.values())
    rows = [[length, count, f"{count / total:.1%}"] for length, count in sorted(counts.items())]
    return Table(
        name=NEEDS.figure,
        title=f"Chains of {benchmark.source.title} ({loaded.source['data']}), {len(loaded.records)} edits",
        header=["steps", "chains", "share"],
        rows=[*rows, ["all", total, "100.0%"]],
        notes=[f"Facts of the broader context: {loaded.source['context_facts']}."],
    )


SPEC = FigureSpec(
    name=NEEDS.figure,
    title="table: chains of KnowGIC by their length",
    published="ThinkEdit table 4",
    needs=NEEDS,
    draw=lambda inputs, options: draw(options),
    is_table=True,
)
