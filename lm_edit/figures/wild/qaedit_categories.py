"""Categories and origins of QAEdit's questions."""

from __future__ import annotations

from collections import Counter

from lm_edit.figures.drawing.tables import Table
from lm_edit.figures.needs import DATA, Needs, Options
from lm_edit.figures.spec import FigureSpec
from lm_eval_tasks.common.records.benchmark import find_benchmark
from lm_eval_tasks.common.scoring.breakdown import CATEGORY

NEEDS = Needs(
    "qaedit_categories",
    "records of QAEdit with a category (--data): the embedded sample, or your file; published records get one by "
    "lm-edit build-qaedit --categories-only",
    "lm-edit figure qaedit_categories --data mini -o categories.md",
    DATA,
)


def draw(options: Options) -> Table:
    """A row per category: number and share of the records, and their numbers by origin."""
    benchmark = find_benchmark("qaedit")
    loaded = benchmark.load({"data": options.origin})
    cases = loaded.records
    counts = Counter(str(case.extras[CATEGORY]) for case in cases if case.extras.get(CATEGORY))
    if not counts:
        raise NEEDS.missing(f"no record of data={options.origin} has a category")
    origins = sorted({str(case.extras.get("origin") or "unknown") for case in cases})
    by_origin = Counter((str(case.extras.get(CATEGORY)), str(case.extras.get("origin") or "unknown")) for case in cases)
    rows: list[list[str | int | float]] = [
        [name, count, f"{count / len(cases):.1%}", *(by_origin[name, origin] for origin in origins)]
        for name, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    ]
    without = len(cases) - sum(counts.values())
    notes = [f"{without} records have no category."] if without else []
    header = ["category", "records", "share", *origins]
    title = f"Categories of {benchmark.source.title} ({loaded.source['data']}), {len(cases)} records"
    return Table(name=NEEDS.figure, title=title, header=header, rows=rows, notes=notes)


SPEC = FigureSpec(
    name=NEEDS.figure,
    title="table: records of QAEdit by category and origin",
    published="WILD table 10",
    needs=NEEDS,
    draw=lambda inputs, options: draw(options),
    is_table=True,
)
