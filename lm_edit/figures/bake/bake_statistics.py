"""Sizes of the BAKE data sets."""

from __future__ import annotations

from collections.abc import Sequence

from lm_edit.figures.drawing.tables import Table
from lm_edit.figures.needs import DATA, Needs, Options
from lm_edit.figures.spec import FigureSpec
from lm_eval_tasks.bake.benchmark import BAKE_J, BAKE_QJ, BakeCase

SETS = (BAKE_QJ, BAKE_J)

NEEDS = Needs(
    "bake_statistics", "the records of BAKE (--data)", "lm-edit figure bake_statistics --data hub -o bake.md", DATA
)


def draw(options: Options) -> Table:
    """Numbers of edits, relations and prompts, a column per data set."""
    columns = [benchmark.load({"data": options.origin}) for benchmark in SETS]
    names = [f"{one.source.title} ({loaded.source['data']})" for one, loaded in zip(SETS, columns, strict=True)]
    counted = [_counts(loaded.records) for loaded in columns]
    rows: list[list[str | int | float]] = [[name, *(counts[name] for counts in counted)] for name in counted[0]]
    without = [str(title) for title, counts in zip(names, counted, strict=True) if counts["relations"] == NONE]
    notes = [f"No relation ids in the records of {', '.join(without)}."] if without else []
    return Table(name=NEEDS.figure, title="Sizes of BAKE", header=["", *names], rows=rows, notes=notes)


NONE = "-"


def _counts(cases: Sequence[BakeCase]) -> dict[str, int | str]:
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
    is_table=True,
)
