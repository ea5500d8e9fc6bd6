"""Sizes of the BAKE data sets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lm_edit.figures.spec import DATA, FigureSpec, Needs, Options
from lm_edit.figures.tables import Table
from lm_eval_tasks.common.benchmark import find_benchmark

if TYPE_CHECKING:
    from lm_eval_tasks.common.dataset import Loaded

SETS = ("bake", "bake_j")

NEEDS = Needs(
    "bake_statistics", "the records of BAKE (--data)", "lm-edit figure bake_statistics --data hub -o bake.md", DATA
)


def draw(options: Options) -> Table:
    """Numbers of edits, relations and prompts, a column per data set."""
    columns = [find_benchmark(name).load({"data": options.data}) for name in SETS]
    names = [
        f"{find_benchmark(name).source.title} ({loaded.source['data']})"
        for name, loaded in zip(SETS, columns, strict=True)
    ]
    counted = [_counts(loaded) for loaded in columns]
    rows = [[name, *(counts[name] for counts in counted)] for name in counted[0]]
    without = [str(title) for title, counts in zip(names, counted, strict=True) if counts["relations"] == NONE]
    notes = [f"No relation ids in the records of {', '.join(without)}."] if without else []
    return Table(name=NEEDS.figure, title="Sizes of BAKE", header=["", *names], rows=rows, notes=notes)


NONE = "-"


def _counts(loaded: Loaded) -> dict[str, int | str]:
    cases: Sequence = loaded.records
    relations = {case.request.relation_id for case in cases} - {None}
    return {
        "edits": len(cases),
        "relations": len(relations) or NONE,
        "paraphrases": sum(len(case.paraphrases) for case in cases),
        "neighborhood prompts": sum(len(case.neighbors) for case in cases),
        "reverse questions": sum(case.reverse_qa is not None for case in cases) or NONE,
        "reverse judge questions": sum(case.reverse_judge is not None for case in cases),
    }


SPEC = FigureSpec(
    name=NEEDS.figure,
    title="table: edits, relations and prompts of BAKE",
    published="BAKE (TMLR) table 8",
    needs=NEEDS,
    draw=lambda inputs, options: draw(options),
)
